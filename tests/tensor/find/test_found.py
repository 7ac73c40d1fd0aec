"""What a rank has of segments of features."""

import pytest

from zeroshard.errors import PlanError
from zeroshard.parts.place import Piece
from zeroshard.tensor.find.found import FoundLayer, FoundLayers, Segment, Style, check_splits, pieces_of


def spans(segments: list[Segment], ranks: int, rank: int) -> list[tuple[int, int, bool]]:
    return [(p.start, p.stop, p.counted) for p in pieces_of(segments, ranks, rank) if p.stop > p.start]


def test_a_segment_is_cut_evenly() -> None:
    assert [Segment(12, 4).piece(rank, 4) for rank in range(4)] == [Piece(n, n + 3) for n in (0, 3, 6, 9)]


def test_a_vocabulary_is_cut_as_evenly_as_it_can_be() -> None:
    assert [spans([Segment(257, 2)], 2, rank) for rank in (0, 1)] == [[(0, 129, True)], [(129, 257, True)]]
    assert [p.stop - p.start for rank in range(4) for p in pieces_of([Segment(257, 4)], 4, rank)] == [65, 65, 65, 62]
    assert [p.stop - p.start for rank in range(4) for p in pieces_of([Segment(5, 4)], 4, rank)] == [2, 2, 1, 0]


def test_parts_fewer_than_ranks_lie_on_neighbours_and_count_once() -> None:
    # queries of 8 heads, 2 heads of keys, 2 of values, 4 features each, on 4 ranks
    fused = [Segment(32, 4), Segment(8, 2), Segment(8, 2)]
    assert spans(fused, 4, 0) == [(0, 8, True), (32, 36, True), (40, 44, True)]
    assert spans(fused, 4, 1) == [(8, 16, True), (32, 36, False), (40, 44, False)]
    assert spans(fused, 4, 2) == [(16, 24, True), (36, 40, True), (44, 48, True)]
    assert spans(fused, 4, 3) == [(24, 32, True), (36, 40, False), (44, 48, False)]


def test_a_segment_of_some_ranks_is_empty_on_the_others() -> None:
    groups = [Segment(8, 2, (0, 2)), Segment(4, 1, (0, 2)), Segment(8, 2, (2, 4)), Segment(4, 1, (2, 4))]
    assert [spans(groups, 4, rank) for rank in range(4)] == [
        [(0, 4, True), (8, 12, True)],
        [(4, 8, True), (8, 12, False)],
        [(12, 16, True), (20, 24, True)],
        [(16, 20, True), (20, 24, False)],
    ]
    assert len(list(pieces_of(groups, 4, 0))) == len(groups)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_counted_pieces_are_all_features_once(ranks: int) -> None:
    segments = [Segment(16, ranks), Segment(8, 2), Segment(3, 1), Segment(257, ranks), Segment(8, 2, (0, 2))]
    counted = [n for rank in range(ranks) for p in pieces_of(segments, ranks, rank) if p.counted
               for n in range(p.start, p.stop)]  # fmt: skip
    assert sorted(counted) == list(range(16 + 8 + 3 + 257 + 8))


def test_a_model_of_which_nothing_is_split_is_refused() -> None:
    whole = FoundLayers(tuple(FoundLayer(f"conv{n}", Style.WHOLE, (), "Conv2d is no linear layer") for n in range(5)))
    with pytest.raises(
        PlanError,
        match=r"tensor_parallel=2 splits nothing of Net.*conv2: Conv2d.*and 2 more.*Leave tensor_parallel out",
    ) as e:
        check_splits(whole, "Net", 2)
    assert "conv3" not in str(e.value)
    check_splits(FoundLayers((*whole.layers, FoundLayer("up", Style.COLUMN, (Segment(4, 2),), ""))), "Net", 2)
