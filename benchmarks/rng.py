"""Exact random numbers: what a step of the built-in model costs with them, and what a mask costs alone.

    python benchmarks/rng.py [--sizes tiny small] [--batches 1 4 8] [--steps 15] [--json FILE]

Engines with torch's streams, with exact numbers, and without dropout take steps in turns (A B C A B C ...) in one
process of one thread. A row gives the median of CPU seconds per step and of the ratios of neighbouring steps, with the
middle half of those ratios. The bar: at dropout 0.1 at most 1.10.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ranks import circumstances

DROPOUT, BAR = 0.1, 1.10
KINDS = {"fast": ("fast", DROPOUT), "exact": ("exact", DROPOUT), "no dropout": ("fast", 0.0)}


def seconds(step: Callable[[], Any]) -> float:
    """CPU time of a call, all threads."""
    start = time.process_time()
    step()
    return time.process_time() - start


def steps_of(size: str, rows: int, count: int) -> dict[str, Any]:
    """CPU seconds of steps by kind, and the ratios of exact to fast, step by step."""
    import torch

    import zeroshard as zs
    from zeroshard.train.gpt import GPT
    from zeroshard.train.sizes import SIZES

    config = SIZES[size]
    tokens = torch.randint(0, config.vocabulary, (rows, config.context + 1))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    engines = {}
    for kind, (rng, dropout) in KINDS.items():
        torch.manual_seed(0)
        model = GPT(dataclasses.replace(config, dropout=dropout))
        plan = zs.Plan(zero=0, rng=rng)  # type: ignore[arg-type]
        engines[kind] = zs.Engine(model, partial(torch.optim.AdamW, lr=1e-3), plan)
        engines[kind].train_step(batch)
    taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(count):
        for kind, engine in engines.items():
            taken[kind].append(seconds(lambda engine=engine: engine.train_step(batch)))  # type: ignore[misc]
    ratios = sorted(e / f for e, f in zip(taken["exact"], taken["fast"], strict=True))
    return {
        "size": size,
        "rows": rows,
        "steps": count,
        "cpu_seconds": {kind: statistics.median(times) for kind, times in taken.items()},
        "ratio": statistics.median(ratios),
        "middle_half": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
    }


def masks(repeats: int = 9) -> dict[str, float]:
    """Nanoseconds per element of a mask of 8 rows of 131,072 elements: the least of some runs."""
    import torch

    from zeroshard.rng import draws, philox
    from zeroshard.rng.layout import Stream

    out, kernel = torch.empty(8, 2**17), philox._kernel
    ways: dict[str, Callable[[], Any]] = {
        "torch's bernoulli_": lambda: out.bernoulli_(0.9),
        "exact, C++": lambda: draws.bernoulli(Stream(1, 2, 8, 0), out, 0.9),
    }
    found = {name: min(seconds(way) for _ in range(repeats)) * 1e9 / out.numel() for name, way in ways.items()}
    philox._kernel = lambda: None  # type: ignore[assignment]
    try:
        found["exact, torch"] = min(seconds(ways["exact, C++"]) for _ in range(repeats)) * 1e9 / out.numel()
    finally:
        philox._kernel = kernel
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["tiny", "small"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    report: dict[str, Any] = {"machine": circumstances(), "masks_ns": masks(), "steps": []}
    for name, nanoseconds in report["masks_ns"].items():
        print(f"mask by {name}: {nanoseconds:.2f} ns per element")
    for size in options.sizes:
        for rows in options.batches:
            row = steps_of(size, rows, options.steps)
            report["steps"].append(row)
            times = ", ".join(f"{kind} {taken * 1e3:,.0f} ms" for kind, taken in row["cpu_seconds"].items())
            low, high = row["middle_half"]
            verdict = "within" if row["ratio"] <= BAR else "ABOVE"
            ratio = f"exact/fast {row['ratio']:.3f} ({low:.3f} to {high:.3f}), {verdict} {BAR}"
            print(f"{size}, {rows} rows: {times}; {ratio}")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
