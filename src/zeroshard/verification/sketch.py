"""Sketches: a few numbers of a tensor, from which the distance between two tensors of different processes is estimated.

A sketch is the norm and `COUNT` random projections onto signs (Johnson-Lindenstrauss; Achlioptas, JCSS 66, 2003): the
mean square of the differences between projections is the squared distance in expectation.
"""

import math
from functools import cache

import torch
from torch import Tensor

COUNT = 8  # projections
WIDTH = 1024  # elements per row of signs
ROWS = 4096  # rows of signs per draw

Sketch = tuple[float, ...]  # elements, norm, projections


def sketch(tensor: Tensor) -> Sketch:
    """The sketch of a floating-point tensor of any shape; the same on every process for the same values."""
    values = tensor.detach().reshape(-1).to("cpu", torch.float64)
    rows = -(-values.numel() // WIDTH)
    padded = torch.zeros(rows * WIDTH, dtype=torch.float64)
    padded[: values.numel()] = values
    projected = padded.view(rows, WIDTH) @ _signs(-1, WIDTH)
    total = torch.zeros(COUNT, dtype=torch.float64)
    for chunk, first in enumerate(range(0, rows, ROWS)):
        part = projected[first : first + ROWS]
        total += (part * _signs(chunk, ROWS)[: len(part)]).sum(0)
    return (float(values.numel()), float(values.norm()), *total.tolist())


def distance(found: Sketch, wanted: Sketch, factor: float = 1.0) -> float:
    """The estimated norm of `found - factor * wanted`, relative to that of `factor * wanted`; infinite if sizes
    differ or only one is finite.
    """
    if found[0] != wanted[0]:
        return math.inf
    apart = math.sqrt(sum((a - factor * b) ** 2 for a, b in zip(found[2:], wanted[2:], strict=True)) / COUNT)
    if math.isnan(apart):
        return 0.0 if math.isnan(found[1]) and math.isnan(wanted[1]) else math.inf
    size = abs(factor) * wanted[1]
    return apart / size if size else (math.inf if apart else 0.0)


def ratio(found: Sketch, wanted: Sketch) -> float:
    """The factor that brings `wanted` nearest to `found`; NaN where `wanted` is zero."""
    squares = sum(b * b for b in wanted[2:])
    return sum(a * b for a, b in zip(found[2:], wanted[2:], strict=True)) / squares if squares else math.nan


@cache
def _signs(chunk: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(19 + chunk)
    return torch.randint(0, 2, (rows, COUNT), generator=generator, dtype=torch.float64) * 2 - 1
