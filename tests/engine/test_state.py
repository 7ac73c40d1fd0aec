"""Saving and resuming: bitwise at the same world size, and under any other plan."""

import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import OPTIMIZERS, batch, build
from engine.plain import transport_of
from pool import Pool, WorkerError
from safetensors.torch import load_file

import zeroshard as zs
from zeroshard.checkpoint import writer
from zeroshard.memory.limits import Room
from zeroshard.platform import real

PLANS: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"zero": stage} for stage in range(4)},
    "zero1-bf16": {"zero": 1, "precision": "bf16", "clip_norm": 0.5},
    "zero3-fp16": {"zero": 3, "precision": "fp16", "loss_scale.initial": 2.0**10, "loss_scale.window": 3},
    "zero2-accumulate": {"zero": 2, "microbatches": 2, "precision": "bf16"},
}


def make(mesh: zs.Mesh, plan: dict[str, Any], name: str, optimizer: str = "adamw") -> zs.Engine:
    model = build(name, seed=mesh.rank)
    return zs.Engine(
        model,
        lambda ps: OPTIMIZERS[optimizer]([p for p in ps if p.requires_grad]),
        zs.Plan.from_dict({**plan, "transport": transport_of(plan.get("zero", 2))}),
        mesh=mesh,
    )


def steps(engine: zs.Engine, first: int, last: int, by_hand: bool = False) -> list[float]:
    losses = []
    for step in range(first, last):
        rows = batch(step, engine.mesh.rank, engine.mesh.ranks)
        if by_hand:  # two backwards a step, so 16-bit sums come to be kept in fp32
            for part in rows.chunk(2):
                loss = engine(part, step) / 2
                engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        else:
            losses.append(engine.train_step((rows, step)).loss.item())
    return losses


def save_and_resume(mesh: zs.Mesh, plan: dict[str, Any], name: str, optimizer: str, by_hand: bool, folder: str) -> Any:
    """Losses and weights of steps 5 to 9, uninterrupted and after a resume in a new engine."""
    engine = make(mesh, plan, name, optimizer)
    steps(engine, 0, 5, by_hand)
    saving = engine.save(Path(folder) / "step-5", {"seen": 5})  # while training goes on
    whole = steps(engine, 5, 10, by_hand), engine.state_dict(), engine.loss_scale, engine.steps
    saving.wait()
    again = make(mesh, plan, name, optimizer)
    assert again.load(Path(folder) / "step-5") == {"seen": 5}
    resumed = steps(again, 5, 10, by_hand), again.state_dict(), again.loss_scale, again.steps
    return whole, resumed


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("name", "optimizer", "by_hand"), [("Sometimes", "adamw", False), ("Frozen", "sgd", True)])
def test_resume_is_bitwise(
    pool: Pool, plan: str, ranks: int, name: str, optimizer: str, by_hand: bool, tmp_path: Path
) -> None:
    for (losses, weights, scale, count), resumed in pool.run(
        save_and_resume, ranks, PLANS[plan], name, optimizer, by_hand, str(tmp_path)
    ):
        assert losses == resumed[0]
        assert (scale, count) == resumed[2:]
        assert all(torch.equal(value, resumed[1][key]) for key, value in weights.items())


def save_without_room(mesh: zs.Mesh, folder: str) -> Any:
    """Whether a warning came, the bytes of copies, and the weights of the saved step and of a resumed run."""
    rooms, always = real.find_rooms, writer.ALWAYS
    engine = make(mesh, {"zero": 2}, "Tied")
    steps(engine, 0, 5)
    real.find_rooms, writer.ALWAYS = lambda: [Room(0, "a limit")], 0  # type: ignore[assignment]
    try:
        saved = {name: value.clone() for name, value in engine.state_dict().items()}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            first, second = (engine.save(Path(folder) / f"step-{n}") for n in (5, 6))
        steps(engine, 5, 8)  # while the rest is written
        first.wait(), second.wait()
    finally:
        real.find_rooms, writer.ALWAYS = rooms, always
    again = make(mesh, {"zero": 2}, "Tied")
    again.load(Path(folder) / "step-6")
    texts = [str(one.message) for one in caught if one.category is zs.errors.CheckpointWarning]
    return texts, engine.ledger.total("host"), saved, again.state_dict()


def test_a_checkpoint_without_room_for_its_copy_is_of_one_step(pool: Pool, tmp_path: Path) -> None:
    for texts, copied, saved, loaded in pool.run(save_without_room, 2, str(tmp_path)):
        (text,) = texts  # once
        assert "Host memory has no room to copy" in text and "save(wait=True)" in text
        assert copied == 0
        assert all(torch.equal(value, loaded[name]) for name, value in saved.items())


def save_only(mesh: zs.Mesh, plan: dict[str, Any], folder: str) -> list[float]:
    engine = make(mesh, plan, "Tied")
    steps(engine, 0, 5)
    engine.save(folder, wait=True)
    return steps(engine, 5, 8)


def load_only(mesh: zs.Mesh, plan: dict[str, Any], folder: str) -> list[float]:
    engine = make(mesh, plan, "Tied")
    engine.load(folder)
    return steps(engine, 5, 8)


@pytest.mark.parametrize(("before", "after"), [((2, 3), (4, 1)), ((4, 2), (1, 0)), ((1, 1), (2, 3)), ((2, 0), (2, 2))])
def test_loads_under_another_plan(pool: Pool, before: tuple[int, int], after: tuple[int, int], tmp_path: Path) -> None:
    (ranks, stage), (new_ranks, new_stage) = before, after
    expected = pool.run(save_only, ranks, {"zero": stage}, str(tmp_path / "c"))
    found = pool.run(load_only, new_ranks, {"zero": new_stage}, str(tmp_path / "c"))
    mean = torch.tensor(expected).mean(0)
    torch.testing.assert_close(torch.tensor(found).mean(0), mean, rtol=1e-5, atol=0)


def test_format_holds_logical_names_and_no_ranks(pool: Pool, tmp_path: Path) -> None:
    pool.run(save_only, 2, {"zero": 3}, str(tmp_path / "c"))
    manifest = json.loads((tmp_path / "c" / "MANIFEST.json").read_text())
    weights = build("Tied").state_dict()
    names = {name.removeprefix("weight:") for name in manifest["tensors"] if name.startswith("weight:")}
    assert names == set(weights) - {"head.weight"}
    for name in names:
        chunks = manifest["tensors"][f"weight:{name}"]["chunks"]
        covered = torch.zeros(weights[name].shape)
        for file, start, lengths, _ in chunks:
            box = [slice(low, low + length) for low, length in zip(start, lengths, strict=True)]
            covered[tuple(box)] += 1
            key = ",".join(f"{one.start}:{one.stop}" for one in box)
            assert load_file(tmp_path / "c" / file)[f"weight:{name}[{key}]"].numel() == math.prod(lengths)
        assert (covered == 1).all()
    assert sorted(p.suffix for p in (tmp_path / "c").iterdir()) == [".json", ".safetensors", ".safetensors"]


def load_error(mesh: zs.Mesh, name: str, optimizer: str, folder: str) -> None:
    make(mesh, {"zero": 2}, name, optimizer).load(folder)


def test_refuses_what_does_not_fit(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    pool.run(save_only, 1, {"zero": 2}, str(folder))
    with pytest.raises(WorkerError, match="exists already, and checkpoints are never overwritten"):
        pool.run(save_only, 1, {"zero": 2}, str(folder))
    with pytest.raises(WorkerError, match=r"another model: 'head.weight' is no such parameter there"):
        pool.run(load_error, 1, "Plain", "adamw", str(folder))
    with pytest.raises(WorkerError, match="written with AdamW in 1 parameter groups, this run has SGD"):
        pool.run(load_error, 1, "Tied", "sgd", str(folder))
    with pytest.raises(WorkerError, match="is no checkpoint: there is no such folder"):
        pool.run(load_error, 1, "Tied", "adamw", str(tmp_path / "nowhere"))
    shard = next(folder.glob("*.safetensors"))
    damaged = bytearray(shard.read_bytes())
    damaged[-3000] ^= 1
    shutil.copytree(folder, tmp_path / "d")
    (tmp_path / "d" / shard.name).write_bytes(bytes(damaged))
    with pytest.raises(WorkerError, match="is damaged in "):
        pool.run(load_error, 1, "Tied", "adamw", str(tmp_path / "d"))
