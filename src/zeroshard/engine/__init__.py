"""The engine composes the techniques along one training step.

Read `zeroshard.parts` (what hangs on a flat buffer), then `engine`, `build` (which parts a plan makes), `forward`,
`backward`, `update`, and `readings`. Steps are lists of actions: `gradient_accumulation`, and for several
`zeroshard.pipeline.run.steps`.
"""

import torch._dynamo  # noqa: F401  (torch imports it with the first optimizer, and then with collections)

from zeroshard.engine.engine import Engine
from zeroshard.parts.tables import MemoryTable, TrafficTable
from zeroshard.step.sequence import StepResult
from zeroshard.step.trace import Trace

__all__ = ["Engine", "MemoryTable", "StepResult", "Trace", "TrafficTable"]
