"""The index table: the interval of each parameter in a flat buffer, and the interval of each rank's slice."""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

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
    """The table of a flat buffer: parameters one behind the other, and the slice of each rank.

    Slices are even, rank r's is [r*S, (r+1)*S), and padding shorter than `ranks` fills the last; or they lie between
    borders of parameters, or of rows of one, so that each rank owns whole ones, without padding (ragged slices, as in
    veScale's FSDP).

    Attributes:
        entries: the parameters.
        ranks: among which the buffer is sliced.
        bounds: the `ranks` + 1 places between which uneven slices lie; None for even ones.
    """

    entries: tuple[Entry, ...]
    ranks: int
    bounds: tuple[int, ...] | None = None

    @classmethod
    def of(cls, parameters: list[tuple[str, torch.Size]], ranks: int, bounds: tuple[int, ...] | None = None) -> "Index":
        """Lay out named shapes one behind the other."""
        entries, offset = [], 0
        for name, shape in parameters:
            entries.append(Entry(name, shape, offset, shape.numel()))
            offset += shape.numel()
        assert bounds is None or (bounds[0], bounds[-1], len(bounds)) == (0, offset, ranks + 1), bounds
        return cls(tuple(entries), ranks, bounds)

    @property
    def numel(self) -> int:
        """Elements that hold parameters."""
        return self.entries[-1].stop if self.entries else 0

    @property
    def padded_numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return -(-self.numel // self.ranks) * self.ranks if self.bounds is None else self.numel

    @property
    def padding(self) -> int:
        """Elements without a parameter, at the end of the buffer."""
        return self.padded_numel - self.numel

    def interval(self, rank: int) -> tuple[int, int]:
        """First and one past the last element of a rank's slice."""
        if self.bounds is not None:
            return self.bounds[rank], self.bounds[rank + 1]
        size = self.padded_numel // self.ranks
        return rank * size, (rank + 1) * size

    def slice_numel(self, rank: int) -> int:
        """Elements of a rank's slice, padding included."""
        start, stop = self.interval(rank)
        return stop - start

    def share(self, rank: int) -> tuple[Fraction, Fraction]:
        """Elements and padding of a rank's slice by the formula, which deals out even slices' padding to all alike."""
        if self.bounds is not None:
            return Fraction(self.slice_numel(rank)), Fraction(0)
        return Fraction(self.numel, self.ranks), Fraction(self.padding, self.ranks)

    def padding_in(self, start: int, stop: int) -> int:
        """How many elements of [start, stop) are padding."""
        return max(0, stop - max(start, self.numel))

    def number_at(self, element: int) -> int:
        """The number of the parameter that holds `element`; for padding, of the last one."""
        return max(0, bisect.bisect_right(self.entries, element, key=lambda entry: entry.offset) - 1)

    def borders(self, chosen: bytes) -> list[int]:
        """The first elements of parameters that are `chosen` where the one before is not, or the other way round."""
        ends = zip(chosen, chosen[1:], self.entries[1:], strict=False)
        return [entry.offset for before, after, entry in ends if before != after]

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(number, first, one past the last element in the buffer) of every parameter in [start, stop)."""
        for number, entry in enumerate(self.entries):
            low, high = max(start, entry.offset), min(stop, entry.stop)
            if low < high:
                yield number, low, high
