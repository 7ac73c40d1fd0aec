"""recompute="auto" at five budgets beside the fastest of torch's ways that fits, in turns in one process.

The model and the steps are those of benchmarks/recompute.py. Torch's ways are everything kept, checkpoint around each
block, checkpoint_sequential with 1 to l segments, and selective checkpointing that keeps products with weights. A
budget is a number of bytes of tensors above what is there before the step, seen operation by operation; five are spaced
evenly between the lowest peak of torch's ways and the peak with everything kept. At each, device_memory of ours is
lowered until its peak is within it, too.

Run it with: python benchmarks/recompute_auto.py --layers 16 --steps 21
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ranks import circumstances
from recompute import ByTorch, peak, step
from torch import Tensor
from torch.utils.checkpoint import checkpoint_sequential

import zeroshard as zs
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig


class BySegments(ByTorch):
    """The same model, with a number of segments."""

    segments = 1

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The mean cross entropy."""
        x = self.dropout(self.embedding(tokens))
        x = checkpoint_sequential(list(self.blocks), self.segments, x, use_reentrant=False)
        output: Tensor = self.head(self.norm(x), targets)
        return output


def engine_of(kind: type[GPT], config: GPTConfig, **plan: Any) -> zs.Engine:
    """An engine over the model with the same weights every time."""
    torch.manual_seed(0)
    return zs.Engine(kind(config), partial(torch.optim.SGD, lr=0.0), zs.Plan(zero=0, **plan))


def ways_of_torch(config: GPTConfig) -> dict[str, Callable[[], zs.Engine]]:
    """Makes the engine of each of torch's ways."""
    found: dict[str, Callable[[], zs.Engine]] = {"off": partial(engine_of, GPT, config, recompute="off")}
    for way in ("blocks", "selective"):
        kind = type(f"ByTorch{way}", (ByTorch,), {"way": way})
        found[f"torch {way}"] = partial(engine_of, kind, config, recompute="off")
    for segments in range(1, config.layers + 1):
        kind = type(f"BySegments{segments}", (BySegments,), {"segments": segments})
        found[f"torch sequential {segments}"] = partial(engine_of, kind, config, recompute="off")
    return found


def within(config: GPTConfig, tokens: Tensor, budget: int, states: int) -> zs.Engine | None:
    """An engine whose peak is within the budget; None if there is none."""
    memory = budget + states
    for _ in range(24):
        engine = engine_of(GPT, config, recompute="auto", device_memory=memory)
        try:
            for _ in range(2):
                step(engine, tokens)
        except zs.errors.BudgetExceeded:
            return None
        found = peak(engine, tokens)
        if found <= budget:
            return engine
        memory -= max(found - budget, budget // 64)
    return None


def compare(config: GPTConfig, tokens: Tensor, steps: int, budgets: int) -> list[dict[str, Any]]:
    """At each of so many budgets, seconds of both, and the ratio of neighbouring steps."""
    makers = ways_of_torch(config)
    known: dict[str, tuple[float, int]] = {}
    for name, make in makers.items():
        engine = make()
        step(engine, tokens)
        nbytes = peak(engine, tokens)
        known[name] = (statistics.median(step(engine, tokens) for _ in range(3)), nbytes)
        print(f"{name:>22} {known[name][0]:8.3f} s {nbytes / 2**20:8.2f} MiB", flush=True)
        states = sum(engine.ledger.snapshot().values())
    low, high = min(nbytes for _, nbytes in known.values()), known["off"][1]
    rows = []
    for number in range(1, budgets + 1):
        budget = low + (high - low) * number // (budgets + 1)
        fitting = sorted((seconds, name) for name, (seconds, nbytes) in known.items() if nbytes <= budget)
        ours = within(config, tokens, budget, states)
        if ours is None:
            rows.append({"budget": budget, "torch": fitting[0][1], "ratio": math.nan})
            continue
        best = [(name, makers[name]()) for _, name in fitting[:2]]  # near ones may change places
        for _, theirs in best:
            step(theirs, tokens)
        taken: dict[str, list[float]] = {"auto": [], **{name: [] for name, _ in best}}
        for turn in range(steps):
            for name, engine in [("auto", ours), *best][:: 1 if turn % 2 else -1]:
                taken[name].append(step(engine, tokens))
        name = min((name for name, _ in best), key=lambda name: statistics.median(taken[name]))
        pairs = sorted(a / b for a, b in zip(taken["auto"], taken[name], strict=True))
        rows.append(
            {
                "budget": budget,
                "torch": name,
                "seconds": [round(statistics.median(taken[each]), 4) for each in ("auto", name)],
                "peaks": [peak(ours, tokens), known[name][1]],
                "ratio": round(statistics.median(pairs), 3),
                "quartiles": [round(each, 3) for each in statistics.quantiles(pairs, n=4)[::2]],
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Print the tables, and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=21)
    parser.add_argument("--budgets", type=int, default=5, help="evenly between the smallest peak and the largest")
    parser.add_argument("--json", type=Path, help="file for the tables")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = GPTConfig(256, options.context, options.width, 4, options.layers, options.dropout)
    tokens = torch.randint(256, (options.rows, options.context + 1), generator=torch.Generator().manual_seed(0))
    rows = compare(config, tokens, options.steps, options.budgets)
    mean = math.exp(statistics.fmean(math.log(row["ratio"]) for row in rows))
    print(f"geometric mean of the ratios: {mean:.3f}")
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        table = {"circumstances": circumstances(), "options": settings, "budgets": rows, "mean": round(mean, 3)}
        options.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
