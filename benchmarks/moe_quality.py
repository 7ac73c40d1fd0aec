"""Quality at equal FLOPs per token: the built-in model with Switch layers beside the dense one, on the real corpus.

    python benchmarks/moe_quality.py [--seeds 3] [--steps 3000] [--fraction 0.9] [--out NAME]

What is compared was fixed, in this text, before the first of its runs. The model is the built-in GPT where its
feed-forward layers limit it: width 32, 2 layers, 2 heads, a context of 64 bytes; 32 rows in a step, AdamW, clipping at
1, and the main job's warm-up and cosine, on one rank of one thread. The Switch model has every feed-forward layer
replaced by 8 experts of the same size by `replace_ffn`: one expert for each token, α = 1e-2, jitter 1e-2; no capacity,
so that every token passes exactly one expert; experts' weights drawn each by itself, outputs times 1 / E[gate] as
`replace_ffn` does by default. The router adds 2 % to the FLOPs of a token.

The learning rate was chosen for each model from the same three, on seed 100, which the comparison does not use, with
1,600 steps: dense 1.665 (6e-3), 1.630 (1.2e-2), 1.727 (2.4e-2); Switch 1.586, 1.558, 1.611. Both take 1.2e-2. Two
settings of Switch were tried besides, and not taken: capacity 1.25 (1.612 at 1.2e-2), and a tenth of the rate for the
router (1.587 at 6e-3).

The Switch model has `fraction` of the dense model's steps, with the schedule drawn over its own steps, and is to end at
the dense model's final validation loss or below, in the mean over seeds 0, 1 and 2. Runs of one seed see the same
batches in the same order. Validation is over 1,024 rows of held-out text. With `--out NAME` curves are kept as
benchmarks/results/NAME.json.

An earlier comparison (results/moe-quality-2026-11-23.json) was of the "tiny" model (width 128, 5 layers) with 8 rows of
256 bytes, 800 steps, the main job's rate and capacity 1.25: Switch 1.81 after 720 steps, dense 1.58. There the model is
not limited by its parameters so soon, and up to half of the choices were dropped at first.
"""

import argparse
import json
import math
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from ranks import circumstances

import zeroshard as zs
from zeroshard.data.corpus import Batches, standard_library_corpus, validation_windows
from zeroshard.data.tokenizer import load_tokenizer
from zeroshard.moe.convert.replace import Upcycling, replace_ffn
from zeroshard.moe.routing.statistics import Statistics
from zeroshard.train.config import TrainConfig
from zeroshard.train.gpt import GPT
from zeroshard.train.optimizers import make_optimizer
from zeroshard.train.run import learning_rate
from zeroshard.train.sizes import GPTConfig

RESULTS = Path(__file__).parent / "results"
SHAPE = GPTConfig(vocabulary=256, context=64, width=32, heads=2, layers=2)
EXPERTS, ROWS, RATE, EVERY, VALIDATION_ROWS = 8, 32, 1.2e-2, 150, 1024


@dataclass(frozen=True)
class Text:
    """Tokens of the standard library's source, to train on and held out."""

    train: torch.Tensor
    validation: torch.Tensor


def train(config: TrainConfig, text: Text, experts: int) -> dict[str, Any]:
    """One run; its validation losses in nats per token by step, and the balance over its last tenth."""
    seed = config.plan.seed
    torch.manual_seed(seed)
    model = GPT(SHAPE)
    if experts:
        drawn = Upcycling(reinitialise=1.0, seed=seed)  # each expert its own, with the dense weights' deviation
        replace_ffn(model, every=1, experts=experts, router="switch", capacity=math.inf, upcycling=drawn)
    optimizer = make_optimizer(config, model)
    engine = zs.Engine(model, optimizer, config.plan)
    batches = Batches(text.train, config.sequence, seed)
    statistics_of = {name: each for name, each in model.named_modules() if isinstance(each, Statistics)}
    curve: dict[int, float] = {}
    loads = {name: torch.zeros(experts) for name in statistics_of}
    started = time.process_time()
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        rows = batches.rows(range(step * ROWS, (step + 1) * ROWS))
        engine.train_step((rows[:, :-1], rows[:, 1:]))
        if step >= config.steps * 9 // 10:
            for name, each in statistics_of.items():
                loads[name] += each.last["load"].float()
        if (step + 1) % EVERY == 0 or step + 1 == config.steps:
            curve[step + 1] = validate(engine, model, text, config.sequence)
    return {
        "seed": seed,
        "steps": config.steps,
        "parameters": sum(p.numel() for p in model.parameters()),
        "curve": curve,
        "final": curve[config.steps],
        "most_by_mean": {name: float(load.max() / load.mean()) for name, load in loads.items()},
        "cpu_seconds": time.process_time() - started,
    }


@torch.no_grad()
def validate(engine: zs.Engine, model: torch.nn.Module, text: Text, sequence: int) -> float:
    """Mean loss in nats per token over the held-out rows."""
    model.eval()
    total = count = 0.0
    for rows in validation_windows(text.validation, sequence, 64, 0, 1, VALIDATION_ROWS):
        total += float(engine(rows[:, :-1], rows[:, 1:])) * len(rows)
        count += len(rows)
    model.train()
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--fraction", type=float, default=0.9)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    base = TrainConfig(batch_per_rank=ROWS, steps=arguments.steps, sequence=SHAPE.context, learning_rate=RATE)
    corpus, tokenizer = standard_library_corpus(), load_tokenizer("bytes")
    text = Text(tokenizer.encode(corpus.train), tokenizer.encode(corpus.validation))
    runs: dict[str, list[dict[str, Any]]] = {"dense": [], "switch": []}
    for seed in range(arguments.seeds):
        plan = zs.Plan(zero=0, clip_norm=1.0, seed=seed)
        for name, steps, experts in (
            ("dense", arguments.steps, 0),
            ("switch", round(arguments.steps * arguments.fraction), EXPERTS),
        ):
            run = train(replace(base, plan=plan, steps=steps), text, experts)
            runs[name].append(run)
            print(f"{name:7} seed {seed}: {run['parameters']:,} parameters, {steps} steps, {run['final']:.4f} nats",
                  f"per token, {run['cpu_seconds']:.0f} s of CPU", flush=True)  # fmt: skip
    finals = {name: statistics.mean(run["final"] for run in each) for name, each in runs.items()}
    print(f"mean of {arguments.seeds} seeds: dense {finals['dense']:.4f} after {arguments.steps} steps, switch "
          f"{finals['switch']:.4f} after {round(arguments.steps * arguments.fraction)}")  # fmt: skip
    if arguments.out:
        content = {"circumstances": circumstances(), "corpus": text.corpus.digest, "runs": runs, "means": finals}
        (RESULTS / f"{arguments.out}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
