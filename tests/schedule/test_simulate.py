"""The simulator against the papers' formulas, in fractions, and against small cases by hand."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.errors import PlanError
from zeroshard.schedule.actions import COMPUTE, Action, Schedule
from zeroshard.schedule.layout import Layout
from zeroshard.schedule.lower import Loan, Skip
from zeroshard.schedule.orders import SCHEDULES, STREAMING
from zeroshard.schedule.pipeline import PipelineSchedule
from zeroshard.schedule.simulate import Costs, Simulation, simulate

ONE = Fraction(1)
DEPTHS = [1, 2, 3, 4, 6]
BACKWARDS = [ONE, 2 * ONE, Fraction(7, 3)]  # times of a backward, of its forward


def run(name: str, layout: Layout, m: int, costs: Costs, steps: int = 1) -> Simulation:
    return simulate(PipelineSchedule(name, layout, m).stretch(steps), layout, costs)


def equal(name: str, d: int, m: int, backward: Fraction, v: int = 1, steps: int = 1) -> Simulation:
    layout = Layout.equal(d, v)
    return run(name, layout, m, Costs.uniform(layout, ONE, backward), steps)


def lists(*texts: str) -> list[Schedule]:
    return [[Action.parse(word) for word in text.split()] for text in texts]


def times(simulation: Simulation) -> list[list[tuple[str, float, float]]]:
    return [[(str(action), start, end) for action, start, end in row] for row in simulation.spans]


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("d", DEPTHS)
def test_naive_keeps_one_stage_busy_at_a_time(d: int, backward: Fraction) -> None:
    for m in (1, d, 2 * d + 1):
        simulation = equal("naive", d, m, backward)
        assert simulation.bubble_fraction == Fraction(d - 1, d)
        assert simulation.makespan == m * d * (1 + backward)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "pipedream-flush"])
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("d", DEPTHS)
def test_bubble_of_gpipe_and_1f1b(name: str, d: int, backward: Fraction) -> None:
    for m in (1, d, d + 1, 4 * d):
        simulation = equal(name, d, m, backward)
        assert simulation.bubble_fraction == Fraction(d - 1, m + d - 1)  # GPipe, section 2.3
        assert simulation.bubble_over_ideal == Fraction(d - 1, m)
        assert simulation.idle == [(d - 1) * (1 + backward)] * d


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("d", DEPTHS)
def test_interleaving_divides_the_bubble_by_the_chunks(d: int, backward: Fraction, v: int) -> None:
    for m in (d, 2 * d, 4 * d):
        simulation = equal("interleaved", d, m, backward, v)
        assert simulation.bubble_over_ideal == Fraction(d - 1, v * m)  # PTD-P, section 2.2
        assert simulation.idle == [(d - 1) * (1 + backward) / v] * d
        assert equal("gpipe", d, m, backward, v).idle == simulation.idle  # breadth-first


@pytest.mark.parametrize("parts", [(ONE, ONE), (Fraction(3, 2), ONE), (ONE, Fraction(1, 2)), (Fraction(5, 4), ONE / 4)])
@pytest.mark.parametrize("d", DEPTHS)
def test_zero_bubble_h1_fills_the_drain_with_weight_gradients(d: int, parts: tuple[Fraction, Fraction]) -> None:
    first, second = parts
    layout = Layout.equal(d)
    for m in (2 * d, 3 * d):
        costs = Costs.uniform(layout, ONE, first + second, first, second)
        simulation = run("zb-h1", layout, m, costs)
        assert simulation.idle == [(d - 1) * (1 + first - second)] * d  # 2401.10241, section 2.1


@pytest.mark.parametrize("name", STREAMING)
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("d", DEPTHS)
def test_a_stream_has_no_bubble_between_fill_and_drain(name: str, d: int, backward: Fraction) -> None:
    simulation = equal(name, d, 2 * d, backward, steps=3)
    assert simulation.steady is not None
    assert simulation.steady.microbatch_seconds == 1 + backward
    assert simulation.steady.bubble_fraction == 0
    assert simulation.idle == [(d - 1) * (1 + backward)] * d  # as much as one flush


@pytest.mark.parametrize("replicas", [(2, 1), (3, 1), (7, 1), (2, 2), (3, 3, 3)])
def test_replicas_in_proportion_to_the_work_balance_a_stream(replicas: tuple[int, ...]) -> None:
    layout = Layout(replicas)
    costs = Costs(tuple(ONE * r for r in replicas), tuple(2 * ONE * r for r in replicas))
    steady = run("pipedream", layout, 42, costs, steps=2).steady
    assert steady is not None
    assert steady.microbatch_seconds == (3 if layout.uneven else 3 * replicas[0])
    assert steady.bubble_fraction == 0


def test_the_slowest_stage_sets_the_rhythm_of_a_stream() -> None:
    layout = Layout.equal(3)
    steady = run("pipedream", layout, 12, Costs((ONE, 2 * ONE, ONE), (ONE, 4 * ONE, ONE)), steps=3).steady
    assert steady is not None
    assert steady.microbatch_seconds == 6
    assert steady.bubble_fraction == Fraction(6 - 2 + 6 - 2, 3 * 6)


def test_only_streams_that_are_long_enough_have_a_steady_state() -> None:
    assert equal("1f1b", 4, 16, ONE).steady is None
    assert equal("pipedream", 4, 4, ONE).steady is None
    assert equal("pipedream", 4, 6, ONE).steady is not None


def test_idle_within_the_window_of_a_rank_leaves_out_fill_and_drain() -> None:
    assert equal("1f1b", 4, 8, 2 * ONE).window_idle == [9, 6, 3, 0]
    assert equal("gpipe", 2, 3, ONE).window_idle == [2, 0]


def test_unequal_stages_by_hand() -> None:
    layout = Layout.equal(2)
    simulation = run("1f1b", layout, 2, Costs((1, 2), (3, 4)))
    assert times(simulation) == [
        [("F0.0@0", 0, 1), ("F0.1@0", 1, 2), ("B0.0@0", 7, 10), ("B0.1@0", 13, 16)],
        [("F1.0@0", 1, 3), ("B1.0@0", 3, 7), ("F1.1@0", 7, 9), ("B1.1@0", 9, 13)],
    ]
    assert simulation.makespan == 16
    assert simulation.busy == [8, 12]
    assert simulation.idle == [8, 4]
    assert simulation.window_idle == [8, 0]
    assert simulation.bubble_fraction == 12 / 32
    assert simulation.bubble_over_ideal == 12 / 20


def test_messages_of_a_channel_leave_one_after_another() -> None:
    layout = Layout.equal(2)
    costs = Costs((1, 1), (1, 1), boundary_bytes=(20, 99), bytes_per_second=10, latency_seconds=3)
    spans = times(run("gpipe", layout, 3, costs))
    # sent at 1, 2, 3; 2 seconds each on the wire, 3 more on the way
    assert [start for _, start, _ in spans[1]] == [6, 8, 10, 11, 12, 13]
    # gradients are sent at 12, 13, 14
    assert [start for _, start, _ in spans[0]] == [0, 1, 2, 17, 19, 21]


def test_messages_one_way_do_not_hold_up_the_other_way() -> None:
    actions = lists(
        "F0.0@0 SEND_F0.0@0>1 B0.9@0",
        "RECV_F1.0@0<0 B1.9@0 SEND_B1.9@0>0 F1.0@0",
    )
    costs = Costs((1, 1), (1, 1), boundary_bytes=(8, 0), bytes_per_second=1)
    assert times(simulate(actions, Layout.equal(2), costs)) == [
        [("F0.0@0", 0, 1), ("B0.9@0", 9, 10)],
        [("B1.9@0", 0, 1), ("F1.0@0", 9, 10)],
    ]


def test_a_skip_arrives_beside_the_messages_of_the_chunks_between() -> None:
    """Three stages of 1 second; a skip of 50 bytes at 10 a second leaves at 1, and the loss waits for it until 6."""
    skip = Skip(0, 2)
    lists = PipelineSchedule("gpipe", Layout.equal(3), 1, skips=(skip,)).stretch()
    costs = Costs((1, 1, 1), (1, 1, 1), bytes_per_second=10, skip_bytes={skip: 50})
    simulation = simulate(lists, Layout.equal(3), costs)
    assert [[(str(action), start) for action, start, _ in row] for row in simulation.spans] == [
        [("F0.0@0", 0), ("B0.0@0", 13)],
        [("F1.0@0", 1), ("B1.0@0", 8)],
        [("F2.0@0", 6), ("B2.0@0", 7)],
    ]
    plain = simulate(lists, Layout.equal(3), replace(costs, skip_bytes={skip: 0}))
    assert plain.makespan == 6


def test_recomputation_adds_a_forward_except_right_after_it() -> None:
    layout = Layout.equal(2)
    costs = Costs.uniform(layout, ONE, 2 * ONE, recompute=True)
    assert [end - start for action, start, end in run("1f1b", layout, 3, costs).spans[0] if action.kind == "B"] == [
        3
    ] * 3
    assert [end - start for action, start, end in run("1f1b", layout, 3, costs).spans[1] if action.kind == "B"] == [
        2
    ] * 3
    assert run("gpipe", layout, 3, costs).busy == [12, 12]
    split = run("zb-h1", layout, 3, costs)
    assert [end - start for action, start, end in split.spans[0] if action.kind == "I"] == [2] * 3
    assert [end - start for action, start, end in split.spans[0] if action.kind == "W"] == [1] * 3


def test_a_reduction_waits_for_all_replicas() -> None:
    actions = lists(
        "F0.0@0 B0.0@0 REDUCE0.0@0 UPDATE0@0",
        "F0.1@0 B0.1@0 F0.3@0 B0.3@0 REDUCE0.3@0 UPDATE0@0",
    )
    costs = Costs((1,), (2,), reduce=(Fraction(1, 2),), update=(5,))
    half = Fraction(1, 2)
    assert times(simulate(actions, Layout((2,)), costs)) == [
        [("F0.0@0", 0, 1), ("B0.0@0", 1, 3), ("REDUCE0.0@0", 6, 6 + half), ("UPDATE0@0", 6 + half, 11 + half)],
        [
            *(("F0.1@0", 0, 1), ("B0.1@0", 1, 3), ("F0.3@0", 3, 4), ("B0.3@0", 4, 6)),
            *(("REDUCE0.3@0", 6, 6 + half), ("UPDATE0@0", 6 + half, 11 + half)),
        ],
    ]


def test_lent_weights_and_repaid_gradients_are_waited_for() -> None:
    actions = lists(
        "F0.0@0 COLLECT0.0@0<1 UPDATE0@0 LEND0@1>1 F0.1@1",
        "W1.0@0 REPAY1.0@0>0 BORROW1.1@1<0 W1.1@0 F1.1@1",
    )
    actions[0].insert(1, Action.parse("SEND_F0.1@0>1"))  # an input for the last forward, long before its weights
    costs = Costs((1, 1), (4, 4), update=(1, 1), loan_bytes=40, bytes_per_second=10)
    assert times(simulate(actions, Layout.equal(2), costs)) == [
        [("F0.0@0", 0, 1), ("UPDATE0@0", 6, 7), ("F0.1@1", 7, 8)],
        [("W1.0@0", 0, 2), ("W1.1@0", 2, 4), ("F1.1@1", 11, 12)],
    ]


def test_loans_that_take_no_time_change_nothing() -> None:
    layout = Layout.equal(3)
    costs = Costs.uniform(layout, ONE, 2 * ONE)
    for name in ("1f1b", "zb-h1", "pipedream", "2bw"):
        shared = PipelineSchedule(name, layout, 6, loans=(Loan(0, 2),)).stretch(3)
        plain = PipelineSchedule(name, layout, 6).stretch(3)
        assert any(action.kind == "LEND" for action in shared[0])
        assert simulate(shared, layout, costs).spans == simulate(plain, layout, costs).spans


def test_every_update_that_takes_time_is_counted() -> None:
    layout = Layout.equal(2)
    simulation = run("pipedream", layout, 4, Costs((1, 1), (1, 1), update=(1, 1)), steps=3)
    assert simulation.busy == [12 * 3, 12 * 3]
    assert simulation.steady is not None
    assert simulation.steady.microbatch_seconds == 3


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.integers(0, 9), min_size=24, max_size=24),
    st.integers(0, 5),
    st.booleans(),
)
def test_what_runs_is_the_list_in_its_order_and_after_what_it_needs(
    name: str, d: int, v: int, groups: int, seconds: list[int], latency: int, recompute: bool
) -> None:
    layout = Layout.equal(d, v if name in ("naive", "gpipe", "interleaved") else 1)
    chunks = layout.all_chunks
    costs = Costs(
        tuple(seconds[:chunks]), tuple(seconds[12 : 12 + chunks]), latency_seconds=latency, recompute=recompute
    )
    stretch = PipelineSchedule(name, layout, groups * d).stretch(2)
    simulation = simulate(stretch, layout, costs)
    ends: dict[tuple[str, int, int | None], float] = {}
    for actions, row in zip(stretch, simulation.spans, strict=True):
        assert [action for action, _, _ in row] == [action for action in actions if action.kind in COMPUTE]
        assert all(start <= end for _, start, end in row)
        assert all(before[2] <= after[1] for before, after in pairwise(row))
        for action, _, end in row:
            ends["F" if action.kind == "F" else "W" if action.kind == "W" else "B", action.chunk, action.microbatch] = (
                end
            )
    latency = latency if d > 1 else 0
    for row in simulation.spans:
        for (kind, chunk, microbatch, *_), start, _ in row:
            if kind == "F" and chunk > 0:
                assert start >= ends["F", chunk - 1, microbatch] + latency
            if kind in ("B", "I"):
                assert start >= ends["F", chunk, microbatch]
                if chunk < chunks - 1:
                    assert start >= ends["B", chunk + 1, microbatch] + latency
    assert simulation.makespan == max(row[-1][2] for row in simulation.spans)


def test_lists_that_wait_for_each_other_are_named() -> None:
    layout = Layout.equal(2)
    stretch = PipelineSchedule("1f1b", layout, 2).stretch()
    stretch[0] = [action for action in stretch[0] if str(action) != "SEND_F0.1@0>1"]
    with pytest.raises(PlanError, match=r"rank 0 before B0\.1@0, rank 1 before F1\.1@0"):
        simulate(stretch, layout, Costs.uniform(layout, 1, 2))


@pytest.mark.parametrize(
    "costs, words",
    [
        (lambda: Costs((1.0,), (1.0, 2.0)), "2 values of backward and 1 of forward"),
        (lambda: Costs((1.0, -1.0), (1.0, 2.0)), "forward of chunk 1 is -1.0"),
        (lambda: Costs((1.0,), (float("nan"),)), "backward of chunk 0 is nan"),
        (lambda: Costs((1.0,), (1.0,), update=(float("inf"),)), "update of chunk 0 is inf"),
        (lambda: Costs((1.0,), (1.0,), bytes_per_second=0), "link of 0 bytes per second"),
        (lambda: Costs((1.0,), (1.0,), latency_seconds=-1), "-1 seconds of latency"),
        (lambda: simulate([[], []], Layout.equal(2), Costs((1.0,), (1.0,))), "costs of 1 chunks, and the layout has 2"),
    ],
)
def test_costs_that_cannot_be_are_refused(costs: object, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        costs()  # type: ignore[operator]


def test_nothing_at_all_takes_no_time() -> None:
    simulation = simulate([[], []], Layout.equal(2), Costs.uniform(Layout.equal(2), 1, 2))
    assert (simulation.makespan, simulation.bubble_fraction, simulation.bubble_over_ideal) == (0, 0, 0)
    assert simulation.window_idle == [0, 0]
