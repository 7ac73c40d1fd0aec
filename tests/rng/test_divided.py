"""What a rank draws of divided activations is its part of what one process draws, whatever dimension is divided."""

from collections.abc import Sequence

import pytest
import torch

from zeroshard.kernels import build
from zeroshard.parts.zones import DividedActivations, Division
from zeroshard.rng import draws, layout, philox
from zeroshard.rng.layout import Stream, UnclearDrawError, divided_layout

ROWS = 4
WAYS = [pytest.param(True, id="torch", marks=()), pytest.param(False, id="kernel", marks=pytest.mark.skipif(
    build.compiler() is None, reason="no C++ compiler"))]  # fmt: skip


def parts_of(whole: int, ranks: int) -> list[Division]:
    """Even parts but for the last ones, which may be smaller, as positions are divided."""
    chunk = -(-whole // ranks)
    firsts = [min(rank * chunk, whole) for rank in range(ranks)]
    return [Division(whole, first, min(chunk, whole - first)) for first in firsts]


def words_of(
    shape: Sequence[int], divided: DividedActivations | None, rows: int = ROWS, per_element: int = 1
) -> torch.Tensor:
    """All words of a draw."""
    out = torch.zeros(*shape, dtype=torch.int64)
    for part, words in Stream(7, 3, rows, 5, (), lambda: None, divided).tiles(out, per_element):
        part.copy_(words.long().mul(torch.arange(1, per_element + 1)).sum(-1))
    return out


CASES = {  # the shape that one process draws, as [rows x before, divided, after], and what is divided in it
    "positions [B, T, D]": ((ROWS, 9, 6), (ROWS, 9, 6), 1, "positions"),
    "positions [B, T]": ((ROWS, 9), (ROWS, 9), 1, "positions"),
    "positions [B, T, 1, 3]": ((ROWS, 9, 1, 3), (ROWS, 9, 1, 3), 1, "positions"),
    "positions [B T, D]": ((ROWS, 9, 6), (ROWS * 9, 6), 1, "positions"),
    "positions [B T]": ((ROWS, 9), (ROWS * 9,), 1, "positions"),
    "heads [B, H, T, S]": ((ROWS, 6, 5, 7), (ROWS, 6, 5, 7), 1, "heads"),
    "heads [B, H, T, T]": ((ROWS, 6, 5, 5), (ROWS, 6, 5, 5), 1, "heads"),
    "heads [B H, T, S]": ((ROWS, 6, 5, 7), (ROWS * 6, 5, 7), 1, "heads"),
    "features [B, T, F]": ((ROWS, 5, 22), (ROWS, 5, 22), 2, "features"),
    "features [B, F]": ((ROWS, 22), (ROWS, 22), 1, "features"),
    "features [B T, F]": ((ROWS * 5, 22), (ROWS * 5, 22), 1, "features"),
    "features [B k, T, F]": ((ROWS * 2, 3, 22), (ROWS * 2, 3, 22), 2, "features"),
    "features [T, B, F]": ((5, ROWS, 22), (5, ROWS, 22), 2, "features"),
}


def divided_by(kind: str, division: Division) -> DividedActivations:
    return DividedActivations(**{kind: division if kind == "positions" else (division,)})  # type: ignore[arg-type]


@pytest.mark.parametrize("in_torch", WAYS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_part_has_the_words_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, case: str, ranks: int, in_torch: bool, whole: bool
) -> None:
    """Uneven parts too, of which the last may be empty; in tiles of any size, of one word or two per element."""
    if in_torch:
        monkeypatch.setattr(philox, "_kernel", lambda: None)
    view, shape, dimension, kind = CASES[case]
    for per_element in (1, 2):
        words = words_of(shape, None, per_element=per_element)
        assert words.unique().numel() == words.numel()
        for division in parts_of(view[dimension], ranks):
            wanted = words.view(view).narrow(dimension, division.first, division.size)
            own = wanted.shape
            if len(shape) < len(view):
                own = (own[0] * own[1], *own[2:])
            for tile in (16, 40, 2**16) if in_torch and not whole else (1, 3, 16, 40, 2**16):
                with monkeypatch.context() as patch:
                    patch.setattr(layout, "TILE", tile)
                    found = words_of(own, divided_by(kind, division), per_element=per_element)
                assert torch.equal(found.view(wanted.shape), wanted), (division, tile)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("case", ["positions [B, T, D]", "heads [B, H, T, S]", "features [B, T, F]"])
def test_every_dtype_and_kind_of_draw_is_divided(case: str, dtype: torch.dtype) -> None:
    view, _, dimension, kind = CASES[case]
    x = torch.empty(view, dtype=dtype)
    kinds = {
        "dropout": lambda s, x: draws.DRAWS[torch.ops.aten.bernoulli_.float](s, x.clone(), 0.7),
        "uniform": lambda s, x: draws.DRAWS[torch.ops.aten.uniform_.default](s, x.clone()),
        "normal": lambda s, x: draws.DRAWS[torch.ops.aten.normal_.default](s, x.clone()),
    }
    for draw in kinds.values():
        whole = draw(Stream(1, 2, ROWS, 0), x)
        assert whole.unique().numel() > 1
        for division in parts_of(view[dimension], 2):
            own = x.narrow(dimension, division.first, division.size)
            stream = Stream(1, 2, ROWS, 0, divided=divided_by(kind, division))
            assert torch.equal(draw(stream, own), whole.narrow(dimension, division.first, division.size))


def test_a_part_has_the_same_words_in_any_microbatch() -> None:
    divided = DividedActivations(heads=(Division(6, 3, 3),))
    whole = words_of((ROWS, 3, 5, 5), divided)
    out = torch.zeros(2, 3, 5, 5, dtype=torch.int64)
    for part, words in Stream(7, 3, 2, 7, divided=divided).tiles(out, 1):
        part.copy_(words.long().sum(-1))
    assert torch.equal(out, whole[2:])


SEQUENCE = DividedActivations(positions=Division(9, 5, 4))
ATTENTION = DividedActivations(
    heads=(Division(6, 3, 3), Division(2, 1, 1)), features=(Division(24, 12, 12), Division(8, 4, 4))
)


@pytest.mark.parametrize(
    "shape, divided",
    [
        ((), SEQUENCE),
        ((1,), SEQUENCE),
        ((ROWS,), SEQUENCE),
        ((ROWS, 1, 1), SEQUENCE),
        ((ROWS, 1, 1), ATTENTION),
        ((), ATTENTION),
        ((17, 5), SEQUENCE),  # a parameter's
    ],
)
def test_one_number_for_a_row_or_for_all_is_drawn_alike_on_all_ranks(
    shape: tuple[int, ...], divided: DividedActivations
) -> None:
    for rank in range(2):
        own = DividedActivations(positions=Division(9, 5 * rank, 5 - rank)) if divided is SEQUENCE else divided
        parameters = [(17, 5)]
        assert divided_layout(shape, ROWS, own, parameters) == layout.layout_of(shape, ROWS, parameters)


@pytest.mark.parametrize(
    "shape, divided, rows",
    [
        ((ROWS, 6), SEQUENCE, ROWS),  # a row's features, or positions of another number
        ((4 + 1, ROWS, 6), SEQUENCE, ROWS),  # sequence first
        ((7, 3), SEQUENCE, ROWS),
        ((ROWS, 1, 6), SEQUENCE, ROWS),  # for all positions of a row
        ((ROWS, 4, 6), SEQUENCE, 0),  # rows that are not known
        ((ROWS, 1, 1), DividedActivations(positions=Division(2, 1, 1)), ROWS),  # one position, or all
        ((ROWS, 6), DividedActivations(positions=Division(2, 1, 1)), ROWS),  # one position, or a row's features
        ((ROWS, 5, 3, 4), ATTENTION, ROWS),  # heads in another place
        ((ROWS, 36, 5), ATTENTION, ROWS),
        ((ROWS, 5, 36), ATTENTION, ROWS),  # features of queries, keys and values
        ((24, 5), ATTENTION, ROWS),  # a parameter's, which may be divided as well
        ((ROWS * 3, 5, 12), ATTENTION, ROWS),  # heads, or features of more rows
        ((ROWS, 1, 5, 4), ATTENTION, ROWS + 1),
        (
            (ROWS, 5, 12),
            DividedActivations(features=(Division(24, 12, 12), Division(12, 0, 12))),
            ROWS,
        ),  # divided in two ways
        (
            (ROWS, 2, 5, 7),
            DividedActivations(heads=(Division(4, 2, 2), Division(2, 0, 2))),
            ROWS,
        ),  # of queries, or of keys
        ((ROWS, 5, 7), DividedActivations(), ROWS),
        ((9, 12), DividedActivations(features=(Division(24, 12, 12),)), ROWS),  # without rows
        (
            (9, 2),
            DividedActivations(features=(Division(ROWS, 2, 2),)),
            ROWS,
        ),  # one process has its rows in that dimension
        ((ROWS * 3, ROWS, 5), DividedActivations(heads=(Division(6, 3, 3),)), ROWS),  # one process reads sequence first
    ],
)
def test_a_shape_that_does_not_show_the_part_is_refused(
    shape: tuple[int, ...], divided: DividedActivations, rows: int
) -> None:
    with pytest.raises(UnclearDrawError, match=r"numbers of shape \[.*\] for \d rows where ranks have"):
        divided_layout(shape, rows, divided, [(24, 5)])


def test_square_attention_has_the_heads_of_queries_where_keys_are_on_several_ranks() -> None:
    """Four heads of queries and two of keys on four ranks: each rank has one of both."""
    divided = DividedActivations(heads=(Division(4, 3, 1), Division(2, 1, 1)))
    assert torch.equal(words_of((ROWS, 1, 5, 5), divided), words_of((ROWS, 4, 5, 5), None)[:, 3:])


def test_nothing_is_drawn_where_a_rank_has_no_positions() -> None:
    assert words_of((ROWS, 0, 6), DividedActivations(positions=Division(5, 5, 0))).shape == (ROWS, 0, 6)


def test_the_error_says_what_ranks_have() -> None:
    with pytest.raises(UnclearDrawError) as error:
        divided_layout((ROWS, 5, 7), ROWS, ATTENTION)
    assert str(error.value) == (
        "numbers of shape [4, 5, 7] for 4 rows where ranks have 3 of 6 heads or 1 of 2 heads or 12 of 24 features or 4 "
        "of 8 features; no dimension of that shape shows which part this rank has"
    )
