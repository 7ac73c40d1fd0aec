"""Plan.auto: from a module, a batch and an optimizer to a plan; and one search for all ranks of a job."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.comm.mesh import Mesh
from zeroshard.doctor.hardware import Device, Link, Machines
from zeroshard.errors import BatchError, DataError, ModelError, PlanError
from zeroshard.planner.predict import single_stage
from zeroshard.planner.predict.torch_internals import fakes, is_fake
from zeroshard.planner.search.auto import on_rank_zero, task_of
from zeroshard.planner.search.this_machine import local_machines, nearest_preset

WIDTH = 256
PSI = 2 * WIDTH * WIDTH  # parameters
ADAM = partial(torch.optim.AdamW, fused=True)
HERE = Machines(Device("a CPU", "cpu", 2**30, {"fp32": 1e10}, 1e10, 1e-6), 2, 2, Link(1e9), Link(1e9))


class Net(nn.Module):
    """Two layers with a tie, a buffer, and a tensor that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.again = self.second
        self.register_buffer("scale", torch.ones(WIDTH))
        self.plain = torch.ones(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        loss: torch.Tensor = self.again(self.first(x) * self.scale * self.plain).square().mean()
        return loss


@pytest.fixture(autouse=True)
def _answers_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def batch(rows: int = 1) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(rows * WIDTH, dtype=torch.float32).view(rows, WIDTH)}


def test_quantised_weights_are_refused_with_the_way_out() -> None:
    model = Net()
    model.first.weight = nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(PlanError, match=r"first\.weight is quantised \(torch\.uint8\).*--adapters qlora"):
        zs.Plan.auto(model, batch(), optimizer=ADAM, machines=HERE)


def test_the_plan_fits_and_the_model_stays_as_it_was() -> None:
    """Adam's states take 16 bytes per parameter, all of the limit; halves of them leave room (ZeRO, section 3.1)."""
    model = Net()
    before = {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()}
    state, heard = torch.get_rng_state(), list[str]()
    limit = 16 * PSI
    base = zs.Plan(clip_norm=0.5, device_memory=limit)
    plan = zs.Plan.auto(model, batch(), optimizer=ADAM, machines=HERE, base=base, say=heard.append)
    assert (plan.clip_norm, plan.device_memory, plan.transport) == (0.5, limit, "auto")
    assert plan.zero == 1 and plan.pipeline.stages == 1  # of the three that are as fast, the one that needs least
    assert any(line.startswith("Memory: ") for line in heard)
    assert any(line.startswith("Refused: zero 0, fp32") for line in heard)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert value.data_ptr() == before[name][0] and torch.equal(value, before[name][1])
    with pytest.raises(PlanError, match=r"None of \d+ plans fits 2 x a CPU.* zero 3, fp32.*: .*(would|works)"):
        zs.Plan.auto(model, batch(), optimizer=ADAM, machines=HERE, base=zs.Plan(device_memory=PSI))


def test_the_same_question_is_rehearsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[zs.Plan] = []
    rehearse = single_stage.rehearse
    monkeypatch.setattr(single_stage, "rehearse", lambda *given: asked.append(given[1]) or rehearse(*given))
    words: dict[str, Any] = {"optimizer": ADAM, "machines": replace(HERE, count=1, per_node=1)}
    heard: list[str] = []
    first = zs.Plan.auto(Net(), batch(), **words)
    many = len(asked)
    assert zs.Plan.auto(Net(), batch(), **words, say=heard.append) == first and len(asked) == many > 0
    assert any("in an earlier search" in line for line in heard)
    for changed in ({"fresh": True}, {"base": zs.Plan(clip_norm=0.5)}, {"optimizer": torch.optim.SGD}):
        before = len(asked)
        zs.Plan.auto(Net(), batch(), **words | changed)
        assert len(asked) > before


def test_the_task_is_that_of_the_model_without_its_memory() -> None:
    model = Net()
    model.second.weight.requires_grad_(False)
    given = torch.optim.SGD([{"params": [model.first.weight], "weight_decay": 0.5}, {"params": [model.second.weight]}])
    task = task_of(model, (batch(3)["x"], "word", torch.zeros(3, 7, dtype=torch.long)), given, ranks=4)
    assert (task.rows, task.sequence, task.name, task.whole_model) == (12, 7, "Net", True)
    with fakes():
        hollow = task.build()
        optimizer = task.optimizer_of(hollow)
        rows, word, _ = task.batch(5)
    assert all(is_fake(t) for t in (*hollow.parameters(), *hollow.buffers(), hollow.plain, rows))
    assert hollow.again is hollow.second and not hollow.second.weight.requires_grad
    assert {n: p.shape for n, p in hollow.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.5, 0]
    assert optimizer.param_groups[0]["params"][0] is hollow.first.weight
    assert (tuple(rows.shape), word) == ((5, WIDTH), "word")
    assert torch.equal(task.batch(5)[0], batch(3)["x"][[0, 1, 2, 0, 1]])  # outside of fake tensors, values too


@pytest.mark.parametrize(
    "given, error, match",
    [
        ({"base": zs.Plan(zero=3)}, PlanError, "zero is 3, and the search for a plan chooses it; leave zero out"),
        ({"base": zs.Plan(microbatches=2)}, PlanError, "microbatches is 2"),
        ({"ranks": 3}, PlanError, "ranks is 3 and machines have 2 devices"),
        ({"model": len}, PlanError, "The model is a builtin_function_or_method"),
        ({"model": Net().requires_grad_(False)}, ModelError, "Net has no parameter to train; set requires_grad"),
        ({"model": nn.BatchNorm1d(3, affine=False)}, ModelError, "BatchNorm1d has no parameter to train"),
        (
            {"batch": {"y": torch.zeros(2, WIDTH)}},
            PlanError,
            r"No plan trains this model, of \d+ .*tried\. The batch is a mapping with the keys y, and the forward",
        ),
        (
            {"batch": {"x": torch.zeros(2, 3)}},
            ModelError,
            r"a step of Net failed .*RuntimeError: .*; else mend the model",
        ),
        (
            {"model": nn.Linear(WIDTH, 4), "batch": batch()["x"]},
            PlanError,
            r"No plan trains this model, of \d+ .*tried\. The model returned a Tensor of .* without a scalar loss",
        ),
        ({"optimizer": 1e-3}, PlanError, "The optimizer is 0.001; give a torch.optim class"),
        ({"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())}, PlanError, "not the model's; make it from"),
        ({"batch": {"x": torch.zeros(())}}, BatchError, r"first dimensions \[0\]"),
        ({"batch": (torch.zeros(2), torch.zeros(3))}, BatchError, r"first dimensions \[2, 3\]"),
        ({"batch": "text"}, BatchError, r"first dimensions \[\]"),
    ],
)
def test_what_cannot_be_planned(given: dict[str, Any], error: type[Exception], match: str) -> None:
    words: dict[str, Any] = {"model": Net(), "batch": batch(), "optimizer": torch.optim.AdamW, "machines": HERE}
    with pytest.raises(error, match=match):
        zs.Plan.auto(**words | given)


@pytest.mark.parametrize(
    "name, gib, known",
    [
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100-80"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "A100-40-PCIe"),
        ("NVIDIA A100 80GB PCIe", 79.1, "A100-80-PCIe"),
        ("NVIDIA H100 PCIe", 79.1, "H100-PCIe"),
        ("AMD Instinct MI300X OAM", 191.9, "MI300X"),
        ("NVIDIA B300 SXM6 AC", 267.9, "B300"),
        ("Tesla V100-SXM2-16GB", 15.8, "V100-16"),
        ("Tesla V100-SXM2-32GB", 31.7, "V100-32"),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100-80"),
        ("NVIDIA H200", 139.7, "H200"),
        ("NVIDIA GeForce RTX 4090", 23.5, "RTX 4090"),
        ("Tesla T4", 14.6, None),
    ],
)
def test_a_gpu_is_known_by_the_name_that_its_driver_says(name: str, gib: float, known: str | None) -> None:
    assert nearest_preset(name, int(gib * 2**30)) == known


def test_a_machine_that_nobody_measured_has_assumed_rates_and_its_own_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machines = local_machines(4, "cpu")
    assert (machines.count, machines.nodes, machines.device.kind) == (4, 1, "cpu")
    assert "assumed" in machines.device.source
    assert machines.host_memory is not None and 4 * machines.device.memory_bytes <= machines.host_memory + 2**28
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert local_machines(4, "cpu").nodes == 2
    (tmp_path / "zeroshard").mkdir()
    (tmp_path / "zeroshard" / "machine.json").write_text("{}")
    with pytest.raises(DataError, match="zeroshard doctor"):
        local_machines(2, "cpu")


def speak(mesh: Mesh, fails: bool) -> tuple[Any, list[str]]:
    heard: list[str] = []

    def work(say: Any) -> list[int]:
        assert mesh.rank == 0
        for number in range(3):
            say(f"look {number}")
        if fails:
            raise ModelError("There is no such model; name another.")
        return [mesh.rank, 7]

    try:
        return on_rank_zero(mesh, work, "planning", heard.append), heard
    except ModelError as error:
        return str(error), heard


@pytest.mark.parametrize("fails, answer", [(False, [0, 7]), (True, "There is no such model; name another.")])
def test_rank_zero_plans_for_all(pool: Any, fails: bool, answer: Any) -> None:
    looked = [f"look {number}" for number in range(3)]
    assert pool.run(speak, 2, fails) == [(answer, looked), (answer, [])]


def test_a_function_of_the_parameters_is_an_optimizer() -> None:
    task = task_of(Net(), batch(), partial(torch.optim.SGD, lr=0.5), 1)
    assert task.optimizer_of(Net()).param_groups[0]["lr"] == 0.5
