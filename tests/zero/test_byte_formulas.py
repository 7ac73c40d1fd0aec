"""The formulas give the numbers that the paper prints (1910.02054, table 1 and section 7)."""

from fractions import Fraction

import pytest

from zeroshard.zero import StateBytes, state_bytes, wire_elements
from zeroshard.zero.byte_formulas import BytesPerParameter

TABLE_1 = {  # parameters: {N: GB of P_os, P_os+g, P_os+g+p}, as printed
    7_500_000_000: {
        1: ("120", "120", "120"),
        4: ("52.5", "41.3", "30"),
        16: ("35.6", "21.6", "7.5"),
        64: ("31.4", "16.6", "1.88"),
        256: ("30.4", "15.4", "0.47"),
        1024: ("30.1", "15.1", "0.12"),
    },
    128_000_000_000: {
        1: ("2048", "2048", "2048"),
        4: ("896", "704", "512"),
        16: ("608", "368", "128"),
        64: ("536", "284", "32"),
        256: ("518", "263", "8"),
        1024: ("513", "257", "2"),
    },
    1_000_000_000_000: {
        1: ("16000", "16000", "16000"),
        4: ("7000", "5500", "4000"),
        16: ("4750", "2875", "1000"),
        64: ("4187", "2218", "250"),
        256: ("4046", "2054", "62.5"),
        1024: ("4011", "2013", "15.6"),
    },
}
CELLS = [
    (psi, ranks, zero, printed)
    for psi, rows in TABLE_1.items()
    for ranks, row in rows.items()
    for zero, printed in enumerate(row, start=1)
]


@pytest.mark.parametrize("psi, ranks, zero, printed", CELLS)
def test_table_1(psi: int, ranks: int, zero: int, printed: str) -> None:
    gigabytes = state_bytes(psi, ranks, zero).total / 10**9
    last_digit = Fraction(1, 10 ** len(printed.partition(".")[2]))  # the paper rounds some cells and cuts others
    assert abs(gigabytes - Fraction(printed)) < last_digit


@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
def test_plain_data_parallelism_holds_sixteen_bytes_a_parameter(ranks: int) -> None:
    assert state_bytes(7_500_000_000, ranks, 0).total == 120 * 10**9


@pytest.mark.parametrize("zero, expected", [(0, (200, 200, 400, 800)), (1, (200, 200, 100, 200))])
def test_each_category(zero: int, expected: tuple[int, ...]) -> None:
    held = state_bytes(100, 4, zero)
    assert (held.parameters, held.gradients, held.master_weights, held.optimizer_states) == expected


def test_the_stages_slice_one_more_category_each() -> None:
    two, three = state_bytes(100, 4, 2), state_bytes(100, 4, 3)
    assert (two.parameters, two.gradients) == (200, 50)
    assert (three.parameters, three.gradients) == (50, 50)


def test_uneven_slices_are_exact_fractions() -> None:
    assert state_bytes(10, 3, 3).total == Fraction(160, 3)


def test_fp32_adam_and_frozen_parameters() -> None:
    fp32 = BytesPerParameter(parameter=4, gradient=4, master_weight=0, optimizer_state=8)
    assert state_bytes(100, 4, 1, fp32).total == 4 * 100 + 4 * 100 + 8 * 25
    assert state_bytes(100, 4, 2, fp32, frozen=True) == StateBytes(Fraction(400), Fraction(0), Fraction(0), Fraction(0))
    assert state_bytes(100, 4, 3, fp32, frozen=True).total == 100


def test_flats_add_up() -> None:
    assert state_bytes(30, 4, 2) + state_bytes(70, 4, 2) == state_bytes(100, 4, 2)


@pytest.mark.parametrize("zero, volume", [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_volume_of_a_step(zero: int, volume: int) -> None:
    assert sum(wire_elements(1000, 64, zero).values()) == volume * 1000


@pytest.mark.parametrize(
    "zero, reductions, expected",
    [
        (0, 1, {"gather parameters": 0, "reduce gradients": 1, "gather gradients": 1}),
        (1, 4, {"gather parameters": 1, "reduce gradients": 4, "gather gradients": 0}),
        (2, 1, {"gather parameters": 1, "reduce gradients": 1, "gather gradients": 0}),
        (3, 4, {"gather parameters": 8, "reduce gradients": 4, "gather gradients": 0}),
    ],
)
def test_volume_of_four_microbatches(zero: int, reductions: int, expected: dict[str, int]) -> None:
    assert wire_elements(10, 8, zero, microbatches=4, reductions=reductions) == {k: 10 * v for k, v in expected.items()}


@pytest.mark.parametrize("zero", range(4))
def test_one_rank_sends_nothing(zero: int) -> None:
    assert set(wire_elements(10, 1, zero, 4, 4).values()) == {0}
