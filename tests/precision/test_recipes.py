"""Mixed precision against the same recipe written by hand in one process, and loss scaling against its rules."""

from functools import partial
from typing import Any

import pytest
import torch
from engine.plain import close
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs

STAGES = (0, 1, 2, 3)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 6


class Net(nn.Module):
    """Two normed blocks; the loss is computed in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(9), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 9)) for _ in range(2)]
        )
        self.head = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        loss: Tensor = self.head(x).float().square().mean()
        return loss


def net() -> Net:
    torch.manual_seed(2)
    return Net()


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(4, 9, generator=torch.Generator().manual_seed(40 * step + rank))


adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, foreach=True)


def by_hand(
    dtype: torch.dtype, scale: float, clip: float | None
) -> tuple[list[list[float]], list[float], dict[str, Tensor]]:
    """Losses by step and rank, norms, and the 16-bit weights of two ranks' mixed-precision training."""
    masters = [p.detach().clone() for p in net().parameters()]
    model = net().to(dtype)
    for master in masters:
        master.grad = torch.zeros_like(master)
    optimizer = adamw(masters)
    losses, norms = [], []
    for step in range(STEPS):
        found = [model(rows(step, rank).to(dtype)) for rank in range(2)]
        gradients = [torch.autograd.grad(loss * scale, list(model.parameters())) for loss in found]
        means = [((a.float() + b.float()) * 0.5).to(dtype).float() for a, b in zip(*gradients, strict=True)]
        norm = float(torch.cat([mean.flatten() for mean in means]).double().norm()) / scale
        factor = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
        for master, mean in zip(masters, means, strict=True):
            master.grad = mean * (factor / scale)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)
        losses.append([loss.item() for loss in found])
        norms.append(norm)
    return losses, norms, {name: p.detach().clone() for name, p in model.state_dict().items()}


def by_engine(mesh: zs.Mesh, plan: dict[str, Any]) -> Any:
    engine = zs.Engine(net(), adamw, zs.Plan.from_dict(plan), mesh=mesh)
    losses, norms = [], []
    for step in range(STEPS):
        loss = engine(rows(step, mesh.rank))
        engine.backward(loss)
        norms.append(engine.step().grad_norm)
        losses.append(loss.item())
    return losses, norms, engine.state_dict()


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("precision", DTYPES)
def test_sixteen_bit_training_is_the_recipe_by_hand(pool: Pool, precision: str, zero: int) -> None:
    """16-bit gradients averaged in fp32 and rounded once, unscaled, clipped, AdamW on fp32 masters, copied back."""
    dtype, scale = DTYPES[precision], 1024.0 if precision == "fp16" else 1.0
    for clip in (None, 0.05):
        losses, norms, weights = by_hand(dtype, scale, clip)
        plan = {"zero": zero, "precision": precision, "clip_norm": clip, "loss_scale.initial": scale}
        for rank, (got_losses, got_norms, got) in enumerate(pool.run(by_engine, 2, plan)):
            torch.testing.assert_close(got_losses, [step[rank] for step in losses], rtol=1e-5, atol=0)
            torch.testing.assert_close(got_norms, norms, rtol=1e-5, atol=0)
            for name, value in weights.items():
                assert got[name].dtype == dtype
                close(got[name].float(), value.float(), name, 1e-6, 1e-7)


@pytest.mark.parametrize("zero", STAGES)
def test_static_scale_gives_the_same_run(pool: Pool, zero: int) -> None:
    """A power of two changes nothing but the range."""
    losses, _, weights = by_hand(torch.float16, 512.0, None)
    plan = {"zero": zero, "precision": "fp16", "loss_scale": 512.0}
    for rank, (got_losses, _, got) in enumerate(pool.run(by_engine, 2, plan)):
        torch.testing.assert_close(got_losses, [step[rank] for step in losses], rtol=1e-5, atol=0)
        for name, value in weights.items():
            torch.testing.assert_close(got[name].float(), value.float(), rtol=1e-6, atol=1e-7)


class Faint(nn.Module):
    """Its gradients are 1e-9 times its input: below the smallest fp16 number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).float().sum() * 1e-9


def faint(mesh: zs.Mesh, zero: int, scale: Any) -> tuple[Tensor, list[float]]:
    plan = zs.Plan(zero=zero, precision="fp16", loss_scale=scale)
    engine = zs.Engine(Faint(), lambda ps: torch.optim.SGD(ps, lr=1e8), plan, mesh=mesh)
    norms = []
    for _ in range(3):
        engine.backward(engine(torch.arange(1.0, 6.0) * (mesh.rank + 1)))
        norms.append(engine.step().grad_norm)
    return engine.state_dict()["weight"].float(), norms


@pytest.mark.parametrize("zero", STAGES)
def test_small_gradients_need_the_loss_scale(pool: Pool, zero: int) -> None:
    """By hand: three steps of 1e8 times the mean gradient, 1.5e-9 times the input."""
    wanted = -3 * 1e8 * 1.5e-9 * torch.arange(1.0, 6.0)
    for weight, norms in pool.run(faint, 2, zero, 1.0):
        assert torch.equal(weight, torch.zeros(5)) and norms == [0.0] * 3
    for weight, norms in pool.run(faint, 2, zero, "dynamic"):
        torch.testing.assert_close(weight, wanted, rtol=5e-3, atol=0)
        torch.testing.assert_close(norms, [1.5e-9 * 55**0.5] * 3, rtol=5e-3, atol=0)


def scaled_run(mesh: zs.Mesh, zero: int, overflows: str, plan: dict[str, Any]) -> Any:
    """`overflows` has a "1" for every step in which rank 1, alone, gets an infinite gradient."""
    model = net()
    engine = zs.Engine(model, adamw, zs.Plan.from_dict({"zero": zero, "precision": "fp16", **plan}), mesh=mesh)
    now = [False]
    model.head.weight.register_hook(lambda g: g * float("inf") if now[0] else g)
    scales, moved, error = [], [], None
    for step, overflow in enumerate(overflows):
        before = engine.state_dict()
        now[0] = overflow == "1" and mesh.rank == 1
        engine.backward(engine(rows(step, mesh.rank)))
        try:
            result = engine.step()
        except zs.ZeroshardError as found:
            error = f"{type(found).__name__}: {found}"
            break
        after = engine.state_dict()
        scales.append((result.loss_scale, engine.loss_scale))
        changed = any(not torch.equal(after[name], value) for name, value in before.items())
        moved.append((result.skipped, changed))
    return scales, moved, engine.skipped, error


@pytest.mark.parametrize("zero", STAGES)
def test_dynamic_scale_follows_its_rules_on_all_ranks(pool: Pool, zero: int) -> None:
    """Window 2, hysteresis 2, floor 256, written out by hand: (scale of the step, scale after it)."""
    plan = {"loss_scale.initial": 1024.0, "loss_scale.window": 2, "loss_scale.hysteresis": 2, "loss_scale.floor": 256.0}
    overflows = "00111010111100"
    by_hand = [1024, 1024, 2048, 2048, 1024, 1024, 1024, 512, 512, 512, 256, 256]
    # good; good, grew; 1st; 2nd, backs off; 1st; good; 2nd, backs off; good; 1st; 2nd, to the floor; 1st; 2nd: error
    expected = [
        (1024, 1024),
        (1024, 2048),
        (2048, 2048),
        (2048, 1024),
        (1024, 1024),
        (1024, 1024),
        (1024, 512),
        (512, 512),
        (512, 512),
        (512, 256),
        (256, 256),
    ]
    assert [before for before, _ in expected] == by_hand[: len(expected)]
    for scales, moved, skipped, error in pool.run(scaled_run, 2, zero, overflows, plan):
        assert scales == expected
        assert [skip for skip, _ in moved] == [flag == "1" for flag in overflows[: len(expected)]]
        assert all(skip != changed for skip, changed in moved)
        assert skipped == overflows[: len(expected)].count("1")
        assert error is not None and error.startswith("NonFiniteError") and "floor of 256" in error


@pytest.mark.parametrize("zero", [0, 3])
def test_static_scale_skips_and_stays(pool: Pool, zero: int) -> None:
    for scales, moved, skipped, error in pool.run(scaled_run, 2, zero, "0101", {"loss_scale": 64.0}):
        assert error is None and skipped == 2
        assert scales == [(64.0, 64.0)] * 4
        assert moved == [(False, True), (True, False), (False, True), (True, False)]


@pytest.mark.parametrize("zero", STAGES)
def test_unscaled_backward_is_refused(pool: Pool, zero: int) -> None:
    for message in pool.run(unscaled, 2, zero):
        assert "engine.backward(loss)" in message


def unscaled(mesh: zs.Mesh, zero: int) -> str:
    engine = zs.Engine(net(), adamw, zs.Plan(zero=zero, precision="fp16"), mesh=mesh)
    loss = engine(rows(0, mesh.rank))
    try:
        loss.backward()
    except zs.errors.PlanError as error:
        return str(error)
    return "nothing"


def with_fp32_norms(mesh: zs.Mesh, zero: int, names: tuple[str, ...]) -> Any:
    model = net()
    engine = zs.Engine(model, adamw, zs.Plan(zero=zero, precision="bf16", fp32_modules=names), mesh=mesh)
    seen: set[tuple[str, torch.dtype, torch.dtype]] = set()
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.Linear)):
            module.register_forward_hook(
                lambda m, args, out: seen.add((type(m).__name__, m.weight.dtype, out.dtype)) or None,
            )
    losses = []
    for step in range(STEPS):
        loss = engine(rows(step, mesh.rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine.state_dict(), seen


@pytest.mark.parametrize("zero", STAGES)
def test_fp32_modules_compute_in_fp32(pool: Pool, zero: int) -> None:
    """LayerNorms keep fp32 weights and arithmetic, as in a hand-made model with casts around them."""

    class CastNorm(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float()).to(torch.bfloat16)

    low = net()
    for block in low.blocks:
        norm = CastNorm(9)
        norm.load_state_dict(block[0].state_dict())
        block[0] = norm
    masters = {name: p.detach().clone() for name, p in low.named_parameters()}
    low.to(torch.bfloat16)
    for block in low.blocks:
        block[0].float()
    parameters = dict(low.named_parameters())
    optimizer = adamw(list(masters.values()))
    losses = []
    for step in range(STEPS):
        found = [low(rows(step, rank).to(torch.bfloat16)) for rank in range(2)]
        both = [torch.autograd.grad(loss, list(parameters.values())) for loss in found]
        for (name, parameter), a, b in zip(parameters.items(), *both, strict=True):
            masters[name].grad = ((a.float() + b.float()) * 0.5).to(parameter.dtype).float()
        optimizer.step()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(masters[name])
        losses.append([loss.item() for loss in found])
    for names in (("LayerNorm",), ("blocks.0.0", "blocks.1.0")):
        for rank, (got, weights, seen) in enumerate(pool.run(with_fp32_norms, 2, zero, names)):
            assert {dtype for kind, dtype, _ in seen if kind == "LayerNorm"} == {torch.float32}
            assert {dtype for kind, dtype, _ in seen if kind == "Linear"} == {torch.bfloat16}
            torch.testing.assert_close(got, [step[rank] for step in losses], rtol=1e-5, atol=0)
            for name, value in low.state_dict().items():
                assert weights[name].dtype == value.dtype == (torch.float32 if name[8:11] == ".0." else torch.bfloat16)
                torch.testing.assert_close(weights[name].float(), value.float(), rtol=1e-6, atol=1e-7)


def narrow(mesh: zs.Mesh, zero: int, dtype: str | None) -> Any:
    engine = zs.Engine(net(), lambda ps: torch.optim.SGD(ps, lr=1.0), zs.Plan(zero=zero, reduce_dtype=dtype), mesh=mesh)  # type: ignore[arg-type]
    engine.backward(engine(rows(0, mesh.rank)))
    engine.step()
    row = engine.traffic()["reduce gradients"]
    return row.measured_bytes, row.measured_elements, engine.state_dict()


@pytest.mark.parametrize("zero", STAGES)
def test_reduce_dtype_halves_the_bytes_and_rounds_once(pool: Pool, zero: int) -> None:
    """Each rank's gradient is rounded to bf16 for the wire; the sum is made in fp32."""
    model = net()
    gradients = [torch.autograd.grad(model(rows(0, rank)), list(model.parameters())) for rank in range(2)]
    wide, thin = pool.run(narrow, 2, zero, None), pool.run(narrow, 2, zero, "bf16")
    for (wide_bytes, wide_elements, exact), (thin_bytes, thin_elements, rounded) in zip(wide, thin, strict=True):
        assert wide_elements == thin_elements and wide_bytes == 2 * thin_bytes
        for (name, parameter), a, b in zip(model.named_parameters(), *gradients, strict=True):
            mean = (a.bfloat16().float() + b.bfloat16().float()) / 2
            torch.testing.assert_close(rounded[name], parameter.detach() - mean, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(exact[name], parameter.detach() - (a + b) / 2, rtol=1e-5, atol=1e-6)


class Phases(nn.Module):
    """Complex weights beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.turns = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x.to(torch.complex64) @ self.turns).abs()).square().mean()


def phases(mesh: zs.Mesh, zero: int, dtype: str) -> dict[str, Any]:
    make = partial(torch.optim.SGD, lr=1.0)
    engine = zs.Engine(Phases(), make, zs.Plan(zero=zero, reduce_dtype=dtype), mesh=mesh)  # type: ignore[arg-type]
    engine.backward(engine(torch.full((2, 4), 1.0 + mesh.rank)))
    engine.step()
    return engine.state_dict()


@pytest.mark.parametrize(("zero", "dtype"), [(0, "fp32"), (2, "bf16")])
def test_complex_gradients_keep_their_imaginary_parts_on_the_wire(pool: Pool, zero: int, dtype: str) -> None:
    model = Phases()
    (sum(model(torch.full((2, 4), 1.0 + rank)) for rank in range(2)) / 2).backward()
    expected = (model.turns - model.turns.grad).detach()
    assert model.turns.grad is not None and model.turns.grad.imag.abs().max() > 0.1
    for weights in pool.run(phases, 2, zero, dtype):
        torch.testing.assert_close(weights["turns"], expected)
