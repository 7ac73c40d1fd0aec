"""`zeroshard reproduce`: published numbers beside ours, computed now, and how."""

import json
import sys
from collections.abc import Sequence
from fractions import Fraction

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zeroshard.cli.early_options import LIST, ReproduceOptions
from zeroshard.report.plain_table import plain_table
from zeroshard.reproduce import CLAIMS, Claim, Outcome, Reading, check
from zeroshard.train.options import parse

FILE_COLUMNS = 100  # where the output is not shown on a terminal
CONVENTION = "A printed number counts as ours when ours, rounded or cut to as many digits, prints the same."


def run_reproduce(argv: Sequence[str]) -> None:
    """Compute the claims and print the numbers; exits with 1 when a number is not the published one.

    Raises:
        ZeroshardError: a plan or a model that the engine refuses.
    """
    options = parse(ReproduceOptions, argv, "zeroshard reproduce")
    if options.claim == LIST and not options.all:
        _print_list(options.json)
        return
    asked = list(CLAIMS.values()) if options.all else [CLAIMS[options.claim]]
    console = Console(width=None if sys.stdout.isatty() else FILE_COLUMNS, highlight=False, markup=False)
    done: list[Outcome] = []
    for claim in asked:
        done.append(_computed(claim))
        if not options.json:
            _print_outcome(console, done[-1])
    if options.json:
        print(json.dumps([outcome.as_dict() for outcome in done], indent=1, allow_nan=False))
    elif options.all:
        console.print(_summary(done))
    if not all(outcome.reproduced for outcome in done):
        sys.exit(1)


def _computed(claim: Claim) -> Outcome:
    with Console(stderr=True).status(f"Computing {claim.name}") as status:

        def say(text: str) -> None:
            status.update(Text(f"Computing {claim.name}: {text}", no_wrap=True, overflow="ellipsis"))

        return check(claim, say)


def _print_list(as_json: bool) -> None:
    if as_json:
        keys = ("name", "title", "source")
        print(json.dumps([{key: getattr(claim, key) for key in keys} for claim in CLAIMS.values()], indent=1))
        return
    console = Console(width=None if sys.stdout.isatty() else FILE_COLUMNS, highlight=False, markup=False)
    console.print("Published numbers that are computed again: zeroshard reproduce NAME, or --all\n")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, min_width=max(map(len, CLAIMS)))
    table.add_column()
    for claim in CLAIMS.values():
        table.add_row(f"  {claim.name}", claim.title)
    console.print(table)


def _print_outcome(console: Console, outcome: Outcome) -> None:
    claim = outcome.claim
    console.print(Text.assemble((claim.name, "bold"), f": {claim.title}"))
    console.print(claim.source, style="dim")
    console.print(_readings_table(outcome))
    for line in _verdict(outcome):
        console.print(line)
    console.print(f"How: {claim.how}\n", style="dim")


def _readings_table(outcome: Outcome) -> Table:
    numbers = any(reading.difference is not None for reading in outcome.readings)
    figures = ["published", "ours", *(["difference"] if numbers else [])]
    table = plain_table(outcome.claim.unit, [""], figures)
    if not outcome.reproduced:
        table.add_column("", no_wrap=True)
    if any(reading.note for reading in outcome.readings):
        table.add_column("", overflow="fold")
    for reading in outcome.readings:
        verdict = [] if outcome.reproduced else ["" if reading.agrees else "not reproduced"]
        difference = [_difference(reading)] if numbers else []
        cells = [reading.what, reading.published, _ours(reading), *difference, *verdict]
        table.add_row(*cells, *([reading.note] if reading.note else []), style="" if reading.agrees else "bold")
    return table


def _verdict(outcome: Outcome) -> list[str]:
    printed_ones = [reading for reading in outcome.readings if reading.published]
    number, agreeing = len(printed_ones), sum(reading.agrees for reading in printed_ones)
    lines = [f"{agreeing} of {number} reproduced, in {outcome.seconds:.0f} s."]
    numbers = [r for r in outcome.readings if not isinstance(r.ours, str)]
    printed = [CONVENTION] if any(not r.exact and not r.within for r in numbers) else []
    shares = sorted({r.within for r in numbers if r.within})
    near = [f"The number of a model counts within {' or '.join(f'{share:.0%}' for share in shares)}."] if shares else []
    return [" ".join([*lines, *printed, *near])]


def _summary(outcomes: Sequence[Outcome]) -> str:
    readings = [reading for outcome in outcomes for reading in outcome.readings if reading.published]
    agreeing = sum(reading.agrees for reading in readings)
    missed = [outcome.claim.name for outcome in outcomes if not outcome.reproduced]
    rest = f"; not all of {', '.join(missed)}" if missed else ""
    return f"{agreeing} of {len(readings)} numbers of {len(outcomes)} claims reproduced{rest}."


def _ours(reading: Reading) -> str:
    if isinstance(reading.ours, str):
        return reading.ours
    if isinstance(reading.ours, Fraction):
        return str(reading.ours)
    return f"{reading.ours:,.{_digits(reading) + 2}f}"


def _difference(reading: Reading) -> str:
    difference = reading.difference
    if difference is None:
        return ""
    text = f"{difference:+.{_digits(reading) + 2}f}"
    return text if float(text) or (difference and reading.exact) else "0"


def _digits(reading: Reading) -> int:
    """Digits after the point, as published."""
    return len(reading.published.partition(".")[2])
