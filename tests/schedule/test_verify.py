"""The verifier accepts every schedule that can be made, and refuses what was changed."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from zeroshard.errors import PlanError
from zeroshard.schedule import (
    Action,
    Kind,
    Layout,
    Loan,
    PipelineSchedule,
    Schedule,
    verify,
    with_gathers,
    with_reductions,
    with_update,
)
from zeroshard.schedule.actions import BACKWARDS, COMPUTE, SENDS
from zeroshard.schedule.lower import Skip
from zeroshard.schedule.orders import CHUNKED, SCHEDULES, STREAMING, UNEVEN

Lists = list[Schedule]
MESSAGES = {Kind.RECEIVE_FORWARD: Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD: Kind.SEND_BACKWARD}


def parsed(text: str) -> Schedule:
    return [Action.parse(word) for word in text.split()]


def accepted(lists: Lists) -> bool:
    try:
        verify(lists)
    except PlanError:
        return False
    return True


@st.composite
def pipelines(draw: st.DrawFn, most: int = 6) -> PipelineSchedule:
    """Every kind of pipeline that there is, with at most `most` stages."""
    name = draw(st.sampled_from(SCHEDULES))
    d = draw(st.integers(1, most))
    layout = Layout.equal(d, draw(st.integers(1, 3)) if name in CHUNKED else 1, draw(st.integers(1, 3)))
    m = draw(st.integers(1, 12))
    loans: tuple[Loan, ...] = ()
    if name in UNEVEN and draw(st.booleans()):
        layout = Layout(draw(st.lists(st.integers(1, 3), min_size=d, max_size=d).map(tuple)))
        m = math.lcm(*layout.replicas) * draw(st.integers(1, 3))
    elif name == "interleaved":
        m = d * draw(st.integers(1, 4))
    if name == "2bw":
        m += d
    streams = name in STREAMING
    if not (layout.uneven and streams) and layout.all_chunks > 1 and draw(st.booleans()):
        loans = (Loan(0, layout.all_chunks - 1),)
    sync = name == "pipedream" and draw(st.booleans())
    every = [Skip(a, b) for a in range(layout.all_chunks) for b in range(a + 2, min(a + d, layout.all_chunks))]
    skips = tuple(sorted(draw(st.sets(st.sampled_from(every), max_size=5)))) if every else ()
    one_way = tuple(skip for skip in skips if draw(st.booleans()))
    try:
        plain = PipelineSchedule(name, layout, m, sync, draw(st.booleans()), loans)
        near = {skip for skip in skips if skip.target - skip.source <= plain.farthest}
        return replace(plain, skips=tuple(sorted(near)), one_way=tuple(sorted(near.intersection(one_way))))
    except PlanError:
        assume(False)
        raise


@settings(derandomize=True, deadline=None, max_examples=200)
@given(pipelines(), st.integers(1, 4), st.booleans())
def test_every_pipeline_is_accepted(pipeline: PipelineSchedule, steps: int, gathers: bool) -> None:
    event(pipeline.name)
    lists = pipeline.stretch(steps)
    if gathers and not pipeline.streams:  # streams keep whole versions of the weights, so plans refuse them at stage 3
        lists = [with_gathers(actions) for actions in lists]
    verify(lists)


@pytest.mark.parametrize("replicas", [(1,) * 5, (1, 1, 2, 2), (2, 3, 3, 3), (3, 3, 2, 2)])
def test_a_stream_takes_messages_as_far_as_it_says(replicas: tuple[int, ...]) -> None:
    layout = Layout(replicas)
    for m in range(math.lcm(*replicas), 13, math.lcm(*replicas)):
        plain = PipelineSchedule("pipedream", layout, m)
        for a, b in itertools.combinations(range(len(replicas)), 2):
            if 1 < b - a <= plain.farthest:
                verify(replace(plain, skips=(Skip(a, b),)).stretch(3))


@pytest.mark.parametrize("stages, m, loans, skip", [(3, 1, (), Skip(0, 2)), (4, 9, (Loan(0, 3),), Skip(0, 3))])
def test_messages_of_a_stream_that_go_further_block(stages: int, m: int, loans: tuple[Loan, ...], skip: Skip) -> None:
    pipeline = PipelineSchedule("pipedream", Layout.equal(stages), m, loans=loans)
    assert pipeline.farthest == 1
    verify(pipeline.stretch(3))
    with pytest.raises(PlanError, match="No rank can go on"):
        verify(replace(pipeline, skips=(skip,)).stretch(3))


@pytest.mark.parametrize(
    "pipeline, steps",
    [
        (PipelineSchedule("gpipe", Layout.equal(2, 2), 4), 1),
        (PipelineSchedule("gpipe", Layout.equal(2, 2), 16), 1),
        (PipelineSchedule("gpipe", Layout.equal(3, 3), 15), 1),
        (PipelineSchedule("interleaved", Layout.equal(2, 2), 4), 1),
        (PipelineSchedule("interleaved", Layout.equal(6, 3), 24), 1),
        (PipelineSchedule("zb-h1", Layout.equal(2), 3, reduce_each=True, loans=(Loan(0, 1),)), 1),
        (PipelineSchedule("interleaved", Layout.equal(3, 2), 3, reduce_each=True, loans=(Loan(0, 5),)), 1),
        (PipelineSchedule("gpipe", Layout.equal(2, 2), 3, reduce_each=True, loans=(Loan(0, 3),)), 1),
        (PipelineSchedule("pipedream", Layout.equal(2), 1, loans=(Loan(0, 1),)), 2),
        (PipelineSchedule("pipedream", Layout.equal(3), 3, loans=(Loan(1, 2),)), 2),
        (PipelineSchedule("2bw", Layout.equal(2), 2, reduce_each=True, loans=(Loan(0, 1),)), 2),
        (PipelineSchedule("pipedream", Layout((1, 2)), 2), 2),
        (PipelineSchedule("pipedream", Layout((3, 1)), 6), 1),
        (PipelineSchedule("pipedream", Layout((4, 7, 6)), 84), 2),
        (PipelineSchedule("1f1b", Layout((3, 1)), 12, reduce_each=True), 1),
        (PipelineSchedule("1f1b", Layout((2, 1)), 4, loans=(Loan(0, 1),)), 1),
        (PipelineSchedule("1f1b", Layout((1, 3)), 6, reduce_each=True, loans=(Loan(0, 1),)), 1),
        (PipelineSchedule("1f1b", Layout((2, 1, 3)), 6, loans=(Loan(0, 2), Loan(1, 2))), 1),
        (PipelineSchedule("1f1b", Layout.equal(8), 24, skips=tuple(Skip(a, 7 - a) for a in range(3))), 1),
        (PipelineSchedule("zb-h1", Layout.equal(8), 16, skips=tuple(Skip(a, 7) for a in range(6))), 1),
        (PipelineSchedule("gpipe", Layout.equal(4, 3), 16, skips=(Skip(0, 2), Skip(0, 3), Skip(5, 7))), 1),
        (PipelineSchedule("interleaved", Layout.equal(5, 3), 15, skips=(Skip(0, 4), Skip(1, 4), Skip(6, 10))), 1),
        (PipelineSchedule("pipedream", Layout.equal(6), 6, skips=(Skip(0, 5), Skip(1, 4))), 3),
        (PipelineSchedule("1f1b", Layout((1, 3, 1, 2)), 12, skips=(Skip(0, 2), Skip(0, 3), Skip(1, 3))), 1),
    ],
    ids=str,
)
def test_what_blocks_unless_receives_come_early_enough(pipeline: PipelineSchedule, steps: int) -> None:
    verify(pipeline.stretch(steps))


def changed(action: Action) -> Iterator[Action]:
    """Actions that differ from this one, and which cannot stand in its place."""
    if action.kind is not Kind.DROP:  # may well drop another version that nothing uses any more
        yield action._replace(version=action.version + 1)
    if action.microbatch is not None and action.kind is not Kind.BORROW:
        yield action._replace(microbatch=action.microbatch + 1)
    if action.peer is not None:
        yield action._replace(peer=action.peer + 1)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(pipelines(most=4), st.integers(1, 2), st.booleans(), st.data())
def test_a_changed_action_is_refused(
    pipeline: PipelineSchedule, steps: int, gathers: bool, data: st.DataObject
) -> None:
    """Of every kind, one that is left out, or of another version, microbatch or peer."""
    lists = pipeline.stretch(steps)
    if gathers and not pipeline.streams:
        lists = [with_gathers(actions) for actions in lists]
    may_lack = {Kind.DROP, *([Kind.REDUCE] if pipeline.reduce_each else [])}  # a leak, and the next one takes it along
    for kind in sorted({action.kind for actions in lists for action in actions}):
        places = [(rank, n) for rank, actions in enumerate(lists) for n, a in enumerate(actions) if a.kind is kind]
        rank, n = data.draw(st.sampled_from(places))
        event(kind)
        actions = lists[rank]
        for mutant in (None, *changed(actions[n])):
            if mutant is not None or kind not in may_lack:
                broken = actions[:n] + ([] if mutant is None else [mutant]) + actions[n + 1 :]
                refused = not accepted([*lists[:rank], broken, *lists[rank + 1 :]])
                assert refused, f"accepted {mutant} for action {n} of rank {rank}, {actions[n]}"


def matters(before: Action, after: Action) -> bool:
    """Whether two neighbours must stand in this order, whatever else there is in the list."""
    a, b = before.kind, after.kind
    same = before.chunk == after.chunk and before.microbatch == after.microbatch
    if a in COMPUTE and b in SENDS | COMPUTE | {Kind.REDUCE}:
        return same
    if a in MESSAGES:
        use = {Kind.FORWARD} if a is Kind.RECEIVE_FORWARD else BACKWARDS
        return (same and b in use) or (b is a and before.peer == after.peer)
    return (a, b) in {
        (Kind.GATHER, Kind.FORWARD),
        (Kind.FORWARD, Kind.FREE),
        (Kind.REPAY, Kind.UPDATE),
        (Kind.COLLECT, Kind.REDUCE),
        (Kind.REDUCE, Kind.UPDATE),
        (Kind.UPDATE, Kind.LEND),
    } and (before.chunk == after.chunk)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(pipelines(most=4), st.integers(1, 2), st.booleans(), st.data())
def test_neighbours_that_change_places_are_refused(
    pipeline: PipelineSchedule, steps: int, gathers: bool, data: st.DataObject
) -> None:
    lists = pipeline.stretch(steps)
    if gathers:
        lists = [with_gathers(actions) for actions in lists]
    pairs: dict[tuple[Kind, Kind], list[tuple[int, int]]] = {}
    for rank, actions in enumerate(lists):
        for n, (before, after) in enumerate(itertools.pairwise(actions)):
            if matters(before, after):
                pairs.setdefault((before.kind, after.kind), []).append((rank, n))
    for (one, other), places in sorted(pairs.items()):
        rank, n = data.draw(st.sampled_from(places))
        event(f"{one} {other}")
        actions = lists[rank]
        broken = [*actions[:n], actions[n + 1], actions[n], *actions[n + 2 :]]
        refused = not accepted([*lists[:rank], broken, *lists[rank + 1 :]])
        assert refused, f"accepted {actions[n + 1]} before {actions[n]} at {n} of rank {rank}"


def comes_to_its_end(lists: Lists) -> bool:
    """Let every rank go as far as it can, again and again; for lists without loans and without replicas."""
    at = [0] * len(lists)
    posted: set[tuple[int, Action]] = set()  # by receiving rank
    sent: set[tuple[int, Action]] = set()
    inputs: dict[tuple[int, Kind, int, int | None], Action] = {}
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                kind, chunk, j, _, peer = action
                if kind in MESSAGES:
                    posted.add((rank, action._replace(version=0)))
                    inputs[rank, kind, chunk, j] = action._replace(version=0)
                elif kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                    assert peer is not None
                    forward = kind is Kind.SEND_FORWARD
                    receive = Kind.RECEIVE_FORWARD if forward else Kind.RECEIVE_BACKWARD
                    message = peer, Action(receive, chunk + (1 if forward else -1), j, 0, rank)
                    if message not in posted:
                        break
                    sent.add(message)
                elif kind is Kind.FORWARD or kind in BACKWARDS:
                    receive = Kind.RECEIVE_FORWARD if kind is Kind.FORWARD else Kind.RECEIVE_BACKWARD
                    need = inputs.get((rank, receive, chunk, j))
                    if need is not None and (rank, need) not in sent:
                        break
                at[rank] += 1
                moved = True
    return at == [len(actions) for actions in lists]


def with_late_receives(actions: Schedule, delay: int) -> Schedule:
    """All receives, in their order, by up to `delay` computes later, though before their use."""
    waiting: list[tuple[int, Action]] = []
    late: Schedule = []
    done = 0
    for action in actions:
        if action.kind in MESSAGES:
            waiting.append((done, action))
            continue
        if action.kind in COMPUTE:
            kind = Kind.RECEIVE_FORWARD if action.kind is Kind.FORWARD else Kind.RECEIVE_BACKWARD
            due = [n for n, (_, post) in enumerate(waiting) if (post.kind, post[1:3]) == (kind, action[1:3])]
            ripe = [n for n, (since, _) in enumerate(waiting) if since + delay <= done]
            count = max([*due, *ripe], default=-1) + 1
            late += [post for _, post in waiting[:count]]
            del waiting[:count]
            done += 1
        late.append(action)
    return late


@settings(derandomize=True, deadline=None, max_examples=80)
@given(pipelines(most=4), st.integers(1, 3), st.lists(st.integers(0, 4), min_size=4, max_size=4))
def test_exactly_what_blocks_is_refused(pipeline: PipelineSchedule, steps: int, delays: list[int]) -> None:
    pipeline = PipelineSchedule(pipeline.name, Layout.equal(pipeline.layout.stages, pipeline.layout.chunks), 12)
    lists = [with_late_receives(a, delay) for a, delay in zip(pipeline.stretch(steps), delays, strict=False)]
    ends = comes_to_its_end(lists)
    event(f"{pipeline.name} {'ends' if ends else 'blocks'}")
    if ends:
        verify(lists)
    else:
        with pytest.raises(PlanError, match="No rank can go on"):
            verify(lists)


def test_a_skip_does_not_stand_in_for_the_message_of_the_chunk_before() -> None:
    pipeline = PipelineSchedule("gpipe", Layout.equal(3), 1, skips=(Skip(0, 2),))
    lists = pipeline.stretch()
    assert "F0.0@0 SEND_F0.0@0>1 SEND_F0.0@0>2" in " ".join(map(str, lists[0]))
    lists[1].remove(Action.parse("SEND_F1.0@0>2"))
    lists[2].remove(Action.parse("RECV_F2.0@0<1"))
    with pytest.raises(PlanError, match=r"F2\.0@0, has no input of chunk 1, only of 0"):
        verify(lists)


def test_a_deadlock_is_shown_with_what_every_rank_waits_for() -> None:
    first = parsed("F0.0@0 SEND_F0.0@0>1 F0.1@0 SEND_F0.1@0>1 RECV_B0.0@0<1 B0.0@0 RECV_B0.1@0<1 B0.1@0")
    last = parsed("RECV_F1.0@0<0 F1.0@0 B1.0@0 SEND_B1.0@0>0 RECV_F1.1@0<0 F1.1@0 B1.1@0 SEND_B1.1@0>0")
    lists = [with_update(with_reductions(actions, False)) for actions in (first, last)]
    with pytest.raises(PlanError) as caught:
        verify(lists)
    assert "rank 0 at action 3, SEND_F0.1@0>1, waits for RECV_F1.1@0<0 on rank 1, action 4" in str(caught.value)
    assert "rank 1 at action 3, SEND_B1.0@0>0, waits for RECV_B0.0@0<1 on rank 0, action 4" in str(caught.value)
    lists[0].insert(2, lists[0].pop(4))
    verify(lists)


def test_ranks_that_reduce_wait_for_each_other() -> None:
    """A stage and the two replicas of the next one, which reduce after every microbatch."""
    first = parsed(
        "RECV_B0.0@0<1 F0.0@0 SEND_F0.0@0>1 F0.1@0 SEND_F0.1@0>2 F0.2@0 SEND_F0.2@0>1 RECV_B0.1@0<2 B0.0@0 B0.1@0 "
        "F0.3@0 SEND_F0.3@0>2 RECV_B0.2@0<1 RECV_B0.3@0<2 B0.2@0 B0.3@0 REDUCE0.3@0 UPDATE0@0"
    )
    replicas = [
        parsed(
            f"RECV_F1.{j}@0<0 F1.{j}@0 B1.{j}@0 SEND_B1.{j}@0>0 REDUCE1.{j}@0 "
            f"RECV_F1.{j + 2}@0<0 F1.{j + 2}@0 B1.{j + 2}@0 SEND_B1.{j + 2}@0>0 REDUCE1.{j + 2}@0 UPDATE1@0"
        )
        for j in (0, 1)
    ]
    with pytest.raises(PlanError) as caught:
        verify([first, *replicas])
    assert "rank 0 at action 6, SEND_F0.2@0>1, waits for RECV_F1.2@0<0 on rank 1, action 5" in str(caught.value)
    assert "rank 1 at action 4, REDUCE1.0@0, waits for reduction 0 of chunk 1 on ranks 1, 2" in str(caught.value)
    assert "rank 2 at action 3, SEND_B1.1@0>0, waits for RECV_B0.1@0<2 on rank 0, action 7" in str(caught.value)
    first.insert(1, first.pop(7))
    verify([first, *replicas])


def test_nothing_is_accepted() -> None:
    verify([])
    verify([[], []])


FIRST = "RECV_B0.0@0<1 F0.0@0 SEND_F0.0@0>1 B0.0@0 REDUCE0.0@0 UPDATE0@0"
LAST = "RECV_F1.0@0<0 F1.0@0 B1.0@0 SEND_B1.0@0>0 REDUCE1.0@0 UPDATE1@0"


def test_two_ranks() -> None:
    verify([parsed(FIRST), parsed(LAST)])


@pytest.mark.parametrize(
    "old, new, complaint",
    [
        ("RECV_F1.0@0<0 ", "", "Rank 1, action 0, F1.0@0, has no input"),
        ("SEND_F0.0@0>1 ", "", "Rank 1, action 0, RECV_F1.0@0<0, has no SEND_F that belongs to it on rank 0"),
        ("SEND_B1.0@0>0 ", "", "Rank 0, action 0, RECV_B0.0@0<1, has no SEND_B that belongs to it on rank 1"),
        ("RECV_F1.0@0<0 ", "RECV_F1.0@0<0 RECV_F1.0@0<0 ", "Rank 1, action 1, RECV_F1.0@0<0, repeats a receive"),
        ("RECV_F1.0@0<0 ", "RECV_F1.0@0<0 RECV_F1.1@0<0 ", "RECV_F1.1@0<0, is a receive that no compute uses"),
        ("RECV_F1.0@0<0 ", "RECV_F1.0@1<0 ", r"F1.0@0, uses another version than RECV_F1.0@1<0 before it says"),
        ("SEND_F0.0@0>1", "SEND_F0.0@1>1", r"SEND_F0.0@1>1, sends a tensor that was made with another version \(@0\)"),
        ("SEND_F0.0@0>1", "SEND_F0.0@0>1 SEND_F0.0@0>1", "Rank 0, action 3, SEND_F0.0@0>1, repeats a send"),
        ("SEND_F0.0@0>1", "SEND_B0.0@0>1", "Rank 0, action 2, SEND_B0.0@0>1, sends a tensor that was not made before"),
        (
            "F0.0@0 SEND_F0.0@0>1",
            "SEND_F0.0@0>1 F0.0@0",
            "Rank 0, action 1, SEND_F0.0@0>1, sends a tensor that was not made before",
        ),
    ],
)
def test_two_ranks_that_do_not_fit(old: str, new: str, complaint: str) -> None:
    texts = [FIRST.replace(old, new), LAST.replace(old, new)]
    assert texts != [FIRST, LAST]
    with pytest.raises(PlanError, match=complaint):
        verify([parsed(text) for text in texts])


def test_messages_that_overtake_each_other_are_refused() -> None:
    first, last = PipelineSchedule("gpipe", Layout.equal(2), 2).stretch()
    posts = [n for n, action in enumerate(last) if action.kind is Kind.RECEIVE_FORWARD]
    last[posts[0]], last[posts[1]] = last[posts[1]], last[posts[0]]
    with pytest.raises(PlanError, match=r"F1.0@0, takes in RECV_F1.0@0<0 before RECV_F1.1@0<0"):
        verify([first, last])
    forwards = [n for n, action in enumerate(last) if action.kind is Kind.FORWARD]
    last[forwards[0]], last[forwards[1]] = last[forwards[1]], last[forwards[0]]
    with pytest.raises(PlanError, match=r"SEND_F0.0@0>1, comes where rank 1 takes in RECV_F1.1@0<0 first"):
        verify([first, last])


def test_every_microbatch_passes_every_chunk_once() -> None:
    alone = [parsed("F0.0@0 B0.0@0 REDUCE0.0@0 UPDATE0@0")]
    with pytest.raises(PlanError, match="Microbatch 0 passes chunk 0 on rank 0 and on rank 1"):
        verify(alone * 2)
    more = with_update(with_reductions(parsed("F0.0@0 F0.1@0 F1.0@0 B1.0@0 B0.0@0"), False))
    with pytest.raises(PlanError, match="without a backward: microbatches 1"):
        verify([more])


def test_a_microbatch_that_passes_only_one_chunk() -> None:
    extra = "RECV_F1.1@0<0 F1.1@0 B1.1@0 SEND_B1.1@0>0 REDUCE1.1@0"
    with pytest.raises(PlanError, match="Chunks 0 and 1: only one is passed by microbatches 1"):
        verify([parsed(FIRST), parsed(LAST.replace("REDUCE1.0@0", extra))])


def test_replicas_reduce_alike() -> None:
    one = parsed("F0.0@0 B0.0@0 REDUCE0.0@0 F0.2@0 B0.2@0 REDUCE0.2@0 UPDATE0@0")
    other = parsed("F0.1@0 B0.1@0 F0.3@0 B0.3@0 REDUCE0.3@0 UPDATE0@0")
    with pytest.raises(
        PlanError, match=r"Rank 1, action 4, REDUCE0.3@0, is where rank 0 does REDUCE0@0 of 1 microbatches"
    ):
        verify([one, other])


def test_borrowed_weights_have_the_owners_version() -> None:
    lists = PipelineSchedule("pipedream", Layout.equal(2), 4, loans=(Loan(0, 1),)).stretch(2)
    verify(lists)
    n, borrow = next((n, action) for n, action in enumerate(lists[1]) if action.kind is Kind.BORROW)
    assert borrow.microbatch is not None and borrow.version == 1
    lists[1][n] = borrow._replace(microbatch=borrow.microbatch + 1)
    with pytest.raises(
        PlanError, match=f"F1.{borrow.microbatch}@2, uses version 0 of the weights of chunk 0, .* uses 1"
    ):
        verify(lists)


@pytest.mark.parametrize(
    "old, new, complaint",
    [
        (
            "COLLECT0.0@0<1 ",
            "",
            "Rank 0: at the end of its list, chunk 0 lends to ranks 1 and collects gradients from ",
        ),
        (" LEND0@1>1", "", "Rank 0: at the end of its list, chunk 0 lends to ranks  and collects gradients from 1"),
        (" BORROW1@1<0", "", "chunk 1 borrows from ranks  and repays gradients to 0"),
        ("REPAY1.0@0>0 ", "", "chunk 1 borrows from ranks 0 and repays gradients to "),
        (" LEND0@1>1", " LEND0@0>1", "LEND0@0>1, does not lend the latest version, 1"),
        ("COLLECT0.0@0<1 REDUCE0.0@0", "REDUCE0.0@0 COLLECT0.0@0<1", "COLLECT0.0@0<1, is not between the backward"),
        ("REPAY1.0@0>0 REDUCE1.0@0", "REDUCE1.0@0 REPAY1.0@0>0", "REPAY1.0@0>0, is not between the backward"),
    ],
)
def test_loans_that_are_not_kept(old: str, new: str, complaint: str) -> None:
    first = FIRST.replace("REDUCE", "COLLECT0.0@0<1 REDUCE") + " LEND0@1>1"
    last = LAST.replace("REDUCE", "REPAY1.0@0>0 REDUCE") + " BORROW1@1<0"
    verify([parsed(first), parsed(last)])
    assert old in first + last
    with pytest.raises(PlanError, match=complaint):
        verify([parsed(text.replace(old, new)) for text in (first, last)])


@pytest.mark.parametrize(
    "rank, kind, which, complaint",
    [
        (0, Kind.LEND, 1, "UPDATE0@2, comes before version 2 is lent"),
        (0, Kind.LEND, -1, "chunk 0 has not lent its latest version, 8"),
        (0, Kind.COLLECT, 3, "UPDATE0@3, comes before the gradients of those who borrow these weights are collected"),
        (1, Kind.REPAY, 3, "UPDATE1@3, comes before the gradients of borrowed weights are repaid"),
    ],
)
def test_a_stream_that_forgets_a_message_of_a_loan(rank: int, kind: Kind, which: int, complaint: str) -> None:
    lists = PipelineSchedule("pipedream", Layout.equal(2), 4, loans=(Loan(0, 1),)).stretch(2)
    del lists[rank][[n for n, action in enumerate(lists[rank]) if action.kind is kind][which]]
    with pytest.raises(PlanError, match=complaint):
        verify(lists)


def test_weights_are_borrowed_in_time() -> None:
    first, last = PipelineSchedule("pipedream", Layout.equal(2), 4, loans=(Loan(0, 1),)).stretch(2)
    n, borrow = next((n, action) for n, action in enumerate(last) if action.kind is Kind.BORROW)
    forward = next(k for k, a in enumerate(last) if a.kind is Kind.FORWARD and a.microbatch == borrow.microbatch)
    late = [*last[:n], *last[n + 1 : forward + 1], borrow, *last[forward + 1 :]]
    with pytest.raises(PlanError, match=f"{borrow}, comes after the forward that is to take it in"):
        verify([first, late])
    text = "F0.0@0 B0.0@0 F0.2@0 B0.2@0 REDUCE0.2@0 UPDATE0@0 BORROW0.1@1<1"
    with pytest.raises(PlanError, match="chunk 0 borrows a version for microbatches that have no forward here: 1"):
        verify([parsed(text), []])


def test_gradients_go_back_where_the_weights_came_from() -> None:
    loans = Loan(0, 1), Loan(0, 3), Loan(2, 3)
    first, last = PipelineSchedule("gpipe", Layout.equal(2, 2), 2, loans=loans).stretch()
    verify([first, last])
    one, *_, other = (n for n, action in enumerate(last) if action.kind is Kind.BORROW)
    crossed = list(last)
    crossed[one], crossed[other] = last[other], last[one]
    with pytest.raises(PlanError, match=r"REPAY3.1@0>0, is collected as COLLECT2.1@0<1, from which chunk 3 borrows no"):
        verify([first, crossed])
    first.remove(Action(Kind.COLLECT, 0, 1, 0, 1))
    last.remove(Action(Kind.REPAY, 3, 1, 0, 0))
    with pytest.raises(PlanError, match=r"Rank 1: chunk 3 borrows from chunk 0 of rank 0 and repays it no gradients"):
        verify([first, last])
