"""The index table: the interval of each parameter in a flat buffer, and the interval of each rank's slice."""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter in a flat buffer.

    Attributes:
        name: the parameter's name in the user's model (of tied parameters, the first).
        shape: its shape.
        offset: its first element in the buffer.
        numel: its number of elements.
    """

    name: str
    shape: torch.Size
    offset: int
    numel: int

    @property
    def stop(self) -> int:
        """One past its last element in the buffer."""
        return self.offset + self.numel


@dataclass(frozen=True, slots=True)
class Index:
    """The table of a flat buffer: parameters one behind the other, then padding to a multiple of `ranks`.

    Rank r owns the even slice [r*S, (r+1)*S), S = `slice_numel`; the padding is shorter than `ranks`.
    """

    entries: tuple[Entry, ...]
    ranks: int

    @classmethod
    def of(cls, parameters: list[tuple[str, torch.Size]], ranks: int) -> "Index":
        """Lay out named shapes one behind the other."""
        entries, offset = [], 0
        for name, shape in parameters:
            entries.append(Entry(name, shape, offset, shape.numel()))
            offset += shape.numel()
        return cls(tuple(entries), ranks)

    @property
    def numel(self) -> int:
        """Elements that hold parameters."""
        return self.entries[-1].stop if self.entries else 0

    @property
    def slice_numel(self) -> int:
        """Elements of one rank's slice."""
        return -(-self.numel // self.ranks)

    @property
    def padded_numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.slice_numel * self.ranks

    @property
    def padding(self) -> int:
        """Elements without a parameter, at the end of the buffer."""
        return self.padded_numel - self.numel

    def interval(self, rank: int) -> tuple[int, int]:
        """First and one past the last element of a rank's slice."""
        return rank * self.slice_numel, (rank + 1) * self.slice_numel

    def padding_in(self, start: int, stop: int) -> int:
        """How many elements of [start, stop) are padding."""
        return max(0, stop - max(start, self.numel))

    def number_at(self, element: int) -> int:
        """The number of the parameter that holds `element`; for padding, of the last one."""
        return max(0, bisect.bisect_right(self.entries, element, key=lambda entry: entry.offset) - 1)

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(number, first, one past the last element in the buffer) of every parameter in [start, stop)."""
        for number, entry in enumerate(self.entries):
            low, high = max(start, entry.offset), min(stop, entry.stop)
            if low < high:
                yield number, low, high
