"""What can go wrong with a pipeline: plans, models and batches that do not fit, stages that disagree, stages that die.

Every case ends with an error on every rank that is left, and the error says what was found and what to do.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine.models import LONGER, MODELS, OPTIMIZERS, Block, Plain
from pipeline.pipelines import data
from pool import TIMEOUT, Pool, copies, impatient
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.comm.mesh import announce_failure, mesh_of
from zeroshard.errors import PlanError

ROOT = Path(__file__).parents[2]

PLANS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "zero-3": (
        {"pipeline_parallel": 2, "zero": 3, "pipeline_parallel.schedule": "pipedream"},
        ["zero=3 and schedule='pipedream' do not combine", "Use zero=1 or 2"],
    ),
    "fp16-pipedream": (
        {"pipeline_parallel": 2, "pipeline_parallel.schedule": "pipedream", "precision": "fp16"},
        ["schedule='pipedream'", "cannot decide together", "precision='bf16'", "schedule='1f1b'"],
    ),
    "loss-scale-2bw": (
        {"pipeline_parallel": 2, "pipeline_parallel.schedule": "2bw", "microbatches": 2, "loss_scale": 8.0},
        ["schedule='2bw'", "loss scaling", "precision='bf16'"],
    ),
    "reduce-pipedream": (
        {"pipeline_parallel": 2, "pipeline_parallel.schedule": "pipedream", "reduce_every": "microbatch"},
        ["schedule='pipedream'", "reduce_every='auto'"],
    ),
    "chunks-1f1b": (
        {"pipeline_parallel": 2, "pipeline_parallel.virtual_stages": 2},
        [
            "schedule='1f1b' has one chunk per stage and virtual_stages is 2",
            "schedule='interleaved'",
            "virtual_stages=1",
        ],
    ),
    "chunks-pipedream": (
        {"pipeline_parallel": 2, "pipeline_parallel.virtual_stages": 3, "pipeline_parallel.schedule": "pipedream"},
        ["virtual_stages is 3", "virtual_stages=1"],
    ),
    "interleaved": (
        {
            "pipeline_parallel": 3,
            "pipeline_parallel.virtual_stages": 2,
            "pipeline_parallel.schedule": "interleaved",
            "microbatches": 4,
        },
        ["groups of 3", "4 microbatches do not divide", "a multiple of 3"],
    ),
    "2bw-microbatches": (
        {"pipeline_parallel": 3, "pipeline_parallel.schedule": "2bw", "microbatches": 2},
        ["from 3 microbatches", "is 2"],
    ),
    "vertical-1f1b": (
        {"pipeline_parallel": 2, "pipeline_parallel.vertical_sync": True},
        ["vertical_sync=True", "schedule='pipedream'"],
    ),
    "vertical-uneven": (
        {
            "pipeline_parallel": 2,
            "pipeline_parallel.schedule": "pipedream",
            "pipeline_parallel.vertical_sync": True,
            "pipeline_parallel.replicas": (2, 1),
            "microbatches": 2,
        },
        ["vertical_sync=True", "equally many replicas", "leave it out"],
    ),
    "uneven-gpipe": (
        {
            "pipeline_parallel": 2,
            "pipeline_parallel.schedule": "gpipe",
            "pipeline_parallel.replicas": (2, 1),
            "microbatches": 2,
        },
        ["schedule='gpipe' needs equally many replicas", "(2, 1)", "1f1b, pipedream-flush, pipedream"],
    ),
    "uneven-microbatches": (
        {"pipeline_parallel": 2, "pipeline_parallel.replicas": (3, 1), "microbatches": 4},
        ["4 microbatches do not divide among a stage's 3 replicas", "multiple of every number in replicas=(3, 1)"],
    ),
    "pipeline_parallel.replicas": (
        {"pipeline_parallel": 3, "pipeline_parallel.replicas": (2, 1)},
        ["replicas is (2, 1)", "each of the 3 stages"],
    ),
    "split-too-short": (
        {
            "pipeline_parallel": 2,
            "pipeline_parallel.virtual_stages": 2,
            "pipeline_parallel.schedule": "interleaved",
            "microbatches": 2,
            "pipeline_parallel.split": ("blocks.1",),
        },
        ["split names 1 layers and 4 chunks", "need 3", "Name as many, or leave split out"],
    ),
    "too-few-for-2bw": (
        {"pipeline_parallel": 3, "pipeline_parallel.schedule": "2bw", "microbatches": 2},
        ["schedule='2bw'", "microbatches is 2", "Make it 3 or more"],
    ),
    "no-schedule": (
        {"pipeline_parallel": 2, "pipeline_parallel.schedule": "gdream"},
        ["schedule is 'gdream'", "'pipedream'"],
    ),
    "one-stage-pipedream": (
        {"pipeline_parallel.schedule": "pipedream"},
        ["schedule='pipedream' is for pipelines", "pipeline_parallel to 2 or more"],
    ),
    "one-stage-split": (
        {"pipeline_parallel.split": ("blocks.1",)},
        ["split=('blocks.1',) is for pipelines", "pipeline_parallel to 2 or more"],
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans_that_cannot_be(name: str) -> None:
    plan, words = PLANS[name]
    with pytest.raises(PlanError) as error:
        zs.Plan.from_dict(plan)
    for word in words:
        assert word in str(error.value)


class Idle(Plain):
    """The middle block never runs."""

    def body(self, x: Tensor, step: int) -> Tensor:
        return self.blocks[2](self.blocks[0](x))


class Cropping(Block):
    """Hands on less where the first value is large."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x[:, :3] if x.detach()[0, 0, 0] > 1e3 else x


class Ragged(Plain):
    """What the first block returns depends on the values that enter it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Cropping() for _ in range(3)])

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        x = self.body(self.embed(tokens[:, :-1]) + (1e4 if step else 0), step)
        loss: Tensor = self.head(x).square().mean()
        return loss


class Unmeasured(Plain):
    """A backward through its first block fails."""

    def body(self, x: Tensor, step: int) -> Tensor:
        x = self.blocks[0](x)
        if x.requires_grad:
            x.register_hook(self.fail)
        return self.blocks[2](self.blocks[1](x))

    def fail(self, gradient: Tensor) -> None:
        raise ValueError("a value is out of range")


class HalfMeta(Plain):
    """A block without values among blocks with values."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].to("meta")


ODD: dict[str, Callable[[], nn.Module]] = {
    **MODELS,
    **LONGER,
    **{kind.__name__: kind for kind in (Idle, Ragged, HalfMeta, Unmeasured)},
}
TWO = {"pipeline_parallel": 2, "microbatches": 2}
# Ranks, model, plan, error, and words in its message.
REFUSED: dict[str, tuple[int, str, dict[str, Any], str, list[str]]] = {
    "ranks": (
        3,
        "Plain",
        TWO,
        "PlanError",
        ["3 ranks do not divide among pipeline_parallel=2", "a multiple of 2", "replicas="],
    ),
    "pipeline_parallel.replicas": (
        4,
        "Plain",
        {**TWO, "pipeline_parallel.replicas": (2, 1)},
        "PlanError",
        ["replicas=(2, 1) needs 3 ranks and there are 4", "start as many"],
    ),
    "pipeline_parallel": (
        4,
        "Plain",
        {**TWO, "pipeline_parallel": 4},
        "PlanError",
        ["pipeline_parallel=4", "4 chunks", "3 blocks", "needs one"],
    ),
    "pipeline_parallel.virtual_stages": (
        2,
        "Plain",
        {**TWO, "pipeline_parallel.virtual_stages": 2, "pipeline_parallel.schedule": "interleaved"},
        "PlanError",
        ["pipeline_parallel=2 times virtual_stages=2 makes 4 chunks", "3 blocks", "Make their product 3 or less"],
    ),
    "split-nothing": (
        2,
        "Plain",
        {**TWO, "pipeline_parallel.split": ("block.1",)},
        "ModelError",
        ["no layer 'block.1'", "its layers are prefix, blocks.0, blocks.1, blocks.2, suffix. Name some"],
    ),
    "split-order": (
        3,
        "Plain",
        {**TWO, "pipeline_parallel": 3, "pipeline_parallel.split": ("blocks.2", "blocks.1")},
        "PlanError",
        ["split=('blocks.2', 'blocks.1')", "order of the layers", "prefix, blocks.0, blocks.1, blocks.2, suffix"],
    ),
    "split-twice": (
        3,
        "Plain",
        {**TWO, "pipeline_parallel": 3, "pipeline_parallel.split": ("blocks.1", "blocks.1")},
        "PlanError",
        ["split=('blocks.1', 'blocks.1')", "order of the layers"],
    ),
    "checkpointed": (
        2,
        "CheckpointedReentrant",
        TWO,
        "ModelError",
        ["'blocks.0' runs under torch.no_grad, or under", "use_reentrant=True", "recompute='blocks'"],
    ),
    "idle": (2, "Idle", TWO, "ModelError", ["'blocks.1' did not run", "units=(...)"]),
    "no-blocks": (2, "Tiny", TWO, "ModelError", ["no repeated blocks", "units=(...)", "pipeline_parallel=1"]),
    "half-meta": (2, "HalfMeta", TWO, "ModelError", ["cpu, meta", "wholly on the meta device, or wholly real"]),
    "tied-uneven": (
        3,
        "Tied",
        {**TWO, "pipeline_parallel.replicas": (2, 1), "pipeline_parallel.schedule": "pipedream"},
        "PlanError",
        ["embed.weight is used on several stages", "replicas=(2, 1) and schedule='pipedream'", "schedule='1f1b'"],
    ),
    "tied-uneven-sliced": (
        3,
        "Tied",
        {**TWO, "pipeline_parallel.replicas": (2, 1), "zero": 3},
        "PlanError",
        ["embed.weight is used on several stages", "replicas=(2, 1) and zero=3", "a multiple of 2 replicas"],
    ),
}


def engine_of(mesh: zs.Mesh, name: str, plan: dict[str, Any], **more: Any) -> zs.Engine:
    torch.manual_seed(0)
    example = {"example": (data(0, 0, 1, 2), 0), **more}
    plan = {"pipeline_parallel.balance": "parameters", **plan}
    return zs.Engine(ODD[name](), OPTIMIZERS["sgd"], zs.Plan.from_dict(plan), mesh=mesh, **example)


def said(function: Callable[..., Any], *args: Any) -> tuple[str, str]:
    """The error that a call ends with."""
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


def refuse(mesh: zs.Mesh, name: str) -> tuple[str, str]:
    _, model, plan, _, _ = REFUSED[name]
    return said(engine_of, mesh, model, plan)


@pytest.mark.parametrize("name", REFUSED)
def test_models_and_ranks_that_do_not_fit_the_plan(pool: Pool, name: str) -> None:
    ranks, _, _, expected, words = REFUSED[name]
    for kind, message in pool.run(refuse, ranks, name):
        assert kind == expected, message
        assert all(word in message for word in words), message


def misuse(mesh: zs.Mesh) -> dict[str, Any]:
    """What does not belong to a pipeline, in turn; the loss of a good step afterwards; and without an example."""
    engine = engine_of(mesh, "Plain", {**TWO, "microbatches": 4})
    batch = (data(0, 0, 1, 8), 0)

    def whole() -> None:
        with engine.gathered():
            pass

    found: dict[str, Any] = {
        "forward": said(engine, *batch),
        "backward": said(engine.backward, torch.zeros((), requires_grad=True)),
        "step": said(engine.step),
        "clip_grad_norm": said(engine.clip_grad_norm, 1.0),
        "gathered": said(whole),
        "rows": said(engine.train_step, (data(0, 0, 1, 3), 0)),
        "unlike": said(engine.train_step, (data(0, 0, 1, 8), torch.zeros(4))),
        "argument": said(evaluate, engine, (*batch, 3)),
    }
    result = engine.train_step(batch)
    found["loss"] = None if result.loss is None else result.loss.item()
    found["example"] = said(lambda: engine_of(mesh, "Plain", TWO, example=None))
    return found


def test_what_a_pipeline_does_not_do_is_refused_and_breaks_nothing(pool: Pool) -> None:
    words = {name: ("PlanError", f"engine.{name}() is for models in one stage") for name in ("backward", "step")}
    words |= {name: ("PlanError", f"engine.{name}()") for name in ("clip_grad_norm", "gathered")}
    words["forward"] = ("PlanError", "inside torch.no_grad()")
    words["rows"] = ("BatchError", "A batch of 3 does not make 4 microbatches; give 4 rows or more")
    words["unlike"] = ("BatchError", "first dimensions [4, 8]")
    words["argument"] = ("TypeError", "argument")
    words["example"] = ("PlanError", "pass Engine(..., example=one microbatch)")
    torch.manual_seed(0)
    loss = Plain()(data(0, 0, 1, 8)).item()
    for found in pool.run(misuse, 2):
        for name, (kind, text) in words.items():
            assert found[name][0] == kind, name
            assert text in found[name][1]
            assert "train_step" in found[name][1] or name in ("rows", "unlike", "argument", "example")
        assert found["loss"] == pytest.approx(loss, rel=1e-5)


def rows_of(step: int, rows: int = 8, length: int = 6) -> tuple[Tensor, int]:
    return data(step, 0, 1, rows)[:, :length], step


def evaluate(engine: zs.Engine, batch: Any) -> Any:
    with torch.no_grad():
        return engine(*batch)


# Model, plan, and what each of two ranks does after one good step.
Deed = Callable[[zs.Engine], Any]
UNLIKE: dict[str, tuple[str, dict[str, Any], Deed, Deed, list[str]]] = {
    "longer-sequences": (
        "Plain",
        {"microbatches": 4},
        lambda engine: engine.train_step(rows_of(1)),
        lambda engine: engine.train_step(rows_of(1, length=5)),
        ["input of F1.0 [2, 5, 10]", "input of F1.0 [2, 4, 10]"],
    ),
    "more-rows": (
        "Plain",
        {"microbatches": 4, "pipeline_parallel.schedule": "pipedream"},
        lambda engine: engine.train_step(rows_of(1, rows=12)),
        lambda engine: engine.train_step(rows_of(1)),
        ["input of F1.4 [3, 5, 10]", "input of F1.4 [2, 5, 10]"],
    ),
    "one-evaluates": (
        "Plain",
        {"microbatches": 4},
        lambda engine: engine.train_step(rows_of(1)),
        lambda engine: evaluate(engine, rows_of(1)),
        ["input of F1.0 [2, 5, 10]", "input of F1.0 [8, 5, 10]"],
    ),
}


def two(mesh: zs.Mesh, key: str) -> zs.Mesh:
    """The first two ranks of the pool, with groups and a store of their own, since the test breaks them."""
    both = mesh_of([0, 1], torch.device("cpu"), TIMEOUT)
    if mesh.rank > 1:
        return both
    store = dist.PrefixStore(key, both.store)
    return replace(both, store=store, failures=store)


def told(mesh: zs.Mesh, function: Callable[..., Any], *args: Any) -> tuple[str, str]:
    """The error that a call ends with, which the other ranks hear of as if this process had ended with it."""
    kind, message = said(function, *args)
    if message:
        announce_failure(mesh, RuntimeError(message))
    return kind, message


@impatient()
def disagree(mesh: zs.Mesh, name: str) -> tuple[str, str] | None:
    both = two(mesh, f"disagree/{name}")
    if mesh.rank > 1:
        return None
    model, plan, *deeds, _ = UNLIKE[name]
    engine = engine_of(both, model, {"pipeline_parallel": 2, **plan})
    engine.train_step(rows_of(0))
    return told(both, deeds[both.rank], engine)


@pytest.mark.parametrize("name", UNLIKE)
def test_stages_that_do_unlike_things_are_told_of_both(pool: Pool, name: str) -> None:
    for kind, message in pool.run(disagree, 4, name)[:2]:
        assert kind == "CommError", message
        assert all(word in message for word in UNLIKE[name][-1]), message


# Model, plan, the number of the second step, which of two ranks finds a fault in it, the error and words.
ALONE: dict[str, tuple[str, dict[str, Any], int, int, str, list[str]]] = {
    "shape-by-values": (
        "Ragged",
        {},
        1,
        0,
        "BatchError",
        [
            "'blocks.0' hands on [4, 3, 10]",
            "'blocks.1' on the next stage expects [4, 5, 10]",
            "shapes of the microbatch",
        ],
    ),
    "block-left-out": (
        "Sometimes",
        {"pipeline_parallel.split": ("blocks.2",)},
        2,
        0,
        "ModelError",
        ["'blocks.2' ran after 'blocks.0'", "for every microbatch, in one order"],
    ),
    "not-finite": (
        "Spiked",
        {"pipeline_parallel.schedule": "pipedream"},
        1,
        0,
        "NonFiniteError",
        ["embed.weight is not finite", "nonfinite='skip'"],
    ),
}


@impatient()
def stumble(mesh: zs.Mesh, name: str) -> tuple[str, str] | None:
    both = two(mesh, f"stumble/{name}")
    if mesh.rank > 1:
        return None
    model, plan, second, *_ = ALONE[name]
    engine = engine_of(both, model, {**TWO, "pipeline_parallel.split": ("blocks.1",), **plan})
    engine.train_step((torch.full((8, 6), 3), 0))

    def go_on() -> None:
        engine.train_step((torch.full((8, 6), 12), second))
        engine.flush()

    return told(both, go_on)


@pytest.mark.parametrize("name", ALONE)
def test_a_fault_on_one_stage_is_told_to_the_other(pool: Pool, name: str) -> None:
    *_, where, expected, words = ALONE[name]
    found = pool.run(stumble, 4, name)[:2]
    assert found[where][0] == expected, found
    assert all(word in found[where][1] for word in words), found
    assert found[1 - where][0] == "CommError", found
    assert f"because rank {where} of stage {where} left engine.train_step() in an error" in found[1 - where][1], found
    assert all(word in found[1 - where][1] for word in words), found


STAGES = 3


def dying(rank: int, port: int, pipe: Any, plan: dict[str, Any], victim: int) -> None:
    """A world of three stages, one of which ends without a word in the middle of the second step."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=STAGES, timeout=timedelta(seconds=90))
    mesh = mesh_of(list(range(STAGES)), torch.device("cpu"), 90.0)
    engine = engine_of(
        mesh,
        "Plain",
        {"pipeline_parallel": STAGES, "microbatches": 4, "pipeline_parallel.split": ("blocks.1", "blocks.2"), **plan},
    )
    engine.train_step(rows_of(0))
    pipe.send("one step")
    calls = 0

    def leave(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            os._exit(3)

    if rank == victim:
        block: Any = engine.model.blocks
        block[rank].norm.register_forward_hook(leave)
    kind, message = said(lambda: [engine.train_step(rows_of(step)) for step in (1, 2)])
    pipe.send((kind, message))
    announce_failure(mesh, RuntimeError(message))
    os._exit(0)


@pytest.mark.parametrize(
    "plan, victim",
    [({"pipeline_parallel.schedule": "1f1b"}, 0), ({"pipeline_parallel.schedule": "pipedream"}, 2)],
    ids=["first-1f1b", "last-pipedream"],
)
def test_a_stage_that_dies_ends_the_others(port: int, plan: dict[str, Any], victim: int) -> None:
    """Long before the 90 s that a message may take."""
    context = copies()
    pipes = [context.Pipe() for _ in range(STAGES)]
    processes = [
        context.Process(target=dying, args=(rank, port, pipes[rank][1], plan, victim)) for rank in range(STAGES)
    ]
    try:
        for process in processes:
            process.start()
        for pipe, _ in pipes:
            assert pipe.poll(240) and pipe.recv() == "one step"
        processes[victim].join(60)
        assert processes[victim].exitcode == 3
        for rank in (rank for rank in range(STAGES) if rank != victim):
            assert pipes[rank][0].poll(60), f"rank {rank} hangs"
            kind, message = pipes[rank][0].recv()
            assert kind == "CommError", message
            assert message.startswith(f"Rank {rank} stopped in '")
            assert "a connection broke" in message
    finally:
        for process in processes:
            process.kill()
            process.join()


SCRIPT = """
import torch
from engine.models import Plain
from pipeline.pipelines import data
import zeroshard as zs

plan = zs.Plan(pipeline_parallel=zs.Pipeline(2, balance="parameters"), microbatches=4)
engine = zs.Engine(Plain(), torch.optim.AdamW, plan, example=(data(0, 0, 1, 2), 0))
batch = (data(0, 0, 1, 8), 0)
engine.train_step(batch)
if "suffix" in engine.layers:
    {last}
engine.train_step(batch)
"""
LAST: dict[str, tuple[str, list[str]]] = {
    "raises": (
        "raise RuntimeError('the disk of the last stage is on fire')",
        ["[rank1]: RuntimeError: the disk of the last stage is on fire"],
    ),
    "stops": (
        "engine.state_dict()",
        ["CommError: The ranks disagree", "'where the weights are'", "'gradient for B0.0 [2, 5, 10]'"],
    ),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", LAST)
def test_a_job_whose_last_stage_goes_its_own_way_ends_with_the_reason(tmp_path: Path, name: str) -> None:
    """Under the launcher, which ends the other stage when one has ended."""
    last, said = LAST[name]
    (tmp_path / "script.py").write_text(SCRIPT.format(last=last))
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    for word in said:
        assert word in done.stderr


def refused_offload(mesh: zs.Mesh) -> str:
    """The refusal of states on the host that two ranks of one stage would update, and one of the other."""
    replicas = {"pipeline_parallel": 2, "pipeline_parallel.replicas": (2, 1), "pipeline_parallel.balance": "parameters"}
    plan = zs.Plan.from_dict({**replicas, "zero": 0, "offload": "optimizer", "microbatches": 4})
    with pytest.raises(PlanError) as found:
        zs.Engine(LONGER["Five"](), OPTIMIZERS["adamw"], plan, mesh=mesh, example=(data(0, 0, 1, 2), 0))
    return str(found.value)


def test_all_stages_refuse_states_that_two_ranks_of_one_would_update(pool: Pool) -> None:
    texts = pool.run(refused_offload, 3)
    assert all(text.startswith("offload='optimizer' and zero=0 do not combine on 2 ranks") for text in texts)


def measured(mesh: zs.Mesh) -> tuple[str, str]:
    return said(engine_of, mesh, "Unmeasured", {**TWO, "pipeline_parallel.balance": "time"})


def test_an_error_in_the_measurement_of_rank_0_is_one_of_all(pool: Pool) -> None:
    first, *others = pool.run(measured, 2)
    assert first == ("ValueError", "a value is out of range")
    for kind, message in others:
        assert kind == "ModelError"
        assert "on rank 0" in message and "(ValueError: a value is out of range)" in message
