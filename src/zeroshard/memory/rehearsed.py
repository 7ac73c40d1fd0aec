"""A disk in a rehearsal: its extents are counted, no file is made, and nothing is written or read."""

from collections.abc import Callable

import torch

from zeroshard.memory.disk import Disk, Extent
from zeroshard.memory.host import in_pages
from zeroshard.memory.ledger import Category, Ledger

Make = Callable[[int, torch.dtype], torch.Tensor]  # zeroed elements


class ImaginedDisk(Disk):
    """The tier "disk" of one rank in a rehearsal.

    Args:
        ledger: enters every extent, in whole pages; the unused rest of the last page is padding.
        make: makes the elements of a slab, which are only counted.
    """

    def __init__(self, ledger: Ledger, make: Make) -> None:
        self._ledger, self._make, self._end = ledger, make, 0
        self._entries: list[tuple[Category, int, str, int]] = []

    def reserve(self, nbytes: int, category: Category, label: str, padding: int = 0) -> Extent:
        """A place for `nbytes`, of which `padding` bytes hold no data.

        Raises:
            BudgetExceeded: the budget cannot hold it.
        """
        size = in_pages(nbytes)
        unused = padding + size - nbytes
        self._ledger.take(category, size, label, unused, "disk")
        self._entries.append((category, size, label, unused))
        extent = Extent(self._end, nbytes, label)
        self._end += size
        return extent

    def slab(self, numel: int, dtype: torch.dtype, category: Category, label: str, padding: int = 0) -> torch.Tensor:
        """A new 1-D tensor of `numel` elements, of which `padding` elements hold no data.

        Raises:
            BudgetExceeded: the budget cannot hold it.
        """
        self.reserve(numel * dtype.itemsize, category, label, padding * dtype.itemsize)
        return self._make(numel, dtype)

    def write(self, extent: Extent, tensor: torch.Tensor) -> None:
        """Do nothing."""

    def read(self, extent: Extent, into: torch.Tensor) -> None:
        """Do nothing."""

    def bandwidth(self) -> tuple[float, float]:
        """Without limit: reading and writing take no time."""
        return float("inf"), float("inf")

    def close(self) -> None:
        """Strike all extents off the ledger."""
        for category, nbytes, label, padding in self._entries:
            self._ledger.give(category, nbytes, label, padding, "disk")
        self._entries.clear()
