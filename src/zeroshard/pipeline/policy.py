"""How a model is cut into stages."""

from collections.abc import Callable
from dataclasses import dataclass

from zeroshard.schedule import Loan, PipelineSchedule


@dataclass(frozen=True, slots=True)
class Policy:
    """The choices of one plan.

    Attributes:
        schedule: the lists over so many ranks, with these loans.
        stages: how many; 1 for a model that is not cut.
        chunks: of each stage.
        split: the layers with which the chunks after the first begin; chosen by `balance` if there are none.
        balance: what the chunks are balanced by: "time" or "parameters".
        units: names of the modules that are units.
        recomputes: each backward computes the forward of its chunk again.
        defers: the gradients of weights are computed after those of inputs.
    """

    schedule: Callable[[int, tuple[Loan, ...]], PipelineSchedule]
    stages: int = 1
    chunks: int = 1
    split: tuple[str, ...] = ()
    balance: str = "time"
    units: tuple[str, ...] | None = None
    recomputes: bool = False
    defers: bool = False
