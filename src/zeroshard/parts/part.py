"""A part: one flat buffer with its weights, gradients and updater; and all parts of a model with their services."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from zeroshard.checkpoint.boxes import BoxValues
from zeroshard.memory.ledger import Arena, Category
from zeroshard.memory.transfers import TaskSpan
from zeroshard.parts.gradients import Gradients, GradientSum
from zeroshard.parts.place import Place, Split, boxes_of
from zeroshard.parts.planned import Planned, Wire, Work, on_device
from zeroshard.parts.updater import Updater
from zeroshard.parts.weights import Gatherer, Weights
from zeroshard.traffic import Count, Purpose
from zeroshard.units import Flat, Unit, norm_of


class Versions(Protocol):
    """The versions of one flat's weights.

    Attributes:
        older: number of versions besides the latest, once the pipeline is full.
        single: whether there is never more than one, so that the user's own parameters stay in the model.
        latest: number of the newest.
    """

    older: int
    single: bool
    latest: int

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The buffers of all versions."""

    def use(self, version: int) -> None:
        """Put a version's parameters into the modules."""

    def drop(self, version: int) -> None:
        """Free a version that is no longer used."""

    def advance(self) -> torch.Tensor:
        """Begin the next version as a copy of the latest; returns its buffer."""

    def restart(self) -> None:
        """Count from 0 again."""


class OneVersion:
    """Weights that are updated in place.

    Attributes:
        older: none.
        single: always.
        latest: always 0.
    """

    older, single, latest = 0, True, 0

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The one buffer."""
        return [self._weights.full]

    def use(self, version: int) -> None:
        """Nothing: it is in the modules already."""

    def drop(self, version: int) -> None:
        """Nothing: it stays."""

    def advance(self) -> torch.Tensor:
        """The same buffer: it is updated in place."""
        return self._weights.full

    def restart(self) -> None:
        """Nothing to count."""


class Counted(Protocol):
    """Elements of gradients that this rank counts in the norm."""

    def norm(self) -> torch.Tensor:
        """Their 2-norm, a scalar; in fp32 at least."""

    def settle(self) -> torch.Tensor:
        """Their values."""


@dataclass(frozen=True, slots=True)
class CountedBox:
    """One box of the elements that this rank counts, of a part whose other elements other ranks count."""

    values: torch.Tensor

    def norm(self) -> torch.Tensor:
        """Their 2-norm, a scalar; in fp32 at least."""
        return norm_of(self.values)

    def settle(self) -> torch.Tensor:
        """Their values, in the shape of the box."""
        return self.values


@dataclass(slots=True)
class Part:
    """One flat buffer with its weights, gradients and updater.

    Attributes:
        place: where it lies among the ranks.
        splits: by name, parameters that are parts of larger tensors.
        gradients: None where nothing is trained.
        edits: how often the user's writes into the parameters were taken over.
    """

    flat: Flat
    place: Place
    splits: Mapping[str, Split]
    weights: Weights
    gradients: Gradients | None
    updater: Updater
    versions: Versions
    edits: int = 0

    def keep_what_was_written(self) -> None:
        """Take over the user's writes into the parameters: into this rank's slice and master weights."""
        self.weights.end_edit()
        self.edits = self.flat.edits
        self.updater.take_over()

    def whole_shape(self, number: int) -> tuple[int, ...]:
        """The shape of the whole tensor that contains the parameter."""
        entry = self.flat.index.entries[number]
        split = self.splits.get(entry.name)
        return tuple(entry.shape) if split is None else split.shape

    def boxes(self, number: int, low: int, values: torch.Tensor) -> Iterator[tuple[BoxValues, bool]]:
        """Elements of one parameter as boxes of the whole tensor, as `boxes_of` gives them.

        Args:
            low: the first of them in the flat.
            values: of them (1-D).
        """
        entry = self.flat.index.entries[number]
        return boxes_of(entry.shape, self.splits.get(entry.name), low - entry.offset, values)

    def counted(self, total: GradientSum) -> list[Counted]:
        """The elements of this rank's slice of the gradients that it counts, in runs."""
        whole = all(split.counted for split in self.splits.values())
        if whole or not self.place.counted:
            return [total] if self.place.counted else []
        values, index = total.settle(), self.flat.index
        start = index.interval(self.weights.rank)[0]
        return [
            CountedBox(each.values)
            for number, low, high in index.overlaps(start, start + values.numel())
            for each, counted in self.boxes(number, low, values[low - start : high - start])
            if counted
        ]

    def nonfinite(self, gradients: Gradients) -> list[str]:
        """Names of the parameters with a non-finite element in this rank's slice of the step's sum."""
        index, total = self.flat.index, gradients.settle().settle()
        start = index.interval(self.weights.rank)[0]
        return [
            index.entries[number].name
            for number, low, high in index.overlaps(start, start + total.numel())
            if not bool(torch.isfinite(total[low - start : high - start]).all())
        ]

    @property
    def lost(self) -> str | None:
        """The reason why a write into the parameters outside of `gathered()` would be lost; None if it would last."""
        return self.weights.lost or (self.updater.lost if self.versions.single else None)

    def planned(self) -> Iterator[Planned]:
        """Planned bytes."""
        yield from self.weights.planned()
        if self.gradients is not None:
            yield on_device(self.flat.index, Category.PARAMETERS, self.flat.dtype.itemsize * self.versions.older)
            yield from self.gradients.planned()
        yield from self.updater.planned()

    def wire(self, work: Work) -> Wire:
        """Planned elements sent, and moved between tiers, in a step."""
        yield from self.weights.wire(work)
        if self.gradients is not None:
            yield from self.gradients.wire(work)
            if self.place.copies is not None:  # a slice there and back
                yield Purpose.AVERAGE_REPLICAS, 2 * self.flat.index.slice_numel(self.weights.rank) * work.updates
        yield from self.updater.wire(work)

    def reserve(self, gradients: Gradients) -> int:
        """Reserve the scratch of an update with these gradients; returns the bytes of its scalars."""
        updater, index, written = self.updater, self.flat.index, bytes(gradients.written_in_step)
        total, (arena, scalars) = gradients.settle().settle(), updater.leaves
        gradients.reduction.reserve(total)
        if arena is None:
            return 0
        if total.dtype != updater.values.dtype:
            arena.give(arena.take(updater.values.numel(), updater.values.dtype, "gradients in fp32"))
        updater.split(index.borders(written))  # as the update will
        return scalars * sum(bool(written[index.number_at(span.start)]) for span in updater.spans)

    def next_version(self) -> None:
        """Where older weights are still in use, point the update at a copy of the latest."""
        buffer = self.versions.advance()
        if buffer is not self.weights.full:
            self.weights.move(buffer)
            self.updater.follow()


@dataclass(frozen=True, slots=True)
class MicrobatchRows:
    """The rows of one microbatch in the whole batch of a step.

    Attributes:
        step: steps taken before it.
        first: the number of its first row: rows of lower data ranks and of earlier microbatches come before.
        count: number of rows.
    """

    step: int
    first: int
    count: int


class RandomNumbers(Protocol):
    """Random numbers of modules in training forwards and in their recomputations."""

    def number(self, parts: Sequence[Any]) -> list[MicrobatchRows | None]:
        """The rows of each microbatch of this data rank's batch; may be a collective call."""

    def microbatch(self, rows: MicrobatchRows | None) -> AbstractContextManager[None]:
        """Draw inside for these rows."""

    def again(self, module: nn.Module) -> AbstractContextManager[None]:
        """Inside, a module's own forward is recomputed in a backward, with torch's generators as at its start."""

    def discard(self) -> None:
        """Discard the backwards of the step so far."""

    def end_step(self) -> None:
        """End a step outside of `train_step`; may be a collective call."""


class TorchStreams:
    """Each rank's own torch generators: the numbers depend on ranks, stages and microbatches; no cost."""

    def number(self, parts: Sequence[Any]) -> list[MicrobatchRows | None]:
        """None for each: rows have no numbers."""
        return [None] * len(parts)

    def microbatch(self, rows: MicrobatchRows | None) -> AbstractContextManager[None]:
        """Nothing changes."""
        return nullcontext()

    def again(self, module: nn.Module) -> AbstractContextManager[None]:
        """Nothing: torch's generators suffice."""
        return nullcontext()

    def discard(self) -> None:
        """Nothing: generators go on."""

    def end_step(self) -> None:
        """Nothing to check."""


@dataclass(slots=True)
class SpeculationCounts:
    """Counts of updates that ran before the verdict.

    Attributes:
        taken: updates that ran during the backward and were kept.
        undone: updates that were reverted.
    """

    taken: int = 0
    undone: int = 0


class TracedWork(Protocol):
    """Work beside the main thread, with a clock."""

    def note(self, label: str, start: float) -> None:
        """Record the main thread's computation since `start` in the trace."""

    def now(self) -> float:
        """Seconds of the clock."""

    def reset(self) -> tuple[Mapping[Purpose, Count], Mapping[str, float]]:
        """Copies since the last call, and the seconds for which the main thread waited, by cause."""

    def traced(self, spans: list[TaskSpan]) -> AbstractContextManager[None]:
        """Add the times of work inside to `spans`."""


class Nothing:
    """No work beside the main thread, and no clock."""

    def note(self, label: str, start: float) -> None:
        """Nothing: there is no trace."""

    def now(self) -> float:
        """0: there is no clock."""
        return 0.0

    def reset(self) -> tuple[Mapping[Purpose, Count], Mapping[str, float]]:
        """Nothing was copied."""
        return {}, {}

    def traced(self, spans: list[TaskSpan]) -> AbstractContextManager[None]:
        """Nothing to record."""
        return nullcontext()


class LateUpdates:
    """Updates that run beside an engine's steps; in this class none: every update ends before `step` returns.

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
        """Prepare for the optimizer's spans, which are complete."""

    def start(self, factor: float, step: int) -> None:
        """Start the updates of a step, with gradients times `factor`, after `step` earlier steps."""

    def skip(self) -> None:
        """End a step without an update."""

    def forget(self) -> None:
        """Drop updates that ran before the verdict and were not kept."""

    def flush(self) -> None:
        """Wait for all new weights."""

    def finish(self) -> None:
        """Wait for the new weights of all updates that the next step uses."""

    def entering(self, root: int, trains: bool) -> None:
        """Begin a forward: wait for the new weights of the root unit."""

    def need(self, unit: int) -> None:
        """Wait for the new weights of a unit."""

    def awaited(self, units: Iterable[int]) -> Iterable[int]:
        """The units for which forwards must call `need`."""
        return ()


class Scratch(Protocol):
    """Lends uninitialised tensors."""

    def take(self, numel: int, dtype: torch.dtype, label: str) -> torch.Tensor:
        """A tensor [numel]; return it with `give`."""

    def give(self, tensor: torch.Tensor) -> None:
        """Return a tensor from `take`."""


@dataclass(slots=True)
class Parts:
    """A model cut into units, with the parts of each unit.

    Attributes:
        arena: scratch on the device, which ranks that share memory can read.
        messages: scratch for messages to other ranks; the same arena where no memory is shared.
        gatherer: gathers sliced units.
        random_numbers: of modules in training.
    """

    units: Sequence[Unit]
    of_units: Sequence[Sequence[Part]]
    arena: Arena
    messages: Arena
    gatherer: Gatherer
    random_numbers: RandomNumbers

    @property
    def all(self) -> list[Part]:
        """All parts in the fixed order of units."""
        return [part for parts in self.of_units for part in parts]

    @property
    def trained(self) -> list[tuple[Part, Gradients]]:
        """Parts with gradients."""
        return [(part, part.gradients) for part in self.all if part.gradients is not None]

    @property
    def turns(self) -> list[tuple[Part, Gradients, int]]:
        """Trained parts in the order of forwards and updates, each with its offset in `written`.

        The root, which a stage may be without, comes first.
        """
        found, place = [], 0
        for part, gradients in self.trained:
            found.append((part, gradients, place))
            place += len(part.flat.parameters)
        return sorted(found, key=lambda item: item[0].flat.unit not in self.units[-1:])

    def reserve(self) -> int:
        """Reserve the scratch of the next update before it changes anything; returns the bytes of its scalars."""
        return sum(part.reserve(gradients) for part, gradients, _ in self.turns)
