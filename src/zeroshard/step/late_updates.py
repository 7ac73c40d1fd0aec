"""Updates that run beside the steps, so that weights come later than the end of `step`."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from zeroshard.memory.transfers import TaskSpan
from zeroshard.traffic import Count, Purpose


@dataclass(slots=True)
class SpeculationCounts:
    """Counts of updates that ran before the verdict.

    Attributes:
        taken: updates that ran beside the backward and were right.
        undone: those that were not.
    """

    taken: int = 0
    undone: int = 0


class TracedWork(Protocol):
    """Work that runs beside the main thread, on a clock."""

    def note(self, label: str, start: float) -> None:
        """Enter into a trace the main thread's computation since `start`."""

    def now(self) -> float:
        """Seconds of the clock."""

    def reset(self) -> tuple[Mapping[Purpose, Count], Mapping[str, float]]:
        """Copies since the last call, and the seconds for which the main thread stood still, by cause."""

    def traced(self, spans: list[TaskSpan]) -> AbstractContextManager[None]:
        """Add to `spans` when what is inside runs."""


class Nothing:
    """Nothing runs beside the main thread, and there is no clock."""

    def note(self, label: str, start: float) -> None:
        """There is no trace."""

    def now(self) -> float:
        """There is no clock."""
        return 0.0

    def reset(self) -> tuple[Mapping[Purpose, Count], Mapping[str, float]]:
        """Nothing is copied."""
        return {}, {}

    def traced(self, spans: list[TaskSpan]) -> AbstractContextManager[None]:
        """Nothing is to be kept."""
        return nullcontext()


class LateUpdates:
    """All updates of an engine that run beside its steps; in this class there are none: all are done as `step` returns.

    Args:
        background: work that runs beside the main thread.

    Attributes:
        background: as given.
        speculation_counts: of those that ran before the verdict.
    """

    def __init__(self, background: TracedWork | None = None) -> None:
        self.background: TracedWork = background if background is not None else Nothing()
        self.speculation_counts = SpeculationCounts()

    def spans_installed(self) -> None:
        """The optimizer has its spans."""

    def start(self, factor: float, step: int) -> None:
        """The updaters of a step have been called with gradients times `factor`, after `step` steps before."""

    def skip(self) -> None:
        """A step has no update."""

    def forget(self) -> None:
        """Drop updates that ran before the verdict and were not taken over."""

    def flush(self) -> None:
        """Wait for all new weights."""

    def finish(self) -> None:
        """Have the new weights of all updates here that the next step uses."""

    def entering(self, root: int, trains: bool) -> None:
        """A forward begins; have the weights of the root unit here."""

    def need(self, unit: int) -> None:
        """Have the new weights of a unit here."""

    def awaited(self, units: Iterable[int]) -> Iterable[int]:
        """Those of the units for which forwards must call `need`."""
        return ()
