"""The layout of a draw: which dimension of its tensor is the batch's rows, if one is.

| Shape, of a microbatch of n rows | Read as |
|---|---|
| [n, ...] | one row of the batch each |
| that of a parameter of the module | no rows: the parameter's |
| [T, n, ...] | rows in the second dimension (sequence first) |
| [n * k, ...] | k entries of each row, side by side (heads or tokens flattened into the batch) |
| anything else | no rows |
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from zeroshard.rng.philox import Elements, random_bits

TILE = 2**16  # elements that are drawn at a time, so that their words stay in the cache
NO_ROW = 2**32 - 1  # in the place of a row's number


@dataclass(frozen=True, slots=True)
class RowLayout:
    """A draw's tensor as [outer, rows, inner]."""

    outer: int
    rows: int
    inner: int


def layout_of(shape: Sequence[int], rows: int, parameters: Collection[Sequence[int]] = ()) -> RowLayout | None:
    """Where a draw's rows are, after the table above; None if it has none.

    Args:
        rows: of the microbatch; 0 where they are not known.
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


@dataclass(frozen=True, slots=True)
class Stream:
    """The words of one draw.

    Attributes:
        key: of the seed, the module's name, its call, and the draw in it.
        step: in which it is drawn.
        rows: how many rows the microbatch has; 0 where they are not known.
        first_row: the number of its first row in the whole batch.
        parameters: shapes of the module's own parameters.
        by_row: told if the draw has rows.
    """

    key: int
    step: int
    rows: int
    first_row: int
    parameters: tuple[tuple[int, ...], ...] = ()
    by_row: Callable[[], None] = lambda: None

    def tiles(self, out: Tensor, per_element: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of a contiguous tensor, each with its words: int32, one dimension of `per_element` more."""
        layout = layout_of(out.shape, self.rows, self.parameters)
        row = NO_ROW
        if layout is not None:
            row = self.first_row
            self.by_row()
        layout = layout or RowLayout(1, 1, out.numel())
        whole = out.view(layout.outer, layout.rows, layout.inner)
        for o, r, i in _cuts(layout):
            part = whole[o.start : o.stop, r.start : r.stop, i.start : i.stop]
            first = (o.start * layout.inner + i.start) * per_element
            elements = Elements(len(o), len(r), len(i) * per_element, first, row + r.start)
            yield part, random_bits(self.key, self.step, elements, out.device).view(*part.shape, per_element)


def _cuts(layout: RowLayout) -> Iterator[tuple[range, range, range]]:
    """Ranges of outer, rows and inner of at most `TILE` elements together, if one element is not more."""
    inner = max(1, min(layout.inner, TILE))
    rows = max(1, min(layout.rows, TILE // inner)) if inner == layout.inner else 1
    outer = max(1, min(layout.outer, TILE // (inner * rows))) if (inner, rows) == (layout.inner, layout.rows) else 1
    for o in range(0, layout.outer, outer):
        for r in range(0, layout.rows, rows):
            for i in range(0, layout.inner, inner):
                yield (
                    range(o, min(o + outer, layout.outer)),
                    range(r, min(r + rows, layout.rows)),
                    range(i, min(i + inner, layout.inner)),
                )
