"""Tensors that are read from files one box at a time: stored, stacked, joined, cut or permuted.

transformers' conversions call torch's functions (`torch.stack`, `torch.cat`, `torch.chunk`, ...) on the tensors of
files. A lazy tensor takes these calls through `__torch_function__` and returns another lazy tensor, so a conversion is
followed without reading a value; a box of the result is then read from boxes of the stored tensors.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.checkpoint.boxes import Box, BoxValues
from zeroshard.checkpoint.expert_names import Tensors

Shape = tuple[int, ...]


class NotLazyError(Exception):
    """An operation that is not followed lazily; the tensors are then converted as a whole."""


class LazyTensor:
    """A tensor whose values are read by box.

    Attributes:
        shape: its shape.
        dtype: of its values, as far as one is known.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype

    def fill(self, box: Box, values: torch.Tensor) -> None:
        """Fill `values`, in the shape of a box, with the elements of the box."""
        raise NotImplementedError

    def stored(self) -> Iterator[str]:
        """The names of the tensors in files that it is made of."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """The shape, or the length along a dimension."""
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> "LazyTensor":
        """The tensor itself."""
        return self

    def chunk(self, chunks: int, dim: int = 0) -> tuple["LazyTensor", ...]:
        """Parts of even length along a dimension, the last one shorter."""
        return _chunk(self, chunks, dim)

    def squeeze(self, dim: int) -> "LazyTensor":
        """The tensor without a dimension of length 1."""
        return _Squeezed(self, dim % self.ndim) if self.shape[dim] == 1 else self

    def transpose(self, dim0: int, dim1: int) -> "LazyTensor":
        """The tensor with two dimensions exchanged."""
        return _transpose(self, dim0, dim1)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Sequence[Any] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        """Follow one of torch's functions.

        Raises:
            NotLazyError: the function is none of those that are followed.
        """
        followed = FOLLOWED.get(function)
        if followed is None:
            raise NotLazyError(getattr(function, "__name__", str(function)))
        return followed(*arguments, **(options or {}))


class StoredTensor(LazyTensor):
    """A tensor of files, by its name there."""

    def __init__(self, files: Tensors, name: str, dtype: torch.dtype) -> None:
        super().__init__(files.shapes[name], dtype)
        self._files, self._name = files, name

    def fill(self, box: Box, values: torch.Tensor) -> None:
        """Read the box."""
        self._files.fill(self._name, [BoxValues(box, values)])

    def stored(self) -> Iterator[str]:
        """Its own name."""
        yield self._name


class _Joined(LazyTensor):
    """Tensors one after the other along a dimension.

    Args:
        stacked: whether each has an index of a new dimension, in place of a length along it.
    """

    def __init__(self, parts: Sequence[LazyTensor], dim: int, stacked: bool) -> None:
        shapes = [(*part.shape[:dim], 1, *part.shape[dim:]) if stacked else tuple(part.shape) for part in parts]
        others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        if len(others) != 1:
            raise ValueError(f"shapes {sorted(set(map(tuple, shapes)))} do not fit together along dimension {dim}")
        self._lengths = [shape[dim] for shape in shapes]
        super().__init__((*shapes[0][:dim], sum(self._lengths), *shapes[0][dim + 1 :]), parts[0].dtype)
        self._parts, self._dim, self._stacked = parts, dim, stacked

    def fill(self, box: Box, values: torch.Tensor) -> None:
        """Read from each part the elements that it has of the box."""
        dim, origin = self._dim, 0
        first, last = box.start[dim], box.start[dim] + box.shape[dim]
        for part, length in zip(self._parts, self._lengths, strict=True):
            low, high = max(first, origin), min(last, origin + length)
            if low < high:
                here = values.narrow(dim, low - first, high - low)
                if self._stacked:
                    part.fill(_without(box, dim), here.select(dim, 0))
                else:
                    part.fill(_with(box, dim, low - origin, high - low), here)
            origin += length

    def stored(self) -> Iterator[str]:
        """Those of all parts."""
        for part in self._parts:
            yield from part.stored()


class _Narrowed(LazyTensor):
    """A range of a tensor along a dimension."""

    def __init__(self, whole: LazyTensor, dim: int, start: int, length: int) -> None:
        super().__init__((*whole.shape[:dim], length, *whole.shape[dim + 1 :]), whole.dtype)
        self._whole, self._dim, self._start = whole, dim, start

    def fill(self, box: Box, values: torch.Tensor) -> None:
        """Read the box from the whole tensor."""
        dim = self._dim
        self._whole.fill(_with(box, dim, box.start[dim] + self._start, box.shape[dim]), values)

    def stored(self) -> Iterator[str]:
        """Those of the whole tensor."""
        return self._whole.stored()


class _Permuted(LazyTensor):
    """A tensor with its dimensions in another order."""

    def __init__(self, whole: LazyTensor, order: Sequence[int]) -> None:
        super().__init__(tuple(whole.shape[dim] for dim in order), whole.dtype)
        self._whole, self._back = whole, [list(order).index(dim) for dim in range(len(order))]

    def fill(self, box: Box, values: torch.Tensor) -> None:
        """Read the box in the stored order."""
        inside = Box(tuple(box.start[dim] for dim in self._back), tuple(box.shape[dim] for dim in self._back))
        self._whole.fill(inside, values.permute(self._back))

    def stored(self) -> Iterator[str]:
        """Those of the other tensor."""
        return self._whole.stored()


class _Squeezed(LazyTensor):
    """A tensor without one of its dimensions, of length 1."""

    def __init__(self, whole: LazyTensor, dim: int) -> None:
        super().__init__((*whole.shape[:dim], *whole.shape[dim + 1 :]), whole.dtype)
        self._whole, self._dim = whole, dim

    def fill(self, box: Box, values: torch.Tensor) -> None:
        """Read the box of the whole tensor."""
        dim = self._dim
        start, shape = (*box.start[:dim], 0, *box.start[dim:]), (*box.shape[:dim], 1, *box.shape[dim:])
        self._whole.fill(Box(start, shape), values.unsqueeze(dim))

    def stored(self) -> Iterator[str]:
        """Those of the whole tensor."""
        return self._whole.stored()


Results = Mapping[str, torch.Tensor]


class LatestResults:
    """The results of the latest conversion of whole tensors; those before it are dropped."""

    def __init__(self) -> None:
        self._of: tuple[WholeConversion, Results] | None = None

    def of(self, wanted: "WholeConversion") -> Results:
        """The results of a conversion, made unless it was the latest."""
        if self._of is None or self._of[0] is not wanted:
            self._of = None
            self._of = wanted, wanted.convert([whole_of(source) for source in wanted.sources])
        return self._of[1]

    def drop(self) -> None:
        """Free the latest results."""
        self._of = None


@dataclass(frozen=True, slots=True, eq=False)
class WholeConversion:
    """A conversion whose operations are not followed lazily: it is made with whole tensors.

    Attributes:
        sources: the stored tensors.
        convert: from whole tensors, in the order of `sources`, to results by name.
        latest: keeps its results until another conversion is made.
    """

    sources: Sequence[LazyTensor]
    convert: Callable[[Sequence[torch.Tensor]], Results]
    latest: LatestResults


class ConvertedTensor(LazyTensor):
    """A result of a conversion of whole tensors."""

    def __init__(self, conversion: WholeConversion, name: str, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self._conversion, self._name = conversion, name

    def fill(self, box: Box, values: torch.Tensor) -> None:
        """Copy the box out of the result."""
        values.copy_(self._conversion.latest.of(self._conversion)[self._name][box.slices(Box.whole(tuple(self.shape)))])

    def stored(self) -> Iterator[str]:
        """All tensors of the conversion."""
        for source in self._conversion.sources:
            yield from source.stored()


def whole_of(tensor: LazyTensor) -> torch.Tensor:
    """All values of a lazy tensor, in its own dtype."""
    values = torch.empty(tensor.shape, dtype=tensor.dtype)
    tensor.fill(Box.whole(tuple(tensor.shape)), values)
    return values


def _with(box: Box, dim: int, start: int, length: int) -> Box:
    """A box with another range along a dimension."""
    starts, lengths = list(box.start), list(box.shape)
    starts[dim], lengths[dim] = start, length
    return Box(tuple(starts), tuple(lengths))


def _without(box: Box, dim: int) -> Box:
    """A box without a dimension."""
    return Box((*box.start[:dim], *box.start[dim + 1 :]), (*box.shape[:dim], *box.shape[dim + 1 :]))


def _stack(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    return _Joined(list(tensors), dim % (tensors[0].ndim + 1), stacked=True)


def _cat(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    return _Joined(list(tensors), dim % tensors[0].ndim, stacked=False)


def _split(tensor: LazyTensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[LazyTensor, ...]:
    dim %= tensor.ndim
    length = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    if sum(sizes) != length:
        raise ValueError(f"lengths {list(sizes)} do not add up to {length}")
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return tuple(_Narrowed(tensor, dim, start, size) for start, size in zip(starts, sizes, strict=True))


def _chunk(tensor: LazyTensor, chunks: int, dim: int = 0) -> tuple[LazyTensor, ...]:
    return _split(tensor, max(1, math.ceil(tensor.shape[dim] / chunks)), dim)


def _unbind(tensor: LazyTensor, dim: int = 0) -> tuple[LazyTensor, ...]:
    return tuple(part.squeeze(dim) for part in _split(tensor, 1, dim))


def _transpose(tensor: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    order = list(range(tensor.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _Permuted(tensor, order)


FOLLOWED: dict[Any, Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.chunk: _chunk,
    torch.split: _split,
    torch.unbind: _unbind,
    torch.transpose: _transpose,
}
