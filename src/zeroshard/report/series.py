"""Long series, thinned and smoothed for drawing without hiding their extremes."""

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TypeVar

T = TypeVar("T")


def thin(
    items: Sequence[T], x: Callable[[T], float], y: Callable[[T], float], span: tuple[float, float], buckets: int
) -> list[T]:
    """Keep the first, lowest, highest and last item of each of ``buckets`` equal parts of ``span``.

    Those four decide every pixel that a line through all items would touch in a column of that width (the M4
    aggregation: Jugel et al., VLDB 2014), so a drawing of the kept items equals a drawing of all. Items are in order
    of x; all are kept when there are no more than ``buckets``.
    """
    if len(items) <= buckets:
        return list(items)
    low, high = span
    width = (high - low) / buckets or 1.0
    kept: list[int] = []
    for _, column in groupby(range(len(items)), key=lambda i: min(int((x(items[i]) - low) / width), buckets - 1)):
        members = list(column)
        lowest = min(members, key=lambda i: y(items[i]))
        highest = max(members, key=lambda i: y(items[i]))
        kept.extend(sorted({members[0], lowest, highest, members[-1]}))
    return [items[i] for i in kept]


def smoothing_radius(count: int) -> int:
    """Steps on each side that the smoothed line averages: about 3 % of the run together."""
    return max(2, count // 60)


def running_mean(values: Sequence[float], radius: int, points: int) -> list[tuple[int, float]]:
    """(index, mean of the values within ``radius``) at up to ``points`` evenly spaced indices.

    Near the start the window shrinks on both sides alike, so that the steep first steps are not lifted; at the end
    it only loses its right side.
    """
    last = len(values) - 1
    centres = sorted({round(last * k / max(points - 1, 1)) for k in range(points)})
    means: list[tuple[int, float]] = []
    for centre in centres:
        reach = min(radius, centre)
        window = values[centre - reach : centre + reach + 1]
        means.append((centre, math.fsum(window) / len(window)))
    return means
