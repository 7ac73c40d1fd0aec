"""Models as people write them, unmodified, train as they do in one process; and what people do to them on the way."""

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from engine import zoo
from engine.zoo import OPTIMIZER, STEPS, WIDTH, ZOO, Case, alone, batch, build, check, engine_for, train, values_of
from pool import Pool
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zeroshard as zs
from zeroshard.errors import PlanError

PLANS: dict[str, dict[str, Any]] = {
    "zero0": {"zero": 0},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero2-network": {"zero": 2, "transport": "network"},
    "zero3": {"zero": 3, "transport": "network"},  # parameters come and go
    "zero3-shared": {"zero": 3},  # where ranks share memory, they may stay
}
FEW = ("zero0", "zero2", "zero3")
MORE: dict[str, dict[str, Any]] = {"fickle": {"units": ()}}  # no order of blocks is the same on all ranks
OF_ITS_PART = ("choosy", "fickle", "convolutions")  # what a row gives depends on the rows beside it
MATRIX = [
    *((name, plan) for name in ZOO for plan in ("zero2", "zero3")),
    *(("choosy", plan) for plan in PLANS if plan not in ("zero2", "zero3")),
    *(("chain", plan) for plan in ("zero0", "zero3-shared")),
    *(("prompted", plan) for plan in ("zero1", "zero2-network", "zero3-shared")),
]


@functools.cache
def reference(name: str) -> Any:
    """What the plain loop gives: on the whole batch, or rank by rank where it matters what is in a batch."""
    plain = "chain" if name.startswith("compiled") else name
    return alone(ZOO[plain], 2 if name in OF_ITS_PART else 1)


def train_one(mesh: zs.Mesh, name: str, plan: str) -> Any:
    """Train a model of the zoo on this rank."""
    return train(mesh, ZOO[name], **PLANS[plan], **MORE.get(name, {}))


@pytest.mark.parametrize("name, plan", MATRIX)
def test_trains_as_in_one_process(pool: Pool, name: str, plan: str) -> None:
    answers = pool.run(train_one, 2, name, plan)
    plain = [(losses, {k.replace("_orig_mod.", ""): v for k, v in weights.items()}) for losses, weights in answers]
    check(plain, *reference(name))


def test_the_data_really_decide() -> None:
    """In the first step the ranks use all blocks between them, later not, and never the same ones."""
    model: Any = build(ZOO["choosy"])
    routes = [[model.route(batch(ZOO["choosy"], step, rank, 2)["x"]) for rank in range(2)] for step in range(STEPS)]
    assert set("".join(routes[0])) == set("abcd")
    assert all(a != b for a, b in routes) and any(not set("bcd") & set(a) for a, _ in routes)


def test_running_statistics_are_those_of_the_rank(pool: Pool) -> None:
    """`state_dict` gives each rank its own batch-norm statistics, and one set of weights."""
    (_, mine), (_, other) = pool.run(train_one, 2, "convolutions", "zero3")
    for name, value in mine.items():
        assert torch.equal(value, other[name]) is not name.endswith(("running_mean", "running_var")), name


# What is frozen


def memory_of(mesh: zs.Mesh, name: str, plan: str) -> dict[str, int]:
    """Bytes on this rank by category, after a step."""
    engine = engine_for(mesh, ZOO[name], **PLANS[plan])
    engine.train_step(batch(ZOO[name], 0, mesh.rank, mesh.ranks))
    return {row.category: row.measured_bytes for row in engine.memory()}


@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero2", "zero3"])
def test_frozen_weights_cost_their_own_bytes_only(pool: Pool, plan: str) -> None:
    model = build(ZOO["adapted"])
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert frozen > 3 * trainable
    gradients, moments = 4 * trainable, 8 * trainable
    zero = PLANS[plan]["zero"]
    for memory in pool.run(memory_of, 2, "adapted", plan):
        padding = 4 * 2 * 3  # an element per flat buffer, for two moments
        assert 0 <= memory["gradients"] - gradients // (2 if zero >= 2 else 1) <= padding
        assert 0 <= memory["optimizer states"] - moments // (2 if zero >= 1 else 1) <= padding


# Compiled blocks


def graphs_per_step(mesh: zs.Mesh, plan: str) -> list[int]:
    """How many graphs torch.compile has made after each step, in a model whose blocks are compiled in place."""
    torch._dynamo.reset()
    made: list[Any] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        made.append(graph)
        return graph.forward

    model: Any = build(ZOO["chain"])
    for block in model.blocks:
        block.compile(backend=keep)
    engine = zs.Engine(model, OPTIMIZER, zs.Plan.from_dict(PLANS[plan]), mesh=mesh)
    counts = []
    for step in range(4):
        engine.train_step(batch(ZOO["chain"], step, mesh.rank, mesh.ranks))
        counts.append(len(made))
    return counts


@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_blocks_are_compiled_once(pool: Pool, plan: str) -> None:
    """One graph for three blocks of a kind, as without zeroshard, and none anew because weights came and went."""
    assert pool.run(graphs_per_step, 2, plan) == [[1, 1, 1, 1]] * 2


class Stacked(nn.Module):
    """Blocks that are sequences of layers, in which torch.compile breaks its graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6)) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def compiled_or_not(mesh: zs.Mesh, plan: dict[str, Any]) -> list[dict[str, Tensor]]:
    """The weights after two steps of a model as it is, and of one whose blocks are compiled in place."""
    torch._dynamo.reset()
    states = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Stacked()
        for block in model.blocks if compiled else ():
            block.compile(backend="aot_eager")
        engine = zs.Engine(model, OPTIMIZER, zs.Plan.from_dict(plan), mesh=mesh)
        for _ in range(2):
            engine.train_step(torch.randn(4, 6))
        states.append(engine.state_dict())
    return states


SAVERS = [{"offload": "activations"}, {"device_memory": "1GiB"}, {"activations.compress": ("sparse",)}]


@pytest.mark.parametrize("plan", SAVERS)
def test_savers_beside_blocks_that_are_compiled_in_place(pool: Pool, plan: dict[str, Any]) -> None:
    for plain, compiled in pool.run(compiled_or_not, 1, plan):
        assert all(torch.equal(compiled[name], value) for name, value in plain.items())


# Weights that are changed between steps


def edit(model: nn.Module, step: int) -> None:
    """Clamp, start a row anew, and bring columns to norm 1, as people do between steps."""
    with torch.no_grad():
        model.get_parameter("enter.weight").clamp_(-0.2, 0.2)
        row = model.get_parameter("blocks.1.up.weight")[step]
        row.copy_(torch.randn(row.shape, generator=torch.Generator().manual_seed(step)).to(row.dtype) / 3)
        weight = model.get_parameter("blocks.2.down.weight")
        weight.div_(weight.norm(dim=0, keepdim=True))


def train_edited(mesh: zs.Mesh, plan: str, precision: str) -> Any:
    """Train with edits before every step, inside `gathered()`."""
    case = ZOO["chain"]
    engine = engine_for(mesh, case, **PLANS[plan], precision=precision)
    losses = []
    for step in range(STEPS):
        with engine.gathered():
            edit(engine.model, step)
        losses.append(engine.train_step(batch(case, step, mesh.rank, mesh.ranks)).loss.item())
    return losses, engine.state_dict()


@pytest.mark.parametrize("plan", FEW)
def test_edits_between_steps_stay(pool: Pool, plan: str) -> None:
    check(pool.run(train_edited, 2, plan, "fp32"), *alone(ZOO["chain"], before_step=edit))


def edited_in_bf16() -> Any:
    """By hand: bf16 models on two parts of the batch, fp32 masters, which take the elements that an edit changed."""
    case = ZOO["chain"]
    masters = list(build(case).parameters())
    models = [build(case).bfloat16() for _ in range(2)]
    optimizer = OPTIMIZER(masters)
    losses = []
    for step in range(STEPS):
        found = []
        for part, model in enumerate(models):
            edit(model, step)
            rows = batch(case, step, part, 2)
            loss = model(rows["x"].bfloat16())
            model.zero_grad()
            loss.backward()
            found.append(loss.item())
        losses.append(sum(found) / 2)
        for master, *copies in zip(masters, *(model.parameters() for model in models), strict=True):
            changed = master.detach().bfloat16() != copies[0]
            master.data[changed] = copies[0].detach()[changed].float()
            mean = sum(p.grad.float() for p in copies if p.grad is not None) / 2
            master.grad = mean.bfloat16().float() if isinstance(mean, Tensor) else None
        optimizer.step()
        for model in models:
            for p, master in zip(model.parameters(), masters, strict=True):
                p.data.copy_(master.detach())
    return losses, [values_of(models[0])]


@pytest.mark.parametrize("plan", FEW)
def test_edits_reach_the_masters(pool: Pool, plan: str) -> None:
    check(pool.run(train_edited, 2, plan, "bf16"), *edited_in_bf16())


# Moving averages


def average(model: nn.Module) -> AveragedModel:
    """An exponential moving average over the weights."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))


def train_averaged(mesh: zs.Mesh, plan: str) -> list[dict[str, Tensor]]:
    """Three ways to keep an average: made before the engine, made after it, and over state dicts."""
    case = ZOO["chain"]
    model = build(case, seed=mesh.rank)
    before = average(model)
    engine = zs.Engine(model, OPTIMIZER, zs.Plan.from_dict(PLANS[plan]), mesh=mesh)
    with engine.gathered():
        after = average(model)
    by_hand: dict[str, Tensor] = {}
    for step in range(STEPS):
        engine.train_step(batch(case, step, mesh.rank, mesh.ranks))
        with engine.gathered():
            before.update_parameters(model)
            after.update_parameters(model)
        for name, value in engine.state_dict().items():
            by_hand.setdefault(name, value).lerp_(value, 1 - 0.7)
    with torch.no_grad():  # a copy is a model of its own
        outputs = [copy(**batch(case, 0, mesh.rank, mesh.ranks)).item() for copy in (before.module, after.module)]
    assert outputs[0] == outputs[1]
    return [values_of(before.module), values_of(after.module), by_hand]


@pytest.mark.parametrize("plan", FEW)
def test_moving_averages(pool: Pool, plan: str) -> None:
    averages: list[AveragedModel] = []

    def watch(model: nn.Module, step: int) -> None:
        if not averages:
            averages.append(average(model))
        if step:
            averages[0].update_parameters(model)

    losses, (last,) = alone(ZOO["chain"], before_step=watch)
    expected = averages[0].module
    for name, value in expected.state_dict().items():
        value.lerp_(last[name], 1 - 0.7)  # the update after the last step
    for found in pool.run(train_averaged, 2, plan):
        for each in found:
            check([(losses, each)], losses, [values_of(expected)])


# Parameters outside of the model's forward


class Penalized(nn.Module):
    """A model with a penalty on all of its weights, which reads them outside of the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.model = zoo.Chain()

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x)
        return loss + penalty(self.model)


def penalty(model: nn.Module) -> Tensor:
    """The sum of squares of all parameters, weighted."""
    return 1e-2 * torch.stack([p.pow(2).sum() for p in model.parameters()]).sum()


def train_penalized(mesh: zs.Mesh, plan: str, how: str) -> Any:
    """Loss and penalty: all of it inside of `gathered()`, the penalty and the backward, or nothing."""
    case = ZOO["chain"]
    engine = engine_for(mesh, case, **PLANS[plan])
    losses = []
    for step in range(STEPS):
        rows = batch(case, step, mesh.rank, mesh.ranks)
        outer: AbstractContextManager[None] = engine.gathered() if how == "all" else nullcontext()
        inner: AbstractContextManager[None] = engine.gathered() if how == "backward" else nullcontext()
        with outer:
            loss = engine(**rows)
            with inner:
                try:
                    loss = loss + penalty(engine.model)
                except PlanError as error:
                    return str(error), engine.state_dict()
                engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine.state_dict()


@pytest.mark.parametrize(
    "how, plan",
    [
        *(("all", plan) for plan in FEW),
        *(("backward", plan) for plan in ("zero1", "zero2-network", "zero3", "zero3-shared")),
        *(("nothing", plan) for plan in PLANS),
    ],
)
def test_parameters_in_the_loss(pool: Pool, how: str, plan: str) -> None:
    """Right inside of `gathered()` at every stage. Outside of it right, or refused: under stage 3 they may be away."""
    answers = pool.run(train_penalized, 2, plan, how)
    if how == "nothing" and isinstance(answers[0][0], str):
        before = build(ZOO["chain"]).state_dict()
        assert PLANS[plan]["zero"] == 3
        for message, weights in answers:
            assert "was read outside" in message and "engine.gathered()" in message
            assert all(torch.equal(weights[name], value) for name, value in before.items())
        return
    losses, (weights,) = penalized_reference()
    check(answers, losses, [{name.removeprefix("model."): value for name, value in weights.items()}])


@functools.cache
def penalized_reference() -> Any:
    """What the plain loop gives."""
    return alone(Case(Penalized, zoo.numbers()))


class Smooth(nn.Module):
    """A model with a penalty on the gradient of its loss with regard to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.model = zoo.Chain()

    def forward(self, x: Tensor) -> Tensor:
        return smooth_loss(self.model, x)


def smooth_loss(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The loss of a batch, and its gradient row by row."""
    x = x.clone().requires_grad_()
    loss = model(x)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + (len(x) * slope).square().mean()


def train_smooth(mesh: zs.Mesh, plan: str, gathered: bool) -> Any:
    """Second derivatives, in or outside of `gathered()`."""
    case = ZOO["chain"]
    engine = engine_for(mesh, case, **PLANS[plan])
    losses = []
    for step in range(STEPS):
        with engine.gathered() if gathered else nullcontext():
            loss = smooth_loss(engine, batch(case, step, mesh.rank, mesh.ranks)["x"])
            engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine.state_dict()


@pytest.mark.parametrize("plan", FEW)
@pytest.mark.parametrize("gathered", [False, True])
def test_second_derivatives(pool: Pool, gathered: bool, plan: str) -> None:
    losses, (weights,) = alone(Case(Smooth, zoo.numbers()))
    expected = {name.removeprefix("model."): value for name, value in weights.items()}
    check(pool.run(train_smooth, 2, plan, gathered), losses, [expected])


# Edges of the model


def calls_a_block(mesh: zs.Mesh, plan: str) -> Any:
    """A block alone: inside of `gathered()`, then outside."""
    engine = engine_for(mesh, ZOO["chain"], **PLANS[plan])
    x = torch.ones(2, WIDTH)
    with engine.gathered():
        inside = engine.model.get_submodule("blocks.1")(x).tolist()
    return inside, engine.model.get_submodule("blocks.1")(x).tolist()


@pytest.mark.parametrize("plan", PLANS)
def test_a_block_alone_works(pool: Pool, plan: str) -> None:
    expected = build(ZOO["chain"]).get_submodule("blocks.1")(torch.ones(2, WIDTH)).tolist()
    for inside, outside in pool.run(calls_a_block, 2, plan):
        assert inside == outside == expected


def write(model: nn.Module, *paths: str) -> None:
    """Overwrite some weights."""
    with torch.no_grad():
        for path in paths:
            model.get_parameter(path).fill_(0.25)


def takes_out(mesh: zs.Mesh, plan: str) -> Any:
    """State dicts and a copy that are taken inside of `gathered()`, nested, and read after it and after a step."""
    case = ZOO["chain"]
    engine = engine_for(mesh, case, **PLANS[plan])
    with engine.gathered():
        write(engine.model, "enter.weight")
        with engine.gathered():
            write(engine.model, "blocks.1.up.bias")
        write(engine.model, "leave.weight")
        loss = engine(**batch(case, 0, 0, 1)).item()
        states = [engine.state_dict(), engine.model.state_dict(), copy.deepcopy(engine.model).state_dict()]
        if PLANS[plan]["zero"] < 3:
            states = [{k: v.clone() for k, v in state.items()} for state in states]  # the model's own goes on with it
    states.append(engine.state_dict())
    engine.train_step(batch(case, 0, mesh.rank, mesh.ranks))
    return loss, [{k: v.clone() for k, v in state.items()} for state in states]


@pytest.mark.parametrize("plan", PLANS)
def test_what_is_taken_out_of_gathered_stays(pool: Pool, plan: str) -> None:
    model = build(ZOO["chain"])
    write(model, "enter.weight", "blocks.1.up.bias", "leave.weight")
    expected = model(**batch(ZOO["chain"], 0, 0, 1)).item()
    for loss, states in pool.run(takes_out, 2, plan):
        assert loss == pytest.approx(expected, rel=1e-6)
        for state in states:
            assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


class Renormalising(nn.Module):
    """An embedding that shortens in its forward the rows that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH, max_norm=1.0)


class Clamping(zoo.Block):
    """A block that clamps its own weights in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


CLAMPED = functools.partial(zoo.Chain, Clamping)


def writes_in_its_forward(mesh: zs.Mesh, plan: str) -> Any:
    """What the engine says of weights that are written in the forward."""
    with pytest.raises(PlanError) as refused:
        zs.Engine(Renormalising(), OPTIMIZER, zs.Plan.from_dict(PLANS[plan]), mesh=mesh)
    case = Case(CLAMPED, zoo.numbers())
    try:
        return str(refused.value), train(mesh, case, **PLANS[plan])
    except PlanError as error:
        return str(refused.value), str(error)


@pytest.mark.parametrize("plan", PLANS)
def test_writes_in_the_forward_are_right_or_refused(pool: Pool, plan: str) -> None:
    expected = alone(Case(CLAMPED, zoo.numbers()))
    answers = pool.run(writes_in_its_forward, 2, plan)
    assert all("'embed' has max_norm=1.0" in refused for refused, _ in answers)
    found = [answer for _, answer in answers]
    if isinstance(found[0], str):
        assert all("blocks.0" in message and "engine.gathered()" in message for message in found)
    else:
        check(found, *expected)
