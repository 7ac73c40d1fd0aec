"""Boxes of a tensor: a start and a length per dimension.

A checkpoint stores the slices of ranks as boxes: a range of a flattened tensor is a few boxes, and so is a range of a
tensor-parallel shard, which is a box itself. The values of several boxes lie in one flat tensor, box after box, each in
row-major order.
"""

import itertools
import math
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

PRIME = 2**127 - 1  # modulus of the arithmetic in `tiles`


@dataclass(frozen=True, slots=True)
class Box:
    """The elements of a tensor whose coordinate is in [start, start + length) along every dimension.

    Attributes:
        start: the first coordinate along each dimension.
        shape: the length along each dimension.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        """All of a tensor of a shape."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def inside(self, whole: "Box") -> bool:
        """Whether this is a box with all elements in `whole`."""
        if not len(self.start) == len(self.shape) == len(whole.shape):
            return False
        for start, length, origin, size in zip(self.start, self.shape, whole.start, whole.shape, strict=True):
            if length < 0 or not origin <= start <= origin + size - length:
                return False
        return True

    def slices(self, within: "Box") -> tuple[slice, ...]:
        """The index of these elements in a tensor that holds the values of `within`."""
        firsts = (start - origin for start, origin in zip(self.start, within.start, strict=True))
        return tuple(slice(first, first + length) for first, length in zip(firsts, self.shape, strict=True))

    def offset(self, within: "Box") -> int:
        """The position of the first element among those of `within`, in row-major order."""
        return _position(self.start, within)

    def end(self, within: "Box") -> int:
        """The position after the last element, among the elements of `within`; the box has elements."""
        last = (start + length - 1 for start, length in zip(self.start, self.shape, strict=True))
        return _position(last, within) + 1

    def __str__(self) -> str:
        """The box in the form of Python's slices, such as `0:2,3:7`."""
        return ",".join(f"{start}:{start + length}" for start, length in zip(self.start, self.shape, strict=False))


class BoxValues(NamedTuple):
    """The values of a box of a tensor.

    Attributes:
        values: in the shape of the box; a view, of any strides.
    """

    box: Box
    values: torch.Tensor


def cut(box: Box, low: int, high: int) -> list[Box]:
    """The fewest boxes that contain the elements [low, high) of `box`, in row-major order.

    These are the rest of a first row, the whole rows after it, and the beginning of a last row, where a row has one
    dimension less and is cut likewise: at most 2 * dimensions - 1 boxes.
    """
    if low >= high:
        return []
    assert low >= 0 and high <= box.numel, (box, low, high)
    if not box.shape:
        return [box]
    (start, *starts), (_, *lengths) = box.start, box.shape
    width = math.prod(lengths)

    def part(row: int, first: int, last: int) -> list[Box]:
        """The elements [first, last) of one row."""
        inside = cut(Box(tuple(starts), tuple(lengths)), first, last)
        return [Box((start + row, *each.start), (1, *each.shape)) for each in inside]

    (top, first), (bottom, last) = divmod(low, width), divmod(high, width)
    if top == bottom:
        return part(top, first, last)
    head = part(top, first, width) if first else []
    top += first > 0
    rows = [Box((start + top, *starts), (bottom - top, *lengths))] if top < bottom else []
    return head + rows + part(bottom, 0, last)


def intersection(a: Box, b: Box) -> Box | None:
    """The common elements of two boxes of a tensor; None if there are none."""
    starts, lengths = [], []
    for start, length, other, other_length in zip(a.start, a.shape, b.start, b.shape, strict=True):
        low, high = max(start, other), min(start + length, other + other_length)
        if low >= high:
            return None
        starts.append(low)
        lengths.append(high - low)
    return Box(tuple(starts), tuple(lengths))


def extent(boxes: Sequence[Box], wanted: Sequence[Box]) -> range:
    """The range of `boxes`, one after the other in a flat tensor, that spans all their elements in `wanted`."""
    low, high = sum(box.numel for box in boxes), 0
    for offset, box in _offsets(boxes):
        for common in filter(None, (intersection(box, other) for other in wanted)):
            low = min(low, offset + common.offset(box))
            high = max(high, offset + common.end(box))
    return range(low, high) if low < high else range(0)


def one_by_one(boxes: Sequence[Box], values: torch.Tensor) -> list[BoxValues]:
    """The values of boxes that lie one after the other in a flat tensor, as views of it."""
    return [BoxValues(box, values[at : at + box.numel].view(box.shape)) for at, box in _offsets(boxes)]


def copy_common(targets: Sequence[BoxValues], values: torch.Tensor, held: Sequence[Box]) -> int:
    """Copy into the targets the elements that they share with a flat tensor.

    Args:
        values: the source, in which the boxes `held` lie one after the other.

    Returns:
        The number of elements copied.
    """
    copied = 0
    for target in targets:
        for source in one_by_one(held, values):
            common = intersection(target.box, source.box)
            if common is not None:
                target.values[common.slices(target.box)].copy_(source.values[common.slices(source.box)])
                copied += common.numel
    return copied


def tiles(boxes: Iterable[Box], shape: tuple[int, ...]) -> bool:
    """Whether boxes contain every element of a tensor exactly once, in time linear in their number.

    [Note: random volumes] Volumes that add up to that of the tensor prove nothing: an overlap may be as large as a gap.
    So each coordinate of each dimension gets a random mark, and a length is the difference of two
    marks modulo a prime. For boxes that tile the tensor the volumes add up for any marks. For others the
    difference is a polynomial in the marks, which is zero for at most dimensions/PRIME of all marks (Schwartz-Zippel).
    The marks are drawn anew each time, so a forged manifest cannot fit them.
    """
    marks: list[defaultdict[int, int]] = [defaultdict(lambda: secrets.randbelow(PRIME)) for _ in shape]

    def volume(box: Box) -> int:
        product = 1
        for start, length, mark in zip(box.start, box.shape, marks, strict=True):
            product = product * (mark[start + length] - mark[start]) % PRIME
        return product

    return (sum(map(volume, boxes)) - volume(Box.whole(shape))) % PRIME == 0


def _offsets(boxes: Sequence[Box]) -> Iterator[tuple[int, Box]]:
    """The offset of each box in a flat tensor that holds them one after the other, and the box."""
    return zip(itertools.accumulate((box.numel for box in boxes), initial=0), boxes, strict=False)


def _position(place: Iterable[int], within: Box) -> int:
    """The position of one element in the row-major order of a box."""
    position = 0
    for coordinate, start, length in zip(place, within.start, within.shape, strict=True):
        position = position * length + coordinate - start
    return position
