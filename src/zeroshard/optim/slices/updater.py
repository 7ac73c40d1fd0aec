"""Updates on the device: the user's optimizer steps over the slice that a rank owns."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from zeroshard.memory.ledger import Arena, Category
from zeroshard.optim.slices.collective_spans import Steps
from zeroshard.optim.slices.spans import SpanOptimizer
from zeroshard.parts.gradients import Gradients
from zeroshard.parts.planned import Planned, Wire, Work, on_device
from zeroshard.parts.updater import Span, Updater
from zeroshard.parts.weights import Weights


class Untrained:
    """Frozen weights, which are only saved and loaded.

    Attributes:
        weights: the parameters of the model.
        values: their values that this rank saves [S], or [N*S] if every rank has all.
        start: the offset of `values` in the flat.
        lost: as `Updater.lost`.
        separate: as `Updater.separate`.
    """

    lost: str | None = None
    separate = False

    @property
    def as_saved(self) -> bool:
        """The optimizer has them in this form."""
        return True

    @property
    def leaves(self) -> tuple[Arena | None, int]:
        """An update allocates nothing."""
        return None, 0

    def __init__(self, weights: Weights, values: torch.Tensor, start: int) -> None:
        self.weights, self.values, self.start = weights, values, start
        self._numel, self._dtype = values.numel(), values.dtype

    @property
    def spans(self) -> Sequence[Span]:
        """None: the optimizer does not have these weights."""
        return []

    @property
    def matrices(self) -> Mapping[str, Span] | None:
        """None, as there are no spans."""
        return None

    def update(self, gradients: Gradients, written: bytes, factor: float) -> None:
        """Frozen weights get no update."""

    def split(self, cuts: Sequence[int]) -> None:
        """There are no spans."""

    def follow(self) -> None:
        """Nothing to do: the weights are not rebound."""

    def at_hand(self, writes: bool = False) -> AbstractContextManager[Any]:
        """Nothing to fetch: the values are in memory."""
        return nullcontext()

    def take_over(self) -> None:
        """The values are the parameters."""

    def restore(self) -> None:
        """The parameters are the values."""

    def elements(self, span: Span) -> dict[str, torch.Tensor]:
        """There are no states."""
        return {}

    def scalars(self, span: Span) -> dict[str, Any] | None:
        """There are no states."""
        return None

    def load_state(self, span: Span, state: dict[str, Any] | None) -> None:
        """There are no states."""

    def planned(self) -> Iterator[Planned]:
        """No memory besides the weights."""
        yield from ()

    def wire(self, work: Work) -> Wire:
        """No messages."""
        yield from ()

    def exact(self, values: torch.Tensor) -> torch.Tensor:
        """The values themselves."""
        return values


class DeviceUpdater(Untrained):
    """The user's optimizer over parameters on the device.

    Args:
        groups: the parameter group of each parameter of the flat.
        arena: for gradients in the dtype of the values.
        tier: of the optimizer's states in the ledger; None if the caller enters them.
    """

    def __init__(
        self,
        weights: Weights,
        values: torch.Tensor,
        start: int,
        optimizer: Steps,
        groups: Sequence[int],
        arena: Arena,
        tier: str | None = "device",
    ) -> None:
        super().__init__(weights, values, start)
        self._optimizer, self._arena = optimizer, arena
        self._number = optimizer.add(weights.flat.index, groups, values, start, tier)

    @property
    def spans(self) -> Sequence[Span]:
        """The spans of the values."""
        return self._optimizer.spans(self._number)

    @property
    def matrices(self) -> Mapping[str, Span] | None:
        """The whole matrices of this owner, by name, if the values are parts of matrices; else None."""
        return None if isinstance(self._optimizer, SpanOptimizer) else self._optimizer.matrices

    def update(self, gradients: Gradients, written: bytes, factor: float) -> None:
        """Take one step with the gradients times `factor`, and publish the new weights to the other ranks."""
        reads = factor == 1.0 and self._optimizer.reads_alone and not self.separate
        pieces = gradients.for_update(reads)
        if pieces[0].dtype == self.values.dtype and gradients.reduction.lasts:
            gradient_of = self._gradient_of(pieces, written, factor)
            self._optimizer.join(self._number, gradient_of, partial(self._updated, gradients))
        else:
            self._step(pieces[0], written, factor)
            self._updated(gradients)

    def split(self, cuts: Sequence[int]) -> None:
        """Cut the spans at these elements of the flat, with their states."""
        self._optimizer.split(self._number, cuts)

    def follow(self) -> None:
        """Point the values at the buffer that holds the parameters now."""
        self.values = self.weights.full[self.start : self.start + self._numel]
        self._optimizer.rebind(self._number, self.values, self.start)

    def elements(self, span: Span) -> dict[str, torch.Tensor]:
        """The optimizer's states with a value per element of a span [stop - start], by name."""
        state = self._state(span)
        return {
            key: value.reshape(-1) if isinstance(value, torch.Tensor) else value
            for key, value in state.items()
            if self._per_element(value, span)
        }

    def scalars(self, span: Span) -> dict[str, Any] | None:
        """The optimizer's other states of a span, such as a step count or columns; None before the first update."""
        state = self._state(span)
        return {k: v for k, v in state.items() if not self._per_element(v, span)} if state else None

    def load_state(self, span: Span, state: dict[str, Any] | None) -> None:
        """Set the optimizer's states of a span; None for no states yet."""
        self._optimizer.held.states.pop(span.tensor, None)
        if state is not None:
            self._optimizer.held.states[span.tensor] = state

    def planned(self) -> Iterator[Planned]:
        """The optimizer's states of the values that this rank updates."""
        layout, index = self._optimizer.layout, self.weights.flat.index
        if layout.whole is None:
            each = layout.bytes_per_element * self._dtype.itemsize // 4
            yield on_device(index, Category.OPTIMIZER_STATES, each, self._slice_of)
        else:
            nbytes = Fraction(self._optimizer.state_bytes(self._number))
            yield Planned("device", Category.OPTIMIZER_STATES, nbytes, Fraction(0))

    def wire(self, work: Work) -> Wire:
        """The messages of a step."""
        if not isinstance(self._optimizer, SpanOptimizer):
            yield from self._optimizer.wire(work)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of the first step, by the optimizer's layout."""
        return self._optimizer.state_bytes(self._number)

    @property
    def leaves(self) -> tuple[Arena | None, int]:
        """Scratch for gradients of other dtypes, and the optimizer's scalars."""
        return self._arena, self._optimizer.layout.scalar_bytes

    @property
    def _slice_of(self) -> int | None:
        """The rank whose slice is updated; None if the whole flat is."""
        return self.weights.rank if self._numel < self.weights.flat.index.padded_numel else None

    def _state(self, span: Span) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.held.states.get(span.tensor, {})
        return state

    def _per_element(self, value: Any, span: Span) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == span.tensor.shape

    def _step(self, gradient: torch.Tensor, written: bytes, factor: float) -> None:
        fits = gradient.dtype == self.values.dtype
        own = gradient if fits else self._take(gradient.numel()).copy_(gradient)
        self._optimizer.step(self._number, self._gradient_of([own], written, factor))
        if not fits:
            self._give(own)

    def _gradient_of(
        self, pieces: Sequence[torch.Tensor], written: bytes, factor: float
    ) -> Callable[[Span], torch.Tensor | None]:
        """The gradient of each span, from `pieces` of [S] times `factor`; None for a span without one."""
        if factor != 1.0:
            for piece in pieces:
                piece.mul_(factor)
        begins = list(accumulate(map(len, pieces), initial=self.start))[:-1]
        if len(begins) > 1:
            self.split(begins[1:])
        self._split_for(written)
        index = self.weights.flat.index

        def gradient_of(span: Span) -> torch.Tensor | None:
            number = bisect_right(begins, span.start) - 1
            own = pieces[number][span.start - begins[number] : span.stop - begins[number]]
            return own if written[index.number_at(span.start)] else None

        return gradient_of

    def _updated(self, gradients: Gradients) -> None:
        """Copy the new weights to the parameters, and publish them to the other ranks."""
        gradients.reduction.used()
        self._update_parameters()
        self.weights.publish(0 if self.separate else len(self.spans))

    def _split_for(self, written: bytes) -> None:
        """Cut the spans so that each has gradients for all its parameters or for none."""
        if not all(written):
            self.split(self.weights.flat.index.borders(written))

    def _take(self, numel: int) -> torch.Tensor:
        return self._arena.take(numel, self.values.dtype, "gradients in fp32")

    def _give(self, scratch: torch.Tensor) -> None:
        self._arena.give(scratch)

    def _update_parameters(self) -> None:
        """The values are the parameters."""


class MasterUpdater(DeviceUpdater):
    """The user's optimizer, over fp32 master weights of parameters in fewer bits (1710.03740, section 3.1)."""

    lost = "its fp32 master weights stayed as they were"
    separate = True

    @property
    def target(self) -> torch.Tensor:
        """The parameters of `values`, in the dtype of computation."""
        whole = self.weights.copied and self._numel == self.weights.flat.index.padded_numel
        return self.weights.full if whole else self.weights.own

    def follow(self) -> None:
        """Master weights stay in their own buffer."""

    def take_over(self) -> None:
        """Copy the user's writes into the parameters to the values."""
        with self.at_hand(writes=True):
            target = self.target.to(self.values.device)
            written = target != self.values.to(target.dtype)
            self.values[written] = target[written].to(self.values.dtype)

    def restore(self) -> None:
        """Copy the values to the parameters, rounded."""
        with self.at_hand():
            self._update_parameters()

    def planned(self) -> Iterator[Planned]:
        """Master weights, and the optimizer's states."""
        yield on_device(self.weights.flat.index, Category.MASTER_WEIGHTS, self._dtype.itemsize, self._slice_of)
        yield from super().planned()

    def _update_parameters(self) -> None:
        self.target.copy_(self.values)


class LateMasters(MasterUpdater):
    """Master weights that may be made by their first use, from parameters that were loaded.

    [Note: late masters] A file in the parameters' own dtype gives the parameters all that it holds, and the masters are
    equal to them until the first update. So they are copied by the first use of `values`, mostly in that update, and
    memory of a model that is only evaluated is never written.
    """

    _unmade = False

    @property
    def values(self) -> torch.Tensor:
        """The master weights [S], or [N*S] at stage 0."""
        if self._unmade:
            self._unmade = False
            self._masters.copy_(self.target)
        return self._masters

    @values.setter
    def values(self, values: torch.Tensor) -> None:
        """Set them."""
        self._masters = values

    def receive(self, dtype: torch.dtype | None) -> torch.Tensor:
        """As `destination`."""
        self._unmade = False
        if dtype is not self.weights.flat.dtype or self._optimizer.layout.whole is not None:
            return self._masters
        self._unmade = True
        return self.target

    def at_hand(self, writes: bool = False) -> AbstractContextManager[Any]:
        """Make the values, if they are late."""
        return nullcontext(self.values)

    def restore(self) -> None:
        """Copy the values to the parameters, rounded, unless they are late and so the parameters have them."""
        if not self._unmade:
            self._update_parameters()

    def update(self, gradients: Gradients, written: bytes, factor: float) -> None:
        """Take one step with the gradients times `factor`, over values that are there."""
        assert self.values is self._masters
        super().update(gradients, written, factor)


def destination(updater: Updater, dtype: torch.dtype | None) -> torch.Tensor:
    """The tensor into which all values of an updater are to be loaded: its values, or parameters that hold them.

    Args:
        dtype: of the loaded values; None if it is not known, or not the same for all.
    """
    return updater.receive(dtype) if isinstance(updater, LateMasters) else updater.values
