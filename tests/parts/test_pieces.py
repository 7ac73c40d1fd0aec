"""Parameters that are several pieces of a tensor, pieces that several ranks hold, and partial gradients.

The toy of `fused.py` trains like the plain model over any ranks, at every stage, with equal norms and tables that meet
their formulas; its checkpoints hold whole tensors, which any other cut reads.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from inside import parts_of
from parts.fused import COMMON, FEATURES, WIDTH, Model, cut_over, engine_of, plain, rows, run
from pool import Pool
from safetensors.torch import load_file
from selection import by_default
from torch import Tensor

import zeroshard as zs
from zeroshard.checkpoint.compare import compare
from zeroshard.checkpoint.reader import Reader
from zeroshard.cli.export import run_export
from zeroshard.parts.place import DENSE, Partial, PlaceKind
from zeroshard.verification.job import VerificationJob
from zeroshard.verification.observe import RankRecord, observe
from zeroshard.verification.run import compared

STEPS = 3
Plan = Mapping[str, Any]


def tables_of(engine: zs.Engine) -> dict[str, tuple[Any, Any]]:
    """Planned and measured, of all rows of the tables of memory and traffic that have both."""
    memory = {
        f"{row.category} {row.tier}": (row.planned_bytes + row.padding_bytes, row.measured_bytes)
        for row in engine.memory()
        if row.planned_bytes is not None
    }
    wire = {
        row.purpose: (row.planned_elements, row.measured_elements)
        for row in engine.traffic()
        if row.planned_elements is not None
    }
    return memory | wire


def train(mesh: zs.Mesh, plan: Plan, size: int, folder: str) -> tuple[list[float], dict[str, tuple[Any, Any]]]:
    engine = engine_of(mesh, plan, size, seed=mesh.rank)
    norms = run(engine, 0, STEPS)
    engine.check_replicas()
    tables = tables_of(engine)
    engine.save(f"{folder}/cut", wait=True)
    return norms, tables


def loaded(mesh: zs.Mesh, plan: Plan, size: int | None, folder: str, name: str) -> tuple[list[float], dict[str, Any]]:
    """Weights of a checkpoint under another cut, and the norms of two steps after it, which are written again."""
    engine = engine_of(mesh, plan, size, seed=5)
    engine.load(f"{folder}/{name}")
    weights = engine.state_dict()
    norms = run(engine, STEPS, STEPS + 2)
    return norms, weights


def check(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        torch.testing.assert_close(found[name], values, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


PLANS: dict[str, tuple[int, int, Plan]] = {  # ranks, and of these so many for each tensor
    **{f"zero {zero}, 4 in pairs": (4, 2, {"zero": zero, "transport": "network"}) for zero in range(4)},
    **{f"zero {zero}, 2 in pairs": (2, 2, {"zero": zero, "transport": "network"}) for zero in range(4)},
    **{f"zero {zero}, 4 at once": (4, 4, {"zero": zero}) for zero in (0, 3)},
    **{f"zero {zero}, shared memory": (4, 2, {"zero": zero, "transport": "shared"}) for zero in range(4)},
    **{f"zero {zero}, copies": (4, 2, {"zero": zero, "shard_group": 1}) for zero in (1, 2, 3)},
    **{f"zero {zero}, microbatches": (4, 2, {"zero": zero, "microbatches": 2}) for zero in (0, 2)},
    **{f"zero {zero}, offloaded": (4, 2, {"zero": zero, "offload": "optimizer"}) for zero in (1, 2, 3)},
    **{f"zero {zero}, offloaded alone": (2, 2, {"zero": zero, "offload": "optimizer"}) for zero in (1, 2, 3)},
    "zero 3, all offloaded": (4, 2, {"zero": 3, "offload": "optimizer,parameters"}),
}


SHOWN = (
    "zero 0, 4 in pairs",
    "zero 3, 4 in pairs",
    "zero 1, 2 in pairs",
    "zero 3, 4 at once",
    "zero 2, shared memory",
    "zero 3, shared memory",
    "zero 2, copies",
    "zero 0, microbatches",
    "zero 1, offloaded",
    "zero 3, offloaded alone",
    "zero 3, all offloaded",
)


@pytest.mark.parametrize("case", by_default(PLANS, *SHOWN))
def test_pieces_train_like_the_whole(pool: Pool, tmp_path: Path, case: str) -> None:
    ranks, size, plan = PLANS[case]
    wanted, norms = plain(ranks // size, STEPS, clip=0.5)
    answers = pool.run(train, ranks, {**plan, "clip_norm": 0.5}, size, str(tmp_path))
    for found, tables in answers:
        assert found == pytest.approx(norms, rel=1e-5)
        for name, (planned, measured) in tables.items():
            assert planned == measured, name
    ((_, weights),) = pool.run(loaded, 1, {}, None, str(tmp_path), "cut")
    check(weights, wanted)


SUMS = {"reduce_dtype": "fp32", "microbatches": 2}
HOST = {"offload": "optimizer"}
MIXED = [*((zero, more) for zero in range(4) for more in ({}, SUMS)), *((zero, HOST) for zero in (1, 2, 3))]


@pytest.mark.parametrize("zero, more", MIXED, ids=str)
def test_master_weights_of_pieces(pool: Pool, tmp_path: Path, zero: int, more: Plan) -> None:
    """In bf16: tables meet their formulas, and the first norm is that in fp32 but for rounding."""
    plan = {"zero": zero, "precision": "bf16", **more}
    _, norms = plain(2, 1)
    for found, tables in pool.run(train, 4, plan, 2, str(tmp_path)):
        assert found[0] == pytest.approx(norms[0], rel=0.05) and all(0 < norm < 1e6 for norm in found)
        for name, (planned, measured) in tables.items():
            assert planned == measured, name


def refused(mesh: zs.Mesh) -> str:
    with pytest.raises(zs.errors.PlanError) as found:
        engine_of(mesh, {"zero": 0, "offload": "optimizer"}, 2)
    return str(found.value)


def test_states_of_partial_parameters_are_on_one_host_each(pool: Pool) -> None:
    """One data rank, and two that hold what is partial."""
    for text in pool.run(refused, 2):
        assert text.startswith("offload='optimizer' and zero=0 do not combine on 2 ranks") and "Use zero=1" in text


CUTS: dict[str, tuple[int, int | None, Plan]] = {
    "whole": (1, None, {}),
    "whole, sliced": (3, None, {"zero": 3}),
    "in two": (2, 2, {"zero": 0}),
    "in two, sliced": (4, 2, {"zero": 3, "transport": "network"}),
    "in two, shared": (4, 2, {"zero": 1, "transport": "shared"}),
    "in three": (3, 3, {"zero": 2}),
    "in four": (4, 4, {"zero": 1, "offload": "optimizer"}),
}


def save_as(mesh: zs.Mesh, plan: Plan, size: int | None, folder: str) -> None:
    engine = engine_of(mesh, {**plan, "seed": 3}, size)
    for step in range(STEPS):  # the same batch on each data rank, so that all cuts have one state
        engine.backward(engine(rows(step, 0)))
        engine.step()
    engine.save(f"{folder}/saved", wait=True)


def go_on(mesh: zs.Mesh, plan: Plan, size: int | None, folder: str, name: str) -> tuple[list[float], dict[str, Tensor]]:
    """The norms of two steps after a load, and the weights then; and a checkpoint that is the same as the loaded."""
    engine = engine_of(mesh, plan, size, seed=9)
    engine.load(f"{folder}/saved")
    engine.check_replicas()
    engine.save(f"{folder}/{name}", wait=True)
    norms = []
    for step in range(STEPS, STEPS + 2):
        engine.backward(engine(rows(step, 0)))
        norms.append(engine.step().grad_norm)
    return norms, engine.state_dict()


@pytest.mark.parametrize("written", by_default(CUTS, "in four"))
def test_a_checkpoint_of_any_cut_loads_under_any_other(pool: Pool, tmp_path: Path, written: str) -> None:
    ranks, size, plan = CUTS[written]
    pool.run(save_as, ranks, plan, size, str(tmp_path))
    saved = Reader(tmp_path / "saved")
    assert list(saved.problems()) == []
    for name in ("weight", "exp_avg"):
        whole = saved.tensors[f"{name}:blocks.0.weight"]
        assert whole.shape == (WIDTH, 2 * FEATURES + COMMON)
        assert len(whole.chunks) <= 9 * ranks  # runs, rows and rests of three pieces
    wanted = None
    for name, (ranks, size, plan) in CUTS.items():
        for norms, weights in pool.run(go_on, ranks, plan, size, str(tmp_path), name):
            wanted = wanted or (norms, weights)
            assert norms == pytest.approx(wanted[0], rel=1e-5)
            check(weights, wanted[1])
        again = compare(saved, Reader(tmp_path / name))
        assert set(again.different) <= {"rng:torch"} and not (again.facts or again.only_a or again.only_b), again


def others(mesh: zs.Mesh, plan: Plan, size: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """1-norms and maxima of the gradients, which are limited element by element, and the weights."""
    engine = engine_of(mesh, plan, size)
    sums, most = [], []
    for step in range(STEPS):
        engine.backward(engine(rows(step, engine.data_rank)))
        engine.clip_grad_value(0.05)
        sums.append(engine.clip_grad_norm(torch.inf, 1.0))
        most.append(engine.clip_grad_norm(torch.inf, torch.inf))
        engine.step()
    return sums, most, engine.state_dict()


@pytest.mark.parametrize("zero, size", [(0, 2), (1, 2), (3, 2), (2, 4)])
def test_every_norm_counts_each_element_once(pool: Pool, zero: int, size: int) -> None:
    wanted, sums = plain(4 // size, STEPS, value=0.05, kind=1.0)
    _, most = plain(4 // size, STEPS, value=0.05, kind=torch.inf)
    for found_sums, found_most, weights in pool.run(others, 4, {"zero": zero}, size):
        assert found_sums == pytest.approx(sums, rel=1e-5) and found_most == pytest.approx(most, rel=1e-5)
        check(weights, wanted)


def materialised(mesh: zs.Mesh, plan: Plan, size: int | None) -> tuple[dict[str, Tensor], list[float]]:
    engine = engine_of(mesh, {**plan, "seed": 3}, size, meta=True)
    start = engine.state_dict()
    return start, run(engine, 0, 2)


@pytest.mark.parametrize("ranks, size, zero", [(2, 2, 0), (4, 2, 1), (4, 2, 3), (4, 4, 2)])
def test_initial_values_on_the_meta_device_are_those_of_one_process(
    pool: Pool, ranks: int, size: int, zero: int
) -> None:
    ((wanted, _),) = pool.run(materialised, 1, {}, None)
    for start, norms in pool.run(materialised, ranks, {"zero": zero}, size):
        assert start.keys() == wanted.keys() and all(torch.equal(start[name], wanted[name]) for name in wanted)
        assert all(norm > 0 for norm in norms)


def edited(mesh: zs.Mesh, plan: Plan) -> tuple[list[tuple[int, ...]], dict[str, Tensor]]:
    """Shapes inside of `gathered`, and the whole of what each rank wrote into its part."""
    engine = engine_of(mesh, plan, 2)
    with engine.gathered(), torch.no_grad():
        block = engine.model.blocks[0]
        shapes = [tuple(p.shape) for p in block.parameters()]
        block.out.fill_(mesh.rank % 2)
        block.scale.fill_(7.0)
    return shapes, engine.state_dict()


@pytest.mark.parametrize("plan", [{"zero": 1}, {"zero": 3, "offload": "optimizer,parameters"}], ids=str)
def test_a_rank_edits_its_part_and_takes_out_the_whole(pool: Pool, plan: Plan) -> None:
    for rank, (shapes, state) in enumerate(pool.run(edited, 4, plan)):
        features = [4, 3][rank % 2]
        held = 2 * features + COMMON
        assert shapes == [(WIDTH,), (WIDTH, held), (held,), (features,), (features, WIDTH)]
        assert state["blocks.0.out"].tolist() == [[0.0] * WIDTH] * 4 + [[1.0] * WIDTH] * 3
        assert state["blocks.0.scale"].tolist() == [7.0] * WIDTH


def edit_common(mesh: zs.Mesh, where: str) -> str:
    """The error of a write that differs between ranks."""
    engine = engine_of(mesh, {"zero": 1, "transport": "network"}, 2)
    block = engine.model.blocks[1]
    try:
        with engine.gathered(), torch.no_grad():
            if where == "common":
                block.bias[2 * block.features] = mesh.rank % 2
            elif where == "own":
                block.bias[0] = mesh.rank % 2
    except zs.errors.PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("where, error", [("common", "Ranks 0 and 1 wrote different values"), ("own", ""), ("", "")])
def test_a_piece_of_several_ranks_is_written_alike(pool: Pool, where: str, error: str) -> None:
    for text in pool.run(edit_common, 4, where):
        assert text.startswith(error) and bool(text) == bool(error)
        assert not error or "'blocks.1.bias'" in text


def from_files(mesh: zs.Mesh, plan: Plan, size: int, folder: str) -> dict[str, Tensor]:
    engine = engine_of(mesh, plan, size, seed=8)
    engine.load_weights(f"{folder}/exported")
    first = engine.state_dict()
    engine.load_state_dict(first if mesh.rank == 0 else None)
    assert all(torch.equal(values, first[name]) for name, values in engine.state_dict().items())
    return first


def test_an_export_has_whole_tensors_and_files_load_into_parts(pool: Pool, tmp_path: Path) -> None:
    pool.run(save_as, 4, {"zero": 2}, 2, str(tmp_path))
    run_export([str(tmp_path / "saved"), "--out", str(tmp_path / "exported")])
    ((_, wanted),) = pool.run(loaded, 1, {}, None, str(tmp_path), "saved")
    check(load_file(tmp_path / "exported" / "model.safetensors"), wanted)
    for plan, size in (({"zero": 0}, 2), ({"zero": 3, "transport": "network"}, 2), ({"zero": 1}, 4)):
        for found in pool.run(from_files, 4, plan, size, str(tmp_path)):
            assert all(torch.equal(found[name], values) for name, values in wanted.items())


def overflow(mesh: zs.Mesh) -> list[tuple[bool, float]]:
    """Steps of which the second has an infinite gradient in a piece that all ranks hold and one counts."""
    engine = engine_of(mesh, {"zero": 1, "nonfinite": "skip"}, 2)
    block, found, common = engine.model.blocks[0], [], torch.tensor([2 * engine.model.blocks[0].features])
    for step in range(3):
        hook = block.weight.register_hook(lambda g, s=step: g.index_fill(1, common, torch.inf if s == 1 else 1.0))
        engine.backward(engine(rows(step, engine.data_rank)))
        hook.remove()
        result = engine.step()
        found.append((result.skipped, result.grad_norm))
    return found


def test_an_overflow_in_a_piece_of_several_ranks_is_seen_by_all(pool: Pool) -> None:
    for found in pool.run(overflow, 4):
        assert [skipped for skipped, _ in found] == [False, True, False]
        assert found[1][1] == torch.inf > found[2][1]


def diverged(mesh: zs.Mesh, name: str, rank: int) -> str:
    """One rank's copy differs by a bit; the error of the comparison."""
    engine = engine_of(mesh, {"zero": 1, "transport": "network"}, 2)
    part = next(p for p in parts_of(engine).all for e in p.flat.index.entries if e.name == name)
    if mesh.rank == rank:
        part.weights.full[: part.flat.index.numel] += 1
    try:
        engine.check_replicas()
    except zs.errors.DivergenceError as error:
        return str(error)
    return ""


def test_copies_of_what_is_partial_are_compared_over_all_ranks(pool: Pool) -> None:
    for text in pool.run(diverged, 4, "blocks.1.scale", 1):
        assert "blocks.1.scale on rank 1, where ranks 0, 2, 3 agree" in text
    for text in pool.run(diverged, 4, "blocks.0.out", 3):
        assert "blocks.0.out, rank 1 against rank 3" in text


def observed(mesh: zs.Mesh, job: VerificationJob) -> RankRecord:
    with cut_over(2):
        return observe(mesh, job)


def unsummed(mesh: zs.Mesh, job: VerificationJob) -> RankRecord:
    """Partial gradients are not added up over the ranks that have parts of them."""

    def place_of(cut: Any) -> PlaceKind:
        return DENSE if isinstance(cut, Partial) else found(cut)

    found = PlaceKind.of
    with cut_over(2), mock.patch.object(PlaceKind, "of", place_of):
        return observe(mesh, job)


def of_step(step: int) -> Tensor:
    return rows(step, 0).repeat(2, 1)


@pytest.mark.parametrize("plan", [{"zero": 0}, {"zero": 2, "microbatches": 2}, {"zero": 3, "clip_norm": 0.1}], ids=str)
def test_a_verification_finds_nothing_in_pieces(pool: Pool, plan: Plan) -> None:
    with cut_over(2):
        job = VerificationJob(Model, zs.Plan.from_dict(plan), of_step, torch.optim.AdamW, loss_of, ranks=4)
        found = compared(job, pool.run(observed, 4, job))
        assert found.ok, str(found)
        assert any(line.what == "gradients" and line.count >= 3 * 4 * 8 for line in found.table)


def test_a_verification_finds_gradients_that_are_not_added_up(pool: Pool) -> None:
    with cut_over(2):
        job = VerificationJob(Model, zs.Plan(zero=1), of_step, torch.optim.AdamW, loss_of, ranks=4)
        first = compared(job, pool.run(unsummed, 4, job)).first
    assert first is not None and (first.what, first.tensor) == ("gradient", "blocks.1.scale"), first


def loss_of(output: Tensor, batch: Tensor) -> Tensor:
    return output
