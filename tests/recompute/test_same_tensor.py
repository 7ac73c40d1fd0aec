"""Arguments that are one tensor are one in a recomputation too, by the model itself or as a plan says.

`nn.MultiheadAttention` computes by another path where query, key and value are one tensor, and `Either` by another
weight, so tensors that were told apart would be an error or a wrong gradient. Plain loops are the reference.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from jobs import error_of
from pool import Pool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs

WIDTH = 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q + self.inner(q, k, v, need_weights=False)[0]


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q + torch.tanh((self.one if q is k and k is v else self.two)(q) * v)


class Masked(nn.Module):
    """Asks whether its argument is a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(WIDTH))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q + torch.tanh((self.one if v is self.mask else self.two)(q) * v)


_again = partial(checkpoint, use_reentrant=False)
WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "arguments": lambda block, x: _again(block, x, x, x),
    "keywords": lambda block, x: _again(block, x, k=x, v=x),
    "in a list": lambda block, x: _again(lambda a, others: block(a, *others), x, [x, x]),
    "enclosed": lambda block, x: _again(lambda a: block(a, x, x), x),
}


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module], way: str | None) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(kind() for _ in range(3))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.way is not None:
                x = WAYS[self.way](block, x)
            elif isinstance(block, Masked):
                x = block(x, x, block.mask)
            else:
                x = block(x, x, x)
        return x


def differs(mesh: zs.Mesh | None, kind: type[nn.Module], way: str | None, options: dict[str, Any]) -> float | str:
    """How far the weights are from those of a plain loop after two steps, or the error."""
    torch.manual_seed(0)
    model = Net(kind, way)
    plain = copy.deepcopy(model)
    x = torch.randn(2, 4, WIDTH)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        optimizer.step()
    engine = zs.Engine(model, partial(torch.optim.SGD, lr=0.1), zs.Plan.from_dict(options), mesh=mesh)

    def train() -> None:
        for _ in range(2):
            engine.backward(engine(x).square().mean())
            engine.step()

    if (error := error_of(train)) != "nothing":
        return error
    state = engine.state_dict()
    return max((state[name] - value).abs().max().item() for name, value in plain.state_dict().items())


BY_THE_MODEL: list[dict[str, Any]] = [
    {"zero": 3, "transport": "network"},
    {"offload": "activations"},
    {"activations.compress": ["sparse"]},
    {"zero": 3, "transport": "network", "offload": "activations"},
]
BY_THE_PLAN: list[dict[str, Any]] = [
    {"activations.recompute": "blocks"},
    {"activations.recompute": "sqrt"},
    {"activations.recompute": "blocks", "offload": "activations"},
    {"activations.recompute": "blocks", "activations.arena": True},
]


def by_the_model(mesh: zs.Mesh) -> list[Any]:
    cases: list[Any] = [(Either, way, BY_THE_MODEL[0]) for way in WAYS]
    cases += [(Attention, "arguments", options) for options in BY_THE_MODEL]
    return [(*case, found) for case in cases if not _close(found := differs(mesh, *case))]


def _close(found: float | str) -> bool:
    return isinstance(found, float) and found < 1e-6


def test_in_what_the_model_recomputes(pool: Pool) -> None:
    assert pool.run(by_the_model, 2) == [[], []]


@pytest.mark.parametrize("options", BY_THE_PLAN, ids=str)
@pytest.mark.parametrize("kind", [Attention, Either, Masked])
def test_in_what_a_plan_recomputes(kind: type[nn.Module], options: dict[str, Any]) -> None:
    found = differs(None, kind, None, options)
    assert _close(found), found
