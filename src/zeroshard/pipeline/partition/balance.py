"""Balance: cut a chain of layers into contiguous parts of nearly equal time."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from zeroshard.errors import PlanError


def balance(times: Sequence[float], parts: int, least: int = 1) -> list[int]:
    """The first layer of each part, such that the time of the slowest part is minimal.

    Of all such cuts, it is one with the least sum of squares, so that the other parts are balanced too.

    Args:
        times: of each layer; the unit does not matter.
        parts: number of parts.
        least: layers that every part has at least.

    Raises:
        PlanError: too few layers for the parts, or a time that is negative or not finite.
    """
    if parts < 1 or least < 1:
        raise PlanError(
            f"{len(times)} layers cannot be cut into {parts} parts of {least} or more; both must be 1 or more."
        )
    if len(times) < parts * least:
        raise PlanError(
            f"{len(times)} layers do not make {parts} parts of {least} or more; have at most {len(times) // least} "
            f"parts (stages x chunks), or more layers."
        )
    for layer, time in enumerate(times):
        if not 0 <= time < math.inf:
            raise PlanError(f"Layer {layer} takes {time}; every time must be 0 or more, and finite.")
    sums = list(accumulate(times, initial=0))
    slowest, _ = _cut(sums, parts, least, max)
    _, firsts = _cut(sums, parts, least, lambda sofar, part: sofar + part * part if part <= slowest else math.inf)
    return firsts


def _cut(
    sums: Sequence[float], parts: int, least: int, add: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The least cost of all cuts, and the first layers of one with it; `add` adds a part's time to a cost."""
    layers = len(sums) - 1
    costs: list[float] = [0] + [math.inf] * layers  # of cutting the first n layers into as many parts as gone through
    starts: list[list[int]] = []
    for part in range(parts):
        longer: list[float] = [math.inf] * (layers + 1)
        start = [0] * (layers + 1)
        for end in range((part + 1) * least, layers - (parts - 1 - part) * least + 1):
            for first in range(end - least, part * least - 1, -1):
                cost = add(costs[first], sums[end] - sums[first])
                if cost < longer[end]:
                    longer[end], start[end] = cost, first
        costs = longer
        starts.append(start)
    firsts, end = [], layers
    for start in reversed(starts):
        end = start[end]
        firsts.append(end)
    return costs[layers], firsts[::-1]
