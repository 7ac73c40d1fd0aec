"""8-bit codes beside their definition, number by number, and 8-bit Adam beside fp32 and bitsandbytes."""

import itertools
import sys
from functools import partial
from typing import Any

import pytest
import torch
from optim.equations import gradients_of, run, state_bytes, take_steps, weights_of
from torch import Tensor, nn

from zeroshard.errors import OptimizerError
from zeroshard.optim import Adam8bit, AdamW8bit, check_elementwise
from zeroshard.optim.dynamic_map import DynamicCode, dynamic_map

BIG = (70, 64)  # 4,480 elements: 17 blocks of 256 and one of 128


def nearest(number: float, values: list[float]) -> int:
    """The code whose value is nearest, the lower of two."""
    return min(range(256), key=lambda code: (abs(values[code] - number), code))


@pytest.mark.parametrize("signed", [True, False])
def test_a_map_has_256_values_in_seven_decades(signed: bool) -> None:
    values = dynamic_map(signed).tolist()
    assert len(set(values)) == 256 and values == sorted(values) and values[-1] == 1.0 and 0.0 in values
    positive = [v for v in values if 0 < v < 1]
    for decade in range(7):
        inside = [v for v in positive if 10.0 ** (decade - 7) < v <= 10.0 ** (decade - 6)]
        assert len(inside) == 2 ** (decade if signed else decade + 1)
    assert [-v for v in positive[::-1]] == [v for v in values if v < 0] if signed else values[0] == 0.0


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_the_nearest_values(signed: bool) -> None:
    code, values = DynamicCode(signed, torch.device("cpu")), dynamic_map(signed).double().tolist()
    draws = torch.Generator().manual_seed(0)
    numbers = torch.randn(700, generator=draws) * 10 ** (-7 * torch.rand(700, generator=draws))
    borders = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(values)])
    numbers = torch.cat([numbers, torch.tensor(values), borders, torch.nextafter(borders, torch.tensor(2.0))])
    numbers = torch.cat([numbers, torch.tensor([0.0, -0.0, 1.0, 1e-30])])
    numbers = numbers if signed else numbers.abs()
    codes, scales = code.encode(numbers, 256)
    for start in range(0, len(numbers), 256):
        block = numbers[start : start + 256]
        largest = block.abs().max()
        assert scales[start // 256] == largest
        scaled = (block / largest).double().tolist()  # a division in fp32, as the block's
        assert codes[start : start + 256].tolist() == [nearest(number, values) for number in scaled]
    decoded = code.decode(codes, scales, 256)
    expected = dynamic_map(signed)[codes.long()] * scales.repeat_interleave(256)[: len(numbers)]
    assert torch.equal(decoded, expected)
    again, same = code.encode(decoded, 256)  # the signed map has no -1, so a block's negative largest shrinks
    assert signed or (torch.equal(scales, same) and torch.equal(again, codes))


def test_a_block_of_zeros_and_a_number_that_is_not_finite_stay_so() -> None:
    code = DynamicCode(True, torch.device("cpu"))
    assert torch.equal(code.decode(*code.encode(torch.zeros(300), 256), 256), torch.zeros(300))
    assert code.decode(*code.encode(torch.tensor([1.0, torch.nan]), 256), 256).isnan().all()


def literal(weights: Tensor, gradients: list[Tensor], decoupled: bool, decay: float) -> Tensor:
    """Adam over blocks of 256 in fp64, its moments rounded to values of the maps after each step."""
    signed, unsigned = dynamic_map(True).double(), dynamic_map(False).double()
    x, m, v = weights.double().flatten(), torch.zeros(weights.numel()).double(), torch.zeros(weights.numel()).double()
    for t, gradient in enumerate(gradients, 1):
        g = gradient.double().flatten() + (0.0 if decoupled else decay * x)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        x = x * (1 - 1e-2 * decay) if decoupled else x
        x = x - 1e-2 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        for moment, values in ((m, signed), (v, unsigned)):
            for start in range(0, len(moment), 256):
                block = moment[start : start + 256]
                largest = block.abs().max()
                block.copy_(values[(block[:, None] / largest - values).abs().argmin(1)] * largest)
    return x.reshape(weights.shape)


@pytest.mark.parametrize("kind", [Adam8bit, AdamW8bit])
def test_twenty_steps_are_those_of_a_literal_loop(kind: Any) -> None:
    weights, gradients = weights_of([BIG]), gradients_of([BIG], 20)
    (after,) = run(partial(kind, lr=1e-2, weight_decay=0.1), weights, gradients)
    expected = literal(weights[0], [g for (g,) in gradients], kind is AdamW8bit, 0.1)
    error = (after.double() - expected).abs()
    assert error.median() < 1e-6  # fp32 and fp64 may take different codes of a number halfway between two
    assert (error > 1e-5).double().mean() < 2e-3


def test_small_tensors_are_adamw_in_fp32() -> None:
    weights, gradients = weights_of([(63, 65), (7,), ()]), gradients_of([(63, 65), (7,), ()], 20)
    found = run(AdamW8bit, weights, gradients)
    torch.testing.assert_close(found, run(torch.optim.AdamW, weights, gradients), rtol=1e-5, atol=1e-6)


def test_large_tensors_stay_near_adamw() -> None:
    weights, gradients = weights_of([BIG]), gradients_of([BIG], 20)
    found = run(AdamW8bit, weights, gradients)[0]
    exact = run(torch.optim.AdamW, weights, gradients)[0]
    assert (found - exact).norm() < 0.1 * (exact - weights[0]).norm()


def test_a_piece_at_a_time_is_the_same_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, gradients = weights_of([BIG]), gradients_of([BIG], 3)
    whole = run(AdamW8bit, weights, gradients)
    monkeypatch.setattr(sys.modules["zeroshard.optim.adam8bit"], "PIECE", 1024)
    assert torch.equal(run(AdamW8bit, weights, gradients)[0], whole[0])


def test_each_matrix_of_a_stack_has_blocks_and_a_size_of_its_own() -> None:
    for shape in [(3, 70, 64), (3, 60, 64)]:  # matrices of 4,480 and 3,840 elements
        weights, gradients = weights_of([shape]), gradients_of([shape], 3)
        parameters = [nn.Parameter(weights[0].clone())]
        optimizer = AdamW8bit(parameters)
        take_steps(optimizer, parameters, gradients)
        alone = run(AdamW8bit, list(weights[0]), [list(step[0]) for step in gradients])
        assert torch.equal(parameters[0].detach(), torch.stack(alone))
        scales = optimizer.state[parameters[0]].get("exp_avg_scales")
        assert (scales is None) if shape[1] == 60 else (scales.shape == (3, 18))


def test_states_are_two_codes_per_element_and_two_scales_per_block() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        parameters = [nn.Parameter(w) for w in weights_of([BIG, (4095,)], dtype)]
        optimizer = AdamW8bit(parameters)
        take_steps(optimizer, parameters, gradients_of([BIG, (4095,)], 1))
        assert [state_bytes(optimizer, p) for p in parameters] == [2 * 4480 + 2 * 4 * 18, 8 * 4095]


def test_slices_of_flat_buffers_are_no_whole_tensors() -> None:
    with pytest.raises(OptimizerError, match="whole tensors"):
        check_elementwise(AdamW8bit([nn.Parameter(torch.ones(2, 2))]))


def test_matches_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    from bitsandbytes.optim import AdamW8bit as Theirs

    for signed in (True, False):
        theirs = functional.create_dynamic_map(signed=signed)
        torch.testing.assert_close(dynamic_map(signed), theirs.float().cpu(), rtol=1e-6, atol=1e-12)
    numbers = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    quantized, state = functional.quantize_blockwise(numbers, blocksize=256)
    codes, scales = DynamicCode(True, torch.device("cpu")).encode(numbers, 256)
    assert torch.equal(scales, state.absmax) and (codes != quantized).double().mean() < 5e-3
    weights, gradients = weights_of([BIG]), gradients_of([BIG], 20)
    mine, other = run(AdamW8bit, weights, gradients)[0], run(Theirs, weights, gradients)[0]
    assert (mine - other).norm() < 0.02 * (other - weights[0]).norm()
