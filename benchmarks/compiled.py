"""The gain of `engine.compile()`: CPU seconds of a step with and without compiled blocks, beside torch's plain loop.

    python benchmarks/compiled.py [--width 256] [--blocks 6] [--steps 30] [--backend inductor] [--json FILE]

One process and thread, the built-in GPT in fp32. Steps of all loops alternate in one process, so that the speed of the
machine is the same for each; figures are medians over steps of process CPU time, the first steps, which compile, left
out. `plain` is torch's loop with fused AdamW, and its blocks are compiled by `block.compile()` in its other row.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WARM = 4  # steps that compile and make buffers
PLANS: dict[str, dict[str, Any]] = {
    "zero 0": {"zero": 0},
    "zero 3": {"zero": 3},
    "zero 3, recompute": {"zero": 3, "recompute": "blocks"},
}


def steps_of(options: argparse.Namespace) -> dict[str, Callable[[], float]]:
    """The step of each loop, which returns its loss, by name."""
    import torch

    import zeroshard as zs
    from zeroshard.train.gpt import GPT, GPTConfig

    torch.set_num_threads(1)
    tokens = torch.randint(0, 512, (options.rows, options.sequence + 1), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def model() -> Any:
        torch.manual_seed(0)
        heads = max(1, options.width // 64)
        sizes = {"layers": options.blocks, "width": options.width, "heads": heads}
        return GPT(GPTConfig(vocabulary=512, context=options.sequence, **sizes))

    def plain(compiled: bool) -> Callable[[], float]:
        made = model()
        for block in made.blocks if compiled else ():
            block.compile(backend=options.backend)
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3, fused=True)

        def step() -> float:
            optimizer.zero_grad()
            loss = made(inputs, targets)
            loss.backward()
            optimizer.step()
            return float(loss.detach())

        return step

    def ours(settings: dict[str, Any], compiled: bool) -> Callable[[], float]:
        engine = zs.Engine(model(), lambda ps: torch.optim.AdamW(ps, lr=1e-3), zs.Plan(**settings))
        if compiled:
            engine.compile(backend=options.backend)

        def step() -> float:
            loss = engine(inputs, targets)
            engine.backward(loss)
            engine.step()
            return float(loss.detach())

        return step

    loops = {"plain": plain(False), "plain, compiled": plain(True)}
    for name, settings in PLANS.items():
        loops |= {name: ours(settings, False), f"{name}, compiled": ours(settings, True)}
    return loops


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 256), ("blocks", 6), ("steps", 30), ("rows", 4), ("sequence", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from ranks import circumstances

    loops = steps_of(options)
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    losses: dict[str, float] = {}
    for number in range(WARM + options.steps):
        for name, step in loops.items():
            began = time.process_time()
            losses[name] = step()
            if number >= WARM:
                seconds[name].append(time.process_time() - began)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        base = medians[name.removesuffix(", compiled")]
        print(f"{name:<28} {1e3 * median:8.2f} ms  {median / base:6.3f}  loss {losses[name]:.6f}")
    if options.json:
        sizes = {key: value for key, value in vars(options).items() if key != "json"}
        content = {"circumstances": circumstances(), "options": sizes, "seconds": medians, "losses": losses}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
