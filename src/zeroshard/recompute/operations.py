"""Operations whose results a block keeps, so that a recomputation computes only the cheap ones (2205.05198).

Products with weights and convolutions are expensive; norms, activation functions and the products of attention are
cheap relative to the memory of their saved tensors. A dispatch mode runs around every operation of a block below
autograd: in the forward it keeps the results of expensive ones, in the recomputation it returns them.

[Note: draws] A random operation advances torch's generator, and so changes later draws. So it is always recomputed.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zeroshard.recompute.segments import Region
from zeroshard.units.hooks import place_of

PRODUCTS = (
    "mm",
    "addmm",
    "convolution",
    "_convolution",
    "mkldnn_convolution",
    "mkldnn_linear",
    "linear",
    "addmv",
    "mv",
)
CLASSES: dict[str, tuple[str, ...]] = {
    "attention": (
        *("bmm", "baddbmm", "_softmax", "_safe_softmax", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
        *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_attention_math", "_flash_attention_forward"),
    ),
    "norms": (
        *("native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "batch_norm"),
        *("_batch_norm_with_update", "_fused_rms_norm", "cudnn_batch_norm", "rsqrt"),
    ),
    "activations": ("gelu", "silu", "relu", "leaky_relu", "elu", "mish", "hardswish", "sigmoid", "tanh", "softplus"),
}
Keeps = Callable[[Any], bool]


class Treatment(Enum):
    """Treatment of an operation by the mode: results are kept, a tensor is written, or neither."""

    KEEP, WRITES, PASS = range(3)

    @classmethod
    def of(cls, operation: Any, keeps: Keeps) -> "Treatment":
        """The treatment of an operation."""
        if operation._schema.is_mutable:  # also one that writes its result into a given tensor, which is used again
            return cls.WRITES
        return cls.KEEP if keeps(operation) else cls.PASS


def kept_operations(recomputed: Iterable[str]) -> Keeps:
    """A function: whether the results of an operation are kept, if the classes `recomputed` are recomputed."""
    names = {*PRODUCTS, *(name for kind, ops in CLASSES.items() if kind not in {*recomputed} for name in ops)}

    def keeps(operation: Any) -> bool:
        name = operation._schema.name.removeprefix("aten::")
        return name in names and torch.Tag.nondeterministic_seeded not in operation.tags

    return keeps


class OperationsMode(TorchDispatchMode):
    """Keeps the results of a forward's operations, or returns them in its recomputation.

    Args:
        region: the forward.
        keeps: whether the results of an operation are kept.
        known: cache of treatments by operation.
    """

    def __init__(self, region: Region, keeps: Keeps, known: dict[Any, Treatment]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._region, self._keeps, self._known = region, keeps, known
        self._places: dict[int, int] = {}  # of kept results, by storage

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: skips torch's guard against compilation, a sixth of an operation's cost; nothing is compiled."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        treatment = self._known.get(func)
        if treatment is None:
            treatment = self._known[func] = Treatment.of(func, self._keeps)
        if treatment is Treatment.KEEP:
            return self._kept(func, args, kwargs or {})
        if treatment is Treatment.WRITES and self._places:
            self._copy_written(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def _kept(self, func: Any, args: Any, kwargs: Any) -> Any:
        region = self._region
        number = len(region.kept)
        if region.again:
            number, found = region.asked, region.take()
            result = func(*args, **kwargs) if found is None else found
        else:
            result = func(*args, **kwargs)
            region.keep(result)
        self._places |= {place_of(each): number for each in tree_leaves(result) if isinstance(each, Tensor)}
        return result

    def _copy_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """Keep a copy of results that an operation is about to write into."""
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        for argument in func._schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            for each in tree_leaves(given.get(argument.name)) if written else ():
                number = self._places.pop(place_of(each), None) if isinstance(each, Tensor) else None
                if number is not None:
                    self._region.copy_kept(number)


def operations_of(recomputed: Iterable[str]) -> Callable[[Region], AbstractContextManager[Any]]:
    """A factory of a region's mode, if the classes `recomputed` are recomputed."""
    keeps, known = kept_operations(recomputed), dict[Any, Treatment]()
    return lambda region: OperationsMode(region, keeps, known)
