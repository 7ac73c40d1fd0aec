"""The codes of compressed activations beside loops over single numbers, written from the papers."""

import math
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from zeroshard.rng.philox import Elements, random_bits
from zeroshard.saved.codes import kernels, sparse
from zeroshard.saved.codes.bits import pack_bits, pack_halves, unpack_bits, unpack_halves
from zeroshard.saved.codes.groups import FRACTION, GroupFloats, GroupIntegers
from zeroshard.saved.codes.lossy import lossy_of
from zeroshard.saved.codes.small_floats import FP8, FP10, FP16, SmallFloat

FORMATS = {"fp16": FP16, "fp10": FP10, "fp8": FP8}
ways = pytest.mark.parametrize("way", ["kernels", "torch"])
formats = pytest.mark.parametrize("name", FORMATS)


@contextmanager
def computed(way: str) -> Iterator[None]:
    """With the kernels in C++, or in torch's operations."""
    kernels._kernels.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        if way == "torch":
            for module in ("sparse", "bits", "small_floats"):
                patch.setattr(f"zeroshard.saved.codes.{module}.kernels_for", lambda tensor: None)
        else:
            assert kernels.kernels_for(torch.ones(1)) is not None
        yield


def numbers_of(code: SmallFloat) -> list[Fraction]:
    """The finite numbers from zero up: no denormal numbers, and the highest exponent has none."""
    bias = 2 ** (code.exponent - 1) - 1
    normal = [
        Fraction(2) ** (e - bias) * (1 + Fraction(m, 2**code.mantissa))
        for e in range(1, 2**code.exponent - 1)
        for m in range(2**code.mantissa)
    ]
    return [Fraction(0), *normal]


def code_of(code: SmallFloat, finite: list[Fraction], value: float) -> int:
    """The code of one number: the nearest; of two equally near the one with an even last bit, or zero."""
    sign = (math.copysign(1.0, value) < 0) << code.exponent + code.mantissa
    most = ((1 << code.exponent) - 1 << code.mantissa) - 1
    if math.isnan(value):
        return sign | most + 1 | 1 << code.mantissa - 1
    if math.isinf(value):
        return sign | most + 1
    size = abs(Fraction(value))
    above = bisect_left(finite, size)
    near = [n for n in (above - 1, above) if 0 <= n < len(finite)]
    best = min(near, key=lambda n: (abs(finite[n] - size), (n - 1) % 2 if n else 0, n))
    return sign | (0 if best == 0 else best - 1 + (1 << code.mantissa))


def codes_in(code: SmallFloat, words: Tensor, numel: int) -> list[int]:
    """The codes in words, by the layout: three of ten bits from the lowest, or one in each word."""
    raw = [int(word) % 2 ** (8 * code.word.itemsize) for word in words.tolist()]
    if code.per_word == 1:
        return raw
    return [word >> 10 * part & 1023 for word in raw for part in range(3)][:numel]


def trying(code: SmallFloat) -> Tensor:
    """Numbers at and beside every border: codes, half ways between them, the ends; and random ones of all sizes."""
    finite = numbers_of(code)[:: 1 if code.mantissa < 10 else 97]
    points = [float(n) for n in finite] + [float((a + b) / 2) for a, b in pairwise(finite)]
    least, most = float(numbers_of(code)[1]), float(numbers_of(code)[-1])
    points += [least / 2, least, most, 2 * most, 3e38, 1e-45, math.inf, math.nan]
    exact = torch.tensor(points, dtype=torch.float32)
    beside = [exact.nextafter(torch.tensor(end)) for end in (-math.inf, math.inf)]
    spread = torch.randn(300) * torch.linspace(-20, 18, 300).exp2()
    every = torch.cat([exact, *beside, spread])
    return torch.cat([every, -every])


@ways
@formats
def test_small_floats_are_the_nearest_numbers_of_their_format(name: str, way: str) -> None:
    code = FORMATS[name]
    finite, values = numbers_of(code), trying(code)
    with computed(way):
        words = code.encode(values)
        assert words.nbytes == code.nbytes(len(values))
        expected = [code_of(code, finite, value) for value in values.tolist()]
        assert codes_in(code, words, len(values)) == expected


@formats
def test_the_kernels_and_torch_give_the_same_bits(name: str) -> None:
    code, values = FORMATS[name], trying(FORMATS[name])
    found = []
    for way in ("kernels", "torch"):
        with computed(way):
            words = code.encode(values)
            found.append((words, code.decode(words, len(values)).view(torch.int32)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@ways
@formats
def test_every_code_is_read_as_its_number_and_written_as_itself(name: str, way: str) -> None:
    code = FORMATS[name]
    bits = 1 + code.exponent + code.mantissa
    every = torch.arange(2**bits, dtype=torch.int64)
    if code.per_word == 3:
        padded = torch.cat([every, every.new_zeros(-len(every) % 3)]).view(-1, 3)
        words = (padded[:, 0] | padded[:, 1] << 10 | padded[:, 2] << 20).to(torch.int32)
    else:
        words = every.to(code.word)
    with computed(way):
        values = code.decode(words, len(every))
        again = code.decode(code.encode(values), len(every))
    assert torch.equal(values.nan_to_num(1e38), again.nan_to_num(1e38))
    bias, least = 2 ** (code.exponent - 1) - 1, 2**code.mantissa
    for number, value in enumerate(values.tolist()):
        sign, size = number >> bits - 1, number & 2 ** (bits - 1) - 1
        exponent, mantissa = divmod(size, least)
        if exponent == 2**code.exponent - 1:
            assert math.isinf(value) if mantissa == 0 else math.isnan(value)
        else:
            expected = 0.0 if exponent == 0 else 2.0 ** (exponent - bias) * (1 + mantissa / least)
            assert value == (-expected if sign else expected)
            assert math.copysign(1.0, value) == (-1.0 if sign else 1.0)


@ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 5000])
def test_sparse_rows_are_read_back_bit_for_bit(way: str, dtype: torch.dtype, numel: int) -> None:
    """Negative zeros, denormal numbers and NaN are values; a column takes one byte, a row four."""
    values = torch.randn(numel).relu().to(dtype)
    special = torch.tensor([-0.0, math.nan, math.inf, torch.finfo(dtype).smallest_normal / 2], dtype=dtype)
    values[torch.randperm(numel)[:4]] = special[: min(4, numel)]
    words = values.view(sparse.WORDS[dtype.itemsize])
    with computed(way):
        found = sparse.count(values)
        assert found == sum(word != 0 for word in words.tolist())
        rows = sparse.to_sparse(values, found)
        again = sparse.from_sparse(rows, numel)
    assert torch.equal(again.view(words.dtype), words)
    held = rows.values.nbytes + rows.columns.nbytes + rows.starts.nbytes
    assert held == sparse.nbytes(numel, found, found * dtype.itemsize)
    assert held == found * (dtype.itemsize + 1) + 4 * (math.ceil(numel / 256) + 1)
    for row in range(len(rows.starts) - 1):
        part = words[256 * row : 256 * row + 256]
        columns = rows.columns[rows.starts[row] : rows.starts[row + 1]]
        assert columns.tolist() == [n for n, word in enumerate(part.tolist()) if word != 0]


@ways
@pytest.mark.parametrize("zeros", ["none", "all", "last"])
def test_sparse_rows_without_zeros_and_of_zeros_alone(way: str, zeros: str) -> None:
    values = {"none": torch.ones(600), "all": torch.zeros(600), "last": torch.ones(600)}[zeros]
    values[512:] *= zeros != "last"
    with computed(way):
        rows = sparse.to_sparse(values, sparse.count(values))
        assert torch.equal(sparse.from_sparse(rows, 600), values)


@ways
@pytest.mark.parametrize("numel", [1, 7, 8, 9, 4099])
def test_bits_and_halves_of_bytes(way: str, numel: int) -> None:
    flags, numbers = torch.rand(numel) > 0.4, torch.randint(16, (numel,), dtype=torch.uint8)
    with computed(way):
        packed = pack_bits(flags)
        assert torch.equal(unpack_bits(packed, numel), flags)
    assert packed.nbytes == math.ceil(numel / 8)
    assert all(bool(packed[n // 8] >> n % 8 & 1) == bool(flags[n]) for n in range(numel))
    halves = pack_halves(numbers)
    assert halves.nbytes == math.ceil(numel / 2)
    assert torch.equal(unpack_halves(halves, numel), numbers)


def f32(value: float) -> float:
    """The nearest number of fp32."""
    return torch.tensor(value, dtype=torch.float64).float().item()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_integers_of_groups_are_those_of_the_equation(bits: int) -> None:
    """q = floor((x - least) / scale + u), scale = (greatest - least) / (2^b - 1), read as q scale + least, in fp32."""
    code, numel = GroupIntegers(bits), 256 * 3 + 100
    values = torch.randn(numel) * 3 + 1
    values[256:512] = 0.7  # a group of one value
    found = code.encode(values, key=5, number=9)
    again = code.decode(found, numel)
    words = random_bits(5, 9, Elements(1, 1, 256 * 4), torch.device("cpu")).flatten().tolist()
    for row in range(4):
        group = values[256 * row : 256 * row + 256].tolist()
        least, scale = min(group), f32(f32(max(group) - min(group)) / (2**bits - 1))
        for n, x in enumerate(group):
            u = (words[256 * row + n] % 2**32 ^ 2**31) >> 32 - FRACTION
            place = f32(f32(x - least) / (scale or 1.0))
            q = min(2**bits - 1, math.floor(f32(place + u * 2.0**-FRACTION)))
            assert again[256 * row + n].item() == f32(f32(q * scale) + least), (row, n)
    held = [found.codes, found.scales, found.least]
    assert sum(tensor.nbytes for tensor in held if tensor is not None) == code.nbytes(numel)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_integers_of_groups_are_right_in_the_mean(bits: int) -> None:
    """And differ with the step's key and with the tensor's number, but not from run to run."""
    code, values = GroupIntegers(bits), torch.randn(256)
    reads = torch.stack([code.decode(code.encode(values, 1, n), 256) for n in range(2000)])
    step = (values.max() - values.min()) / (2**bits - 1)
    assert ((reads - values).abs().max(0).values <= step * 1.001).all()
    assert ((reads.mean(0) - values).abs() < 6 * step / 2 / 2000**0.5).all()  # six standard errors of the mean
    first, again, other = (code.encode(values, key, 0).codes for key in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_scaled_fp8_is_that_of_torch_with_a_scale_for_each_group() -> None:
    code, values = GroupFloats(), torch.randn(300) * 10
    values[128:256] = 0
    again = code.decode(code.encode(values), 300)
    for row in range(3):
        group = values[128 * row : 128 * row + 128]
        scale = group.abs().max() / 448
        expected = (group / scale).to(torch.float8_e4m3fn).float() * scale if scale > 0 else group
        assert torch.equal(again[128 * row : 128 * row + 128], expected)
    assert (again - values).abs().max() <= values.abs().max() / 16


@pytest.mark.parametrize("name", ["int2", "int4", "int8", "e4m3", "fp8", "fp10", "fp16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen_again(name: str, bad: float) -> None:
    values = torch.randn(600)
    values[300] = bad
    code = lossy_of(name, lambda: 1)
    again = code.decode(code.encode(values), 600)
    assert not again[300].isfinite()
    assert again[:256].isfinite().all()
