"""Resilience of a run: its folder of checkpoints, a guard over the loss, and the detection of slow ranks.

Read `checkpoints` (save, keep, resume), `guard` (roll back where the loss is not finite or spikes), `straggler`.
"""

from zeroshard.resilience.checkpoints import Checkpoints, resume
from zeroshard.resilience.guard import Guard, GuardVerdict
from zeroshard.resilience.straggler import Straggler, Stragglers

__all__ = ["Checkpoints", "Guard", "GuardVerdict", "Straggler", "Stragglers", "resume"]
