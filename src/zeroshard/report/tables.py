"""The tables of the page: formulas beside counted values."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any, TypeVar

from zeroshard.planning.settings import flat
from zeroshard.report.run_charts import causes_of
from zeroshard.report.run_records import (
    ActivationRecord,
    ExpertLoad,
    ForecastRecord,
    MemoryRecord,
    PredictionRow,
    RankFacts,
    TrafficRecord,
    TrainingPoint,
)
from zeroshard.text import (
    DASH,
    format_bytes,
    format_decimal,
    format_difference,
    format_duration,
    format_exact,
    format_share,
)

R = TypeVar("R", ActivationRecord, MemoryRecord, TrafficRecord)


@dataclass(frozen=True, slots=True)
class Cell:
    """The text of a cell.

    Attributes:
        exact: the exact value, below the text in small type.
        value: the number by which the column is sorted; None for the text itself.
    """

    text: str
    exact: str = ""
    value: float | str | None = None


def measured(n: float, text: str, exact: str = "") -> Cell:
    """A cell that is sorted by its number, if there is one."""
    return Cell(text, exact, n if math.isfinite(n) else None)


@dataclass(frozen=True, slots=True)
class Row:
    """A named row; ``style`` is the colour class of its key, or empty."""

    name: str
    cells: tuple[Cell, ...]
    style: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Title, column heads (the first names the rows), rows, closing sums, and a note on the columns."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[Row, ...]
    sums: tuple[Row, ...]
    note: str


def memory_table(rows: tuple[MemoryRecord, ...], styles: Mapping[str, str]) -> Table | None:
    """Bytes per rank: formula, padding, ledger, their difference, peak; None without rows."""
    if not rows:
        return None
    tiers = tuple(dict.fromkeys(row.tier for row in rows))
    sums = [_memory_sums([row for row in rows if row.tier == tier], named=len(tiers) > 1) for tier in tiers]
    return Table(
        "Bytes per rank: formula and ledger",
        ("Category", "Formula", "Padding", "Ledger", "Difference", "Peak"),
        tuple(_memory_row(row, styles) for row in rows),
        tuple(itertools.chain(*sums)),
        "Difference: ledger − (formula + padding); “equal” is less than one byte apart.",
    )


def traffic_table(rows: tuple[TrafficRecord, ...]) -> Table | None:
    """Elements and bytes on the wire in one step; None without rows."""
    if not rows:
        return None
    total = _total(TrafficRecord, rows, purpose="All purposes")
    return Table(
        "Wire volume per step: formula and measured",
        ("Purpose", "Formula, elements", "Measured, elements", "Difference", "Measured bytes", "Calls"),
        tuple(_traffic_row(row) for row in rows),
        (_traffic_row(total),),
        "Difference: measured − formula, in elements; “equal” is less than one element apart.",
    )


def exposed_table(points: Sequence[TrainingPoint]) -> Table | None:
    """Seconds of waits for offload, by cause; None if no step waited."""
    causes = causes_of(points)
    if not causes:
        return None
    rows = [Row(cause, _exposed_cells([p.exposed.get(cause, 0.0) for p in points]), causes[cause]) for cause in causes]
    taken, undone = (sum(numbers) for numbers in zip(*((p.taken, p.undone) for p in points), strict=True))
    counts = f"{format_exact(taken)} speculative updates were taken and {format_exact(undone)} undone."
    return Table(
        "Waiting for offload",
        ("Cause", "All steps", "Median step", "Longest step"),
        tuple(rows),
        (Row("All causes", _exposed_cells([sum(p.exposed.values()) for p in points])),),
        f"Time in which compute waited for copies or updates; those that ran beside it do not count. {counts}",
    )


def experts_table(points: Sequence[TrainingPoint]) -> Table | None:
    """The balance of each mixture of experts over the last tenth of the steps; None without experts."""
    points = [point for point in points if point.loads]
    if not points:
        return None
    last = points[-max(1, len(points) // 10) :]
    layers = dict.fromkeys(layer for point in last for layer in point.loads)
    rows = [Row(layer, _load_cells([p.loads[layer] for p in last if layer in p.loads])) for layer in layers]
    return Table(
        "Experts",
        ("Layer", "Most / mean load", "Least / mean load", "Dead experts", "Dropped", "Entropy, nats"),
        tuple(rows),
        (),
        f"Means over steps {format_exact(last[0].step)} to {format_exact(last[-1].step)}. A dead expert had no token in"
        f" any of them; dropped is the part of all choices that had no place in their expert's capacity.",
    )


def prediction_table(forecast: ForecastRecord | None) -> Table | None:
    """Memory, traffic and time of a step as predicted before the run and as measured; None without a prediction."""
    if forecast is None:
        return None
    missed = "".join(f" Missed: {warning}" for warning in forecast.warnings)
    place = f"Rank {format_exact(forecast.rank)}, up to step {format_exact(forecast.step)}."
    return Table(
        "Predicted and measured",
        ("Quantity", "Predicted", "Measured", "Difference"),
        tuple(Row(f"{row.part}: {row.name}", _prediction_cells(row)) for row in forecast.rows),
        (),
        f"{place} Times are medians of a step.{missed}",
    )


def ranks_table(rows: Sequence[RankFacts]) -> Table | None:
    """Memory and waits of every rank; None for a single one."""
    if len(rows) < 2:
        return None
    waited = any(row.exposed_seconds > 0 for row in rows)
    return Table(
        "Ranks",
        ("Rank", "Host", "Peak by the ledger", "Resident", *(("Exposed",) if waited else ())),
        tuple(Row(format_exact(row.rank), _rank_cells(row, waited)) for row in rows),
        (),
        "Peak: of the device, in the recorded step. Resident: memory of the process at the end of the run.",
    )


def _rank_cells(row: RankFacts, waited: bool) -> tuple[Cell, ...]:
    exposed = (measured(row.exposed_seconds, format_duration(row.exposed_seconds)),) if waited else ()
    return Cell(row.host), bytes_cell(row.peak_bytes), bytes_cell(row.rss_bytes), *exposed


def fields_table(fields: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """Field and value of a plan or a corpus as text; byte counts in units, the rest as JSON writes it."""
    return tuple((name.replace("_", " ").replace(".", ": "), _plain(name, value)) for name, value in flat(fields))


def _load_cells(loads: Sequence[ExpertLoad]) -> tuple[Cell, ...]:
    """Cells of one layer from its loads in several steps."""
    most, least = ([limit(load.shares) for load in loads] for limit in (max, min))
    size = len(loads[-1].load)
    dead = sum(not any(load.load[n] for load in loads if len(load.load) == size) for n in range(size))
    entropies = [load.entropy for load in loads if math.isfinite(load.entropy)]
    return (
        Cell(format_decimal(math.fsum(most) / len(loads), 2)),
        Cell(format_decimal(math.fsum(least) / len(loads), 2)),
        Cell(f"{dead} of {size}"),
        Cell(format_share(math.fsum(load.dropped for load in loads) / len(loads)).lstrip("+")),
        Cell(format_decimal(math.fsum(entropies) / len(entropies), 3) if entropies else DASH),
    )


def _memory_row(row: MemoryRecord, styles: Mapping[str, str]) -> Row:
    """A row of memory; host and disk rows name their tier and have no colour: the chart shows the device alone."""
    name = row.category.replace("_", " ")
    if row.tier == "device":
        return Row(name, _memory_cells(row), styles.get(row.category, ""))
    return Row(f"{name}, {row.tier}", _memory_cells(row))


def _memory_sums(rows: Sequence[MemoryRecord], named: bool) -> list[Row]:
    """The sums of one tier, which is named where there are several."""
    place = f", {rows[0].tier}" if named else ""
    planned = [row for row in rows if math.isfinite(row.planned_bytes)]
    everything = sum(row.measured_bytes for row in rows)
    sums = [Row(f"All categories{place}", (*[Cell(DASH)] * 2, bytes_cell(everything), *[Cell(DASH)] * 2))]
    if planned:  # categories may peak at different times, so their peaks have no sum
        padding = sum(_or_zero(row.padding_bytes) for row in planned)
        total = replace(_total(MemoryRecord, planned, category=""), padding_bytes=padding, peak_bytes=math.nan)
        sums.insert(0, Row(f"Categories with a formula{place}", _memory_cells(total)))
    return sums


def _total(kind: type[R], rows: Sequence[R], **named: Any) -> R:
    """A record with the sums of all numbers."""
    numbers = [each.name for each in fields(kind) if each.type is float]
    sums = {name: sum(getattr(row, name) for row in rows) for name in numbers}
    return kind(**named, **sums)


def _memory_cells(row: MemoryRecord) -> tuple[Cell, ...]:
    difference = row.measured_bytes - row.planned_bytes - _or_zero(row.padding_bytes)
    return (
        bytes_cell(row.planned_bytes),
        bytes_cell(row.padding_bytes),
        bytes_cell(row.measured_bytes),
        measured(difference, format_difference(difference, "B")),
        bytes_cell(row.peak_bytes),
    )


def _exposed_cells(seconds: Sequence[float]) -> tuple[Cell, ...]:
    return tuple(measured(n, format_duration(n)) for n in (sum(seconds), median(seconds), max(seconds)))


def _traffic_row(row: TrafficRecord) -> Row:
    difference = row.measured_elements - row.planned_elements
    cells = (
        measured(row.planned_elements, format_exact(row.planned_elements)),
        measured(row.measured_elements, format_exact(row.measured_elements)),
        measured(difference, format_difference(difference)),
        bytes_cell(row.measured_bytes),
        measured(row.calls, format_exact(row.calls)),
    )
    return Row(row.purpose, cells)


def _prediction_cells(row: PredictionRow) -> tuple[Cell, ...]:
    share = format_share(row.measured / row.predicted - 1) if row.predicted else DASH
    if row.part == "time":
        return *(measured(n, f"{format_exact(1e3 * n)} ms") for n in (row.predicted, row.measured)), Cell(share)
    equal = row.predicted == row.measured
    return bytes_cell(row.predicted), bytes_cell(row.measured), Cell("equal" if equal else share)


def bytes_cell(n: float) -> Cell:
    """Bytes in units, and to the byte from a KiB on."""
    return measured(n, format_bytes(n), format_exact(n, "B") if math.isfinite(n) and abs(n) >= 1024 else "")


def _or_zero(n: float) -> float:
    return n if math.isfinite(n) else 0.0


def _plain(name: str, value: object) -> str:
    if value is None:
        return DASH
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        exact = format_exact(value)
        return f"{format_bytes(value)} ({exact} B)" if name.endswith("bytes") else f"{value:g}" if value < 1 else exact
    return json.dumps(value, ensure_ascii=False)


def activations_table(rows: Sequence[ActivationRecord]) -> Table | None:
    """Decision, bytes and seconds of each block; None without decisions."""
    if not rows:
        return None
    total = replace(_total(ActivationRecord, rows, block="All blocks", action=DASH), measured_kept_bytes=math.nan)
    return Table(
        "Activations of each block",
        ("Block", "Action", "Saves", "Kept, predicted", "Kept, measured", "Again", "Predicted", "Measured", "Stored"),
        tuple(Row(row.block, _cells(row)) for row in rows),
        (Row(total.block, _cells(total)),),
        "Saves: what the block would keep of itself. Kept: between forward and backward, with the input of the next"
        " block. Again: how often its forward is computed again, predicted and measured, and the time that this takes"
        " in one forward and backward of the model. Stored: the time that compressing a block, sending it to the host,"
        " or making tensors of it again takes in one, predicted and, for the last of these, measured.",
    )


def _cells(row: ActivationRecord) -> tuple[Cell, ...]:
    return (
        Cell(row.action),
        _bytes_or_dash(row.saved_bytes),
        _bytes_or_dash(row.kept_bytes),
        _bytes_or_dash(row.measured_kept_bytes),
        _times(row.again, row.measured_again),
        _seconds(row.again_seconds),
        _seconds(row.measured_again_seconds),
        _both(row.stored_seconds, row.measured_stored_seconds),
    )


def _bytes_or_dash(n: float) -> Cell:
    return measured(n, format_bytes(n), format_exact(n, "B")) if math.isfinite(n) else Cell(DASH)


def _times(predicted: float, measured: float) -> Cell:
    return Cell(f"{predicted:g} / {format_decimal(measured, 1)}")


def _both(predicted: float, measured: float) -> Cell:
    return Cell(f"{_seconds(predicted).text} / {_seconds(measured).text}")


def _seconds(n: float) -> Cell:
    return measured(n, f"{format_decimal(1e3 * n, 1)} ms") if math.isfinite(n) else Cell(DASH)
