"""Step time and CPU seconds of DistributedDataParallel and of ZeRO 0 to 3, launched in turns.

    python benchmarks/stages.py [--rounds 5] [--steps 20] [--size tiny] [--tokens 256] [--json FILE]

Two gloo processes with one thread each on this machine. CPU seconds (user + system, all threads, per rank and step) are
steadier than wall time where other work shares the cores. Ratios are of medians over rounds.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

ENGINES = ("ddp", "zero0", "zero1", "zero2", "zero3")


def measure(engine_name: str, steps: int, size: str, tokens: int) -> None:
    """One rank of one launch; rank 0 prints a JSON line."""
    import dataclasses

    import torch
    from torch.nn.parallel import DistributedDataParallel

    import zeroshard as zs
    from zeroshard.train.gpt import GPT, SIZES

    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = zs.init_mesh()
    model = GPT(dataclasses.replace(SIZES[size], context=tokens))
    adam = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    rows = torch.randint(256, (1, tokens + 1), generator=torch.Generator().manual_seed(mesh.rank))
    inputs, targets = rows[:, :-1], rows[:, 1:]
    if engine_name == "ddp":
        wrapped = DistributedDataParallel(model)
        optimizer = adam(model.parameters())

        def step() -> None:
            wrapped(inputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        engine = zs.Engine(model, adam, zs.Plan(zero=int(engine_name[-1])), mesh=mesh)

        def step() -> None:
            engine.train_step((inputs, targets))

    walls, cpus = [], []
    for number in range(steps + 3):
        before, start = _cpu_seconds(), time.perf_counter()
        step()
        if number >= 3:
            walls.append(time.perf_counter() - start)
            cpus.append(_cpu_seconds() - before)
    if mesh.rank == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"step_s": statistics.median(walls), "cpu_s": statistics.median(cpus), "peak_rss": peak}))


def launch(engine_name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Two processes of one engine."""
    words = ["--engine", engine_name, "--steps", str(arguments.steps), "--size", arguments.size]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*start, *words, "--tokens", str(arguments.tokens)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        measure(arguments.engine, arguments.steps, arguments.size, arguments.tokens)
        return
    rounds = [{name: launch(name, arguments) for name in ENGINES} for _ in range(arguments.rounds)]
    rows = []
    for name in ENGINES:
        medians = {key: statistics.median(r[name][key] for r in rounds) for key in ("step_s", "cpu_s", "peak_rss")}
        rows.append({"engine": name, "size": arguments.size, "tokens": arguments.tokens, **medians})
    base = rows[0]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, 2 ranks, {arguments.rounds} rounds")
    for row in rows:
        row["ratio_to_ddp"], row["cpu_ratio_to_ddp"] = (row[k] / base[k] for k in ("step_s", "cpu_s"))
        print(
            f"{row['engine']:6} step {row['step_s'] * 1e3:7.1f} ms ({row['ratio_to_ddp']:.2f} of DDP)  "
            f"CPU {row['cpu_s'] * 1e3:7.1f} ms ({row['cpu_ratio_to_ddp']:.2f})  "
            f"peak RSS {row['peak_rss'] / 2**20:.0f} MiB"
        )
    if arguments.json:
        with open(arguments.json, "w") as out:
            json.dump({**_circumstances(), "rounds": arguments.rounds, "rows": rows}, out, indent=1)


def _circumstances() -> dict[str, Any]:
    """Where and when, for whoever reads the figures later."""
    from importlib.metadata import version

    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    versions = {name: version(name) for name in ("torch", "zeroshard")}
    return {"date": time.strftime("%Y-%m-%d"), "cpu": models[0], "cores": len(models), "versions": versions}


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
