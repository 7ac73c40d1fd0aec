"""The order of plans that fit: first those that change no result, the fastest of them first.

[Note: plans rehearsed whole] A plan is timed by few of its blocks, and the first one by all of them in the end. Its
whole step can be slower than the few blocks told, by waits for copies that these do not have, and so can that of the
plan after it. A plan that seems faster than the first only because it was not rehearsed whole is rehearsed whole too.
"""

from collections.abc import Callable, Sequence

from zeroshard.planner.predict.result import Prediction
from zeroshard.planner.search.text import changes

MOST_WHOLE = 3  # plans that are rehearsed whole
SAME = 1.001  # times the seconds of a plan: as fast in every table


def rank(prediction: Prediction) -> tuple[bool, float, int]:
    """The key of a plan among those that fit: whether it changes results, seconds of a step, bytes at the peak."""
    return bool(changes(prediction)), prediction.seconds, prediction.peak_bytes


def with_whole_first(order: Sequence[Prediction], whole: Callable[[Prediction], Prediction]) -> list[Prediction]:
    """The plans in order with the first rehearsed whole ([Note: plans rehearsed whole]).

    Args:
        order: the plans that fit, the best first.
        whole: the prediction of a plan from a rehearsal of all its blocks.
    """
    if not order:
        return []
    known = [whole(order[0])]
    if known[0].seconds > SAME * order[0].seconds:
        for other in order[1:MOST_WHOLE]:
            if not _seems_better(other, min(known, key=rank)):
                break
            known.append(whole(other))
    return [*sorted(known, key=rank), *order[len(known) :]]


def _seems_better(other: Prediction, best: Prediction) -> bool:
    """Whether a plan seems clearly faster by few blocks, and changes results only where the best does."""
    return bool(changes(other)) <= bool(changes(best)) and SAME * other.seconds < best.seconds
