"""The layout of a draw: the dimension of its tensor with the batch's rows, if any, and the one that ranks divide.

| Shape, of a microbatch of n rows | Read as |
|---|---|
| [n, ...] | one row of the batch each |
| that of a parameter of the module | no rows: the parameter's |
| [T, n, ...] | rows in the second dimension (sequence first) |
| [n * k, ...] | k entries of each row, side by side (heads or tokens flattened into the batch) |
| anything else | no rows |

[Note: divided draws] If layers are split, a rank draws a part of one process's draw: its positions of each sequence,
its heads, or its features (`DividedActivations`). The shape shows which: one dimension has the size of the rank's part.
With the whole size instead it is the shape of one process's draw, whose rows follow from the table; of each row, the
rank then draws runs of elements at even distances. Without such a dimension, all ranks draw equal numbers if there is
one for each row or for all, or, between split layers, the shape is a parameter's. Other shapes are refused, and so are
ambiguous ones.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from zeroshard.parts.zones import DividedActivations, Division
from zeroshard.rng.philox import Elements, random_bits

TILE = 2**16  # elements of a tile, whose words stay in the cache
NO_ROW = 2**32 - 1  # the row number of a draw without rows


class UnclearDrawError(Exception):
    """A draw's shape does not identify its part of one process's numbers."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """A draw's tensor as [outer, rows, runs, inner]: of each row, outer x runs runs of elements.

    Attributes:
        first: number of the first run's first element in its row.
        stride: elements from the start of a run to the next; 0 for contiguous runs.
    """

    outer: int
    rows: int
    inner: int
    runs: int = 1
    first: int = 0
    stride: int = 0


def layout_of(shape: Sequence[int], rows: int, parameters: Collection[Sequence[int]] = ()) -> RowLayout | None:
    """The layout of a draw's rows, by the table above; None if it has none.

    Args:
        rows: of the microbatch; 0 if unknown.
        parameters: shapes of the module's own parameters.
    """
    if not rows or not shape or not math.prod(shape):
        return None
    if shape[0] == rows:
        return RowLayout(1, rows, math.prod(shape[1:]))
    if tuple(shape) in {tuple(parameter) for parameter in parameters}:
        return None
    if len(shape) > 1 and shape[1] == rows:
        return RowLayout(shape[0], rows, math.prod(shape[2:]))
    return None if shape[0] % rows else RowLayout(1, rows, math.prod(shape) // rows)


def divided_layout(
    shape: Sequence[int], rows: int, divided: DividedActivations, parameters: Collection[Sequence[int]] = ()
) -> RowLayout | None:
    """The layout of a draw's rows and of this rank's part ([Note: divided draws]); None if it has no rows.

    Raises:
        UnclearDrawError: the shape is ambiguous.
    """
    size = math.prod(shape)
    if not size or not shape:
        return None
    one_each = shape[0] in (1, rows) and size == shape[0]  # for each row or for all
    found = set(_readings(tuple(shape), rows, divided)) if rows else set()
    if not found and (one_each or (divided.positions is not None and tuple(shape) in map(tuple, parameters))):
        return layout_of(shape, rows, parameters)
    if len(found) != 1 or (len(shape) > 1 and one_each):
        raise UnclearDrawError(
            f"numbers of shape {list(shape)} for {rows} rows where ranks have {divided.described()}; "
            f"{'no dimension' if not found else 'more than one reading'} of that shape shows which part this rank has"
        )
    return found.pop()


def _readings(shape: tuple[int, ...], rows: int, divided: DividedActivations) -> Iterator[RowLayout]:
    """All layouts in which a draw may be a part of one process's."""
    if divided.positions is not None:
        ways = (_behind_rows(shape, rows, divided.positions, flattened) for flattened in (False, True))
        yield from filter(None, ways)
    if len(shape) in (3, 4):
        readings = [(_behind_rows(shape, rows, heads, len(shape) == 3), heads.whole) for heads in divided.heads]
        fitting = [(reading, whole) for reading, whole in readings if reading is not None]
        if shape[-1] == shape[-2]:  # attention probabilities, per head of the queries; keys may have fewer
            fitting = sorted(fitting, key=lambda each: each[1])[-1:]
        yield from (reading for reading, _ in fitting)
    for features in divided.features if len(shape) in (2, 3) else ():
        whole = layout_of((*shape[:-1], features.whole), rows)
        if shape[-1] == features.size and whole is not None and whole.inner % features.whole == 0:
            runs = whole.inner // features.whole
            yield RowLayout(whole.outer, rows, features.size, runs, features.first, features.whole)


def _behind_rows(shape: tuple[int, ...], rows: int, division: Division, flattened: bool) -> RowLayout | None:
    """The layout as [rows, divided, ...], or [rows x divided, ...] if `flattened`; None if the shape does not fit."""
    if flattened:
        # one element of each row would look like an undivided row
        fits, rest = shape[0] == rows * division.size and division.size > 1, shape[1:]
        whole = (rows * division.whole, *rest)
    else:
        fits, rest = shape[:2] == (rows, division.size), shape[2:]
        whole = (rows, division.whole, *rest)
    each = math.prod(rest)
    if not fits or layout_of(whole, rows) != RowLayout(1, rows, division.whole * each):
        return None
    return RowLayout(1, rows, division.size * each, first=division.first * each)


@dataclass(frozen=True, slots=True)
class Stream:
    """The words of one draw.

    Attributes:
        key: of the seed, the module's name, its call, and the draw in it.
        step: the step.
        rows: number of rows of the microbatch; 0 if unknown.
        first_row: number of its first row in the whole batch.
        parameters: shapes of the module's own parameters.
        by_row: called if the draw has rows.
        divided: division of this rank's activations at the draw; None if they are whole.
    """

    key: int
    step: int
    rows: int
    first_row: int
    parameters: tuple[tuple[int, ...], ...] = ()
    by_row: Callable[[], None] = lambda: None
    divided: DividedActivations | None = None

    def tiles(self, out: Tensor, per_element: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of a contiguous tensor, each with its words: int32, one dimension of `per_element` more.

        Raises:
            UnclearDrawError: the shape does not identify this rank's part of the draw.
        """
        if self.divided is None:
            layout = layout_of(out.shape, self.rows, self.parameters)
        else:
            layout = divided_layout(out.shape, self.rows, self.divided, self.parameters)
        row = NO_ROW
        if layout is not None:
            row = self.first_row
            self.by_row()
        layout = layout or RowLayout(1, 1, out.numel())
        sizes = (layout.outer, layout.rows, layout.runs, layout.inner)
        whole, stride = out.view(sizes), layout.stride or layout.inner
        if out.numel() <= TILE:
            inner = layout.inner * per_element
            elements = Elements(
                layout.outer, layout.rows, inner, layout.first * per_element, row, layout.runs, stride * per_element
            )
            yield whole, random_bits(self.key, self.step, elements, out.device).view(*sizes, per_element)
            return
        for o, r, k, i in _cuts(sizes):
            part = whole[o.start : o.stop, r.start : r.stop, k.start : k.stop, i.start : i.stop]
            first = (layout.first + (o.start * layout.runs + k.start) * stride + i.start) * per_element
            inner, row_of = len(i) * per_element, row + r.start
            elements = Elements(len(o), len(r), inner, first, row_of, len(k), stride * per_element)
            yield part, random_bits(self.key, self.step, elements, out.device).view(*part.shape, per_element)


def _cuts(sizes: tuple[int, int, int, int]) -> Iterator[tuple[range, range, range, range]]:
    """Ranges of outer, rows, runs and inner, with at most `TILE` elements in each combination."""
    lengths, room = [], TILE
    for size in reversed(sizes):  # a dimension is cut only if all before it are cut to 1
        length = max(1, min(size, room))
        lengths.append(length)
        room = room // length if length == size else 1
    outer, rows, runs, inner = (
        [range(at, min(at + length, size)) for at in range(0, size, length)]
        for size, length in zip(sizes, reversed(lengths), strict=True)
    )
    return itertools.product(outer, rows, runs, inner)
