"""What any plan saved, any other loads: equal bytes in the next checkpoint, and the same losses."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.faults import Part, Tensors, content, raw
from engine.models import OPTIMIZERS, Plain, batch
from pool import Pool
from selection import by_default

import zeroshard as zs

ROWS, BEFORE, AFTER = 12, 2, 2
ALL_PAIRS = "ZEROSHARD_ALL_PAIRS" in os.environ  # the soak; else a selection in which every pair of choices meets
STRIDE = 11
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    **{
        f"{ranks} ranks, zero {stage}, {precision}": (ranks, {"zero": stage, "precision": precision})
        for ranks in (1, 2, 3, 4)
        for stage in range(4)
        for precision in ("fp32", "bf16")
    },
    "two stages": (2, {"pipeline_parallel": 2, "microbatches": 2, "zero": 0}),
    "four chunks": (
        2,
        {
            "pipeline_parallel": 2,
            "pipeline_parallel.virtual_stages": 2,
            "pipeline_parallel.schedule": "interleaved",
            "microbatches": 2,
            "zero": 1,
        },
    ),
}
NAMES = list(PLANS)


class Mixed(Plain):
    """The head is the embedding, half a block does not train, and a block has a buffer."""

    def __init__(self) -> None:
        super().__init__(4)
        self.head.weight = self.embed.weight
        self.blocks[1].up.requires_grad_(False)
        self.blocks[1].register_buffer("offset", torch.tensor([1.5, -2.5]))


def make(mesh: zs.Mesh, plan: dict[str, Any]) -> zs.Engine:
    torch.manual_seed(0)
    example = (batch(0, 0, 1, 2), 0) if "pipeline_parallel" in plan else None
    whole = zs.Plan.from_dict({"pipeline_parallel.balance": "parameters", **plan})
    return zs.Engine(Mixed(), OPTIMIZERS["adamw"], whole, mesh=mesh, example=example)


def steps(engine: zs.Engine, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        rows = batch(engine.steps, engine.data_rank, engine.data_ranks, ROWS)
        losses.append(engine.train_step((rows, engine.steps)).loss.item())
    return losses


def begin(mesh: zs.Mesh, names: list[str], folder: str) -> list[list[float]]:
    """Under each plan a few steps and a checkpoint; the losses of the next steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        losses = []
        for name in names:
            engine = make(mesh, PLANS[name][1])
            steps(engine, BEFORE)
            for key, buffer in engine.model.named_buffers():
                if not buffer.is_meta:
                    buffer += len(key)
            engine.save(Path(folder) / name, {"from": name}, wait=True)
            losses.append(steps(engine, AFTER))
        return losses


def go_on(mesh: zs.Mesh, name: str, sources: list[str], folder: str) -> list[list[float]]:
    """Under one plan, from each of the checkpoints: a checkpoint at once, and the losses of the next steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        engine, losses = make(mesh, PLANS[name][1]), []
        for source in sources:
            assert engine.load(Path(folder) / source) == {"from": source}
            assert engine.steps == BEFORE
            engine.save(Path(folder) / f"{source} -> {name}", {"from": source}, wait=True)
            losses.append(steps(engine, AFTER))
        return losses


def mean(everyone: list[list[list[float]]]) -> torch.Tensor:
    """Over the ranks, for each checkpoint and step."""
    return torch.tensor(everyone, dtype=torch.float64).mean(0)


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of every plan, and the losses that came after it."""
    folder, losses = tmp_path_factory.mktemp("saved"), {}
    for ranks in (1, 2, 3, 4):
        names = [name for name in NAMES if PLANS[name][0] == ranks]
        for name, after in zip(names, mean(pool.run(begin, ranks, names, str(folder))), strict=True):
            losses[name] = after
    return folder, losses


def sources_of(name: str) -> list[str]:
    """The plans whose checkpoints a plan loads, itself among them."""
    number = NAMES.index(name)
    return [other for at, other in enumerate(NAMES) if ALL_PAIRS or at == number or (at + 5 * number) % STRIDE == 0]


def traits(name: str) -> Iterator[tuple[str, Any]]:
    ranks, plan = PLANS[name]
    yield from {"ranks": ranks, **plan}.items()


def test_the_selection_has_every_pair_of_choices() -> None:
    pairs = {(a, b) for name in NAMES for source in sources_of(name) for a in traits(source) for b in traits(name)}
    every = {trait for name in NAMES for trait in traits(name) if trait[0] in ("ranks", "zero", "precision", "stages")}
    assert {(a, b) for a in every for b in every} <= pairs


FROZEN = ("weight:blocks.1.up.weight", "weight:blocks.1.up.bias")


def cast(part: Part, dtype: torch.dtype) -> Part:
    """The same values in another dtype."""
    shape, kept, values = part
    return shape, dtype, raw(torch.frombuffer(bytearray(values), dtype=kept).to(dtype))


def comparable(tensors: Tensors, same: bool, bf16: bool) -> Tensors:
    """What two checkpoints must agree about.

    Under the `same` plan, all; else not random numbers, which belong to a rank, and of buffers one copy. Weights that
    do not train have no fp32 master: a plan in `bf16` keeps them in bf16.
    """
    kept = {name: parts for name, parts in tensors.items() if same or not name.startswith("rng:")}
    kept = {name: parts if same else parts[:1] for name, parts in kept.items()}
    dtype = torch.bfloat16 if bf16 else torch.float32
    return kept | {name: [cast(part, dtype) for part in kept[name]] for name in FROZEN}


SHOWN = (
    "1 ranks, zero 0, fp32",
    "2 ranks, zero 1, bf16",
    "2 ranks, zero 3, fp32",
    "3 ranks, zero 2, fp32",
    "3 ranks, zero 3, bf16",
    "4 ranks, zero 3, bf16",
    "two stages",
    "four chunks",
)


@pytest.mark.parametrize("name", by_default(NAMES, *SHOWN))
def test_any_plan_loads_what_any_other_saved(
    pool: Pool, saved: tuple[Path, dict[str, torch.Tensor]], name: str
) -> None:
    folder, expected = saved
    ranks, plan = PLANS[name]
    sources = sources_of(name)
    for source, losses in zip(sources, mean(pool.run(go_on, ranks, name, sources, str(folder))), strict=True):
        before, after = folder / source, folder / f"{source} -> {name}"
        same, bf16 = source == name, plan.get("precision") == "bf16"
        mine = content(after)
        assert {f"weight:{key}" for key in dict(Mixed().named_parameters())} <= mine.keys()
        assert mine["weight:blocks.1.up.bias"][0][1] == (torch.bfloat16 if bf16 else torch.float32)
        assert comparable(mine, same, bf16) == comparable(content(before), same, bf16), source
        facts = [json.loads((path / "MANIFEST.json").read_bytes()) for path in (before, after)]
        assert facts[0]["optimizer"] == facts[1]["optimizer"], source
        if same:
            assert torch.equal(losses, expected[source])
        elif not bf16 and PLANS[source][1].get("precision") != "bf16":
            torch.testing.assert_close(losses, expected[source], rtol=1e-5, atol=0)
