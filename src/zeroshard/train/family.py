"""The built-in GPT in all sizes: the family in which the planner finds the largest size that fits."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from zeroshard.doctor.hardware import Machines
from zeroshard.plan import Plan
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.planner.search.largest import Counts, Family, Largest, Rung, largest
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import SIZES, GPTConfig

VOCABULARY, SEQUENCE = SIZES["gpt2"].vocabulary, SIZES["gpt2"].context
SOURCE = (
    "widths, heads and layers of GPT-2 (Radford et al., 2019, table 2) up to 1.6 B parameters, of PTD-P (2104.04473, "
    "table 1) up to 1 T, and deeper from there; narrower ones below are our own"
)
LADDER = (  # width, heads, and the most layers of that width
    *((128, 2, 4), (256, 4, 6), (512, 8, 8)),
    *((768, 12, 12), (1024, 16, 24), (1280, 20, 36), (1600, 25, 48)),
    *((2304, 24, 24), (3072, 32, 30), (4096, 32, 36), (6144, 48, 40), (8192, 64, 48), (10240, 80, 60)),
    *((12288, 96, 80), (16384, 128, 96), (20480, 128, 105), (25600, 160, 128)),
)
DEEPEST = 2048  # layers of the largest member, at 16 T parameters


def gpt_parameters(width: int, layers: int, vocabulary: int = VOCABULARY) -> int:
    """Parameters of a `GPT`: the tied embedding, 12·W² and two norms a block, and the last norm."""
    return vocabulary * width + layers * (12 * width**2 + 2 * width) + width


def gpt_task(config: GPTConfig, rows: int = 1) -> TrainingTask:
    """The task of training a `GPT` with AdamW.

    Args:
        rows: of one step, over all data ranks, each of `config.context` tokens.
    """
    parameters = gpt_parameters(config.width, config.layers, config.vocabulary)
    name = f"{people(parameters)}: {config.layers} x {config.width}"
    return TrainingTask(
        partial(_model, config),
        partial(_batch, config.context),
        partial(torch.optim.AdamW, fused=True),
        rows,
        config.context,
        name,
    )


def gpt_family(sequence: int = SEQUENCE, vocabulary: int = VOCABULARY, rows: int = 1) -> Family:
    """The family by the recipes of the papers: a width for every size, and layers up to the next width."""
    rungs, last_parameters = [], 0
    for at, (width, heads, layers) in enumerate(LADDER):
        most = layers if at + 1 < len(LADDER) else DEEPEST
        fewest = 1
        while gpt_parameters(width, fewest, vocabulary) <= last_parameters:
            fewest += 1
        last_parameters = gpt_parameters(width, most, vocabulary)
        rungs.append(Rung(f"width {width}", fewest, most, partial(_rung, width, heads, sequence, vocabulary, rows)))
    return Family("GPT", SOURCE, tuple(rungs))


def default_plans(machines: Machines, rows: int = 1) -> list[Plan]:
    """ZeRO's stages 0 to 3, 16 bits where the device computes in them, microbatches of one row."""
    rates = machines.device.matrix_flops
    precision = next((name for name in ("bf16", "fp16") if name in rates), "fp32")
    return [Plan(zero=zero, precision=precision, microbatches=rows) for zero in (0, 1, 2, 3)]  # type: ignore[arg-type]


def largest_table(
    machines: Machines,
    rows: int = 1,
    sequence: int = SEQUENCE,
    plans: Sequence[Plan] | None = None,
    counts: Sequence[Counts] = ("states", "step"),
    say: Callable[[str], None] = lambda text: None,
) -> list[Largest]:
    """The largest GPT under each of some plans, by default ZeRO's stages: by its states alone, then by a whole step.

    Args:
        rows: of each rank in one step.
        sequence: tokens of a row.
        say: called with the name of each rehearsal.
    """
    family = gpt_family(sequence, rows=rows * machines.count)
    plans = default_plans(machines, rows) if plans is None else plans
    return [largest(family, plan, machines, rows, count, say) for plan in plans for count in counts]


def people(number: float) -> str:
    """A number of parameters as text: 7.46 B, 128 B, 1.01 T."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= 0.9995 * factor:
            return f"{number / factor:#.3g}".rstrip(".") + f" {unit}"
    return f"{number:,.0f}"


def _rung(width: int, heads: int, sequence: int, vocabulary: int, rows: int, layers: int) -> TrainingTask:
    return gpt_task(GPTConfig(vocabulary, sequence, width, heads, layers), rows)


def _model(config: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


def _batch(sequence: int, rows: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(rows, sequence, dtype=torch.long)
    return {"tokens": tokens, "targets": tokens}
