"""recompute="auto": what each of its means is worth within five budgets, at several widths of a GPT.

Blocks are measured by the engine's own first step, in CPU seconds, the least of all blocks and of several engines. Then
the decision is made as in a run, once with all means and once without each of them, so that both plan with the same
seconds and bytes; nothing else is timed. The worth of a means is the seconds of recomputation that the decision without
it plans more, as a share of a step that keeps everything. Five budgets are spaced evenly between the bytes with each
block computed again from its input and those with everything kept.

Run it with: python benchmarks/recompute_means.py
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from ranks import circumstances
from recompute import step
from torch import Tensor

import zeroshard as zs
from zeroshard.recompute.auto.auto_recomputation import AutoRecomputation
from zeroshard.recompute.auto.decision import PassChain, Rules
from zeroshard.recompute.auto.meter import BlockMeasures, PassMeasures, alike
from zeroshard.recompute.auto.stored import BySavers
from zeroshard.recompute.auto.ways import KeptPart
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig

ROOM = "4GiB"
STORING: dict[str, dict[str, Any]] = {
    "": {},
    "host": {"offload": "activations"},
    "compressed": {"activations": zs.Activations("auto", compress=("binarize", "sparse"))},
}


def no_tails(part: KeptPart) -> bool:
    """Whether a block keeps no last tensors alone."""
    return not part.first


def nothing_remade(part: KeptPart) -> bool:
    """Whether no tensor of a block is made again."""
    return not part.remade


MEANS: dict[str, Callable[[KeptPart], bool]] = {
    "kept tails": no_tails,
    "remade tensors": nothing_remade,
}


class PartialChain(PassChain):
    """A chain of blocks that may be kept in some ways alone."""

    def __init__(self, measures: PassMeasures, rules: Rules, allowed: Callable[[KeptPart], bool]) -> None:
        super().__init__(measures, rules)
        self._ways = [
            [ways[0], *(way for way in ways[1:-1] if allowed(way.part)), ways[-1]]  # whole, in part, the input alone
            for ways in self._ways
        ]


def engine_of(config: GPTConfig, **plan: Any) -> zs.Engine:
    """An engine over the model with the same weights every time."""
    torch.manual_seed(0)
    return zs.Engine(GPT(config), partial(torch.optim.SGD, lr=0.0), zs.Plan(zero=0, **plan))


def measured(config: GPTConfig, tokens: Tensor, engines: int, **plan: Any) -> PassMeasures:
    """The blocks of a forward as so many engines measure them, each with the least seconds of its kind."""
    found: list[PassMeasures] = []
    with patch.object(AutoRecomputation, "apply", lambda _, measures, room: found.extend(measures.values())):
        for _ in range(engines):
            more = plan if "activations" in plan else {**plan, "recompute": "auto"}
            engine = engine_of(config, device_memory=ROOM, **more)
            step(engine, tokens)
    blocks = alike([block for each in found for block in each.blocks])
    return replace(found[0], blocks=blocks[: len(found[0].blocks)])


def without_stored(measures: PassMeasures) -> PassMeasures:
    """The same blocks, of which savers store none."""
    blocks: list[BlockMeasures] = [replace(block, stored=()) for block in measures.blocks]
    return replace(measures, blocks=blocks)


def everything(part: KeptPart) -> bool:
    """Any way."""
    return True


def nothing(part: KeptPart) -> bool:
    """None."""
    return False


def variants(measures: PassMeasures, stores: tuple[BySavers, ...]) -> Iterator[tuple[str, PassChain]]:
    """The chain with all means, without each, and with none of them."""
    bare = without_stored(measures)
    if stores:
        yield "all", PartialChain(measures, Rules(False, stores), everything)
        yield "stored blocks", PartialChain(bare, Rules(False), everything)
        return
    yield "all", PartialChain(bare, Rules(False), everything)
    for name, allowed in MEANS.items():
        yield name, PartialChain(bare, Rules(False), allowed)
    yield "all of these", PartialChain(bare, Rules(False), nothing)


def table_of(config: GPTConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Shares of a step that each means is worth at each budget."""
    tokens = torch.randint(256, (options.rows, options.context + 1), generator=torch.Generator().manual_seed(0))
    kept = engine_of(config, recompute="off")
    seconds = min(step(kept, tokens) for _ in range(options.steps))
    rows: dict[str, Any] = {"width": config.width, "step_seconds": round(seconds, 4)}
    for store, plan in STORING.items():
        measures = measured(config, tokens, options.engines, **plan)
        stores = (BySavers(0, store),) if store else ()
        chains = dict(variants(measures, stores))
        low, high = PassChain(without_stored(measures), Rules(False)).least, chains["all"].decide(2**60)
        assert high is not None
        top = high.peak + chains["all"].outside
        budgets = [low + (top - low) * n // (options.budgets + 1) for n in range(1, options.budgets + 1)]
        if not store:
            rows |= {"budgets": budgets, "least": low, "kept": top}
        for name, chain in chains.items():
            found = [chain.decide(budget) for budget in budgets]
            label = f"{name}: {store}" if store else name
            planned = [None if each is None else each.seconds / seconds for each in found]
            rows.setdefault("recomputation", {})[label] = [None if p is None else round(p, 4) for p in planned]
            if name != "all":
                best = rows["recomputation"]["all" if not store else f"all: {store}"]
                shares = [None if p is None else round(p - b, 4) for p, b in zip(planned, best, strict=True)]
                rows.setdefault("worth", {})[label] = shares
                print(f"{config.width:>6} {label:<28}", *(f"{100 * (s or 0):7.2f} %" for s in shares), flush=True)
    return rows


def main() -> None:
    """Print the tables, and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=15, help="of which the fastest counts")
    parser.add_argument("--engines", type=int, default=5, help="that measure blocks")
    parser.add_argument("--budgets", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the tables")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tables = []
    with patch.object(zs.Mesh, "now", lambda mesh: time.process_time()):
        for width in options.widths:
            tables.append(table_of(GPTConfig(256, options.context, width, 4, options.layers, options.dropout), options))
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        table = {"circumstances": circumstances(), "options": settings, "tables": tables}
        options.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
