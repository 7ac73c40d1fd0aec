"""Several runs on one page: their curves over one another, their results in a table, and the settings that differ."""

import json
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from zeroshard.errors import ReportError
from zeroshard.plan import upgraded
from zeroshard.planning.settings import flat
from zeroshard.report.chart import HUES, Chart, Trace, axes, byte_unit, colour, dash, line, thin
from zeroshard.report.page import compose, git_state
from zeroshard.report.run_charts import COURSE, finite, smoothed, thinned
from zeroshard.report.run_folder import read_run
from zeroshard.report.run_records import RunRecord
from zeroshard.report.tables import Cell, Row, Table, bytes_cell, measured
from zeroshard.text import DASH, format_decimal, format_exact, format_seconds

NOT_SETTINGS = ("out", "resume", "tables")  # options without an effect on a run's numbers


@dataclass(frozen=True, slots=True)
class NamedRun:
    """A run with the name by which the page calls it."""

    name: str
    record: RunRecord


def named_runs(folders: Sequence[Path]) -> list[NamedRun]:
    """The runs of some folders, each by the shortest end of its path that no other one has.

    Raises:
        ReportError: a folder or its training lines are missing, or it is given twice.
    """
    paths = [folder.resolve() for folder in folders]
    twice = next((folder for i, folder in enumerate(folders) if paths[i] in paths[:i]), None)
    if twice is not None:
        raise ReportError(f"{twice} is given twice; name other runs to compare it with.")
    records = [read_run(folder) for folder in folders]
    count = 1
    while len({path.parts[-count:] for path in paths}) < len(paths):
        count += 1
    return [NamedRun(os.sep.join(path.parts[-count:]), record) for path, record in zip(paths, records, strict=True)]


def write_comparison(target: Path, runs: Sequence[NamedRun]) -> None:
    """Write the page.

    Raises:
        ReportError: a file that cannot be written.
    """
    page = compose(
        "compare.html.j2",
        title=f"{len(runs)} runs compared",
        versions="",
        facts=(),
        notes=[f"{run.name}: {note}" for run in runs for note in run.record.notes],
        results=results_table(runs),
        charts=curves(runs),
        settings=settings_table(runs),
        lines=[(run.name, f"zeroshard report {run.record.path}") for run in runs],
    )
    try:
        target.write_bytes(page.encode(errors="replace"))
    except OSError as error:
        raise ReportError(f"{target} cannot be written ({error.strerror}); name another file with --out.") from error


def results_table(runs: Sequence[NamedRun]) -> Table:
    """The results of each run."""
    heads = (
        "Run",
        "Steps",
        "Training",
        "Validation",
        "Lowest validation",
        "Tokens/s",
        "MFU",
        "Peak",
        "Wall time",
        "Ranks",
    )
    note = (
        "Training and validation in bits per byte, at the end of the run; tokens/s and MFU are medians; peak: the"
        " fullest rank's device by the ledger, in the recorded step."
    )
    rows = [Row(run.name, _results(run.record), f"hue{i % HUES}") for i, run in enumerate(runs)]
    return Table("Results", heads, tuple(rows), (), note)


def _results(run: RunRecord) -> tuple[Cell, ...]:
    summary, steps = run.summary, run.training
    training = _known(summary.train_bits_per_byte, [point.bits_per_byte for point in steps[-50:]])
    validations = [value for _, value in finite(run.validation, "bits_per_byte")]
    rates = [value for _, value in finite(steps, "tokens_per_s")]
    shares = [value for _, value in finite(steps, "mfu")]
    seconds = _known(summary.seconds, [steps[-1].seconds])
    mfu = median(shares) if shares else math.nan
    return (
        measured(len(steps), format_exact(len(steps))),
        measured(training, format_decimal(training)),
        *(measured(n, format_decimal(n)) for n in (_last(validations), min(validations, default=math.nan))),
        *(measured(n, format_exact(round(n)) if rates else DASH) for n in (median(rates) if rates else math.nan,)),
        measured(mfu, f"{mfu:.1%}" if shares else DASH),
        bytes_cell(_peak(run)),
        measured(seconds, format_seconds(seconds)),
        measured(summary.world_size, format_exact(summary.world_size)),
    )


def _known(value: float, others: Sequence[float]) -> float:
    """A number of the summary, or the mean of others for a run that ended before it was written."""
    known = [n for n in others if math.isfinite(n)]
    return value if math.isfinite(value) else math.fsum(known) / len(known) if known else math.nan


def _last(values: Sequence[float]) -> float:
    return values[-1] if values else math.nan


def _peak(run: RunRecord) -> float:
    """The peak of the fullest rank in the recorded step; NaN if no memory was recorded."""
    ranks = [rank.peak_bytes for rank in run.summary.ranks if math.isfinite(rank.peak_bytes)]
    steps = [run.memory] if run.memory else []
    return max([*ranks, *(event.total for step in steps for event in step.events)], default=math.nan)


def curves(runs: Sequence[NamedRun]) -> list[tuple[str, Chart]]:
    """The charts of all runs, with their titles; those with numbers."""
    found = [
        ("Loss over steps", _losses(runs, "step", "step")),
        ("Loss over time", _losses(runs, "seconds", "seconds")),
        *((title, _curve(runs, name, label, about)) for title, name, label, about in COURSE),
        ("Memory over one step", _memory(runs)),
    ]
    return [(title, chart) for title, chart in found if chart.traces]


def _losses(runs: Sequence[NamedRun], place: str, label: str) -> Chart:
    """Smoothed training losses, and validation as points, over an attribute of the steps."""
    traces: list[Trace] = []
    for i, run in enumerate(runs):
        points = finite(run.record.training, "bits_per_byte")
        places = ((float(point.step), float(getattr(point, place))) for point in run.record.training)
        at = {step: where for step, where in places if math.isfinite(where)}
        points = [point for point in points if point[0] in at]
        if not points:
            continue
        group = {"legendgroup": run.name}
        steps, values = smoothed(points)
        if not steps:
            steps, values = thinned(points)
        traces.append(line(run.name, [at[step] for step in steps], values, colour(i), dash=dash(i), **group))
        held_out = [(at[step], value) for step, value in finite(run.record.validation, "bits_per_byte") if step in at]
        if held_out:
            marker = {"color": colour(i), "size": 8}
            shown = {"mode": "markers", "marker": marker, "showlegend": False, "hovertemplate": "validation %{y:.4f}"}
            x, y = thinned(held_out)
            traces.append({**line(run.name, x, y, colour(i), **group), **shown})
    caption = "Training bits per byte, as running means of long runs; points are validations."
    return Chart(tuple(traces), axes(label, "bits per byte"), caption, height=360 if place == "step" else 280)


def _curve(runs: Sequence[NamedRun], name: str, label: str, about: str) -> Chart:
    """One number of every step, of all runs."""
    traces = []
    for i, run in enumerate(runs):
        points = finite(run.record.training, name)
        if points:
            traces.append(line(run.name, *thinned(points), colour(i), dash=dash(i), width=1.5))
    return Chart(
        tuple(traces), axes("step", label, **({"tickformat": ".1%"} if name == "mfu" else {})), about, height=280
    )


def _memory(runs: Sequence[NamedRun]) -> Chart:
    """The totals of the ledgers over the recorded step."""
    recorded = [(i, run.name, run.record.memory) for i, run in enumerate(runs) if run.record.memory is not None]
    unit, unit_name = byte_unit(max((event.total for _, _, step in recorded for event in step.events), default=1.0))
    traces = []
    for i, name, step in recorded:
        span = (step.events[0].t, step.events[-1].t or 1e-3)
        kept = thin(step.events, lambda event: event.t, lambda event: event.total, span, 250)
        shown = {"text": [event.place for event in kept], "hovertemplate": f"%{{y:.2f}} {unit_name}, %{{text}}"}
        totals = [event.total / unit for event in kept]
        traces.append(line(name, [e.t * 1e3 for e in kept], totals, colour(i), dash=dash(i), shape="hv", **shown))
    caption = "Bytes on the device of the rank that reports, by the ledger, over the recorded step."
    return Chart(tuple(traces), axes("ms", unit_name), caption)


def settings_table(runs: Sequence[NamedRun]) -> Table | None:
    """Settings, versions and git states that differ between the runs; None where all are equal."""
    each = [_settings(run.record) for run in runs]
    names = dict.fromkeys(name for settings in each for name in settings)
    rows = [
        Row(name, tuple(Cell(settings.get(name, DASH)) for settings in each))
        for name in names
        if len({settings.get(name) for settings in each}) > 1
    ]
    note = f"{len(names) - len(rows)} further settings are equal."
    return (
        Table("Differing settings", ("Setting", *(run.name for run in runs)), tuple(rows), (), note) if rows else None
    )


def _text(value: object) -> str:
    """A setting as text; a dash for none."""
    if value is None or value in ("", []):
        return DASH
    return value if isinstance(value, str) else json.dumps(value)


def _settings(run: RunRecord) -> dict[str, str]:
    """The options of a run as text, and its origin."""
    file = run.path / "config.toml"
    options: Mapping[str, Any] = {}
    if file.is_file():
        try:
            options = tomllib.loads(file.read_text(encoding="utf-8", errors="replace"))
        except tomllib.TOMLDecodeError:
            options = {}
    plan = run.summary.plan or options.get("plan", {})
    found = {name: value for name, value in flat(options) if name.partition(".")[0] not in ("plan", *NOT_SETTINGS)}
    found |= dict(flat(upgraded(plan))) if isinstance(plan, dict) else {}
    texts = {name: _text(value) for name, value in found.items()}
    if run.starts:
        last = run.starts[-1]
        texts |= {"host": " ".join(dict.fromkeys(last.hosts)), "device": last.device, "git": git_state(last) or DASH}
    return texts | {"zeroshard": run.summary.zeroshard or DASH, "torch": run.summary.torch or DASH}
