"""The host Adam through torch.compile: one pass over memory where a compiler is there that does not build our kernel.

The C++ wrapper is asked for because the default one, in Python, holds the GIL while the update runs.

[Note: tiles of its own] torch.compile does not take tensors that are written and lie in one storage with others, as
those of a slice do. So it works on tiles that are copied to and fro while they are in the cache.
"""

from collections.abc import Callable
from dataclasses import astuple
from functools import cache
from typing import Any

import torch
from torch import Tensor

from zeroshard.offload.host_states import HostStates, Scalars
from zeroshard.offload.tiled import TILE, close, opened

Triple = tuple[Tensor, Tensor, Tensor]


def update(
    gradient: Tensor, factor: float, scalars: Scalars, before: HostStates, after: HostStates, out: Tensor | None = None
) -> None:
    """As `host_adam.adam_update`, but for the last place."""
    numbers = gradient.new_tensor([factor, *astuple(scalars)], dtype=torch.float32)
    n = gradient.numel()
    for start in range(0, n, TILE):
        stop = min(start + TILE, n)
        a, b = before.part(start, stop), after.part(start, stop)
        values = tuple(opened(getattr(a, name), getattr(b, name)) for name in HostStates.__slots__)
        tiles = tuple(each.clone() for each in values)
        _compiled()(gradient[start:stop].clone(), numbers, tiles)
        for tile, made, name in zip(tiles, values, HostStates.__slots__, strict=True):
            close(made.copy_(tile), getattr(b, name))
        if out is not None:
            out[start:stop].copy_(tiles[0])


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(_adam, fullgraph=True, dynamic=True, options={"cpp_wrapper": True})


def _adam(gradient: Tensor, numbers: Tensor, states: Triple) -> None:
    factor, decay, l2, weight1, beta2, weight2, root, eps, step_size = numbers.unbind()
    p, m, v = states
    g = gradient.float() * factor + l2 * p
    new_m = m + weight1 * (g - m)
    new_v = v * beta2 + weight2 * g * g
    m.copy_(new_m)
    v.copy_(new_v)
    p.copy_(p * decay - step_size * new_m / (new_v.sqrt() / root + eps))
