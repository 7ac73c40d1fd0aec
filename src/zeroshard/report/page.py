"""Composes the page: facts, charts, tables and the sample, into one file that loads nothing else."""

import math
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

import jinja2
from markupsafe import Markup

from zeroshard.plan import upgraded
from zeroshard.report.experts_figure import experts_figure
from zeroshard.report.loss_figure import loss_figure
from zeroshard.report.memory_figure import hue, memory_figure
from zeroshard.report.offload_timeline import read_offload_timeline, write_offload_timeline
from zeroshard.report.run_folder import ArenaRecord, RunRecord, SpeedRecord, Summary, read_run
from zeroshard.report.tables import (
    activations_table,
    experts_table,
    exposed_table,
    fields_table,
    memory_table,
    prediction_table,
    traffic_table,
)
from zeroshard.report.timeline_section import TimelineSection, write_timelines
from zeroshard.report.traffic_figure import exposed_figure, traffic_figure
from zeroshard.text import DASH, format_bytes, format_count, format_decimal, format_exact, format_seconds

REPORT = "report.html"
Facts = tuple[tuple[str, str], ...]
# control characters are drawn as their symbols: a sample of bytes may hold any of them
_VISIBLE_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}


def write_report(run: Path) -> Path:
    """Write ``report.html``, and the drawings of a timeline, into a run folder; returns the page's path.

    Raises ReportError when the folder, its metrics or a first training line is missing; the page
    notes all other missing content.
    """
    content = read_run(run)
    offloaded, notes = read_offload_timeline(run)
    content = replace(content, notes=(*content.notes, *notes))
    timeline = write_timelines(run, content.timelines) if content.timelines else None
    if offloaded is not None and timeline is None:  # a run writes one of the two
        timeline = write_offload_timeline(run, offloaded)
    page = _page(content, timeline)
    target = run / REPORT
    # JSON escapes may give lone surrogates, which have no UTF-8 form
    target.write_bytes(page.encode("utf-8", errors="replace"))
    return target


def compose(template: str = "run.html.j2", scripts: Sequence[str] = ("hover.js",), **content: object) -> str:
    """Render a template with its content; style and scripts come from the package."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_resource),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = Markup("\n".join(map(_resource, scripts)))
    return environment.get_template(template).render(style=Markup(_resource("style.css")), script=script, **content)


def _page(run: RunRecord, timeline: TimelineSection | None) -> str:
    summary = run.summary
    tables = (
        (prediction_table(run.forecast), None),
        (memory_table(summary.memory, _styles(run)), None),
        (activations_table(summary.activations), None),
        (traffic_table(summary.traffic), traffic_figure(summary.traffic)),
        (exposed_table(run.training), exposed_figure(run.training)),
        (experts_table(run.training), experts_figure(run.training)),
    )
    return compose(
        title=summary.title or f"Run {run.path.resolve().name}",
        versions=_versions(summary),
        notes=run.notes,
        facts=_facts(run),
        course=_course(run),
        loss=loss_figure(run),
        timeline=timeline,
        memory=memory_figure(run.memory) if run.memory else None,
        tables=[(table, figure) for table, figure in tables if table],
        plan=fields_table(summary.plan),
        corpus=fields_table(summary.corpus),
        sample=summary.sample.replace("\r\n", "\n").translate(_VISIBLE_CONTROLS),
    )


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _styles(run: RunRecord) -> dict[str, str]:
    """Colour class by category, the same in chart and table."""
    return {name: hue(i) for i, name in enumerate(run.memory.categories)} if run.memory else {}


def _facts(run: RunRecord) -> Facts:
    summary = run.summary
    validation = summary.validation_bits_per_byte
    if not math.isfinite(validation) and run.validation:
        validation = run.validation[-1].bits_per_byte
    seconds = summary.seconds if math.isfinite(summary.seconds) else run.training[-1].seconds
    facts = (
        ("Parameters", format_count(summary.parameters)),
        ("Plan", _stage(summary.plan)),
        ("Pipeline", _pipeline(summary.plan)),
        ("Tensor parallel", _ranks(summary.plan, "tensor_parallel")),
        ("Expert parallel", _ranks(summary.plan, "expert_parallel")),
        ("Offloaded", (_settings(summary.plan, "offload").get("parts") or DASH).replace(",", ", ")),
        ("Checkpoint arena", _arena(summary.arena)),
        ("Ranks", format_exact(summary.world_size)),
        ("Validation bits/byte", format_decimal(validation)),
        ("Training bits/byte", format_decimal(summary.train_bits_per_byte)),
        ("Wall time", format_seconds(seconds)),
        *_speed(summary.speed),
    )
    return tuple((name, text) for name, text in facts if text != DASH)


def _versions(summary: Summary) -> str:
    named = (("zeroshard", summary.zeroshard), ("torch", summary.torch))
    return " · ".join(f"{name} {version}" for name, version in named if version)


def _settings(plan: dict[str, object], group: str) -> dict[str, Any]:
    """A group of settings of a stored plan."""
    settings: dict[str, Any] = upgraded(plan).get(group, {})
    return settings


def _speed(speed: SpeedRecord | None) -> Facts:
    """Tokens per second and model FLOPs; numbers that are not known are left out."""
    if speed is None:
        return ()
    each = f" ({format_exact(round(speed.tokens_per_s_per_rank))} per rank)"
    flops, share = speed.tflops_per_rank, speed.mfu
    causal = f" ({speed.mfu_causal:.1%} with causal attention)"
    return (
        ("Tokens per second", format_exact(round(speed.tokens_per_s)) + each if speed.tokens_per_s > 0 else DASH),
        ("Model TFLOP/s per rank", f"{flops:.3g}" if math.isfinite(flops) else DASH),
        ("MFU", f"{share:.1%}{causal}" if math.isfinite(share) else DASH),
    )


def _arena(arena: ArenaRecord | None) -> str:
    if arena is None:
        return DASH
    used = f"{format_bytes(arena.nbytes)} for {format_exact(arena.checkpoints)} inputs of blocks"
    if arena.nbytes:
        used += f"; {format_decimal(100 * arena.live_bytes / arena.nbytes, 1)} % in use at once"
    return used + (f"; {format_exact(arena.outside)} lay outside" if arena.outside else "")


def _stage(plan: dict[str, object]) -> str:
    stage = plan.get("zero", plan.get("stage"))
    return DASH if stage is None else f"ZeRO-{stage}"


def _ranks(plan: dict[str, object], group: str) -> str:
    count = _settings(plan, group).get("ranks")
    return f"{count} ranks" if isinstance(count, int) and count > 1 else DASH


def _pipeline(plan: dict[str, object]) -> str:
    pipeline = _settings(plan, "pipeline_parallel")
    stages, chunks, schedule = (pipeline.get(name) for name in ("stages", "virtual_stages", "schedule"))
    if not isinstance(stages, int) or stages < 2:
        return DASH
    each = f" × {chunks} chunks" if isinstance(chunks, int) and chunks > 1 else ""
    return f"{stages} stages{each}, {schedule}" if schedule else f"{stages} stages{each}"


def _course(run: RunRecord) -> Facts:
    """Figures of the run, counted over its steps."""
    steps = run.training
    rates = [point.tokens_per_s for point in steps if math.isfinite(point.tokens_per_s)]
    resident = [point.rss_bytes for point in steps if math.isfinite(point.rss_bytes)]
    skipped = sum(point.skipped for point in steps)
    nonfinite = sum(not math.isfinite(point.grad_norm) for point in steps)
    return (
        ("steps", f"{len(steps):,}"),
        ("median tokens per second", format_exact(round(median(rates))) if rates else DASH),
        ("largest resident memory of the process", format_bytes(max(resident)) if resident else DASH),
        ("skipped steps", f"{skipped:,}"),
        ("steps without a finite gradient norm", f"{nonfinite:,}"),
    )
