"""Offloaded runs equal those in memory bit for bit, whenever copies and updates really happen."""

import errno
import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engine.models import MODELS, batch, build
from engine.plain import transport_of
from offload.offloaded import ADAMW, EXECUTORS, assert_same, executing, in_memory, once, run, take_steps
from planner.rehearsed import peak_of
from pool import Pool
from selection import by_default
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import zeroshard as zs
from zeroshard.errors import BudgetExceeded, ModelError, OffloadError, OptimizerError, PlanError
from zeroshard.memory import HostMemory
from zeroshard.memory.ledger import Category
from zeroshard.offload import tiers
from zeroshard.optim.host.adam import adam_update

WAYS: dict[str, dict[str, Any]] = {
    "optimizer": {"offload": "optimizer"},
    "stage 0": {"offload": "optimizer", "zero": 0},
    "stage 1": {"offload": "optimizer", "zero": 1},
    "stage 3": {"offload": "optimizer", "zero": 3},
    "half": {"offload": "optimizer", "offload.fraction": 0.5},
    "streamed": {"offload": "optimizer,parameters", "zero": 3},
    "all": {"offload": "optimizer,parameters,activations", "zero": 3},
    "activations": {"offload": "activations"},
    "disk": {"offload": "optimizer,parameters", "zero": 3, "offload.disk": "DISK", "offload.disk_parameters": True},
}
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16", "loss_scale.initial": 2.0**20, "loss_scale.window": 3},
    "clipped": {"clip_norm": 0.5, "precision": "bf16"},
    "four": {"microbatches": 4, "precision": "bf16", "clip_norm": 0.5},
    "local": {"microbatches": 2, "reduce_every": "step"},
}


@pytest.mark.thinned
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("way", WAYS)
def test_offloaded_equals_in_memory(way: str, executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, kind in KINDS.items():
        if name == "local" and WAYS[way].get("zero") in (0, 1):
            continue
        plan = zs.Plan.from_dict({**WAYS[way], **kind})
        with executing(executor):
            found = run(plan)
        assert_same(found, once(in_memory(plan)))


@pytest.mark.parametrize("way", by_default(["optimizer", "all"], "all"))
def test_any_model_offloaded(way: str) -> None:
    for model in MODELS:
        for kind in ("fp32", "bf16"):
            if model == "TwoDtypes" and kind == "bf16":
                continue
            plan = zs.Plan.from_dict({**WAYS[way], **KINDS[kind]})
            with executing("latest"):
                found = run(plan, model, steps=4)
            assert_same(found, run(in_memory(plan), model, steps=4))


@pytest.mark.parametrize("kind", ["sgd", "fused", "amsgrad", "adam", "groups"])
def test_any_optimizer_offloaded(kind: str) -> None:
    def groups(parameters: Any) -> torch.optim.Optimizer:
        parts = list(parameters)
        return torch.optim.AdamW([{"params": parts[::2], "lr": 1e-2}, {"params": parts[1::2], "weight_decay": 0.3}])

    optimizer: Any = {
        "sgd": partial(torch.optim.SGD, lr=5e-2, momentum=0.9),
        "fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
        "amsgrad": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
        "adam": partial(torch.optim.Adam, lr=torch.tensor(1e-2), weight_decay=0.1),
        "groups": groups,
    }[kind]
    for way in ("optimizer", "streamed"):
        for precision in ("fp32", "bf16"):
            plan = zs.Plan.from_dict({**WAYS[way], "precision": precision, "microbatches": 2})
            with executing("shuffled"):
                found = run(plan, optimizer=optimizer)
            assert_same(found, run(in_memory(plan), optimizer=optimizer))


_in_memory: dict[tuple[zs.Plan, int], Any] = {}  # of this rank, by plan and number of ranks


def offloaded_on(mesh: zs.Mesh, executor: str, plans: list[zs.Plan]) -> list[tuple[Any, Any]]:
    """Each plan with and without offload on one rank."""
    answers = []
    for plan in plans:
        with executing(executor):
            found = run(plan, mesh=mesh, steps=5)
        other = in_memory(plan)
        if (other, mesh.ranks) not in _in_memory:
            _in_memory[other, mesh.ranks] = run(other, mesh=mesh, steps=5)
        answers.append((found, _in_memory[other, mesh.ranks]))
    return answers


@pytest.mark.parametrize("job", by_default([(2, "latest"), (2, "worker"), (3, "shuffled")], (3, "shuffled")), ids=str)
def test_offloaded_equals_in_memory_on_several_ranks(pool: Pool, job: tuple[int, str]) -> None:
    ranks, executor = job
    kinds: list[dict[str, Any]] = [KINDS["bf16"], {**KINDS["four"], "microbatches": 2}]
    ways = [*WAYS.values(), {"offload": "optimizer", "transport": "network"}]
    if ranks == 3:
        kinds = kinds[:1]
    rows = [way for way in ways if way["offload"] != "activations" and way.get("zero") != 0]
    plans = [
        zs.Plan.from_dict({"transport": transport_of(way.get("zero", 2)), **way, **k})
        for way in rows
        for k in kinds
        if "offload.disk" not in way
    ]
    half = len(plans) // 2
    for part in (plans[:half], plans[half:]):
        for answers in pool.run(offloaded_on, ranks, executor, part):
            for found, wanted in answers:
                assert_same(found, wanted)


@pytest.mark.parametrize("executor", ["latest", "shuffled", "worker"])
def test_wrong_guesses_leave_no_trace(executor: str) -> None:
    spikes = (7, -9, 12, -15)  # clipped, skipped, ...
    for extra in ({"clip_norm": 50.0, "nonfinite": "skip"}, {"precision": "fp16", "loss_scale.initial": 1024.0}):
        plan = zs.Plan.from_dict({**WAYS["optimizer"], **extra})
        with executing(executor):
            guessing = zs.Engine(build("Sometimes", 0), ADAMW, plan)
            found = take_steps(guessing, 18, spikes=spikes), guessing.state_dict()
        taken, undone = guessing.speculation_counts.taken, guessing.speculation_counts.undone
        assert taken > 18 and undone >= 8
        assert_same(found, run(in_memory(plan), "Sometimes", 18, spikes=spikes))
        with executing(executor):
            sober = zs.Engine(
                build("Sometimes", 0),
                ADAMW,
                zs.Plan.from_dict({**WAYS["optimizer"], **extra, "offload.speculate": False}),
            )
            assert_same((take_steps(sober, 18, spikes=spikes), sober.state_dict()), found)
        assert (sober.speculation_counts.taken, sober.speculation_counts.undone) == (0, 0)


@pytest.mark.parametrize("executor", by_default(["latest", "shuffled", "worker"], "shuffled"))
def test_weights_that_are_made_before_the_states_are_the_same(executor: str, tmp_path: Path) -> None:
    spikes = (7, -9, 12, -15)
    cases: list[dict[str, Any]] = [
        {"precision": "bf16", "clip_norm": 50.0, "nonfinite": "skip"},
        {"precision": "fp16", "loss_scale.initial": 1024.0},
        {"precision": "bf16", "clip_norm": 50.0, "nonfinite": "skip", "offload": "optimizer,parameters", "zero": 3},
        {"precision": "bf16", "clip_norm": 50.0, "nonfinite": "skip", "offload.moments": "8bit"},
    ]
    for number, extra in enumerate(cases):
        plan = zs.Plan.from_dict({**WAYS["optimizer"], **extra})
        with executing(executor):
            engine = zs.Engine(build("Sometimes", 0), ADAMW, plan)
            with patch.object(tiers, "adam_update", wraps=adam_update) as updates:
                steps = take_steps(engine, 12, spikes=spikes)
                engine.save(tmp_path / f"saved {number}", wait=True)
                steps += take_steps(engine, 6, first=12, spikes=spikes)
                found = steps, engine.state_dict()
                loaded = zs.Engine(build("Sometimes", 1), ADAMW, plan)
                loaded.load(tmp_path / f"saved {number}")
                assert take_steps(loaded, 6, first=12, spikes=spikes) == steps[12:]
        alone = [call for call in updates.call_args_list if call.args[4] is None]
        taken, undone = engine.speculation_counts.taken, engine.speculation_counts.undone
        assert len(alone) >= taken > 18 and undone >= 4, (extra, len(alone), taken, undone)
        if "offload.moments" not in extra:
            assert_same(found, run(in_memory(plan), "Sometimes", 18, spikes=spikes))
        sober = zs.Plan.from_dict({**WAYS["optimizer"], **extra, "offload.speculate": False})
        assert_same(found, run(sober, "Sometimes", 18, spikes=spikes))


def test_guessing_stops_while_most_steps_are_clipped() -> None:
    engine = zs.Engine(build("Plain", 0), ADAMW, zs.Plan(offload="optimizer", clip_norm=1e-3))
    take_steps(engine, 12)
    units = len(engine.units)
    assert (engine.speculation_counts.taken, engine.speculation_counts.undone) == (0, 5 * units)  # in steps 2 to 6


@pytest.mark.parametrize("times, guesses", [(1, False), (9, True)])
def test_guesses_take_a_part_of_what_the_states_leave(times: int, guesses: bool) -> None:
    plan = zs.Plan(offload="optimizer")
    states = zs.Engine(build("Plain", 0), ADAMW, plan).ledger.total("host")
    with patch.object(HostMemory, "room", lambda memory, ranks: times * states):
        engine = zs.Engine(build("Plain", 0), ADAMW, plan)
    take_steps(engine, 3)
    assert (engine.speculation_counts.taken > 0) is guesses and engine.speculation_counts.undone == 0


def stale(norms: list[float], warmup: int, clip: float | None, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """The delayed update by hand: the model computes with weights that lack the last gradient."""
    model, ahead = build("Plain", 0), build("Plain", 0)
    optimizer = ADAMW(ahead.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses, pending = [], False
    for step in range(steps):
        model.zero_grad()
        loss = model(batch(step, 0, 1, 8), step)
        loss.backward()
        losses.append(loss.item())
        if pending:
            model.load_state_dict(ahead.state_dict())
        factor = 1.0 if clip is None else min(1.0, clip / (norms[step] + 1e-6))
        for mine, theirs in zip(ahead.parameters(), model.parameters(), strict=True):
            assert theirs.grad is not None
            mine.grad = theirs.grad * factor if factor != 1.0 else theirs.grad.clone()
        optimizer.step()
        schedule.step()
        pending = step >= warmup
        if not pending:
            model.load_state_dict(ahead.state_dict())
    return losses, dict(ahead.state_dict())


@pytest.mark.thinned
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("way", ["optimizer", "stage 3", "streamed", "half"])
def test_a_delayed_update_equals_the_stale_reference(way: str, executor: str, tmp_path: Path) -> None:
    for clip, disk in ((None, None), (0.5, None), (None, str(tmp_path))):
        extra: dict[str, Any] = {} if way == "half" else {"offload.delayed_update": True, "offload.delayed_warmup": 3}
        plan = zs.Plan.from_dict({**WAYS[way], **extra, "clip_norm": clip, "offload.disk": disk})
        with executing(executor):
            engine = zs.Engine(build("Plain", 0), ADAMW, plan)
            schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 1 / (1 + step))
            found = []
            for step in range(8):
                result = engine.train_step((batch(step, 0, 1, 8), step))
                assert result.loss is not None
                found.append((result.loss.item(), result.grad_norm))
                schedule.step()
            weights = engine.state_dict()
        norms = [norm for _, norm in found]
        losses, expected = stale(norms, 3 if extra else 8, clip, 8)
        assert [loss for loss, _ in found] == losses
        for name, weight in expected.items():
            assert torch.equal(weights[name], weight), name


def test_evaluation_uses_the_latest_weights() -> None:
    plan = zs.Plan(offload=zs.Offload("optimizer", delayed_update=True, delayed_warmup=0))
    with executing("latest"):
        engine = zs.Engine(build("Plain", 0), ADAMW, plan)
        plain = zs.Engine(build("Plain", 0), ADAMW, zs.Plan())
        for each in (engine, plain):
            take_steps(each, 1)
        with torch.no_grad():
            inputs = batch(3, 0, 1, 8), 3
            assert torch.equal(engine(*inputs), plain(*inputs))


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("disk", [False, True])
def test_checkpoints_in_the_midst_of_a_pending_update(moments: Any, disk: bool, tmp_path: Path) -> None:
    def make(**extra: Any) -> zs.Engine:
        return zs.Engine(build("Sometimes", 0), ADAMW, zs.Plan.from_dict(extra))

    below: dict[str, Any] = {"offload": "optimizer", "offload.moments": moments, "offload.delayed_update": True,
                             "offload.delayed_warmup": 1, "precision": "bf16"}  # fmt: skip
    if disk:
        below["offload.disk"] = str(tmp_path / "states")
    with executing("shuffled"):
        first = make(**below)
        take_steps(first, 5)
        first.save(tmp_path / "a", wait=True)
        rest = take_steps(first, 5, 5), first.state_dict()
        second = make(**below)
        second.load(tmp_path / "a")
        assert_same((take_steps(second, 5, 5), second.state_dict()), rest)
    memory = make(precision="bf16")  # another plan takes it too, and gives it back
    memory.load(tmp_path / "a")
    memory.save(tmp_path / "b", wait=True)
    with executing("latest"):
        third = make(**below)
        third.load(tmp_path / "b")
        saving = third.save(tmp_path / "c")
        assert_same((take_steps(third, 5, 5), third.state_dict()), rest)
        saving.wait()
    if moments == "fp32":
        plain = make(**{**below, "offload.delayed_update": False, "offload.delayed_warmup": 40})
        plain.load(tmp_path / "a")
        again = make(precision="bf16")
        again.load(tmp_path / "c")
        assert_same((take_steps(plain, 4, 5), plain.state_dict()), (take_steps(again, 4, 5), again.state_dict()))


def test_moments_in_fewer_bits_learn_nearly_the_same() -> None:
    exact = run(zs.Plan(offload="optimizer"), steps=12)[0]
    for moments in ("bf16", "8bit"):
        rounded = run(zs.Plan(offload=zs.Offload("optimizer", moments=moments)), steps=12)[0]
        assert rounded != exact
        for (found, _), (wanted, _) in zip(rounded, exact, strict=True):
            assert found == pytest.approx(wanted, rel=0.02)


def test_own_loop_accumulates_and_gathers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def go(plan: zs.Plan) -> Any:
        engine = zs.Engine(build("Plain", 0), ADAMW, plan)
        norms = []
        for step in range(4):
            for number in range(step + 1):  # another number of backwards in every step
                engine.backward(engine(batch(10 * step + number, 0, 1, 4), step))
            norms.append((0.0, repr(engine.clip_grad_norm(0.7))))
            engine.step()
            with engine.gathered():
                engine.model.head.weight.data[0] = step
        return norms, engine.state_dict()

    for way in ("optimizer", "half", "streamed", "all", "disk"):
        for precision in ("fp32", "bf16"):
            plan = zs.Plan.from_dict({**WAYS[way], "precision": precision})
            with executing("shuffled"):
                found = go(plan)
            assert_same(found, go(in_memory(plan)))


@pytest.mark.parametrize(
    "setting", [{"offload.moments": "8bit"}, {"offload.delayed_update": True}, {"offload.disk": "states"}], ids=str
)
def test_what_the_host_adam_alone_can_do_is_refused_for_fp64(
    setting: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (name,) = setting
    message = rf"{name}=.* is for the host's own Adam.*'blocks.1.* is torch.float64. Convert .* or leave"
    with pytest.raises(ModelError, match=message):
        zs.Engine(build("TwoDtypes", 0), ADAMW, zs.Plan.from_dict({"offload": "optimizer", **setting}))


class Deep(torch.nn.Module):
    """So many equal blocks, wider than anything else."""

    def __init__(self, depth: int, width: int = 64) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, width)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(depth)])

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return h.square().mean()


def test_the_device_holds_what_the_formula_says() -> None:
    def device(depth: int, **extra: Any) -> tuple[zs.Engine, int]:
        engine = zs.Engine(Deep(depth), ADAMW, zs.Plan.from_dict(extra))
        tokens = torch.randint(0, 16, (2, 4), generator=torch.Generator().manual_seed(1))
        for _ in range(3):
            engine.train_step(tokens)
        engine.ledger.reset_peaks()
        engine.train_step(tokens)
        return engine, sum(engine.ledger.account(category).peak for category in Category)

    psi = [sum(p.numel() for p in Deep(depth).parameters()) for depth in (4, 16, 64)]
    peaks = [device(depth, offload="optimizer", precision="bf16") for depth in (4, 16, 64)]
    buffers: list[int] = []
    for (engine, peak), numel in zip(peaks, psi, strict=True):
        states = engine.ledger.snapshot()
        assert states["parameters"] == 2 * numel
        assert states["gradients"] == states["master weights"] == states["optimizer states"] == 0
        buffers.append(peak - 2 * numel)
        rows = engine.traffic()
        assert rows["gradients down"].measured_bytes + rows["parameters up"].measured_bytes == 4 * numel
    assert len(set(buffers)) == 1 and buffers[0] <= 4 * 2 * 64 * 65  # some units' gradients on their way
    constant = [device(depth, offload="optimizer,parameters,activations", zero=3)[1] for depth in (4, 16, 64)]
    assert constant[0] == constant[1] == constant[2]


def fresh(depth: int) -> Deep:
    """A model without memory, whose weights are keyed by name."""
    with torch.device("meta"):
        return Deep(depth)


@pytest.mark.parametrize(
    "times, extra", [(4, {"offload": "optimizer"}), (10, {"offload": "optimizer,parameters,activations", "zero": 3})]
)
def test_a_model_of_several_times_the_budget_trains(times: int, extra: dict[str, Any]) -> None:
    numel = sum(p.numel() for p in fresh(96).parameters())
    budget = 16 * numel // times
    tokens = torch.randint(0, 16, (2, 4), generator=torch.Generator().manual_seed(1))

    def train(plan: zs.Plan) -> Any:
        engine = zs.Engine(fresh(96), ADAMW, plan)
        found = [(float(r.loss), repr(r.grad_norm)) for r in (engine.train_step(tokens) for _ in range(3))]
        engine.flush()
        return engine, found

    reference, wanted = train(zs.Plan(precision="bf16"))
    expected = reference.state_dict()
    del reference
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        engine, found = train(zs.Plan.from_dict({"precision": "bf16", "device_memory": budget, **extra}))
    assert peak_of(watched) <= budget  # all of torch's allocations, temporaries too
    assert_same((found, engine.state_dict()), (wanted, expected))
    with pytest.raises(BudgetExceeded, match=r"on the device|the weights take"):
        train(zs.Plan(precision="bf16", device_memory=budget))


def test_a_budget_covers_activations() -> None:
    tokens = torch.zeros(64, 16, dtype=torch.int64)
    plan = {"offload": "optimizer,parameters", "zero": 3, "device_memory": "1MiB"}
    with pytest.raises(BudgetExceeded, match="of activations on the device"):
        zs.Engine(fresh(8), ADAMW, zs.Plan.from_dict(plan)).train_step(tokens)
    plan["offload"] = "optimizer,parameters,activations"
    zs.Engine(fresh(8), ADAMW, zs.Plan.from_dict({**plan, "device_memory": "1.5MiB"})).train_step(tokens)


def test_a_budget_too_small_for_the_weights_in_use_is_refused_at_once() -> None:
    unit, root = 4 * 64 * 65, 4 * 16 * 64
    plan: dict[str, Any] = {"offload": "optimizer,parameters,activations", "zero": 3}
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(BudgetExceeded, match=f"two units at a time and the root take {2 * unit + root:,}"):
        zs.Engine(fresh(4), ADAMW, zs.Plan.from_dict({"device_memory": 2 * unit, **plan}))
    enough = 7 * unit + 2 * root  # with the gradients of three units on their way
    zs.Engine(fresh(4), ADAMW, zs.Plan.from_dict({"device_memory": enough, **plan})).train_step(tokens)


def test_a_disk_that_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = {"offload": "optimizer", "offload.disk": str(tmp_path / "states")}
    reference = zs.Engine(build("Plain", 0), ADAMW, zs.Plan())
    wanted = take_steps(reference, 4)
    engine = zs.Engine(build("Plain", 0), ADAMW, zs.Plan.from_dict(disk))
    assert take_steps(engine, 2) == wanted[:2]
    engine.save(tmp_path / "a", wait=True)
    write = os.pwritev
    calls = iter(range(1000))

    def full(*args: Any) -> int:
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args)

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OffloadError, match="earlier checkpoints are as they were"):
        take_steps(engine, 2, 2)
    monkeypatch.undo()
    again = zs.Engine(build("Plain", 0), ADAMW, zs.Plan.from_dict(disk))
    again.load(tmp_path / "a")
    assert take_steps(again, 2, 2) == wanted[2:]
    monkeypatch.setattr(os, "posix_fallocate", full)
    calls = iter([2])
    with pytest.raises(OffloadError, match="free"):
        zs.Engine(build("Plain", 0), ADAMW, zs.Plan.from_dict(disk))


def test_what_offload_cannot_do_is_refused() -> None:
    sgd = partial(torch.optim.SGD, lr=0.1)
    with pytest.raises(OptimizerError, match="neither torch"):
        zs.Engine(build("Plain", 0), sgd, zs.Plan(offload=zs.Offload("optimizer", delayed_update=True)))
    with pytest.raises(PlanError, match="zero=3"):
        zs.Plan(offload="optimizer,parameters", zero=2)
    with torch.device("meta"):
        model = Deep(2, 2**20)
    with pytest.raises(BudgetExceeded, match="host memory"):
        zs.Engine(model, ADAMW, zs.Plan(offload="optimizer,parameters", zero=3))


@pytest.mark.parametrize("way", ["optimizer", "streamed"])
def test_host_memory_does_not_grow_with_microbatches(way: str) -> None:
    held = []
    for microbatches in (2, 8):
        plan = zs.Plan.from_dict({**WAYS[way], "precision": "bf16", "microbatches": microbatches})
        engine = zs.Engine(build("Plain", 0), ADAMW, plan)
        take_steps(engine, 3)
        held.append(engine.ledger.snapshot("host"))
    assert held[0] == held[1] and held[0]["buffers"]
