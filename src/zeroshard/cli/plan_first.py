"""The first table of `zeroshard plan`: numbers by formulas, printed before torch is imported."""

import math
import sys

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from zeroshard.cli.plan_options import ROWS, SEQUENCE, PlanOptions, precision_for
from zeroshard.doctor.hardware import Machines
from zeroshard.planner.formulas import AdapterSize, StepSize, first_rows
from zeroshard.train.model_shape import row_length, shape_of

SHOWN = 6  # rows
PACKED_WIDTH = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes of a weight in 4 bits, with its scales (2305.14314, section 3)
COLUMNS = 120  # without a terminal


def gib_of(nbytes: float) -> str:
    """Bytes in GiB with one decimal; below 1 GiB with two significant digits."""
    gib = nbytes / 2**30
    decimals = 1 - math.floor(math.log10(gib)) if 0 < gib < 1 else 1
    return f"{gib:,.{decimals}f}"


def print_first_table(options: PlanOptions, machines: Machines) -> None:
    """Print the first table on stderr, apart from the result; nothing for models of unknown shapes."""
    if options.own or options.largest or options.json or options.optimizer != "adamw":
        return
    shape = shape_of(options.model)
    if shape is None:
        return
    sequence = row_length(options.model, options.sequence, SEQUENCE)
    rows = max(1, (options.global_batch or ROWS * machines.count) // machines.count)
    precision = precision_for(options, machines)
    width = {"fp32": 4}.get(precision, 2)
    frozen = {"lora": width, "qlora": PACKED_WIDTH}.get(options.adapters or "")
    step = StepSize(rows, sequence, width, AdapterSize(options.adapter_rank, frozen) if frozen else None)
    beside = f", frozen beside {options.adapters} of rank {options.adapter_rank}" if frozen else ""
    title = f"First table: {shape.parameters / 1e9:.3g} B parameters in {precision}{beside}, on {machines}"
    table = Table(title=f"{title}", title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("plan", ratio=1)
    for head in ("room", "device GiB", "host GiB", "tokens/s"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in first_rows(shape, step, machines)[:SHOWN]:
        numbers = (gib_of(row.peak), gib_of(row.host), f"{row.tokens_per_second:,.0f}")
        table.add_row(row.plan, "likely" if row.likely else "no", *numbers)
    table.caption = "by formulas, within about 10 %; plans that the rehearsals below do not show were not confirmed"
    table.caption_justify = "left"
    terminal = sys.stderr.isatty()
    Console(width=None if terminal else COLUMNS, highlight=False, markup=False, stderr=True).print(table)
