"""Optimizers of the user's, their parameter groups and schedulers: the plain loop's results, or a refusal by name."""

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.plain import close, copy_of, mean_gradients, take_step
from inside import held_states
from jobs import error_of
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
    more = {name: how[name] for name in ("offload", "transport") if name in how}
    engine = zs.Engine(model, optimizer, zs.Plan(zero=zero, clip_norm=own_clip, **more), mesh=mesh)  # type: ignore[arg-type]
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


class Own(torch.optim.Optimizer):
    """An optimizer by hand; subclasses write `change`."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    def change(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.change(p, group)


class Replaces(Own):
    """Gives a parameter other values by another tensor."""

    def change(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        assert p.grad is not None
        p.data = p.data - group["lr"] * p.grad


class KeepsGradients(Own):
    """Has the last gradient itself among its states."""

    def change(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        assert p.grad is not None
        p.sub_(group["lr"] * (p.grad + 0.5 * self.state[p].get("last", 0)))
        self.state[p]["last"] = p.grad


class Discards(Own):
    """Discards all gradients at the end of its step."""

    def change(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        assert p.grad is not None
        p.sub_(group["lr"] * p.grad)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.zero_grad()


class Counts(Own):
    """Counts its steps, of each group from the first on and in itself, and changes its rate late, too."""

    calls = 0

    def change(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        assert p.grad is not None
        p.sub_(group["lr"] / group["count"] * (1.0 if self.calls < 4 else 3.0) * p.grad)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step()


class Ruled(Own):
    """Has its rule from an argument that is not among its defaults, and may need whole tensors for it."""

    def __init__(self, params: Any, rule: Callable[[Tensor], Tensor], lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.rule = rule

    def change(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        assert p.grad is not None
        p.sub_(group["lr"] * self.rule(p.grad))


class Normed(Own):
    """Needs whole tensors if an argument with a default says so, which is not among its defaults."""

    def __init__(self, params: Any, lr: float = 1e-2, normed: bool = False) -> None:
        super().__init__(params, lr)
        self.normed = normed

    def change(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        assert p.grad is not None
        p.sub_(group["lr"] * (p.grad / p.grad.norm() if self.normed else p.grad))


class Anchored(Own):
    """Draws a parameter to its initial values, which its constructor keeps."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["anchor"] = p.detach().clone()

    def change(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        assert p.grad is not None
        p.sub_(group["lr"] * (p.grad + p - self.state[p]["anchor"]))


BY_HAND: dict[str, Maker] = {
    "replaces values": Replaces,
    "keeps gradients": KeepsGradients,
    "discards in its step": Discards,
    "counts": Counts,
    "rule": partial(Ruled, rule=torch.sign),
    "rule over wholes": partial(Ruled, rule=lambda gradient: gradient / gradient.norm()),
    "normed": partial(Normed, normed=True),
    "anchored": Anchored,
}
ACCEPTED |= BY_HAND


@pytest.mark.parametrize("maker", BY_HAND)
def test_optimizers_by_hand_follow_the_plain_loop(pool: Pool, maker: str) -> None:
    """Whatever they do to values and gradients, however they count, and wherever they have their settings from."""
    check(pool, "Small", 0, maker=maker)
    check(pool, "Small", 2, maker=maker)
    check(pool, "Small", 3, maker=maker, ranks=3, transport="network")
    check(pool, "Small", 2, maker=maker, offload="optimizer")


class Mixed(Own):
    """States of each element in other dtypes than its values, and a count of its steps in the group."""

    def change(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        assert p.grad is not None
        state = self.state[p]
        if not state:
            state["narrow"] = torch.zeros_like(p, dtype=torch.bfloat16)
            state["seen"] = torch.zeros_like(p, dtype=torch.int32)
            state["odd"] = torch.zeros_like(p, dtype=torch.bool)
        state["narrow"].mul_(0.9).add_(p.grad.bfloat16())
        state["seen"] += p.grad > 0
        state["odd"] ^= p.grad > 0
        p.sub_(group["lr"] / group["count"] * (state["narrow"] + p.grad * state["odd"] / (1 + state["seen"])))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step()


def resumed(mesh: zs.Mesh, zero: int, source: Path | None, path: Path, steps: range) -> Any:
    """Weights and dtypes of states after some steps that began from a checkpoint, and end in one."""
    engine = zs.Engine(model_of("Small").float(), Mixed, zs.Plan(zero=zero), mesh=mesh)  # type: ignore[arg-type]
    if source is not None:
        engine.load(source)
    for step in steps:
        engine.backward(engine(rows(step, 0).float()))
        engine.step()
    engine.save(path, wait=True)
    states = held_states(engine).values()
    dtypes = {(key, value.dtype) for state in states for key, value in state.items()}
    return engine.state_dict(), dtypes, engine.optimizer.param_groups[0]["count"]


def test_states_of_other_dtypes_and_counts_of_groups_are_in_checkpoints(pool: Pool, tmp_path: Path) -> None:
    straight, dtypes, count = pool.run(resumed, 1, 0, None, tmp_path / "a", range(4))[0]
    pool.run(resumed, 1, 0, None, tmp_path / "b", range(2))
    pool.run(resumed, 2, 2, tmp_path / "b", tmp_path / "c", range(2, 3))
    weights, found, counted = pool.run(resumed, 1, 0, tmp_path / "c", tmp_path / "d", range(3, 4))[0]
    assert found == dtypes == {("narrow", torch.bfloat16), ("seen", torch.int32), ("odd", torch.bool)}
    assert counted == count == 4
    assert all(torch.equal(weights[key], straight[key]) for key in straight)


class Regrouped(Own):
    """Has a function among its options."""

    def __init__(self, params: Any, rule: Callable[[Tensor], Tensor] = torch.sign) -> None:
        torch.optim.Optimizer.__init__(self, params, {"lr": 1e-2, "rule": rule})

    def change(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        assert p.grad is not None
        p.sub_(group["lr"] * group["rule"](p.grad))


def regrouped(mesh: zs.Mesh, source: Path, path: Path) -> tuple[str, str]:
    """What a load into the same groups says, and one into groups in another order; on the ranks of two stages."""

    def made(flip: bool) -> zs.Engine:
        layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        groups = no_decay_on_vectors(layers)
        plan = zs.Plan(zero=0, pipeline_parallel=mesh.ranks, microbatches=2)
        example = torch.ones(2, 6)
        optimizer = Regrouped(groups[::-1] if flip else groups)
        return zs.Engine(layers, optimizer, plan, mesh=mesh, loss=nn.functional.mse_loss, example=example)

    engine = made(False)
    engine.train_step(torch.ones(4, 6))
    engine.save(path, wait=True)
    return error_of(lambda: made(False).load(source)), error_of(lambda: made(True).load(source))


def test_parameters_in_other_groups_are_refused(pool: Pool, tmp_path: Path) -> None:
    """By any plan that loads; functions among the options of a group are the loading run's own."""
    pool.run(regrouped, 2, tmp_path / "a", tmp_path / "a")
    for ranks in (1, 2):
        for same, flipped in pool.run(regrouped, ranks, tmp_path / "a", tmp_path / f"b{ranks}"):
            assert same == "nothing"
            assert "was written with '0.bias' in the optimizer's group 1, and here it is in group 0" in flipped


class Noisy(Own):
    """Draws random numbers in each step."""

    def change(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        assert p.grad is not None
        p.sub_(group["lr"] * (p.grad + torch.randn_like(p)))


class OwnState(SignSgd):
    """Has a state that belongs to no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.state["scale"] = {"value": 2.0}  # type: ignore[index]


class Wraps(Own):
    """Lets another optimizer step."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params)
        self.inner = torch.optim.SGD(params, lr=0.1)


def test_random_numbers_and_states_of_no_parameter_are_refused_with_the_reason() -> None:
    with pytest.raises(OptimizerError, match="Noisy gives other results each time, so it draws random numbers"):
        zs.Engine(model_of("Small"), Noisy, mesh=zs.Mesh())
    with pytest.raises(OptimizerError, match="Wraps holds a SGD as 'inner'"):
        zs.Engine(model_of("Small"), Wraps, mesh=zs.Mesh())
    with pytest.raises(OptimizerError, match="OwnState keeps a state under 'scale', which is no parameter"):
        zs.Engine(model_of("Small"), OwnState, mesh=zs.Mesh())


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
