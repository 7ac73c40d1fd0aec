"""What a recomputed block reads beside its arguments: it is as it was in the forward, or the recomputation is refused.

Plain loops are the reference. The model sets something anew before each of several calls of its blocks, which read it:
generators of random numbers, attributes, and variables of the module.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import error_of
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs

WIDTH, PLANS = 8, ["blocks", "sqrt", "selective"]
GENERATOR, UNNAMED, SCALE = torch.Generator(), torch.Generator(), 1.0
HIDDEN = {"name": "UNNAMED"}


def enclosed(generator: torch.Generator) -> Any:
    return lambda shape: torch.rand(shape, generator=generator)


def drawn(shape: Any) -> Tensor:
    return torch.rand(shape, generator=GENERATOR)


class Block(nn.Module):
    kind = ""

    def __init__(self, others: SimpleNamespace) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.others, self.scale, self.act, self.calls = others, 1.0, torch.tanh, 0
        self.mask: Tensor | None = None

    def factor(self, shape: Any, generator: Any) -> Any:
        self.calls += 1
        found: Any = {
            "a global generator": lambda: torch.rand(shape, generator=GENERATOR),
            "a generator of a function": lambda: drawn(shape),
            "an enclosed generator": lambda: self.others.draw(shape),
            "a generator of an object": lambda: torch.rand(shape, generator=self.others.generator),
            "a generator as an argument": lambda: torch.rand(shape, generator=generator),
            "a number": lambda: self.scale,
            "a tensor": lambda: self.mask,
            "a counter": lambda: self.calls,
            "a function": lambda: 1.0,
            "a generator by its name": lambda: torch.rand(shape, generator=globals()[HIDDEN["name"]]),
            "a global number": lambda: globals()["SCALE"],
            "a number of an object": lambda: self.others.scale,
        }[self.kind]()
        return found

    def forward(self, x: Tensor, generator: Any = None) -> Tensor:
        h = self.up(x)
        return x + self.down(self.act(h * self.factor(h.shape, generator)))


REPLAYED = [
    *("a global generator", "a generator of a function", "an enclosed generator", "a generator of an object"),
    *("a generator as an argument", "a number", "a tensor", "a counter", "a function"),
]
REFUSED = ["a generator by its name", "a global number", "a number of an object"]


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        others = SimpleNamespace(generator=generator, draw=enclosed(generator), scale=1.0)
        self.others, self.blocks = others, nn.ModuleList(Block(others) for _ in range(3))
        for block in self.blocks:
            block.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        for again in range(2):
            for number, block in enumerate(self.blocks):
                value = 1.0 + number + again / 2
                globals()["SCALE"] = self.others.scale = block.scale = value
                block.mask, block.act = torch.full((WIDTH,), value), (torch.tanh, torch.relu)[again]
                x = block(x, self.others.generator)
        return x


def losses(kind: str, plan: zs.Plan | None, steps: int = 3) -> list[float]:
    """Of a plain loop, or of an engine."""
    torch.manual_seed(0)
    model = Net(kind)
    GENERATOR.manual_seed(5)
    x, found = torch.randn(4, WIDTH), []
    if plan is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found
    engine = zs.Engine(model, partial(torch.optim.SGD, lr=0.02), plan)
    for _ in range(steps):
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    assert engine.recomputed > 0
    return found


@pytest.mark.parametrize("kind", REPLAYED)
def test_what_can_be_put_back_is(kind: str) -> None:
    expected = losses(kind, None)
    for recompute in PLANS:
        assert losses(kind, zs.Plan(recompute=recompute)) == pytest.approx(expected, rel=1e-6), recompute


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("recompute", PLANS)
def test_other_values_are_an_error(kind: str, recompute: str) -> None:
    error = error_of(lambda: losses(kind, zs.Plan(recompute=recompute), steps=1))
    assert error.startswith("PlanError") and "its values are others" in error and "recompute='off'" in error


class Begins(nn.Module):
    """Draws in a way that is not found, from a later forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.calls = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.up(x)
        noise = torch.rand(h.shape, generator=globals()[HIDDEN["name"]]) if self.calls > 10 else 1.0
        return x + self.down(torch.tanh(h * noise))


def test_a_draw_that_begins_later_is_an_error_too() -> None:
    engine = zs.Engine(
        nn.Sequential(*(Begins() for _ in range(4))), partial(torch.optim.SGD, lr=0.1), zs.Plan(recompute="blocks")
    )

    def train() -> None:
        engine.backward(engine(torch.ones(4, WIDTH)).square().mean())
        engine.step()

    for _ in range(10):
        train()
    assert any("its values are others" in error_of(train) for _ in range(4))


def of_stages(mesh: zs.Mesh, kind: str, recompute: str) -> Any:
    torch.manual_seed(0)
    GENERATOR.manual_seed(5)
    blocks = Net(kind).blocks
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 1))
    plan = zs.Plan(
        pipeline_parallel=zs.Pipeline(2, balance="parameters", schedule="gpipe"), microbatches=4, recompute=recompute
    )
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))

    def loss(y: Tensor, _: Any) -> Tensor:
        for block in model:
            block.scale = 1 + y.abs().mean().item()  # for the next microbatch
        return y.square().mean()

    def train() -> None:
        engine = zs.Engine(model, partial(torch.optim.SGD, lr=0.1), plan, mesh=mesh, example=x[:2], loss=loss)
        GENERATOR.manual_seed(5 + mesh.rank)
        for _ in range(2):
            engine.train_step(x)
        found.update(engine.state_dict())

    found: dict[str, Tensor] = {}
    return error_of(train), {name: value.tolist() for name, value in found.items()}


def test_chunks_of_a_pipeline_meet_what_they_met(pool: Pool) -> None:
    for kind in ("a global generator", "a number"):
        kept, again = (pool.run(of_stages, 2, kind, recompute) for recompute in ("off", "schedule"))
        assert kept[0][0] == again[0][0] == "nothing", (kind, again[0][0])
        assert kept == again, kind
