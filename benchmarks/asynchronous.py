"""Loss against time with one slow worker: synchronous (BSP), with bounded staleness (SSP), and asynchronous (ASP).

    python benchmarks/asynchronous.py [--seconds 20] [--rounds 3] [--factors 1 2 4] [--bound 8] [--quick] [--json FILE]

Two gloo processes with one thread each train the same small GPT on the standard library's source for the same time.
Their speed is fixed, so that it depends little on other load of the machine: between forward and backward a worker
sleeps until `--step-ms` have passed since the step began, and worker 1, the slow one, until `factor` times as much.
BSP is DistributedDataParallel; all use AdamW with one learning rate and the same rows per worker and step. Worker 0
keeps its weights about twice a second and the held-out loss of each is computed after the run. Methods are launched in
turns; figures are medians over rounds. The target is the loss at which BSP ends.
"""

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from ranks import answer, circumstances, launch

METHODS = ("bsp", "ssp", "asp")
SHAPE = {"vocabulary": 256, "context": 64, "width": 64, "heads": 2, "layers": 2}
ROWS, RATE, EVERY = 8, 1e-3, 0.5  # rows per worker and step; learning rate; seconds between kept weights
STOP_EVERY = 5  # steps of BSP between agreements that the time is up


def measure(method: str, factor: float, arguments: argparse.Namespace) -> None:
    """One rank of one launch; rank 0 answers with the curve."""
    import torch

    import zeroshard as zs
    from zeroshard.data.corpus import Batches, standard_library_corpus, validation_windows
    from zeroshard.train.gpt import GPT
    from zeroshard.train.sizes import GPTConfig

    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = zs.init_mesh()
    corpus = standard_library_corpus()
    train, held_out = (torch.frombuffer(bytearray(t), dtype=torch.uint8) for t in (corpus.train, corpus.validation))
    batches = Batches(train, SHAPE["context"], seed=0)
    model = GPT(GPTConfig(**SHAPE))

    def gradient(wrapped: Any, number: int) -> None:
        first, count = number * ROWS * mesh.ranks, ROWS * mesh.ranks
        rows = batches.rows(range(first, first + count), mesh.rank, mesh.ranks)
        begin = time.perf_counter()
        loss = wrapped(rows[:, :-1], rows[:, 1:])
        computing.append(time.perf_counter() - begin)
        time.sleep(max(0.0, begin + pace - time.perf_counter()))
        loss.backward()

    computing: list[float] = []  # seconds of each forward
    pace = arguments.step_ms / 1e3 * (factor if mesh.rank == 1 else 1.0)
    adam = partial(torch.optim.AdamW, lr=RATE)
    prepare = _bsp if method == "bsp" else partial(_asynchronous, arguments.bound if method == "ssp" else None)
    step, go_on, finish = prepare(mesh, model, adam, gradient)
    torch.distributed.barrier()
    start, kept, steps = time.perf_counter(), [], 0
    for steps in go_on(start + arguments.seconds):
        version = step(steps)
        if mesh.rank == 0 and time.perf_counter() - start >= EVERY * len(kept):
            kept.append((time.perf_counter() - start, version, deepcopy(model.state_dict())))
    took = time.perf_counter() - start
    figures = {"steps_per_s": (steps + 1) / took, "forward_s": statistics.median(computing), **finish()}
    if mesh.rank == 0:
        windows = torch.cat(list(validation_windows(held_out, SHAPE["context"], 64, 0, 1, limit=256)))
        curve = figures["curve"] = []
        for at, version, weights in kept:
            model.load_state_dict(weights)
            with torch.no_grad():
                loss = float(model(windows[:, :-1], windows[:, 1:]))
            curve.append([round(at, 2), version, round(loss / math.log(2), 4)])
        figures["bits_per_byte"] = curve[-1][2]
    answer(figures)


def _bsp(mesh: Any, model: Any, adam: Any, gradient: Any) -> Any:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model)
    optimizer = adam(model.parameters())

    def go_on(end: float) -> Iterator[int]:
        number, late = 0, torch.zeros(1)
        while not late:
            yield number
            number += 1
            if number % STOP_EVERY == 0:  # rank 0 decides, or one would wait for the other
                late.fill_(time.perf_counter() > end)
                torch.distributed.broadcast(late, 0)

    def step(number: int) -> int:
        gradient(wrapped, number)
        optimizer.step()
        optimizer.zero_grad()
        return number + 1

    return step, go_on, dict


def _asynchronous(bound: int | None, mesh: Any, model: Any, adam: Any, gradient: Any) -> Any:
    import zeroshard as zs

    trainer = zs.AsynchronousTrainer(model, adam, staleness=bound, mesh=mesh)
    leads, waits = [], []

    def go_on(end: float) -> Iterator[int]:
        number = 0
        while time.perf_counter() < end:
            yield number
            number += 1

    def step(number: int) -> int:
        gradient(model, number)
        result = trainer.step()
        leads.append(result.lead)
        waits.append(result.waited)
        return result.version

    def finish() -> dict[str, Any]:
        staleness = trainer.finish()
        by_worker = [{str(value): count for value, count in sorted(c.items())} for c in staleness.by_worker]
        return {"staleness_mean": staleness.mean, "staleness": by_worker, "lead": max(leads), "waited_s": sum(waits)}

    return step, go_on, finish


def run(method: str, factor: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """Two processes of one method: rank 0's figures, and the speed of both."""
    words = ["--method", method, "--factors", str(factor)]
    for name in ("seconds", "bound", "step_ms"):
        words += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    ranks = launch(__file__, words, 2)
    speeds = [rank["steps_per_s"] for rank in ranks]
    return {"method": method, "factor": factor, **ranks[0], "steps_per_s": speeds, "rows_per_s": ROWS * sum(speeds)}


def summarise(runs: list[dict[str, Any]], factors: list[float]) -> list[dict[str, Any]]:
    """Medians over rounds of each method and factor; the target is BSP's own final loss at that factor."""
    rows = []
    for factor in factors:
        bsp = [run for run in runs if run["method"] == "bsp" and run["factor"] == factor]
        target = statistics.median(run["bits_per_byte"] for run in bsp)
        for method in METHODS:
            mine = [run for run in runs if run["method"] == method and run["factor"] == factor]
            per_update = ROWS * (2 if method == "bsp" else 1)
            reached = [next(((at, n) for at, n, loss in run["curve"] if loss <= target), None) for run in mine]
            row = {"method": method, "factor": factor, "target_bits_per_byte": target}
            row["seconds_to_target"] = _median([there and there[0] for there in reached])
            row["rows_to_target"] = _median([there and there[1] * per_update for there in reached])
            for key in ("rows_per_s", "bits_per_byte", "staleness_mean", "lead", "waited_s"):
                row[key] = _median([run.get(key) for run in mine])
            rows.append(row)
    return rows


def _median(values: list[float | None]) -> float | None:
    """The median, with None (never reached) as the largest value."""
    middle = statistics.median(math.inf if value is None else value for value in values)
    return middle if math.isfinite(middle) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--factors", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    parser.add_argument("--bound", type=int, default=8, help="steps ahead, for SSP")
    parser.add_argument("--step-ms", type=float, default=60.0, help="shortest step of the fast worker")
    parser.add_argument("--quick", action="store_true", help="one round of 6 seconds, factors 1 and 4")
    parser.add_argument("--json")
    parser.add_argument("--method", choices=METHODS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.method:
        measure(arguments.method, arguments.factors[0], arguments)
        return
    if arguments.quick:
        arguments.rounds, arguments.seconds, arguments.factors = 1, 6.0, [1.0, 4.0]
    facts, loads, runs = circumstances(), [], []
    for _ in range(arguments.rounds):
        for factor in arguments.factors:
            runs += [run(method, factor, arguments) for method in METHODS]
            loads.append(os.getloadavg()[0])
    rows = summarise(runs, arguments.factors)
    print(f"{facts['cpu']}, {facts['cores']} cores, 2 workers, {arguments.rounds} rounds of {arguments.seconds:.0f} s")
    for row in rows:
        never = row["seconds_to_target"] is None
        reached = "never" if never else f"after {row['seconds_to_target']:4.1f} s and {row['rows_to_target']:5.0f} rows"
        stale = "" if row["staleness_mean"] is None else f"; staleness {row['staleness_mean']:.2f}, lead {row['lead']}"
        print(
            f"slow worker {row['factor']:g}x  {row['method']}  {row['rows_per_s']:4.0f} rows/s, "
            f"{row['bits_per_byte']:.3f} bits per byte at the end, {row['target_bits_per_byte']:.3f} {reached}{stale}"
        )
    if arguments.json:
        facts |= {"loads": loads, "shape": SHAPE, "rows": ROWS, "learning_rate": RATE, "bound": arguments.bound}
        facts |= {"step_ms": arguments.step_ms, "seconds": arguments.seconds, "rounds": arguments.rounds}
        Path(arguments.json).write_text(as_lines({**facts, "medians": rows, "runs": runs}))


def as_lines(results: dict[str, Any]) -> str:
    """JSON with a line for each fact and each run; a curve would take hundreds of lines."""
    lines = []
    for name, value in results.items():
        runs = isinstance(value, list) and value and isinstance(value[0], dict)
        inner = ",\n  ".join(json.dumps(run) for run in value) if runs else json.dumps(value)
        lines.append(f" {json.dumps(name)}: {f'[{chr(10)}  {inner}{chr(10)} ]' if runs else inner}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    main()
