"""Spans: the intervals of flat slices that a `torch.optim` optimizer sees as its tensors.

A span is as long as possible: consecutive elements of one parameter group with the same updates so far. If a parameter
inside a span gets no gradient in a step, the span and its states are cut there, which changes nothing for an
elementwise optimizer; so a parameter without a gradient is skipped exactly as torch skips one whose `.grad` is None.

A rank updates the flats in several calls of `step`. An optimizer that counts steps in a group (`group["step"] += 1`) or
an attribute would count calls, so each call starts from the numbers before the step.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from zeroshard.errors import OptimizerError
from zeroshard.memory.ledger import Category, Ledger
from zeroshard.optim.algorithms.tensor_optimizer import Fused, TensorOptimizer
from zeroshard.optim.host.adam import fast_on_cpus
from zeroshard.optim.slices.owners import Owners
from zeroshard.optim.slices.step_hooks import watch_hooks
from zeroshard.optim.trial.probe_optimizers import StateLayout, StateSizes, fresh_state
from zeroshard.parts.updater import OwnRows
from zeroshard.units import Entry, Index, Unreadable

Table = dict[Any, Any]


class HeldTensors:
    """Swaps the tensors of an optimizer's groups, and their states.

    Attributes:
        tensors: tensors of each group for a step.
        states: their states.
        stepping: whether the optimizer has them now, in a step or another of its methods.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._shown = optimizer, False
        self.tensors: list[list[Parameter]] = []
        self.states: Table = optimizer.state
        self.stepping = False
        optimizer.register_step_pre_hook(self._refuse_user_step)

    def fill(self, tensors: list[list[Parameter]]) -> None:
        """Set the tensors of each group, which the optimizer holds unless it shows others."""
        self.tensors = tensors
        for group, members in zip(self._optimizer.param_groups, tensors, strict=True):
            group.pop("param_names", None)
            if not self._shown:
                group["params"] = members

    def show(self, parameters: Sequence[list[Parameter]], states: Table) -> None:
        """Set the parameters of each group, and the states, that the optimizer shows between its steps."""
        self._shown = True
        for group, members in zip(self._optimizer.param_groups, parameters, strict=True):
            group["params"] = members
        self._optimizer.state = states  # type: ignore[assignment]

    @contextmanager
    def inside(
        self, members: Sequence[Sequence[Parameter]] | None = None, states: Table | None = None
    ) -> Iterator[None]:
        """Give the optimizer other tensors of each group inside.

        Args:
            members: some of the tensors, or whole parameters; all tensors by default.
            states: states of the members; by default those of the tensors.
        """
        optimizer = self._optimizer
        groups, shown = optimizer.param_groups, optimizer.state
        before = [group["params"] for group in groups]
        for group, tensors in zip(groups, self.tensors if members is None else members, strict=True):
            group["params"] = tensors
        optimizer.state, self.stepping = self.states if states is None else states, True  # type: ignore[assignment]
        try:
            yield
        finally:
            if states is None:  # the step may have made another table
                self.states = optimizer.state
            optimizer.state, optimizer.param_groups, self.stepping = shown, groups, False
            for group, kept in zip(groups, before, strict=True):
                group["params"] = kept

    def _refuse_user_step(self, *_: Any) -> None:
        if not self.stepping:
            raise OptimizerError(
                "The optimizer runs on slices whose gradients the engine holds, so its own step would do nothing. "
                "Call engine.step()."
            )


Numbers = list[dict[str, Any]]


class OneStep:
    """The calls of an optimizer's `step` that form one step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._left: Numbers | None = None  # by the last call of the current step

    def call(self) -> None:
        """Call `step` once."""
        before = list(map(dict, self._tables()))
        self._optimizer.step()
        if all(map(_same, self._tables(), before)):
            return
        after = list(map(_numbers, self._tables()))
        if after != list(map(_numbers, before)):
            self._left = after
            for table, kept in zip(self._tables(), before, strict=True):
                numbers = _numbers(kept)
                for key in [key for key, value in table.items() if _is_number(value) and key not in numbers]:
                    table[key] = kept.get(key)
                    if key not in kept:
                        del table[key]
                table.update(numbers)

    def end(self) -> None:
        """End the step: set the numbers that its last call left."""
        left, self._left = self._left, None
        for table, numbers in zip(self._tables(), left or (), strict=False):
            table.update(numbers)

    def _tables(self) -> Iterator[dict[str, Any]]:
        yield vars(self._optimizer)
        yield from self._optimizer.param_groups


def _same(table: dict[str, Any], kept: dict[str, Any]) -> bool:
    """Whether a table has the same objects under the same keys, in the order that it had."""
    return [*table] == [*kept] and all(map(is_, table.values(), kept.values()))


def _numbers(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


UNKNOWN = StateLayout(0, 0)  # for engines that print no formulas of optimizer states
JOINED = 2**16  # elements below which a call of the optimizer costs more than its arithmetic


class SliceSpan:
    """Elements [start, stop) of a flat buffer, of one parameter group, as one optimizer tensor.

    It is 1-D for an optimizer that treats each element alone, else one parameter in its shape, or some rows of it.
    """

    def __init__(self, start: int, stop: int, group: int, tensor: torch.Tensor, rows: OwnRows | None = None) -> None:
        self.rows = rows
        self.start = start
        self.stop = stop
        self.group = group
        self.tensor = torch.nn.Parameter(tensor)
        self.hidden: torch.Tensor | None = None


GradientOf = Callable[[SliceSpan], torch.Tensor | None]


class SpanOptimizer:
    """Points a torch optimizer at spans instead of the model's parameters, in place.

    The optimizer object stays the user's, so learning-rate schedulers that hold it go on working. `HeldTensors` has its
    tensors between steps.

    Attributes:
        optimizer: the user's.
        layout: of its states.
        owners: of whole parameters; empty unless they are dealt out.
        sizes: of the states of whole parameters.
        held: the tensors of the optimizer, and the states of each span by its tensor.
        one_step: the calls for all flats as one step, which the caller of the updates ends.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, ledger: Ledger, layout: StateLayout = UNKNOWN) -> None:
        self.optimizer, self.layout = fast_on_cpus(optimizer), layout
        self.owners = Owners()
        self._ledger = ledger
        self._spans: list[list[SliceSpan]] = []
        self._installed = 0  # lists of spans that the optimizer has
        self._tiers: list[str | None] = []
        self._states_bytes = {"device": 0, "host": 0}  # entered into the ledger by this object
        self._seen_bytes = {"device": 0, "host": 0}  # of scalars, likewise
        self.sizes, self.held, self.one_step = StateSizes(optimizer), HeldTensors(optimizer), OneStep(optimizer)
        self._sizes: list[int] = []  # elements of each flat's slice; of uneven slices the mean, the same on all ranks
        self._joined: list[SliceSpan] = []  # of flats with deferred steps
        self._joined_elements = 0
        self._then: list[Callable[[], None]] = []

    def add(
        self, index: Index, groups: Sequence[int], owned: torch.Tensor, start: int, tier: str | None = "device"
    ) -> int:
        """Make the spans of one flat that this rank updates; returns the number of their list.

        Args:
            groups: the parameter group of each entry of the index.
            owned: the values [stop - start] that are updated, fp32 or the parameters' own dtype.
            start: the offset of `owned` in the flat.
            tier: of the optimizer's states in the ledger; None if the caller enters them.
        """
        stop = start + owned.numel()
        whole = self.layout.whole is not None
        spans: list[SliceSpan] = []
        for number, low, high in index.overlaps(start, stop):
            if spans and spans[-1].group == groups[number] and not whole:
                spans[-1].stop = high
            else:
                shape, rows = self._seen(index.entries[number], low, high) if whole else ((0,), None)
                values = owned[: high - low if whole else 0].view(shape)
                spans.append(SliceSpan(low, high, groups[number], values, rows))
        if index.padding_in(start, stop) and not whole:
            if not spans:
                spans.append(SliceSpan(start, stop, groups[-1], owned[:0]))
            spans[-1].stop = stop
        for span in spans:
            values = owned[span.start - start : span.stop - start]
            span.tensor = torch.nn.Parameter(values.view(span.tensor.shape) if whole else values)
            _hide_gradient(span)
        self._spans.append(spans)
        self._tiers.append(tier)
        self._sizes.append(owned.numel() if index.bounds is None else index.numel // index.ranks)
        return len(self._spans) - 1

    def _seen(self, entry: Entry, low: int, high: int) -> tuple[Sequence[int], OwnRows | None]:
        """The optimizer's shape of elements [low, high) of a flat, and their rows if they are a part of a matrix."""
        if high - low == entry.numel:
            return entry.shape, None
        width, states = entry.numel // entry.shape[0], getattr(self.optimizer, "row_states", None)
        assert states is not None and (low - entry.offset) % width == (high - low) % width == 0, (entry, low, high)
        rows = OwnRows((low - entry.offset) // width, entry.shape[0], states)
        return ((high - low) // width, *entry.shape[1:]), rows

    def install_spans(self) -> None:
        """Give the optimizer its spans, once all are made and have their values, which other ranks may write.

        Later calls add those made since; the others keep their states.
        """
        templates, new = self.sizes.templates, [span for spans in self._spans[self._installed :] for span in spans]
        fresh = [(span, fresh_state(self.optimizer, templates[span.group], span.tensor)) for span in new]
        if not self._installed:
            self.held.states.clear()
        self._installed = len(self._spans)
        self.held.states.update((span.tensor, state) for span, state in fresh if state)
        self.refill_groups()
        self.account()

    @property
    def reads_alone(self) -> bool:
        """Whether a step leaves gradients unchanged: torch's Adam, without hooks of the user's."""
        hooks = self.optimizer._optimizer_step_pre_hooks  # one is this object's
        return type(self.optimizer) in (torch.optim.Adam, torch.optim.AdamW) and len(hooks) == 1

    @property
    def fuses(self) -> bool:
        """Whether `step` takes fused work: for a class that supports it itself, without hooks of the user's."""
        before, after = self.optimizer._optimizer_step_pre_hooks, self.optimizer._optimizer_step_post_hooks
        return bool(vars(type(self.optimizer)).get("fuses")) and len(before) == 1 and not after

    @property
    def every(self) -> list[SliceSpan]:
        """The spans of all flats."""
        return [span for spans in self._spans for span in spans]

    def spans(self, number: int) -> list[SliceSpan]:
        """The spans of one flat."""
        return self._spans[number]

    def split(self, number: int, cuts: Sequence[int]) -> None:
        """Cut the spans of one flat at the given elements, with their states."""
        before = self._spans[number]
        after: list[SliceSpan] = []
        for span in before:
            inner = [cut for cut in sorted(set(cuts)) if span.start < cut < span.stop]
            after.extend(self._split(span, [span.start, *inner, span.stop]) if inner else [span])
        if len(after) != len(before):
            self._spans[number] = after
            self.refill_groups()

    def rebind(self, number: int, owned: torch.Tensor, start: int) -> None:
        """Point one flat's spans at `owned`, which begins at `start` and holds the same values."""
        for span in self._spans[number]:
            span.tensor.data = owned[span.start - start : span.stop - start].view(span.tensor.shape)

    def step(self, number: int, gradient_of: GradientOf, fused: Fused | None = None) -> None:
        """One optimizer step on the spans of one flat; a span whose gradient is None stays as it is.

        Args:
            fused: fused work, if the optimizer `fuses`; gradients may then have fewer bits.
        """
        if fused is None:
            self._step(self._with_gradients(number, gradient_of))
            return
        assert isinstance(self.optimizer, TensorOptimizer)
        for span in self._spans[number]:
            span.tensor.grad_dtype = None  # any
        self.optimizer.fused = fused
        try:
            self._step(self._with_gradients(number, gradient_of))
        finally:
            del self.optimizer.fused

    def _with_gradients(self, number: int, gradient_of: GradientOf) -> list[SliceSpan]:
        """The spans of one flat, after setting their gradients."""
        spans = self._spans[number]
        for span in spans:
            gradient = gradient_of(span)
            if gradient is not None and self.layout.rebinds:
                gradient = gradient.clone()
            span.tensor.grad = gradient if gradient is None else gradient.view(span.tensor.shape)
        return spans

    def join(self, number: int, gradient_of: GradientOf, then: Callable[[], None]) -> None:
        """As `step`, in one call of the optimizer for several small flats.

        Args:
            gradient_of: its tensors live until `then`.
            then: called after the step, at the latest by `flush`.
        """
        elements = self._sizes[number]  # all ranks flush at the same flats, as `then` may be a collective call
        if self._joined_elements + elements > JOINED:
            self.flush()
        self._joined += self._with_gradients(number, gradient_of)
        self._joined_elements += elements
        self._then.append(then)

    def flush(self) -> None:
        """Take the deferred steps of `join`."""
        spans, then, self._joined, self._then, self._joined_elements = self._joined, self._then, [], [], 0
        if then:
            self._step(spans)
        for call in then:
            call()

    def _step(self, spans: Sequence[SliceSpan]) -> None:
        groups = range(len(self.optimizer.param_groups))
        given = [span.tensor.data for span in spans] if self.layout.rebinds else []
        if len(self.optimizer._optimizer_step_pre_hooks) + len(self.optimizer._optimizer_step_post_hooks) > 1:
            watch_hooks(self.optimizer, self.layout.whole is not None)  # beside the one of `HeldTensors`
        # with all spans the optimizer would search the others for gradients
        with self.held.inside([[span.tensor for span in spans if span.group == group] for group in groups]):
            self.one_step.call()
        put_back(spans, given)
        for span in spans:
            _hide_gradient(span)

    def touch(self) -> None:
        """Take a step of the optimizer without tensors, for its hooks and learning-rate schedulers."""
        self._step([])

    def state_bytes(self, number: int | None = None) -> int:
        """Bytes of the states of one flat's spans, by the layout; those of whole tensors by their shapes.

        Args:
            number: of the flat; None for all that are updated on the device.
        """
        if number is None:
            return sum(self.state_bytes(n) for n, tier in enumerate(self._tiers) if tier == "device")
        if self.layout.whole is None:
            return int(sum(s.tensor.nbytes for s in self._spans[number]) * self.layout.bytes_per_element // 4)
        return sum(self.sizes.of(span.group, span.tensor) for span in self._spans[number])

    def account(self) -> None:
        """Enter states that the optimizer made since the last call into the ledger; scalars count as buffers."""
        states = dict.fromkeys(self._tiers, 0)
        scalars = dict.fromkeys(("device", "host"), 0)
        for tier, span in ((tier, s) for tier, spans in zip(self._tiers, self._spans, strict=True) for s in spans):
            for value in self.held.states.get(span.tensor, {}).values():
                for leaf in (value,) if isinstance(value, torch.Tensor) else tree_leaves(value):
                    if isinstance(leaf, torch.Tensor):
                        scalar = leaf.dim() == 0
                        states[tier] += 0 if scalar else leaf.nbytes
                        scalars[tier or "host"] += leaf.nbytes if scalar else 0
        for tier, nbytes in states.items():
            if tier is not None and nbytes > self._states_bytes[tier]:
                more = nbytes - self._states_bytes[tier]
                self._ledger.take(Category.OPTIMIZER_STATES, more, "optimizer states", tier=tier)
                self._states_bytes[tier] = nbytes
        for place, nbytes in scalars.items():
            if nbytes > self._seen_bytes[place]:
                more = nbytes - self._seen_bytes[place]
                self._ledger.take(Category.BUFFERS, more, "optimizer scalars", tier=place)
                self._seen_bytes[place] = nbytes

    def _split(self, span: SliceSpan, places: list[int]) -> list[SliceSpan]:
        state = self.held.states.pop(span.tensor, {})
        parts = []
        for low, high in itertools.pairwise(places):
            a, b = low - span.start, high - span.start
            part = SliceSpan(low, high, span.group, span.tensor.detach()[a:b])
            _hide_gradient(part)
            if state:
                self.held.states[part.tensor] = {k: _part(v, span.tensor.shape, a, b) for k, v in state.items()}
            parts.append(part)
        return parts

    def refill_groups(self) -> None:
        """Give each group of the optimizer its spans."""
        every, groups = self.every, range(len(self.optimizer.param_groups))
        self.held.fill([[span.tensor for span in every if span.group == group] for group in groups])


def put_back(spans: Sequence[SliceSpan], places: Sequence[torch.Tensor]) -> None:
    """Copy values that a step has rebound (`p.data = values`) back to their places."""
    for span, values in zip(spans, places, strict=False):
        if span.tensor.data_ptr() != values.data_ptr():
            span.tensor.data = values.copy_(span.tensor.data)


def _hide_gradient(span: SliceSpan) -> None:
    """Give the span a `.grad` that raises when read; it has a real gradient only during its step."""
    if span.hidden is None:
        real = type(span.tensor.detach()) is torch.Tensor  # tensors of a rehearsal have no values
        span.hidden = Unreadable.of(span.tensor, f"elements {span.start} to {span.stop}", _unreadable) if real else None
    span.tensor.grad = span.hidden


def _unreadable(name: str) -> OptimizerError:
    return OptimizerError(
        "The gradients of the optimizer's parameters were read or changed, and the engine holds them. Clip with "
        "engine.clip_grad_norm(max_norm) or engine.clip_grad_value(value); their norm is engine.step().grad_norm."
    )


def _part(value: Any, shape: torch.Size, start: int, stop: int) -> Any:
    if isinstance(value, torch.Tensor) and value.shape == shape:
        return value[start:stop]
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
