"""`zeroshard profile`: the costs of each layer of a model on this machine, in a file."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zeroshard.cli.early_options import ProfileOptions
from zeroshard.data.tokenizer import load_tokenizer
from zeroshard.pipeline.cut.chain import Chain
from zeroshard.pipeline.partition.measure import measure
from zeroshard.pipeline.partition.profile import LayerCost, Profile
from zeroshard.platform import accelerator
from zeroshard.report.plain_table import plain_table
from zeroshard.text import format_bytes
from zeroshard.train.model import build_model

CPU_FACTS = Path("/proc/cpuinfo")
NARROW = 66  # columns below which a column of the table is left out
STAGES = 4  # in the suggested commands, at most as many as there are layers


def run_profile(argv: Sequence[str], threads: int | None = None) -> None:
    """Measure, write the profile, and print it.

    Args:
        threads: of CPU kernels; None for torch's own number.

    Raises:
        ConfigError: wrong options.
        PlanError: no such device.
        ModelError: no such model, or one that is no chain of layers.
        DataError: no tokenizer, or the file cannot be written.
    """
    from zeroshard.train.options import parse

    options = parse(ProfileOptions, argv, "zeroshard profile")
    if threads is not None:
        torch.set_num_threads(threads)
    profile = measured(options, accelerator.pick(None if options.device == "auto" else options.device))
    profile.save(options.out)
    if options.json:
        print(json.dumps(asdict(profile), indent=1, allow_nan=False))
    else:
        _print(profile, options.out)


def measured(options: ProfileOptions, device: torch.device) -> Profile:
    """The profile that the options ask for."""
    vocabulary = load_tokenizer(options.tokenizer).vocabulary
    torch.manual_seed(0)
    built = build_model(options.model, vocabulary, options.sequence, options.dropout)
    tokens = torch.randint(vocabulary, (options.rows, options.sequence + 1))
    where = next(built.module.parameters()).device
    chain = Chain(built.module, partial(built.loss, built.module, tokens.to(where)))
    forward = partial(built.loss, built.module, tokens.to(device))
    with Console(stderr=True).status(f"Measuring {len(chain.layers)} layers"):
        layers = measure(built.module, chain, forward, device, options.repeats)
    return Profile(f"{built.name} at {options.sequence} tokens", machine(device), options.rows, tuple(layers))


def machine(device: torch.device) -> str:
    """The processor, the threads of CPU kernels, and the version of torch."""
    title = accelerator.title(device)
    if title is not None:
        return f"{title}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'s' * (threads > 1)}, torch {torch.__version__}"


def _processor() -> str:
    facts = CPU_FACTS.read_text().splitlines() if CPU_FACTS.exists() else []
    names = [line.partition(":")[2].strip() for line in facts if line.startswith("model name")]
    return next(filter(None, names), "") or platform.processor() or platform.machine()


def _print(profile: Profile, out: Path) -> None:
    console = Console(highlight=False)
    head = f"{profile.model}, {profile.microbatch_rows} rows per microbatch, on {profile.machine}"
    console.print(head, markup=False)
    console.print(_table(profile.layers, console.width))
    console.print(f"\nWrote {out}. Next steps:", markup=False, soft_wrap=True)
    for command in next_steps(profile, out):
        console.print("  " + command, markup=False, soft_wrap=True)


def next_steps(profile: Profile, out: Path) -> list[str]:
    """Commands that use the file."""
    n = min(STAGES, len(profile.layers))
    return [
        f"zeroshard simulate --profile {out} --stages {n}",
        f"zeroshard partition --profile {out} --devices {n} --link-gbps 10",
    ]


def _table(layers: Sequence[LayerCost], width: int) -> Table:
    """The costs; a narrow terminal leaves out the activation, which the file has."""
    table = plain_table(
        "Each layer, for one microbatch", caption="activation: output to the next layer; saved: kept for the backward"
    )
    table.show_footer = True
    costs = [(c.forward_seconds, c.backward_seconds, c.saved_bytes, c.parameter_bytes) for c in layers]
    forward, backward, saved, parameters = (sum(column) for column in zip(*costs, strict=True))
    table.add_column("layer", footer="all", overflow="fold", min_width=8)
    footers = {"forward\nms": _milliseconds(forward), "backward\nms": _milliseconds(backward)}
    footers |= {"activation": ""} if width >= NARROW else {}
    footers |= {"saved": format_bytes(saved), "parameters": format_bytes(parameters)}
    for head, footer in footers.items():
        table.add_column(head, footer=footer, justify="right", no_wrap=True)
    for cost in layers:
        table.add_row(
            escape(cost.name),
            _milliseconds(cost.forward_seconds),
            _milliseconds(cost.backward_seconds),
            *([format_bytes(cost.activation_bytes)] if width >= NARROW else []),
            *(format_bytes(n) for n in (cost.saved_bytes, cost.parameter_bytes)),
        )
    return table


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f}"
