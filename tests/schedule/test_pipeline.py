"""What a schedule promises about versions, updates and messages, read off the lists of all ranks."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.errors import PlanError
from zeroshard.schedule import Action, Kind, Layout, Loan, PipelineSchedule, Schedule
from zeroshard.schedule.actions import COMPUTE
from zeroshard.schedule.orders import CHUNKED, FLUSHING

F, B = Kind.FORWARD, Kind.BACKWARD
STAGES, DATA_RANKS, STEPS = st.integers(1, 6), st.integers(1, 3), st.integers(1, 4)
UNEVEN = [r for d in (2, 3) for r in itertools.product((1, 2, 3), repeat=d) if len(set(r)) > 1]


def words(schedule: Schedule) -> str:
    return " ".join(map(str, schedule))


def of(schedule: Schedule, *kinds: Kind) -> Schedule:
    return [action for action in schedule if action.kind in kinds]


def versions(pipeline: PipelineSchedule, steps: int) -> dict[tuple[Kind, int, int], int]:
    """By kind, stage and the place of the microbatch among the rank's own: the version that is used."""
    found: dict[tuple[Kind, int, int], int] = {}
    for rank, actions in enumerate(pipeline.stretch(steps)):
        stage = pipeline.layout.stage_of(rank)
        for action in of(actions, F, B):
            assert action.microbatch is not None
            assert pipeline.layout.rank_of(action.chunk, action.microbatch) == rank
            k = action.microbatch // pipeline.layout.replicas[stage]
            assert found.setdefault((action.kind, stage, k), action.version) == action.version
    return found


def test_the_lists_of_two_stages_in_words() -> None:
    first, last = PipelineSchedule("gpipe", Layout.equal(2), 2).stretch()
    assert words(of(first, *set(Kind) - {Kind.RECEIVE_BACKWARD})) == (
        "F0.0@0 SEND_F0.0@0>1 F0.1@0 SEND_F0.1@0>1 B0.0@0 B0.1@0 REDUCE0.1@0 UPDATE0@0"
    )
    assert words(of(last, *set(Kind) - {Kind.RECEIVE_FORWARD})) == (
        "F1.0@0 F1.1@0 B1.0@0 SEND_B1.0@0>0 B1.1@0 SEND_B1.1@0>0 REDUCE1.1@0 UPDATE1@0"
    )
    assert words(of(first, Kind.RECEIVE_BACKWARD)) == "RECV_B0.0@0<1 RECV_B0.1@0<1"
    assert words(of(last, Kind.RECEIVE_FORWARD)) == "RECV_F1.0@0<0 RECV_F1.1@0<0"


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zb-h1", "pipedream", "2bw"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_replicas_have_equal_lists_where_all_stages_have_equally_many(name: str, chunks: int) -> None:
    """Only the ranks and the numbers of the microbatches are others: one replica stands for all."""
    if chunks > 1 and name not in CHUNKED:
        return
    pipeline = PipelineSchedule(name, Layout((3, 3), chunks, 2), 4, loans=(Loan(0, 2 * chunks - 1),))
    alone = pipeline.distinct.stretch(2)
    assert len(alone) == 2 and len(pipeline.narrow.stretch(2)) == 6

    def unnumbered(actions: Schedule, replicas: int) -> Schedule:
        number = lambda j: j if j is None else j // replicas  # noqa: E731
        return [action._replace(microbatch=number(action.microbatch), peer=None) for action in actions]

    for rank, actions in enumerate(pipeline.narrow.stretch(2)):
        assert unnumbered(actions, 3) == unnumbered(alone[rank // 3], 1)
    uneven = PipelineSchedule("1f1b", Layout((2, 1), 1, 4), 4)
    assert uneven.distinct == uneven.narrow


@settings(derandomize=True, deadline=None)
@given(st.sampled_from(sorted(FLUSHING)), STAGES, st.integers(1, 3), st.integers(1, 8), DATA_RANKS, st.booleans())
def test_a_flush_has_one_version_and_updates_at_the_end(
    name: str, d: int, v: int, m: int, data_ranks: int, each: bool
) -> None:
    layout = Layout.equal(d, v if name in CHUNKED else 1, data_ranks)
    pipeline = PipelineSchedule(name, layout, m * d if name == "interleaved" else m, reduce_each=each)
    for rank, actions in enumerate(pipeline.stretch()):
        chunks = list(layout.chunks_of(layout.stage_of(rank)))
        assert {action.version for action in actions} == {0}
        assert actions[-len(chunks) :] == [Action(Kind.UPDATE, chunk) for chunk in chunks]
        assert len(of(actions, Kind.UPDATE)) == len(chunks) and not of(actions, Kind.DROP)
        reductions = Counter(action.chunk for action in of(actions, Kind.REDUCE))
        assert reductions == dict.fromkeys(chunks, pipeline.microbatches if each else 1)
    assert pipeline.rest(0, 1) == []


@settings(derandomize=True, deadline=None)
@given(STAGES, st.integers(1, 12), DATA_RANKS, STEPS)
def test_pipedream_uses_the_latest_version(d: int, m: int, data_ranks: int, steps: int) -> None:
    """F(s, k) and B(s, k) use version max(0, k - (d - 1 - s)): PipeDream, SOSP 2019, section 3.3."""
    found = versions(PipelineSchedule("pipedream", Layout.equal(d, 1, data_ranks), m), steps)
    keys = itertools.product((F, B), range(d), range(m * steps))
    assert found == {(kind, s, k): max(0, k - (d - 1 - s)) for kind, s, k in keys}


@pytest.mark.parametrize("replicas", UNEVEN)
@pytest.mark.parametrize("steps", [1, 3])
def test_pipedream_with_replicas_uses_the_latest_version(replicas: tuple[int, ...], steps: int) -> None:
    """Stage s, with r replicas of N on it and later stages, is ⌈N/r⌉ - 1 updates behind its newest microbatch."""
    m = math.lcm(*replicas)
    found = versions(PipelineSchedule("pipedream", Layout(replicas), m), steps)
    behind = [-(-sum(replicas[s:]) // r) - 1 for s, r in enumerate(replicas)]
    assert found == {
        (kind, s, k): max(0, k - behind[s])
        for kind in (F, B)
        for s, r in enumerate(replicas)
        for k in range(m * steps // r)
    }


@settings(derandomize=True, deadline=None)
@given(STAGES, st.integers(1, 12), DATA_RANKS, STEPS)
def test_vertical_sync_uses_one_version_on_all_stages(d: int, m: int, data_ranks: int, steps: int) -> None:
    found = versions(PipelineSchedule("pipedream", Layout.equal(d, 1, data_ranks), m, vertical_sync=True), steps)
    keys = itertools.product((F, B), range(d), range(m * steps))
    assert found == {(kind, s, k): max(0, k - (d - 1)) for kind, s, k in keys}


@settings(derandomize=True, deadline=None)
@given(STAGES, st.integers(0, 6), DATA_RANKS, STEPS)
def test_2bw_is_one_version_behind(d: int, more: int, data_ranks: int, steps: int) -> None:
    """Version max(⌊k/m⌋ - 1, 0) on all stages, so that W(t+1) = W(t) - lr·grad f(W(t-1)): 2006.09503, section 3.1."""
    m = d + more
    pipeline = PipelineSchedule("2bw", Layout.equal(d, 1, data_ranks), m)
    keys = itertools.product((F, B), range(d), range(m * steps))
    assert versions(pipeline, steps) == {(kind, s, k): max(k // m - 1, 0) for kind, s, k in keys}
    for actions in pipeline.stretch(steps):
        gradients = Counter[int]()
        made = 0
        for action in of(actions, B, Kind.UPDATE):
            if action.kind is B:
                gradients[action.version] += 1
            else:
                assert (action.version, gradients) == (made, {max(0, made - 1): m})
                gradients.clear()
                made += 1
        assert made == steps


@settings(derandomize=True, deadline=None)
@given(st.sampled_from(("pipedream", "2bw")), STAGES, st.integers(0, 6), STEPS)
def test_a_stream_goes_on_from_step_to_step(name: str, d: int, more: int, steps: int) -> None:
    """Steps and the rest make one 1F1B over all microbatches, and each step feeds m of them."""
    pipeline = PipelineSchedule(name, Layout.equal(d), d + more)
    whole = PipelineSchedule("1f1b", Layout.equal(d), steps * (d + more))
    for rank, actions in enumerate(pipeline.stretch(steps)):
        assert [a._replace(version=0) for a in of(actions, *COMPUTE)] == of(whole.step(rank), *COMPUTE)
        fed = [len(of(pipeline.step(rank, number), F)) for number in range(steps)]
        assert fed == [d + more] * steps and not of(pipeline.rest(rank, steps), F)
    assert pipeline.rest(0, 0) == []


@settings(derandomize=True, deadline=None)
@given(st.sampled_from(sorted(FLUSHING)), STAGES, st.integers(1, 3), st.integers(1, 4), DATA_RANKS)
def test_every_boundary_is_crossed_twice_by_every_microbatch(
    name: str, d: int, v: int, m: int, data_ranks: int
) -> None:
    """2m(d·v - 1) messages in each lane."""
    layout = Layout.equal(d, v if name in CHUNKED else 1, data_ranks)
    pipeline = PipelineSchedule(name, layout, m * d if name == "interleaved" else m)
    kinds = Counter(action.kind for actions in pipeline.stretch() for action in actions)
    crossings = pipeline.microbatches * data_ranks * (layout.all_chunks - 1) if d > 1 else 0
    for kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD, Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD):
        assert kinds[kind] == crossings


@pytest.mark.parametrize("data_ranks", [1, 2])
def test_a_loan_in_a_flush(data_ranks: int) -> None:
    """The borrower repays before the owner reduces, and gets the new version."""
    pipeline = PipelineSchedule("1f1b", Layout.equal(2, 1, data_ranks), 2, loans=(Loan(0, 1),))
    lists = pipeline.stretch()
    j = 2 * data_ranks - 1  # the last microbatch of the last lane
    owner, borrower = lists[data_ranks - 1], lists[-1]
    peer, own = 2 * data_ranks - 1, data_ranks - 1
    assert words(owner[-4:]) == f"COLLECT0.{j}@0<{peer} REDUCE0.{j}@0 UPDATE0@0 LEND0@1>{peer}"
    assert words(of(borrower, Kind.REPAY, Kind.BORROW)) == f"REPAY1.{j}@0>{own} BORROW1@1<{own}"


def test_loans_within_a_rank_need_no_messages() -> None:
    pipeline = PipelineSchedule("gpipe", Layout.equal(2, 2), 2)
    shared = PipelineSchedule("gpipe", Layout.equal(2, 2), 2, loans=(Loan(0, 2),))
    assert shared.stretch() == pipeline.stretch()


@pytest.mark.parametrize("name, v", [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("pipedream", 1), ("2bw", 1)])
def test_ranks_of_one_replica_do_the_same_with_their_like(name: str, v: int) -> None:
    """Of 3 ranks that work together, each has the list of one rank alone, to ranks in its place."""
    loans = (Loan(0, 1),) if v == 1 else ()
    wide = PipelineSchedule(name, Layout((2, 2), v, 3), 4, loans=loans)
    narrow = wide.narrow
    for rank, actions in enumerate(wide.stretch(2)):

        def moved(schedule: Schedule, rank: int = rank) -> Schedule:
            return [a if a.peer is None else a._replace(peer=3 * a.peer + rank % 3) for a in schedule]

        assert actions == moved(narrow.stretch(2)[rank // 3])
        for microbatch in (0, 1):
            assert wide.evaluation(rank, microbatch) == moved(narrow.evaluation(rank // 3, microbatch))


@pytest.mark.parametrize("name", ["gpipe", "pipedream"])
def test_evaluation_takes_a_microbatch_forward_through_all_chunks(name: str) -> None:
    layout = Layout.equal(3, 2 if name == "gpipe" else 1, 2)
    pipeline = PipelineSchedule(name, layout, 4)
    forwards = [a for rank in range(6) for a in of(pipeline.evaluation(rank, 3), F)]
    assert sorted(a.chunk for a in forwards) == list(range(layout.all_chunks))
    assert {a.microbatch for a in forwards} == {3}
    assert not of(pipeline.evaluation(0, 3), *Kind)  # the other lane


@pytest.mark.parametrize(
    "name, m, complaint", [("interleaved", 6, "multiple of 4"), ("2bw", 3, "from 4"), ("x", 4, "no")]
)
def test_what_does_not_fit_is_refused(name: str, m: int, complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        PipelineSchedule(name, Layout.equal(4), m)
