"""Bytes and elements below the device: ledger and link against ZeRO-Offload's formulas (2101.06840, section 4)."""

import mmap
from fractions import Fraction
from typing import Any

import pytest
import torch
from engine.models import batch, build
from inside import parts_of
from pool import Pool
from torch import nn

import zeroshard as zs
from zeroshard.offload.tiers import units_on_host
from zeroshard.offload.updaters import HostUpdater
from zeroshard.units import find_units

STATES = ("parameters", "gradients", "master weights", "optimizer states")
STATE = {"adamw": 8, "momentum": 4}  # bytes of states per parameter


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return build(name)


def measure(mesh: zs.Mesh, name: str, plan: dict[str, Any], maker: str, steps: int = 1) -> dict[str, Any]:
    """Train; what the engine, its ledger and its link say afterwards."""
    model = make(name)
    trainable = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(trainable, lr=1e-3) if maker == "adamw" else None
    optimizer = adam or torch.optim.SGD(trainable, lr=1e-3, momentum=0.9)
    engine = zs.Engine(model, optimizer, zs.Plan.from_dict(plan), mesh=mesh)
    for step in range(steps):
        engine.train_step((batch(step, mesh.rank, mesh.ranks), step))
    engine.flush()
    memory, traffic = engine.memory(), engine.traffic()
    parts = parts_of(engine).all
    return {
        "memory": {(r.category, r.tier): (r.planned_bytes, r.padding_bytes, r.measured_bytes) for r in memory},
        "traffic": {r.purpose: (r.planned_elements, r.measured_elements, r.measured_bytes) for r in traffic},
        "ledger": {tier: engine.ledger.model_states(tier) for tier in ("device", "host", "disk")},
        "padding": sum(p.flat.index.padding for p in parts),
        "mine": sum(
            p.flat.index.slice_numel(mesh.rank) - p.flat.index.padding_in(*p.flat.index.interval(mesh.rank))
            for p in parts
            if isinstance(p.updater, HostUpdater)
        ),
        "text": str(memory),
    }


def psi(name: str, trainable: bool = True) -> int:
    return sum(p.numel() for p in make(name).parameters() if p.requires_grad == trainable)


def psi_below(name: str, share: float) -> int:
    """Parameters of the units whose states go down."""
    units = find_units(make(name), None)
    chosen = units_on_host(units, share)
    return sum(p.numel() for unit in units if unit.number in chosen for p in unit.parameters.values())


def check_to_the_byte(answer: dict[str, Any]) -> None:
    for key, (planned, padding, measured) in answer["memory"].items():
        if planned is not None:
            assert planned + padding == measured, key
    for tier in ("device", "host", "disk"):
        rows = [row for (category, where), row in answer["memory"].items() if where == tier and category in STATES]
        assert sum(measured for _, _, measured in rows) == answer["ledger"][tier]


def planned(answer: dict[str, Any], tier: str) -> dict[str, Fraction]:
    return {name: answer["memory"].get((name, tier), (Fraction(0),))[0] for name in STATES}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_states_below_follow_the_formulas_to_the_byte(
    pool: Pool, zero: int, precision: str, share: float, ranks: int
) -> None:
    """With Φ of Ψ parameters below on N ranks: 4Φ/N + 8Φ/N bytes on the host, and 2Φ/N or 4Φ/N of gradients."""
    size, count = (2 if precision == "bf16" else 4), psi("Plain")
    below = psi_below("Plain", share)
    assert below == count if share == 1.0 else 0.5 <= below / count < 1
    plan = {"zero": zero, "precision": precision, "offload": "optimizer", "offload.fraction": share}
    for answer in pool.run(measure, ranks, "Plain", plan, "adamw"):
        check_to_the_byte(answer)
        low = Fraction(below, ranks)
        assert planned(answer, "host") == {
            "parameters": 0,
            "gradients": size * low,
            "master weights": 4 * low,
            "optimizer states": 8 * low,
        }
        above = count - below
        whole = above if zero >= 2 else count  # at stage 1 whole gradients wait on the device to be reduced
        assert planned(answer, "device") == {
            "parameters": answer["memory"]["parameters", "device"][0],
            "gradients": Fraction(size * whole, ranks if zero >= 2 else 1),
            "master weights": Fraction((4 if precision == "bf16" else 0) * above, ranks),
            "optimizer states": Fraction(8 * above, ranks),
        }
        assert ("gradients, host" in answer["text"]) and ("states, device" not in answer["text"])


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "microbatches": ({"microbatches": 2}, "adamw"),
    "microbatches, stage 1": ({"microbatches": 2, "zero": 1}, "adamw"),
    "reduced once": ({"microbatches": 2, "reduce_every": "step"}, "adamw"),
    "bf16 moments": ({"offload.moments": "bf16"}, "adamw"),
    "8-bit moments": ({"offload.moments": "8bit"}, "adamw"),
    "delayed": ({"offload.delayed_update": True, "offload.delayed_warmup": 0}, "adamw"),
    "their own optimizer": ({}, "momentum"),
    "activations": ({"offload": "optimizer,activations"}, "adamw"),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_what_changes_the_bytes_below(pool: Pool, case: str, ranks: int) -> None:
    plan, maker = CASES[case]
    full = {"zero": 2, "precision": "bf16", "offload": "optimizer", **plan}
    for answer in pool.run(measure, ranks, "Plain", full, maker):
        check_to_the_byte(answer)
        host, low = planned(answer, "host"), Fraction(psi("Plain"), ranks)
        several = "microbatches" in plan or "offload.delayed_update" in plan  # a sum in fp32; or two of 16 bits
        assert host["gradients"] == (4 if several else 2) * low
        assert host["master weights"] == 4 * low
        if full.get("offload.moments") == "8bit":  # and two fp32 scales for each 256 of them, or fewer
            assert 2 * low + 8 * low / 256 < host["optimizer states"] < 4 * low
        else:
            assert host["optimizer states"] == (4 if "offload.moments" in full else STATE[maker]) * low


@pytest.mark.parametrize("ranks", [1, 2])
def test_streamed_parameters_are_on_the_host_alone(pool: Pool, ranks: int) -> None:
    for precision in ("fp32", "bf16"):
        plan = {"zero": 3, "precision": precision, "offload": "optimizer,parameters"}
        for answer in pool.run(measure, ranks, "Frozen", plan, "adamw"):
            check_to_the_byte(answer)
            assert answer["ledger"]["device"] == 0
            size, low = (2 if precision == "bf16" else 4), Fraction(psi("Frozen"), ranks)
            frozen = Fraction(psi("Frozen", trainable=False), ranks)
            host = planned(answer, "host")
            assert frozen and host["parameters"] == size * (low + frozen)
            assert (host["master weights"], host["optimizer states"]) == (4 * low, 8 * low)


@pytest.mark.parametrize("offload", ["optimizer", "optimizer,parameters"])
def test_states_of_fp64_beside_those_of_fp32(pool: Pool, offload: str) -> None:
    """Torch makes the first below, the host's own Adam the others; both are counted."""
    for answer in pool.run(measure, 2, "TwoDtypes", {"zero": 3, "offload": offload}, "adamw", 2):
        check_to_the_byte(answer)
        double = sum(p.numel() for p in make("TwoDtypes").parameters() if p.dtype == torch.float64)
        states = Fraction(8 * (psi("TwoDtypes") + double), 2)
        assert planned(answer, "host")["optimizer states"] == states


def test_states_on_the_disk(pool: Pool, tmp_path: Any) -> None:
    plan = {"precision": "bf16", "offload": "optimizer", "offload.disk": str(tmp_path)}
    for answer in pool.run(measure, 1, "Plain", plan, "adamw"):
        check_to_the_byte(answer)
        assert planned(answer, "disk")["optimizer states"] == 8 * psi("Plain")
        assert sum(planned(answer, "host").values()) == 2 * psi("Plain")  # gradients
        assert answer["ledger"]["disk"] % mmap.PAGESIZE == 0


def test_parameters_on_the_disk(pool: Pool, tmp_path: Any) -> None:
    plan = {"zero": 3, "precision": "bf16", "offload": "optimizer,parameters", "offload.disk": str(tmp_path),
            "offload.disk_parameters": True}  # fmt: skip
    for answer in pool.run(measure, 2, "Plain", plan, "adamw"):
        check_to_the_byte(answer)
        assert planned(answer, "disk")["parameters"] == Fraction(2 * psi("Plain"), 2)
        assert "parameters" not in planned(answer, "host") or not planned(answer, "host")["parameters"]


def test_nothing_below_without_offload(pool: Pool) -> None:
    for answer in pool.run(measure, 1, "Plain", {}, "adamw"):
        assert {tier for _, tier in answer["memory"]} == {"device"}
        assert "gradients down" not in answer["traffic"]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_host_link_carries_four_bytes_per_parameter(pool: Pool, zero: int) -> None:
    """2Ψ of gradients down and 2Ψ of parameters up in a step of one rank in bf16: the least (section 3)."""
    for answer in pool.run(
        measure, 1, "Plain", {"zero": zero, "precision": "bf16", "offload": "optimizer"}, "adamw", 2
    ):
        rows = [answer["traffic"][purpose] for purpose in ("gradients down", "parameters up")]
        assert rows == [(psi("Plain"), psi("Plain"), 2 * psi("Plain"))] * 2


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("every, microbatches", [("auto", 1), ("auto", 2), ("step", 4)])
def test_elements_between_the_tiers(pool: Pool, every: str, microbatches: int, ranks: int) -> None:
    """Down once per reduction; up once per update, or under streaming twice per microbatch, frozen ones too."""
    reductions = 1 if every == "step" else microbatches
    for name, zero, offload in (("Plain", 2, "optimizer"), ("Frozen", 3, "optimizer,parameters")):
        plan = {"zero": zero, "offload": offload, "microbatches": microbatches, "reduce_every": every}
        answers = pool.run(measure, ranks, name, plan, "adamw", 2)
        assert sum(answer["mine"] for answer in answers) == psi(name)
        up = 0
        for answer in answers:
            down = answer["traffic"]["gradients down"]
            assert down[0] == down[1] == reductions * answer["mine"]
            assert answer["traffic"]["parameters up"][0] == answer["traffic"]["parameters up"][1]
            up += answer["traffic"]["parameters up"][1]
        streamed = 2 * microbatches * (psi(name) + psi(name, trainable=False))
        assert up == (streamed if "parameters" in offload else psi(name))


@pytest.mark.parametrize("narrow", [{"precision": "bf16"}, {"precision": "fp16", "loss_scale.initial": 256.0}], ids=str)
def test_new_weights_leave_in_the_memory_of_their_gradients(narrow: dict[str, Any]) -> None:
    """So that 16-bit training takes 14 bytes of the host for each parameter, where none is updated ahead."""
    plan = {"offload": "optimizer", "offload.speculate": False, **narrow}
    memory = measure(zs.Mesh(), "Tiny", plan, "adamw", 3)["memory"]
    planned, padding, measured = memory["gradients", "host"]
    assert planned + padding == measured
    assert memory["buffers", "host"][2] <= mmap.PAGESIZE
