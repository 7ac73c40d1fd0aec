"""Recomputation of a model's blocks: each runs inside of a segment, which keeps only its input.

Only a block's own forward is recomputed: hooks around it, which gather its unit or divide its activations, run once.

[Note: blocks that are left alone] In the first forward of a block that is trained, everything that it saves is kept
too. If it shows there that it cannot be computed again (it writes into its own arguments, or runs a backward inside),
or that it recomputes parts of itself (`torch.utils.checkpoint`), or is compiled, it is left as it is from then on,
that forward included. A block inside of something that the model recomputes is left alone each time.

[Note: caches] transformers' models pass each block a cache of keys and values, which a second forward would write
again, and which holds tensors that are to be freed. Training does not read it, so a block gets None, as under
transformers' own recomputation.

[Note: the last segment] Where the backward follows the forward at once, what the last segment saves is asked for
before anything else, so keeping it costs no more than computing it again would, and a segment's forward is spared. In
a pipeline other forwards come between, and the last segment is computed again too; so it is where segments are single
blocks, of which it would spare little and add to the logits.
"""

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import accumulate
from math import sqrt
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from zeroshard.comm.collectives import Comm
from zeroshard.errors import BudgetExceeded
from zeroshard.parts.technique import StepEnd
from zeroshard.recompute.arena import ArenaUse
from zeroshard.recompute.context import RecomputeContext
from zeroshard.recompute.segments import BlockSegment, Call, Region, SavedSlot, read
from zeroshard.replay.generators import KINDS, ReachedGenerators, Source, held_by, sources_among
from zeroshard.replay.replay import ModelDraws, Replay
from zeroshard.saved.kept import CHECKPOINTS, is_compiled, recomputed_by_others
from zeroshard.step.context import Within
from zeroshard.units.forwards import insert, inside
from zeroshard.units.hooks import outside, transforming

Operations = Callable[[Region], AbstractContextManager[Any] | None]


class Recomputation:
    """Recomputation around the forwards of a model's blocks.

    Args:
        model: whose forwards are passes over the blocks.
        blocks: modules with the numbers of their units.
        lengths: of the segments of so many blocks, in their order.
        last: whether the last segment is computed again too ([Note: the last segment]).
        context: of the recomputation.
        operations: makes the mode in which a region's forwards run.
        save_sums: whether sums over ranks are kept.

    Attributes:
        recomputed: forwards of blocks that were computed again so far.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[tuple[nn.Module, int]],
        lengths: Callable[[int], list[int]],
        context: RecomputeContext,
        operations: Operations,
        save_sums: bool = True,
        last: bool = True,
    ) -> None:
        self.recomputed = 0
        self._units = [unit for _, unit in blocks]
        self._context, self._lengths, self._save_sums = context, lengths, save_sums
        self._last = last
        self._segment: BlockSegment | None = None
        self._room = 0  # regions that the segment may still take
        self._sizes: list[int] = []  # of the segments to come in this pass
        self._kept = 0  # blocks of the last segment
        self._weights: set[int] = set()  # storages
        self._counts: dict[nn.Module | None, int] = {None: len(blocks)}  # blocks in a pass, by its first
        self._first: nn.Module | None = None
        self._called = 0
        self._inside = False
        modules = {id(each): each for block, _ in blocks for each in block.modules()}
        self._draws = ModelDraws(ReachedGenerators(modules.values(), [inside(block, "segment") for block, _ in blocks]))
        names = {module: name for name, module in model.named_modules()}
        for module, unit in blocks:
            if not is_compiled(module):
                BlockForward(self, Call(module, unit, module.forward, operations, names.get(module, "")))
        model.register_forward_pre_hook(outside(self._begin))
        model.register_forward_hook(outside(self._end), always_call=True)

    def run(self, block: "BlockForward", args: Any, kwargs: Any) -> Any:
        """A block's forward."""
        kept = block.left_alone or self._inside or not torch.is_grad_enabled() or transforming()
        if kept or recomputed_by_others():
            return block.call.forward(*args, **kwargs)
        if any(map(_is_cache, (*args, *kwargs.values()))):
            args = tuple(None if _is_cache(value) else value for value in args)
            kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
            kwargs |= {"use_cache": False} if "use_cache" in kwargs else {}
        segment, call = self._next_segment(block.call.module, (args, kwargs)), block.call
        if segment is None:
            return self._keep_all(call, args, kwargs)
        sources = self._draws.sources(block.draws or not block.known)
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, KINDS)]
        if not block.known:
            block.held = held_by(block.modules)
        sources = (*sources, *(sources_among(given) if given else ()), *block.held)
        device, ledger = self._context.device, self._context.ledger
        replay = Replay(block.modules, device, ledger, segment.often, sources)
        region = segment.begin(call, args, kwargs, replay)
        watch = None if block.known else _FirstForward(segment, self._context, (args, kwargs))
        self._inside = True
        try:
            output = self._compute(region, (args, kwargs), watch.hooks if watch else (segment.slot, read))
        except BaseException:
            segment.cancel()
            self._segment = None
            raise
        finally:
            self._inside = False
        segment.end(output)
        block.draws = block.draws or replay.others.drew
        if watch is not None:
            block.known, block.left_alone = True, watch.ended()
        if block.left_alone:
            segment.cancel()
            self._segment = None
        self._block_ended(block.left_alone)
        return output

    def brings_twice(self, unit: int) -> bool:
        """Whether a unit is gathered for a recomputation and once more for its backward, under stage 3.

        Only the last two blocks of a segment stay from one to the other.
        """
        sizes = self._lengths(len(self._units))
        for stop, size in zip(accumulate(sizes), sizes[: len(sizes) - (not self._last)], strict=False):
            if unit in self._units[stop - size : max(stop - 2, 0)]:
                return True
        return False

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """Decisions by block; none for a fixed recomputation."""
        return []

    def step_ends(self, comm: Comm, world: Comm) -> list[StepEnd]:
        """Its parts of the end of a step, with the ranks of a stage and all ranks."""
        return [] if self._context.arena is None else [self._context.arena]

    @property
    def arena(self) -> ArenaUse | None:
        """The use of the arena of checkpoints, if there is one."""
        return None if self._context.arena is None else self._context.arena.use

    def _compute(self, region: Region, arguments: Any, hooks: Any, watching: Any = None) -> Any:
        """A block's forward, with `hooks` for its saved tensors."""
        args, kwargs = arguments
        with ExitStack() as stack:
            stack.enter_context(saved_tensors_hooks(*hooks))
            region.saves_sums = self._save_sums and (region.choice is None or region.choice.computed)
            for context in (Within(kept=region), region.call.operations(region), watching):
                stack.enter_context(context) if context is not None else None
            return region.call.forward(*args, **kwargs)

    def _keep_all(self, call: Call, args: Any, kwargs: Any) -> Any:
        """A block's forward that keeps all saved tensors."""
        return call.forward(*args, **kwargs)

    def _block_ended(self, left_alone: bool) -> None:
        """The forward of a block in a segment is over."""

    def _next_segment(self, module: nn.Module, arguments: Any) -> BlockSegment | None:
        """The segment that takes the next region; None for one that is kept."""
        if self._called == 0:
            self._first = module
            self._sizes = self._lengths(self._counts.get(module, self._counts[None]))
            self._kept = 0 if self._last else self._sizes.pop()
            self._weights = self._context.places()
        self._called += 1
        if not self._room and not self._sizes and self._kept:
            self._kept -= 1
            return None
        if self._segment is None or not self._room:
            self._segment = BlockSegment(self._context, self._weights, self._count)
            self._room = self._sizes.pop(0) if self._sizes else 1
        self._room -= 1
        return self._segment

    def _begin(self, *_: Any) -> None:
        """The model's forward begins."""
        self._segment, self._room, self._called, self._inside = None, 0, 0, False
        self._draws.begin(torch.is_grad_enabled())

    def _end(self, *_: Any) -> None:
        """It ends; the graph alone holds its segments."""
        if self._called:
            self._counts[self._first] = self._called
        self._segment, self._called = None, 0
        self._draws.end()

    def _count(self) -> None:
        self.recomputed += 1


class BlockForward:
    """The layer of a block's forward that is computed again; a deep copy of the block has its own forward.

    Attributes:
        call: what it computes.
        modules: all in it, whose buffers may change.
        known: whether it was seen to run in training.
        left_alone: whether everything that it saves is kept ([Note: blocks that are left alone]).
        draws: whether it drew random numbers that are not torch's own.
        held: generators that its modules have.
    """

    def __init__(self, recomputation: Recomputation, call: Call) -> None:
        self._recomputation, self.call = recomputation, call
        self.modules = list(call.module.modules())
        self.known = self.left_alone = self.draws = False
        self.held: list[Source] = []
        insert(call.module, "segment", self._around)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._recomputation.run(self, args, kwargs)

    def _around(self, inner: Callable[..., Any]) -> "BlockForward":
        self.call.forward = inner
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.call.forward, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.call.forward,)


class _FirstForward:
    """A block's first forward: it keeps all saved tensors, and tests whether the block can be recomputed."""

    def __init__(self, segment: BlockSegment, context: RecomputeContext, arguments: Any) -> None:
        self._segment, self._context = segment, context
        self._taken = [(tensor, tensor._version) for tensor in tree_leaves(arguments) if isinstance(tensor, Tensor)]
        self._slots: list[SavedSlot] = []
        self._shown, self._over = False, False
        self._full: BudgetExceeded | None = None

    @property
    def hooks(self) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """Hooks of saved tensors around the forward."""
        return self._pack, self._unpack

    def ended(self) -> bool:
        """Whether the block is to be left alone; if not, kept tensors are freed."""
        written = any(tensor._version != version for tensor, version in self._taken)
        self._over, self._taken = True, []
        leave = self._shown or written
        if leave and self._full is not None:
            raise self._full
        for slot in self._slots if not leave else ():
            slot.held = None
        self._slots = []
        return leave

    def _pack(self, tensor: Tensor) -> Any:
        slot = self._segment.slot(tensor)
        self._shown = self._shown or _inside_checkpoint()
        if isinstance(slot, SavedSlot) and self._full is None:
            try:
                slot.held = self._context.hold(tensor)
                self._slots.append(slot)
            except BudgetExceeded as error:  # it is kept to be left alone, if that turns out to be needed
                self._full = error
                for each in self._slots:
                    each.held = None
        return slot

    def _unpack(self, saved: Any) -> Tensor:
        self._shown = self._shown or not self._over  # a backward inside of the forward
        return read(saved)


def _inside_checkpoint() -> bool:
    """Whether torch's own recomputation saves the inputs of a function now."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not Recomputation.run.__code__:
        if frame.f_code.co_filename == CHECKPOINTS:
            return True
        frame = frame.f_back
    return False


def _is_cache(value: Any) -> bool:
    """Whether a value is a cache of keys and values ([Note: caches])."""
    return hasattr(value, "get_seq_length")


def _itself(forward: Any) -> Any:
    return forward


def one_by_one(blocks: int) -> list[int]:
    """Segments of one block each."""
    return [1] * blocks


def by_square_root(blocks: int) -> list[int]:
    """The lengths of about √l segments of l blocks, which differ by one at most (1604.06174, section 3)."""
    segments = max(1, round(sqrt(blocks)))
    return [blocks * (n + 1) // segments - blocks * n // segments for n in range(segments)]


LENGTHS: Mapping[str, Callable[[int], list[int]]] = {
    "schedule": one_by_one,
    "blocks": one_by_one,
    "selective": one_by_one,
    "sqrt": by_square_root,
}


def no_operations(region: Region) -> None:
    """No mode: no results of operations are kept."""
