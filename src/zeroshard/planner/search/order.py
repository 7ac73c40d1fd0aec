"""The order of plans that fit: first those that change no result, the fastest of them first.

[Note: plans rehearsed whole] A plan is timed by few of its blocks, and the first one by all of them in the end. Its
whole step can be slower than the few blocks told, by waits for copies that these do not have, and so can that of the
plan after it. A plan that seems faster than the first only because it was not rehearsed whole is rehearsed whole too.
One that does not fit when it is rehearsed whole is refused, and the next is rehearsed.
"""

from collections.abc import Callable, Iterable, Sequence

from zeroshard.planner.predict.rehearse import CAUSES
from zeroshard.planner.predict.result import Prediction
from zeroshard.planner.search.text import changes
from zeroshard.traffic import DISK

MOST_WHOLE = 3  # plans that are rehearsed whole
SAME = 1.001  # times the seconds of a plan: as fast in every table


def rank(prediction: Prediction) -> tuple[bool, float, int]:
    """The key of a plan among those that fit: whether it changes results, seconds of a step, bytes at the peak.

    Seconds that differ by less than sums of numbers in another order do are equal.
    """
    return bool(changes(prediction)), float(f"{prediction.seconds:.9g}"), prediction.peak_bytes


def answered(fitting: Iterable[Prediction]) -> bool:
    """Whether a plan fits that does not wait for a disk for most of its step."""
    return any(one.bound != CAUSES[DISK] for one in fitting)


def with_whole_first(order: Sequence[Prediction], whole: Callable[[Prediction], Prediction]) -> list[Prediction]:
    """The plans in order with the first rehearsed whole, without those that do not fit ([Note: plans rehearsed whole]).

    Args:
        order: the plans that fit, the best first.
        whole: the prediction of a plan from a rehearsal of all its blocks.
    """
    fitting: list[Prediction] = []
    slower = False  # than few blocks told
    for number, other in enumerate(order):
        enough = len(fitting) == MOST_WHOLE or not slower
        if fitting and (enough or not _seems_better(other, min(fitting, key=rank))):
            return [*sorted(fitting, key=rank), *order[number:]]
        known = whole(other)
        slower |= known.fits and known.seconds > SAME * other.seconds
        fitting += [known] if known.fits else []
    return sorted(fitting, key=rank)


def _seems_better(other: Prediction, best: Prediction) -> bool:
    """Whether a plan seems clearly faster by few blocks, and changes results only where the best does."""
    return bool(changes(other)) <= bool(changes(best)) and SAME * other.seconds < best.seconds
