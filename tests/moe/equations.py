"""Equations of 1701.06538 for numbers."""

import math
from collections.abc import Sequence


def phi(z: float) -> float:
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


def kth_excluding(values: Sequence[float], k: int, i: int) -> float:
    """The k-th largest of the values without component i."""
    return sorted((v for j, v in enumerate(values) if j != i), reverse=True)[k - 1]


def squared_cv(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values) / len(values) / mean**2
