"""Methods of a user's optimizer that write outside of its step end as in a plain loop, or are refused at the call."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from jobs import error_of
from pool import Pool
from selection import by_default
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig


class Own(torch.optim.Optimizer):
    """Gradient descent; subclasses write `change`."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    def change(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        p.sub_(group["lr"] * p.grad)  # type: ignore[operator]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    self.change(p, group)

    @property
    def members(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]


class ScheduleFree(Own):
    """Weights between an average and the iterate in training, and the average in evaluation (2405.15682)."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, train_mode=False)

    @torch.no_grad()
    def _turn(self, mode: bool, weight: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if group["train_mode"] != mode and "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = mode

    def train(self) -> None:
        self._turn(True, 0.1)

    def eval(self) -> None:
        self._turn(False, 1 - 1 / 0.9)

    def change(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        if not group["train_mode"]:
            raise RuntimeError("not in training mode")
        z = self.state[p].setdefault("z", p.clone())
        p.lerp_(z, 1 / group["count"]).sub_(0.9 * group["lr"] * p.grad)  # type: ignore[operator]
        z.sub_(group["lr"] * p.grad)  # type: ignore[operator]


class Averages(Own):
    """Keeps an average of the weights, which the user has updated, put in the place of the weights, and forgotten."""

    @torch.no_grad()
    def update_average(self, weight: float = 0.5) -> None:
        for p in self.members:
            state = self.state[p]
            if "average" not in state:
                state["average"] = p.detach().clone()
            state["average"].lerp_(p, weight)

    @torch.no_grad()
    def swap(self) -> None:
        for p in self.members:
            if "average" in self.state[p]:
                kept = p.data.clone()
                p.data = self.state[p]["average"]
                self.state[p]["average"] = kept

    def restart(self) -> None:
        for p in self.members:
            self.state[p].clear()

    def rate(self) -> float:
        return float(self.param_groups[0]["lr"])

    def halve(self) -> None:
        for group in self.param_groups:
            group["lr"] *= 0.5

    def norms(self) -> list[float]:
        return [float(p.norm()) for p in self.members]

    @torch.no_grad()
    def normalise(self) -> None:
        norm = torch.stack([p.norm() for p in self.members]).norm()
        for p in self.members:
            p.div_(norm)

    @torch.no_grad()
    def normalise_each(self) -> None:
        for p in self.members:
            p.div_(p.norm())

    @torch.no_grad()
    def first_step(self) -> None:
        for p in self.members:
            p.add_(0.1 * p.grad)  # type: ignore[operator]

    @torch.no_grad()
    def shake(self) -> None:
        for p in self.members:
            p.add_(torch.randn_like(p))

    def fail(self) -> None:
        raise KeyError("nothing")


class Whole(Averages):
    """Divides gradients by their norms, so it has whole parameters."""

    def change(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        p.sub_(group["lr"] * p.grad / (1 + p.grad.norm()))  # type: ignore[operator, union-attr]


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "0": (2, {"zero": 0}),
    "1 bf16": (2, {"zero": 1, "precision": "bf16"}),
    "2 shared": (2, {"zero": 2}),
    "2 overlapped": (2, {"zero": 2, "overlap_gather": True, "transport": "network"}),
    "3 network": (3, {"zero": 3, "transport": "network"}),
    "offload": (2, {"zero": 2, "offload": "optimizer"}),
    "offload all": (1, {"zero": 3, "offload": "optimizer, parameters"}),
}
Events = list[tuple[str, tuple[Any, ...]]]
SCRIPTS: dict[str, tuple[type[Own], Events]] = {
    "modes": (
        ScheduleFree,
        [(name, ()) for name in ("train", "step", "step", "eval", "look", "train", "step", "look", "eval", "look")],
    ),
    "averages": (
        Averages,
        [("step", ()), ("update_average", (0.25,)), ("step", ()), ("update_average", ()), ("swap", ()), ("look", ()),
         ("step", ()), ("swap", ()), ("look", ()), ("restart", ()), ("halve", ()), ("step", ()), ("look", ())],
    ),
    "whole": (
        Whole,
        [("step", ()), ("update_average", ()), ("step", ()), ("swap", ()), ("normalise_each", ()), ("look", ()),
         ("step", ()), ("look", ())],
    ),
}  # fmt: skip


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False), nn.LayerNorm(3))


def rows(step: int) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(step))


def plain(script: str) -> list[dict[str, Tensor]]:
    kind, events = SCRIPTS[script]
    layers, found, step = model(), [], 0
    optimizer = kind(layers.parameters())
    for name, args in events:
        if name == "step":
            optimizer.zero_grad()
            layers(rows(step)).square().mean().backward()
            optimizer.step()
            step += 1
        elif name == "look":
            found.append({key: value.clone() for key, value in layers.state_dict().items()})
        else:
            getattr(optimizer, name)(*args)
    return found


def by_engine(mesh: zs.Mesh, script: str, plan: str) -> list[dict[str, Tensor]]:
    kind, events = SCRIPTS[script]
    engine, found = zs.Engine(model(), kind, zs.Plan.from_dict(PLANS[plan][1]), mesh=mesh), []
    for name, args in events:
        if name == "step":
            engine.backward(engine(rows(engine.steps)[mesh.rank :: mesh.ranks]).float().square().mean())
            engine.step()
        elif name == "look":
            engine.check_replicas()
            with torch.no_grad():  # by the weights with which the model computes, on this rank
                seen = engine(rows(0)[:1])
            found.append({key: value.float() for key, value in engine.state_dict().items()} | {"seen": seen.float()})
        else:
            getattr(engine.optimizer, name)(*args)
    return found


@pytest.mark.parametrize("plan", by_default(PLANS, *PLANS))
def test_what_they_write_is_what_a_plain_loop_has(pool: Pool, plan: str) -> None:
    bound = 3e-2 if "precision" in PLANS[plan][1] else 1e-5
    for script in SCRIPTS:
        wanted = plain(script)
        for found in pool.run(by_engine, PLANS[plan][0], script, plan):
            for number, (got, weights) in enumerate(zip(found, wanted, strict=True)):
                layers = model()
                layers.load_state_dict(weights)
                seen = layers(rows(0)[:1])
                for key, value in (weights | {"seen": seen.detach()}).items():
                    torch.testing.assert_close(got[key], value, rtol=bound, atol=bound, msg=f"{script} {number} {key}")


def refused(mesh: zs.Mesh) -> dict[str, Any]:
    engine = zs.Engine(model(), Averages, zs.Plan(zero=2, transport="network"), mesh=mesh)
    engine.backward(engine(rows(0)).square().mean())
    engine.step()
    before = engine.state_dict()
    names = ("norms", "normalise", "normalise_each", "first_step", "shake", "fail")
    found: dict[str, Any] = {name: error_of(getattr(engine.optimizer, name)) for name in names}
    if mesh.rank == 0:  # no collective call
        found["rate"] = engine.optimizer.rate()  # type: ignore[attr-defined]
    found["same"] = all(torch.equal(value, before[key]) for key, value in engine.state_dict().items())
    return found


def joined(mesh: zs.Mesh) -> str:
    torch.manual_seed(0)
    layers = GPT(GPTConfig(vocabulary=11, context=4, width=8, heads=2, layers=2))
    engine = zs.Engine(layers, Whole, zs.Plan(zero=0, tensor_parallel=2), mesh=mesh)
    return error_of(engine.optimizer.normalise_each)  # type: ignore[attr-defined]


def test_matrices_of_several_ranks_are_refused_at_the_call(pool: Pool) -> None:
    assert all("matrices are put together of several ranks' parts" in said for said in pool.run(joined, 2))


def test_what_slices_cannot_have_is_refused_at_the_call(pool: Pool) -> None:
    why = {
        "norms": "of which each rank has a slice", "normalise": "other parameters", "normalise_each": "other elements",
        "first_step": "reads gradients", "shake": "draws random numbers", "fail": "KeyError: 'nothing'",
    }  # fmt: skip
    for rank, found in enumerate(pool.run(refused, 2)):
        for name, words in why.items():
            assert found[name].startswith(f"OptimizerError: {name}() of Averages cannot run"), found[name]
            assert words in found[name] and "engine.gathered()" in found[name], found[name]
        assert found["same"] and found.get("rate") == (0.05 if rank == 0 else None)


def schedule_free(mesh: zs.Mesh | None, plan: str) -> list[dict[str, Tensor]]:
    """Weights in the modes of the package schedulefree, which the first of two evaluations puts an average into."""
    import schedulefree

    layers, found = model(), []
    optimizer = schedulefree.AdamWScheduleFree(layers.parameters(), lr=0.05, warmup_steps=2, eps=1e-4)
    engine = zs.Engine(layers, optimizer, zs.Plan.from_dict(PLANS[plan][1]), mesh=mesh) if mesh else None
    for mode in ("train", "train", "eval", "train", "eval"):
        getattr(optimizer, mode)()
        if mode == "train" and engine is not None and mesh is not None:
            engine.backward(engine(rows(len(found))[mesh.rank :: mesh.ranks]).square().mean())
            engine.step()
        elif mode == "train":
            layers(rows(len(found))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = layers.state_dict() if engine is None else engine.state_dict()
        found.append({key: value.clone() for key, value in weights.items()})
    return found


@pytest.mark.parametrize("plan", ["2 overlapped", "offload"])
def test_the_modes_of_the_package_schedulefree(pool: Pool, plan: str) -> None:
    pytest.importorskip("schedulefree")
    wanted = schedule_free(None, plan)
    assert not torch.equal(wanted[1]["0.weight"], wanted[2]["0.weight"])
    for found in pool.run(schedule_free, PLANS[plan][0], plan):
        for got, weights in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, weights, rtol=1e-4, atol=1e-5)
