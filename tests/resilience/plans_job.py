"""A training script that takes a tiny model through one plan after the other, and whose ranks kill themselves.

    zeroshard run --nproc-per-node 2 -- tests/resilience/plans_job.py FOLDER KILLS SEED [PLAN ...]

The plans are those of `PLANS`, and of `cover` where they are named: the latter have every pair of values of zero,
offload, schedule, transport and precision that `Plan` allows.

Under each plan the job is killed KILLS times (SIGKILL), at moments drawn from SEED: at the start, between and inside of
steps, while a checkpoint is written. Each kill is noted in a file first, so that it comes once. A plan that is finished
is left out by the next attempt; the one that was cut off goes on from its newest checkpoint.

    FOLDER/losses/PLAN.jsonl      a line for every step that was ever taken
    FOLDER/checkpoints/PLAN/      the newest two
    FOLDER/kills/PLAN-K.json      which rank, when, in which attempt, and whether a checkpoint was being written
    FOLDER/done/PLAN              it is finished
"""

import contextlib
import functools
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
import warnings
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zeroshard as zs
from zeroshard.checkpoint import Reader, committed
from zeroshard.comm.mesh import attempt
from zeroshard.errors import CheckpointWarning, PlanError
from zeroshard.schedule import SCHEDULES

STEPS, EVERY, RANKS = 16, 4, 2
STRIDE = 100  # steps of plan n are counted from n * STRIDE, so that a later plan's checkpoints are newer
ROWS, TOKENS, WORDS, WIDTH = 8, 4, 11, 8
START = 0.3  # seconds after the beginning in which a kill at the start comes
SOON = 0.02  # seconds after a step or a save in which a kill there comes; longer than a step
ALL_BELOW = "optimizer,parameters,activations"
PIPELINE = {"pipeline_parallel": 2, "microbatches": 4, "pipeline_parallel.balance": "parameters"}
PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"zero": 0},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2, "clip_norm": 1.0},
    "zero3": {"zero": 3, "transport": "network"},
    "bf16": {"zero": 2, "precision": "bf16"},
    **{
        name: {**PIPELINE, "pipeline_parallel.schedule": name}
        for name in ("naive", "gpipe", "1f1b", "zb-h1", "pipedream", "2bw")
    },
    "interleaved": {**PIPELINE, "pipeline_parallel.schedule": "interleaved", "pipeline_parallel.virtual_stages": 2},
}


AXES: dict[str, tuple[Any, ...]] = {
    "zero": (0, 1, 2, 3),
    "offload": ("", "optimizer", "optimizer,parameters", "activations", "optimizer,activations", ALL_BELOW),
    "pipeline_parallel.schedule": (None, *SCHEDULES),  # None for one stage
    "transport": ("auto", "shared", "network"),
    "precision": ("fp32", "bf16", "fp16"),
}
LEAST = 24  # plans in a cover


def options_of(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of the plan that has one value of each axis."""
    schedule = values["pipeline_parallel.schedule"]
    if schedule is None:
        return {name: value for name, value in values.items() if name != "pipeline_parallel.schedule"}
    return {**values, **PIPELINE, "pipeline_parallel.virtual_stages": 2 if schedule == "interleaved" else 1}


def allowed() -> list[dict[str, Any]]:
    """Every combination of values that `Plan` allows."""
    found = []
    for chosen in itertools.product(*AXES.values()):
        values = dict(zip(AXES, chosen, strict=True))
        with contextlib.suppress(PlanError):
            zs.Plan.from_dict(options_of(values))
            found.append(values)
    return found


def pairs_of(values: dict[str, Any]) -> set[tuple[Any, ...]]:
    """The pairs of values of two axes in a combination."""
    return set(itertools.combinations(values.items(), 2))


@functools.cache
def cover() -> dict[str, dict[str, Any]]:
    """Few plans in which each pair of values is that any plan may have; always the same."""
    every = allowed()
    missing, chosen = set().union(*map(pairs_of, every)), list[dict[str, Any]]()
    while missing:
        chosen.append(max(every, key=lambda values: len(pairs_of(values) & missing)))
        missing -= pairs_of(chosen[-1])
    chosen += [values for values in every if values not in chosen][: max(0, LEAST - len(chosen))]
    return {f"pairs-{number:02}": options_of(values) for number, values in enumerate(chosen)}


def plan_of(name: str) -> tuple[int, dict[str, Any]]:
    """The number of a plan among all, and its fields; a rank that starts looks for no cover without need."""
    plans = PLANS if name in PLANS else {**PLANS, **cover()}
    return list(plans).index(name), plans[name]


class Block(nn.Module):
    """A residual MLP block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(self.norm(x)))))


class Model(nn.Module):
    """Embedding, five blocks, head; returns the loss on tokens [B, T + 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(5)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Moment:
    """When a rank dies: so many seconds after it has come by `step`, -1 for its start."""

    rank: int
    kind: str
    step: int
    seconds: float


def draw(seed: int, plan: str, number: int) -> Moment:
    """The moment of a kill, the number `number` under a plan."""
    drawn = random.Random(f"{seed} {plan} {number}")
    rank, kind, share = drawn.randrange(RANKS), drawn.choice(("start", "step", "save")), drawn.random()
    if kind == "start":
        return Moment(rank, kind, -1, share * START)
    step = drawn.randrange(EVERY, STEPS + 1, EVERY) if kind == "save" else drawn.randrange(STEPS)
    return Moment(rank, kind, step, share * SOON)


class Killer(threading.Thread):
    """Kills its own process at a moment that the main thread comes by, and leaves a note first."""

    def __init__(self, moment: Moment, note: Path) -> None:
        super().__init__(name="killer", daemon=True)
        self._moment, self._note, self._due = moment, note, threading.Event()
        self.reached(-1)
        self.start()

    def reached(self, step: int) -> None:
        """The main thread has taken `step` steps, and begun the checkpoint that is due then."""
        if step >= self._moment.step:
            self._due.set()

    def run(self) -> None:
        """Wait, leave the note, and die."""
        self._due.wait()
        time.sleep(self._moment.seconds)
        saving = any(thread.name.startswith("zeroshard saves") for thread in threading.enumerate())
        self._note.write_text(json.dumps({**asdict(self._moment), "saving": saving, "attempt": attempt()}))
        os.kill(os.getpid(), signal.SIGKILL)


def next_killer(folder: Path, plan: str, kills: int, seed: int, rank: int) -> Killer | None:
    """The first kill under a plan that has not come yet, if it is for this rank."""
    for number in range(kills):
        note = folder / "kills" / f"{plan}-{number}.json"
        if not note.exists():
            moment = draw(seed, plan, number)
            return Killer(moment, note) if moment.rank == rank else None
    return None


def batch(step: int, data_rank: int, data_ranks: int) -> tuple[Tensor]:
    """A data rank's part of the global batch of a step: [ROWS / data_ranks, TOKENS + 1]."""
    tokens = torch.randint(WORDS, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    return (tokens.chunk(data_ranks)[data_rank],)


def check_all(folder: Path) -> None:
    """Every checkpoint that was ever committed and is still there must be whole."""
    for _, path in committed(folder):
        problems = list(Reader(path).problems())
        assert not problems, problems


def train(mesh: zs.Mesh, folder: Path, name: str, killer: Killer | None) -> None:
    """Train under one plan, from wherever it was cut off."""
    torch.manual_seed(0)
    number, options = plan_of(name)
    plan = zs.Plan.from_dict(options)
    adamw = partial(torch.optim.AdamW, lr=1e-2)
    engine = zs.Engine(Model(), adamw, plan, mesh=mesh, example=batch(0, 0, 4) if plan.pipelined else None)
    torch.manual_seed(1 + mesh.rank)  # dropout differs between ranks
    begin = STRIDE * (1 + number)
    engine.steps = begin
    check_all(folder / "checkpoints" / name)
    checkpoints = zs.Checkpoints(engine, folder / "checkpoints" / name)
    extra = checkpoints.resume()
    assert (begin if extra is None else begin + extra["taken"]) == engine.steps
    lines = os.open(folder / "losses" / f"{name}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for step in range(engine.steps - begin, STEPS):
        result = engine.train_step(batch(step, engine.data_rank, engine.data_ranks))
        if engine.reports:
            norm = None if plan.streams else result.grad_norm
            loss = None if result.loss is None else float(result.loss)
            os.write(lines, (json.dumps({"step": step + 1, "loss": loss, "norm": norm}) + "\n").encode())
        if (step + 1) % EVERY == 0:
            checkpoints.save({"taken": step + 1}, wait=step + 1 == STEPS)
        if killer is not None:
            killer.reached(step + 1)
    os.close(lines)
    if killer is not None:
        killer.reached(STEPS)
        killer.join()
    engine.world.agree(b"", "end of the plan")
    if mesh.rank == 0:
        (folder / "done" / name).touch()


def go(mesh: zs.Mesh | None, folder: Path, kills: int, seed: int, names: list[str]) -> None:
    """Go through the plans; without a mesh, that of the environment."""
    warnings.simplefilter("error", CheckpointWarning)  # no checkpoint may be damaged, nor fail to be written
    rank = int(os.environ["RANK"]) if mesh is None else mesh.rank
    for part in ("losses", "checkpoints", "kills", "done"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    left = [name for name in names if not (folder / "done" / name).exists()]
    for name in left:
        killer = next_killer(folder, name, kills, seed, rank)  # before the ranks have found each other
        mesh = mesh or zs.init_mesh(timeout=30.0, device="cpu")
        train(mesh, folder, name, killer)


if __name__ == "__main__":
    torch.set_num_threads(1)
    go(None, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:] or list(PLANS))
