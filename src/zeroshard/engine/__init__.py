"""The engine composes the techniques along one training step.

Read `zeroshard.parts` (what hangs on a flat buffer), then `engine`, `build` (which parts a plan makes), `forward`,
`backward`, `update`, and `accounts`. Steps are lists of actions: `one_stage`, and for several
`zeroshard.pipeline.steps`.
"""

from zeroshard.engine.engine import Engine
from zeroshard.engine.readings import Trace
from zeroshard.parts.steps import StepResult
from zeroshard.parts.tables import MemoryTable, TrafficTable

__all__ = ["Engine", "MemoryTable", "StepResult", "Trace", "TrafficTable"]
