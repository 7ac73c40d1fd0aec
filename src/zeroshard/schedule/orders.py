"""Orders: for each schedule, the forwards and backwards of one rank, as a pure function.

Every function takes the layout, the stage s (0-based) and the number m of microbatches that come to this rank, and
returns compute only, with microbatches numbered 0 to m - 1. d is the number of stages, v the chunks of each.

With d = 3, m = 4, the forward (F) and backward (B) of each microbatch in the order of each stage:

    gpipe    0  F0 F1 F2 F3 B0 B1 B2 B3
             1  F0 F1 F2 F3 B0 B1 B2 B3
             2  F0 F1 F2 F3 B0 B1 B2 B3

    1f1b     0  F0 F1 F2 B0 F3 B1 B2 B3
             1  F0 F1 B0 F2 B1 F3 B2 B3
             2  F0 B0 F1 B1 F2 B2 F3 B3
"""

from collections.abc import Callable
from itertools import count, islice

from zeroshard.errors import PlanError
from zeroshard.schedule.actions import Action, Kind, Schedule
from zeroshard.schedule.layout import Layout

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT  # noqa: E741
Order = Callable[[Layout, int, int], Schedule]


def warm_up(layout: Layout, stage: int) -> int:
    """Forwards before the first backward of 1F1B: d - 1 - s, and with replicas the rule of PipeDream's runtime.

    ⌊(N - 1) / r⌋, with r the replicas of the stage and N those of this and all later stages; at the input stage this is
    PipeDream's NOAM - 1 (SOSP 2019, section 3.2).
    """
    return (sum(layout.replicas[stage:]) - 1) // layout.replicas[stage]


def naive(layout: Layout, stage: int, m: int) -> Schedule:
    """One microbatch at a time through all stages and back; with one stage, gradient accumulation."""
    chunks = layout.chunks_of(stage)
    return [
        action
        for j in range(m)
        for action in [*(Action(F, c, j) for c in chunks), *(Action(B, c, j) for c in reversed(chunks))]
    ]


def gpipe(layout: Layout, stage: int, m: int) -> Schedule:
    """All forwards, then all backwards, microbatch by microbatch (GPipe, 1811.06965, section 2.3).

    With several chunks this is the breadth-first order (2211.05953): every chunk does all its microbatches in turn.
    """
    chunks = layout.chunks_of(stage)
    forwards = [Action(F, c, j) for c in chunks for j in range(m)]
    return forwards + [Action(B, c, j) for c in reversed(chunks) for j in range(m)]


def one_f_one_b_part(layout: Layout, stage: int, first: int, last: int) -> Schedule:
    """The part of an endless 1F1B with the forwards of [first, last); an older backward follows each forward."""
    w = warm_up(layout, stage)
    actions = []
    for j in range(first, last):
        actions.append(Action(F, stage, j))
        if j >= w:
            actions.append(Action(B, stage, j - w))
    return actions


def one_f_one_b_rest(layout: Layout, stage: int, last: int) -> Schedule:
    """The backwards that remain in an endless 1F1B after the forward of microbatch `last - 1`."""
    return [Action(B, stage, j) for j in range(max(0, last - warm_up(layout, stage)), last)]


def one_f_one_b(layout: Layout, stage: int, m: int) -> Schedule:
    """1F1B with a flush: PipeDream-flush (2006.09503, section 2.2)."""
    return one_f_one_b_part(layout, stage, 0, m) + one_f_one_b_rest(layout, stage, m)


def interleaved(layout: Layout, stage: int, m: int) -> Schedule:
    """1F1B over v chunks, in groups of d microbatches per chunk (PTD-P, 2104.04473, section 2.2)."""
    d, v = layout.stages, layout.chunks
    turns = [(c, j) for low in range(0, m, d) for c in range(v) for j in range(low, min(low + d, m))]
    forwards = [Action(F, c * d + stage, j) for c, j in turns]
    backwards = [Action(B, (v - 1 - c) * d + stage, j) for c, j in turns]
    return _alternate(forwards, backwards, min(m * v, 2 * (d - 1 - stage) + (v - 1) * d))


def zero_bubble_h1(layout: Layout, stage: int, m: int) -> Schedule:
    """1F1B with the backward in two: weight gradients wait, s of them at stage s, to fill the last bubble.

    ZB-H1 of "Zero Bubble Pipeline Parallelism" (2401.10241, section 2.1); like 1F1B it keeps d microbatches at most.
    """
    w, delay = layout.stages - 1 - stage, stage
    forwards = (Action(F, stage, j) for j in range(m))
    weights = (Action(W, stage, j) for j in count())
    actions = list(islice(forwards, w))
    done = 0
    for j in range(m):
        actions += [*islice(forwards, 1), Action(I, stage, j)]
        if j >= delay:
            actions += islice(weights, 1)
            done += 1
    return actions + list(islice(weights, m - done))


def _alternate(forwards: Schedule, backwards: Schedule, w: int) -> Schedule:
    """The first w forwards, then one forward and one backward in turn, then the backwards that are left."""
    pairs = zip(forwards[w:], backwards, strict=False)
    return [*forwards[:w], *(action for pair in pairs for action in pair), *backwards[len(forwards) - w :]]


FLUSHING: dict[str, Order] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "pipedream-flush": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zero_bubble_h1,
}
STREAMING = ("pipedream", "2bw")  # 1F1B that never flushes while it is fed
SCHEDULES = (*FLUSHING, *STREAMING)
CHUNKED = ("naive", "gpipe", "interleaved")  # may have several chunks per stage
UNEVEN = ("1f1b", "pipedream-flush", "pipedream")  # stages may differ in their number of replicas


def check(name: str, layout: Layout, m: int) -> None:
    """Check that a schedule supports a layout and m microbatches per step and data rank.

    Raises:
        PlanError: the setting that does not fit, and the way out.
    """
    if name not in SCHEDULES:
        raise PlanError(f"There is no schedule {name!r}; the schedules are {', '.join(SCHEDULES)}.")
    d, v = layout.stages, layout.chunks
    if m < 1:
        raise PlanError(f"microbatches is {m}; it must be 1 or more.")
    if v > 1 and name not in CHUNKED:
        raise PlanError(
            f"schedule={name!r} has one chunk per stage and virtual_stages is {v}; use schedule='interleaved', or "
            f"virtual_stages=1."
        )
    if name == "interleaved" and m % d:
        raise PlanError(
            f"schedule='interleaved' runs microbatches in groups of {d} (stages), and {m} microbatches do not divide "
            f"into them; make microbatches a multiple of {d}."
        )
    if name == "2bw" and m < d:
        raise PlanError(
            f"schedule='2bw' keeps two versions of the weights, which is enough from {d} microbatches per step on "
            f"(one per stage), and microbatches is {m}. Make it {d} or more, or use schedule='1f1b'."
        )
    if layout.uneven:
        if name not in UNEVEN:
            raise PlanError(
                f"schedule={name!r} needs equally many replicas of every stage, and replicas is {layout.replicas}; "
                f"only {', '.join(UNEVEN)} can have uneven ones."
            )
        bad = [r for r in layout.replicas if m % r]
        if bad:
            raise PlanError(
                f"{m} microbatches do not divide among a stage's {bad[0]} replicas; make microbatches a multiple of "
                f"every number in replicas={layout.replicas}."
            )
