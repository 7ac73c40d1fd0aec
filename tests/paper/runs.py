"""Toy runs on a device of paper, each with its own plan, and everything that was found in them."""

import gc
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from paper.device import DEVICE, Paper
from plans import DISK
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.moe.exchange import technique
from zeroshard.saved.offload import ActivationStore
from zeroshard.train.gpt import GPT, GPTConfig

SMALLEST = 64  # bytes of activations that are sent to the host, of a model far smaller than those that it is for
VOCABULARY, TIME, ROWS, STEPS = 32, 8, 8, 3
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Seen:
    """What one rank saw of a run.

    Attributes:
        losses: of its steps.
        findings: as text.
        launches: of each communicator, in order.
        waits: of the host in the last step, "line name" and their number.
    """

    losses: list[float]
    findings: list[str]
    launches: dict[str, list[str]]
    waits: dict[str, int]


def model(experts: bool = False, blocks: int = 2) -> nn.Module:
    """A small GPT."""
    torch.manual_seed(1)
    made = GPT(GPTConfig(VOCABULARY, TIME, 16, 2, blocks))
    if experts:
        zs.moe.replace_ffn(made, every=2, experts=4, router="mixtral")
    return made


def batch(step: int, rank: int = 0, ranks: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs and targets [ROWS / ranks, TIME] of a rank, on the device."""
    rows = torch.randint(VOCABULARY, (ROWS, TIME + 1), generator=torch.Generator().manual_seed(step))
    own = rows.chunk(ranks)[rank].to(DEVICE)
    return own[:, :-1].contiguous(), own[:, 1:].contiguous()


def run(mesh: zs.Mesh, settings: Settings) -> Seen:
    """Train under a plan, with what the settings in capitals name beside the steps."""
    gc.collect()
    folder = tempfile.TemporaryDirectory(prefix="zeroshard-paper-")
    small = patch.object(ActivationStore.__init__, "__defaults__", (SMALLEST, 2))
    with folder, small, Paper() as paper:
        waits: list[Counter[tuple[str, str]]] = []
        losses = _train(replace(mesh, device=DEVICE), settings, Path(folder.name), paper, waits)
    record = paper.record
    named = {f"{line} {name}": count for (line, name), count in waits[-1].items()}
    return Seen(losses, [str(finding) for finding in record.findings], record.launches, named)


def _train(
    mesh: zs.Mesh, settings: Settings, folder: Path, paper: Paper, waits: list[Counter[tuple[str, str]]]
) -> list[float]:
    fields = {name: str(folder / "disk") if value == DISK else value for name, value in settings.items()}
    beside = {name for name in fields if name.isupper()}
    plan = zs.Plan.from_dict({name: value for name, value in fields.items() if name not in beside})
    experts, pipelined = "EXPERTS" in beside or plan.experts.ranks > 1, plan.pipelined
    made = model(experts, 4 if pipelined else 2)
    machines = (
        patch.object(technique, "machine", lambda: [str(mesh.rank // 2)]) if "MACHINES" in beside else nullcontext()
    )
    with machines:
        optimizer = partial(torch.optim.AdamW, lr=1e-3)
        engine = zs.Engine(made, optimizer, plan, mesh=mesh, example=batch(0) if pipelined else None)
        losses = []
        for step in range(STEPS):
            rows = batch(step, engine.data_rank, engine.data_ranks)
            before = paper.record.synchronisations.copy()
            result = engine.train_step(rows)
            waits.append(paper.record.synchronisations - before)
            losses.append(result.loss.item() if result.loss is not None else float("nan"))
            if step < STEPS - 1:
                _between(engine, beside, folder, step)
        engine.flush()
    return losses


def _between(engine: zs.Engine, beside: set[str], folder: Path, step: int) -> None:
    if "SAVE" in beside:
        engine.save(folder / f"step-{step}")
    if "GATHERED" in beside:
        with engine.gathered():
            assert all(bool(p.isfinite().all()) for p in engine.model.parameters())
    if "EVALUATE" in beside:
        engine.eval()
        with torch.no_grad():
            engine(*batch(step + 100, engine.data_rank, engine.data_ranks))
        engine.train()
    if "STATE" in beside:
        engine.state_dict()
