"""Peaks equal the formulas of the papers."""

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.schedule import Action, Kind, Layout, Loan, PipelineSchedule
from zeroshard.schedule.actions import BACKWARDS, RECEIVES
from zeroshard.schedule.peaks import Peak, peaks

STAGES, CHUNKS, MICROBATCHES, DATA_RANKS = st.integers(1, 6), st.integers(1, 3), st.integers(1, 24), st.integers(1, 3)
REPLICAS = [
    *(r for d in (1, 2, 3) for r in itertools.product((1, 2, 3), repeat=d)),
    (15, 1),
    (2, 1, 1, 3),
    (4, 3, 2, 1),
]


def found(pipeline: PipelineSchedule, steps: int = 1) -> list[Peak]:
    """The peaks of the first lane, one per stage, after a check that all lanes have the same."""
    layout = pipeline.layout
    per_rank = peaks(pipeline.stretch(steps), layout.chunks)
    per_stage = [{per_rank[rank] for rank in layout.members(stage)} for stage in range(layout.stages)]
    assert all(len(same) == 1 for same in per_stage)
    return [peak for same in per_stage for peak in same]


@settings(derandomize=True, deadline=None)
@given(STAGES, CHUNKS, MICROBATCHES, DATA_RANKS)
def test_naive_keeps_one_microbatch(d: int, v: int, m: int, data_ranks: int) -> None:
    for peak in found(PipelineSchedule("naive", Layout.equal(d, v, data_ranks), m)):
        assert (peak.in_flight, peak.weight_versions) == (1, 1)


@settings(derandomize=True, deadline=None)
@given(STAGES, CHUNKS, MICROBATCHES, DATA_RANKS)
def test_gpipe_keeps_all(d: int, v: int, m: int, data_ranks: int) -> None:
    for peak in found(PipelineSchedule("gpipe", Layout.equal(d, v, data_ranks), m)):
        assert (peak.in_flight, peak.weight_versions) == (m, 1)


@settings(derandomize=True, deadline=None)
@given(st.sampled_from(("1f1b", "pipedream-flush")), STAGES, MICROBATCHES, DATA_RANKS)
def test_1f1b_keeps_as_many_as_there_are_stages_from_here_on(name: str, d: int, m: int, data_ranks: int) -> None:
    for s, peak in enumerate(found(PipelineSchedule(name, Layout.equal(d, 1, data_ranks), m))):
        assert (peak.in_flight, peak.weight_versions) == (min(m, d - s), 1)


@settings(derandomize=True, deadline=None)
@given(STAGES, CHUNKS, st.integers(1, 4), DATA_RANKS)
def test_interleaved(d: int, v: int, rounds: int, data_ranks: int) -> None:
    """(2(d - 1 - s) + (v - 1)d + 1)/v, and never more than all."""
    m = d * rounds
    for s, peak in enumerate(found(PipelineSchedule("interleaved", Layout.equal(d, v, data_ranks), m))):
        assert peak.in_flight == min(m, Fraction(2 * (d - 1 - s) + (v - 1) * d + 1, v))
        assert peak.weight_versions == 1


@settings(derandomize=True, deadline=None)
@given(STAGES, st.integers(0, 18), DATA_RANKS)
def test_zero_bubble_keeps_as_many_as_there_are_stages(d: int, more: int, data_ranks: int) -> None:
    for peak in found(PipelineSchedule("zb-h1", Layout.equal(d, 1, data_ranks), d + more)):
        assert (peak.in_flight, peak.weight_versions) == (d, 1)


@pytest.mark.parametrize("replicas", REPLICAS)
def test_pipedream_keeps_as_many_versions_as_microbatches(replicas: tuple[int, ...]) -> None:
    """⌈N/r⌉ of both, with r the replicas of the stage and N those of it and all later ones."""
    pipeline = PipelineSchedule("pipedream", Layout(replicas), math.lcm(*replicas) * len(replicas))
    for s, peak in enumerate(found(pipeline, steps=4)):
        most = -(-sum(replicas[s:]) // replicas[s])
        assert (peak.in_flight, peak.weight_versions) == (most, most)


@settings(derandomize=True, deadline=None)
@given(STAGES, st.integers(0, 6), DATA_RANKS)
def test_vertical_sync_keeps_d_versions_everywhere(d: int, more: int, data_ranks: int) -> None:
    pipeline = PipelineSchedule("pipedream", Layout.equal(d, 1, data_ranks), d + more, vertical_sync=True)
    for s, peak in enumerate(found(pipeline, steps=2)):
        assert (peak.in_flight, peak.weight_versions) == (d - s, d)


@settings(derandomize=True, deadline=None)
@given(STAGES, st.integers(0, 6), DATA_RANKS, st.integers(2, 4))
def test_2bw_keeps_two_versions(d: int, more: int, data_ranks: int, steps: int) -> None:
    for s, peak in enumerate(found(PipelineSchedule("2bw", Layout.equal(d, 1, data_ranks), d + more), steps)):
        assert (peak.in_flight, peak.weight_versions) == (d - s, 2)


@settings(derandomize=True, deadline=None)
@given(st.sampled_from(("naive", "1f1b", "zb-h1", "pipedream", "2bw")), STAGES, MICROBATCHES)
def test_buffers_are_those_that_are_open_together(name: str, d: int, m: int) -> None:
    """By places in the list: a receive is open from where it stands to the compute that takes it in."""
    pipeline = PipelineSchedule(name, Layout.equal(d), max(m, d), loans=(Loan(0, d - 1),) if d > 1 else ())
    lists = pipeline.stretch(2)
    for actions, peak in zip(lists, peaks(lists, 1), strict=True):
        spans = []
        for n, action in enumerate(actions):
            if action.kind in RECEIVES - {Kind.COLLECT, Kind.BORROW}:
                kinds = {Kind.FORWARD} if action.kind is Kind.RECEIVE_FORWARD else BACKWARDS
                ends = [k for k, a in enumerate(actions) if a.kind in kinds and a.microbatch == action.microbatch]
                spans.append((n, *ends))
        assert peak.buffers == max((sum(a <= n < b for a, b in spans) for n, _ in spans), default=0)


def test_an_update_takes_the_place_of_a_dropped_version() -> None:
    text = "F0.0@0 B0.0@0 REDUCE0.0@0 DROP0@0 UPDATE0@0 F0.1@1 B0.1@1 REDUCE0.1@1 DROP0@1 UPDATE0@1"
    actions = [Action.parse(word) for word in text.split()]
    assert peaks([actions], 1) == [Peak(Fraction(1), 1, 0)]
    assert peaks([[a for a in actions if a.kind is not Kind.DROP]], 1) == [Peak(Fraction(1), 3, 0)]


def test_nothing_is_held_by_a_rank_that_does_nothing() -> None:
    assert peaks([[], []], 2) == [Peak(Fraction(0), 1, 0)] * 2
