"""A layout deals chunks and microbatches out: every one to exactly one rank."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.errors import PlanError
from zeroshard.schedule import Layout

LAYOUTS = st.builds(Layout, st.lists(st.integers(1, 4), min_size=1, max_size=6).map(tuple), st.integers(1, 3))


def test_three_stages_of_which_the_second_is_replicated() -> None:
    layout = Layout((1, 3, 2), chunks=2)
    assert (layout.stages, layout.all_chunks, layout.ranks, layout.uneven) == (3, 6, 6, True)
    assert layout.first_ranks == (0, 1, 4)
    assert [layout.stage_of(rank) for rank in range(6)] == [0, 1, 1, 1, 2, 2]
    assert [layout.replica_of(rank) for rank in range(6)] == [0, 0, 1, 2, 0, 1]
    assert [list(layout.members(stage)) for stage in range(3)] == [[0], [1, 2, 3], [4, 5]]
    assert list(layout.chunks_of(1)) == [1, 4]
    assert [layout.rank_of(4, j) for j in range(5)] == [1, 2, 3, 1, 2]
    assert list(layout.microbatches_of(5, 3, 9)) == [3, 5, 7]


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
        assert rank == layout.members(stage)[layout.replica_of(rank)]
        own = [j for j in range(first, first + count) if layout.rank_of(stage, j) == rank]
        assert list(layout.microbatches_of(rank, first, first + count)) == own
        assert all(layout.rank_of(c, j) == rank for c in layout.chunks_of(stage) for j in own)


@pytest.mark.parametrize("replicas, chunks", [((), 1), ((1, 0), 1), ((-1,), 1), ((2, 2), 0)])
def test_what_cannot_be(replicas: tuple[int, ...], chunks: int) -> None:
    with pytest.raises(PlanError, match="1 or more"):
        Layout(replicas, chunks)
