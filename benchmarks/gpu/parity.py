"""Every plan of docs/combines.md on several ranks beside a run in one process, which needs no communication.

    python benchmarks/gpu/parity.py --ranks N [--device cuda] [--only WORD] [--alone] [--seconds S] [--json FILE]

Plans are each part alone and each pair of parts, under every ZeRO stage that they combine with. A plan runs on as many
of the N ranks as it divides among, four steps of a small model. Beside it: a plain PyTorch loop on the global batch on
one CPU, in fp32; for `pipedream` and `2bw` the papers' equations in one process, and for delayed updates a loop whose
forwards see the weights of one update before.

Two figures, by the worst rank: the relative difference of a step's loss, and of the weights the norm of the difference
divided by the norm of the change that training made. Bars are `BARS`. A plan that the engine refuses here is counted as
refused, with its words. A plan that fails or hangs is counted as failed, and the others go on in new processes.

Rows are written as they come; a second call with the same file goes on with the plans that have none. The exit status
is 75 if plans are left, else 1 if one failed.
"""

import argparse
import functools
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent
sys.path[:0] = [str(BENCHMARKS), str(ROOT / "docs"), str(ROOT / "tests")]
from ranks import LaunchError, answer, circumstances, keep, launch  # noqa: E402

STEPS, ROWS, PART = 4, 32, 75
BARS = {"fp32": (1e-5, 1e-3), "bf16": (1e-2, 0.3), "fp16": (1e-2, 0.3)}  # loss and weights, by precision
TIMEOUT = 60.0  # seconds that a collective may wait
CLOSING = 10.0  # seconds before the end in which no plan is begun
MORE: dict[str, dict[str, Any]] = {  # settings without which four small steps would show nothing
    "late": {"offload.delayed_warmup": 1},
    "fp16": {"loss_scale.initial": 256.0},
}
STREAMS = ("pipedream", "2bw")
BLOCKS = 5  # of each model
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A plan of the table: one part or two, under a stage of ZeRO."""

    parts: tuple[str, ...]
    zero: int

    @property
    def name(self) -> str:
        """Such as "tensor+late zero3"."""
        return f"{'+'.join(self.parts)} zero{self.zero}"

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """Fields of the plan."""
        import combines

        settings = {"zero": self.zero, **(combines.options(*self.parts) or {})}
        for part in self.parts:
            settings |= MORE.get(part, {})
        return {"pipeline_parallel.balance": "parameters", **settings} if self.stages > 1 else settings

    @property
    def stages(self) -> int:
        """Of its pipeline."""
        return 2 if any(part in ("1f1b", "interleaved", "zb-h1", "uneven", *STREAMS) for part in self.parts) else 1

    @property
    def stream(self) -> str | None:
        """Its schedule, if that never flushes."""
        return next((part for part in self.parts if part in STREAMS), None)

    @property
    def precision(self) -> str:
        """Of its plan."""
        return str(self.settings.get("precision", "fp32"))

    def ranks(self, most: int) -> int:
        """As many of `most` ranks as it divides among; 0 for none."""
        split = 2 if {"tensor", "heads"} & set(self.parts) else 1
        if "uneven" in self.parts:  # replicas=(2, 1)
            return 3 * split if 3 * split <= most else 0
        pairs = 2 if {"experts", "levels", "groups"} & set(self.parts) else 1
        return most - most % (self.stages * split * pairs)

    @property
    def model(self) -> str:
        """Of the tests' small models, one that has what the plan divides."""
        if {"experts", "levels"} & set(self.parts):
            return "Mixing"
        return "Attending" if {"tensor", "heads"} & set(self.parts) else "Five"

    def optimizer(self) -> Any:
        """Momentum; delayed updates are Adam's, whose epsilon hides elements without a gradient worth the name."""
        import torch

        late = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)
        return late if "late" in self.parts else partial(torch.optim.SGD, lr=5e-2, momentum=0.9)


def cases(only: str | None = None, alone: bool = False) -> list[Case]:
    """All plans of the table, single parts first."""
    import combines

    words = list(combines.PARTS)
    pairs = [(a, b) for place, a in enumerate(words) for b in words[place + 1 :]]
    found = []
    for parts in [*((word,) for word in words), *([] if alone else pairs)]:
        refusals = combines.refusals(*parts) or dict.fromkeys(range(4), "both set one field")
        found += [Case(parts, zero) for zero, why in refusals.items() if not why]
    return [case for case in found if only is None or only in case.parts]


def train(case: Case, mesh: Any) -> tuple[list[Any], dict[str, Any], Any]:
    """Losses [STEPS] of this rank with its data rank, the final weights, and the engine."""
    import torch
    from engine.models import batch, build

    import zeroshard as zs

    model = build(case.model, seed=mesh.rank)  # other ranks begin with other weights, so rank 0's must win
    plan = zs.Plan.from_dict({**case.settings, "timeout": TIMEOUT})
    example = (batch(0, 0, 1, 2).to(mesh.device), 0)
    engine = zs.Engine(model, case.optimizer(), plan, mesh=mesh, example=example)
    losses = []
    for step in range(STEPS):
        tokens = batch(step, engine.data_rank, engine.data_ranks, ROWS).to(mesh.device)
        loss = engine.train_step((tokens, step)).loss
        losses.append((engine.data_rank, None if loss is None else loss.item()))
    weights = {name: value.float().cpu() for name, value in engine.state_dict().items() if torch.is_tensor(value)}
    return losses, weights, engine


@functools.cache
def plain(model: str, late: bool) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Losses, weights, and weights at the start of the loop in one process."""
    from engine.models import batch, build

    net = build(model)
    start = copy_of(net)
    optimizer = Case(("late",) if late else ("bf16",), 0).optimizer()(net.parameters())
    losses, seen = [], start
    for step in range(STEPS):
        newest = copy_of(net)
        net.load_state_dict(seen)
        optimizer.zero_grad()
        loss = net(batch(step, 0, 1, ROWS), step)
        loss.backward()
        net.load_state_dict(newest)
        optimizer.step()
        delayed = late and step >= MORE["late"]["offload.delayed_warmup"]
        seen = newest if delayed else copy_of(net)
        losses.append(loss.item())
    return losses, copy_of(net), start


def copy_of(net: Any) -> dict[str, Any]:
    """The weights of a model."""
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def equations(case: Case, engine: Any, mesh: Any) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Losses of this rank (none but on the last stage), weights and start by the equations of the schedule's paper."""
    from engine.models import build
    from pipeline.emulation import Case as Emulated
    from pipeline.emulation import Emulation

    cuts = (int(name.removeprefix("blocks.")) if name.startswith("blocks.") else BLOCKS for name in engine.split)
    sizes = tuple(b - a for a, b in pairwise([0, *cuts, BLOCKS]))
    split = 2 if {"tensor", "heads"} & set(case.parts) else 1
    per_stage = (2, 1) if "uneven" in case.parts else (mesh.ranks // split // case.stages,) * case.stages
    more = {"precision": case.precision}
    emulation = Emulation(Emulated(case.stream or "", sizes, 4, case.model, "sgd", per_stage, "s" * STEPS, ROWS, more))
    emulation.play()
    start = {name: value.float() for name, value in copy_of(build(case.model)).items()}
    weights = {name: value.float() for name, value in emulation.weights().items()}
    last = sum(per_stage[:-1])
    own = mesh.rank // split
    losses = [emulation.mean_loss(step, own) for step in range(STEPS)] if own >= last else []
    return losses, weights, start


def compare(case: Case, mesh: Any) -> Row:
    """This rank's figures: relative errors of losses and weights."""
    losses, weights, engine = train(case, mesh)
    if case.stream:
        wanted, target, start = equations(case, engine, mesh)
        found = [loss for _, loss in losses] if wanted else []
        return {"loss": apart(found, wanted), "weights": moved_apart(weights, target, start)}
    wanted, target, start = plain(case.model, "late" in case.parts)
    return {"losses": losses, "wanted": wanted, "weights": moved_apart(weights, target, start)}


def apart(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative difference."""
    errors = (abs(a / b - 1) if math.isfinite(a) else math.inf for a, b in zip(found, wanted, strict=True))
    return max(errors, default=0.0)


def moved_apart(found: Any, wanted: Any, start: Any) -> float:
    """The norm of the difference of weights, divided by that of the change that training made."""
    import torch

    names = [name for name in wanted if name in found]
    assert len(names) == len(wanted), f"the engine's weights lack {sorted(set(wanted) - set(names))}"
    difference = torch.stack([(found[name].float() - wanted[name].float()).norm() for name in names]).norm()
    change = torch.stack([(wanted[name].float() - start[name].float()).norm() for name in names]).norm()
    value = float(difference / change)
    return value if math.isfinite(value) else math.inf


def together(case: Case, answers: Sequence[Row]) -> Row:
    """The row of a plan from the answers of its ranks."""
    refused = [each["refused"] for each in answers if "refused" in each]
    if refused:
        return {"verdict": "refused" if len(refused) == len(answers) else "failed", "why": refused[0]}
    loss = max(each["loss"] for each in answers) if "loss" in answers[0] else mean_apart(answers)
    weights = max(each["weights"] for each in answers)
    bars = BARS[case.precision]
    verdict = "same" if loss <= bars[0] and weights <= bars[1] else "failed"
    return {"verdict": verdict, "precision": case.precision, "loss": loss, "weights": weights}


def mean_apart(answers: Sequence[Row]) -> float:
    """The relative difference of the mean over data ranks from the loop's losses."""
    means = []
    for step in range(STEPS):
        by_rank = {rank: loss for rank, loss in (each["losses"][step] for each in answers) if loss is not None}
        means.append(sum(by_rank.values()) / len(by_rank))
    return apart(means, answers[0]["wanted"])


def ranks_part(names: Sequence[str], device: str, seconds: float, file: str) -> None:
    """One rank of a launch: run plans until the time is up; rank 0 appends a row to the file for each."""
    import torch

    import zeroshard as zs
    from zeroshard.comm.collectives import Comm
    from zeroshard.errors import ZeroshardError

    torch.set_num_threads(1)
    end, by_name = time.monotonic() + seconds, {case.name: case for case in cases()}
    mesh = zs.init_mesh(timeout=TIMEOUT, device=device)
    comm = Comm(mesh)
    for name in names:
        if not comm.agree_on(time.monotonic() < end, "time is left")[0]:
            break
        began, case = time.monotonic(), by_name[name]
        try:
            mine = compare(case, mesh)
        except (zs.errors.PlanError, zs.errors.ModelError) as error:
            mine = {"refused": f"{type(error).__name__}: {error}"}
        except ZeroshardError as error:
            raise RuntimeError(f"{name}: {error}") from error
        answers = comm.agree_on(mine, f"figures of {name}")
        if mesh.rank == 0:
            row = {"plan": name, "ranks": mesh.ranks, **together(case, answers)}
            with Path(file).open("a") as lines:
                lines.write(json.dumps({**row, "seconds": round(time.monotonic() - began, 3)}) + "\n")
    answer({"ended": True})


def run(wanted: Sequence[tuple[Case, int]], device: str, end: float, file: Path) -> None:
    """Launch ranks until every plan has a row in the file, or the time is up."""
    while left := remaining(wanted, file):
        if time.monotonic() > end - CLOSING:
            return
        ranks = left[0][1]
        names = [case.name for case, count in left if count == ranks]
        seconds = end - time.monotonic()
        words = ["--launched", json.dumps(names), device, str(max(1.0, seconds - CLOSING)), str(file)]
        try:
            launch(__file__, words, ranks, timeout=seconds)
        except LaunchError as error:
            if time.monotonic() >= end - 1:
                return
            first = remaining(wanted, file)[0]  # the one in which the ranks ended
            row = {"plan": first[0].name, "ranks": ranks, "verdict": "failed", "why": str(error)[-1500:]}
            with file.open("a") as lines:
                lines.write(json.dumps(row) + "\n")


def remaining(wanted: Sequence[tuple[Case, int]], file: Path) -> list[tuple[Case, int]]:
    """The plans without a row, those of equal numbers of ranks together."""
    known = {row["plan"] for row in rows_of(file)}
    return sorted(((case, ranks) for case, ranks in wanted if case.name not in known), key=lambda pair: -pair[1])


def rows_of(file: Path) -> list[Row]:
    """The rows that were written so far."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def show(rows: Sequence[Row], unfit: Sequence[str], left: int) -> None:
    """For people."""
    counts = Counter(row["verdict"] for row in rows)
    print(f"{counts['same']} plans agree with the run in one process, {counts['failed']} failed,")
    print(f"{counts['refused']} are refused on this device, {len(unfit)} need more ranks, {left} are left")
    for precision, bars in BARS.items():
        of = [row for row in rows if row.get("precision") == precision]
        if of:
            loss, weights = (max(row[figure] for row in of) for figure in ("loss", "weights"))
            print(f"{precision}, {len(of)} plans: losses within {loss:.1e} (bar {bars[0]:g}),")
            print(f"    weights within {weights:.1e} of their change (bar {bars[1]:g})")
    for row in rows:
        if row["verdict"] == "failed":
            figures = f"loss {row['loss']:.2e}, weights {row['weights']:.2e}" if "loss" in row else row["why"]
            print(f"FAILED {row['plan']} on {row['ranks']} ranks: {figures}")
    for why in sorted({row["why"] for row in rows if row["verdict"] == "refused"}):
        print(f"refused: {', '.join(row['plan'] for row in rows if row.get('why') == why)}: {why}")


def main() -> int:
    """Run, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--only", help="plans with this part")
    parser.add_argument("--alone", action="store_true", help="no pairs of parts")
    parser.add_argument("--sample", type=int, default=1, help="one of so many plans")
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("SLICE_SECONDS", "inf")))
    parser.add_argument("--json")
    parser.add_argument("--launched", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launched:
        names, device, seconds, file = options.launched
        ranks_part(json.loads(names), device, float(seconds), file)
        return 0
    end = time.monotonic() + min(options.seconds, 1e6) - CLOSING
    every = [(case, case.ranks(options.ranks)) for case in cases(options.only, options.alone)[:: options.sample]]
    wanted, unfit = [pair for pair in every if pair[1] > 1], [case.name for case, ranks in every if ranks < 2]
    file = Path(f"{options.json or f'parity-{options.ranks}'}.lines")
    if options.json and not Path(options.json).exists():
        file.unlink(missing_ok=True)  # of another measurement
    run(wanted, options.device, end, file)
    rows, left = rows_of(file), len(remaining(wanted, file))
    show(rows, unfit, left)
    figures = {"bars": BARS, "device": options.device, "remaining": left, "rows": rows, "need_more_ranks": unfit}
    keep({**circumstances(), **figures}, options.json)
    return PART if left else int(any(row["verdict"] == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
