"""M_D of ZeRO-R (Rajbhandari et al., 1910.02054, section 6.3): checkpoints in one buffer whose layout is planned.

The inputs of recomputed blocks live from the forward to the backward, and the blocks' temporary tensors would leave
gaps between them. So they are copied into one buffer, and in a pipeline the inputs of chunks arrive in it. The first
step records the lifetime of each; the layout of later steps follows from it. The other long-lived tensors, gradients
among them, lie in flats that are made before the first step.

[Note: other steps] If checkpoints have other sizes than planned, or another order of allocations, the rest of the
step's checkpoints lie outside of the buffer, and the layout is planned anew from this step.

[Note: copies out] A recomputation starts from a copy of its checkpoint: a module may hold its input for longer than the
buffer does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from zeroshard.saved.kept import Kept
from zeroshard.saved.storages import ViewHandle, Views
from zeroshard.units.hooks import place_of

ALIGNED = 64  # bytes; no kernel depends on a larger alignment


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The lifetime of one checkpoint: its first and last moment, and its bytes."""

    first: int
    last: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ArenaUse:
    """The use of a checkpoint arena.

    Attributes:
        nbytes: of the buffer.
        live_bytes: the most that checkpoints take at once.
        checkpoints: of a step.
        buffers: how many buffers were made so far, one at constant shapes.
        outside: checkpoints that lay outside since the first buffer was made.
    """

    nbytes: int
    live_bytes: int
    checkpoints: int
    buffers: int
    outside: int


class CheckpointArena:
    """Places checkpoints in a buffer, from the second step on.

    Args:
        device: of the buffer.
        hold: keeps a tensor on the device, counted while the result lives.
    """

    reads = False

    def __init__(self, device: torch.device, hold: Callable[[Tensor], Kept]) -> None:
        self._device, self._hold = device, hold
        self._kind = type(torch.empty(0))  # tensors of a rehearsal have another
        self._views = Views()
        self._events: list[tuple[int, int]] = []  # of the step under way: a checkpoint's number and bytes, 0 when freed
        self._planned: list[tuple[int, int]] = []
        self._offsets: list[int] = []
        self._follows = False  # whether the step under way is as planned so far
        self._step = self._count = self._live = 0
        self._rooms: dict[int, tuple[Tensor, Kept, int, int]] = {}  # of chunks: what is held, its step and its number
        self._memory: Kept | None = None
        self.use = ArenaUse(0, 0, 0, 0, 0)

    def place(self, tensor: Tensor) -> "PlacedCheckpoint | None":
        """Copy a checkpoint into the buffer, if it has room; None for a tensor that a copy would not restore exactly.

        Those are tensors with gaps, on another device, or of a subclass. The input of a chunk from `take` needs no
        second copy.
        """
        if type(tensor) is not self._kind or tensor.device != self._device or not _is_dense(tensor):
            return None
        if any(place_of(tensor) == place_of(room) for room, *_ in self._rooms.values()):
            return None
        found = self._views.find(tensor)
        if isinstance(found, PlacedCheckpoint):
            return found
        number, offset = self._make(tensor.nbytes)
        place = PlacedCheckpoint(tensor)
        if offset is not None:
            place.copy_into(self._view(tensor.dtype, tensor.shape, tensor.stride(), offset), tensor, self._hold)
        finalize(place, self._free, self._step, number).atexit = False
        self._views.enter(tensor, place)
        return place

    def take(self, numel: int, dtype: torch.dtype, label: str) -> Tensor:
        """An uninitialised tensor [numel] for the input of a chunk, in the buffer if it has room; return it by `give`.

        One outside of the buffer is freed by `give`; in the next step the buffer has its place.
        """
        number, offset = self._make(numel * dtype.itemsize)
        if offset is None:
            room = torch.empty(numel, dtype=dtype, device=self._device)
        else:
            room = self._view(dtype, (numel,), (1,), offset)
        self._rooms[id(room)] = room, self._hold(room), self._step, number
        return room

    def give(self, tensor: Tensor) -> None:
        """Return a tensor of `take`."""
        _, _, step, number = self._rooms.pop(id(tensor))
        self._free(step, number)

    @property
    def readings(self) -> Mapping[str, Mapping[str, Any]]:
        """None of layers."""
        return {}

    def before_update(self) -> None:
        """The layout is planned at the end of the step."""

    def end_step(self, skipped: bool) -> None:
        """Plan the layout from the step, if it differed from the plan and all its checkpoints are free."""
        whole = not self._live
        if whole and self._events != self._planned:
            self._planned, lives = self._events, lifetimes_of(self._events)
            self._offsets, nbytes = layout_of(lives)
            if nbytes > self.use.nbytes:
                self._memory = None
                self._memory = self._hold(torch.empty(nbytes, dtype=torch.uint8, device=self._device))
                self.use = replace(self.use, nbytes=nbytes, buffers=self.use.buffers + 1)
            self.use = replace(self.use, live_bytes=most_alive(lives), checkpoints=len(lives))
        self._events, self._count, self._follows = [], 0, whole and self._memory is not None
        self._step += 1

    def _make(self, nbytes: int) -> tuple[int, int | None]:
        """The number of a new checkpoint, and its offset in the buffer; None for one that lies outside."""
        number = self._count
        self._count += 1
        self._live += 1
        self._happens(number, -(-max(nbytes, 1) // ALIGNED) * ALIGNED)
        if self._follows:
            return number, self._offsets[number]
        if self.use.buffers:
            self.use = replace(self.use, outside=self.use.outside + 1)
        return number, None

    def _happens(self, number: int, nbytes: int) -> None:
        at = len(self._events)
        self._events.append((number, nbytes))
        self._follows = self._follows and at < len(self._planned) and self._planned[at] == (number, nbytes)

    def _free(self, step: int, number: int) -> None:
        self._live -= 1
        if step == self._step:
            self._happens(number, 0)

    def _view(self, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
        """A tensor at `offset` of the buffer, whose version counts its own writes."""
        assert self._memory is not None
        storage = self._memory.saved.untyped_storage()
        view = torch.empty(0, dtype=dtype, device=self._device)
        return view.set_(storage, offset // dtype.itemsize, shape, strides)


class PlacedCheckpoint(ViewHandle):
    """A checkpoint, for as long as this lives.

    Attributes:
        held: its copy in the buffer; None if it lies outside.
    """

    __slots__ = ("held",)

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.held: Kept | None = None

    def copy_into(self, view: Tensor, tensor: Tensor, hold: Callable[[Tensor], Kept]) -> None:
        """Put the values into a view of the buffer."""
        view.copy_(tensor.detach())
        self.held = hold(view)

    def tensor(self) -> Tensor:
        """A copy of the checkpoint ([Note: copies out])."""
        assert self.held is not None
        return self.held.tensor().clone(memory_format=torch.preserve_format)


def lifetimes_of(events: Sequence[tuple[int, int]]) -> list[Lifetime]:
    """The lifetimes of checkpoints by their numbers, from events (number, bytes), with 0 bytes where one is freed."""
    made: dict[int, tuple[int, int]] = {}
    found: dict[int, Lifetime] = {}
    for moment, (number, nbytes) in enumerate(events):
        if nbytes:
            made[number] = moment, nbytes
        else:
            found[number] = Lifetime(made[number][0], moment, made[number][1])
    return [found[number] for number in sorted(found)]


def most_alive(lives: Sequence[Lifetime]) -> int:
    """The most live bytes at one moment."""
    changes = sorted([(life.first, life.nbytes) for life in lives] + [(life.last, -life.nbytes) for life in lives])
    highest = total = 0
    for _, change in changes:
        total += change
        highest = max(highest, total)
    return highest


def layout_of(lives: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Offsets without overlaps at any moment, and the total bytes.

    The optimum is hard to find, so three orders are tried, each tensor at the lowest offset that is free during its
    lifetime; in allocation order, nested lifetimes and equal sizes give the optimum.
    """
    least = most_alive(lives)
    best: tuple[list[int], int] | None = None
    for order in (_by_start, _by_size, _by_length):
        offsets: dict[int, int] = {}
        for number in sorted(range(len(lives)), key=lambda n: order(lives[n])):
            offsets[number] = _lowest(lives, offsets, number)
        nbytes = max((offsets[number] + life.nbytes for number, life in enumerate(lives)), default=0)
        if best is None or nbytes < best[1]:
            best = [offsets[number] for number in range(len(lives))], nbytes
        if best[1] == least:
            break
    assert best is not None
    return best


def _lowest(lives: Sequence[Lifetime], offsets: Mapping[int, int], number: int) -> int:
    """The lowest offset that is free while tensor `number` lives."""
    mine, offset = lives[number], 0
    beside = ((offsets[n], lives[n]) for n in offsets if lives[n].first < mine.last and mine.first < lives[n].last)
    for start, other in sorted(((start, other.nbytes) for start, other in beside)):
        if start - offset >= mine.nbytes:
            break
        offset = max(offset, start + other)
    return offset


def _by_start(life: Lifetime) -> tuple[int, ...]:
    return (life.first,)


def _by_size(life: Lifetime) -> tuple[int, ...]:
    return -life.nbytes, life.first


def _by_length(life: Lifetime) -> tuple[int, ...]:
    return life.first - life.last, life.first


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills the bytes from its first element to its last."""
    if tensor.layout is not torch.strided:
        return False
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and 1 + sum((n - 1) * step for n, step in steps) == tensor.numel()
