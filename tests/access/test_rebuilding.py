"""Engines that are made anew, and second engines on one model, against plain loops that change the model."""

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from plain_loop import PlainRun, follows_plain_loop
from pool import Pool
from torch import Tensor, nn
from torch.nn import functional as F

import zeroshard as zs
from zeroshard.errors import PlanError

OPTIMIZER = partial(torch.optim.AdamW, lr=1e-2)


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(10, 17), nn.Linear(17, 10)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Growing(nn.Module):
    """A tied embedding, blocks of which the first is frozen, and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 10)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.blocks[0].requires_grad_(False)
        self.head = nn.Linear(10, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def build() -> Growing:
    torch.manual_seed(0)
    return Growing()


def grow(model: Growing) -> None:
    """A block more, another behind it by its name, a larger vocabulary, and an unfrozen block."""
    torch.manual_seed(1)
    model.blocks.insert(1, Block())
    larger = nn.Embedding(15, 10)
    with torch.no_grad():
        larger.weight[:13] = model.embed.weight
    model.embed = larger
    model.head = nn.Linear(10, 15, bias=False)
    model.head.weight = larger.weight
    model.blocks[0].requires_grad_(True)


def batch(step: int, rank: int, ranks: int) -> Tensor:
    return torch.randint(13, (8, 6), generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]


def plain(keeps_states: bool = True) -> PlainRun:
    model, seen = build(), PlainRun()
    optimizer = OPTIMIZER(list(model.parameters()))
    for step in range(5):
        if step == 2:
            before = dict(optimizer.state)
            grow(model)
            optimizer = OPTIMIZER(list(model.parameters()))
            kept = {p: before[p] for p in model.parameters() if p in before and keeps_states}
            optimizer.state.update(kept)
        loss = model(batch(step, 0, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.losses.append(loss.item())
    seen.weights = model.state_dict()
    return seen


def train(mesh: zs.Mesh, settings: dict[str, Any], second: bool) -> Any:
    model = build()
    engine = zs.Engine(model, OPTIMIZER, zs.Plan(**settings), mesh=mesh)
    schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 1.0)
    first, losses = engine, []
    for step in range(5):
        if step == 2:
            with engine.gathered():
                grow(model)
            if second:
                engine = zs.Engine(model, OPTIMIZER, zs.Plan(**settings), mesh=mesh)
            else:
                engine.rebuild()
        loss = engine(batch(step, mesh.rank, mesh.ranks))
        engine.backward(loss)
        assert engine.step().step == (step - 1 if second and step > 1 else step + 1)
        schedule.step()
        losses.append(loss.item())
    if second:
        with pytest.raises(PlanError, match=r"retired.*'step'"):
            first.step()
    else:
        assert schedule.optimizer is engine.optimizer
        engine.rebuild(plan=zs.Plan(zero=1))
        assert engine.plan.zero == 1
    return losses, engine.state_dict()


PLANS: dict[str, dict[str, Any]] = {
    **{f"zero {zero}": {"zero": zero} for zero in (0, 1, 2)},
    "zero 3": {"zero": 3, "transport": "network"},
    "shared": {"zero": 3},
    "offloaded": {"zero": 3, "offload": "optimizer, parameters", "recompute": "blocks"},
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_stayed_keeps_its_states(pool: Pool, plan: str, ranks: int) -> None:
    follows_plain_loop(pool.run(train, ranks, PLANS[plan], False), plain())


@pytest.mark.parametrize(("plan", "ranks"), [("zero 0", 1), ("zero 2", 2), ("zero 3", 2)])
def test_a_second_engine_takes_the_weights_over(pool: Pool, plan: str, ranks: int) -> None:
    follows_plain_loop(pool.run(train, ranks, PLANS[plan], True), plain(keeps_states=False))


class Counting(torch.optim.SGD):
    """A class of the user's with a method that writes nothing."""

    def rates(self) -> list[float]:
        """The rate of each group."""
        return [group["lr"] for group in self.param_groups]


def changes(precision: str) -> list[Any]:
    """The same changes without an engine and with one, with a hook, groups, a method and a parameter let go."""
    found: list[Any] = []
    for with_engine in (False, True):
        model, seen = build(), []
        model.to(torch.float32)
        optimizer = Counting([{"params": list(model.blocks.parameters())}, {"params": [model.embed.weight]}], lr=0.1)
        handle = model.blocks[1].up.weight.register_hook(lambda gradient, seen=seen: seen.append(1))
        model.register_forward_hook(lambda module, args, out, seen=seen: seen.append(2))
        plan = zs.Plan(zero=3, strict=True, precision=precision)  # type: ignore[arg-type]
        engine = zs.Engine(model, optimizer, plan) if with_engine else None
        for step in range(4):
            loss = None  # its graph would know the old shape
            if step == 2:
                extra = nn.Linear(10, 10, bias=False)
                with engine.gathered() if engine else torch.enable_grad():
                    model.embed.weight.data = torch.cat([model.embed.weight.data, torch.zeros(2, 10)])
                    nn.init.constant_(extra.weight, 0.01)
                    model.blocks.append(extra)
                if engine:
                    engine.rebuild([{"params": extra.parameters(), "lr": 0.3}])
                else:
                    optimizer.state.pop(model.embed.weight, None)
                    optimizer.add_param_group({"params": list(extra.parameters()), "lr": 0.3})
            loss = engine(batch(step, 0, 1)) if engine else model(batch(step, 0, 1))
            if engine:
                engine.backward(loss)
                engine.step()
            else:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        handle.remove()
        assert not model.blocks[1].up.weight._backward_hooks or engine
        found.append((seen, optimizer.rates(), engine.state_dict() if engine else model.state_dict()))
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_hooks_groups_and_masters_stay(precision: str) -> None:
    (seen, rates, weights), (seen_here, rates_here, weights_here) = changes(precision)
    assert (seen, rates) == (seen_here, rates_here) and rates == [0.1, 0.1, 0.3]
    near = {"rtol": 1e-6, "atol": 1e-7} if precision == "fp32" else {"rtol": 0.05, "atol": 0.02}
    for name, value in weights.items():
        torch.testing.assert_close(weights_here[name].float(), value, **near)


def test_mistakes_name_the_way_out() -> None:
    model = build()
    engine = zs.Engine(model, OPTIMIZER, zs.Plan())
    engine.backward(engine(batch(0, 0, 1)))
    with pytest.raises(PlanError, match=r"engine\.zero_grad"):
        engine.rebuild()
    engine.zero_grad()
    with engine.gathered(), pytest.raises(PlanError, match="after the block"):
        engine.rebuild()
    model.blocks.append(Block())
    with pytest.raises(PlanError, match=r"blocks\.2.*engine\.rebuild"):
        engine.state_dict()
    with pytest.raises(PlanError, match=r"rebuild\(plan=\.\.\.\)"):
        zs.Engine(model, engine.optimizer, zs.Plan())
    engine.rebuild()
    assert "blocks.2.up.weight" in engine.state_dict()
    hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    forward = weakref.ref(engine._forward)
    engine.rebuild()
    assert forward() is None  # nothing holds the parts before
    assert hooks == sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    optimizer = engine.optimizer
    other = zs.Engine(model, OPTIMIZER, zs.Plan(zero=1))
    assert repr(engine) == "A retired engine, whose model has another one"
    for use in (lambda: engine(batch(0, 0, 1)), lambda: engine.plan, lambda: engine.rebuild(), lambda: engine.model):
        with pytest.raises(PlanError, match="retired"):
            use()
    optimizer.zero_grad()
    with pytest.raises(PlanError, match="nothing to train"):
        other.rebuild(plan=zs.Plan(ignored=("*",)))
    with pytest.raises(PlanError, match="retired"):
        other.step()
    last = zs.Engine(model, OPTIMIZER, zs.Plan())  # the model is a plain one
    last.backward(last(batch(0, 0, 1)))
    assert last.step().step == 1
