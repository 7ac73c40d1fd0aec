"""Checkpoints of models whose layers are split: what any (tensor, stages, data, zero) saved, any other loads.

Weights come from files as transformers writes them; what is saved, loaded elsewhere, saved again and exported is the
same bit for bit. tests/checkpoint/test_reshard.py has the plans without split layers.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.faults import Tensors, content
from pool import Pool
from safetensors.torch import load_file
from selection import by_default
from split_models import training
from split_models.small_models import VOCABULARY
from split_models.training import ADAMW, between
from split_models.vocabularies import Widths
from torch import Tensor

import zeroshard as zs
from zeroshard.cli.main import main

pytest.importorskip("transformers")
ROWS = 4
STAGED = {"pipeline_parallel": 2, "microbatches": 2}
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"zero": 0}),
    "tensor 2": (2, {"tensor_parallel": 2, "tensor_parallel.sequence": False, "zero": 0}),
    "data 2, zero 3": (2, {"zero": 3}),
    "tensor 4": (4, {"tensor_parallel": 4, "zero": 1}),
    "tensor 2, data 2, zero 3": (4, {"tensor_parallel": 2, "zero": 3, "transport": "network"}),
    "tensor 2, stages 2": (4, {"tensor_parallel": 2, **STAGED, "zero": 1}),
    "stages 2, data 2, zero 2": (4, {**STAGED, "zero": 2}),
}
NAMES = list(PLANS)
FAMILIES = ("llama-1", "gpt2")  # a key head on several ranks; fused features, transposed, and a tied vocabulary


def make(mesh: zs.Mesh, family: str, plan: str) -> zs.Engine:
    settings = {"pipeline_parallel.balance": "parameters", **PLANS[plan][1]}
    made = zs.Plan.from_dict(settings if "pipeline_parallel" in settings else PLANS[plan][1])
    example = between(training.batch(family, 0, 1), 0, 1) if made.pipelined else None
    model = training.build(family, 1 + mesh.rank)
    return zs.Engine(model, ADAMW, made, mesh=mesh, example=example)


def step(engine: zs.Engine, family: str) -> float:
    own = ROWS // engine.data_ranks
    rows = between(training.batch(family, engine.steps, ROWS), engine.data_rank * own, (engine.data_rank + 1) * own)
    loss = engine.train_step(rows).loss
    assert loss is not None
    return float(loss)


def begin(mesh: zs.Mesh, family: str, names: list[str], folder: str) -> list[tuple[dict[str, Tensor], float]]:
    """For each plan: the weights read from files, and the loss of a step after a step and a checkpoint."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        for name in names:
            engine = make(mesh, family, name)
            with Widths(VOCABULARY) as whole:
                engine.load_weights(f"{folder}/{family}")
            views = {"aten.view.default"}  # of a file that is mapped
            assert whole.found <= views or engine.plan.tensor.ranks == 1, (name, whole.found)
            loaded = engine.state_dict()
            step(engine, family)
            engine.save(f"{folder}/{family} {name}", wait=True)
            seen.append((loaded if mesh.rank == 0 else {}, step(engine, family)))
    return seen


def go_on(mesh: zs.Mesh, family: str, name: str, sources: list[str], folder: str) -> list[float]:
    """Under one plan from each checkpoint: a checkpoint at once, and the loss of the next step."""
    losses = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        engine = make(mesh, family, name)
        for source in sources:
            engine.load(f"{folder}/{family} {source}")
            engine.save(f"{folder}/{family} {source} again {name}", wait=True)
            losses.append(step(engine, family))
    return losses


Saved = tuple[str, Path, dict[str, float]]


@pytest.fixture(scope="module", params=by_default(FAMILIES, "llama-1"))
def saved(request: pytest.FixtureRequest, pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A family, its checkpoints of every plan, and the losses of the steps behind them."""
    family, folder = request.param, tmp_path_factory.mktemp("saved")
    model: Any = training.build(family, 0)
    model.save_pretrained(folder / family)
    losses: dict[str, float] = {}
    for ranks in (1, 2, 4):
        names = [name for name in NAMES if PLANS[name][0] == ranks]
        everyone = pool.run(begin, ranks, family, names, str(folder))
        for plan, answers in zip(names, zip(*everyone, strict=True), strict=True):
            for name, values in model.state_dict().items():
                assert torch.equal(answers[0][0][name], values), (family, plan, name)
            losses[plan] = sum(loss for _, loss in answers) / ranks
    return family, folder, losses


def comparable(path: Path) -> Tensors:
    """The tensors of a checkpoint but for random numbers, which belong to a rank."""
    return {name: parts[:1] for name, parts in content(path).items() if not name.startswith("rng:")}


def sources_of(name: str) -> list[str]:
    """The plans whose checkpoints a plan loads: itself, and two others."""
    at = NAMES.index(name)
    return [NAMES[(at + k) % len(NAMES)] for k in (0, 1, 3)]


@pytest.mark.parametrize("name", by_default(NAMES, "one rank", "tensor 2", "tensor 4", "tensor 2, stages 2"))
def test_any_plan_loads_what_any_other_saved(pool: Pool, saved: Saved, name: str) -> None:
    family, folder, expected = saved
    ranks, sources = PLANS[name][0], sources_of(name)
    everyone = pool.run(go_on, ranks, family, name, sources, str(folder))
    for source, losses in zip(sources, zip(*everyone, strict=True), strict=True):
        assert comparable(folder / f"{family} {source} again {name}") == comparable(folder / f"{family} {source}"), (
            source
        )
        assert sum(losses) / ranks == pytest.approx(expected[source], rel=1e-5), source


def test_exports_are_the_same_under_every_plan(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, folder, _ = saved
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        weights = {key.removeprefix("weight:"): parts for key, parts in comparable(folder / f"{family} {name}").items()}
        main(["export", str(folder / f"{family} {name}"), "--out", name])
        exported = load_file(tmp_path / name / "model.safetensors")
        model: Any = training.build(family, 2)
        missing, unexpected = model.load_state_dict(exported, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}
        for key, values in exported.items():
            shape, dtype, raw = weights[key][0]
            assert (tuple(values.shape), values.dtype) == (shape, dtype)
            assert torch.equal(values, torch.frombuffer(bytearray(raw), dtype=dtype).view(shape)), (name, key)
