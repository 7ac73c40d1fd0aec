"""The logits of a split output layer, for losses outside of the layer.

`ShardedLogits` acts as logits [..., V] and holds those of this rank's classes. Elementwise operations before the loss
work on these; a cross entropy reduces over the ranks (`cross_entropy`); any other operation gathers the logits first.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from zeroshard.errors import PlanError
from zeroshard.losses.absent_logits import TensorLike, name_of
from zeroshard.losses.row_gradients import CrossEntropy
from zeroshard.tensor.split.collectives import CopyIn, JoinRows
from zeroshard.tensor.split.cross_entropy import SplitVocabulary, vocabulary_cross_entropy

CASTS = ("float", "half", "bfloat16", "double", "to", "type", "type_as", "contiguous", "clone", "detach", "cpu")
MAPS = ("tanh", "neg", "negative", "__neg__")
COMMUTATIVE = ("add", "mul", "multiply", "__add__", "__radd__", "__mul__", "__rmul__")
BINARY = (*COMMUTATIVE, "sub", "__sub__", "__rsub__", "div", "true_divide", "__truediv__", "masked_fill")
OF_LOCAL = (  # attributes of a tensor that are equal for a part
    *("dtype", "device", "requires_grad", "is_leaf", "is_meta", "is_cpu", "layout"),
    *("is_floating_point", "is_complex", "get_device", "element_size"),
)


class ShardedLogits(TensorLike):
    """Acts as logits [..., V]; this rank holds [..., V/t].

    Views that keep the dimension of classes, casts, products and sums with operands that broadcast to the logits, soft
    caps, `argmax`, `F.cross_entropy`, and `F.nll_loss` of `log_softmax` are computed on the parts. Other operations
    call `whole` first, on all ranks.

    Attributes:
        local: the logits of this rank's classes.
    """

    __slots__ = ("_dimension", "_normalised", "_vocabulary", "_whole", "local")

    def __init__(
        self,
        local: Tensor,
        vocabulary: Callable[[], SplitVocabulary],
        dimension: int = -1,
        normalised: bool = False,
    ) -> None:
        """`dimension`: of the classes, from the end; `normalised`: whether it acts as the logits' log_softmax."""
        self.local, self._vocabulary = local, vocabulary
        self._dimension, self._normalised = dimension, normalised
        self._whole: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole logits."""
        shape = list(self.local.shape)
        shape[self._dimension] = self._vocabulary().total
        return torch.Size(shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.local.dim()

    def whole(self, done: str = "whole") -> Tensor:
        """The logits of all classes, gathered; all ranks must call it.

        Args:
            done: name of the operation, for the warning.
        """
        learns = torch.is_grad_enabled() and self.local.requires_grad
        if self._whole is None or (learns and not self._whole.requires_grad):
            vocabulary = self._vocabulary()
            if learns and done != "whole" and vocabulary.warn_once():
                warnings.warn(
                    f"All {vocabulary.total} logits of {vocabulary.name} are gathered on each of "
                    f"{vocabulary.ranks.size} ranks for {done!r}, which takes the memory that splitting the vocabulary "
                    f"saves. Take the loss by torch.nn.functional.cross_entropy of the logits or "
                    f"zeroshard.losses.linear_cross_entropy; call logits.whole() to say that it is meant.",
                    stacklevel=4,
                )
            if learns:
                vocabulary.ranks.forget_formulas()
            whole: Tensor = JoinRows.apply(  # type: ignore[no-untyped-call]
                self.local, vocabulary.ranks, self._dimension, vocabulary.total, f"logits of {vocabulary.name}"
            )
            self._whole = (whole.log_softmax(self._dimension) if self._normalised else whole).contiguous()
        return self._whole

    def __repr__(self) -> str:
        return f"ShardedLogits(shape={tuple(self.shape)}, local={self.local!r})"

    def __getattr__(self, name: str) -> Any:
        if name in OF_LOCAL:
            return getattr(self.local, name)
        if name in HANDLERS:
            return partial(self._do, name)
        if name == "mT":
            return self._do("transpose", -2, -1)
        if name.endswith("_") and not name.startswith("_"):
            self._refuse_writing(name)
        return super().__getattr__(name)

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = name_of(function), NotImplemented
        if args and isinstance(args[0], ShardedLogits):
            if name.endswith("_") and not name.endswith("__"):
                args[0]._refuse_writing(name)
            result = args[0]._handled(name, *args[1:], **(kwargs or {}))
        elif len(args) == 2 and isinstance(args[1], ShardedLogits) and name in COMMUTATIVE and not kwargs:
            result = args[1]._handled(name, args[0])
        return super().__torch_function__(function, types, args, kwargs) if result is NotImplemented else result

    def _tensor(self, done: str) -> Tensor:
        return self.whole(done)

    def _do(self, name: str, *args: Any, **kwargs: Any) -> Any:
        result = self._handled(name, *args, **kwargs)
        if result is not NotImplemented:
            return result
        whole = [arg.whole(name) if isinstance(arg, ShardedLogits) else arg for arg in args]
        return super()._do(name, *whole, **kwargs)

    def _handled(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The result from this rank's part; NotImplemented if the operation needs all classes."""
        handler = HANDLERS.get(name)
        return NotImplemented if handler is None else handler(self, name, *args, **kwargs)

    def _with(self, local: Tensor, dimension: int | None = None) -> "ShardedLogits":
        dimension = self._dimension if dimension is None else dimension
        return ShardedLogits(local, self._vocabulary, dimension, self._normalised)

    def _refuse_writing(self, name: str) -> None:
        raise PlanError(
            f"Logits that ranks have in parts cannot be written in place ({name}). Use the function that gives a new "
            f"tensor, such as `logits = logits.masked_fill(...)`, or write `logits.whole().clone()`."
        )

    def _written(self, name: str, *args: Any) -> None:
        self._refuse_writing(name)

    def _cast(self, name: str, *args: Any, **kwargs: Any) -> Any:
        args = tuple(arg.local if isinstance(arg, ShardedLogits) else arg for arg in args)
        result = getattr(self.local, name)(*args, **kwargs)
        return self._with(result) if isinstance(result, Tensor) else result

    def _map(self, name: str) -> Any:
        return NotImplemented if self._normalised else self._with(getattr(self.local, name)())

    def _binary(self, name: str, *operands: Any, **kwargs: Any) -> Any:
        own = [self._part_of(operand) for operand in operands]
        if self._normalised or "out" in kwargs or any(one is NotImplemented for one in own):
            return NotImplemented
        return self._with(getattr(self.local, name)(*own, **kwargs))

    def _part_of(self, operand: Any) -> Any:
        """An operand for this rank's classes."""
        vocabulary, dimension = self._vocabulary(), self._dimension
        if isinstance(operand, ShardedLogits):
            alike = operand._dimension == dimension and not operand._normalised
            return operand.local if alike and operand._vocabulary() is vocabulary else NotImplemented
        if not isinstance(operand, Tensor):
            return operand
        size = operand.shape[dimension] if operand.dim() >= -dimension else 1
        width = self.local.shape[dimension]
        if size not in (1, vocabulary.total):
            return operand if size == width else NotImplemented  # a bias split like the logits
        if operand.requires_grad and torch.is_grad_enabled():
            vocabulary.ranks.forget_formulas()
            operand = CopyIn.apply(operand, vocabulary.ranks, f"operand of {vocabulary.name}")  # type: ignore[no-untyped-call]
        return operand if size == 1 else operand.narrow(dimension, vocabulary.start, width)

    def _size(self, name: str, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def _dim(self, name: str) -> int:
        return self.local.dim()

    def _numel(self, name: str) -> int:
        return self.shape.numel()

    def _view(self, name: str, *given: Any, **kwargs: Any) -> Any:
        shape = _sequence(given)
        if self._dimension != -1 or kwargs or not shape or not all(isinstance(size, int) for size in shape):
            return NotImplemented
        known, numel = -math.prod(shape) if -1 in shape else 0, self.shape.numel()
        if known > 0:
            shape[shape.index(-1)] = numel // known
        if shape[-1] != self.shape[-1] or math.prod(shape) != numel:
            return NotImplemented
        return self._with(getattr(self.local, name)(*shape[:-1], self.local.shape[-1]))

    def _flatten(self, name: str, start_dim: int = 0, end_dim: int = -1) -> Any:
        if self._dimension != -1 or end_dim % self.ndim == self.ndim - 1:
            return NotImplemented
        return self._with(self.local.flatten(start_dim, end_dim))

    def _transpose(self, name: str, first: int, second: int) -> Any:
        order = list(range(self.ndim))
        order[first], order[second] = order[second], order[first]
        return self._permute("permute", *order)

    def _permute(self, name: str, *given: Any) -> Any:
        order = [dim % self.ndim for dim in _sequence(given)]
        return self._with(self.local.permute(order), order.index(self._dimension % self.ndim) - self.ndim)

    def _item(self, name: str, index: Any) -> Any:
        items = _full_index(index, self.ndim)
        if self._dimension != -1 or items is None:
            return NotImplemented
        last, total = items[-1], self.shape[-1]
        if not isinstance(last, slice) or last.indices(total) != (0, total, 1):
            return NotImplemented
        return self._with(self.local[(*items[:-1], slice(None))])

    def _length(self, name: str) -> int:
        return self.shape[0]

    def _argmax(self, name: str, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None or dim % self.ndim != self._dimension % self.ndim:
            return NotImplemented
        vocabulary, local = self._vocabulary(), self.local.detach()
        if not local.shape[dim]:
            local = torch.full_like(local.sum(dim, keepdim=True), -math.inf)
        largest, place = local.max(dim, keepdim=keepdim)
        top = vocabulary.ranks.maximum(largest.clone(), f"largest logits of {vocabulary.name}")
        behind = (place + vocabulary.start).neg_().masked_fill_(largest < top, 1 - vocabulary.total)
        return vocabulary.ranks.maximum(behind, f"argmax of {vocabulary.name}").neg_()  # the first of equal ones

    def _log_softmax(self, name: str, dim: int | None = None, dtype: Any = None, **rest: Any) -> Any:
        """Mark as normalised without computing: log-probabilities have the same cross entropy as the logits."""
        if dim is None or "out" in rest or dim % self.ndim != self._dimension % self.ndim:
            return NotImplemented
        local = self.local if dtype is None else self.local.to(dtype)
        return ShardedLogits(local, self._vocabulary, self._dimension, normalised=True)

    def _loss(
        self,
        name: str,
        target: Any,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        place = self.ndim + self._dimension
        shape = (*self.shape[:place], *self.shape[place + 1 :])
        usual = weight is None and size_average is None and reduce is None and reduction in ("none", "mean", "sum")
        labelled = isinstance(target, Tensor) and target.dtype is torch.int64 and target.shape == shape
        if not usual or not labelled or place != min(1, self.ndim - 1) or not 0 <= label_smoothing <= 1:
            return NotImplemented
        if name == "nll_loss" and not self._normalised:
            return NotImplemented
        rows = self.local.movedim(place, -1).flatten(0, -2) if self.ndim > 1 else self.local.unsqueeze(0)
        terms = CrossEntropy(ignore_index, label_smoothing)
        loss = vocabulary_cross_entropy(rows, target.reshape(-1), self._vocabulary(), terms, reduction)
        return loss.view(shape) if reduction == "none" else loss


HANDLERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(CASTS, ShardedLogits._cast),
    **dict.fromkeys(MAPS, ShardedLogits._map),
    **dict.fromkeys(BINARY, ShardedLogits._binary),
    **dict.fromkeys(("view", "reshape"), ShardedLogits._view),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), ShardedLogits._transpose),
    **dict.fromkeys(("dim", "ndimension"), ShardedLogits._dim),
    **dict.fromkeys(("numel", "nelement"), ShardedLogits._numel),
    **dict.fromkeys(("cross_entropy", "nll_loss"), ShardedLogits._loss),
    "__getitem__": ShardedLogits._item,
    "__len__": ShardedLogits._length,
    "__setitem__": ShardedLogits._written,
    "argmax": ShardedLogits._argmax,
    "flatten": ShardedLogits._flatten,
    "log_softmax": ShardedLogits._log_softmax,
    "permute": ShardedLogits._permute,
    "size": ShardedLogits._size,
}


def _sequence(given: Sequence[Any]) -> list[Any]:
    """Arguments given one by one, or as one sequence."""
    return list(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else list(given)


def _full_index(index: Any, dims: int) -> list[Any] | None:
    """An index with an item for each dimension; None if an item is unsupported or the last one is not the classes'."""
    items = list(index) if isinstance(index, tuple) else [index]
    taken = [_dims_of(item) for item in items]
    if None in taken:
        return None
    missing = dims - sum(count or 0 for count in taken)
    at = next((place for place, item in enumerate(items) if isinstance(item, EllipsisType)), len(items))
    if missing < 0 or items[-1] is None:
        return None
    items[at : at + 1] = [slice(None)] * missing
    return items


def _dims_of(item: Any) -> int | None:
    """The number of dimensions that an item of an index takes; None for an unsupported item."""
    if item is None or isinstance(item, EllipsisType):
        return 0
    if isinstance(item, Tensor):
        return item.dim() if item.dtype in (torch.bool, torch.uint8) else 1
    return 1 if isinstance(item, (int, slice)) and not isinstance(item, bool) else None
