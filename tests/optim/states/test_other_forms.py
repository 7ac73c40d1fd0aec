"""Optimizer states of plain loops and FSDP2, by position and by name, go on under plans with equal losses."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from jobs import error_of
from pool import Pool
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import zeroshard as zs
from zeroshard.errors import CheckpointError
from zeroshard.optim.states.by_parameter import members_of
from zeroshard.optim.states.other_forms import by_position

KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
}
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
Plain = dict[str, Any]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3, bias=False))


def rows(step: int) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(step))


def loss_of(output: Tensor) -> Tensor:
    return (output - 1).square().mean()


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """Two groups, in another order than the model's."""
    members = list(module.parameters())
    vectors = {"params": [p for p in members if p.dim() == 1], "weight_decay": 0.5}
    return [vectors, {"params": [p for p in members if p.dim() == 2], "weight_decay": 0.0}]


def steps_of(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(module(rows(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def engine_steps(engine: zs.Engine, steps: range) -> list[float]:
    losses = []
    for step in steps:
        with torch.no_grad():
            losses.append(float(loss_of(engine(rows(step)))))
        engine.backward(loss_of(engine(rows(step)[engine.data_rank :: engine.data_ranks])))
        engine.step()
    return losses


def go_on(engine: zs.Engine, weights: Plain, states: Any, after: int) -> list[float]:
    """Losses of three steps after states were taken over, at a moment in the run of an engine."""
    engine_steps(engine, range(20, 20 + after))
    engine.load_state_dict(weights)
    engine.optimizer.load_state_dict(states)
    return engine_steps(engine, range(2, 5))


def from_fsdp(mesh: zs.Mesh, kind: str, plans: list[Plain]) -> dict[str, Any]:
    """Losses of FSDP2, and of engines that took over its states in each form."""
    sharded = model()
    device_mesh = DeviceMesh.from_group(mesh.gathers, "cpu")
    for module in (sharded[0], sharded[2], sharded):  # type: ignore[index]
        fully_shard(module, mesh=device_mesh)
    optimizer = KINDS[kind](groups_of(sharded))
    steps_of(sharded, optimizer, range(2))
    weights = {name: values.full_tensor() for name, values in sharded.state_dict().items()}
    forms = {
        "by position": optimizer.state_dict(),
        "by name": get_optimizer_state_dict(sharded, optimizer),
        "flat": get_optimizer_state_dict(sharded, optimizer, options=FLAT),
        "of rank 0": get_optimizer_state_dict(sharded, optimizer, options=WHOLE),
    }
    assert bool(forms["of rank 0"]) == (mesh.rank == 0)
    found = {"half": error_of(lambda: _engine(mesh, kind, plans[0]).optimizer.load_state_dict(
        forms["by position"] if mesh.rank == 0 else None  # type: ignore[arg-type]
    ))}  # fmt: skip
    losses: dict[str, Any] = {}
    for number, (form, states) in enumerate(forms.items()):
        plan = plans[number % len(plans)]
        losses[form] = go_on(_engine(mesh, kind, plan), weights, states, number)
    return {**found, "fsdp": steps_of(sharded, optimizer, range(2, 5)), "losses": losses}


def _engine(mesh: zs.Mesh, kind: str, plan: Plain) -> zs.Engine:
    layers = model()
    return zs.Engine(layers, KINDS[kind](groups_of(layers)), zs.Plan.from_dict(plan), mesh=mesh)


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_fsdp_go_on(pool: Pool, kind: str) -> None:
    plans = [{"zero": 3, "transport": "network"}, {"zero": 2, "offload": "optimizer"}, {"zero": 0}, {"zero": 1}]
    for found in pool.run(from_fsdp, 2, kind, plans):
        assert "is a shard there" in found["half"]
        for form, losses in found["losses"].items():
            torch.testing.assert_close(losses, found["fsdp"], rtol=1e-5, atol=1e-6, msg=lambda m, f=form: f"{f}: {m}")


def from_plain(mesh: zs.Mesh, plan: Plain) -> list[Any]:
    """Losses of a plain loop, and of an engine given its states on rank 0, between a backward and its step."""
    layers = model()
    optimizer = KINDS["AdamW"](groups_of(layers))
    steps_of(layers, optimizer, range(2))
    weights = {name: values.clone() for name, values in layers.state_dict().items()}
    states = optimizer.state_dict() if mesh.rank == 0 else {}
    losses = steps_of(layers, optimizer, range(2, 5)) if mesh.rank else None
    engine = _engine(mesh, "AdamW", plan)
    engine.load_state_dict(weights)
    engine.backward(loss_of(engine(rows(2)[mesh.rank :: 2])))
    engine.optimizer.load_state_dict(states)
    engine.step()
    return [losses, engine_steps(engine, range(3, 5))]


@pytest.mark.parametrize("plan", [{"zero": 2}, {"zero": 3, "offload": "optimizer"}])
def test_rank_0_alone_gives_states_between_backward_and_step(pool: Pool, plan: Plain) -> None:
    answers = pool.run(from_plain, 2, plan)
    for _, found in answers:
        torch.testing.assert_close(found, answers[1][0][1:], rtol=1e-5, atol=1e-6)


def wrong(mesh: zs.Mesh) -> dict[str, str]:
    engine = _engine(mesh, "AdamW", {"zero": 2})
    engine_steps(engine, range(1))
    states = engine.optimizer.state_dict()
    given: dict[str, Any] = {
        "kind": [1],
        "nobody": None,
        "rank 1": states if mesh.rank else None,
        "meta": {"state": {0: {"exp_avg": torch.empty(7, device="meta")}}, "param_groups": states["param_groups"]},
        "code": {**states, "state": {0: {"exp_avg": object()}}} if mesh.rank == 0 else None,
        "model": {name: values.detach().clone() for name, values in model().state_dict().items()},
    }
    before = engine.optimizer.state_dict()
    found = {key: error_of(lambda v=value: engine.optimizer.load_state_dict(v)) for key, value in given.items()}
    after = engine.optimizer.state_dict()
    assert all(torch.equal(one["exp_avg"], after["state"][key]["exp_avg"]) for key, one in before["state"].items())
    return found


def test_what_is_no_optimizers_state_is_refused_on_all_ranks(pool: Pool) -> None:
    words = {
        "kind": "was given a list", "nobody": "states on ranks [] of 2", "rank 1": "states on ranks [1] of 2",
        "meta": "on the meta device", "code": "cannot send the states of rank 0", "model": "a mapping with '0.weight'",
    }  # fmt: skip
    for found in pool.run(wrong, 2):
        for key, said in words.items():
            assert found[key].startswith("CheckpointError: engine.optimizer.load_state_dict()"), found[key]
            assert said in found[key], found[key]


def named(change: Callable[[Plain], Any]) -> Plain:
    """The state dict of a plain run by name, with one change, by position."""
    layers = model()
    optimizer = KINDS["AdamW"](groups_of(layers))
    steps_of(layers, optimizer, range(1))
    states = get_optimizer_state_dict(layers, optimizer)
    change(states)
    return by_position(states, members_of(optimizer, layers))


def test_names_of_wrappers_are_left_out() -> None:
    layers = model()
    optimizer = torch.optim.AdamW(list(nn.ModuleDict({"module": layers}).named_parameters()))
    steps_of(layers, optimizer, range(1))
    states = optimizer.state_dict()
    mine = torch.optim.AdamW(reversed(list(layers.parameters())))
    found = by_position(states, members_of(mine, layers))
    assert found["param_groups"][0]["params"] == [0, 1, 2, 3, 4]
    for number in range(5):
        assert found["state"][number]["exp_avg"] is states["state"][4 - number]["exp_avg"]


def test_numbers_alone_stay_as_they_are() -> None:
    layers = model()
    optimizer = torch.optim.AdamW(layers.parameters())
    steps_of(layers, optimizer, range(1))
    states = optimizer.state_dict()
    assert by_position(states, members_of(optimizer, layers)) == states


def test_wrong_names_are_refused() -> None:
    def other_name(states: Plain) -> None:
        states["param_groups"][0]["params"][0] = "none.such"

    def fewer(states: Plain) -> None:
        states["param_groups"][0]["params"].remove("0.bias")
        del states["state"]["0.bias"]

    def beside(states: Plain) -> None:
        states["state"]["else"] = {}

    def split(states: Plain) -> None:
        group = states["param_groups"][1]
        group["params"].remove("0.weight")
        states["param_groups"].append({**group, "params": ["0.weight"], "lr": 7.0})

    for change, words in ((other_name, "states of 'none.such'"), (fewer, "with no '0.bias'"),
                          (beside, "'else' in none of its groups"), (split, "was given 'lr'=")):  # fmt: skip
        with pytest.raises(CheckpointError, match=words):
            named(change)


def test_tied_parameters_are_found_by_each_name() -> None:
    layers = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3, bias=False)})
    layers["b"].weight = layers["a"].weight
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    given = {"state": {"b.weight": {"momentum_buffer": torch.ones(3, 3)}},
             "param_groups": [{"params": ["b.weight", "a.bias"], "lr": 0.3}]}  # fmt: skip
    found = by_position(given, members_of(optimizer, layers))
    assert found["state"].keys() == {0} and found["param_groups"] == [{"lr": 0.3, "params": [0, 1]}]
