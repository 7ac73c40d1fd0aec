"""Parameters that were frozen when the engine was made, and are trained later: as in the plain loop."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import follows_plain_loop, plain_loop
from pool import Pool
from torch import nn

import zeroshard as zs
from zeroshard.errors import BudgetExceeded, CheckpointWarning, PlanError

STEPS, WIDTH = 6, 16
OPTIMIZER = partial(torch.optim.AdamW, lr=0.01)
UNFROZEN = {2: ("2.0.weight", "2.3.bias"), 4: ("0.2.weight", "3.weight")}  # by step, the parameters that are trained on


class Block(nn.Sequential):
    """Two layers, which tensor parallelism cuts, and a norm."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH))


def model() -> nn.Sequential:
    """Three blocks and a head, of which the last block and the bias of the head are trained at first."""
    torch.manual_seed(5)
    made = nn.Sequential(Block(), Block(), Block(), nn.Linear(WIDTH, WIDTH))
    made.requires_grad_(False)
    made[1].requires_grad_(True)
    made[3].bias.requires_grad_(True)
    return made


def batches(ranks: int) -> list[list[torch.Tensor]]:
    """Of each step, the rows of each rank."""
    generator = torch.Generator().manual_seed(6)
    return [[torch.randn(4, WIDTH, generator=generator) for _ in range(ranks)] for _ in range(STEPS)]


def loss(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A mean over rows."""
    return net(batch).square().mean()


def unfreeze(net: nn.Module, names: Sequence[str]) -> None:
    """Train these parameters from now on."""
    for name, parameter in net.named_parameters():
        if name in names:
            parameter.requires_grad_(True)


def plain(ranks: int, changes: dict[int, tuple[str, ...]]) -> Any:
    """The same in the plain loop."""
    net = model()

    def steps() -> Any:
        for number, parts in enumerate(batches(ranks)):
            unfreeze(net, changes.get(number, ()))
            yield parts

    return plain_loop(net, lambda _: OPTIMIZER(net.parameters()), steps(), loss)


def run(mesh: zs.Mesh, plan: dict[str, Any], changes: dict[int, tuple[str, ...]], folder: str = "") -> Any:
    """Losses and weights; by the loop of the user, or by steps of the schedule."""
    net, made = model(), zs.Plan.from_dict(plan)
    example = torch.ones(2, WIDTH) if "pipeline_parallel" in plan else None
    engine = zs.Engine(
        net, OPTIMIZER, made, mesh=mesh, loss=lambda y, x: y.square().mean(), example=example
    )  # fmt: skip
    losses, before = [], engine.memory()
    for number, parts in enumerate(batches(engine.data_ranks)):
        unfreeze(net, changes.get(number, ()))
        mine = parts[engine.data_rank]
        if number % 2 and example is None:  # as users write it
            value = loss(engine, mine)
            engine.backward(value)
            engine.step()
            losses.append(value.item())
        else:
            losses.append(engine.train_step(mine).loss.item())
    after = engine.memory()
    if folder:
        engine.save(Path(folder) / "step-00000001", wait=True)
    return losses, engine.state_dict(), [str(before), str(after)]


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"zero": 2}),
    "stage 0": (2, {"zero": 0}),
    "stage 1": (2, {"zero": 1}),
    "stage 2 over the network": (2, {"zero": 2, "transport": "network"}),
    "stage 3 over the network": (2, {"zero": 3, "transport": "network"}),
    "stage 3 in shared memory": (3, {"zero": 3}),
    "offload": (2, {"zero": 3, "offload": "optimizer,parameters"}),
    "offloaded states": (2, {"zero": 2, "offload": "optimizer"}),
    "two stages": (2, {"pipeline_parallel": 2, "zero": 0, "microbatches": 2}),
    "two stages of two": (4, {"pipeline_parallel": 2, "zero": 2, "microbatches": 2}),
    "tensor": (2, {"tensor_parallel": 2, "zero": 1}),
}


@pytest.mark.parametrize("kind", PLANS)
def test_it_trains_as_the_plain_loop(pool: Pool, kind: str) -> None:
    ranks, plan = PLANS[kind]
    runs = pool.run(run, ranks, plan, UNFROZEN)
    data = ranks // plan.get("pipeline_parallel", 1) // plan.get("tensor_parallel", 1)
    wanted = plain(data, UNFROZEN)
    follows_plain_loop([each[:2] for each in runs], wanted, 1e-5)


class Tied(nn.Module):
    """A frozen embedding, with which the head at the other end of the blocks is tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(9, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x), tokens.roll(1))


def tied(mesh: zs.Mesh) -> Any:
    """Losses and weights of a model whose tied weight is on two stages, and trained from the third step on."""
    net, rows = Tied(), torch.arange(8) % 9
    plan = zs.Plan(pipeline_parallel=2, zero=1, microbatches=1)
    engine = zs.Engine(net, OPTIMIZER, plan, mesh=mesh, example=(rows,))
    losses = []
    for number in range(STEPS):
        unfreeze(net, ("embed.weight",) if number == 2 else ())
        losses.append(engine.train_step((rows,)).loss.item())
    return losses, engine.state_dict()


def test_a_frozen_weight_that_two_stages_share(pool: Pool) -> None:
    net, rows = Tied(), torch.arange(8) % 9

    def steps() -> Any:
        for number in range(STEPS):
            unfreeze(net, ("embed.weight",) if number == 2 else ())
            yield [rows]

    wanted = plain_loop(net, lambda _: OPTIMIZER(net.parameters()), steps(), lambda net, rows: net(rows))
    follows_plain_loop(pool.run(tied, 2), wanted, 1e-5)


def test_one_rank_is_the_plain_loop_bit_for_bit() -> None:
    """Weights, and the states by parameter."""
    net, wanted = model(), plain(1, UNFROZEN)
    engine = zs.Engine(net, OPTIMIZER, loss=lambda y, x: y.square().mean())
    for number, (rows,) in enumerate(batches(1)):
        unfreeze(net, UNFROZEN.get(number, ()))
        engine.backward(loss(engine, rows))
        assert (engine.gradient("2.0.weight") is not None) == (number >= 2)
        engine.step()
    assert all(torch.equal(value, wanted.weights[name]) for name, value in engine.state_dict().items())
    states = engine.optimizer.state_dict()["state"]
    names = [name for name, _ in net.named_parameters()]
    steps = {names[number]: int(state["step"]) for number, state in states.items()}
    assert steps["1.0.weight"] == STEPS and steps["2.0.weight"] == STEPS - 2 and steps["3.weight"] == STEPS - 4
    assert "0.0.weight" not in steps


TABLES: dict[str, tuple[int, dict[str, Any]]] = {
    "whole": (1, {"zero": 1, "precision": "bf16"}),
    "in shared memory": (2, {"zero": 2, "precision": "bf16"}),
    "sliced": (2, {"zero": 3, "transport": "network"}),
    "offload": (2, {"zero": 3, "offload": "optimizer,parameters"}),
}


def tables(mesh: zs.Mesh, plan: dict[str, Any]) -> Any:
    """By row, the bytes by the formula and as counted; without and with unfreezing."""
    net = model()
    engine = zs.Engine(net, OPTIMIZER, zs.Plan.from_dict(plan), mesh=mesh, loss=lambda y, x: y.square().mean())
    found = []
    for number in range(3):
        unfreeze(net, UNFROZEN[2] if number == 1 else ())
        engine.train_step(batches(engine.data_ranks)[number][engine.data_rank])
        rows = engine.memory().rows
        wanted = [((row.planned_bytes or 0) + (row.padding_bytes or 0), row) for row in rows]
        found.append([(row.tier, row.category, planned, row.measured_bytes) for planned, row in wanted])
    return found


@pytest.mark.parametrize("kind", TABLES)
def test_tables_count_it(pool: Pool, kind: str) -> None:
    ranks, plan = TABLES[kind]
    for before, *after in pool.run(tables, ranks, plan):
        grown = dict.fromkeys(("gradients", "optimizer states"), 0)
        for rows in (before, *after):
            assert [
                row for row in rows if row[1] in (*grown, "parameters", "master weights") and row[2] != row[3]
            ] == []
        sizes = [{row[1]: row[3] for row in rows} for rows in (before, after[-1])]
        assert sizes[0]["parameters"] == pytest.approx(sizes[1]["parameters"], rel=0.01, abs=4 * 4096)  # whole pages
        assert all(sizes[1][name] > sizes[0][name] for name in grown)


def rounded(mesh: zs.Mesh, plan: dict[str, Any]) -> Any:
    """Weights in 16 bits of parameters that are unfrozen, of which the engine made the states late or at the start."""
    results = []
    for early in (False, True):
        net = model().bfloat16()
        frozen = [p for p in net.parameters() if not p.requires_grad]
        if early:
            net.requires_grad_(True)
        engine = zs.Engine(net, OPTIMIZER, zs.Plan.from_dict(plan), mesh=mesh, loss=lambda y, x: y.square().mean())
        for parameter in frozen if early else ():
            parameter.requires_grad_(False)
        for number, parts in enumerate(batches(engine.data_ranks)):
            unfreeze(net, UNFROZEN.get(number, ()))
            engine.train_step(parts[engine.data_rank])
        results.append(dict(engine.weights(dtype=torch.float32)))
    return results


@pytest.mark.parametrize("zero", [2, 3])
def test_masters_in_16_bits(pool: Pool, zero: int) -> None:
    """Bit for bit as parameters that had theirs from the start."""
    for late, early in pool.run(rounded, 2, {"zero": zero, "precision": "bf16"}):
        assert all(torch.equal(late[name], value) for name, value in early.items())


def resumed(mesh: zs.Mesh, folder: str) -> Any:
    """The weights of a run, and of one that went on from a checkpoint in it; and the warning of one that did not."""
    plan, rows = zs.Plan(zero=2), batches(mesh.ranks)
    weights = []
    for number in (0, 4):
        net = model()
        engine = zs.Engine(net, OPTIMIZER, plan, mesh=mesh, loss=lambda y, x: y.square().mean())
        if number:
            with pytest.warns(CheckpointWarning, match=r"optimizer states of '2\.0\.weight'"):
                engine.load(folder)
            unfreeze(net, UNFROZEN[2])
            engine.load(folder)
        for step in range(number, STEPS):
            unfreeze(net, UNFROZEN.get(step, ()))
            if step == 4 and not number:
                engine.save(folder, wait=True)
            engine.train_step(rows[step][mesh.rank])
        weights.append(engine.state_dict())
    return weights


def test_checkpoints_hold_the_new_states(pool: Pool, tmp_path: Path) -> None:
    for wanted, found in pool.run(resumed, 2, str(tmp_path / "step-00000004")):
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


def grouped(mesh: zs.Mesh) -> Any:
    """As a callback that unfreezes a backbone does: a new group with a rate of its own."""
    net = model()
    trained = lambda _: OPTIMIZER([p for p in net.parameters() if p.requires_grad])  # noqa: E731
    engine = zs.Engine(net, trained, zs.Plan(zero=2), mesh=mesh, loss=lambda y, x: y.square().mean())
    losses = []
    for number, parts in enumerate(batches(mesh.ranks)):
        if number == 3:
            net[2].requires_grad_(True)
            engine.optimizer.add_param_group({"params": list(net[2].parameters()), "lr": 0.001})
        losses.append(engine.train_step(parts[mesh.rank]).loss.item())
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.01, 0.001]
    return losses, engine.state_dict()


def test_a_new_group_trains_as_in_the_plain_loop(pool: Pool) -> None:
    net, made = model(), list[torch.optim.Optimizer]()

    def steps() -> Any:
        for number, parts in enumerate(batches(2)):
            if number == 3:
                net[2].requires_grad_(True)
                made[0].add_param_group({"params": list(net[2].parameters()), "lr": 0.001})
            yield parts

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made.append(OPTIMIZER(parameters))
        return made[0]

    follows_plain_loop(pool.run(grouped, 2), plain_loop(net, optimizer, steps(), loss))


def error_of(call: Callable[[], object]) -> str:
    """The error of a call."""
    try:
        call()
    except PlanError as error:
        return str(error)
    return "none"


def refused(mesh: zs.Mesh) -> dict[str, str]:
    """Errors by situation."""
    found = {}
    last = {"loss": lambda y, x: y.square().mean(), "mesh": mesh}
    rows = torch.ones(2, WIDTH)
    situations = (
        "in no group",
        "whole tensors",
        "several versions",
        "late gathers",
        "between backwards",
        "other names",
        "several",
    )
    for name in situations:
        net = model()
        optimizer: Any = OPTIMIZER
        plan = zs.Plan(zero=2)
        if name in ("in no group", "several"):
            optimizer = lambda _, net=net: OPTIMIZER([p for p in net.parameters() if p.requires_grad])  # noqa: E731
        elif name == "whole tensors":
            optimizer = partial(torch.optim.Adafactor, lr=0.01)
        elif name == "several versions":
            plan = zs.Plan(zero=0, pipeline_parallel=zs.Pipeline(stages=2, schedule="2bw"), microbatches=2)
        elif name == "late gathers":
            plan = zs.Plan(zero=2, overlap_gather=True, transport="network")
        example = rows if name == "several versions" else None
        engine = zs.Engine(net, optimizer, plan, example=example, **last)
        if name == "between backwards":
            engine.backward(engine(rows).square().mean())
        unfreeze(net, ("2.3.bias" if name == "other names" and mesh.rank == 1 else "2.0.weight",))
        if name == "several":
            unfreeze(net, ("2.3.bias",))
        if name == "between backwards":
            found[name] = error_of(lambda engine=engine: engine(rows))
        else:
            found[name] = error_of(lambda engine=engine: engine.train_step(rows))
    return found


REFUSALS = {
    "in no group": ("'2.0.weight' was frozen when", "requires gradients now, in no optimizer group", "add_param_group"),
    "several": ("'2.0.weight', '2.3.bias' were frozen when", "and require gradients now, in no optimizer group"),
    "whole tensors": ("'2.0.weight'", "Adafactor needs whole tensors", "freeze it afterwards"),
    "several versions": ("'2.0.weight'", "'2bw' keeps several versions", "freeze it afterwards"),
    "late gathers": ("'2.0.weight'", "overlap_gather=True gathers updated weights", "freeze it afterwards"),
    "between backwards": ("'2.0.weight'", "between two backwards of one step", "Unfreeze between steps"),
    "other names": ("'2.0.weight'", "on some ranks alone", "Unfreeze the same parameters on every rank"),
}


def test_what_is_refused(pool: Pool) -> None:
    for found in pool.run(refused, 2):
        for name, words in REFUSALS.items():
            assert all(word in found[name] for word in words), (name, found[name])


def test_too_little_memory_changes_nothing() -> None:
    def trained(budget: int | None, unfreezes: bool) -> tuple[list[float], int]:
        net = model()
        engine = zs.Engine(net, OPTIMIZER, zs.Plan(zero=2, device_memory=budget), mesh=zs.Mesh())
        losses = []
        for number, (rows,) in enumerate(batches(1)):
            if unfreezes and number == 3:
                unfreeze(net, ("0.2.weight", "2.0.weight"))
                with pytest.raises(BudgetExceeded, match=r"Nothing was changed: freeze '0.2.weight', '2.0"):
                    engine(rows)
                net[0].requires_grad_(False)
                net[2].requires_grad_(False)
            y = engine(rows).square().mean()
            engine.backward(y)
            engine.step()
            losses.append(y.item())
        return losses, sum(row.peak_bytes for row in engine.memory().rows)

    losses, peak = trained(None, False)
    assert trained(peak + 8000, True)[0] == losses  # 1,024 parameters take 12 bytes each


def two_adapters() -> Any:
    """A model of peft with two adapters, of which the first is active."""
    import peft

    torch.manual_seed(7)
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
    made = peft.get_peft_model(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), config)
    made.add_adapter("second", config)
    return made


def switched(mesh: zs.Mesh, plan: dict[str, Any]) -> Any:
    """Losses and weights of a run that goes over to the second adapter."""
    net = two_adapters()
    engine = zs.Engine(net, OPTIMIZER, zs.Plan(**plan), mesh=mesh, loss=lambda y, x: y.square().mean())
    losses = []
    for number, parts in enumerate(batches(mesh.ranks)):
        if number == 3:
            net.set_adapter("second")
        losses.append(engine.train_step(parts[mesh.rank]).loss.item())
    return losses, engine.state_dict()


@pytest.mark.parametrize("zero", [2, pytest.param(3, marks=pytest.mark.whole)])
def test_the_active_adapter_is_switched(pool: Pool, zero: int) -> None:
    pytest.importorskip("peft")
    net = two_adapters()

    def steps() -> Any:
        for number, parts in enumerate(batches(2)):
            if number == 3:
                net.set_adapter("second")
            yield parts

    wanted = plain_loop(net, lambda _: OPTIMIZER(net.parameters()), steps(), loss)
    follows_plain_loop(pool.run(switched, 2, {"zero": zero, "transport": "network"}), wanted)
