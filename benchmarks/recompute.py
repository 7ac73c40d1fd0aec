"""Time and memory of recomputed blocks beside torch's own ways, in turns in one process.

The model is the built-in GPT, its steps those of an engine at stage 0, so that the two sides differ in nothing but who
recomputes: the plan, or torch.utils.checkpoint in the model's own forward. Pairs:

    blocks     Plan(recompute="blocks")     checkpoint around each block
    sqrt       Plan(recompute="sqrt")       checkpoint_sequential with as many segments
    selective  Plan(recompute="selective")  create_selective_checkpoint_contexts that keeps products with weights

Time is CPU seconds of this process, forward and backward; the sides take turns, and the ratio is the median of those of
neighbouring steps.
Memory is the peak of all bytes of tensors above what is there before the step, seen operation by operation in a step of
its own. Run it with: python benchmarks/recompute.py --layers 16 --steps 9
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ranks import circumstances
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import zeroshard as zs
from zeroshard.planner.predict.memory_tracker import Tracker
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig

KEPT = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


class ByTorch(GPT):
    """The same model, whose forward recomputes by itself."""

    way = "blocks"

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The mean cross entropy."""
        x = self.dropout(self.embedding(tokens))
        if self.way == "sqrt":
            segments = max(1, round(len(self.blocks) ** 0.5))
            x = checkpoint_sequential(list(self.blocks), segments, x, use_reentrant=False)
        else:
            more: dict[str, Any] = {}
            if self.way == "selective":
                more["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False, **more)
        output: Tensor = self.head(self.norm(x), targets)
        return output


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def engine_of(kind: type[GPT], config: GPTConfig, recompute: str) -> zs.Engine:
    """An engine over the model with the same weights every time."""
    torch.manual_seed(0)
    plan = zs.Plan(zero=0, recompute=recompute)  # type: ignore[arg-type]
    return zs.Engine(kind(config), partial(torch.optim.SGD, lr=0.0), plan)


def step(engine: zs.Engine, tokens: Tensor) -> float:
    """CPU seconds of one forward and backward."""
    start = time.process_time()
    loss = engine(tokens[:, :-1], tokens[:, 1:])
    engine.backward(loss)
    seconds = time.process_time() - start
    engine.step()
    return seconds


def peak(engine: zs.Engine, tokens: Tensor) -> int:
    """Bytes of tensors that a forward and backward take at their peak, beside those that are there before.

    In a first step the tracker meets these: weights, and buffers of gradients, which it sees only once they are used.
    """
    tracker = Tracker()
    with tracker:
        for _ in range(2):
            held = tracker.current
            tracker.peaks.clear()
            loss = engine(tokens[:, :-1], tokens[:, 1:])
            engine.backward(loss)
            del loss
            found = max(each.nbytes for each in tracker.peaks.values())
            engine.step()
    return found - held


def compare(
    sides: dict[str, Callable[[], zs.Engine]], tokens: Tensor, steps: int
) -> dict[str, tuple[list[float], int]]:
    """CPU seconds of each step, and peak bytes, of each side."""
    engines = {name: make() for name, make in sides.items()}
    for engine in engines.values():
        step(engine, tokens)
    taken: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(steps):
        for name in list(engines)[:: 1 if turn % 2 else -1]:
            taken[name].append(step(engines[name], tokens))
    return {name: (taken[name], peak(engine, tokens)) for name, engine in engines.items()}


def main() -> None:
    """Print the table, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--json", type=Path, help="file for the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = GPTConfig(256, options.context, options.width, 4, options.layers, options.dropout)
    tokens = torch.randint(256, (options.rows, options.context + 1), generator=torch.Generator().manual_seed(0))
    sides: dict[str, Callable[[], zs.Engine]] = {"off": partial(engine_of, GPT, config, "off")}
    for way in ("blocks", "sqrt", "selective"):
        sides[way] = partial(engine_of, GPT, config, way)
        sides[f"torch {way}"] = partial(engine_of, type(f"ByTorch{way}", (ByTorch,), {"way": way}), config, "off")
    found = compare(sides, tokens, options.steps)
    print(f"{'':>16} {'CPU s':>8} {'peak MiB':>9}")
    for name, (seconds, nbytes) in found.items():
        print(f"{name:>16} {statistics.median(seconds):8.3f} {nbytes / 2**20:9.2f}")
    ratios: dict[str, dict[str, Any]] = {}
    for way in ("blocks", "sqrt", "selective"):
        (ours, bytes_ours), (theirs, bytes_theirs) = found[way], found[f"torch {way}"]
        pairs = sorted(a / b for a, b in zip(ours, theirs, strict=True))
        low, middle, high = (round(q, 3) for q in statistics.quantiles(pairs, n=4))
        ratios[way] = {"time": middle, "quartiles": [low, high], "memory": round(bytes_ours / bytes_theirs, 3)}
        print(f"{way}: {middle} ({low} to {high}) of torch's time, {ratios[way]['memory']} of its peak")
    if options.json:
        rows = {name: [round(statistics.median(seconds), 4), nbytes] for name, (seconds, nbytes) in found.items()}
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        table = {"circumstances": circumstances(), "options": settings, "seconds and bytes": rows, "ratios": ratios}
        options.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
