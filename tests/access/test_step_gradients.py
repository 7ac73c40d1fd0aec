"""Gradients between backward and step are those of a plain loop under every plan: read, written, and their norms."""

from typing import Any

import pytest
import torch
from engine.models import OPTIMIZERS, batch, build
from jobs import error_of
from pool import Pool
from selection import by_default
from torch import Tensor, nn

import zeroshard as zs

STAGES = {"pipeline_parallel": 2, "pipeline_parallel.balance": "parameters", "microbatches": 2}
PLANS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "zero 0": (2, "Tied", {"zero": 0}),
    "zero 1": (3, "Frozen", {"zero": 1, "transport": "network"}),
    "zero 2": (2, "Tied", {"zero": 2, "microbatches": 2}),
    "zero 3": (2, "Frozen", {"zero": 3, "transport": "network"}),
    "one rank": (1, "Tied", {"zero": 2}),
    "bf16": (2, "Tied", {"zero": 3, "precision": "bf16"}),
    "groups": (4, "Plain", {"zero": 3, "shard_group": 2}),
    "offload": (2, "Tied", {"zero": 2, "offload": "optimizer"}),
    "offload all": (2, "Tied", {"zero": 3, "offload": "optimizer,parameters"}),
    "stages": (2, "TiedFive", {**STAGES, "zero": 0}),
    "stages of replicas": (4, "TiedFive", {**STAGES, "zero": 2}),
    "tensor": (2, "AttendingTied", {"tensor_parallel": 2, "zero": 0}),
    "experts": (2, "MixingTied", {"expert_parallel": 2, "zero": 3}),
}
EDITED, HALVED, ZEROED = "blocks.0.up.weight", "blocks.1.norm.weight", "blocks.1.norm.bias"
ROWS = 12
Found = dict[str, Any]


def make(mesh: zs.Mesh, name: str, plan: dict[str, Any]) -> zs.Engine:
    example = (batch(0, 0, 1, 2), 0) if "pipeline_parallel" in plan else None
    return zs.Engine(build(name), OPTIMIZERS["sgd"], zs.Plan.from_dict(plan), mesh=mesh, example=example)


def plain(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A plain model after the backward of the whole batch."""
    model = build(name)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    model(batch(0, 0, 1, ROWS), 0).backward()
    return model, optimizer


def read(mesh: zs.Mesh, name: str, plan: dict[str, Any], edited: str) -> Found:
    engine, found = make(mesh, name, plan), Found()

    def look() -> None:
        found["all"] = dict(engine.gradients())
        found["one"] = engine.gradient(edited)
        found["frozen"] = engine.gradient("embed.weight") if name == "Frozen" else None
        for by in ("parameter", "group", "module"):
            found[by] = engine.grad_norms(by)
        found["largest"] = engine.grad_norms("module", torch.inf)[""]
        edit(engine, edited)

    own = batch(0, engine.data_rank, engine.data_ranks, ROWS), 0
    engine.before_update(look)
    found["norm"] = engine.train_step(own).grad_norm
    engine.before_update(None)
    found["weights"] = engine.state_dict()
    if "pipeline_parallel" in plan:
        found["refused"] = error_of(lambda: dict(engine.gradients()))
        return found
    again = make(mesh, name, plan)
    again.backward(again(*own))
    found["by hand"] = dict(again.gradients())
    edit(again, edited)
    again.step()
    found["weights by hand"] = again.state_dict()
    return found


def edit(engine: zs.Engine, edited: str) -> None:
    """Change three gradients, in three ways."""
    for name, gradient in engine.gradients():
        if name == HALVED:
            gradient.mul_(0.5)
        elif name == ZEROED:
            gradient.zero_()
            break
    old = engine.gradient(edited)
    assert old is not None
    engine.set_gradient(edited, torch.full_like(old, 0.25) if engine.rank == 0 else None, writer=0)


@pytest.mark.parametrize(
    "plan", by_default(PLANS, "zero 0", "zero 1", "zero 3", "bf16", "offload all", "stages", "tensor")
)
def test_they_are_those_of_a_plain_loop_and_writes_reach_the_update(pool: Pool, plan: str) -> None:
    ranks, name, settings = PLANS[plan]
    model, optimizer = plain(name)
    wanted = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    bound = {"rtol": 5e-2, "atol": 5e-3} if plan == "bf16" else {"rtol": 2e-4, "atol": 1e-6}
    norms = {key: float(gradient.norm()) for key, gradient in wanted.items()}
    whole = torch.tensor(list(norms.values())).norm()
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    own = dict(model.named_parameters())
    edited = next(key for key, p in own.items() if key.startswith("blocks.0.") and p.dim() == 2)
    with torch.no_grad():
        own[edited].grad.fill_(0.25)  # type: ignore[union-attr]
        own[HALVED].grad.mul_(0.5)  # type: ignore[union-attr]
        own[ZEROED].grad.zero_()  # type: ignore[union-attr]
    norm = float(nn.utils.get_total_norm([p.grad for p in own.values() if p.grad is not None]))
    optimizer.step()
    for found in pool.run(read, ranks, name, settings, edited):
        for key in ("all", "by hand"):
            if key in found:
                assert list(found[key]) == list(wanted)
                assert all(g.dtype == torch.float32 for g in found[key].values())
                torch.testing.assert_close(found[key], wanted, **bound)  # type: ignore[arg-type]
        torch.testing.assert_close(found["one"], wanted[edited], **bound)  # type: ignore[arg-type]
        assert found["frozen"] is None
        assert found["parameter"] == pytest.approx(norms, rel=bound["rtol"], abs=bound["atol"])
        assert found["group"] == pytest.approx({0: float(whole)}, rel=bound["rtol"])
        assert found["module"][""] == pytest.approx(float(whole), rel=bound["rtol"])
        assert found["largest"] == pytest.approx(largest, rel=bound["rtol"])
        block = torch.tensor([n for key, n in norms.items() if key.startswith("blocks.1.")]).norm()
        assert found["module"]["blocks.1"] == pytest.approx(float(block), rel=bound["rtol"])
        assert found["norm"] == pytest.approx(norm, rel=bound["rtol"])
        for key in ("weights", "weights by hand"):
            for parameter, values in found.get(key, {}).items():
                torch.testing.assert_close(values.float(), model.state_dict()[parameter], **bound)  # type: ignore[arg-type]
        if "refused" in found:
            assert "engine.before_update(function)" in found["refused"]


def scaled(mesh: zs.Mesh) -> Found:
    """Under a loss scale, counts and clipping; over two backwards, with a write between."""
    engine = zs.Engine(
        build("Plain"), OPTIMIZERS["sgd"], zs.Plan(zero=2, precision="fp16", loss_scale=1024.0), mesh=mesh
    )
    tokens = batch(0, mesh.rank, mesh.ranks, ROWS)
    count = tokens[:, 1:].numel()
    found: Found = {"before": dict(engine.gradients())}
    engine.backward(engine(tokens) * count, count=count)
    found["sum"] = dict(engine.gradients())
    norm = engine.clip_grad_norm(0.1)
    found["clipped"] = engine.grad_norms("module")[""]
    found["norm"] = norm
    engine.set_gradient(EDITED, torch.full((17, 10), 0.5))
    found["set"] = engine.gradient(EDITED)
    engine.zero_grad()
    found["after"] = dict(engine.gradients())
    return found


def test_loss_scale_counts_and_clipping_are_in_them(pool: Pool) -> None:
    wanted = {key: p.grad for key, p in plain("Plain")[0].named_parameters()}
    for found in pool.run(scaled, 2):
        torch.testing.assert_close(found["sum"], wanted, rtol=5e-2, atol=2e-3)
        assert found["before"] == {} and found["after"] == {}
        assert found["clipped"] == pytest.approx(0.1, rel=1e-3) and found["norm"] > 0.11
        torch.testing.assert_close(found["set"], torch.full((17, 10), 0.5), rtol=1e-3, atol=0)


def wrong(mesh: zs.Mesh) -> dict[str, str]:
    engine = make(mesh, "Frozen", {"zero": 2})
    engine.backward(engine(batch(0, mesh.rank, mesh.ranks, ROWS), 0))

    def differ() -> None:
        for _, gradient in engine.gradients():
            gradient.fill_(float(mesh.rank))

    def outlived() -> None:
        for _ in again.gradients():
            again.step()

    def backwards() -> None:
        for _ in again.gradients():
            again.backward(again(tokens, 0))

    again, tokens = make(mesh, "Frozen", {"zero": 2}), batch(0, mesh.rank, mesh.ranks, ROWS)
    again.backward(again(tokens, 0))
    size = torch.ones(17, 10)
    return {
        "backwards": error_of(backwards),
        "outlived": error_of(outlived),
        "name": error_of(lambda: engine.gradient("blocks.0.up.wieght")),
        "frozen": error_of(lambda: engine.set_gradient("embed.weight", torch.zeros(13, 10))),
        "shape": error_of(lambda: engine.set_gradient(EDITED, torch.zeros(2))),
        "none": error_of(lambda: engine.set_gradient(EDITED, None)),
        "writer": error_of(lambda: engine.set_gradient(EDITED, size, writer=5)),
        "ranks": error_of(lambda: engine.set_gradient(EDITED, size * mesh.rank)),
        "loop": error_of(differ),
        "by": error_of(lambda: engine.grad_norms("layer")),
        "norm": error_of(lambda: engine.grad_norms(norm_type=0)),
    }


def test_what_is_wrong_is_refused_on_all_ranks(pool: Pool) -> None:
    words = {
        "name": "such as 'blocks.0.up.weight'", "frozen": "got no gradient in this step", "shape": "was given [2]",
        "none": "was given NoneType", "writer": "the ranks are 0 to 1", "ranks": "Ranks 0 and 1 wrote different values",
        "loop": "Ranks 0 and 1 wrote different values into the gradient of", "by": "'parameter', 'group', 'module'",
        "norm": "norm_type is 0", "backwards": "now it is step 0 after 2", "outlived": "now it is step 1 after 0",
    }  # fmt: skip
    for found in pool.run(wrong, 2):
        for key, said in words.items():
            assert found[key].startswith("PlanError") and said in found[key], found[key]


def one_rank_writes(mesh: zs.Mesh) -> str:
    """Rank 1 alone writes into the gradient at which all leave the loop."""
    engine = make(mesh, "Plain", {"zero": 0})
    engine.backward(engine(batch(0, mesh.rank, mesh.ranks, ROWS), 0))
    for _, gradient in engine.gradients():
        gradient.mul_(1 + mesh.rank)
        break
    return error_of(engine.step)


def test_a_write_of_one_rank_before_a_break_is_found_in_the_step(pool: Pool) -> None:
    assert all(said.startswith("CommError") for said in pool.run(one_rank_writes, 2))


def streamed(mesh: zs.Mesh) -> str:
    engine = make(mesh, "Five", {**STAGES, "pipeline_parallel.schedule": "2bw", "microbatches": 4, "zero": 0})
    return error_of(lambda: engine.before_update(lambda: None))


def test_stages_that_update_alone_are_refused(pool: Pool) -> None:
    assert all("each stage updates alone" in said for said in pool.run(streamed, 2))


def hooked(mesh: zs.Mesh, zero: int) -> list[Tensor]:
    """Gradients that are not finite are decided about after the hook."""
    engine = make(mesh, "Plain", {"zero": zero})

    def clean() -> None:
        for _, gradient in engine.gradients():
            gradient.nan_to_num_(0.0)

    engine.before_update(clean)
    engine.backward(engine(batch(0, mesh.rank, mesh.ranks, ROWS), 0))
    engine.set_gradient(EDITED, torch.full((17, 10), torch.nan))
    before = engine.gradient(EDITED)
    engine.step()
    after = engine.state_dict()[EDITED]
    assert before is not None
    return [before, after]


@pytest.mark.parametrize("zero", [0, 3])
def test_a_hook_may_make_gradients_finite(pool: Pool, zero: int) -> None:
    start = build("Plain").state_dict()[EDITED]
    for before, after in pool.run(hooked, 2, zero):
        assert before.isnan().all() and torch.equal(after, start)


def unfrozen(mesh: zs.Mesh, zero: int) -> list[dict[str, Tensor]]:
    """Gradients before and after a parameter that was frozen is trained."""
    model = build("Plain")
    model.embed.weight.requires_grad_(False)  # type: ignore[union-attr]
    engine = zs.Engine(model, OPTIMIZERS["sgd"], zs.Plan(zero=zero), mesh=mesh)
    tokens, found = batch(0, mesh.rank, mesh.ranks, ROWS), []
    for _ in range(2):
        engine.backward(engine(tokens))
        found.append(dict(engine.gradients()))
        engine.zero_grad()
        model.embed.weight.requires_grad_(True)  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("zero", [1, 3])
def test_gradients_of_parameters_that_are_trained_later(pool: Pool, zero: int) -> None:
    wanted = {key: p.grad for key, p in plain("Plain")[0].named_parameters()}
    for before, after in pool.run(unfrozen, 2, zero):
        assert "embed.weight" not in before and list(after) == list(wanted)
        torch.testing.assert_close(after, wanted, rtol=1e-4, atol=1e-6)
