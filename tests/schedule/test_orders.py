"""Each schedule's order of forwards and backwards, as its paper gives it and as torch's own generators do."""

import re
from collections.abc import Iterator
from itertools import pairwise
from unittest.mock import MagicMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from zeroshard.errors import PlanError
from zeroshard.schedule import Action, Kind, Layout, Schedule, orders
from zeroshard.schedule.orders import CHUNKED, FLUSHING, SCHEDULES, check, one_f_one_b_part, one_f_one_b_rest, warm_up

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT  # noqa: E741
FOUR = Layout.equal(4)


def words(schedule: Schedule) -> str:
    """The order in torch's words: chunk, kind, microbatch."""
    return " ".join(f"{action.chunk}{action.kind}{action.microbatch}" for action in schedule)


def short(schedule: Schedule) -> str:
    """The order without the chunk."""
    return " ".join(f"{action.kind}{action.microbatch}" for action in schedule)


def test_naive() -> None:
    assert words(FLUSHING["naive"](Layout.equal(2, 2), 1, 2)) == "1F0 3F0 3B0 1B0 1F1 3F1 3B1 1B1"


def test_gpipe() -> None:
    assert words(FLUSHING["gpipe"](Layout.equal(2), 1, 3)) == "1F0 1F1 1F2 1B0 1B1 1B2"


def test_gpipe_over_two_chunks_is_breadth_first() -> None:
    assert words(FLUSHING["gpipe"](Layout.equal(2, 2), 0, 2)) == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"


@pytest.mark.parametrize(
    "stage, expected",
    [
        (0, "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5"),
        (2, "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5"),
        (3, "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"),
    ],
)
def test_one_forward_one_backward(stage: int, expected: str) -> None:
    assert short(FLUSHING["1f1b"](FOUR, stage, 6)) == expected
    assert FLUSHING["pipedream-flush"](FOUR, stage, 6) == FLUSHING["1f1b"](FOUR, stage, 6)


def test_one_forward_one_backward_with_fewer_microbatches_than_stages() -> None:
    assert short(FLUSHING["1f1b"](FOUR, 0, 2)) == "F0 F1 B0 B1"


@pytest.mark.parametrize(
    "stage, expected",
    [
        (0, "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"),
        (1, "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"),
    ],
)
def test_interleaved(stage: int, expected: str) -> None:
    assert words(FLUSHING["interleaved"](Layout.equal(2, 2), stage, 4)) == expected


@pytest.mark.parametrize(
    "stage, expected",
    [
        (0, "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"),
        (1, "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3"),
        (2, "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"),
    ],
)
def test_zero_bubble(stage: int, expected: str) -> None:
    assert short(FLUSHING["zb-h1"](Layout.equal(3), stage, 4)) == expected


@settings(derandomize=True, deadline=None)
@given(st.sampled_from(sorted(FLUSHING)), st.integers(1, 6), st.integers(1, 3), st.integers(1, 12))
def test_every_microbatch_goes_forward_and_back_through_every_chunk(name: str, d: int, v: int, m: int) -> None:
    layout = Layout.equal(d, v if name in CHUNKED else 1)
    m = m * d if name == "interleaved" else m
    for stage in range(d):
        order = FLUSHING[name](layout, stage, m)
        kinds = (F, I, W) if name == "zb-h1" else (F, B)
        assert sorted(order) == sorted(
            Action(k, c, j) for k in kinds for c in layout.chunks_of(stage) for j in range(m)
        )
        places = {action: n for n, action in enumerate(order)}
        for before, after in pairwise(kinds):
            assert all(
                places[action] < places[action._replace(kind=after)] for action in order if action.kind is before
            )


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 6), st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_an_endless_order_may_be_cut_anywhere(d: int, counts: list[int]) -> None:
    layout = Layout.equal(d)
    for stage in range(d):
        order, fed = Schedule(), 0
        for count in counts:
            order += one_f_one_b_part(layout, stage, fed, fed + count)
            fed += count
        assert order + one_f_one_b_rest(layout, stage, fed) == FLUSHING["1f1b"](layout, stage, fed)


@pytest.mark.parametrize(
    "replicas, expected", [((1, 1, 1, 1), [3, 2, 1, 0]), ((2, 1, 1), [1, 1, 0]), ((15, 1), [1, 0]), ((1, 3), [3, 0])]
)
def test_warm_up_of_replicated_stages(replicas: tuple[int, ...], expected: list[int]) -> None:
    layout = Layout(replicas)
    assert [warm_up(layout, stage) for stage in range(len(replicas))] == expected
    assert warm_up(layout, 0) == -(-sum(replicas) // replicas[0]) - 1  # PipeDream's NOAM, less the one that goes back


@pytest.mark.parametrize(
    "name, layout, m, complaint",
    [
        ("gpip", FOUR, 4, "schedules are naive, gpipe"),
        ("gpipe", FOUR, 0, "1 or more"),
        ("1f1b", Layout.equal(2, 2), 4, "schedule='interleaved'"),
        ("zb-h1", Layout.equal(2, 2), 4, "virtual_stages=1"),
        ("interleaved", Layout.equal(4, 2), 6, "multiple of 4"),
        ("interleaved", Layout.equal(4, 2), 3, "multiple of 4"),
        ("2bw", FOUR, 3, "from 4 microbatches"),
        ("gpipe", Layout((2, 1)), 4, "1f1b, pipedream-flush, pipedream"),
        ("2bw", Layout((2, 1)), 4, "1f1b, pipedream-flush, pipedream"),
        ("1f1b", Layout((3, 1)), 4, "3 replicas"),
        ("pipedream", Layout((1, 2)), 3, "2 replicas"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, layout: Layout, m: int, complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        check(name, layout, m)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("d, m", [(1, 1), (2, 2), (3, 12)])
def test_what_fits_is_let_through(name: str, d: int, m: int) -> None:
    check(name, Layout.equal(d), m)


def from_torch(name: str, d: int, v: int, m: int) -> Iterator[str]:
    """Every rank's order by torch's generator for stages that are not there; reductions and bubbles left out."""
    stages = [MagicMock(group_size=d, group_rank=0, num_stages=d * v, submod=None) for _ in range(v)]
    if issubclass(kind := getattr(torch_schedules, name), torch_schedules.PipelineScheduleSingle):
        orders = kind(stages[0], m)._get_pipeline_order()
    else:
        orders = kind(stages, m).pipeline_order
    for rank in range(d):
        text = (re.fullmatch(r"(\d+)([FBIW])(\d+)", str(action)) for action in orders[rank] if action is not None)
        yield " ".join(match[0] for match in text if match)


@pytest.mark.parametrize("d, m", [(2, 4), (4, 8), (4, 16), (8, 16)])
@pytest.mark.parametrize(
    "name, theirs, v",
    [
        ("gpipe", "ScheduleGPipe", 1),
        ("interleaved", "ScheduleInterleaved1F1B", 2),
        ("interleaved", "ScheduleInterleaved1F1B", 3),
        ("zb-h1", "ScheduleInterleavedZeroBubble", 1),
    ],
)
def test_the_order_is_that_of_torch(name: str, theirs: str, v: int, d: int, m: int) -> None:
    layout = Layout.equal(d, v)
    assert [words(FLUSHING[name](layout, stage, m)) for stage in range(d)] == list(from_torch(theirs, d, v, m))


@pytest.mark.parametrize("d, m", [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_the_order_of_1f1b_is_that_of_torch_but_for_the_last_rank(d: int, m: int) -> None:
    """torch's list of the last rank runs microbatches 1 to m forward, and m does not exist."""
    ours = [words(FLUSHING["1f1b"](Layout.equal(d), stage, m)) for stage in range(d)]
    *theirs, last = from_torch("Schedule1F1B", d, 1, m)
    assert [*theirs, re.sub(r"F(\d+)", lambda match: f"F{int(match[1]) - 1}", last)] == ours


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_drawn_orders_are_those_of_the_functions(name: str) -> None:
    """The module's docstring draws three stages with four microbatches."""
    drawing = (orders.__doc__ or "").split(f"    {name} ")[1].split("\n\n")[0]
    drawn = [" ".join(line.split()[1:]) for line in drawing.splitlines()]
    assert drawn == [short(FLUSHING[name](Layout.equal(3), stage, 4)) for stage in range(3)]
