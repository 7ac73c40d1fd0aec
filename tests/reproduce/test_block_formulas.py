"""The formulas of a split block give the totals that the papers print (2205.05198, section 4; 2104.04473)."""

from fractions import Fraction

import pytest
from reproduce.block_formulas import block_messages, block_parameters, saved_bytes

from zeroshard.reproduce.block_times import BlockShape

SHAPES = [BlockShape(1, 2048, 12288, 96), BlockShape(4, 512, 1024, 16), BlockShape(3, 7, 10, 5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("t", [1, 2, 8])
def test_saved_bytes_are_the_equations_of_the_paper(shape: BlockShape, t: int) -> None:
    s, b, h, a = shape.positions, shape.rows, shape.width, shape.heads
    assert sum(saved_bytes(shape).values()) == s * b * h * (34 + Fraction(5 * a * s, h))
    split = s * b * h * (10 + Fraction(24, t) + Fraction(5 * a * s, h * t))
    assert sum(saved_bytes(shape, t).values()) == split
    sequence = Fraction(s * b * h, t) * (34 + Fraction(5 * a * s, h))
    assert sum(saved_bytes(shape, t, sequence=True).values()) == sequence


def test_a_block_sends_four_sums_or_pairs_of_gathers_and_scattered_sums() -> None:
    shape = SHAPES[0]
    plain = block_messages()
    assert (plain.sums, plain.gathers, plain.scatters) == (4, 0, 0)
    assert plain.wire_elements(shape) == {"sum activations": 8 * shape.elements, "gather activations": 0}
    pairs = block_messages(sequence=True)
    again = 2 * shape.elements  # inputs of column-parallel layers that the backward gathers again
    assert (pairs.sums, pairs.gathers, pairs.scatters) == (0, 6, 4)
    assert sum(pairs.wire_elements(shape).values()) - again == sum(plain.wire_elements(shape).values())


def test_a_recomputed_forward_sends_once_more() -> None:
    assert block_messages(recompute=True).sums == 6
    pairs = block_messages(sequence=True, recompute=True)
    assert (pairs.gathers, pairs.scatters) == (8, 6)


def test_parameters_of_a_block_are_those_of_equation_2() -> None:
    h = 12288
    assert block_parameters(h) == 12 * h**2 * (1 + Fraction(13, 12 * h))
    assert block_parameters(h, 8) == Fraction(12 * h**2 + 7 * h, 8) + 6 * h
    assert block_parameters(h, biases=False, scale_only=True) == 12 * h**2 + 2 * h
