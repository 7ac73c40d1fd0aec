"""Plain PyTorch by hand: what N data-parallel ranks compute together, in one process and without zeroshard."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import zeroshard as zs

WIDTH = 6
MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "momentum": partial(torch.optim.SGD, lr=5e-2, momentum=0.9, weight_decay=0.01),
}


class Branch(nn.Module):
    """A normed residual MLP; its five parameters get their gradients one by one."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Branches(nn.Module):
    """Branches to choose from, `c` of other shapes than the rest; a route such as "ab" names those to take."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.branches = nn.ModuleDict({"d": Branch(7), "a": Branch(7), "b": Branch(7), "c": Branch(11)})
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, route: str) -> Tensor:
        h = self.embed(x)
        for letter in route:
            h = self.branches[letter](h)
        return (self.head(h) ** 2).mean()


@dataclass(frozen=True)
class Script:
    """What every rank does in every step.

    Attributes:
        steps: per step and rank, the routes of its forwards; one entry of ranks serves all ranks.
        forwards_first: all forwards of a step come before its backwards, which come in the order of the forwards.
        local: numbers of the backwards in a step that run under `no_sync`.
        plain: `loss.backward()` in place of `engine.backward(loss)`.
    """

    steps: tuple[tuple[tuple[str, ...], ...], ...]
    forwards_first: bool = False
    local: tuple[int, ...] = ()
    plain: bool = False

    def routes(self, step: int, rank: int) -> tuple[str, ...]:
        """The forwards of one rank in one step."""
        return self.steps[step][rank % len(self.steps[step])]


def branches(dtype: torch.dtype = torch.float64) -> Branches:
    """The model with the same weights every time; in fp64, so that comparisons can be tight."""
    torch.manual_seed(3)
    return Branches().to(dtype)


def data(step: int, rank: int, number: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The input [4, 5] of one forward."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + number)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64).to(dtype)


def mean_gradients(model: nn.Module, losses: Sequence[Sequence[Tensor]]) -> dict[str, Tensor | None]:
    """The mean over ranks of the sum of each rank's gradients (`losses[rank]`); None where no rank has one."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    sums: dict[str, Tensor | None] = dict.fromkeys(name for name, _ in named)
    for mine in losses:
        for loss in mine:
            found = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
            for (name, _), gradient in zip(named, found, strict=True):
                before = sums[name]
                if gradient is not None:
                    sums[name] = gradient if before is None else before + gradient
    return {name: None if total is None else total / len(losses) for name, total in sums.items()}


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, gradients: dict[str, Tensor | None]) -> None:
    """One step of a torch optimizer, as after `zero_grad(set_to_none=True)`: no gradient, no update."""
    optimizer.zero_grad(set_to_none=True)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients.get(name)
    optimizer.step()


def close(found: Any, wanted: Any, where: str, rtol: float, atol: float) -> None:
    """Equal within the tolerances, or an error that says where not."""
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol, msg=lambda text: f"{where}: {text}")


def copy_of(state: dict[str, Any]) -> dict[str, Any]:
    """A state dict that later steps do not change."""
    return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in state.items()}


def by_hand(script: Script, ranks: int, maker: str) -> tuple[list[list[list[float]]], list[dict[str, Tensor]]]:
    """Losses [step][rank][forward] and the weights after each step, of all ranks computed one after the other."""
    model = branches()
    optimizer = MAKERS[maker](model.parameters())
    losses, weights = [], []
    for step in range(len(script.steps)):
        found = [
            [model(data(step, rank, n), route) for n, route in enumerate(script.routes(step, rank))]
            for rank in range(ranks)
        ]
        take_step(model, optimizer, mean_gradients(model, found))
        losses.append([[loss.item() for loss in mine] for mine in found])
        weights.append(copy_of(model.state_dict()))
    return losses, weights


def by_engine(
    mesh: zs.Mesh, script: Script, maker: str, plan: zs.Plan
) -> tuple[list[list[float]], list[dict[str, Tensor]]]:
    """The same on one rank of an engine: its losses [step][forward] and the weights after each step."""
    engine = zs.Engine(branches(), MAKERS[maker], plan, mesh=mesh)
    losses, weights = [], []
    for step in range(len(script.steps)):
        found, routes = [], script.routes(step, mesh.rank)
        for n, route in enumerate(routes):
            found.append(engine(data(step, mesh.rank, n), route))
            if not script.forwards_first:
                _backward(engine, script, n, found[-1])
        if script.forwards_first:
            for n, loss in enumerate(found):
                _backward(engine, script, n, loss)
        engine.step()
        losses.append([loss.item() for loss in found])
        weights.append(engine.state_dict())
    return losses, weights


def _backward(engine: zs.Engine, script: Script, number: int, loss: Tensor) -> None:
    with engine.no_sync() if number in script.local else nullcontext():
        loss.backward() if script.plain else engine.backward(loss)  # type: ignore[no-untyped-call]


def transport_of(zero: int) -> Any:
    """What the engine's tests run over: stage 3 over the network, since shared memory needs no gathers."""
    return "network" if zero == 3 else "auto"
