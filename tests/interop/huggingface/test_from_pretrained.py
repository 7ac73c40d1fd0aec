"""Engines of pretrained models: the files' values, as transformers loads them, and the training of the plain loop."""

import shutil
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from safetensors.torch import load_file, save_file
from selection import by_default

import zeroshard as zs
from zeroshard.checkpoint import WeightFiles
from zeroshard.interop.huggingface import pretrained
from zeroshard.interop.huggingface.loading import build

transformers = pytest.importorskip("transformers")
from interop.huggingface.families import FAMILIES, batch, folder, kind_of  # noqa: E402

STEPS, RATE = 5, 1e-2
OPTIMIZER = partial(torch.optim.AdamW, lr=RATE, eps=1e-4)  # the gradient of a bias of keys is rounding alone
PLANS: dict[str, dict[str, Any]] = {
    "stage 3": {"zero": 3},
    "stage 3 over the network": {"zero": 3, "transport": "network"},
    "offload": {"zero": 3, "offload": "optimizer,parameters"},
    "stage 1": {"zero": 1},
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """transformers warns about its own deprecations and settings of small models."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _imported(mesh: zs.Mesh) -> None:
    """Import the code of the families before ranks wait for each other."""
    for family in FAMILIES:
        kind_of(family)


@pytest.fixture(scope="module")
def pool(pool: Pool) -> Pool:
    """Workers that have imported the families."""
    pool.run(_imported, 2)
    return pool


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_those_of_transformers(family: str) -> None:
    """Parameters and all buffers, those that no file holds included, bit for bit."""
    path = folder(family)
    theirs = kind_of(family).from_pretrained(path, dtype=torch.float32)
    engine = zs.from_pretrained(path, partial(torch.optim.SGD, lr=RATE))
    state = engine.state_dict()
    assert state.keys() == theirs.state_dict().keys()
    assert [name for name, value in theirs.state_dict().items() if not torch.equal(state[name], value)] == []
    buffers = dict(engine.model.named_buffers())
    assert [name for name, value in theirs.named_buffers() if not torch.equal(buffers[name], value)] == []
    assert engine.loaded is not None and not (engine.loaded.initialised or engine.loaded.unused)


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "two stages": ("gpt2", {"pipeline_parallel": 2, "zero": 0, "microbatches": 2}),
    "two stages, bf16": ("qwen2", {"pipeline_parallel": 2, "zero": 1, "microbatches": 2, "precision": "bf16"}),
    "two tensor ranks": ("llama", {"tensor_parallel": 2, "zero": 1}),
    "two expert ranks": ("qwen3-moe", {"expert_parallel": 2, "zero": 2}),
    "a disk": ("t5", {"zero": 3, "offload.parts": "optimizer,parameters", "offload.disk": "DISK"}),
    "whole on each rank, bf16": ("mixtral", {"zero": 0, "precision": "bf16"}),
}


def loaded(mesh: zs.Mesh, family: str, path: str, plan: dict[str, Any], disk: str) -> Any:
    """The weights after loading, the values that this rank updates, and the bytes that it read."""
    settings = {key: disk if value == "DISK" else value for key, value in plan.items()}
    example = batch(family, 0, 2) if "pipeline_parallel" in plan else None
    engine = zs.from_pretrained(
        path, partial(torch.optim.AdamW, lr=RATE), zs.Plan.from_dict(settings), mesh=mesh, example=example
    )
    assert engine.loaded is not None and not engine.loaded.initialised
    engine.save(Path(disk) / "step-00000001", wait=True)
    return engine.state_dict(), engine.loaded.bytes_read


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_under_every_layout(pool: Pool, layout: str, tmp_path: Path) -> None:
    """Masters have the files' values as they are; the model has them in its dtype."""
    family, plan = LAYOUTS[layout]
    wanted = kind_of(family).from_pretrained(folder(family), dtype=torch.float32).state_dict()
    runs = pool.run(loaded, 2, family, str(folder(family)), plan, str(tmp_path))
    kept = WeightFiles(tmp_path / "step-00000001", {})
    for state, _ in runs:
        assert state.keys() == wanted.keys()
        assert [
            name for name, value in wanted.items() if not torch.equal(state[name], value.to(state[name].dtype))
        ] == []
    saved = {name: kept.whole(f"weight:{name}") for name in wanted if kept.shape(f"weight:{name}") is not None}
    assert saved.keys() <= wanted.keys() and len(saved) >= len(wanted) - 3  # a tied weight is saved once
    assert all(torch.equal(values.view(wanted[name].shape), wanted[name]) for name, values in saved.items())


def loaded_from(mesh: zs.Mesh, paths: list[str]) -> Any:
    """The weights from a folder of each rank's own, and how often this rank has matched names itself."""
    calls, own = [], pretrained.renamed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "renamed", lambda *given: (calls.append(given), own(*given))[1])
        engine = zs.from_pretrained(paths[mesh.rank], OPTIMIZER, zs.Plan(zero=3), mesh=mesh)
    return engine.state_dict(), len(calls)


@pytest.mark.parametrize("family", ["bert", "mixtral"])
def test_rank_0_alone_matches_names_of_equal_files(pool: Pool, family: str, tmp_path: Path) -> None:
    """Another rank does so if its files have other names; the values are those of transformers either way."""
    wanted = kind_of(family).from_pretrained(folder(family), dtype=torch.float32).state_dict()
    old, file = tmp_path / "old", "model.safetensors"
    shutil.copytree(folder(family), old)
    renamed = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): v for name, v in load_file(old / file).items()}
    save_file(renamed, old / file)
    for other, matched in ((folder(family), [1, 0]), (old, [1, int(family == "bert")])):
        runs = pool.run(loaded_from, 2, [str(folder(family)), str(other)])
        assert [calls for _, calls in runs] == matched
        assert all(torch.equal(state[name], value) for state, _ in runs for name, value in wanted.items())


@pytest.mark.parametrize("plan", ["stage 1", "stage 3 over the network"])
def test_each_byte_is_read_once(pool: Pool, plan: str, tmp_path: Path) -> None:
    """By one of the ranks, but for rows in which a slice begins or ends."""
    size = (folder("llama") / "model.safetensors").stat().st_size
    header = 8 + int.from_bytes((folder("llama") / "model.safetensors").read_bytes()[:8], "little")
    read = sum(nbytes for _, nbytes in pool.run(loaded, 2, "llama", str(folder("llama")), PLANS[plan], str(tmp_path)))
    rows = 2 * 4 * 20 * len(ROWS)
    assert size + header <= read <= size + header + rows


ROWS = range(3)  # slices of units: of two blocks and the root


def trained(mesh: zs.Mesh, family: str, path: str, plan: dict[str, Any], steps: int) -> Any:
    """The losses of some steps on this rank's rows, and the weights after them."""
    engine = zs.from_pretrained(path, OPTIMIZER, zs.Plan.from_dict(plan), mesh=mesh)
    losses = []
    for step in range(steps):
        rows = {name: value[2 * mesh.rank : 2 * mesh.rank + 2] for name, value in batch(family, step).items()}
        result = engine.train_step(rows)
        losses.append(result.loss.item())
    return losses, engine.state_dict()


def plain(family: str, path: Path, steps: int) -> Any:
    """The losses of the plain loop, the mean over the rows of two ranks, and its weights."""
    model = kind_of(family).from_pretrained(path, dtype=torch.float32)
    model.train()
    for name, parameter in build(path, None).named_parameters():  # transformers trains Whisper's sinusoids once loaded
        model.get_parameter(name).requires_grad_(parameter.requires_grad)
    optimizer = OPTIMIZER(model.parameters())
    losses = []
    for step in range(steps):
        whole = batch(family, step)
        halves = [{name: value[rows] for name, value in whole.items()} for rows in (slice(0, 2), slice(2, 4))]
        loss = sum(model(**half).loss / 2 for half in halves)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def check_training(pool: Pool, family: str, plan: str, steps: int) -> None:
    path = folder(family)
    losses, weights = plain(family, path, steps)
    runs = pool.run(trained, 2, family, str(path), PLANS[plan], steps)
    means = [sum(both) / 2 for both in zip(*(found for found, _ in runs), strict=True)]
    assert means == pytest.approx(losses, rel=1e-5)
    for _, state in runs:
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "t5"])
@pytest.mark.parametrize("plan", PLANS)
def test_training_is_that_of_the_plain_loop(pool: Pool, family: str, plan: str) -> None:
    check_training(pool, family, plan, STEPS)


@pytest.mark.parametrize("family", by_default(FAMILIES))
@pytest.mark.parametrize("plan", ["stage 3", "offload"])
def test_every_family_trains_as_the_plain_loop(pool: Pool, family: str, plan: str) -> None:
    check_training(pool, family, plan, 20)
