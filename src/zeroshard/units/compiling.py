"""Compiled blocks: a block's own forward as a graph of torch.compile, inside of all layers of the engine.

Gathers, recomputation and the exchange of tokens stay outside of the graph, so a block that is computed again runs its
graph again, and no graph holds a weight that is freed after the forward.
"""

import copy
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from zeroshard.errors import PlanError
from zeroshard.units.forwards import Forward, insert, layers_of

LAYER = "graph"
RECORDS_ADDRESSES = ("reduce-overhead", "max-autotune")  # modes with graphs of CUDA, which read fixed addresses


def compile_blocks(blocks: Iterable[nn.Module], options: Mapping[str, Any]) -> None:
    """Compile the forwards of some modules; each is compiled at its first call.

    Args:
        options: of `torch.compile`, such as `dynamic`, `fullgraph`, `mode` and `backend`.

    Raises:
        PlanError: a mode that records addresses of weights, or a block that is compiled already.
    """
    check_options(options)
    for block in blocks:
        if LAYER in layers_of(block) or block._compiled_call_impl is not None:
            raise PlanError(
                f"A block of class {type(block).__name__} is compiled already; compile it once, by engine.compile() "
                f"or by block.compile()."
            )
        insert(block, LAYER, partial(_Graph, options))


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options under which a graph reads weights at fixed addresses.

    Raises:
        PlanError: with the way out.
    """
    mode, more = options.get("mode"), options.get("options") or {}
    named = f"mode={mode!r}" if mode in RECORDS_ADDRESSES else "options={'triton.cudagraphs': True}"
    if mode in RECORDS_ADDRESSES or more.get("triton.cudagraphs"):
        raise PlanError(
            f"{named} records CUDA graphs, which read weights where they lay in the first step; the engine's buffers "
            f"move. Use mode='default' or mode='max-autotune-no-cudagraphs'."
        )


class _Graph:
    """The layer of a compiled forward; a copy of the block runs its own forward, which is not compiled."""

    def __init__(self, options: Mapping[str, Any], inner: Forward) -> None:
        self._inner, self._compiled = inner, torch.compile(inner, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled = _get_current_dispatch_mode() is None  # a mode that looks at single operations
        return (self._compiled if compiled else self._inner)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._inner, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return _own, (self._inner,)


def _own(forward: Forward) -> Forward:
    return forward
