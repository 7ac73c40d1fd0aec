"""A layout deals chunks and microbatches out: every one to exactly one rank."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.errors import PlanError
from zeroshard.schedule import Layout

REPLICAS = st.lists(st.integers(1, 4), min_size=1, max_size=6).map(tuple)
LAYOUTS = st.builds(Layout, REPLICAS, st.integers(1, 3), st.integers(1, 3))


def test_three_stages_of_which_the_second_is_replicated() -> None:
    layout = Layout((1, 3, 2), chunks=2)
    assert (layout.stages, layout.all_chunks, layout.ranks, layout.uneven) == (3, 6, 6, True)
    assert layout.first_ranks == (0, 1, 4)
    assert [layout.stage_of(rank) for rank in range(6)] == [0, 1, 1, 1, 2, 2]
    assert [layout.replica_of(rank) for rank in range(6)] == [0, 0, 1, 2, 0, 1]
    assert [list(layout.members(stage)) for stage in range(3)] == [[0], [1, 2, 3], [4, 5]]
    assert list(layout.chunks_of(1)) == [1, 4]
    assert [layout.rank_of(4, j) for j in range(5)] == [1, 2, 3, 1, 2]
    assert [j for j in range(3, 9) if layout.rank_of(2, j) == 5] == [3, 5, 7]


def test_replicas_of_several_ranks() -> None:
    """2 stages x 2 replicas x 3 ranks that work together."""
    layout = Layout((2, 2), ranks_per_replica=3)
    assert (layout.ranks, layout.first_ranks, layout.narrow) == (12, (0, 6), Layout((2, 2)))
    assert [layout.replica_of(rank) for rank in range(12)] == [0, 0, 0, 1, 1, 1] * 2
    assert [layout.place_of(rank) for rank in range(12)] == [0, 1, 2] * 4
    assert list(layout.members(1)) == [6, 7, 8, 9, 10, 11]
    assert [layout.rank_of(1, 3, place) for place in range(3)] == [9, 10, 11]


def test_equal_stages() -> None:
    layout = Layout.equal(3, chunks=2, replicas=4)
    assert layout == Layout((4, 4, 4), 2) and not layout.uneven and layout.ranks == 12


@settings(derandomize=True, deadline=None)
@given(LAYOUTS, st.integers(0, 20), st.integers(0, 20))
def test_every_chunk_and_every_microbatch_has_one_place(layout: Layout, first: int, count: int) -> None:
    chunks = [c for stage in range(layout.stages) for c in layout.chunks_of(stage)]
    assert sorted(chunks) == list(range(layout.all_chunks))
    assert [r for stage in range(layout.stages) for r in layout.members(stage)] == list(range(layout.ranks))
    for rank in range(layout.ranks):
        stage = layout.stage_of(rank)
        place = layout.place_of(rank)
        assert rank == layout.members(stage)[layout.replica_of(rank) * layout.ranks_per_replica + place]
        own = [j for j in range(first, first + count) if layout.rank_of(stage, j, place) == rank]
        assert all(layout.rank_of(c, j, place) == rank for c in layout.chunks_of(stage) for j in own)


@pytest.mark.parametrize(
    "replicas, chunks, together", [((), 1, 1), ((1, 0), 1, 1), ((-1,), 1, 1), ((2, 2), 0, 1), ((2, 2), 1, 0)]
)
def test_what_cannot_be(replicas: tuple[int, ...], chunks: int, together: int) -> None:
    with pytest.raises(PlanError, match="1 or more"):
        Layout(replicas, chunks, together)
