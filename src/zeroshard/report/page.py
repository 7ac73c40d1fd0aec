"""Composes the page: facts, charts, tables and the sample, into one file that loads nothing else."""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

import jinja2
from markupsafe import Markup

from zeroshard.errors import ConfigError
from zeroshard.plan import Plan, upgraded
from zeroshard.planning.settings import flat
from zeroshard.report.chart import HUES, Chart
from zeroshard.report.experts_chart import balance_charts, heat_chart
from zeroshard.report.memory_chart import memory_chart, ranks_chart
from zeroshard.report.offload_timeline import read_offload_timeline, write_offload_timeline
from zeroshard.report.run_charts import course_charts, exposed_chart, loss_chart, ranks_charts, traffic_chart
from zeroshard.report.run_folder import read_run
from zeroshard.report.run_records import ArenaRecord, RunRecord, SpeedRecord, Start
from zeroshard.report.tables import (
    Table,
    activations_table,
    experts_table,
    exposed_table,
    fields_table,
    memory_table,
    prediction_table,
    ranks_table,
    traffic_table,
)
from zeroshard.report.timeline_section import TimelineSection, write_timelines
from zeroshard.text import DASH, format_bytes, format_count, format_decimal, format_exact, format_seconds, parse_bytes

REPORT = "report.html"
LIBRARY = "vendored/plotly-basic.min.js"
SCRIPTS = ("charts.js", "tables.js")
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


def compose(template: str = "run.html.j2", scripts: Sequence[str] = SCRIPTS, **content: object) -> str:
    """Render a template with its content; style, scripts and the charting library come from the package."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_resource),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    inlined = {
        "style": Markup(_resource("style.css")),
        "library": Markup(_resource(LIBRARY)),
        "script": Markup("\n".join(map(_resource, scripts))),
    }
    return environment.get_template(template).render(**inlined, **content)


def _page(run: RunRecord, timeline: TimelineSection | None) -> str:
    summary = run.summary
    return compose(
        title=run.title,
        versions=provenance(run),
        notes=run.notes,
        facts=_facts(run),
        course=_course(run),
        loss=loss_chart(run),
        charts=[*course_charts(run), *ranks_charts(run)],
        timeline=timeline,
        memory=memory_chart(run.memory, *_limits(run)) if run.memory else None,
        memories=ranks_chart(run.memories),
        tables=_tables(run),
        lines=_commands(run),
        plan=fields_table(summary.plan),
        chosen=fields_table(chosen_settings(summary.plan)),
        corpus=fields_table(summary.corpus),
        starts=[_start(start) for start in run.starts],
        sample=summary.sample.replace("\r\n", "\n").translate(_VISIBLE_CONTROLS),
    )


def _tables(run: RunRecord) -> list[tuple[Table, list[Chart]]]:
    """The tables with rows, each with its charts."""
    summary = run.summary
    tables: tuple[tuple[Table | None, tuple[Chart | None, ...]], ...] = (
        (ranks_table(summary.ranks), ()),
        (prediction_table(run.forecast), ()),
        (memory_table(summary.memory, _styles(run)), ()),
        (activations_table(summary.activations), ()),
        (traffic_table(summary.traffic), (traffic_chart(summary.traffic),)),
        (exposed_table(run.training), (exposed_chart(run.training),)),
        (experts_table(run.training), (*balance_charts(run.training), heat_chart(run.training))),
    )
    return [(table, [chart for chart in charts if chart]) for table, charts in tables if table]


def provenance(run: RunRecord) -> str:
    """Date, host, git state, seed and versions of a run, as far as they are known."""
    summary = run.summary
    named = [f"{name} {version}" for name, version in (("zeroshard", summary.zeroshard), ("torch", summary.torch))]
    named = [text for text in named if not text.endswith(" ")]
    if not run.starts:
        return " · ".join(named)
    first, last = run.starts[0], run.starts[-1]
    resumed = f", resumed {len(run.starts) - 1} ×" if len(run.starts) > 1 else ""
    seed = f"seed {format_exact(last.seed)}" if math.isfinite(last.seed) else ""
    named = named if summary.torch else [f"zeroshard {last.zeroshard}", f"torch {last.torch}"]
    python = f"Python {last.python}" if last.python else ""
    parts = (first.date + resumed, _hosts(last), last.device, git_state(last), seed, *named, python)
    return " · ".join(part for part in parts if part)


def git_state(start: Start) -> str:
    """The commit of the working directory, its branch, and the number of changed files; empty without git."""
    if not start.commit:
        return ""
    branch = f" on {start.branch}" if start.branch else ""
    changed = f", {format_exact(start.changed)} changed files" if start.changed > 0 else ""
    return f"git {start.commit[:10]}{branch}{changed}"


def chosen_settings(plan: Mapping[str, object]) -> dict[str, object]:
    """The settings of a stored plan that differ from the defaults, by their names such as "offload.disk"."""
    default = dict(flat(Plan().as_dict()))
    return {
        name: value
        for name, value in flat(upgraded(plan))
        if name not in default or json.dumps(value) != json.dumps(default[name])
    }


def _hosts(start: Start) -> str:
    names = list(dict.fromkeys(start.hosts))
    return f"{names[0]} and {len(names) - 1} more hosts" if len(names) > 1 else "".join(names)


def _start(start: Start) -> Facts:
    """All that is known of one start."""
    facts = (
        ("date", start.date),
        ("command", start.command),
        ("hosts", ", ".join(dict.fromkeys(start.hosts))),
        ("device", start.device),
        ("ranks", format_exact(start.ranks)),
        ("seed", format_exact(start.seed)),
        ("git", git_state(start)),
        ("zeroshard", start.zeroshard),
        ("torch", start.torch),
        ("Python", start.python),
    )
    return tuple((name, text) for name, text in facts if text and text != DASH)


def _commands(run: RunRecord) -> Facts:
    """The commands of a run to copy: start, resume, export, report, compare."""
    folder = run.starts[-1].folder if run.starts else ""
    folder = shlex.quote(folder or str(run.path))
    lines = [
        ("Report", f"zeroshard report {folder}"),
        ("Compare", f"zeroshard compare {folder} OTHER_RUN"),
    ]
    if (run.path / "checkpoints").is_dir():
        lines.insert(0, ("Export", f"zeroshard export {folder}"))
    if run.starts:
        again = run.starts[-1]
        ended = math.isfinite(run.summary.seconds)
        lines = [("Start", again.command), *([] if ended else [("Resume", again.resume)]), *lines]
    return tuple((name, text) for name, text in lines if text)


def _limits(run: RunRecord) -> tuple[float, float]:
    """The budget of the device under the plan and the device's capacity in bytes; 0 for those not known."""
    budget = run.summary.plan.get("device_memory")
    capacity = run.summary.capacity_bytes
    try:
        allowed = 0 if budget is None else parse_bytes(str(budget))
    except ConfigError:
        allowed = 0
    return allowed, capacity if math.isfinite(capacity) else 0


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _styles(run: RunRecord) -> dict[str, str]:
    """Colour class by category, the same in chart and table."""
    return {name: f"hue{i % HUES}" for i, name in enumerate(run.memory.categories)} if run.memory else {}


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
