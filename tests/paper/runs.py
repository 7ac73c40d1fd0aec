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
from torch.autograd import profiler

import zeroshard as zs
from zeroshard.memory.transfers import ThreadRunner, Transfers
from zeroshard.moe import Losses, Router
from zeroshard.moe.exchange import technique
from zeroshard.optim.slices import owners
from zeroshard.platform import accelerator
from zeroshard.saved.offload import ActivationStore
from zeroshard.traffic import Purpose
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


def run(mesh: zs.Mesh, settings: Settings, at_once: bool = False) -> Seen:
    """Train under a plan, with what the settings in capitals name beside the steps; `at_once` as of `Paper`."""
    gc.collect()
    folder = tempfile.TemporaryDirectory(prefix="zeroshard-paper-")
    small = patch.object(ActivationStore.__init__, "__defaults__", (SMALLEST, 2))
    with folder, small, Paper(at_once) as paper:
        waits: list[Counter[tuple[str, str]]] = []
        losses = _train(replace(mesh, device=DEVICE), settings, Path(folder.name), paper, waits)
    record = paper.record
    named = {f"{line} {name}": count for (line, name), count in waits[-1].items()}
    return Seen(losses, [str(finding) for finding in record.findings], record.launches, named)


def _train(
    mesh: zs.Mesh, settings: Settings, folder: Path, paper: Paper, waits: list[Counter[tuple[str, str]]]
) -> list[float]:
    fields = {name: str(folder / "disk") if value == DISK else value for name, value in settings.items()}
    beside = {name: fields.pop(name) for name in settings if name.isupper()}
    plan = zs.Plan.from_dict(fields)
    experts, pipelined = "EXPERTS" in beside or plan.experts.ranks > 1, plan.pipelined
    made = model(experts, 4 if pipelined else 2)
    if "COUNTING" in beside:
        made.blocks[1].mlp = zs.moe.MoE(16, 16, 4, router="mixtral", expert=Counting)
    for router in (m for m in made.modules() if isinstance(m, Router) and "GLOBAL" in beside):
        router.gating = replace(router.gating, losses=Losses(balance=0.01, scope="global"))
    made = LeavingOut(made) if "LEFT_OUT" in beside else made
    kind = beside.get("OPTIMIZER")
    optimizer = partial(getattr(zs.optim, kind) if kind else torch.optim.AdamW, lr=1e-3)
    machines = patch.object(technique, "machine", lambda: [str(mesh.rank // 2)])
    loss = Spiked() if "SPIKE" in beside else None
    profiled = patch.object(profiler, "_is_profiler_enabled", "PROFILED" in beside)
    cut = patch.multiple(owners, LEAST=100, UNEVEN=0.0) if "CUT" in beside else nullcontext()
    with machines if "MACHINES" in beside else nullcontext(), profiled, cut:
        example = batch(0) if pipelined else None
        engine = zs.Engine(made, optimizer, plan, mesh=mesh, example=example, loss=loss)
        losses = []
        for step in range(STEPS):
            rows = batch(step, engine.data_rank, engine.data_ranks)
            before = paper.record.synchronisations.copy()
            result = by_hand(engine, rows) if step and "BY_HAND" in beside else engine.train_step(rows)
            waits.append(paper.record.synchronisations - before)
            losses.append(result.loss.item() if result.loss is not None else float("nan"))
            if step < STEPS - 1:
                _between(engine, set(beside), folder, step)
        if "OUTLIVES" in beside:
            left = list(made.parameters())
            del engine, result, made
            gc.collect()
            assert all(bool(p.isfinite().all()) for p in left)
        else:
            engine.flush()
    return losses


class Counting(nn.Module):
    """An expert that counts its rows in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """[r, D] -> [r, D]."""
        self.rows += len(x)
        return torch.tanh(self.inner(x))


class LeavingOut(nn.Module):
    """Leaves the last block out in every second forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.forwards = inner, 0

    def forward(self, *rows: Tensor) -> Tensor:
        """The loss."""
        self.forwards += 1
        left_out: Any = nullcontext()
        if self.forwards % 2 == 0:
            left_out = patch.object(self.inner.blocks[-1], "forward", lambda x, *more: x)
        with left_out:
            return self.inner(*rows)


class Spiked:
    """A loss that is no number in the last microbatch of step 1."""

    def __init__(self) -> None:
        self.parts = 0

    def __call__(self, loss: Tensor, rows: object) -> Tensor:
        """Of two microbatches each step."""
        self.parts += 1
        return loss * float("nan") if self.parts == 4 else loss


def by_hand(engine: zs.Engine, rows: tuple[Tensor, Tensor]) -> Any:
    """A step without one parameter's gradient, and with the others clipped by value."""
    loss = engine(*rows)
    engine.backward(loss)
    next(iter(engine.model.parameters())).grad = None
    engine.clip_grad_value(1e-2)
    return replace(engine.step(), loss=loss.detach())


def copy_there_and_back() -> None:
    """Copies of one link, the second of what the first brings."""
    link = Transfers(ThreadRunner(DEVICE, 10.0))
    there, values = accelerator.page_locked(ROWS, torch.float32, DEVICE), torch.ones(ROWS, device=DEVICE)
    down = link.copy(values, there, Purpose.GRADIENTS_DOWN, "a gradient")
    link.copy(there, values, Purpose.PARAMETERS_UP, "new weights", [down]).wait()
    assert float(values.sum()) == ROWS


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
    if "COPIES" in beside:
        copy_there_and_back()
    if "STATE" in beside:
        engine.state_dict()
