"""Optimizers of the user's, their parameter groups and schedulers: the plain loop's results, or a refusal by name."""

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from engine.plain import close, copy_of, mean_gradients, take_step
from pool import Pool
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler

import zeroshard as zs
from zeroshard.errors import OptimizerError

STAGES = (0, 1, 2, 3)
STEPS = 5
Maker = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Small(nn.Module):
    """Two blocks and a head; few of the parameters' shapes share a factor with the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(2)]
        )
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        loss: Tensor = self.head(x).square().mean()
        return loss


class Attention(nn.Module):
    """nn.MultiheadAttention, which reads the weight of its output projection without calling that module."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.pad(x, (0, 3))[None]
        for block in self.blocks:
            x = x + block(x, x, x, need_weights=False)[0]
        loss: Tensor = self.head(x).square().mean()
        return loss


class Nothing(nn.Module):
    """A parameter of no elements that takes part in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(0, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


class ZeroSized(nn.Module):
    """Parameters of no elements: in the middle, at the start, at the end, and alone in a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(0, 4))
        self.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.nothing = nn.ModuleList([Nothing(), Nothing()])
        self.last = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        extra = sum(module(x).sum() for module in self.nothing) + self.first.sum() + self.last.sum()
        return x.square().mean() + extra


KINDS: dict[str, Any] = {"Small": Small, "Attention": Attention, "ZeroSized": ZeroSized}


def model_of(name: str) -> nn.Module:
    torch.manual_seed(11)
    model: nn.Module = KINDS[name]().double()
    return model


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(30 * step + rank), dtype=torch.float64)


def no_decay_on_vectors(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, by shape, that alternate all along the flat buffers; the second has a rate of its own too."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-2}]


RATES: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "lambda": partial(LambdaLR, lr_lambda=lambda step: min(1.0, (step + 0) / 3)),  # starts from 0
    "cosine": partial(CosineAnnealingLR, T_max=4),
}
ACCEPTED: dict[str, Maker] = {
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-2, momentum=0.5, centered=True),
    "nadam": partial(torch.optim.NAdam, lr=1e-2, weight_decay=0.1),
    "radam": partial(torch.optim.RAdam, lr=1e-2),
    "amsgrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "tensor-rate": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(1e-2), foreach=False),
    "maximize": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, maximize=False),
    "adadelta": partial(torch.optim.Adadelta, lr=1.0),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
    "asgd": partial(torch.optim.ASGD, lr=1e-2),
    "rprop": partial(torch.optim.Rprop, lr=1e-2),
}


def by_hand(
    name: str, maker: Maker, ranks: int = 2, groups: bool = False, rate: str | None = None, clip: float | None = None
) -> tuple[list[float], dict[str, Tensor], list[float]]:
    model = model_of(name)
    optimizer = maker(no_decay_on_vectors(model) if groups else model.parameters())
    scheduler = RATES[rate](optimizer) if rate else None
    losses, norms = [], []
    for step in range(STEPS):
        found = [[model(rows(step, rank))] for rank in range(ranks)]
        gradients = mean_gradients(model, found)
        for key, parameter in model.named_parameters():
            parameter.grad = gradients[key]
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))))
        take_step(model, optimizer, {key: p.grad for key, p in model.named_parameters()})
        if scheduler:
            scheduler.step()
        losses.append(sum(loss.item() for mine in found for loss in mine) / ranks)
    return losses, copy_of(model.state_dict()), norms


def by_engine(mesh: zs.Mesh, name: str, zero: int, how: dict[str, Any]) -> Any:
    """`how`: the maker's name, whether as an instance, with groups, with a schedule, and who clips."""
    model = model_of(name)
    maker = ACCEPTED[how["maker"]]
    optimizer: Any = maker
    if how.get("groups"):
        optimizer = maker(no_decay_on_vectors(model))
    elif how.get("instance"):
        optimizer = maker(model.parameters())
    own_clip = how.get("clip") if how.get("by") == "plan" else None
    engine = zs.Engine(model, optimizer, zs.Plan(zero=zero, clip_norm=own_clip), mesh=mesh)
    if how.get("groups") or how.get("instance"):
        assert engine.optimizer is optimizer
    scheduler = RATES[how["rate"]](engine.optimizer) if how.get("rate") else None
    losses, norms = [], []
    for step in range(STEPS):
        loss = engine(rows(step, mesh.rank))
        engine.backward(loss)
        if how.get("by") == "call":
            norms.append(engine.clip_grad_norm(how["clip"]))
        result = engine.step()
        if how.get("by") != "call":
            norms.append(result.grad_norm)
        assert norms[-1] == result.grad_norm
        if scheduler:
            scheduler.step()
        losses.append(loss.item())
    return losses, engine.state_dict(), norms


def check(pool: Pool, name: str, zero: int, ranks: int = 2, **how: Any) -> None:
    losses, weights, norms = by_hand(
        name, ACCEPTED[how["maker"]], ranks, how.get("groups", False), how.get("rate"), how.get("clip")
    )
    answers = pool.run(by_engine, ranks, name, zero, how)
    mean = torch.tensor([answer[0] for answer in answers], dtype=torch.float64).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses, dtype=torch.float64), rtol=1e-9, atol=0)
    for _, got, got_norms in answers:
        torch.testing.assert_close(got_norms, norms, rtol=1e-9, atol=0)
        for key, value in weights.items():
            close(got[key], value, key, 1e-8, 1e-10)


@pytest.mark.parametrize("maker, zero", [(maker, z) for n, maker in enumerate(ACCEPTED) for z in (n % 3, 3)])
def test_optimizer_follows_the_plain_loop(pool: Pool, maker: str, zero: int) -> None:
    """Under stage 3 and one of the others; those that slice give the optimizer the same slices."""
    check(pool, "Small", zero, maker=maker)


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("rate", RATES)
def test_learning_rate_schedule_follows_the_plain_loop(pool: Pool, rate: str, zero: int) -> None:
    check(pool, "Small", zero, maker="foreach", rate=rate, instance=rate == "lambda")


@pytest.mark.parametrize("zero", STAGES)
def test_two_parameter_groups_with_a_schedule(pool: Pool, zero: int) -> None:
    """Each group keeps its own weight decay and rate, though their parameters share flat buffers and slices."""
    check(pool, "Small", zero, maker="foreach", groups=True)
    check(pool, "Small", zero, maker="fused", groups=True, rate="cosine")
    check(pool, "Small", zero, maker="rmsprop", groups=True, rate="lambda", ranks=3)


@pytest.mark.parametrize("zero", STAGES)
def test_clipping_is_exact_over_slices(pool: Pool, zero: int) -> None:
    """The norm and its effect are those of torch.nn.utils.clip_grad_norm_ on the whole mean gradient."""
    for by, ranks, maker, clip in (
        ("plan", 2, "maximize", 0.05),
        ("call", 2, "foreach", 1e3),
        ("call", 3, "maximize", 0.05),
        ("plan", 2, "foreach", 1e3),
    ):
        check(pool, "Small", zero, ranks, maker=maker, clip=clip, by=by)


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("name", ["Attention", "ZeroSized"])
def test_modules_that_are_awkward(pool: Pool, name: str, zero: int) -> None:
    check(pool, name, zero, maker="foreach")
    check(pool, name, zero, maker="foreach", groups=True, ranks=3)


class Lamb(torch.optim.Optimizer):
    """Scales each tensor's step by the ratio of two norms of the whole tensor."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * float(p.norm() / p.grad.norm()))


class SignSgd(torch.optim.Optimizer):
    """Elementwise and not from torch."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign() * group["lr"])


ACCEPTED |= {"custom": SignSgd, "whole": Lamb}
REFUSED: dict[str, Maker] = {
    "LBFGS": torch.optim.LBFGS,
    "SparseAdam": lambda ps: torch.optim.SparseAdam(list(ps)),
}


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("name", REFUSED)
def test_optimizer_that_does_not_run_by_steps_alone_is_refused_by_name(name: str, zero: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(OptimizerError, match=f"^{name} "):
            zs.Engine(model_of("Small"), REFUSED[name], zs.Plan(zero=zero), mesh=zs.Mesh())


def test_custom_elementwise_optimizer_is_accepted(pool: Pool) -> None:
    for zero in (1, 3):
        check(pool, "Small", zero, maker="custom")


def test_custom_optimizer_over_whole_tensors_is_accepted(pool: Pool) -> None:
    for zero in (0, 1, 3):
        check(pool, "Small", zero, maker="whole")


def test_optimizer_over_parameters_of_another_model_is_refused() -> None:
    model, other = model_of("Small"), model_of("Small")
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(OptimizerError, match="not in the model"):
        zs.Engine(model, optimizer, mesh=zs.Mesh())


@pytest.mark.parametrize("maker", ["foreach", "adagrad", "maximize", "rmsprop"])
def test_optimizer_that_took_steps_is_refused(maker: str) -> None:
    model = model_of("Small")
    optimizer = ACCEPTED[maker](model.parameters())
    model(rows(0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(OptimizerError, match="already taken steps"):
        zs.Engine(model, optimizer, mesh=zs.Mesh())


def left_out(mesh: zs.Mesh, zero: int) -> Any:
    model = model_of("Small")
    before = copy_of(model.state_dict())
    optimizer = torch.optim.AdamW(
        [p for name, p in model.named_parameters() if not name.startswith("blocks.1")], lr=1e-2
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = zs.Engine(model, optimizer, zs.Plan(zero=zero), mesh=mesh)
    for step in range(2):
        engine.backward(engine(rows(step, mesh.rank)))
        engine.step()
    return [str(warning.message) for warning in caught], before, engine.state_dict()


@pytest.mark.parametrize("zero", STAGES)
def test_parameters_left_out_of_the_optimizer_are_frozen_with_a_warning(pool: Pool, zero: int) -> None:
    for messages, before, after in pool.run(left_out, 2, zero):
        assert len([m for m in messages if "6 parameters" in m and "blocks.1.0.weight" in m and "frozen" in m]) == 1
        for name, value in before.items():
            assert torch.equal(value, after[name]) == name.startswith("blocks.1"), name
