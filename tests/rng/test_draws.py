"""Operations that draw give their densities from words, and the same numbers for the same words."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zeroshard.rng import draws
from zeroshard.rng.draws import DRAWS
from zeroshard.rng.layout import Stream

aten = torch.ops.aten
COUNT = 2**16
OUT = torch.empty(COUNT)
WEIGHTS = torch.tensor([0.1, 0.0, 0.6, 0.3])
MOMENTS: dict[str, tuple[Callable[[Stream], Tensor], float, float]] = {  # and their mean and deviation
    "bernoulli_": (lambda s: DRAWS[aten.bernoulli_.float](s, OUT.clone(), 0.3), 0.3, math.sqrt(0.21)),
    "bernoulli": (lambda s: DRAWS[aten.bernoulli.p](s, OUT, 0.9), 0.9, 0.3),
    "bernoulli of tensors": (lambda s: DRAWS[aten.bernoulli.default](s, torch.full_like(OUT, 0.2)), 0.2, 0.4),
    "bernoulli_ of tensors": (
        lambda s: DRAWS[aten.bernoulli_.Tensor](s, OUT.clone(), torch.full_like(OUT, 0.2).double()), 0.2, 0.4
    ),
    "bernoulli_ of booleans": (
        lambda s: DRAWS[aten.bernoulli_.float](s, OUT.bool(), 0.3).float(), 0.3, math.sqrt(0.21)
    ),
    "uniform_": (lambda s: DRAWS[aten.uniform_.default](s, OUT.clone(), -1.0, 3.0), 1.0, 4 / math.sqrt(12)),
    "rand": (lambda s: DRAWS[aten.rand.default](s, [COUNT], dtype=torch.float64), 0.5, 1 / math.sqrt(12)),
    "rand in bf16": (lambda s: DRAWS[aten.rand_like.default](s, OUT.bfloat16()).float(), 0.498, 1 / math.sqrt(12)),
    "normal_": (lambda s: DRAWS[aten.normal_.default](s, OUT.clone(), 2.0, 3.0), 2.0, 3.0),
    "randn": (lambda s: DRAWS[aten.randn.default](s, [COUNT]), 0.0, 1.0),
    "randn in fp64": (lambda s: DRAWS[aten.randn_like.default](s, OUT.double()), 0.0, 1.0),
    "normal": (lambda s: DRAWS[aten.normal.Tensor_float](s, torch.full_like(OUT, 5.0), 2.0), 5.0, 2.0),
    "normal of sizes": (lambda s: DRAWS[aten.normal.float_float](s, 5.0, 2.0, [COUNT]), 5.0, 2.0),
    "exponential_": (lambda s: DRAWS[aten.exponential_.default](s, OUT.clone(), 2.0), 0.5, 0.5),
    "randint": (lambda s: DRAWS[aten.randint.low](s, -2, 4, [COUNT]).float(), 0.5, math.sqrt(35 / 12)),
    "randint_like": (lambda s: DRAWS[aten.randint_like.default](s, OUT, 6), 2.5, math.sqrt(35 / 12)),
    "random_": (
        lambda s: DRAWS[aten.random_.default](s, OUT.clone()) / 2**24, 0.5, 1 / math.sqrt(12)
    ),
    "randperm": (lambda s: DRAWS[aten.randperm.default](s, COUNT) / COUNT, 0.5, 1 / math.sqrt(12)),
    "dropout": (
        lambda s: DRAWS[aten.native_dropout.default](s, torch.ones(COUNT), 0.2, True)[0], 1.0, 0.5
    ),
    "one of several": (
        lambda s: DRAWS[aten.multinomial.default](s, WEIGHTS.expand(COUNT, 4), 1).float().flatten(), 2.1, 0.831
    ),
    "many of several": (
        lambda s: DRAWS[aten.multinomial.default](s, WEIGHTS, COUNT, True).float(), 2.1, 0.831
    ),
    "rrelu": (
        lambda s: DRAWS[aten.rrelu_with_noise.default](s, -torch.ones(COUNT), OUT.clone(), 0.1, 0.3, True),
        -0.2, 0.2 / math.sqrt(12),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MOMENTS)
def test_means_and_deviations(name: str) -> None:
    draw, mean, deviation = MOMENTS[name]
    found = draw(Stream(1, 2, 0, 0))
    assert torch.equal(draw(Stream(1, 2, 0, 0)), found)
    assert name == "randperm" or not torch.equal(draw(Stream(2, 2, 0, 0)), found)
    found = found.double()
    assert found.numel() == COUNT
    assert float(found.mean()) == pytest.approx(mean, abs=6 * deviation / math.sqrt(COUNT) + 1e-9)
    assert float(found.std()) == pytest.approx(deviation, rel=0.03)


def test_every_operation_of_the_table_draws() -> None:
    assert all(draws.draws(operation) for operation in DRAWS)
    assert draws.draws(aten.binomial.default) and not draws.draws(aten.add.Tensor)


@pytest.mark.parametrize("dtype", draws.DIGITS)
def test_uniform_numbers_are_below_one_and_evenly_spaced(dtype: torch.dtype) -> None:
    found = DRAWS[aten.rand.default](Stream(1, 2, 0, 0), [COUNT], dtype=dtype)
    assert float(found.min()) >= 0 and float(found.max()) < 1 and found.dtype == dtype
    steps = found.double() * 2.0 ** draws.DIGITS[dtype]
    assert torch.equal(steps, steps.round())
    assert found.unique().numel() > 0.9 * min(COUNT, 2 ** draws.DIGITS[dtype])


def test_what_is_certain_is_drawn_so() -> None:
    stream = Stream(1, 2, 0, 0)
    for p in (0.0, 1.0):
        assert bool((DRAWS[aten.bernoulli_.float](stream, torch.empty(1000), p) == p).all())
    x = torch.ones(9)
    assert torch.equal(DRAWS[aten.native_dropout.default](stream, x, 0.5, False)[0], x)
    assert not DRAWS[aten.native_dropout.default](stream, x, 1.0, True)[0].any()
    assert DRAWS[aten.randperm.default](stream, 100).sort().values.tolist() == list(range(100))
    chosen = DRAWS[aten.multinomial.default](stream, WEIGHTS.expand(1000, 4), 3)
    assert bool((chosen.sort(-1).values == torch.tensor([0, 2, 3])).all())


def test_a_tensor_that_is_not_contiguous_gets_the_numbers_of_its_elements() -> None:
    wanted = DRAWS[aten.bernoulli_.float](Stream(1, 2, 6, 0), torch.empty(6, 5, 4), 0.5)
    found = torch.empty(4, 5, 6).permute(2, 1, 0)
    assert torch.equal(DRAWS[aten.bernoulli_.float](Stream(1, 2, 6, 0), found, 0.5), wanted)
    assert not found.is_contiguous()


def test_numbers_of_dtypes_without_a_precision_are_not_made() -> None:
    with pytest.raises(NotImplementedError):
        DRAWS[aten.rand.default](Stream(1, 2, 0, 0), [4], dtype=torch.complex64)
