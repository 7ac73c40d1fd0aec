"""The engine composes the techniques along one training step.

Read `engine`, then `assembly` (what hangs on a flat buffer), `forward`, `backward`, `update`, and `accounts`; for
models in stages `stage` (who has what), `pipelined`, and `executor` with its `wires` and `loans`.
"""

from zeroshard.engine.accounts import MemoryTable, TrafficTable
from zeroshard.engine.engine import Engine
from zeroshard.engine.judge import StepResult

__all__ = ["Engine", "MemoryTable", "StepResult", "TrafficTable"]
