"""The loss without logits: CPU time and peak memory beside `F.linear` and `F.cross_entropy`, and beside torch's own.

    python benchmarks/linear_cross_entropy.py [--quick] [--rounds N] [--threads N] [--json FILE]

Times are CPU seconds of the process for a forward and a backward, with the gradients of hidden states and weight. In
each round all variants of a size run in a new random order, and a ratio is the median over rounds of a variant's time
by that of `plain` in the same round, so that what else the machine does hits all alike. Peaks are above inputs and
gradients: by the planner's tracker on tensors without values, and, for what happens inside of torch's own operator too,
by torch's profiler in a run.

    plain     cross_entropy(linear(hidden, weight), labels)
    default   linear_cross_entropy with the default chunk
    N         the same with chunks of N rows
    torch     torch.nn.functional.linear_cross_entropy with LinearCrossEntropyOptions()
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from allocations import highest
from ranks import circumstances
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from zeroshard.losses import default_chunk, linear_cross_entropy
from zeroshard.planner.predict.memory_tracker import Tracker
from zeroshard.planner.predict.torch_internals import fakes

WIDTH = 1024
TIMED = [(2048, 32_064), (512, 128_256)]  # rows, vocabulary
CHUNKS = (128, 256, 512)
TRACKED = [(rows, 128_256) for rows in (1024, 4096, 8192, 32_768)]
QUICK, TOY = (1024, 8016), (64, 96)
BAR_TIME, BAR_MEMORY = 1.10, 0.02

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Whole logits."""
    return F.cross_entropy(F.linear(hidden, weight), labels)


def by_chunks(chunk: int | None) -> Loss:
    """Ours."""
    return lambda hidden, weight, labels: linear_cross_entropy(hidden, weight, labels, chunk=chunk)


def torch_own(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Torch's, with the chunks that it chooses."""
    options = torch.nn.LinearCrossEntropyOptions()
    loss: Tensor = F.linear_cross_entropy(hidden, weight, labels, options=options)
    return loss


VARIANTS: dict[str, Loss] = {
    "plain": plain,
    "default": by_chunks(None),
    **{str(chunk): by_chunks(chunk) for chunk in CHUNKS},
    "torch": torch_own,
}


def inputs(rows: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a weight, labels; narrow ones where there are few tokens to tell apart."""
    torch.manual_seed(0)
    width = min(WIDTH, vocabulary)
    hidden = torch.randn(rows, width, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, dtype=dtype).mul_(0.02).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (rows,))


def timed(rows: int, vocabulary: int, rounds: int, order: random.Random) -> dict[str, Any]:
    """Medians of times, and of ratios to `plain`, with their quartiles; what the gradients differ by."""
    hidden, weight, labels = inputs(rows, vocabulary)
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    gradients: dict[str, tuple[Tensor, Tensor]] = {}
    for number in range(rounds + 1):  # the first to warm up
        for name in order.sample(list(VARIANTS), len(VARIANTS)):
            hidden.grad = weight.grad = None
            start = time.process_time()
            VARIANTS[name](hidden, weight, labels).backward()
            if number:
                seconds[name].append(time.process_time() - start)
            elif name in ("plain", "default"):
                assert hidden.grad is not None and weight.grad is not None
                gradients[name] = hidden.grad, weight.grad
        gradients = gradients if not number else {}
        if not number:
            pairs = zip(gradients["default"], gradients["plain"], strict=True)
            difference = max(((ours - theirs).abs().max() / theirs.abs().max()).item() for ours, theirs in pairs)
    ratios = {n: [a / b for a, b in zip(seconds[n], seconds["plain"], strict=True)] for n in VARIANTS}
    table = {
        name: {
            "cpu_seconds": round(statistics.median(seconds[name]), 3),
            "ratio": round(statistics.median(ratios[name]), 3),
            "quartiles": [round(q, 3) for q in statistics.quantiles(ratios[name], n=4)[::2]],
        }
        for name in VARIANTS
    }
    size = {"rows": rows, "vocabulary": vocabulary, "default_chunk": default_chunk(vocabulary)}
    return {**size, "rounds": rounds, "difference": difference, "variants": table}


def tracked(rows: int, vocabulary: int, name: str, dtype: torch.dtype = torch.float32) -> int:
    """The peak of a variant above inputs and gradients, by the tracker, on tensors without values."""
    with fakes():
        hidden, weight, labels = inputs(rows, vocabulary, dtype)
        with Tracker(answers=True) as tracker:
            for tensor in (hidden, weight, labels):
                tracker.see(tensor)
            tracker.start_again()
            VARIANTS[name](hidden, weight, labels).backward()
    given = hidden.nbytes + weight.nbytes
    return tracker.peak.nbytes - 2 * given - labels.nbytes


def profiled(rows: int, vocabulary: int, name: str) -> int:
    """The peak of a variant above inputs and gradients, by every allocation of a run."""
    hidden, weight, labels = inputs(rows, vocabulary)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        VARIANTS[name](hidden, weight, labels).backward()
    return highest(watched) - hidden.nbytes - weight.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small size only")
    parser.add_argument("--toy", action="store_true", help="a tiny size only, to try the script out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="keep the figures in this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    order = random.Random(options.seed)
    result: dict[str, Any] = {**circumstances(), "threads": options.threads, "width": WIDTH}
    tracks = [(1024, 4096)] if options.toy else TRACKED
    times = [TOY] if options.toy else [QUICK] if options.quick else TIMED
    logits = [rows * vocabulary * 4 for rows, vocabulary in tracks]
    names = ("plain", "default", *map(str, CHUNKS))
    result["peaks"] = [
        {
            "rows": rows,
            "vocabulary": vocabulary,
            "logits": whole,
            "bytes": {name: tracked(rows, vocabulary, name) for name in names},
            "bytes_bf16": {name: tracked(rows, vocabulary, name, torch.bfloat16) for name in names},
        }
        for (rows, vocabulary), whole in zip(tracks, logits, strict=True)
    ]
    for row in result["peaks"]:
        shares = ", ".join(f"{name} {nbytes / row['logits']:.2%}" for name, nbytes in row["bytes"].items())
        print(
            f"{row['rows']:,} x {row['vocabulary']:,}: peak by logits ({row['logits']:,} bytes): {shares}", flush=True
        )
    rows, vocabulary = times[0]
    result["profiled"] = {"rows": rows, "vocabulary": vocabulary, "logits": 4 * rows * vocabulary}
    result["profiled"]["bytes"] = {name: profiled(rows, vocabulary, name) for name in VARIANTS}
    print(f"{rows:,} x {vocabulary:,}, profiled: {result['profiled']['bytes']}", flush=True)
    result["times"] = []
    for rows, vocabulary in times:
        found = timed(rows, vocabulary, options.rounds if vocabulary != TIMED[1][1] else min(options.rounds, 3), order)
        result["times"].append(found)
        print(f"{rows:,} x {vocabulary:,}, gradients differ by {found['difference']:.1e} of the largest")
        for name, row in found["variants"].items():
            print(f"  {name:8} {row['cpu_seconds']:8.3f} s  {row['ratio']:.3f} {row['quartiles']}", flush=True)
    share = next(row["bytes"]["128"] / row["logits"] for row in result["peaks"] if row["rows"] == 8192 or options.toy)
    ratios = [found["variants"]["default"]["ratio"] for found in result["times"]]
    result["bars"] = {
        "time": {"found": ratios, "most": BAR_TIME, "reached": max(ratios) <= BAR_TIME},
        "memory": {"found": share, "most": BAR_MEMORY, "reached": share <= BAR_MEMORY},
    }
    print(json.dumps(result["bars"]))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
