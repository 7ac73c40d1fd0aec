"""Engines of models in stages, tensor ranks and expert ranks that are made anew, against plain loops."""

import copy
import functools
import weakref
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.nn import functional as F

import zeroshard as zs
from zeroshard.errors import PlanError
from zeroshard.moe.experts.experts import ExpertModules, Experts
from zeroshard.moe.routing.record import Routing

OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, eps=1e-4),  # else tiny gradients' rounding decides
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}
STEPS, CHANGED = 4, 2  # the number of steps, and the one before which the model changes
WIDTH, VOCABULARY = 8, 12


class Block(nn.Module):
    """A residual block with a buffer that no state dict holds, and one that each forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH), persistent=False)
        self.register_buffer("calls", torch.zeros(()))
        self.mixture: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        x = self.mixture(x)
        return x + self.scale * self.down(F.gelu(self.up(x)))


class Router(nn.Module):
    """The two likeliest experts of each token."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts, self.choice = experts, nn.Linear(WIDTH, experts, bias=False)

    def forward(self, x: Tensor, rows: int) -> Routing:
        gates, chosen = self.choice(x).softmax(-1).topk(2)
        counts = (chosen.unsqueeze(-1) == torch.arange(self.experts, device=x.device)).sum((0, 1))
        return Routing(chosen, gates, None, counts, {})


class Mixture(nn.Module):
    """A residual mixture of experts; stacked, or modules."""

    def __init__(self, modules: bool) -> None:
        super().__init__()
        self.router = Router(4)
        expert = partial(nn.Linear, WIDTH, WIDTH)
        self.experts = ExpertModules(expert, 4) if modules else Experts(WIDTH, 16, 4, "gelu", bias=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        return x + self.experts(tokens, self.router(tokens, len(x))).view(x.shape)


class Model(nn.Module):
    """A tied embedding, blocks of which the first is frozen, and an output layer; perhaps mixtures in two blocks."""

    def __init__(self, mixtures: str = "") -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        for block in self.blocks[1:3] if mixtures else ():
            block.mixture = Mixture(mixtures == "modules")
        self.blocks[0].requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def build(mixtures: str = "", seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(mixtures)


def grow(model: Model) -> None:
    """Two blocks more, others behind them by their names, a larger vocabulary, a wider layer, an unfrozen block."""
    torch.manual_seed(1)
    model.blocks.insert(1, Block())
    model.blocks.append(Block())
    larger = nn.Embedding(VOCABULARY + 4, WIDTH)
    with torch.no_grad():
        larger.weight[:VOCABULARY] = model.embed.weight
    model.embed = larger
    model.head = nn.Linear(WIDTH, VOCABULARY + 4, bias=False)
    model.head.weight = larger.weight
    model.blocks[2].down.bias.data = torch.full((WIDTH,), 0.5)
    model.blocks[0].requires_grad_(True)


def adapt(model: Model) -> None:
    """A frozen base, with adapters whose sizes are those of the layers."""
    torch.manual_seed(1)
    model.requires_grad_(False)
    for block in model.blocks:
        block.up = Adapted(block.up)


class Adapted(nn.Module):
    """A layer with a trained one of low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base(x) + self.b(self.a(x))
        return made


def thaw(model: Model) -> None:
    """One block more is trained; all else stays."""
    model.blocks[0].requires_grad_(True)


CHANGES = {"grow": grow, "adapt": adapt, "thaw": thaw}


def batch(step: int, rank: int = 0, ranks: int = 1) -> Tensor:
    """A data rank's part of the tokens [8, 6] of a step."""
    return torch.randint(VOCABULARY, (8, 6), generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]


@functools.cache
def plain(optimizer: str, change: str, mixtures: str = "", keeps_states: bool = True) -> dict[str, Any]:
    """A plain loop that does the same: losses, the loss before the change, weights and buffers at the end."""
    model, losses, between = build(mixtures), [], 0.0
    updates = OPTIMIZERS[optimizer](list(model.parameters()))
    for step in range(STEPS):
        if step == CHANGED:
            with torch.no_grad():
                between = copy.deepcopy(model)(batch(step)).item()
            before, old = dict(updates.state), list(updates.param_groups[0]["params"])
            CHANGES[change](model)
            now = list(model.parameters())
            stayed = [p for p in old if any(p is other for other in now)]
            new = [p for p in now if not any(p is other for other in old)]
            updates = OPTIMIZERS[optimizer]([*stayed, *new])  # in the order in which an engine has them
            updates.state.update({p: before[p] for p in stayed if p in before and p.requires_grad and keeps_states})
        loss = model(batch(step))
        updates.zero_grad()
        loss.backward()
        updates.step()
        losses.append(loss.item())
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return {"losses": losses, "between": between, "weights": weights, "states": updates.state_dict()["state"]}


def made(mesh: zs.Mesh, plan: Mapping[str, Any], optimizer: str, mixtures: str = "") -> zs.Engine:
    model = build(mixtures, mesh.rank)
    return zs.Engine(model, OPTIMIZERS[optimizer], zs.Plan(**plan), mesh=mesh, example=batch(0)[:2])


def train(
    mesh: zs.Mesh, before: dict[str, Any], after: dict[str, Any], optimizer: str, change: str, mixtures: str = ""
) -> dict[str, Any]:
    """As `plain`, with an engine that is made anew under another plan."""
    engine, losses, between, sizes = made(mesh, before, optimizer, mixtures), [], [], []

    def changed(model: Model) -> None:
        with torch.no_grad():
            between.append(copy.deepcopy(model)(batch(CHANGED)).item())
        sizes.append([model.blocks[0].up.out_features, model.head.out_features, model.embed.num_embeddings])
        CHANGES[change](model)

    for step in range(STEPS):
        if step == CHANGED:
            example = None if before == after else batch(0)[:2]
            engine.rebuild(change=changed, plan=zs.Plan(**after), example=example)
        result = engine.train_step(batch(step, engine.data_rank, engine.data_ranks))
        losses.append(None if result.loss is None else result.loss.item())
    return {"losses": losses, "between": between, "sizes": sizes, **ended(engine)}


def train_by_two(mesh: zs.Mesh, settings: dict[str, Any], given: bool) -> dict[str, Any]:
    """As `plain`, where a second engine takes the weights over, whose optimizer may be made by the user."""
    engine, losses = made(mesh, settings, "adamw"), []
    for step in range(STEPS):
        if step == CHANGED:
            first, model = engine, engine.model
            model.blocks[0].requires_grad_(True)  # type: ignore[union-attr, index]
            optimizer: Any = OPTIMIZERS["adamw"]
            optimizer = optimizer(list(model.parameters())) if given else optimizer
            engine = zs.Engine(model, optimizer, zs.Plan(**settings), mesh=mesh, example=batch(0)[:2])
            with pytest.raises(PlanError, match="retired"):
                first.state_dict()
        result = engine.train_step(batch(step, engine.data_rank, engine.data_ranks))
        losses.append(None if result.loss is None else result.loss.item())
    return {"losses": losses, "between": [], "sizes": [], **ended(engine)}


def ended(engine: zs.Engine) -> dict[str, Any]:
    """The weights and states at the end."""
    weights = {name: value for name, value in engine.state_dict().items() if not name.endswith("calls")}
    return {"weights": weights, "states": engine.optimizer.state_dict()["state"]}


def follows(answers: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """Losses, weights and states of every rank are those of the loop; and the model between was a plain one."""
    for step, loss in enumerate(wanted["losses"]):
        seen = [mine["losses"][step] for mine in answers if mine["losses"][step] is not None]
        assert sum(seen) / len(seen) == pytest.approx(loss, rel=1e-5), step
    for mine in answers:
        for value in mine["between"]:
            assert value == pytest.approx(wanted["between"], rel=1e-5)
        assert all(size == [16, VOCABULARY, VOCABULARY] for size in mine["sizes"])
        assert mine["states"].keys() == wanted["states"].keys()
        for number, states in wanted["states"].items():
            for key, value in states.items():
                if value is not None:
                    torch.testing.assert_close(mine["states"][number][key], value, rtol=1e-4, atol=1e-5)
        named = {name: value for name, value in mine["weights"].items() if name != "head.weight"}
        assert named.keys() == wanted["weights"].keys()
        for name, value in named.items():
            torch.testing.assert_close(value, wanted["weights"][name], rtol=1e-5, atol=1e-5, msg=name)


def stages(*split: str, **settings: Any) -> dict[str, Any]:
    pipeline = zs.Pipeline((len(split) + 1) // settings.get("virtual_stages", 1), split=split, **settings)
    return {"pipeline_parallel": pipeline, "microbatches": 4}


TWO = stages("blocks.2")
LAYERS = ("embed=embedding", "head=output", "blocks.*.up=column", "blocks.*.down=row")
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "stages": (2, TWO),
    "stages, zero 1": (4, {**TWO, "zero": 1}),
    "stages, zero 2": (4, {**TWO, "zero": 2}),
    "uneven": (3, stages("blocks.2", replicas=(1, 2))),
    "tensor": (2, {"tensor_parallel": 2}),
    "vocabulary": (2, {"tensor_parallel": zs.TensorParallel(2, layers=LAYERS)}),
    "tensor, zero 3": (4, {"tensor_parallel": 2, "zero": 3}),
    "stages, tensor": (4, {**TWO, "tensor_parallel": 2}),
    "interleaved": (2, stages("blocks.1", "blocks.2", "blocks.3", schedule="interleaved", virtual_stages=2)),
    "zb-h1": (2, stages("blocks.2", schedule="zb-h1")),
    "offloaded": (2, {**TWO, "offload": "optimizer"}),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", PLANS)
def test_what_stayed_keeps_its_states(pool: Pool, plan: str, optimizer: str) -> None:
    ranks, settings = PLANS[plan]
    follows(pool.run(train, ranks, settings, settings, optimizer, "grow"), plain(optimizer, "grow"))


@pytest.mark.parametrize("mixtures", ["stacked", "modules"])
def test_experts_of_other_ranks_come_back(pool: Pool, mixtures: str) -> None:
    settings = {"expert_parallel": 2, "zero": 1}
    follows(pool.run(train, 2, settings, settings, "adamw", "grow", mixtures), plain("adamw", "grow", mixtures))


def train_without_flushes(mesh: zs.Mesh, schedule: str, rebuilds: bool) -> dict[str, Any]:
    """An engine whose schedule never flushes, flushed between two steps by hand, or by a `rebuild` without a change."""
    engine, losses = made(mesh, stages("blocks.2", schedule=schedule), "adamw"), []
    for step in range(STEPS):
        if step == CHANGED:
            engine.rebuild() if rebuilds else engine.flush()
        result = engine.train_step(batch(step))
        losses.append(None if result.loss is None else result.loss.item())
    return {"losses": losses, **ended(engine)}


@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_microbatches_in_flight_are_finished_first(pool: Pool, schedule: str) -> None:
    flushed, rebuilt = (pool.run(train_without_flushes, 2, schedule, rebuilds) for rebuilds in (False, True))
    for mine, other in zip(rebuilt, flushed, strict=True):
        assert mine["losses"] == other["losses"]
        assert all(torch.equal(value, other["weights"][name]) for name, value in mine["weights"].items())
        for number, states in mine["states"].items():
            assert all(torch.equal(value, other["states"][number][key]) for key, value in states.items())


OTHERS: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "stages to slices": (2, "adapt", TWO, {"zero": 2}),
    "slices to stages": (2, "adapt", {"zero": 3}, TWO),
    "stages to tensor": (2, "thaw", TWO, {"tensor_parallel": 2}),
    "tensor to stages": (2, "adapt", {"tensor_parallel": 2}, stages("blocks.1")),
    "other stages": (4, "thaw", stages("blocks.1", "blocks.2", "blocks.3"), {**stages("blocks.3"), "zero": 1}),
    "tensor, stages to slices": (4, "adapt", {**TWO, "tensor_parallel": 2}, {"zero": 3, "transport": "network"}),
}


@pytest.mark.parametrize("plan", OTHERS)
def test_another_plan_goes_on_with_the_states(pool: Pool, plan: str) -> None:
    ranks, change, before, after = OTHERS[plan]
    follows(pool.run(train, ranks, before, after, "adamw", change), plain("adamw", change))


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("plan", ["stages", "tensor"])
def test_a_second_engine_takes_the_weights_over(pool: Pool, plan: str, given: bool) -> None:
    ranks, settings = PLANS[plan]
    follows(pool.run(train_by_two, ranks, settings, given), plain("adamw", "thaw", keeps_states=False))


def described(model: nn.Module) -> dict[str, Any]:
    """The attributes, numbers of hooks and sizes of each module."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
    return {
        path: (set(vars(module)), [len(getattr(module, name)) for name in tables], repr(module))
        for path, module in model.named_modules()
    }


def kept(mesh: zs.Mesh, settings: dict[str, Any]) -> dict[str, Any]:
    """The user's hooks and groups on every rank, after a plan without stages or splits."""
    model, seen = build(), Counter[str]()
    hooked = model.blocks[3].up
    hooked.weight.register_hook(lambda gradient: seen.update(["gradient"]))
    hooked.register_forward_hook(lambda module, args, output: seen.update(["forward"]))
    before, between = described(model), []

    def add(model: nn.Module) -> None:
        between.append(described(model))
        model.blocks.append(Block())  # type: ignore[union-attr, operator]

    engine = zs.Engine(model, OPTIMIZERS["sgd"], zs.Plan(**settings), mesh=mesh, example=batch(0)[:2])
    forward, optimizer = weakref.ref(engine._forward), engine.optimizer
    engine.train_step(batch(0))
    engine.rebuild(
        lambda model: [{"params": model.blocks[4].parameters(), "lr": 0.3}], change=add, plan=zs.Plan(zero=1)
    )
    seen.clear()
    engine.train_step(batch(1))
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    return {
        "seen": seen,
        "rates": rates,
        "changed": [path for path, found in between[0].items() if found != before[path]],
        "alive": forward() is not None,
        "other": engine.optimizer is not optimizer,
    }


@pytest.mark.parametrize("plan", ["stages", "tensor", "vocabulary", "zb-h1"])
def test_hooks_and_groups_stay_and_nothing_else(pool: Pool, plan: str) -> None:
    for found in pool.run(kept, 2, PLANS[plan][1]):
        assert found["seen"] == {"gradient": 1, "forward": 1}
        assert found["rates"] == [0.1, 0.3]
        assert found["changed"] == [] and not found["alive"] and not found["other"]


def mistakes(mesh: zs.Mesh, settings: dict[str, Any]) -> list[str]:
    """Texts of errors, after each of which the engine goes on."""
    engine, texts = made(mesh, settings, "adamw"), []
    model: Any = engine.model
    engine.train_step(batch(0))

    def refused(change: Any, back: Any) -> None:
        change()
        with pytest.raises(PlanError) as caught:
            engine.rebuild()
        texts.append(str(caught.value))
        back()
        engine.train_step(batch(1))

    last, head = model.blocks[3], model.head
    refused(lambda: model.blocks.append(Block()), lambda: model.blocks.__delitem__(4))
    refused(lambda: model.blocks.__delitem__(3), lambda: model.blocks.append(last))
    fresh = nn.Linear(WIDTH, VOCABULARY, bias=False)
    refused(lambda: setattr(model, "head", fresh), lambda: setattr(model, "head", head))
    forward = last.up.forward
    wraps = "forward" in vars(last.up)
    if wraps:
        refused(lambda: setattr(last.up, "forward", lambda x: forward(x)), lambda: setattr(last.up, "forward", forward))
    engine.rebuild()
    return texts


@pytest.mark.parametrize("plan", ["stages", "tensor"])
def test_mistakes_name_the_way_out(pool: Pool, plan: str) -> None:
    for texts in pool.run(mistakes, 2, PLANS[plan][1]):
        for text in texts[:3]:
            assert "rebuild(change=" in text
        assert all("del module.forward" in text for text in texts[3:])
        assert len(texts) == 3 + (plan == "tensor")


def failed_change(mesh: zs.Mesh, settings: dict[str, Any], culprit: int, lazy: bool) -> tuple[list[str], float]:
    """Texts of a change that fails on one rank, and of the engine after it; and the next engine's loss."""

    def change(model: Any) -> None:
        if mesh.rank == culprit and lazy:
            model.more = nn.LazyLinear(2)  # which no engine takes
        elif mesh.rank == culprit:
            raise ValueError("no adapters in here")

    engine, texts = made(mesh, settings, "adamw"), []
    model = engine.model
    for use in (lambda: engine.rebuild(change=change), lambda: engine.train_step(batch(0))):
        with pytest.raises((ValueError, zs.CommError, zs.ModelError, PlanError)) as caught:
            use()
        texts.append(f"{caught.type.__name__}: {caught.value}")
    vars(model)["_modules"].pop("more", None)
    again = zs.Engine(model, OPTIMIZERS["adamw"], zs.Plan(**settings), mesh=mesh, example=batch(0)[:2])
    return texts, float(again.train_step(batch(0)).loss)  # type: ignore[arg-type]


@pytest.mark.parametrize("plan, lazy", [("stages", False), ("tensor", False), ("tensor", True)])
def test_a_change_that_fails_on_one_rank_ends_all_with_its_error(pool: Pool, plan: str, lazy: bool) -> None:
    (other, loss), (own, same) = pool.run(failed_change, 2, PLANS[plan][1], 1, lazy)
    assert own[0].startswith("ModelError: " if lazy else "ValueError: no adapters in here")
    assert other[0].startswith("CommError") and "on rank 1" in other[0] and own[0] in other[0]
    assert all("retired" in texts[1] for texts in (other, own))
    assert loss == same
