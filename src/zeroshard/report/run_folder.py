"""The files of a run folder, as plain records.

A run may have died at any moment, so only ``metrics.jsonl`` with one training line is required. Other files that are
missing or cut off become notes on the page. A number that is absent, null or not a number is NaN.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from zeroshard.errors import PlanError, ReportError
from zeroshard.report.run_records import (
    ActivationRecord,
    ArenaRecord,
    ExpertLoad,
    ForecastRecord,
    MemoryEvent,
    MemoryRecord,
    MemoryStep,
    PredictionRow,
    RankFacts,
    RunRecord,
    SpeedRecord,
    Start,
    Summary,
    Timelines,
    TrafficRecord,
    TrainingPoint,
    ValidationPoint,
)
from zeroshard.schedule.actions import Action
from zeroshard.schedule.simulate import Span, Timeline

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
MEMORY = "memory.json"
TIMELINE = "timeline.json"
PREDICTION = "prediction.json"
STARTS = "starts.json"
RANKS_MEMORY = "memory-rank*.json"
MOST_MEMORIES = 16  # ranks whose memory over the step is drawn
R = TypeVar("R")


class Record:
    """A JSON object read by type: fields that are absent or of another type are NaN, empty or False."""

    def __init__(self, value: object) -> None:
        self.fields: dict[str, object] = value if isinstance(value, dict) else {}

    def number(self, key: str) -> float:
        """The number under ``key``, or NaN."""
        value = self.fields.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return math.nan
        return float(value)

    def text(self, key: str) -> str:
        """The string under ``key``, or the empty one."""
        value = self.fields.get(key)
        return value if isinstance(value, str) else ""

    def record(self, key: str) -> "Record":
        """The object under ``key``, or an empty one."""
        return Record(self.fields.get(key))

    def records(self, key: str) -> "list[Record]":
        """The list of objects under ``key``, or an empty one."""
        value = self.fields.get(key)
        return [Record(item) for item in value] if isinstance(value, list) else []

    def read(self, kind: type[R], **given: Any) -> R:
        """A dataclass from the values under the names of its fields, but for those that are given."""
        for each in fields(kind):  # type: ignore[arg-type]
            if each.name in given:
                continue
            if each.type is float:
                given[each.name] = self.number(each.name)
            elif each.type is str:  # files of earlier versions lack those with a default
                given[each.name] = self.text(each.name) or (each.default if each.default is not MISSING else "")
            else:
                given[each.name] = self.record(each.name).fields
        return kind(**given)


def read_run(run: Path) -> RunRecord:
    """Read a run folder; ReportError when it or its training lines are missing."""
    lines, unreadable = _metric_lines(_metrics_file(run))
    notes: list[str] = []
    points = list(_training(lines))
    training = {point.step: point for point in points}
    if not training:
        raise ReportError(
            f"{run / METRICS} has no training line ({len(lines)} readable lines, {unreadable} unreadable):"
            " let the run finish one step, then make the report again."
        )
    if unreadable:
        notes.append(
            f"{METRICS}: {unreadable} unreadable {'line' if unreadable == 1 else 'lines'} left out"
            " (a run that stops while it writes cuts its last line)."
        )
    repeated = len(points) - len(training)
    if repeated:
        notes.append(f"{METRICS}: {repeated} step records were written again by a resumed run; the last one counts.")
    last = max(training)
    summary = _summary(_json_file(run / SUMMARY, f"the run ended before it was complete, at step {last}", notes))
    memory = _memory(_json_file(run / MEMORY, "no memory over a step was recorded", notes))
    timelines = _timelines(run / TIMELINE, notes)
    forecast = _forecast(run / PREDICTION, notes)
    ordered = tuple(training[step] for step in sorted(training))
    starts, found = _starts(run / STARTS, notes), tuple(notes)
    return RunRecord(
        run, ordered, _validation(lines), summary, memory, timelines, forecast, found, _memories(run, memory), starts
    )


def _metrics_file(run: Path) -> Path:
    remedy = "give the folder that the training run wrote."
    if not run.is_dir():
        raise ReportError(f"{run} is {'a file, not a folder' if run.exists() else 'not there'}: {remedy}")
    metrics = run / METRICS
    if not metrics.is_file():
        found = ", ".join(sorted(entry.name for entry in run.iterdir())[:8]) or "nothing"
        raise ReportError(f"{run} holds no {METRICS} (it holds: {found}): {remedy}")
    return metrics


def _metric_lines(metrics: Path) -> tuple[list[Record], int]:
    """The readable lines that carry a whole step number, and how many could not be read."""
    lines: list[Record] = []
    unreadable = 0
    # a cut inside a multi-byte character must not make the whole file unreadable
    with metrics.open(encoding="utf-8", errors="replace") as file:
        for text in filter(str.strip, file):
            try:
                record = Record(json.loads(text))
            except ValueError:
                unreadable += 1
                continue
            if record.number("step").is_integer():
                lines.append(record)
            else:
                unreadable += 1
    return lines, unreadable


def _training(lines: list[Record]) -> Iterator[TrainingPoint]:
    for line in lines:
        if "bits_per_byte" in line.fields or "loss" in line.fields:
            yield line.read(
                TrainingPoint,
                step=int(line.number("step")),
                skipped=line.fields.get("skipped") is True,
                exposed=_exposed(line.record("exposed_seconds")),
                taken=_or_zero(line.number("guesses_taken")),
                undone=_or_zero(line.number("guesses_undone")),
                loads=_loads(line.record("experts")),
                ranks=_of_ranks(line.record("ranks")),
                quantiles=line.record("ranks").fields.get("quantiles") is True,
            )


def _exposed(record: Record) -> dict[str, float]:
    """Seconds by cause; values that are no number of seconds are left out."""
    seconds = {cause: record.number(cause) for cause in record.fields}
    return {cause: n for cause, n in seconds.items() if 0 <= n < math.inf}


def _loads(record: Record) -> dict[str, ExpertLoad]:
    """Loads by layer; those that are no list of counts are left out."""
    found = {}
    for layer in record.fields:
        of = record.record(layer)
        given = of.fields.get("load")
        load = [Record({"n": n}).number("n") for n in given] if isinstance(given, list) else []
        if load and all(0 <= n < math.inf for n in load):
            found[layer] = ExpertLoad(tuple(load), _or_zero(of.number("dropped")), of.number("entropy"))
    return found


def _of_ranks(record: Record) -> dict[str, tuple[float, ...]]:
    """Values of every rank by quantity; those that are no list of numbers are left out."""
    found = {}
    for name, given in record.fields.items():
        values = [Record({"n": n}).number("n") for n in given] if isinstance(given, list) else []
        if values and all(map(math.isfinite, values)):
            found[name] = tuple(values)
    return found


def _or_zero(n: float) -> float:
    return n if math.isfinite(n) else 0.0


def _validation(lines: list[Record]) -> tuple[ValidationPoint, ...]:
    key = "validation_bits_per_byte"
    values = {int(line.number("step")): line.number(key) for line in lines if key in line.fields}
    return tuple(ValidationPoint(step, values[step]) for step in sorted(values))


def _json_file(path: Path, when_absent: str, notes: list[str]) -> Record:
    if not path.is_file():
        notes.append(f"There is no {path.name}: {when_absent}. The report goes without it.")
        return Record(None)
    try:
        return Record(json.loads(path.read_text(encoding="utf-8", errors="replace")))
    except ValueError as error:
        notes.append(f"{path.name} cannot be read ({error}). The report goes without it.")
        return Record(None)


def _summary(record: Record) -> Summary:
    kinds: dict[str, type[Any]] = {"memory": MemoryRecord, "traffic": TrafficRecord, "activations": ActivationRecord,
                                    "ranks": RankFacts}  # fmt: skip
    tables = {name: tuple(row.read(kind) for row in record.records(name)) for name, kind in kinds.items()}
    nested: dict[str, tuple[Record, type[Any]]] = {
        "arena": (record.record("arena"), ArenaRecord), "speed": (record.record("speed"), SpeedRecord),
    }  # fmt: skip
    inner = {name: one.read(kind) if one.fields else None for name, (one, kind) in nested.items()}
    return record.read(Summary, **tables, **inner)


def _memory(record: Record) -> MemoryStep | None:
    rows = sorted(
        (row for row in record.records("events") if math.isfinite(row.number("t"))), key=lambda row: row.number("t")
    )
    listed = record.fields.get("categories")
    named = [str(name) for name in listed] if isinstance(listed, list) else []
    categories = tuple(dict.fromkeys([*named, *(name for row in rows for name in row.record("bytes").fields)]))
    if not rows or not categories:
        return None
    return MemoryStep(record.number("rank"), categories, tuple(_event(row, categories) for row in rows))


def _event(row: Record, categories: tuple[str, ...]) -> MemoryEvent:
    held = row.record("bytes")
    # a category that an event does not name has 0 bytes then
    nbytes = (held.number(name) for name in categories)
    sizes = tuple(n if math.isfinite(n) else 0.0 for n in nbytes)
    return MemoryEvent(row.number("t"), row.text("label"), sizes, row.text("layer"), row.text("phase"))


def _memories(run: Path, own: MemoryStep | None) -> tuple[MemoryStep, ...]:
    """The memory of all ranks over the step, in order; of many ranks evenly spaced ones."""
    paths = sorted(run.glob(RANKS_MEMORY), key=lambda path: (len(path.name), path.name))
    every = -(-len(paths) // MOST_MEMORIES) or 1
    found = (_memory(_json_file(path, "", [])) for path in paths[::every])
    steps = {step.rank: step for step in (*found, own) if step is not None and math.isfinite(step.rank)}
    return tuple(steps[rank] for rank in sorted(steps))


def _starts(path: Path, notes: list[str]) -> tuple[Start, ...]:
    """The starts of the run; runs of earlier versions have none on record."""
    record = _json_file(path, "", notes) if path.is_file() else Record(None)
    rows = record.records("starts")
    return tuple(row.read(Start, hosts=_hosts(row), **_git(row.record("git"))) for row in rows)


def _hosts(row: Record) -> tuple[str, ...]:
    given = row.fields.get("hosts")
    return tuple(map(str, given)) if isinstance(given, list) else ()


def _git(record: Record) -> dict[str, Any]:
    return {"commit": record.text("commit"), "branch": record.text("branch"), "changed": record.number("changed")}


def _forecast(path: Path, notes: list[str]) -> ForecastRecord | None:
    """The comparison with the prediction, or None if the run had none or ended before it."""
    record = _json_file(path, "", notes) if path.is_file() else Record(None)
    rows = record.records("rows")
    if not rows:
        return None
    given = record.fields.get("warnings")
    warnings = tuple(map(str, given)) if isinstance(given, list) else ()
    return record.read(ForecastRecord, rows=tuple(row.read(PredictionRow) for row in rows), warnings=warnings)


def _timelines(path: Path, notes: list[str]) -> Timelines | None:
    """The timelines; None if they are missing or damaged."""
    if not path.is_file():
        return None
    before = len(notes)
    record = _json_file(path, "", notes)
    if len(notes) > before:
        return None
    try:
        drawn = tuple(_timeline(row) for row in record.records("timelines"))
        measured, simulated = record.number("measured_seconds"), record.number("simulated_seconds")
        if not all(0 < s < math.inf for s in (measured, simulated)) or not any(
            spans for line in drawn for spans in line.spans
        ):
            raise ValueError("it holds no actions, or no times")
    except (ValueError, TypeError, PlanError) as error:
        notes.append(f"{path.name} is damaged ({error}). The report goes without it.")
        return None
    return Timelines(measured, simulated, drawn)


def _timeline(row: Record) -> Timeline:
    """The timeline of a record; raises ValueError, TypeError or PlanError if it is damaged."""
    ranks, notes = row.fields.get("spans"), row.fields.get("notes")
    if not isinstance(ranks, list) or not isinstance(notes, list):
        raise TypeError("a timeline has no spans or no notes")
    return Timeline(row.text("name"), [[_span(*span) for span in rank] for rank in ranks], tuple(map(str, notes)))


def _span(action: str, start: float, end: float) -> Span:
    if not -math.inf < start <= end < math.inf:
        raise ValueError(f"{action} runs from {start} to {end}")
    return Action.parse(action), start, end
