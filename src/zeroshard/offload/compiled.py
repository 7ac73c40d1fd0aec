"""The host Adam through torch.compile: one pass over memory where a compiler is there that does not build our kernel.

The C++ wrapper is asked for because the default one, in Python, holds the GIL while the update runs.
"""

from collections.abc import Callable
from dataclasses import astuple
from functools import cache
from typing import Any

import torch
from torch import Tensor

from zeroshard.offload.states import Scalars, States
from zeroshard.offload.tiled import TILE, close, opened

Triple = tuple[Tensor, Tensor, Tensor]


def update(
    gradient: Tensor, factor: float, scalars: Scalars, before: States, after: States, out: Tensor | None = None
) -> None:
    """As `host_adam.adam_update`, but for the last place. Split masters and 8-bit moments go tile by tile."""
    numbers = gradient.new_tensor([factor, *astuple(scalars)], dtype=torch.float32)
    old = (before.master, before.exp_avg, before.exp_avg_sq)
    new = (after.master, after.exp_avg, after.exp_avg_sq)
    if all(isinstance(values, Tensor) for values in (*old, *new)):
        _compiled()(gradient, numbers, old, new, out)
        return
    n = gradient.numel()
    for start in range(0, n, TILE):
        stop = min(start + TILE, n)
        a, b = before.part(start, stop), after.part(start, stop)
        values = tuple(opened(getattr(a, name), getattr(b, name)) for name in States.__slots__)
        _compiled()(gradient[start:stop], numbers, values, values, None if out is None else out[start:stop])
        for made, name in zip(values, States.__slots__, strict=True):
            close(made, getattr(b, name))


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(_adam, fullgraph=True, dynamic=True, options={"cpp_wrapper": True})


def _adam(gradient: Tensor, numbers: Tensor, old: Triple, new: Triple, out: Tensor | None) -> None:
    factor, decay, l2, weight1, beta2, weight2, root, eps, step_size = numbers.unbind()
    p, m, v = (values.float() for values in old)
    g = gradient.float() * factor + l2 * p
    m = m + weight1 * (g - m)
    v = v * beta2 + weight2 * g * g
    p = p * decay - step_size * m / (v.sqrt() / root + eps)
    for values, made in zip(new, (p, m, v), strict=True):
        values.copy_(made)
    if out is not None:
        out.copy_(p)
