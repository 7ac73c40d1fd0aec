"""What lets a run survive: its checkpoints, a guard over its loss, and a watch over slow ranks."""

from zeroshard.survive.checkpoints import Checkpoints, resume
from zeroshard.survive.guard import Guard, Verdict
from zeroshard.survive.straggler import Straggler, Stragglers

__all__ = ["Checkpoints", "Guard", "Straggler", "Stragglers", "Verdict", "resume"]
