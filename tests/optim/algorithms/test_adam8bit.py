"""8-bit Adam beside a literal loop, fp32 and bitsandbytes, and its two back ends beside each other."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from optim.equations import gradients_of, run, state_bytes, take_steps, weights_of
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.errors import OptimizerError
from zeroshard.kernels import build
from zeroshard.optim import Adam8bit, AdamW8bit, check_elementwise
from zeroshard.optim.host import tiled
from zeroshard.optim.host.adam import adam_update, using
from zeroshard.optim.host.states import Blockwise, HostStates, Scalars, code_map

BIG = (70, 64)  # 4,480 elements: 17 blocks of 256 and one of 128


def literal(weights: Tensor, gradients: list[Tensor], decoupled: bool, decay: float) -> Tensor:
    """Adam over blocks of 256 in fp64, its moments rounded to values of the maps after each step."""
    signed, unsigned = code_map(True).values.double(), code_map(False).values.double()
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
                codes = (block[:, None] / largest - values).abs().argmin(1)
                block.copy_(values[codes if moment is m else codes.maximum((block > 0).long())] * largest)
    return x.reshape(weights.shape)


def test_an_element_without_further_gradients_moves_as_in_fp32() -> None:
    """Its second moment is far below that of its block, and its first is not."""
    gradients = [[torch.full(BIG, 1.0)], [torch.full(BIG, 1.0)]]
    gradients[0][0][0, 0], gradients[1][0][0, 0] = 1e-4, 0.0
    ours, fp32 = (
        run(partial(kind, lr=1e-3), [torch.zeros(BIG)], gradients)[0] for kind in (AdamW8bit, torch.optim.AdamW)
    )
    assert (ours - fp32).abs().max() < 1e-3


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
def test_the_kernel_and_torchs_operations_have_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ends of blocks, stacks whose matrices end inside a block or with one, fp32 moments, zeros and NaN."""
    shapes: list[tuple[int, ...]] = [BIG, (3, 70, 64), (3, 64, 64), (3, 5, 7), (5000,), (40,)]
    weights, gradients = weights_of(shapes, dtype), gradients_of(shapes, 6)
    for step in gradients:
        step[0][:10] = 0.0
        step[1][0, 7] *= 1e-30  # whose squares are below what fp32 holds
        step[4][4:4000] = 0.0  # the codes of small moments are those of zero
        step[4][:2] = torch.tensor([1e3, -1e3])
    gradients[4][4][300], gradients[4][4][4999] = torch.nan, torch.inf
    monkeypatch.setattr(tiled, "TILE", 1024)
    for kind, lr in ((Adam8bit, 1e-2), (AdamW8bit, torch.tensor(1e-2))):
        found = []
        for name in ("c++", "torch"):
            parameters = [nn.Parameter(w.clone()) for w in weights]
            optimizer = kind(parameters, lr=lr, weight_decay=0.1)
            with using(name):
                take_steps(optimizer, parameters, gradients)
            found.append([*parameters, *(value for p in parameters for value in optimizer.state[p].values())])
        for ours, plain in zip(*found, strict=True):
            torch.testing.assert_close(ours, plain, rtol=0, atol=0, equal_nan=True)
        assert found[0][4].isnan().any() and not found[0][4].isnan().all()


@pytest.mark.parametrize("plan", [{}, {"offload": "optimizer"}], ids=str)
@pytest.mark.parametrize("kind", [Adam8bit, AdamW8bit])
def test_an_engine_has_the_update_of_the_host_adam(kind: Any, plan: dict[str, Any]) -> None:
    """In memory and offloaded."""
    torch.manual_seed(3)
    model, inputs = nn.Linear(70, 64, bias=False), torch.randn(4, 70)
    loop = copy.deepcopy(model)
    engine = zs.Engine(model, kind(model.parameters(), lr=0.1, weight_decay=0.1), zs.Plan(**plan))
    states = HostStates(loop.weight.detach().view(-1), Blockwise.zeros(4480, True), Blockwise.zeros(4480, False))
    for step in range(1, 5):
        engine.backward(engine(inputs).square().mean())
        engine.step()
        loop.zero_grad()
        loop(inputs).square().mean().backward()
        assert loop.weight.grad is not None
        scalars = Scalars.of(engine.optimizer.param_groups[0], step, kind is AdamW8bit)
        adam_update(loop.weight.grad.view(-1), 1.0, scalars, states, states)
    assert torch.equal(engine.state_dict()["weight"], loop.weight)


def test_a_backward_over_values_that_a_step_changed_is_refused() -> None:
    weight, inputs = nn.Parameter(torch.randn(BIG)), torch.randn(4, 70, requires_grad=True)
    loss = (inputs @ weight).sum()
    weight.grad = torch.ones(BIG)
    AdamW8bit([weight]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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
        theirs, ours = functional.create_dynamic_map(signed=signed).float().cpu(), code_map(signed).values
        torch.testing.assert_close(ours[signed:], theirs[signed:], rtol=1e-6, atol=1e-12)
    numbers = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    quantized, state = functional.quantize_blockwise(numbers, blocksize=256)
    made = Blockwise.encode(numbers, True)
    assert torch.equal(made.scales, state.absmax) and (made.codes != quantized).double().mean() < 5e-3
    weights, gradients = weights_of([BIG]), gradients_of([BIG], 20)
    mine, other = run(AdamW8bit, weights, gradients)[0], run(Theirs, weights, gradients)[0]
    assert (mine - other).norm() < 0.02 * (other - weights[0]).norm()
