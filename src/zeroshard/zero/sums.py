"""The sum of the reduced gradients of one slice, on the device."""

from collections.abc import Iterator

import torch

from zeroshard.comm.collectives import Comm
from zeroshard.memory.ledger import Category, Ledger
from zeroshard.parts.planned import Planned, Wire, Work, on_device
from zeroshard.platform.transport import same_place
from zeroshard.units import Flat, norm_of
from zeroshard.zero.gradients import GradientBuffer


class BufferSum:
    """The sum of a single rank: the gradient buffer itself, to which autograd adds.

    Attributes:
        adds: whether a mean has come since the last `consume`, to which the next is added.
    """

    def __init__(self, buffer: GradientBuffer) -> None:
        self._buffer = buffer
        self.adds = False

    @property
    def total(self) -> torch.Tensor:
        """The sum [S] as it is."""
        return self._buffer.ready()

    @property
    def apart(self) -> bool:
        """Whether it lies outside of the gradient buffer."""
        return False

    @property
    def wide(self) -> bool:
        """Whether it has a buffer of its own in fp32 or wider."""
        return False

    def room(self) -> torch.Tensor:
        """Where the next mean goes, or is added."""
        return self.total

    def put(self, mean: torch.Tensor) -> None:
        """A mean has been written into the room."""
        self.adds = True

    def make_way(self) -> None:
        """The gradient buffer is about to be written; autograd adds to the sum in place."""

    def widen(self, empty: bool = False) -> None:
        """The gradient buffer is widened by itself."""

    def release(self) -> None:
        """Nothing is under way."""

    def settle(self) -> torch.Tensor:
        """The sum [S] since the last `consume`."""
        return self.total

    def norm(self) -> torch.Tensor:
        """Its 2-norm, a scalar; in fp32 at least."""
        return norm_of(self.settle())

    def clear(self, low: int, high: int) -> None:
        """Let elements [low, high) of the slice be zeros; those in the gradient buffer are by now."""

    def changed(self, filled: bool = False) -> None:
        """The sum was changed in place; with `filled`, it holds gradients of other ranks."""
        self.adds = self.adds or filled

    def consume(self) -> None:
        """The next mean begins a new sum."""
        self.adds = False

    def planned(self) -> Iterator[Planned]:
        """No bytes beside the gradient buffer."""
        yield from ()

    def wire(self, work: Work) -> Wire:
        """It stays on the device."""
        yield from ()


class DeviceSum(BufferSum):
    """The sum in this rank's slice of the gradient buffer, or in a buffer of its own.

    Args:
        dtype: of a buffer of its own from the start; None for a place in the gradient buffer, as long as it can be.
    """

    def __init__(
        self, buffer: GradientBuffer, flat: Flat, comm: Comm, ledger: Ledger, dtype: torch.dtype | None
    ) -> None:
        super().__init__(buffer)
        self._flat, self._ledger, self._device = flat, ledger, comm.mesh.device
        self._rank, self._interval = comm.mesh.rank, flat.index.interval(comm.mesh.rank)
        self._own = None if dtype is None else self._make(dtype)
        self._planned = dtype

    @property
    def total(self) -> torch.Tensor:
        """The sum [S]; it may lie in the gradient buffer, whose other slices are spent then."""
        if self._own is not None:
            return self._own
        start, stop = self._interval
        whole = self._buffer.ready()
        return whole if stop - start == whole.numel() else whole[start:stop]

    @property
    def apart(self) -> bool:
        """Whether it lies outside of the gradient buffer."""
        return self._own is not None

    @property
    def wide(self) -> bool:
        """Whether it has a buffer of its own in fp32 or wider."""
        return self._own is not None and self._own.itemsize >= 4

    def make_way(self) -> None:
        """The gradient buffer is about to be written: a sum that lies in it moves out."""
        if self.adds and self._own is None:
            self._separate()

    def put(self, mean: torch.Tensor) -> None:
        """A mean has come; unless it was written into the room, copy or add it."""
        total = self.total
        if not same_place(mean, total):
            total.add_(mean) if self.adds else total.copy_(mean)
        self.adds = True

    def widen(self, empty: bool = False) -> None:
        """Be in fp32 or wider from now on.

        Args:
            empty: even while it holds nothing and has its place in the gradient buffer, unless that is as wide.
        """
        empty = empty and self._buffer.dtype.itemsize < 4
        narrow = self.adds or empty if self._own is None else self._own.itemsize < 4
        if narrow:
            self._separate()

    def settle(self) -> torch.Tensor:
        """The sum [S] since the last `consume`, zeros if there was none."""
        if not self.adds:
            self.total.zero_()
        return self.total

    def clear(self, low: int, high: int) -> None:
        """Let elements [low, high) of the slice be zeros."""
        if self.adds:
            self.total[low:high].zero_()

    def planned(self) -> Iterator[Planned]:
        """A slice, if it has a buffer of its own from the start; as wide as then."""
        if self._planned is not None:
            index = self._flat.index
            yield on_device(index, Category.GRADIENTS, self._planned.itemsize, self._rank)

    def _make(self, dtype: torch.dtype) -> torch.Tensor:
        index, label = self._flat.index, f"gradient slice {self._flat.label}"
        start, stop = self._interval
        padding = index.padding_in(start, stop)
        return self._ledger.empty(stop - start, dtype, self._device, Category.GRADIENTS, label, padding)

    def _separate(self) -> None:
        old, before = self._own, self.total
        total = self._make(torch.promote_types(self._flat.dtype, torch.float32))
        total.copy_(before)
        self._own = total
        if old is not None:
            padding = self._flat.index.padding_in(*self._interval) * old.itemsize
            self._ledger.give(Category.GRADIENTS, old.nbytes, f"gradient slice {self._flat.label}", padding)
