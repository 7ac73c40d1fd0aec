"""A disk in a rehearsal: its extents are counted, no file is made, and nothing is written or read."""

from collections.abc import Callable

import torch

from zeroshard.memory.disk import Disk, Extent
from zeroshard.memory.host import in_pages
from zeroshard.memory.ledger import Category, Ledger

Make = Callable[[int, torch.dtype], torch.Tensor]  # so many elements, zeroed


class ImaginedDisk(Disk):
    """The tier "disk" of one rank in a rehearsal.

    Args:
        ledger: holds every extent, in whole pages; what the last page does not need is padding.
        make: makes so many elements that are only counted.
    """

    def __init__(self, ledger: Ledger, make: Make) -> None:
        self._ledger, self._make, self._end = ledger, make, 0
        self._entries: list[tuple[Category, int, str, int]] = []

    def reserve(self, nbytes: int, category: Category, label: str, padding: int = 0) -> Extent:
        """A place for `nbytes`, of which `padding` bytes hold nothing.

        Raises:
            BudgetExceeded: the budget cannot hold it.
        """
        size = in_pages(nbytes)
        hollow = padding + size - nbytes
        self._ledger.take(category, size, label, hollow, "disk")
        self._entries.append((category, size, label, hollow))
        extent = Extent(self._end, nbytes, label)
        self._end += size
        return extent

    def slab(self, numel: int, dtype: torch.dtype, category: Category, label: str, padding: int = 0) -> torch.Tensor:
        """A new 1-D tensor of `numel` elements, of which `padding` elements hold nothing.

        Raises:
            BudgetExceeded: the budget cannot hold it.
        """
        self.reserve(numel * dtype.itemsize, category, label, padding * dtype.itemsize)
        return self._make(numel, dtype)

    def write(self, extent: Extent, tensor: torch.Tensor) -> None:
        """Nothing."""

    def read(self, extent: Extent, into: torch.Tensor) -> None:
        """Nothing."""

    def bandwidth(self) -> tuple[float, float]:
        """No time passes."""
        return float("inf"), float("inf")

    def close(self) -> None:
        """Take everything off the ledger."""
        for category, nbytes, label, padding in self._entries:
            self._ledger.give(category, nbytes, label, padding, "disk")
        self._entries.clear()
