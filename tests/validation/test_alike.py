"""Ranks that differ in what must be alike: an error on every rank, by field name, before a weight is wrong."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from jobs import error_of
from pool import Pool
from torch import nn

import zeroshard as zs
from zeroshard.validation import ranks as alike

WIDTH = 8


def net(width: int = WIDTH, dtype: torch.dtype = torch.float32, tied: bool = False, frozen: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, width))
    if tied:
        model[3].weight = model[2].weight
    model[2].bias.requires_grad_(not frozen)
    return model.append(nn.Flatten(0)).to(dtype)


def adam(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **{"lr": 1e-3, **settings})


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.AdamW([{"params": [first]}, {"params": others}], lr=1e-3)


# What rank 1 has where rank 0 has `net()`, `adam` and Plan(zero=1): a model, an optimizer, or fields of the plan; and
# what the error says.
DIFFERENT: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "width": ({"model": partial(net, 16)}, ("parameter '0.weight' is [16, 4] float32, on rank 0 [8, 4] float32",)),
    "dtype": ({"model": partial(net, dtype=torch.float64)}, ("parameter '0.weight'", "float64")),
    "tied": ({"model": partial(net, tied=True)}, ("'3.weight' is tied to",)),
    "frozen": ({"model": partial(net, frozen=True)}, ("parameter '2.bias' is [8] float32, frozen",)),
    "lr": ({"optimizer": partial(adam, lr=0.1)}, ("optimizer group 0: lr is 0.1, on rank 0 0.001",)),
    "betas": ({"optimizer": partial(adam, betas=(0.9, 0.95))}, ("optimizer group 0: betas is [0.9, 0.95]",)),
    "class": ({"optimizer": partial(torch.optim.SGD, lr=1e-3)}, ("the optimizer is torch.optim.sgd.SGD",)),
    "groups": ({"optimizer": two_groups}, ("optimizer group 0: parameters is 1 (",)),
    "zero": ({"zero": 2}, ("plan.zero is 2, on rank 0 1",)),
    "clip_norm": ({"clip_norm": 1.0}, ("plan.clip_norm is 1.0, on rank 0 null",)),
    "nonfinite": ({"nonfinite": "skip"}, ("plan.nonfinite is \"skip\", on rank 0 \"raise\"",)),
    "loss_scale": ({"loss_scale": 1024.0}, ("plan.loss_scale.value is 1024.0",)),
    "precision": ({"precision": "bf16"}, ("plan.precision is \"bf16\"",)),
    "pipeline_parallel": (
        {"pipeline_parallel": 2, "microbatches": 2, "pipeline_parallel.schedule": "gpipe"},
        ("plan.pipeline_parallel.stages is 2", "plan.pipeline_parallel.schedule is"),
    ),
    "several": ({"zero": 3, "seed": 7, "clip_norm": 2.0, "microbatches": 4, "nonfinite": "skip"}, ("and 1 more",)),
}  # fmt: skip


def total(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.sum()


def engine_with(mesh: zs.Mesh, **other: Any) -> zs.Engine:
    model: Callable[[], nn.Module] = other.pop("model", net)
    optimizer = other.pop("optimizer", adam)
    plan = zs.Plan.from_dict({"zero": 1, **other})
    return zs.Engine(model(), optimizer, plan, mesh=mesh, example=torch.ones(2, 4), loss=total)


def make_different(mesh: zs.Mesh) -> dict[str, str]:
    found = {}
    for name, (other, _) in DIFFERENT.items():
        found[name] = error_of(partial(engine_with, mesh, **(other if mesh.rank == 1 else {})))
    if mesh.rank == 1:
        alike.__version__ = "9.9"  # type: ignore[attr-defined]
    try:
        found["version"] = error_of(partial(engine_with, mesh))
    finally:
        alike.__version__ = zs.__version__  # type: ignore[attr-defined]
    found["a budget of its own"] = error_of(partial(engine_with, mesh, device_memory=f"{100 + mesh.rank}MiB"))
    return found


def test_engines_of_unlike_ranks_are_refused_by_field(pool: Pool) -> None:
    for found in pool.run(make_different, 2):
        assert found.pop("a budget of its own") == "nothing"
        assert "the version of zeroshard is 9.9, on rank 0 " in found.pop("version")
        for name, error in found.items():
            assert error.startswith("CommError: The ranks differ") and "on rank 1 " in error, (name, error)
            assert all(word in error for word in DIFFERENT[name][1]), (name, error)


def change_a_setting(mesh: zs.Mesh, zero: int) -> list[str]:
    engine = engine_with(mesh, zero=zero, transport="network" if zero % 2 else "auto")
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
    found = []
    for step in range(4):
        engine.backward(engine(torch.ones(2, 4)).sum())
        if step == 2 and mesh.rank == 1:
            engine.optimizer.param_groups[0]["weight_decay"] = 0.5
        found.append(error_of(engine.step))
        engine.optimizer.param_groups[0]["weight_decay"] = 0.01
        scheduler.step()
    return found


@pytest.mark.parametrize("zero", range(4))
def test_settings_that_differ_are_refused_at_the_step(pool: Pool, zero: int) -> None:
    for found in pool.run(change_a_setting, 2, zero):
        assert found[:2] == ["nothing", "nothing"]
        assert "on rank 1 optimizer group 0: weight_decay is 0.5, on rank 0 0.01" in found[2]


def save_unlike_stages(mesh: zs.Mesh, folder: str) -> tuple[str, str]:
    engine = engine_with(mesh, zero=0, pipeline_parallel=2, microbatches=2)
    engine.train_step(torch.ones(2, 4))
    engine.optimizer.param_groups[0]["lr"] = 1e-3 * (1 + mesh.rank)
    saved = error_of(lambda: engine.save(f"{folder}/unlike", wait=True))
    engine.optimizer.param_groups[0]["lr"] = 1e-3
    return saved, error_of(lambda: engine.save(f"{folder}/alike", wait=True))


def test_stages_with_unlike_settings_do_not_save(pool: Pool, tmp_path: Any) -> None:
    for unlike, same in pool.run(save_unlike_stages, 2, str(tmp_path)):
        assert "on rank 1 optimizer group 0: lr is 0.002, on rank 0 0.001" in unlike
        assert same == "nothing"


class Masked(nn.Module):
    """A loss that is not finite where all its weights are 0, and whose gradients are finite all the same."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        kept = (x.mean(1) * weight).sum()
        return kept + (weight.detach().sum().log() * 0).mul(0)  # -inf * 0 is NaN, and no parameter hangs on it


def bad_loss(mesh: zs.Mesh, settings: dict[str, Any]) -> Any:
    x, good, bad = torch.ones(2, 4), torch.ones(2), torch.zeros(2)
    model = Masked()
    engine = zs.Engine(model, adam, zs.Plan.from_dict(settings), mesh=mesh, example=(x, good))
    found = []
    for step in range(3):
        before = engine.state_dict()
        here = "pipeline_parallel" in settings or mesh.rank == mesh.ranks - 1
        batch = x, bad if step == 1 and here else good
        try:
            skipped: Any = engine.train_step(batch).skipped
        except zs.ZeroshardError as error:
            skipped = f"{type(error).__name__}: {error}"
        moved = any(not torch.equal(before[key], value) for key, value in engine.state_dict().items())
        found.append((skipped, moved))
    return found


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("nonfinite", ["raise", "skip", "ignore"])
def test_a_loss_that_is_not_finite_is_no_step(pool: Pool, zero: int, nonfinite: str) -> None:
    for found in pool.run(bad_loss, 2, {"zero": zero, "nonfinite": nonfinite}):
        assert found[0] == found[2] == (False, True)
        outcome, moved = found[1]
        assert moved == (nonfinite == "ignore")
        if nonfinite == "raise":
            assert outcome.startswith("NonFiniteError: The loss is nan on rank 1;"), outcome
        else:
            assert outcome == (nonfinite == "skip")


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_loss_of_the_last_stage_counts_for_all_stages(pool: Pool, schedule: str) -> None:
    settings = {"pipeline_parallel": 2, "zero": 0, "microbatches": 2, "pipeline_parallel.schedule": schedule}
    for nonfinite in ("raise", "skip"):
        for found in pool.run(bad_loss, 2, {**settings, "nonfinite": nonfinite}):
            assert found[0] == found[2] == (False, True)
            assert not found[1][1]
            if nonfinite == "raise":
                assert found[1][0].startswith("NonFiniteError: The loss is nan on rank 1;"), found[1][0]
