"""The engine composes the techniques along one training step.

Read `zeroshard.parts` (weights, gradients and updater of a flat buffer), then `engine`, `build` (the parts under a
plan), `techniques` (the techniques of a plan) and `forward`; the rest of a step is `zeroshard.step`.
"""

import torch._dynamo  # noqa: F401  (torch imports it with the first optimizer, and then with collections)

from zeroshard.engine.engine import Engine
from zeroshard.planning.tables import MemoryTable, TrafficTable
from zeroshard.step.sequence import StepResult
from zeroshard.step.trace import Trace

__all__ = ["Engine", "MemoryTable", "StepResult", "Trace", "TrafficTable"]
