"""Sparse storage of dense tensors (Gist, section 4.2): rows with a narrow column index.

A tensor is laid out in rows of 256 columns, so a column's number takes one byte, and with fp32 values the sparse form
is the smaller one from a fifth of zeros on; with column numbers of four bytes it would be from a half on.

[Note: zeros] A value is left out if all its bits are 0. Negative zeros, denormal numbers and NaN are stored, so the
decoded values are the same bit for bit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.saved.codes.kernels import kernels_for

COLUMNS = 256
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a value


@dataclass(slots=True)
class SparseRows:
    """Values that are not zero.

    Attributes:
        values: [found]; of the tensor's dtype, or codes of them.
        columns: uint8 [found].
        starts: int32 [rows + 1], the first of each row, and their number.
    """

    values: Tensor
    columns: Tensor
    starts: Tensor


def count(values: Tensor) -> int:
    """The number of nonzero values among [n] ([Note: zeros])."""
    words = values.view(WORDS[values.itemsize])
    if (kernels := kernels_for(values)) is not None:
        return kernels.call("count", values.itemsize, words, words.numel())
    return int(torch.count_nonzero(words))


def nbytes(numel: int, found: int, value_bytes: int) -> int:
    """Bytes of the sparse form of `numel` values, `found` of them nonzero with `value_bytes` in all."""
    return value_bytes + found + 4 * (-(-numel // COLUMNS) + 1)


def to_sparse(values: Tensor, found: int) -> SparseRows:
    """The sparse form of values [n], of which `found` are not zero."""
    numel, words = values.numel(), values.view(WORDS[values.itemsize])
    if (kernels := kernels_for(values)) is not None:
        rows = SparseRows(
            values.new_empty(found),
            values.new_empty(found, dtype=torch.uint8),
            values.new_empty(-(-numel // COLUMNS) + 1, dtype=torch.int32),
        )
        kernels.call("to_sparse", values.itemsize, words, numel, found, rows.values, rows.columns, rows.starts)
        return rows
    places = words.nonzero().squeeze(1)
    firsts = torch.arange(0, -(-numel // COLUMNS) * COLUMNS + 1, COLUMNS, device=values.device)
    starts = torch.searchsorted(places, firsts, out_int32=True)
    return SparseRows(values[places], (places % COLUMNS).to(torch.uint8), starts)


def from_sparse(rows: SparseRows, numel: int) -> Tensor:
    """The values [numel] of their sparse form."""
    values = rows.values
    if (kernels := kernels_for(values)) is not None:
        dense = values.new_empty(numel)
        kernels.call("from_sparse", values.itemsize, values, rows.columns, rows.starts, numel, dense)
        return dense
    lengths = rows.starts.diff().long()
    firsts = torch.arange(0, len(lengths) * COLUMNS, COLUMNS, device=values.device)
    return values.new_zeros(numel).index_put((firsts.repeat_interleave(lengths) + rows.columns,), values)
