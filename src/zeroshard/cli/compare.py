"""`zeroshard compare`: several runs over one another, in a table and on one page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from zeroshard.errors import ConfigError
from zeroshard.report.compare_page import named_runs, results_table, settings_table, write_comparison
from zeroshard.report.plain_table import plain_table
from zeroshard.train.option_tree import Positional
from zeroshard.train.options import parse


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Lay runs over one another: their curves on one page, their results and the settings that differ as tables."""

    runs: Positional[tuple[Path, ...]]
    """The run folders that `zeroshard train` named, two or more."""
    out: Path = Path("compare.html")
    """Page to write; an earlier one is replaced."""

    def __post_init__(self) -> None:
        if len(self.runs) < 2:
            raise ConfigError(f"{len(self.runs)} run folder is named; name two or more, as in: compare runs/A runs/B.")


def run_compare(argv: Sequence[str]) -> None:
    """Print the tables, and write the page.

    Raises:
        ReportError: a run folder that cannot be read, or a page that cannot be written.
    """
    options = parse(CompareOptions, argv, "zeroshard compare")
    runs = named_runs(options.runs)
    write_comparison(options.out, runs)
    console = Console(highlight=False)
    names = [run.name for run in runs]
    results = results_table(runs)
    columns = [[cell.text for cell in row.cells] for row in results.rows]
    rows = list(zip(results.heads[1:], *columns, strict=True))
    _print(results.title, names, rows, results.note, console)
    differing = settings_table(runs)
    if differing is not None:
        settings = [(row.name, *(cell.text for cell in row.cells)) for row in differing.rows]
        _print(differing.title, names, settings, differing.note, console)
    console.print(f"\nWrote {options.out}", soft_wrap=True, markup=False)


def _print(title: str, names: Sequence[str], rows: Sequence[Sequence[str]], note: str, console: Console) -> None:
    """A table with a column for each run, whose cells wrap where the terminal is narrow."""
    shown = plain_table(title, left=("",), caption=note)
    for name in names:
        shown.add_column(name, justify="right", overflow="fold")
    for row in rows:
        shown.add_row(*row)
    console.print(shown, markup=False)
