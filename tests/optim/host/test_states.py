"""8-bit moments against the definition of the map and a search through all its codes."""

import pytest
import torch
from torch import Tensor

from zeroshard.optim.host.states import BLOCK, Blockwise, code_map

SIGNS = pytest.mark.parametrize("signed", [True, False])


def spread(n: int, signed: bool) -> Tensor:
    values = torch.randn(n) * 10 ** torch.empty(n).uniform_(-9, 2)
    return values if signed else values.abs()


def nearest(values: Tensor, signed: bool, size: int) -> Tensor:
    """The code of the nearest value in fp64, the lower of two, by looking at all; zero of zeros alone if unsigned."""
    table = code_map(signed).values.double()
    codes = torch.empty(values.numel(), dtype=torch.uint8)
    for block in range(0, values.numel(), size):
        here = values[block : block + size]
        scale = here.abs().max()
        ratios = here / (scale if scale else 1.0)
        found = (ratios.double()[:, None] - table).abs().argmin(1)
        codes[block : block + size] = (found if signed else found.maximum((ratios > 0).long())).to(torch.uint8)
    return codes


@SIGNS
def test_the_map_is_that_of_the_paper(signed: bool) -> None:
    table = code_map(signed).values
    assert table.numel() == 256
    assert (table.diff() > 0).all()
    assert table[-1] == 1
    assert (table == 0).sum() == 1
    assert table[0] == (-1 if signed else 0)
    positive = table[table > 0]
    for exponent in range(7):  # as many values in each decade as the bits that are left can tell apart
        low, high = 10.0 ** (exponent - 7), 10.0 ** (exponent - 6)
        assert ((positive > low) & (positive < high)).sum() == 2 ** (exponent + (not signed))
    if signed:
        assert torch.equal(-table[1:127].flip(0), positive[:126])


@SIGNS
def test_no_upper_half_of_a_float_meets_two_bounds(signed: bool) -> None:
    tables = code_map(signed)
    upper = torch.arange(2**16)
    upper = upper[(upper & 0x7FFF) <= 0x3F80]  # up to 1
    ends = [(upper << 16) + low for low in (0, 0xFFFF)]
    first, last = (torch.bucketize((e - (e >= 2**31) * 2**32).int().view(torch.float32), tables.bounds) for e in ends)
    assert ((first - last).abs() <= 1).all()
    assert torch.equal(torch.minimum(first, last), tables.lowest[upper].long())


@SIGNS
@pytest.mark.parametrize("size", [BLOCK, 64])
@pytest.mark.parametrize("n", [1, 255, 256, 257, 5000])
def test_codes_are_the_nearest(signed: bool, n: int, size: int) -> None:
    values = spread(n, signed)
    made = Blockwise.encode(values, signed, size)
    assert torch.equal(made.codes, nearest(values, signed, size))
    scales = made.scales.repeat_interleave(size)[:n]
    assert torch.equal(made.decode(), code_map(signed).values[made.codes.int()] * scales)
    part = made.part(size, n) if n > size else made
    assert torch.equal(part.decode(), made.decode()[-part.codes.numel() :])


@SIGNS
def test_the_middle_of_two_codes_is_the_lower(signed: bool) -> None:
    bounds, table = code_map(signed).bounds[:-1], code_map(signed).values
    values = torch.cat([torch.tensor([1.0]), bounds])[:BLOCK]
    assert torch.equal(Blockwise.encode(values, signed).codes[1:], torch.arange(255, dtype=torch.uint8))
    above = bounds.nextafter(torch.tensor(torch.inf))
    nearer = (above.double() - table[:-1].double()) > (table[1:].double() - above.double())
    assert nearer[not signed :].all() and (signed or bounds[0] == 0)


@SIGNS
def test_what_was_decoded_is_kept(signed: bool) -> None:
    values = spread(4000, signed)
    values[:BLOCK] *= 1e-42  # denormals
    values[BLOCK : 2 * BLOCK] = -spread(BLOCK, False) if signed else 0.0
    once = Blockwise.encode(values, signed)
    again = Blockwise.encode(once.decode(), signed)
    assert torch.equal(once.decode(), again.decode())
    assert torch.equal(once.scales, again.scales)
    assert torch.equal(once.codes[BLOCK:], again.codes[BLOCK:])


@SIGNS
def test_zeros_stay_zeros(signed: bool) -> None:
    values = spread(600, signed)
    values[::3] = 0.0
    values[300:] = 0.0
    assert (Blockwise.encode(values, signed).decode()[values == 0] == 0).all()
    assert torch.equal(Blockwise.zeros(300, signed).decode(), torch.zeros(300))
    assert Blockwise.encode(torch.zeros(0), signed).decode().numel() == 0


@SIGNS
def test_bytes_and_error(signed: bool) -> None:
    values = spread(10 * BLOCK, signed)
    kept = Blockwise.encode(values, signed)
    assert kept.codes.nbytes + kept.scales.nbytes == 10 * (BLOCK + 4)
    scale = kept.scales.repeat_interleave(BLOCK)
    assert ((kept.decode() - values).abs() <= scale * (0.0071 if signed else 0.0036) + 1e-12).all()


@SIGNS
def test_a_nan_spoils_its_block_alone(signed: bool) -> None:
    values = torch.ones(3 * BLOCK)
    values[BLOCK + 5] = torch.nan
    assert torch.equal(Blockwise.encode(values, signed).decode().isnan(), torch.arange(3 * BLOCK) // BLOCK == 1)
