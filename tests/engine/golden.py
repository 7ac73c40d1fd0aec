"""The golden file: what about eighty plans do to the bit and to the byte, written down, so that a change shows.

    PYTHONPATH=src:tests python tests/engine/golden.py [NAME ...]    write it anew: a commit of its own, with its reason

One JSON file per plan in `golden/`: losses and gradient norms of every rank and step, a digest of the final weights,
the tables of `engine.memory()` and `engine.traffic()`, the printed list of actions, and the losses after a checkpoint
was loaded into a new engine. Tables and lists hold everywhere; losses, norms and digests to the bit where CPU
capability and torch are those of the recording (`machine.json`), and else within a tolerance.
"""

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from engine.models import OPTIMIZERS, batch, build
from planner.rehearsed import punctual
from torch import Tensor

import zeroshard as zs
from zeroshard.memory.transfers import Eager
from zeroshard.platform import real

FOLDER = Path(__file__).parent / "golden"
STEPS, ROWS = 4, 24
MANY = 64  # times as many rows where activations are offloaded, since small ones stay
NETWORK = {"transport": "network"}
STATES = {"offload": "optimizer", "offload.speculate": False}
STREAMED = {"offload": "optimizer,parameters", "zero": 3, **NETWORK}
TWO = {"pipeline_parallel": 2, "microbatches": 4, "pipeline_parallel.balance": "parameters"}
LATE = {"offload.delayed_update": True, "offload.delayed_warmup": 1}
FP16 = {"precision": "fp16", "loss_scale.initial": 2.0**20}  # which overflows first
TENSOR = {"tensor_parallel": 2, "zero": 0, **NETWORK}
ALONE = {**TENSOR, "tensor_parallel.sequence": False}
EXPERTS = {"expert_parallel": 2, "zero": 1, **NETWORK}
UPDATERS: dict[str, Callable[..., Any]] = {
    **OPTIMIZERS,
    "adafactor": partial(zs.optim.Adafactor, lr=1e-2),
    "sm3": partial(zs.optim.SM3, lr=1e-2),
    "muon": lambda parameters: zs.optim.Muon(parameters, lr=1e-2),
    "adam8bit": partial(zs.optim.AdamW8bit, lr=1e-2),
}

Case = tuple[int, str, str, dict[str, Any]]  # ranks, model, optimizer, plan
CASES: dict[str, Case] = {
    "1-plain": (1, "Plain", "adamw", {"zero": 0}),
    "1-accumulated": (1, "Plain", "sgd", {"zero": 0, "microbatches": 4, "clip_norm": 0.5}),
    "1-bf16": (1, "Plain", "adamw", {"zero": 2, "precision": "bf16", "microbatches": 2}),
    "1-states": (1, "Plain", "adamw", {"zero": 2, **STATES, "microbatches": 2}),
    "1-states-guessed": (1, "Plain", "adamw", {"zero": 2, "offload": "optimizer", "clip_norm": 0.5}),
    "1-states-half": (1, "Deep", "adamw", {"zero": 2, **STATES, "offload.fraction": 0.5}),
    "1-states-8bit": (1, "Plain", "adamw", {"zero": 2, **STATES, "offload.moments": "8bit"}),
    "1-states-disk": (1, "Plain", "adamw", {"zero": 1, **STATES, "offload.disk": "DISK", "microbatches": 2}),
    "1-states-sgd": (1, "Frozen", "sgd", {"zero": 2, **STATES}),
    "1-streamed": (1, "Tied", "adamw", {**STREAMED, "clip_norm": 0.5}),
    "1-streamed-disk": (
        *(1, "Plain", "adamw"),
        {**STREAMED, "offload.disk": "DISK", "offload.disk_parameters": True},
    ),
    "1-activations": (1, "Plain", "adamw", {"zero": 0, "offload": "activations", "microbatches": 2}),
    "1-everything-bf16": (
        *(1, "Five", "adamw"),
        {**STREAMED, "offload": "optimizer,parameters,activations", "precision": "bf16"},
    ),
    "2-ddp": (2, "Plain", "adamw", {"zero": 0, **NETWORK}),
    "2-ddp-shared": (2, "Plain", "adamw", {"zero": 0, "transport": "shared", "microbatches": 2}),
    "2-ddp-tied-clipped": (2, "Tied", "sgd", {"zero": 0, **NETWORK, "clip_norm": 0.5}),
    "2-zero1": (2, "Plain", "adamw", {"zero": 1, **NETWORK, "microbatches": 2, "clip_norm": 0.5}),
    "2-zero1-shared": (2, "Plain", "adagrad", {"zero": 1, "transport": "shared"}),
    "2-zero1-once": (2, "Plain", "sgd", {"zero": 1, **NETWORK, "microbatches": 3, "reduce_every": "step"}),
    "2-zero2": (2, "Frozen", "adamw", {"zero": 2, **NETWORK}),
    "2-zero2-shared": (2, "Tied", "adamw", {"zero": 2, "transport": "shared", "microbatches": 2}),
    "2-zero2-bf16": (2, "Plain", "adamw", {"zero": 2, **NETWORK, "precision": "bf16", "microbatches": 2}),
    "2-zero2-fp16": (2, "Plain", "adamw", {"zero": 2, "transport": "shared", **FP16}),
    "2-zero2-two-dtypes": (2, "TwoDtypes", "sgd", {"zero": 2, **NETWORK}),
    "2-zero3": (2, "Plain", "adamw", {"zero": 3, **NETWORK, "clip_norm": 0.5}),
    "2-zero3-shared": (2, "Plain", "adamw", {"zero": 3, "transport": "shared", "precision": "bf16"}),
    "2-zero3-tied": (2, "Tied", "adamw", {"zero": 3, **NETWORK, "microbatches": 2}),
    "2-zero3-frozen": (2, "Frozen", "sgd", {"zero": 3, **NETWORK}),
    "2-zero3-sometimes": (2, "Sometimes", "adamw", {"zero": 3, **NETWORK}),
    "2-zero3-bf16": (2, "Plain", "adamw", {"zero": 3, **NETWORK, "precision": "bf16", "reduce_dtype": "fp32"}),
    "2-zero3-checkpointed": (2, "CheckpointedReentrant", "sgd", {"zero": 3, **NETWORK}),
    "2-states": (2, "Plain", "adamw", {"zero": 2, **STATES, **NETWORK, "clip_norm": 0.5}),
    "2-states-late": (2, "Plain", "adamw", {"zero": 1, **STATES, **NETWORK, **LATE}),
    "2-states-shared-fp16": (2, "Plain", "adamw", {"zero": 2, **STATES, "transport": "shared", **FP16}),
    "2-states-shared-zero3": (2, "Plain", "adamw", {"zero": 3, **STATES, "transport": "shared", "clip_norm": 0.5}),
    "2-streamed-bf16": (2, "Five", "adamw", {**STREAMED, "precision": "bf16", "microbatches": 2}),
    "2-activations": (2, "Five", "adamw", {"zero": 3, **NETWORK, "offload": "activations"}),
    "3-zero2": (3, "Plain", "adamw", {"zero": 2, **NETWORK, "microbatches": 2}),
    "3-zero3": (3, "Tiny", "sgd", {"zero": 3, **NETWORK}),
    "4-groups": (4, "Plain", "adamw", {"zero": 3, "shard_group": 2, **NETWORK, "clip_norm": 0.5}),
    "4-groups-bf16": (4, "Frozen", "sgd", {"zero": 1, "shard_group": 2, **NETWORK, "precision": "bf16"}),
    "2-naive": (2, "Five", "adamw", {**TWO, "zero": 0, "pipeline_parallel.schedule": "naive"}),
    "2-gpipe": (2, "Dropped", "adamw", {**TWO, "zero": 0, "pipeline_parallel.schedule": "gpipe"}),
    "2-1f1b": (2, "TiedFive", "adamw", {**TWO, "zero": 0, "clip_norm": 0.5}),
    "2-1f1b-bf16": (2, "TiedFive", "adamw", {**TWO, "zero": 0, "precision": "bf16"}),
    "2-1f1b-fp16": (2, "Five", "sgd", {**TWO, "zero": 0, **FP16}),
    "2-1f1b-activations": (2, "Five", "adamw", {**TWO, "zero": 0, "offload": "activations"}),
    "2-interleaved": (
        2,
        "Deep",
        "sgd",
        {**TWO, "zero": 0, "pipeline_parallel.schedule": "interleaved", "pipeline_parallel.virtual_stages": 3},
    ),
    "2-zb-h1": (2, "Five", "adamw", {**TWO, "zero": 0, "pipeline_parallel.schedule": "zb-h1", "clip_norm": 0.5}),
    "2-pipedream": (2, "TiedFive", "sgd", {**TWO, "zero": 0, "pipeline_parallel.schedule": "pipedream"}),
    "2-pipedream-synchronised": (
        *(2, "Five", "sgd"),
        {**TWO, "zero": 0, "pipeline_parallel.schedule": "pipedream", "pipeline_parallel.vertical_sync": True},
    ),
    "2-2bw": (2, "Five", "adamw", {**TWO, "zero": 0, "pipeline_parallel.schedule": "2bw", "precision": "bf16"}),
    "3-uneven": (3, "Deep", "sgd", {**TWO, "zero": 0, "pipeline_parallel.replicas": (2, 1), "clip_norm": 0.5}),
    "4-1f1b-zero1": (4, "TiedFive", "adamw", {**TWO, "zero": 1, "clip_norm": 0.5}),
    "4-gpipe-zero3": (
        4,
        "DeepTied",
        "adamw",
        {**TWO, **NETWORK, "zero": 3, "pipeline_parallel.schedule": "gpipe", "pipeline_parallel.virtual_stages": 2},
    ),
    "4-zb-h1-zero2": (
        4,
        "Five",
        "adamw",
        {**TWO, "zero": 2, "pipeline_parallel.schedule": "zb-h1", "precision": "bf16"},
    ),
    "4-pipedream-zero1": (
        4,
        "Deep",
        "sgd",
        {**TWO, "zero": 1, "pipeline_parallel.schedule": "pipedream", "pipeline_parallel": 2},
    ),
    "4-interleaved": (
        4,
        "DeepTied",
        "adamw",
        {
            **TWO,
            "zero": 0,
            "pipeline_parallel": 4,
            "pipeline_parallel.schedule": "interleaved",
            "pipeline_parallel.virtual_stages": 2,
        },
    ),
    "2-tensor": (2, "Attending", "adamw", {**TENSOR, "clip_norm": 0.5}),
    "2-tensor-alone": (2, "AttendingTied", "adamw", {**ALONE, "precision": "bf16", "microbatches": 2}),
    "2-tensor-partitioned": (2, "Attending", "sgd", {**ALONE, "activations.partition": True, "recompute": "blocks"}),
    "2-tensor-states": (2, "Attending", "adamw", {**TENSOR, **STATES, "zero": 1}),
    "4-tensor-zero3": (4, "AttendingTied", "adamw", {**TENSOR, "zero": 3, "recompute": "selective"}),
    "4-tensor-1f1b": (4, "Attending", "adamw", {**TENSOR, **TWO, "zero": 1, "recompute": "blocks"}),
    "2-experts": (2, "Mixing", "adamw", {**EXPERTS, "clip_norm": 0.5}),
    "2-experts-zero3": (2, "MixingTied", "sgd", {**EXPERTS, "zero": 3, "microbatches": 2}),
    "4-experts-1f1b": (4, "Mixing", "adamw", {**EXPERTS, **TWO}),
    "1-blocks": (1, "Five", "adamw", {"zero": 0, "recompute": "blocks", "activations.arena": True}),
    "1-sqrt": (1, "Deep", "sgd", {"zero": 0, "recompute": "sqrt"}),
    "1-selective": (1, "Attending", "adamw", {"zero": 0, "recompute": "selective", "precision": "bf16"}),
    "1-compressed": (1, "Five", "adamw", {"zero": 0, "activations.compress": ("sparse", "fp8")}),
    "1-compressed-int4": (1, "Five", "adamw", {"zero": 0, "activations.compress": ("int4",)}),
    "2-exact": (2, "Dropped", "adamw", {"zero": 2, **NETWORK, "rng": "exact", "recompute": "blocks"}),
    "2-chunked": (2, "ChunkedTied", "adamw", {"zero": 3, **NETWORK, "loss_chunk": 3}),
    "2-overlap": (2, "Plain", "adamw", {"zero": 2, **NETWORK, "overlap_gather": True}),
    "2-adafactor": (2, "Plain", "adafactor", {"zero": 2, **NETWORK, "clip_norm": 0.5}),
    "3-sm3": (3, "Tied", "sm3", {"zero": 3, **NETWORK}),
    "2-muon": (2, "Plain", "muon", {"zero": 1, **NETWORK, "microbatches": 2}),
    "2-adam8bit": (2, "Deep", "adam8bit", {"zero": 2, **NETWORK}),
    "2-states-1f1b": (2, "Five", "adamw", {**TWO, **STATES, "zero": 1}),
}


def machine() -> dict[str, str]:
    """The facts that decide last bits, with a digest of results, which differ between makes of processor."""
    numbers, digest = torch.Generator().manual_seed(0), hashlib.sha256()
    for size in (3, 8, 12, 16, 24, 32, 48, 64):
        a, b = (torch.randn(size, size, generator=numbers) for _ in range(2))
        for values in (a, a.bfloat16(), a.half()):
            product = torch.nn.functional.gelu(values @ b.to(values.dtype)).softmax(-1)
            digest.update(torch.nn.functional.layer_norm(product, (size,)).float().numpy().tobytes())
    capability, version = torch.backends.cpu.get_cpu_capability(), torch.__version__.partition("+")[0]
    return {"cpu": capability, "torch": version, "results": digest.hexdigest()[:16], "processor": _processor()}


def _processor() -> str:
    """A digest of the first processor's model, flags and cache, by which kernels and their blocks are chosen."""
    named = ("vendor_id", "cpu family", "model", "stepping", "flags", "cache size")
    first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    facts = [line for line in first if line.partition("\t")[0].strip(" :") in named]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def record(mesh: zs.Mesh, name: str, folder: str) -> dict[str, Any]:
    """What one rank sees of a plan; the numbers of losses and norms as Python prints them, which loses nothing.

    Args:
        folder: an empty one, the same for all ranks.
    """
    _, model, optimizer, options = CASES[name]
    disk = {key: f"{folder}/disk" if value == "DISK" else value for key, value in options.items()}
    plan = zs.Plan.from_dict(disk)
    # A thread's copies end when they end: what is lent in the meantime would not be the same each time.
    with patch.object(real, "executor_of", lambda *_: Eager()), punctual():
        engine = _engine(mesh, model, optimizer, plan, seed=mesh.rank)
        seen = _train(engine, range(STEPS))
        seen["actions"] = _actions(engine)
        seen["order"] = engine.order
        seen["memory"] = [[*astuple(row)] for row in engine.memory()]
        seen["traffic"] = [[*astuple(row)][:-1] for row in engine.traffic()]  # without the seconds
        engine.flush()
        weights = engine.state_dict()
        seen["weights"], seen["norm of the weights"] = digest(weights), norm(weights)
        engine.save(f"{folder}/checkpoint", wait=True)
        other = _engine(mesh, model, optimizer, plan, seed=100 + mesh.rank)
        other.load(f"{folder}/checkpoint")
        assert digest(other.state_dict()) == seen["weights"]
        seen["resumed"] = _train(other, range(STEPS, STEPS + 2))
    return _plain(seen)


def _engine(mesh: zs.Mesh, model: str, optimizer: str, plan: zs.Plan, seed: int) -> zs.Engine:
    make = UPDATERS[optimizer]
    example = (batch(0, 0, 1, 1), 0) if plan.pipelined else None
    return zs.Engine(
        *(build(model, seed), lambda all: make([p for p in all if p.requires_grad]), plan), mesh=mesh, example=example
    )


def _train(engine: zs.Engine, steps: range) -> dict[str, Any]:
    losses, norms = [], []
    rows = ROWS * (MANY if engine.plan.offloading.activations else 1)
    for step in steps:
        result = engine.train_step((batch(step, engine.data_rank, engine.data_ranks, rows), step))
        losses.append(None if result.loss is None else result.loss.item())
        norms.append(None if result.grad_norm is None else repr(result.grad_norm))  # JSON knows no NaN
    return {"losses": losses, "norms": norms}


def _actions(engine: zs.Engine) -> str:
    """The list of the last step."""
    return " ".join(map(str, engine.schedule))


def digest(weights: dict[str, Tensor]) -> str:
    """Of names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name, value in sorted(weights.items()):
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def norm(weights: dict[str, Tensor]) -> float:
    """The 2-norm of all weights."""
    return float(sum(value.double().square().sum() for value in weights.values() if value.is_floating_point()) ** 0.5)


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(value, default=str))


def write(names: list[str], run: Callable[..., list[Any]]) -> None:
    """Write the golden files of these plans; `run` is `Pool.run`."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "machine.json").write_text(json.dumps(machine(), indent=1) + "\n")
    for name in names:
        (FOLDER / f"{name}.json").write_text(text_of(see(name, run)))
        print(name)


def see(name: str, run: Callable[..., list[Any]]) -> list[dict[str, Any]]:
    """What every rank sees of a plan now."""
    with tempfile.TemporaryDirectory() as folder:
        return run(record, CASES[name][0], name, folder)


def text_of(ranks: list[dict[str, Any]]) -> str:
    """A line for each rank and thing, and for each row of a table, so that differences are easy to read."""
    lines = []
    for rank in ranks:
        fields = []
        for name, value in rank.items():
            if name in ("memory", "traffic"):
                rows = ",\n   ".join(json.dumps(row) for row in value)
                fields.append(f"  {json.dumps(name)}: [\n   {rows}\n  ]")
            else:
                fields.append(f"  {json.dumps(name)}: {json.dumps(value)}")
        lines.append(" {\n" + ",\n".join(fields) + "\n }")
    return "[\n" + ",\n".join(lines) + "\n]\n"


if __name__ == "__main__":
    from engine import golden
    from pool import Pool

    workers = Pool(apart=0)
    golden.write(sys.argv[1:] or list(CASES), workers.run)
    workers.stop()
