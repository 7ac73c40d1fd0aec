"""Updaters below the device: the user's optimizer on the host, and the host's own Adam."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from zeroshard.errors import OptimizerError
from zeroshard.memory import HostMemory
from zeroshard.memory.ledger import Arena, Category
from zeroshard.offload.tiers import MOMENTS, HostSlice, Pages, SlicePiece, expanded, gaps
from zeroshard.offload.updates import HostSum, HostUpdate, HostUpdates, Speculation
from zeroshard.optim.algorithms.tensor_optimizer import Fused
from zeroshard.optim.host.states import Blockwise, Scalars
from zeroshard.optim.slices.collective_spans import Steps
from zeroshard.optim.slices.spans import SpanOptimizer
from zeroshard.optim.slices.updater import MasterUpdater
from zeroshard.parts.gradients import Gradients
from zeroshard.parts.planned import Planned, Wire, Work, on_lower_tier
from zeroshard.parts.updater import Span
from zeroshard.parts.weights import Weights
from zeroshard.traffic import Purpose


class HostScratch:
    """Scratch in host memory, for whole matrices that are updated there."""

    def __init__(self, host: HostMemory) -> None:
        self._host = host

    def take(self, numel: int, dtype: torch.dtype, label: str) -> torch.Tensor:
        """An uninitialised 1-D tensor of `numel` elements."""
        return self._host.borrow(numel * dtype.itemsize).view(dtype)

    def give(self, tensor: torch.Tensor) -> None:
        """Return it."""
        self._host.give_back(tensor)


class HostUpdater(MasterUpdater):
    """The user's optimizer, over values in host memory.

    Args:
        updates: those of the engine.
        unit: the number of the unit of the flat.
    """

    def __init__(
        self,
        weights: Weights,
        values: torch.Tensor,
        start: int,
        optimizer: Steps,
        groups: Sequence[int],
        updates: HostUpdates,
        unit: int,
        tier: str | None = "host",
    ) -> None:
        super().__init__(weights, values, start, optimizer, groups, updates.arena, tier)
        self._updates, self.unit = updates, unit

    def update(self, gradients: Gradients, written: bytes, factor: float) -> None:
        """Take one step with the gradients times `factor`, and start to copy the new weights to the device."""
        (gradient,) = gradients.for_update()
        fuses = self._optimizer.fuses
        if not fuses:
            self._step(gradient, written, factor)
            gradients.reduction.used()
        staging = self._updates.staging.take(self.values.numel() * self.weights.flat.dtype.itemsize)
        out = staging.view(self.weights.flat.dtype)
        if fuses:
            self._step_into(out, gradient, written, factor)
            gradients.reduction.used()
        else:
            out.copy_(self.values)
        self._updates.progress(HostUpdate(self.weights, self.unit, self.start, None, out, staging))

    @property
    def leaves(self) -> tuple[Arena | None, int]:
        """None: an update makes nothing on the device."""
        return None, 0

    def planned(self) -> Iterator[Planned]:
        """Master weights, and states that torch.optim makes in memory of its own, by 2101.06840, section 4."""
        index, masters = self.weights.flat.index, self.values.numel() * self.values.itemsize
        yield on_lower_tier(index, "host", Category.MASTER_WEIGHTS, masters)
        yield on_lower_tier(index, "host", Category.OPTIMIZER_STATES, self.state_bytes, paged=False)

    def wire(self, work: Work) -> Wire:
        """New weights are copied to the device once for each update, unless parameters are offloaded too."""
        if not self._updates.in_place:
            index = self.weights.flat.index
            own = self.values.numel() - index.padding_in(self.start, self.start + self.values.numel())
            yield Purpose.PARAMETERS_UP, own * work.updates
        yield from super().wire(work)

    def _step_into(self, out: torch.Tensor, gradient: torch.Tensor, written: bytes, factor: float) -> None:
        """Take one step whose own passes over memory scale the gradient, and write the new weights to `out`."""
        gradient_of = self._gradient_of([gradient], written, 1.0)
        spans = [span for span in self.spans if written[self.weights.flat.index.number_at(span.start)]]
        parts = [(span.start - self.start, span.stop - self.start) for span in spans]
        places: dict[torch.Tensor, torch.Tensor] = {
            span.tensor: out[start:stop] for span, (start, stop) in zip(spans, parts, strict=True)
        }
        self._optimizer.step(self._number, gradient_of, Fused(factor, places))
        for start, stop in gaps(parts, out.numel()):
            out[start:stop].copy_(self.values[start:stop])

    def _take(self, numel: int) -> torch.Tensor:
        return self._updates.host.borrow(numel * self.values.dtype.itemsize).view(self.values.dtype)

    def _give(self, scratch: torch.Tensor) -> None:
        self._updates.host.give_back(scratch)


class HostAdam(HostUpdater):
    """The host's own Adam, over the pages of a slice.

    Args:
        host_slice: holds values and moments; fetched.
        total: the sum of the gradients.
    """

    def __init__(
        self,
        weights: Weights,
        start: int,
        optimizer: SpanOptimizer,
        groups: Sequence[int],
        updates: HostUpdates,
        unit: int,
        host_slice: HostSlice,
        total: HostSum,
    ) -> None:
        super().__init__(weights, host_slice.pages.master, start, optimizer, groups, updates, unit, tier=None)
        self._host_slice, self._sum = host_slice, total
        self._expected = 0  # means in the sum at the last update of everything; 0 where it was of a part
        self._ahead: Speculation | None = None
        self._began = False
        self._may_run_ahead: bool | None = None
        updates.join(self)

    def spans_installed(self) -> None:
        """Follow the pages from now on, and speculate when gradients arrive."""
        self._host_slice.rebind = self._rebind
        self._rebind(None if self._host_slice.on_disk else self._host_slice.pages)
        self._lay_out()
        self._sum.follow = self._follow

    def update(self, gradients: Gradients, written: bytes, factor: float) -> None:
        """Enqueue the update; `HostUpdates.start` starts those of the step in the order of the forward."""
        self._updates.enqueue(self.unit, partial(self._start, written))

    def forget(self) -> int:
        """Drop the speculative update that was not kept; returns the number of dropped updates."""
        if self._ahead is None:
            return 0
        ahead, self._ahead = self._ahead, None
        self._updates.speculations.undo(ahead)
        return 1

    @property
    def as_saved(self) -> bool:
        """Not on a disk, nor with moments in fewer bits than a checkpoint's."""
        return not self._host_slice.on_disk and self._host_slice.form.moments == "fp32"

    def settle(self) -> None:
        """Wait until the states are written."""
        self._host_slice.settle()

    def split(self, cuts: Sequence[int]) -> None:
        """Cut the spans at these elements of the flat, with their states."""
        super().split(cuts)
        self._lay_out()

    def at_hand(self, writes: bool = False) -> AbstractContextManager[Pages]:
        """Pages in host memory inside; writes are kept if `writes`."""
        return self._host_slice.fetched(writes)

    def load_state(self, span: Span, state: dict[str, Any] | None) -> None:
        """Set the moments of a span, in fp32; None for zeros."""
        start, stop = span.start - self.start, span.stop - self.start
        super().load_state(span, state)
        if state is None:
            self._host_slice.forget_moments(start, stop)
        else:
            self._host_slice.keep_moments(start, stop, *(state[name] for name in MOMENTS))
            state.update(self._host_slice.moments(start, stop))

    def planned(self) -> Iterator[Planned]:
        """The pages: master weights, two moments, and their scales."""
        form, tier = self._host_slice.form, "disk" if self._host_slice.on_disk else "host"
        masters, *states = form.sizes
        yield on_lower_tier(self.weights.flat.index, tier, Category.MASTER_WEIGHTS, masters)
        for nbytes in states:
            yield on_lower_tier(self.weights.flat.index, tier, Category.OPTIMIZER_STATES, nbytes)

    def elements(self, span: Span) -> dict[str, torch.Tensor]:
        """The moments of a span in fp32 [stop - start]."""
        return {key: self.exact(expanded(value)) for key, value in super().elements(span).items()}

    def exact(self, values: torch.Tensor) -> torch.Tensor:
        """A part of `values` that outlives `at_hand`: a copy, where the slice is on the disk and is read."""
        return values.clone() if self._host_slice.on_disk and values.is_contiguous() else values

    def _per_element(self, value: Any, span: Span) -> bool:
        return isinstance(value, Blockwise) or super()._per_element(value, span)

    def _start(self, written: bytes, factor: float, late: bool) -> HostUpdate:
        """Start one step with the sum times `factor`, or keep the speculative update, if it was right.

        Args:
            late: the weights reach the device at the end of the next step.
        """
        self._split_for(written)
        spans = [span for span in self.spans if written[self.weights.flat.index.number_at(span.start)]]
        pieces = self._pieces(spans)
        ahead = self._ahead
        self._expected = self._sum.puts if all(written) else 0
        if ahead is not None and (ahead.pieces, ahead.factor, ahead.puts) == (pieces, factor, self._sum.puts):
            update, self._ahead = ahead.update, None
            self._updates.speculations.take_over(partial(self._write_states, pieces, factor))
        else:
            update = self._launch(pieces, factor, aside=late)
        self._began = True
        for span in spans:
            self._state(span)["step"] += 1
        assert update.task is not None
        self._sum.reader = update.task
        return update

    def _write_states(self, pieces: Sequence[SlicePiece], factor: float) -> None:
        """Start the second part of a speculative update: its states."""
        self._sum.reader = self._host_slice.update(pieces, self._sum.sum, factor, None, self._sum.arrived)

    def _launch(
        self, pieces: Sequence[SlicePiece], factor: float, aside: bool, weights_alone: bool = False
    ) -> HostUpdate:
        """Start one update.

        Args:
            aside: do not write to memory that the device reads.
            weights_alone: write no states.
        """
        out = self.weights.own if self._updates.in_place and not aside else None
        placed, staging, dtype, lender = out is not None, None, self.weights.flat.dtype, None
        if out is None and not aside and self._sum.lends:  # each element is read before it is written
            out, lender = self._sum.sum, self._sum
        elif out is None and (aside or self._host_slice.on_disk or dtype.itemsize < 4):
            staging = self._updates.staging.take(self.values.numel() * dtype.itemsize)
            out = staging.view(dtype)
        task = self._host_slice.update(pieces, self._sum.sum, factor, out, self._sum.arrived, weights_alone)
        source = self.values if out is None else out
        return HostUpdate(self.weights, self.unit, self.start, task, source, staging, placed, lender)

    def _follow(self, added: bool) -> None:
        """Speculate once a mean was added; drop the speculative update before its gradient changes otherwise."""
        if added:
            self._speculate()
        else:
            self._updates.speculation_counts.undone += self.forget()

    def _speculate(self) -> None:
        """Start to make the new weights, if the gradient is complete as expected ([Note: speculation])."""
        speculations = self._updates.speculations
        if self._sum.puts != self._expected or self._ahead is not None or not speculations.likely:
            return
        if self._may_run_ahead is None:
            nbytes = self.values.numel() * self.weights.flat.dtype.itemsize
            self._may_run_ahead = not self._host_slice.on_disk and speculations.reserve(nbytes)
        if self._may_run_ahead and not self._host_slice.behind:
            pieces, factor = self._pieces(self.spans), speculations.likely_factor
            update = self._launch(pieces, factor, aside=True, weights_alone=True)
            self._ahead = Speculation(update, pieces, factor, self._sum.puts)

    def _pieces(self, spans: Sequence[Span]) -> list[SlicePiece]:
        """The pieces of an update of some spans; missing states begin at zero."""
        optimizer, pieces = self._optimizer.optimizer, []
        for span in spans:
            start, stop = span.start - self.start, span.stop - self.start
            state = self._optimizer.held.states.setdefault(span.tensor, {})
            if not state:
                if self._began:  # the user has cleared it
                    with self._host_slice.fetched(writes=True):
                        self._host_slice.forget_moments(start, stop)
                state["step"] = torch.tensor(0.0)
                state.update(self._host_slice.moments(start, stop))
            group = optimizer.param_groups[span.group]
            _refuse_options(group)
            scalars = Scalars.of(group, int(state["step"]) + 1, group["decoupled_weight_decay"])
            pieces.append(SlicePiece(start, stop, self._host_slice.block_of(start), scalars))
        return pieces

    def _lay_out(self) -> None:
        """Lay the slice out by its spans, where these were cut."""
        self._host_slice.lay_out([(span.start - self.start, span.stop - self.start) for span in self.spans])
        if not self._host_slice.on_disk:
            self._rebind(self._host_slice.pages)

    def _rebind(self, pages: Pages | None) -> None:
        """Point the values and the optimizer's tensors at the slice's present memory."""
        if pages is None:  # on the disk: nothing may read it
            self.values = torch.full((), float("nan")).expand(self._host_slice.form.numel)
        else:
            self.values = pages.master
        self._optimizer.rebind(self._number, self.values, self.start)
        for span in self.spans:
            if state := self._state(span):
                state.update(self._host_slice.moments(span.start - self.start, span.stop - self.start))


def _refuse_options(group: Mapping[str, Any]) -> None:
    for option in ("maximize", "amsgrad"):
        if group.get(option):
            raise OptimizerError(
                f"{option}=True was set after the engine was made, by hand or by a checkpoint, and the host's own Adam "
                f"updates without it. Set it when the optimizer is made, which then runs on the host itself."
            )
