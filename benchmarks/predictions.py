"""Predictions of the planner against measurements: step times, the order of plans, and plans that fit into memory.

    python benchmarks/predictions.py [--part times] [--part policies] [--part fits] [--rounds 3] [--plans 200]
        [--json FILE]

`times`: CPU seconds of a step for plans of several stages, schedules, microbatches and models on two gloo processes
with one thread each, against predictions from few blocks run in one process and the profile of the machine (measured
at the start). Then the plan with the shortest predicted step is looked up among the measured ones.

`policies`: likewise for twelve policies of activations, with one figure alone: how far predictions are off.

`fits`: random plans run for real on two processes; each is given a random limit of memory, and the prediction, made
from tensors without values, says whether it fits with 3 % to spare. The measured peak of the run decides.
"""

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ranks import answer, circumstances, cpu_seconds, launch

RANKS = 2
MARGIN = 0.03
BARS = {"median": 0.10, "worst": 0.20, "chosen": 1.05, "false_fits": 0, "false_refusals": 0.05}
MODELS = {  # vocabulary, context, width, heads, layers
    "wide": (512, 128, 256, 4, 4),
    "deep": (256, 128, 128, 2, 12),
    "tall": (8192, 64, 128, 2, 4),
}
TOY = dict.fromkeys(MODELS, (16, 4, 8, 2, 4))
CUT = {"pipeline_parallel": 2, "microbatches": 8, "pipeline_parallel.balance": "parameters"}
PLANS: list[tuple[str, dict[str, Any]]] = [
    ("wide", {"zero": 0, "transport": "network"}),
    ("wide", {"zero": 1, "transport": "network"}),
    ("wide", {"zero": 2, "transport": "network"}),
    ("wide", {"zero": 3, "transport": "network"}),
    ("wide", {"zero": 0, "transport": "shared"}),
    ("wide", {"zero": 2, "transport": "shared"}),
    ("wide", {"zero": 3, "transport": "shared", "microbatches": 4}),
    ("wide", {"zero": 2, "transport": "network", "microbatches": 4}),
    ("wide", {"zero": 2, "transport": "network", "microbatches": 4, "reduce_every": "step"}),
    ("wide", {"zero": 0, "transport": "network", "microbatches": 8}),
    ("wide", {"zero": 3, "transport": "network", "microbatches": 2, "clip_norm": 1.0}),
    ("wide", {**CUT, "zero": 0, "pipeline_parallel.schedule": "1f1b"}),
    ("wide", {**CUT, "zero": 0, "pipeline_parallel.schedule": "gpipe"}),
    ("wide", {**CUT, "zero": 0, "pipeline_parallel.schedule": "gpipe", "recompute": "off"}),
    ("wide", {**CUT, "zero": 0, "pipeline_parallel.schedule": "interleaved", "pipeline_parallel.virtual_stages": 2}),
    ("wide", {**CUT, "zero": 0, "pipeline_parallel.schedule": "zb-h1"}),
    ("deep", {"zero": 1, "transport": "network"}),
    ("deep", {"zero": 3, "transport": "network"}),
    ("deep", {"zero": 2, "transport": "shared", "microbatches": 2}),
    ("deep", {**CUT, "zero": 0, "pipeline_parallel.schedule": "1f1b"}),
    ("tall", {"zero": 0, "transport": "network"}),
    ("tall", {"zero": 3, "transport": "network"}),
    ("tall", {"zero": 2, "transport": "shared"}),
    ("tall", {**CUT, "zero": 0, "pipeline_parallel.schedule": "1f1b"}),
]
DATA = {"zero": 2, "transport": "network"}
POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("wide", {**DATA, "recompute": "off"}),
    ("wide", {**DATA, "recompute": "blocks"}),
    ("wide", {**DATA, "recompute": "selective"}),
    ("deep", {**DATA, "recompute": "blocks"}),
    ("deep", {**DATA, "recompute": "sqrt"}),
    ("deep", {**DATA, "recompute": "selective"}),
    ("deep", {**DATA, "recompute": "auto", "device_memory": 120_000_000}),
    ("deep", {**DATA, "recompute": "auto", "device_memory": 80_000_000}),
    ("deep", {**DATA, "offload": "activations"}),
    ("deep", {**DATA, "recompute": "blocks", "offload": "activations"}),
    ("deep", {**DATA, "activations.compress": ("e4m3",)}),
    ("deep", {**DATA, "zero": 3, "recompute": "blocks", "microbatches": 2}),
]
ROWS = 8  # of one data rank


def task_of(shape: Sequence[int], rows: int, optimizer: str = "fused") -> Any:
    """The job of one model."""
    import torch

    from zeroshard.planner.predict.rehearse import TrainingTask
    from zeroshard.train.gpt import GPT
    from zeroshard.train.sizes import GPTConfig

    config = GPTConfig(*shape)

    def build() -> Any:
        with torch.device("meta"):
            return GPT(config)

    def batch(count: int) -> dict[str, Any]:
        drawn = torch.randint(config.vocabulary, (count, config.context))
        return {"tokens": drawn, "targets": drawn}

    makers: dict[str, Any] = {
        "fused": partial(torch.optim.AdamW, lr=1e-3, fused=True),
        "loop": partial(torch.optim.AdamW, lr=1e-3, foreach=False),
        "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        "sgd": partial(torch.optim.SGD, lr=1e-3),
    }
    return TrainingTask(build, batch, makers[optimizer], rows, config.context)


def engine_of(task: Any, plan: Any, mesh: Any, rows: int) -> tuple[Any, Any]:
    """The engine and the batch of one rank."""
    from zeroshard.engine import Engine

    model, example = task.build(), task.batch(max(1, rows // plan.microbatches))
    return Engine(model, task.optimizer_of(model), plan, mesh=mesh, example=example), task.batch(rows)


def rank_of_times(plans: list[tuple[Sequence[int], dict[str, Any]]], steps: int) -> None:
    """One rank of a launch: the median CPU and wall seconds of a step under each plan."""
    import torch

    from zeroshard.comm.mesh import init_mesh
    from zeroshard.plan import Plan

    torch.set_num_threads(1)
    mesh, found = init_mesh(device="cpu"), []
    for shape, given in plans:
        engine, batch = engine_of(task_of(shape, ROWS), Plan.from_dict(given), mesh, ROWS)
        cpus, walls = [], []
        for number in range(steps + 3):
            cpu, wall = cpu_seconds(), time.perf_counter()
            engine.train_step(batch)
            if number >= 3:
                cpus.append(cpu_seconds() - cpu)
                walls.append(time.perf_counter() - wall)
        found.append((statistics.median(cpus), statistics.median(walls)))
        engine.world.agree(b"", "next plan")
    answer({"found": found})


def times(arguments: argparse.Namespace, plans: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Predicted and measured CPU seconds of each plan, in turns."""
    import torch

    from zeroshard.doctor.cpu_load import busy_cpus
    from zeroshard.doctor.facts import gather_facts
    from zeroshard.doctor.measure import Effort, measure
    from zeroshard.plan import Plan
    from zeroshard.planner.predict.predict import predict_timed
    from zeroshard.planner.search.this_machine import local_machines

    torch.set_num_threads(1)
    measured: list[list[float]] = [[] for _ in plans]
    walls: list[list[float]] = [[] for _ in plans]
    foretold: list[list[float]] = [[] for _ in plans]
    profile = None if arguments.toy else measure(Effort(), gather_facts(os.environ, Path(".")), threads=1)
    models = TOY if arguments.toy else MODELS
    for number in range(arguments.rounds):
        for place, (model, given) in enumerate(plans):
            plan = Plan.from_dict(given)
            transport: Any = "shared" if given.get("transport") == "shared" else "network"
            machines = profile.machines(RANKS, transport, "cpu") if profile else local_machines(RANKS, "cpu")
            with busy_cpus(0 if arguments.toy else RANKS - 1):
                prediction = predict_timed(task_of(models[model], ROWS * RANKS), plan, machines, ROWS, threads=1)
            foretold[place].append(prediction.seconds - prediction.causes.get("bubble", 0.0))
            words = ["--times-rank", json.dumps([[(models[model], given)], arguments.steps])]
            ranks = launch(__file__, words, RANKS)
            measured[place].append(max(rank["found"][0][0] for rank in ranks))
            walls[place].append(max(rank["found"][0][1] for rank in ranks))
            says = f"{foretold[place][-1]:.4f} s foretold, {measured[place][-1]:.4f} s taken"
            print(f"round {number}: {model} {given}: {says}", file=sys.stderr, flush=True)
    rows = []
    for place, (model, given) in enumerate(plans):
        real, ours = statistics.median(measured[place]), statistics.median(foretold[place])
        wall = statistics.median(walls[place])
        rows.append({"model": model, "plan": given, "cpu_s": real, "foretold_s": ours, "wall_s": wall,
                     "error": ours / real - 1})  # fmt: skip
    errors = [abs(row["error"]) for row in rows]
    summary = {"median": statistics.median(errors), "worst": max(errors), "plans": len(rows)}
    return {"rows": rows, "summary": summary}


def choice(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The plan with the shortest predicted step among the measured ones of one model without stages."""
    same = [row for row in rows if row["model"] == "wide" and row["plan"].get("pipeline_parallel", 1) == 1]
    chosen = min(same, key=lambda row: row["foretold_s"])
    best = min(same, key=lambda row: row["cpu_s"])
    return {"chosen": chosen["cpu_s"] / best["cpu_s"], "among": len(same), "tau": _tau(same)}


def _tau(rows: list[dict[str, Any]]) -> float:
    """Kendall's rank correlation of predicted and measured times."""
    pairs = [(a, b) for place, a in enumerate(rows) for b in rows[:place]]
    signs = [math.copysign(1, (a["cpu_s"] - b["cpu_s"]) * (a["foretold_s"] - b["foretold_s"])) for a, b in pairs]
    return sum(signs) / len(signs) if signs else math.nan


def drawn(seed: int) -> tuple[tuple[int, int, int, int, int], dict[str, Any], str, int, float]:
    """A random model, plan, optimizer, number of rows and limit (a multiple of the real peak)."""
    rng = random.Random(seed)
    heads = rng.choice((1, 2, 4))
    shape = (rng.choice((64, 256, 1000)), rng.choice((16, 32, 64)), heads * rng.choice((8, 16, 32)), heads,
             rng.randint(4, 8))  # fmt: skip
    plan: dict[str, Any] = {"transport": "network", "clip_norm": rng.choice((None, 1.0))}
    rows = rng.choice((4, 8, 12))
    if rng.random() < 0.4:
        schedule = rng.choice(("1f1b", "gpipe", "zb-h1", "interleaved", "pipedream", "2bw"))
        plan = {
            "pipeline_parallel": 2,
            "microbatches": 4,
            "pipeline_parallel.schedule": schedule,
            "zero": 0,
            "pipeline_parallel.balance": "parameters",
        }
        plan |= {"pipeline_parallel.virtual_stages": 2} if schedule == "interleaved" else {}
        rows = rng.choice((4, 8, 12))
    else:
        plan |= {"zero": rng.randint(0, 3), "microbatches": rng.choice((1, 2, 4))}
        if plan["microbatches"] > 1:
            plan["reduce_every"] = rng.choice(("auto", "step"))
    plan["precision"] = rng.choice(("fp32", "fp32", "bf16"))
    optimizer = rng.choice(("fused", "loop", "momentum", "sgd"))
    return shape, plan, optimizer, rows, 2 ** rng.uniform(-1, 1)


def rank_of_fits(seeds: list[int]) -> None:
    """One rank of a launch: the peak of all bytes alive under each random plan."""
    import torch

    from zeroshard.comm.mesh import init_mesh
    from zeroshard.plan import Plan
    from zeroshard.planner.predict.memory_tracker import Tracker

    torch.set_num_threads(1)
    mesh, found = init_mesh(device="cpu"), []
    for seed in seeds:
        shape, given, optimizer, rows, _ = drawn(seed)
        plan = Plan.from_dict(given)
        tracker = Tracker()
        with tracker, tracker.resizing():
            engine, batch = engine_of(task_of(shape, rows, optimizer), plan, mesh, rows)
            for _ in range(8 if plan.streams else 3):
                engine.train_step(batch)
        engine.flush()
        found.append(tracker.peak.nbytes)
        engine.world.agree(b"", "next plan")
        del engine
    answer({"found": found})


def fits(arguments: argparse.Namespace) -> dict[str, Any]:
    """Counts of right and wrong predictions for random plans under random limits."""
    from zeroshard.plan import Plan
    from zeroshard.planner.predict.rehearse import rehearse

    seeds = list(range(arguments.plans))
    rows = []
    for start in range(0, len(seeds), 20):  # a process makes only so many groups
        part = seeds[start : start + 20]
        ranks = launch(__file__, ["--fits-rank", json.dumps(part)], RANKS)
        for place, seed in enumerate(part):
            shape, given, optimizer, count, factor = drawn(seed)
            real = [rank["found"][place] for rank in ranks]
            task = task_of(shape, count, optimizer)
            ours = [rehearse(task, Plan.from_dict(given), rank, RANKS, count).peak_bytes for rank in range(RANKS)]
            limit = factor * max(real)
            row = {"seed": seed, "plan": given, "real": real, "foretold": ours, "limit": limit}
            rows.append(row | {"fits": max(real) <= limit, "said": max(ours) <= limit * (1 - MARGIN)})
        print(f"{len(rows)} of {len(seeds)} plans", file=sys.stderr)
    errors = [abs(ours / real - 1) for row in rows for ours, real in zip(row["foretold"], row["real"], strict=True)]
    summary = {
        "plans": len(rows),
        "false_fits": sum(row["said"] and not row["fits"] for row in rows),
        "false_refusals": sum(row["fits"] and not row["said"] for row in rows) / len(rows),
        "exact": sum(error == 0 for error in errors) / len(errors),
        "worst_error": max(errors),
    }
    return {"rows": rows, "summary": summary}


def main() -> None:
    """Run the chosen parts, and print a table and the targets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=("times", "policies", "fits"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--toy", action="store_true", help="tiny models and assumed rates, to try the script out")
    parser.add_argument("--first", type=int, help="only so many of the plans that are timed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--times-rank", type=json.loads)
    parser.add_argument("--fits-rank", type=json.loads)
    arguments = parser.parse_args()
    if arguments.times_rank:
        rank_of_times(*arguments.times_rank)
        return
    if arguments.fits_rank:
        rank_of_fits(arguments.fits_rank)
        return
    content: dict[str, Any] = {"circumstances": circumstances()}
    for part in arguments.part or ("times", "policies", "fits"):
        content[part] = (
            fits(arguments)
            if part == "fits"
            else times(arguments, (PLANS if part == "times" else POLICIES)[: arguments.first])
        )
        if part == "times":
            content[part]["summary"] |= choice(content[part]["rows"])
        if part != "fits":
            for row in content[part]["rows"]:
                print(f"{row['model']:5} {row['cpu_s']:.4f} s  foretold {row['foretold_s']:.4f} s  {row['error']:+.1%}"
                      f"  {row['plan']}")  # fmt: skip
        print(json.dumps({part: content[part]["summary"], "bars": BARS}, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
