"""One training step with offloaded optimizer states: zeroshard's ZeRO-2 beside DeepSpeed's, in bf16.

    python benchmarks/offload.py [--quick] [--deepspeed-python PYTHON] [--json FILE]

Processes with one thread each on this machine, over gloo or, for `-shared`, shared memory; the GPT and the batch of
`peers.py`. A launch is fresh processes of one engine, and the engines take turns (A B C ... A B C ...). Every figure is
a median over rounds of medians over steps. CPU seconds (all threads, per rank and step) are steadier than wall time
where other work shares the cores, and with as many ranks as cores they bound the step from below.

- `compute`: forward and backward alone, in processes that do not communicate. Its CPU seconds are in every other row
  too, and a processor without bf16 instructions takes so long for them that with larger batches they hide the update.
  With one token per rank the update has about the share that it has on a GPU with many; "beyond compute" subtracts
  them from both sides.
- `offload`: Plan(zero=2, offload="optimizer"), torch.optim.AdamW; `after-norm` is the same with
  `offload.speculate=False`.
- `memory`: the same optimizer with its states on the device; `memory-fused` with AdamW(fused=True), the fastest there.
- `deepspeed`: stage 2 with offload_optimizer on "cpu" and DeepSpeedCPUAdam; `deepspeed-memory` without.
- A name that ends in `-1` is one process alone.

Where the device is a CPU, device and host are both this machine's memory. Neither engine treats this case apart:
gradients are copied "down" and weights "up", and the update runs on the host side. So the comparison covers copies,
passes over memory and threads. There is no PCIe here that an overlap could hide.

Two targets: a step takes at most 0.6 times DeepSpeed's, over gloo and over shared memory (`transport="auto"`).
Two checks, for which the exit status is 1: losses of ours with and without offload are equal bit for bit, and
DeepSpeed's, in the mean over ranks and steps, are within 1e-2 of them.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from peer_engines import SHAPES, WARM, Case, Trial
from ranks import DEEPSPEED_ENV, LaunchError, answer, circumstances, cpu_seconds, launch

FULL = {"sizes": "25M,100M", "tokens": "1,64", "rounds": 5, "steps": 12}
QUICK = {"sizes": "25M", "tokens": "1", "rounds": 2, "steps": 6}
BAR, NEAR = 0.6, 1e-2  # of DeepSpeed's step; relative distance of its losses
ADAM: dict[str, Any] = {"lr": 2e-5, "weight_decay": 0.01}
Row = dict[str, Any]
Made = tuple[Any, Callable[[], Any]]  # the engine, and its step, which returns this rank's loss


@dataclass(frozen=True)
class Engine:
    """One way to train.

    Attributes:
        family: a key of `FAMILIES`.
        settings: fields of the plan beside zero=2 and bf16, or for DeepSpeed of "zero_optimization" beside the stage.
        ranks: how many processes.
        fused: whether torch's optimizer is the fused one.
    """

    family: str
    settings: dict[str, Any]
    ranks: int = 2
    fused: bool = False


OFFLOAD = {"offload": "optimizer"}
GLOO, SHARED = {"transport": "network"}, {"transport": "shared"}
CPU = {"offload_optimizer": {"device": "cpu"}}
ENGINES = {
    "compute": Engine("compute", {}),
    "deepspeed": Engine("deepspeed", CPU),
    "deepspeed-memory": Engine("deepspeed", {}),
    "offload": Engine("zeroshard", GLOO | OFFLOAD),
    "after-norm": Engine("zeroshard", GLOO | OFFLOAD | {"offload.speculate": False}),
    "memory": Engine("zeroshard", GLOO),
    "memory-fused": Engine("zeroshard", GLOO, fused=True),
    "offload-shared": Engine("zeroshard", SHARED | OFFLOAD),
    "after-norm-shared": Engine("zeroshard", SHARED | OFFLOAD | {"offload.speculate": False}),
    "memory-shared": Engine("zeroshard", SHARED),
    "deepspeed-1": Engine("deepspeed", CPU, ranks=1),
    "offload-1": Engine("zeroshard", OFFLOAD, ranks=1),
    "after-norm-1": Engine("zeroshard", OFFLOAD | {"offload.speculate": False}, ranks=1),
    "memory-1": Engine("zeroshard", {}, ranks=1),
}
SAME = [(f"{name}{way}", f"memory{way}") for way in ("", "-shared", "-1") for name in ("offload", "after-norm")]
PAIRS = [("offload", "deepspeed"), ("offload-shared", "deepspeed"), ("offload-1", "deepspeed-1")]
BARRED = PAIRS[:2]  # with two processes


def make_ours(engine: Engine, trial: Trial) -> Made:
    """zeroshard."""
    import torch

    import zeroshard as zs

    plan = zs.Plan.from_dict({"zero": 2, "precision": "bf16", **engine.settings})
    adam = partial(torch.optim.AdamW, **ADAM, **({"fused": True} if engine.fused else {}))
    made = zs.Engine(trial.model, adam, plan, mesh=zs.init_mesh(device="cpu"))
    return made, lambda: made.train_step(trial.batch).loss


def make_deepspeed(engine: Engine, trial: Trial) -> Made:
    """DeepSpeed, as its documentation sets ZeRO-Offload up: its own Adam, otherwise its defaults."""
    import deepspeed  # type: ignore[import-not-found]
    import torch

    deepspeed.init_distributed("gloo", verbose=False)
    zero = {"stage": 2, **engine.settings}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "bf16": {"enabled": True}}
    config |= {"gradient_clipping": 0.0, "steps_per_print": 10**9, "zero_allow_untested_optimizer": True}
    if engine.settings:
        config["optimizer"] = {"type": "AdamW", "params": ADAM}
        wrapped, *_ = deepspeed.initialize(model=trial.model, config=config)
    else:
        config["zero_force_ds_cpu_optimizer"] = False
        optimizer = torch.optim.AdamW(trial.model.parameters(), **ADAM, fused=True)
        wrapped, *_ = deepspeed.initialize(model=trial.model, optimizer=optimizer, config=config)

    def step() -> Any:
        loss = wrapped(*trial.batch)
        wrapped.backward(loss)
        wrapped.step()
        return loss.detach()

    return wrapped, step


def make_compute(engine: Engine, trial: Trial) -> Made:
    """Forward and backward alone; nothing is sent or updated."""
    import torch

    model = trial.model.to(torch.bfloat16)

    def step() -> Any:
        loss = model(*trial.batch)
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return None, step


FAMILIES = {"compute": make_compute, "deepspeed": make_deepspeed, "zeroshard": make_ours}


def measure(name: str, case: Case, steps: int) -> Row:
    """Train, and return this rank's figures: seconds per step, losses, and of ours exposed seconds and speculation."""
    import torch

    engine, trial = ENGINES[name], Trial(case)
    trial.model.bfloat16().float()  # DeepSpeed makes its masters from weights that are rounded already
    made, step = FAMILIES[engine.family](engine, trial)
    losses, walls, cpus, exposed = [], [], [], []
    for _ in range(WARM + steps):
        cpu, wall = cpu_seconds(), time.perf_counter()
        losses.append(float(step()))
        walls.append(time.perf_counter() - wall)
        cpus.append(cpu_seconds() - cpu)
        exposed.append(dict(getattr(made, "exposed", {})))
    row: Row = {"step_s": statistics.median(walls[WARM:]), "cpu_s": statistics.median(cpus[WARM:]), "losses": losses}
    row["exposed_s"] = {
        cause: statistics.median(each.get(cause, 0.0) for each in exposed[WARM:])
        for cause in sorted({cause for each in exposed[WARM:] for cause in each})
    }
    offloads = engine.family == "zeroshard" and "offload" in engine.settings
    row["guesses"] = [made.speculation_counts.taken, made.speculation_counts.undone] if offloads else None
    row["optimizer"] = type(getattr(made.optimizer, "optimizer", made.optimizer)).__name__ if made else None
    return {**row, "torch": torch.__version__, "parameters": trial.parameters}


def combine(ranks: Sequence[Row]) -> Row:
    """One launch from the answers of its ranks: the slower one's step, the mean of CPU seconds."""
    first = ranks[0]
    whole: Row = {name: first[name] for name in ("exposed_s", "guesses", "optimizer", "parameters", "torch")}
    whole["step_s"] = max(rank["step_s"] for rank in ranks)
    whole["cpu_s"] = statistics.fmean(rank["cpu_s"] for rank in ranks)
    whole["losses"] = [rank["losses"] for rank in ranks]
    return whole


def summarise(name: str, case: Case, launches: Sequence[Row]) -> Row:
    """The row of one engine: medians over rounds, and each round's seconds."""
    row: Row = {"engine": name, "ranks": ENGINES[name].ranks, "size": case.size, "tokens": case.tokens, **launches[-1]}
    for figure in ("step_s", "cpu_s"):
        row[f"{figure}_rounds"] = [launched[figure] for launched in launches]
        row[figure] = statistics.median(row[f"{figure}_rounds"])
    row["same_every_round"] = all(launched["losses"] == row["losses"] for launched in launches)
    return row


def turns(case: Case, names: Sequence[str], options: argparse.Namespace) -> tuple[list[Row], dict[str, str]]:
    """Rows of all engines, launched in turns, and the failures by engine."""
    launches: dict[str, list[Row]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    for number in range(options.rounds):
        for name in (name for name in names if name not in failed):
            if sys.stdout.isatty():
                print(f"{case.size} {case.tokens} {number + 1} {name:18}", end="\r", flush=True)
            try:
                launches[name].append(combine(start(name, case, options)))
            except LaunchError as error:
                failed[name] = str(error)
    return [summarise(name, case, launches[name]) for name in names if name not in failed], failed


def start(name: str, case: Case, options: argparse.Namespace) -> list[Row]:
    """One launch of one engine; the answers of its ranks."""
    engine = ENGINES[name]
    words = ["--launched", name, case.size, str(case.tokens), str(options.steps)]
    python, env = sys.executable, {}
    if engine.family == "deepspeed":
        python, env = options.deepspeed_python, DEEPSPEED_ENV
    return launch(__file__, words, engine.ranks, python, env, options.timeout)


def judge(rows: Sequence[Row]) -> list[Row]:
    """Ratios of ours to DeepSpeed's, those of two processes with the bar."""
    by_name = {row["engine"]: row for row in rows}
    judged = []
    for ours, theirs in PAIRS:
        if ours in by_name and theirs in by_name:
            here, there = by_name[ours], by_name[theirs]
            ratios = {f"{figure}_ratio": here[figure] / there[figure] for figure in ("step_s", "cpu_s")}
            if "compute" in by_name:
                base = by_name["compute"]["cpu_s"]
                ratios["beyond_compute_cpu_ratio"] = (here["cpu_s"] - base) / (there["cpu_s"] - base)
            bar = BAR if (ours, theirs) in BARRED else None
            reached = None if bar is None else ratios["step_s_ratio"] <= bar
            judged.append({"ours": ours, "theirs": theirs, **ratios, "bar": bar, "reached": reached})
    return judged


def complaints(rows: Sequence[Row]) -> list[str]:
    """Faults of the losses and of the versions, as sentences."""
    by_name = {row["engine"]: row for row in rows}
    words = [f"{name}'s losses differ from round to round" for name in by_name if not by_name[name]["same_every_round"]]
    for ours, theirs in SAME:
        if ours in by_name and theirs in by_name and by_name[ours]["losses"] != by_name[theirs]["losses"]:
            words.append(f"the losses of {ours} are not those of {theirs} bit for bit")
    for ours, theirs in PAIRS:
        if ours in by_name and theirs in by_name:
            far = distance(by_name[ours]["losses"], by_name[theirs]["losses"])
            if not far <= NEAR:
                words.append(f"the losses of {theirs} are {far:.1e} from those of {ours}")
    versions = {row["torch"].partition("+")[0] for row in rows}
    return words if len(versions) <= 1 else [*words, f"the engines ran on torch {', '.join(sorted(versions))}"]


def distance(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """The relative distance of two engines' mean losses over ranks and steps; one loss depends on few bf16 logits."""
    here, there = (statistics.fmean(loss for rank in ranks for loss in rank) for ranks in (ours, theirs))
    return abs(here - there) / abs(here) if math.isfinite(there) else math.inf


def table(rows: Sequence[Row]) -> str:
    """For people: one line per engine."""
    first = rows[0]
    lines = [
        f"\n{first['size']}, {first['tokens']} tokens per rank, bf16",
        f"{'':18} ranks {'step ms':>9}{'CPU ms':>9}{'loss':>10}  guesses taken, undone; exposed ms by cause",
    ]
    for row in rows:
        causes = ", ".join(f"{cause} {1e3 * seconds:.1f}" for cause, seconds in row["exposed_s"].items())
        guesses = "{}, {}; ".format(*row["guesses"]) if row["guesses"] else ""
        lines.append(
            f"{row['engine']:18} {row['ranks']:5} {row['step_s'] * 1e3:9.1f}{row['cpu_s'] * 1e3:9.1f}"
            f"{row['losses'][0][-1]:10.5f}  {guesses}{causes}"
        )
    return "\n".join(lines)


def verdicts(judged: Sequence[Row]) -> str:
    """For people: one line per ratio."""
    marks = {None: "    ", True: "pass", False: "FAIL"}
    lines = [
        f"  {marks[bar['reached']]}  {bar['ours']} / {bar['theirs']}: step {bar['step_s_ratio']:.2f}, "
        f"CPU {bar['cpu_s_ratio']:.2f}"
        + (f", beyond compute {bar['beyond_compute_cpu_ratio']:.2f}" if "beyond_compute_cpu_ratio" in bar else "")
        + (f"; the bar is {bar['bar']}" if bar["bar"] else "")
        for bar in judged
    ]
    return "\n".join(lines or ["  without DeepSpeed there is no bar"])


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK}")
    parser.add_argument("--sizes", help=f"of {', '.join(SHAPES)}; by default {FULL['sizes']}")
    parser.add_argument("--tokens", help=f"per rank; by default {FULL['tokens']}")
    parser.add_argument("--engines", help=f"by default all that can run, of {', '.join(ENGINES)}")
    parser.add_argument("--rounds", type=int, help=f"launches of each engine; by default {FULL['rounds']}")
    parser.add_argument("--steps", type=int, help=f"timed steps, after {WARM} others; by default {FULL['steps']}")
    parser.add_argument("--deepspeed-python", help="a python that has deepspeed (peers_requirements.txt)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that a launch may take")
    parser.add_argument("--json", help="file for the figures, written anew after each group")
    parser.add_argument("--launched", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    can = [name for name in ENGINES if ENGINES[name].family != "deepspeed" or options.deepspeed_python]
    wanted = options.engines.split(",") if options.engines else can
    if unknown := [name for name in wanted if name not in can]:
        parser.error(f"--engines names {unknown[0]!r}; here there are {', '.join(can)}")
    if unknown := set(options.sizes.split(",")) - set(SHAPES):
        parser.error(f"--sizes names {', '.join(unknown)}; there are {', '.join(SHAPES)}")
    options.engines = [name for name in ENGINES if name in wanted]
    return options


def main() -> int:
    """Launch, print, keep."""
    options = parse()
    if options.launched:
        name, size, tokens, steps = options.launched
        answer(measure(name, Case(size, int(tokens), "bf16"), int(steps)))
        return 0
    kept: Row = {**circumstances(), "gpu": None, "rounds": options.rounds, "steps": options.steps}
    print(f"{kept['cpu']}, {kept['cores']} cores, no GPU used, load {kept['load']:.1f}, {options.rounds} rounds")
    for family in ("zeroshard", "deepspeed"):  # so that kernels are built and files are in memory
        first = next((name for name in options.engines if ENGINES[name].family == family), None)
        if first:
            start(first, Case("1M", 8, "bf16"), argparse.Namespace(**{**vars(options), "steps": 1}))
    kept |= {"rows": [], "bars": [], "failed": []}
    words = []
    for case in [Case(s, int(t), "bf16") for s in options.sizes.split(",") for t in options.tokens.split(",")]:
        rows, failed = turns(case, options.engines, options)
        words += [f"{name} failed. {text}" for name, text in failed.items()]
        if rows:
            judged = judge(rows)
            print(table(rows), verdicts(judged), sep="\n", flush=True)
            words += [f"{case.size}, {case.tokens} tokens: {text}" for text in complaints(rows)]
            kept["bars"] += [{"size": case.size, "tokens": case.tokens, **bar} for bar in judged]
        kept["rows"] += rows
        kept["failed"] += [{"size": case.size, "tokens": case.tokens, "engine": name} for name in failed]
        if options.json:
            kept["load_at_end"], kept["complaints"] = os.getloadavg()[0], words
            Path(options.json).write_text(json.dumps(kept, indent=1) + "\n")
    print(*words, sep="\n", file=sys.stderr)
    return 1 if words else 0


if __name__ == "__main__":
    sys.exit(main())
