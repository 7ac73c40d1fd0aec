"""A draw's rows are found in its shape, and an element's word does not depend on how many rows are drawn with it."""

import pytest
import torch

from zeroshard.rng import layout
from zeroshard.rng.layout import RowLayout, Stream, layout_of


@pytest.mark.parametrize(
    "shape, rows, found",
    [
        ((4, 8, 16), 4, RowLayout(1, 4, 128)),
        ((4,), 4, RowLayout(1, 4, 1)),
        ((4, 4), 4, RowLayout(1, 4, 4)),
        ((9, 4, 16), 4, RowLayout(9, 4, 16)),
        ((8, 4, 16), 4, RowLayout(8, 4, 16)),  # sequence first, and not two heads of each row
        ((8, 6, 6), 4, RowLayout(1, 4, 72)),
        ((9, 16), 4, None),
        ((16, 5), 4, None),  # a parameter's
        ((), 4, None),
        ((4, 0), 4, None),
        ((4, 8), 0, None),
    ],
)
def test_which_dimension_is_the_batchs(shape: tuple[int, ...], rows: int, found: RowLayout | None) -> None:
    assert layout_of(shape, rows, [(16, 5), (16,)]) == found


def words_of(shape: tuple[int, ...], rows: int, first_row: int = 0, per_element: int = 1) -> torch.Tensor:
    """All words of a draw."""
    out = torch.zeros(*shape, dtype=torch.int64)
    for part, words in Stream(7, 3, rows, first_row).tiles(out, per_element):
        part.copy_(words.long().sum(-1))
    return out


@pytest.mark.parametrize("tile", [1, 3, 16, 40, 2**16])
@pytest.mark.parametrize("per_element", [1, 2])
def test_tiles_are_the_parts_of_one_draw(monkeypatch: pytest.MonkeyPatch, tile: int, per_element: int) -> None:
    for shape in ((4, 3, 5), (7, 4, 5), (8, 3), (9, 3)):
        whole = words_of(shape, 4, 0, per_element)
        with monkeypatch.context() as patch:
            patch.setattr(layout, "TILE", tile)
            assert torch.equal(words_of(shape, 4, 0, per_element), whole)


def test_a_row_has_the_same_words_in_any_microbatch_and_layout() -> None:
    whole = words_of((6, 5, 3), 6)
    assert torch.equal(words_of((2, 5, 3), 2, first_row=4), whole[4:])
    assert torch.equal(words_of((1, 5, 3), 1, first_row=2), whole[2:3])
    assert torch.equal(words_of((5, 6, 3), 6), whole.transpose(0, 1))
    assert torch.equal(words_of((30, 3), 6), whole.flatten(0, 1))
    assert whole.unique().numel() == whole.numel()


def test_a_draw_without_rows_is_the_same_in_every_microbatch() -> None:
    assert torch.equal(words_of((7, 3), 2, first_row=4), words_of((7, 3), 6))
    assert not torch.equal(words_of((7, 3), 7)[0], words_of((7, 3), 6)[0])
