"""The platform: what a rank finds around it, real or rehearsed; nothing else knows of rehearsals.

Read `real` (clock, network, memory, disk and tasks of this machine), then `rehearsed` (one rank's, where the others do
not exist, on a clock of predicted time).
"""

from zeroshard.platform.real import REAL, Platform
from zeroshard.platform.rehearsed import Clock, Rehearsal

__all__ = ["REAL", "Clock", "Platform", "Rehearsal"]
