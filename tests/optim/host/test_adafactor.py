"""Adafactor's kernel beside the same equations in fp64, and its parts bit for bit."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from optim.equations import gradients_of, run, weights_of
from torch import Tensor

import zeroshard as zs
from zeroshard.kernels import build
from zeroshard.optim import Adafactor
from zeroshard.optim.algorithms.tensor_optimizer import Fused
from zeroshard.optim.host import adafactor as host_adafactor

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
SHAPES = [(3, 1030), (200, 2100), (5, 70, 33), (2, 17000), (5000,), (9, 3, 2, 2), (3000, 7)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 1e-2, "scale_parameter": False, "clip_threshold": 0.3},
    {"beta1": 0.9, "weight_decay": 0.1},
    {"lr": 1e-2, "decay_rate": 0.0},
]


def by_kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the kernel's updates."""
    calls: list[int] = []
    update = host_adafactor.update

    def counted(*arguments: Any) -> None:
        calls.append(1)
        update(*arguments)

    monkeypatch.setattr(host_adafactor, "update", counted)
    return calls


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_its_steps_are_those_in_fp64(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64 they are the paper's to 1e-12 (`test_adafactor`); here with tiles of every kind, and their rests."""
    calls, make = by_kernel(monkeypatch), partial(Adafactor, **options)
    weights, gradients = weights_of(SHAPES), gradients_of(SHAPES, 6, size=1e-3)
    given = [[g.float().double() for g in step] for step in gradients]
    wanted = run(make, [w.double() for w in weights], given)
    assert not calls
    found = run(make, weights, given)
    assert len(calls) == 6 * len(SHAPES)
    for before, after, exact in zip(weights, found, wanted, strict=True):
        torch.testing.assert_close(after.double(), exact, rtol=1e-6, atol=1e-6)
        assert (after - before).abs().max() > 1e-4


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_without_a_compiler_torchs_operations_are_within_last_places(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, gradients = weights_of(SHAPES), gradients_of(SHAPES, 6)
    found = run(partial(Adafactor, **options), weights, gradients)
    host_adafactor.library.cache_clear()
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    with pytest.warns(UserWarning, match=r"Adafactor's updates .* slower: No C\+\+ compiler was found"):
        plain = run(partial(Adafactor, **options), weights, gradients)
    host_adafactor.library.cache_clear()
    torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-6)
    assert not all(map(torch.equal, found, plain))


def test_no_number_of_threads_changes_a_bit() -> None:
    weights, gradients = weights_of(SHAPES), gradients_of(SHAPES, 3)
    before, results = torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(run(partial(Adafactor, beta1=0.5), weights, gradients))
    torch.set_num_threads(before)
    assert all(map(torch.equal, *results))


def test_a_stack_is_its_matrices() -> None:
    weights, gradients = weights_of([(4, 30, 50), (4, 60)]), gradients_of([(4, 30, 50), (4, 60)], 4)
    optimizer = partial(lambda ps, **kw: Adafactor([{"params": ps[:1]}, {"params": ps[1:], "batch_dims": 1}], **kw))
    stacks = run(partial(optimizer, beta1=0.9), weights, gradients)
    for number in range(4):
        alone = run(
            partial(Adafactor, beta1=0.9), [w[number] for w in weights], [[g[number] for g in s] for s in gradients]
        )
        assert all(torch.equal(stack[number], each) for stack, each in zip(stacks, alone, strict=True))


def stepped(weights: Tensor, gradients: list[Tensor], fused: Callable[[Tensor], Fused]) -> tuple[Tensor, Tensor | None]:
    """The weights after steps, and what the last wrote to `out`."""
    parameter = torch.nn.Parameter(weights.clone())
    parameter.grad_dtype = None
    optimizer = Adafactor([parameter], beta1=0.9)
    for gradient in gradients:
        optimizer.fused = fused(parameter)
        parameter.grad = gradient
        optimizer.step()
    return parameter.detach(), optimizer.fused.out.get(parameter)


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_work_around_an_update_is_the_same_in_its_passes(
    shape: tuple[int, ...], dtype: torch.dtype, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients in 16 bits, their factor, and the rounded weights, bit for bit."""
    if not kernel:
        monkeypatch.setattr(host_adafactor, "library", lambda: None)
    (weights,), steps = weights_of([shape]), gradients_of([shape], 3)
    gradients = [g.to(dtype) for (g,) in steps]
    apart, _ = stepped(weights, [g.float() * 0.37 for g in gradients], lambda parameter: Fused())
    place = torch.full((weights.numel(),), 7.0, dtype=dtype)
    found, out = stepped(weights, gradients, lambda parameter: Fused(0.37, {parameter: place}))
    assert torch.equal(found, apart)
    assert out is place and torch.equal(out, apart.view(-1).to(dtype))


@pytest.mark.parametrize("change", ["double", "strided", "meta"])
def test_what_the_kernel_does_not_take_is_torchs(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = by_kernel(monkeypatch)
    values = torch.ones(8, 6, dtype=torch.float64 if change == "double" else torch.float32)
    values = values.to("meta") if change == "meta" else values
    parameter = torch.nn.Parameter(values.t() if change == "strided" else values)
    parameter.grad = torch.ones_like(parameter)
    Adafactor([parameter]).step()
    assert not calls
    assert change == "meta" or (parameter < 1).all()


def test_a_backward_over_values_that_an_update_changed_is_refused() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    inputs = torch.randn(4, 4, requires_grad=True)
    loss = (inputs @ weight).sum()
    weight.grad = torch.ones(4, 4)
    Adafactor([weight]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


class Two(torch.nn.Module):
    """Two layers, of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = torch.nn.Linear(12, 40), torch.nn.Linear(12, 40)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        y: Tensor = self.first(x)
        return y * self.second(x) if both else y


def trained(plan: zs.Plan, hook: str = "") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights, and what the model computes with, after four steps; two of them, the first too, leave a layer out."""
    model = Two()
    engine = zs.Engine(model, partial(Adafactor, lr=1e-2, beta1=0.9), plan)
    seen: list[Tensor | None] = []
    if hook:
        getattr(engine.optimizer, hook)(
            lambda optimizer, *_: seen.extend(p.grad for group in optimizer.param_groups for p in group["params"])
        )
    draws = torch.Generator().manual_seed(1)
    for step in range(4):
        engine.backward(engine(torch.randn(6, 12, generator=draws), step % 2 == 1).float().square().mean() * 100)
        engine.step()
    engine.flush()
    assert not hook or {gradient.dtype for gradient in seen if gradient is not None} == {torch.float32}
    return engine.state_dict(), {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_offloaded_it_has_the_bits_of_memory(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipped and with loss scaling; and with hooks that look at gradients, for which they are made apart."""
    settings = {"precision": precision, "clip_norm": 0.5, "zero": 2}
    wanted, rounded = trained(zs.Plan(**settings))
    scaled = []
    monkeypatch.setattr(
        host_adafactor, "update", lambda *a, run=host_adafactor.update: (scaled.append(a[3].factor), run(*a))
    )
    found, placed = trained(zs.Plan(offload="optimizer", **settings))
    assert any(factor != 1.0 for factor in scaled)
    for hook in ("register_step_pre_hook", "register_step_post_hook"):
        scaled.clear()
        hooked, _ = trained(zs.Plan(offload="optimizer", **settings), hook)
        assert set(scaled) == {1.0}
        assert all(torch.equal(hooked[name], values) for name, values in wanted.items())
    for name, values in wanted.items():
        assert torch.equal(found[name], values) and torch.equal(placed[name], rounded[name])
