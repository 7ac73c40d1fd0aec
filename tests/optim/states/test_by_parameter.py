"""The optimizer's state dict is that of a plain loop under every plan, and either loads into the other."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from jobs import error_of
from pool import Pool
from selection import by_default
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.errors import CheckpointError
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig

ROWS, LENGTH = 4, 6
KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "SGD": partial(torch.optim.SGD, momentum=0.9),
    "Adagrad": partial(torch.optim.Adagrad, initial_accumulator_value=0.1),
    "Adafactor": zs.optim.Adafactor,
    "Shampoo": zs.optim.Shampoo,
}
STAGED = {"pipeline_parallel.stages": 2, "pipeline_parallel.balance": "parameters", "microbatches": 2}
PLANS: dict[str, tuple[int, str, dict[str, Any]]] = {  # ranks, optimizer, settings
    "0": (2, "AdamW", {"zero": 0}),
    "1": (2, "SGD", {"zero": 1}),
    "2 network": (2, "AdamW", {"zero": 2, "transport": "network"}),
    "3 network": (3, "Adagrad", {"zero": 3, "transport": "network"}),
    "3 shared": (2, "AdamW", {"zero": 3, "clip_norm": 0.5}),
    "offload": (2, "AdamW", {"zero": 2, "offload": "optimizer"}),
    "offload all": (1, "AdamW", {"zero": 3, "offload": "optimizer, parameters"}),
    "offload another": (2, "SGD", {"zero": 2, "offload": "optimizer"}),
    "whole": (2, "Adafactor", {"zero": 2}),
    "lists": (3, "Shampoo", {"zero": 3, "transport": "network"}),
    "tensor": (2, "AdamW", {"zero": 0, "tensor_parallel": 2}),
    "joined": (2, "Adafactor", {"zero": 0, "tensor_parallel": 2}),
    "stages": (4, "AdamW", {"zero": 2, **STAGED}),
}
States = dict[str, Any]


class Net(nn.Module):
    """Blocks with a scalar, a frozen layer and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(GPTConfig(vocabulary=11, context=LENGTH, width=8, heads=2, layers=3))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.gpt(tokens, targets)
        return loss


class Extras(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.unused, self.frozen = nn.Parameter(torch.ones(())), nn.Linear(3, 2), nn.Linear(8, 1)
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return super().forward(tokens, targets) * self.scale


def model_of(plain: bool) -> nn.Module:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocabulary=11, context=LENGTH, width=8, heads=2, layers=3)) if plain else Extras()


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """Two groups, the second of vectors."""
    members = [p for p in model.parameters() if p.requires_grad or kind != "Adagrad"]  # which makes states at once
    groups = [
        {"params": [p for p in members if p.dim() > 1]},
        {"params": [p for p in members if p.dim() <= 1], "weight_decay": 0.1},
    ]
    return KINDS[kind](groups, lr=1e-2)


def rows(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(11, (12, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def simple(plan: str) -> bool:
    """Whether a plan takes the model without extras."""
    settings = PLANS[plan][2]
    return "tensor_parallel" in settings or "microbatches" in settings


def plain_loop(plan: str, states: States | None, weights: States | None, steps: range) -> tuple[States, States]:
    """State dicts of model and optimizer after some steps of a plain loop."""
    model = model_of(simple(plan))
    optimizer = optimizer_of(model, PLANS[plan][1])
    if states is not None and weights is not None:
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(states))  # or its steps would change these
    for step in steps:
        model(*rows(step)).backward()
        if PLANS[plan][2].get("clip_norm"):
            nn.utils.clip_grad_norm_(model.parameters(), PLANS[plan][2]["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict()), optimizer.state_dict()


def engine_of(mesh: zs.Mesh, plan: str) -> zs.Engine:
    model = model_of(simple(plan))
    settings = zs.Plan.from_dict(PLANS[plan][2])
    example = tuple(part[:2] for part in rows(0))
    return zs.Engine(model, optimizer_of(model, PLANS[plan][1]), settings, mesh=mesh, example=example)


def take_steps(engine: zs.Engine, steps: range) -> None:
    for step in steps:
        tokens, targets = rows(step)
        own = slice(engine.data_rank, None, engine.data_ranks)
        engine.train_step((tokens[own], targets[own]))


def go_on(mesh: zs.Mesh, plan: str, weights: States, states: States) -> tuple[States, States, States, States]:
    """State dicts after two steps, and after two more in a fresh engine that took over those of a plain loop."""
    engine = engine_of(mesh, plan)
    take_steps(engine, range(2))
    found = engine.state_dict(), engine.optimizer.state_dict()
    again = engine_of(mesh, plan)
    again.load_state_dict(weights)
    again.optimizer.load_state_dict(states)
    take_steps(again, range(2, 4))
    return *found, again.state_dict(), again.optimizer.state_dict()


def assert_alike(found: Any, wanted: Any, bound: float) -> None:
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_alike(found[key], value, bound)
    elif isinstance(wanted, (list, tuple)):
        assert type(found) is type(wanted) and len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_alike(one, other, bound)
    elif isinstance(wanted, Tensor):
        torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)
    else:
        assert found == wanted


@pytest.mark.parametrize("plan", by_default(PLANS, *PLANS))
def test_it_is_that_of_the_plain_loop_and_loads_both_ways(pool: Pool, plan: str) -> None:
    weights, states = plain_loop(plan, None, None, range(2))
    later = plain_loop(plan, states, weights, range(2, 4))
    bound = 1e-3 if PLANS[plan][1] == "Shampoo" else 1e-4
    for found in pool.run(go_on, PLANS[plan][0], plan, weights, states):
        assert_alike(found[1], states, bound)
        assert_alike(found[2], later[0], bound)
        assert_alike(found[3], later[1], bound)
        assert_alike(plain_loop(plan, found[1], found[0], range(2, 4))[0], later[0], bound)


def seen(mesh: zs.Mesh) -> dict[str, Any]:
    """What the groups show, and what is refused."""
    engine = engine_of(mesh, "2 network")
    take_steps(engine, range(1))
    names = {p: name for name, p in engine.model.named_parameters()}
    optimizer = engine.optimizer
    shown = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    shapes = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"]]
    wanted = [tuple(p.shape) for group in optimizer_of(model_of(False), "AdamW").param_groups for p in group["params"]]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    schedule.step()
    states, first = optimizer.state_dict(), optimizer.param_groups[0]["params"][0]
    fewer = {**states, "param_groups": states["param_groups"][:1]}
    misshapen = {**states, "state": {**states["state"], 0: {**states["state"][0], "exp_avg": torch.zeros(2)}}}
    other = {**states, "state": {**states["state"], 0: {**states["state"][0], "exp_avg": mesh.rank + first.detach()}}}
    return {
        "names": shown,
        "shapes": shapes == wanted,
        "rate": optimizer.param_groups[0]["lr"],
        "state[p]": error_of(lambda: optimizer.state[first]),
        "state.items()": error_of(lambda: dict(optimizer.state.items())),
        "add_param_group": error_of(lambda: optimizer.add_param_group({"params": []})),
        "step": error_of(optimizer.step),
        "groups": error_of(lambda: optimizer.load_state_dict(fewer)),
        "shape": error_of(lambda: optimizer.load_state_dict(misshapen)),
        "ranks": error_of(lambda: optimizer.load_state_dict(other)),
    }


def test_groups_hold_the_models_parameters_and_the_rest_is_refused_by_name(pool: Pool) -> None:
    for found in pool.run(seen, 2):
        assert "gpt.embedding.weight" in found["names"][0] and "scale" in found["names"][1]
        assert found["shapes"] and found["rate"] == 5e-3
        for read in ("state[p]", "state.items()"):
            assert found[read].startswith("OptimizerError") and "engine.optimizer.state_dict()" in found[read]
        assert "add_param_group" in found["add_param_group"] and "Call engine.step()" in found["step"]
        assert found["groups"].startswith("CheckpointError: engine.optimizer.load_state_dict() cannot take")
        assert "'exp_avg" in found["shape"] and found["shape"].startswith("CheckpointError")
        assert "different states by rank" in found["ranks"]


def test_a_state_that_lacks_a_parameters_moment_is_refused() -> None:
    engine = engine_of(zs.Mesh(), "0")
    take_steps(engine, range(1))
    states = engine.optimizer.state_dict()
    del states["state"][0]["exp_avg"]
    with pytest.raises(CheckpointError, match="lacks the optimizer's state 'exp_avg'"):
        engine.optimizer.load_state_dict(states)
