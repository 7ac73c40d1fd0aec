"""Frozen weights in 4 and 8 bits: training equals one process, ranks hold slices, and tables count the bytes."""

import copy
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import parts_of
from pool import Pool
from quantized import qlora
from torch import nn

import zeroshard as zs
from zeroshard.quantized.weights import take_apart

pytest.importorskip("bitsandbytes")
if importlib.util.find_spec("torchao"):
    importlib.import_module("torchao.quantization")  # else while other ranks wait
STEPS = 3
KINDS = ["nf4", "nf4 of one level", "int8", "torchao"]
PLANS: dict[str, dict[str, Any]] = {
    **{f"stage {zero}": {"zero": zero, "transport": "network"} for zero in range(4)},
    "shared memory": {"zero": 3, "transport": "shared"},
    "offload": {"zero": 3, "transport": "network", "offload": "optimizer,parameters"},
    "recomputed": {"zero": 3, "transport": "network", "activations": {"recompute": "blocks"}},
    "two stages": {"microbatches": 2, "pipeline_parallel": {"stages": 2, "schedule": "1f1b", "balance": "parameters"}},
}
plain = cache(qlora.plain)


def needs(kind: str) -> None:
    if kind == "torchao":
        pytest.importorskip("torchao")


class Model(nn.Module):
    """Takes inputs alone from a batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = qlora.model(kind)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), target)


def engine_of(mesh: zs.Mesh, kind: str, plan: dict[str, Any]) -> zs.Engine:
    torch.manual_seed(mesh.rank)
    example = tuple(part[:2] for part in qlora.data(0))
    return zs.Engine(Model(kind), qlora.optimizer, zs.Plan.from_dict(plan), mesh=mesh, example=example)


def own(engine: zs.Engine, step: int) -> tuple[torch.Tensor, ...]:
    return tuple(part.chunk(engine.data_ranks)[engine.data_rank] for part in qlora.data(step))


def train(mesh: zs.Mesh, kind: str, names: list[str]) -> Any:
    """By plan: losses; bytes of parameters by the formula with padding, and by the ledger."""
    results = {}
    for name in names:
        engine = engine_of(mesh, kind, PLANS[name])
        losses = [engine.train_step(own(engine, step)).loss.item() for step in range(STEPS)]  # type: ignore[union-attr]
        rows = [row for row in engine.memory() if row.category == "parameters"]
        planned = sum(row.planned_bytes + row.padding_bytes for row in rows)  # type: ignore[operator]
        results[name] = losses, planned, sum(row.measured_bytes for row in rows)
    return results


def size_of(kind: str) -> int:
    """Bytes of the model's parameters."""
    made = Model(kind)
    take_apart(made)
    return sum(parameter.nbytes for parameter in made.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_training_equals_one_process_and_no_rank_holds_the_whole(pool: Pool, kind: str) -> None:
    needs(kind)
    names = list(PLANS) if kind == "nf4" else ["stage 0", "stage 3", "offload", "two stages"]
    by_rank = pool.run(train, 2, kind, names)
    for name in names:
        losses = torch.tensor([results[name][0] for results in by_rank]).mean(0).tolist()
        assert losses == pytest.approx(plain(kind, STEPS), rel=2e-6), name
        assert all(results[name][1] == results[name][2] for results in by_rank), name
    held = {name: [results[name][2] for results in by_rank] for name in names}
    flats = 4 * qlora.BLOCKS + 3  # each may be padded by one element
    assert all(size_of(kind) <= whole <= size_of(kind) + 4 * flats for whole in held["stage 0"])
    for name in {"stage 3", "shared memory", "recomputed"} & held.keys():
        assert max(held[name]) <= size_of(kind) / 2 + 4 * flats, name
    assert max(held["offload"]) <= size_of(kind) / 2 + 4096 * flats  # of whole pages


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_of_packages_are_the_parameters(kind: str) -> None:
    needs(kind)
    made = Model(kind)
    x, target = qlora.data(0)
    before = made(x, target).item()
    found = take_apart(made)
    assert len(found) == 2 * qlora.BLOCKS and take_apart(made) == found
    assert made(x, target).item() == before
    for weight in found:
        for end, parameter in weight.tensors.items():
            assert not parameter.requires_grad
            if end:
                parameter.data.zero_()
    assert made(x, target).item() != before


def rebuild(mesh: zs.Mesh, kind: str) -> tuple[list[float], list[float]]:
    """Losses of an engine in stages that is made anew; and of the plain model on every rank in between."""
    engine, losses, between = engine_of(mesh, kind, PLANS["two stages"]), [], []
    for step in range(STEPS):
        if step == 1:
            with torch.no_grad():
                engine.rebuild(change=lambda model: between.append(model(*qlora.data(1)).item()))
        losses.append(engine.train_step(own(engine, step)).loss.item())  # type: ignore[union-attr]
    return losses, between


@pytest.mark.parametrize("kind", KINDS)
def test_codes_of_other_stages_come_back(pool: Pool, kind: str) -> None:
    needs(kind)
    for losses, between in pool.run(rebuild, 2, kind):
        assert losses == pytest.approx(plain(kind, STEPS), rel=2e-6)
        assert between == pytest.approx(plain(kind, STEPS)[1:2], rel=2e-6)


def save(mesh: zs.Mesh, kind: str, folder: str) -> float:
    engine = engine_of(mesh, kind, PLANS["stage 3"])
    engine.train_step(own(engine, 0))
    engine.save(folder).wait()
    return engine.train_step(own(engine, 1)).loss.item()  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_hold_codes_and_statistics(pool: Pool, kind: str, tmp_path: Path) -> None:
    needs(kind)
    losses = pool.run(save, 2, kind, str(tmp_path / "saved"))
    other = Model(kind)
    for weight in take_apart(other):
        for parameter in weight.tensors.values():
            parameter.data.zero_()
    engine = zs.Engine(other, qlora.optimizer, zs.Plan())
    engine.load(tmp_path / "saved")
    result = engine.train_step(qlora.data(1))
    assert result.loss is not None and sum(losses) / 2 == pytest.approx(result.loss.item(), rel=2e-6)
    again = zs.Engine(Model(kind), qlora.optimizer, zs.Plan())
    assert again.load_state_dict(engine.state_dict()) == ([], [])


def test_mixed_precision_keeps_the_statistics() -> None:
    for kind in ("nf4 in bf16", "int8"):
        engine = zs.Engine(Model(kind), qlora.optimizer, zs.Plan(precision="bf16"))
        dtypes = {
            entry.name.rpartition("_")[2]: part.flat.dtype
            for part in parts_of(engine).all
            for entry in part.flat.index.entries
            if entry.name.startswith("layers.1.up.base.weight_")
        }
        assert set(dtypes) <= {"absmax", "offset", "SCB"} and dtypes.keys()
        assert {dtype for dtype in dtypes.values() if dtype.is_floating_point} == {torch.float32}
        result = engine.train_step(qlora.data(0))
        assert result.loss is not None and result.loss.item() == pytest.approx(plain(kind[:4].strip(), 1)[0], rel=3e-2)


def test_dtypes_of_computation_that_clash_are_named() -> None:
    with pytest.warns(
        UserWarning, match=r"'layers\.1\.up\.base\.weight' and other 4-bit weights compute in float32 .* bf"
    ):
        zs.Engine(Model("nf4"), qlora.optimizer, zs.Plan(precision="bf16"))
    for plan, rest in (({}, "float32"), ({"precision": "bf16"}, "bfloat16")):
        with pytest.raises(zs.ModelError, match=rf"computes in float16 .*torch\.{rest}, or Plan\(precision='fp16'\)"):
            zs.Engine(Model("nf4 in fp16"), qlora.optimizer, zs.Plan.from_dict(plan))
    result = zs.Engine(Model("nf4 in fp16"), qlora.optimizer, zs.Plan(precision="fp16")).train_step(qlora.data(0))
    assert result.loss is not None and result.loss.item() == pytest.approx(plain("nf4", 1)[0], rel=1e-2)


def test_codes_stored_as_floats_are_never_cast() -> None:
    made = Model("nf4 stored as bf16")
    assert made.layers[1].up.base.weight.dtype == torch.bfloat16  # type: ignore[union-attr]
    losses = [zs.Engine(each, qlora.optimizer).train_step(qlora.data(0)).loss for each in (made, Model("nf4"))]
    assert losses[0] is not None and losses[1] is not None and losses[0].item() == losses[1].item()


def test_weights_that_are_not_quantised_yet_are_named() -> None:
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for layer in (Linear4bit(8, 8), Linear8bitLt(8, 8, has_fp16_weights=False)):
        model = nn.Sequential(nn.Linear(8, 8), layer)
        with pytest.raises(
            zs.ModelError, match=r"'1\.weight' is a \d-bit weight of bitsandbytes .*model\.to\(device\)"
        ):
            zs.Engine(model, qlora.optimizer)


def test_copies_of_models_train_alike() -> None:
    made = Model("nf4")
    take_apart(made)
    engines = [zs.Engine(each, qlora.optimizer, zs.Plan()) for each in (copy.deepcopy(made), made)]
    first, second = (engine.train_step(qlora.data(0)).loss for engine in engines)
    assert first is not None and second is not None and first.item() == second.item()
