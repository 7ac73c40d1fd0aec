"""Segments: forwards of consecutive blocks of which only the input is kept (Chen et al., 1604.06174, section 3).

Autograd's graph of the forward stays as it is. Each tensor that a block saves in it is replaced by a slot; the first
slot that the backward reads has the whole segment computed again, and every slot gets its tensor, in the order in
which they were saved. So gradients flow through the graph of the forward: hooks, the order in which sums are made and
what is reduced when are those without recomputation. A slot belongs to the graph, and what it holds is freed with it,
as a saved tensor is; there is nothing to clean up after a backward, nor where there is none.

[Note: links] A tensor among the arguments of a block that an earlier block of the segment returned, and that nothing
has written since, is not kept: the recomputation takes it from there. All other tensors are kept, whatever the model
does between its blocks.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import ReferenceType, finalize, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from zeroshard.errors import PlanError
from zeroshard.platform import ranges
from zeroshard.platform.accelerator import is_accelerator
from zeroshard.recompute.context import RecomputeContext
from zeroshard.recompute.kept_inputs import Hooks, KeptInput, keep_input
from zeroshard.replay.replay import OTHER_VALUES, ForwardSamples, Replay, agrees
from zeroshard.step.context import Within
from zeroshard.units.hooks import place_of

Made = Callable[[int, int], Any]  # what a region made, by its number and that of the leaf of its output


class Held(Protocol):
    """A tensor that a slot holds."""

    def tensor(self) -> Tensor:
        """The tensor."""


@dataclass(slots=True)
class Call:
    """Computation of a block: its module with the number of its unit, its own forward, and results that are kept.

    Attributes:
        name: of the module, in a profile.
        again: how often it was computed again, and the seconds of that.
        made: seconds in which tensors of it were made again.
        forwards: in segments so far.
    """

    module: nn.Module
    unit: int
    forward: Callable[..., Any]
    operations: Callable[["Region"], AbstractContextManager[Any] | None]
    name: str = ""
    needed: int | None = None  # of kept results, as far as a recomputation is known to ask for them
    again: tuple[int, float] = (0, 0.0)
    made: float = 0.0
    forwards: int = 0


class _Linked:
    """A tensor that an earlier region of the segment makes ([Note: links])."""

    __slots__ = ("leaf", "region", "requires_grad")

    def __init__(self, region: int, leaf: int, tensor: Tensor) -> None:
        self.region, self.leaf, self.requires_grad = region, leaf, tensor.requires_grad


class SavedSlot:
    """Slot in the graph for a tensor that is computed again."""

    __slots__ = ("__weakref__", "dtype", "held", "number", "sample", "segment", "shape")

    def __init__(self, segment: "BlockSegment", number: int, tensor: Tensor) -> None:
        self.segment, self.number, self.shape, self.dtype = segment, number, tensor.shape, tensor.dtype
        self.held: Held | None = None
        self.sample: bytes | None = None

    def tensor(self) -> Tensor:
        """The tensor; the first read recomputes the segment."""
        if self.held is None:
            self.segment.compute_again(self.number)
            self.segment.filled()
        if self.held is None:
            raise differs(f"a tensor of shape {tuple(self.shape)} was not saved the second time")
        return self.held.tensor()


class RecomputedForward:
    """A forward that is computed again in the state in which it ran; made before it.

    Attributes:
        name: in a profile.
    """

    def __init__(self, name: str, replay: Replay) -> None:
        self.name, self._replay = name, replay
        self._contexts = _contexts_now(replay.device)

    def run_again(self, within: Sequence[AbstractContextManager[Any]], forward: Callable[..., Any], *args: Any) -> Any:
        """Call a function in the state of the forward, with gradients on, inside of further contexts."""
        contexts = [self._replay.again(), torch.enable_grad(), *within, *self._contexts()]
        if ranges.profiler._is_profiler_enabled:
            contexts.insert(0, ranges.named("recompute", self.name))
        with ExitStack() as stack:
            for each in contexts:
                stack.enter_context(each)  # type: ignore[arg-type]
            return forward(*args)

    def end(self) -> None:
        """The forward is over."""
        self._replay.end()

    def drop(self) -> None:
        """The graph is gone, or there will be none."""
        self._replay.drop()


class Region(RecomputedForward):
    """One forward of one block.

    Attributes:
        call: the block.
        kept: results that are not computed again, in their order.
        asked: how many of them the recomputation under way has asked for.
        again: whether a recomputation is under way.
        linked: whether a later region of the segment takes what it makes.
        choice: what of it is kept, where that is chosen block by block.
        saves_sums: whether it keeps what `once` makes.
        sums: bytes of results that were made in the forward alone.
        dropped: whether what its graph was to keep is computed again.
        samples: of its values, if recomputations are compared.
    """

    choice: Any = None
    saves_sums = True

    def __init__(self, call: Call, arguments: list[Any], spec: TreeSpec, replay: Replay, hooks: Hooks | None) -> None:
        super().__init__(call.name, replay)
        self.call, self._arguments, self._spec, self.hooks = call, arguments, spec, hooks
        self.slots: list[ReferenceType[SavedSlot] | None] = []
        self.kept: list[Any] = []
        self.asked, self.again, self.linked, self.sums = 0, False, False, 0
        self.dropped = False
        self.samples: ForwardSamples | None = None
        self._places: dict[int, int] = {}  # of kept results, by storage, where sums may be written into them

    def once(self, make: Callable[[], Tensor], written: Tensor) -> Tensor:
        """A result that is computed only in the forward; as `step.context.KeptResults`."""
        if not self.saves_sums:
            if (number := self._places.pop(place_of(written), None)) is not None:
                self.copy_kept(number)
            return make()
        if self.again:
            found = self.take()
            return make() if found is None else found
        result = make()
        self.sums += result.nbytes
        self.keep(result.clone())  # what follows may write into it
        return result

    def keep(self, result: Any) -> None:
        """Keep a result, a tensor or several, unless earlier recomputations stopped before reading it."""
        needed = self.call.needed is None or len(self.kept) < self.call.needed
        if not self.saves_sums:
            self._places |= {place_of(each): len(self.kept) for each in tree_leaves(result) if isinstance(each, Tensor)}
        self.kept.append(tree_map_only(Tensor, lambda each: KeptInput(each, self.hooks), result) if needed else None)

    def take(self) -> Any:
        """The next kept result; None where it was not kept."""
        kept = self.kept[self.asked] if self.asked < len(self.kept) else None
        self.asked += 1
        # Cut off each time: as an output of a recomputation it would hold the graph that holds it.
        return tree_map_only(KeptInput, lambda each: each.tensor().detach(), kept)

    def copy_kept(self, number: int) -> None:
        """Keep a copy of a result instead of it, which is about to be written."""
        kept = self.kept[number] if number < len(self.kept) else None
        copied = lambda each: KeptInput(each.tensor().clone(), self.hooks)  # noqa: E731
        self.kept[number : number + 1] = [tree_map_only(KeptInput, copied, kept)] if number < len(self.kept) else []

    def drop_saved(self) -> None:
        """Drop the slots' tensors, and results that can be recomputed, unless a recomputation is running."""
        if self.again:
            return
        self.dropped = True
        for slot in self.slots:
            if slot is not None and (found := slot()) is not None:
                found.held = None
        if not self.sums:
            self.kept = [None] * len(self.kept)

    @property
    def waiting(self) -> int:
        """The number of live slots without a tensor."""
        alive = (slot() for slot in self.slots if slot is not None)
        return sum(slot is not None and slot.held is None for slot in alive)

    @property
    def copied(self) -> int:
        """Bytes of buffers that are kept as they were before the forward."""
        return self._replay.nbytes

    def arguments(self, made: Made) -> Any:
        """Arguments of the block, with tensors that earlier regions `made`; arguments that were one tensor are one."""
        again: dict[int, Any] = {}
        for each in self._arguments:
            if id(each) in again:
                continue
            if isinstance(each, (KeptInput, _Linked)):
                tensor = each.tensor() if isinstance(each, KeptInput) else made(each.region, each.leaf).detach()
                again[id(each)] = tensor.requires_grad_() if each.requires_grad else tensor
            else:
                again[id(each)] = each
        return tree_unflatten([again[id(each)] for each in self._arguments], self._spec)

    def compute(self, context: RecomputeContext, made: Made, whole: bool) -> list[Any]:
        """Compute the forward again, fill the slots, and return the leaves of its output.

        Args:
            whole: whether its output is needed; else it ends with the last slot.
        """
        capture = _Capture(self, context, whole)
        args, kwargs = self.arguments(made)
        began = context.now()
        self.asked, self.again = 0, True
        try:
            mode = self.call.operations(self)
            within = [context.draws(self.call.module), Within(kept=self), capture.hooks()]
            within += [mode] if mode is not None else []
            output = self.run_again(within, partial(self.call.forward, **kwargs), *args)
        except _Enough:
            output = None
        finally:
            self.again = False
        leaves = tree_flatten(output)[0]
        if capture.unlike and (self.kept or self.samples is None or not self.samples.agree(leaves)):
            raise differs(OTHER_VALUES)  # and where all agree, it was memory without a value
        self.call.needed = max(self.asked, self.call.needed or 0)
        self.call.again = self.call.again[0] + 1, self.call.again[1] + context.now() - began
        return leaves


class _Capture:
    """Fills the slots of a region with the saved tensors of its recomputation."""

    def __init__(self, region: Region, context: RecomputeContext, whole: bool) -> None:
        self._region, self._context, self._whole, self._count = region, context, whole, 0
        self.waiting, self.unlike = region.waiting, False

    def hooks(self) -> saved_tensors_hooks:
        """The context of the recomputation."""
        return saved_tensors_hooks(self._pack, _read_again)

    def _pack(self, tensor: Tensor) -> None:
        slots, number = self._region.slots, self._count
        self._count += 1
        if number >= len(slots):
            raise differs("more tensors were saved the second time")
        found = slots[number]
        slot = None if found is None else found()
        if slot is None or slot.held is not None:
            return
        if (slot.shape, slot.dtype) != (tensor.shape, tensor.dtype):
            raise differs(
                f"a tensor of shape {tuple(slot.shape)} and {slot.dtype} is of shape {tuple(tensor.shape)} and "
                f"{tensor.dtype} the second time"
            )
        slot.held = self._context.hold(tensor)
        self.waiting -= 1
        self.unlike = self.unlike or not (slot.sample is None or agrees(tensor, slot.sample))
        if not (self.waiting or self._whole or self.unlike):
            raise _Enough


class BlockSegment:
    """Regions that are recomputed at once, from the input of the first.

    Args:
        context: of the recomputation.
        weights: the storages of weights.
        count: called for each region that is computed again.

    Attributes:
        often: whether a region may be computed again several times.
    """

    often = False
    graph: object = None  # of the whole forward, which lives as long as a part of it
    waits: Callable[[Region], None] | None = None  # called with regions that may be dropped

    def __init__(self, context: RecomputeContext, weights: set[int], count: Callable[[], None]) -> None:
        self._context, self._weights, self._count = context, weights, count
        self._regions: list[Region] = []
        self._made: dict[int, tuple[ReferenceType[Tensor], int, int, int]] = {}
        finalize(self, _drop, self._regions).atexit = False

    def __len__(self) -> int:
        return len(self._regions)

    def begin(self, call: Call, args: Any, kwargs: Any, replay: Replay) -> Region:
        """A region for the block that is about to run."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        leaves, spec = tree_flatten((args, kwargs))
        held: dict[int, KeptInput | _Linked] = {}
        arguments: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if id(leaf) not in held:
                    held[id(leaf)] = self._linked(leaf) or self._keep(leaf, hooks)
                arguments.append(held[id(leaf)])
            else:
                arguments.append(leaf)
        region = Region(call, arguments, spec, replay, hooks)
        if self._context.exact:
            region.samples = ForwardSamples(call.forwards, is_accelerator(self._context.device))
        call.forwards += 1
        self._regions.append(region)
        return region

    def cancel(self) -> None:
        """Leave out the region that was begun last: nothing of it is to be computed again."""
        self._regions[-1].slots.clear()
        self._regions[-1].drop()

    def end(self, output: Any) -> None:
        """The block has returned its output."""
        number, region = len(self._regions) - 1, self._regions[-1]
        region.end()
        leaves = tree_flatten(output)[0]
        if region.samples is not None:
            region.samples.returned(leaves)
        for leaf, tensor in enumerate(leaves):
            if isinstance(tensor, Tensor):
                self._made[id(tensor)] = ref(tensor), tensor._version, number, leaf

    def slot(self, tensor: Tensor) -> Any:
        """The slot in the graph for a tensor that the last region saves."""
        region = self._regions[-1]
        if place_of(tensor) in self._weights or (tensor.is_leaf and isinstance(tensor, nn.Parameter)):
            region.slots.append(None)
            return KeptInput(tensor, region.hooks)
        slot = SavedSlot(self, len(self._regions) - 1, tensor)
        if region.samples is not None:
            slot.sample = region.samples.saved(tensor, len(region.slots))
        region.slots.append(ref(slot))
        return slot

    def compute_again(self, number: int) -> None:
        """Recompute all regions, each from the outputs of the one before; a slot of region `number` is read."""
        asked = [region.linked or bool(region.waiting) for region in self._regions]
        made: list[list[Any]] = []
        for region, needed in zip(self._regions, asked, strict=True):
            made.append([])
            if needed:
                with self._context.gathered(region.call.unit):
                    made[-1] = region.compute(self._context, lambda r, leaf: made[r][leaf], region.linked)
                self._count()

    def filled(self) -> None:
        """Slots have been filled; they may be dropped where there is too little room."""
        waits = self.waits
        if waits is not None:
            for region in self._regions:
                waits(region)

    def _keep(self, tensor: Tensor, hooks: Hooks | None) -> KeptInput:
        """Keep an argument of a block; masks, positions and weights are held by others, too."""
        held = not tensor.requires_grad or place_of(tensor) in self._weights
        return keep_input(tensor, hooks, self._context, places=not held)

    def _linked(self, tensor: Tensor) -> _Linked | None:
        found = self._made.get(id(tensor))
        if found is None or found[0]() is not tensor or found[1] != tensor._version:
            return None
        self._regions[found[2]].linked = True
        return _Linked(found[2], found[3], tensor)


class _Enough(Exception):
    """Ends a recomputation whose slots are all filled."""

    def __init__(self) -> None:
        super().__init__("all tensors are there that the backward reads")


def read(saved: Any) -> Tensor:
    """The tensor of a slot."""
    tensor: Tensor = saved.tensor()
    return tensor


def differs(how: str, subject: str = "a block") -> PlanError:
    """The error of a recomputation that is not as its forward was."""
    return PlanError(
        f"{subject.capitalize()} computed other tensors in its recomputation than in its forward: {how}. What it "
        f"computes must depend on its arguments, parameters, buffers, plain attributes and random numbers alone; keep "
        f"its activations with recompute='off', or leave it out of the units."
    )


def _read_again(saved: Any) -> Tensor:
    raise differs("it ran a backward in its forward, through tensors that are not kept")


def _contexts_now(device: torch.device) -> Callable[[], list[AbstractContextManager[Any]]]:
    """A function of contexts that restore the present autocasting and function modes; none if they are unchanged."""
    kinds = sorted({"cpu", device.type})
    then = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
    modes = _get_current_function_mode_stack()

    def contexts() -> list[AbstractContextManager[Any]]:
        present = _get_current_function_mode_stack()
        found: list[AbstractContextManager[Any]] = [
            torch.autocast(kind, dtype, enabled)
            for kind, (enabled, dtype) in then.items()
            if enabled or torch.is_autocast_enabled(kind)
        ]
        return found + [each for each in modes if not any(each is other for other in present)]

    return contexts


def _drop(regions: list[Region]) -> None:
    for region in regions:
        region.drop()
