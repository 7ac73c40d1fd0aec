"""The command `zeroshard simulate`: time, memory and timeline of a pipeline schedule."""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from zeroshard.errors import ConfigError
from zeroshard.pipeline.partition.balance import balance
from zeroshard.pipeline.partition.profile import Profile
from zeroshard.platform.imports import uncollected
from zeroshard.report.plain_table import plain_table
from zeroshard.report.timeline_figure import time_unit, timeline_svg
from zeroshard.report.timeline_trace import timeline_trace
from zeroshard.schedule.layout import Layout
from zeroshard.schedule.orders import SCHEDULES, STREAMING
from zeroshard.schedule.peaks import Peak, peaks
from zeroshard.schedule.pipeline import PipelineSchedule
from zeroshard.schedule.simulate import Costs, Simulation, Timeline, simulate
from zeroshard.text import format_bytes, wrapped
from zeroshard.train.option_values import check_least
from zeroshard.train.options import parse

STAGES, FORWARD_MS, BACKWARD_MS = 4, 1.0, 2.0
EACH = tuple(name for name in SCHEDULES if name != "pipedream-flush")  # which is 1f1b
STEPS, STEPS_BESIDE_OTHERS = 4, 3  # of a stream, so that its steady state shows
MOST, MOST_RANKS = 500_000, 1024  # most forwards and backwards, and ranks, to simulate within seconds
FILE_COLUMNS = 120  # of the table where it is not shown on a terminal


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Simulate a pipeline schedule: its time, bubble and memory per rank, and its timeline as a picture and a trace.

    Times are those of one microbatch through the whole share of a stage; with several chunks, each takes its part.
    """

    ELSEWHERE: ClassVar[Mapping[str, tuple[str, str]]] = {  # as in the plan and in earlier versions
        **dict.fromkeys(("pipeline_parallel", "pp"), ("stages", "")),
        **{f"pipeline_parallel.{name}": (name, "") for name in ("schedule", "virtual_stages", "vertical_sync")},
        "pipeline_parallel.replicas": ("replicas", "one number for all stages, or one for each, such as 2,1"),
        "chunks": ("virtual_stages", ""),
    }

    schedule: str = "1f1b"
    """naive, gpipe, 1f1b (or pipedream-flush), interleaved, zb-h1, pipedream or 2bw."""
    stages: int | None = None
    """Number of stages; 4, or as many as replicas names."""
    virtual_stages: int = 1
    """Chunks of the model on each stage."""
    microbatches: int = 8
    """Microbatches per step."""
    replicas: str = "1"
    """Ranks per stage: one number for all stages, or one for each, such as 2,1."""
    vertical_sync: bool = False
    """pipedream: every stage uses the weights of the version that the first stage had."""
    steps: int | None = None
    """Steps that pipedream and 2bw go on without a flush (default 4; 3 with all)."""
    profile: Path | None = None
    """Costs of a model's layers, from `zeroshard profile`; they are cut into stages of equal time."""
    forward_ms: float | None = None
    """Forward (default 1)."""
    backward_ms: float | None = None
    """Whole backward (default 2, or its two parts)."""
    input_gradient_ms: float | None = None
    """First part of a backward in two, as in zb-h1 (default half, or the rest beside the second)."""
    weight_gradient_ms: float | None = None
    """Second part of a backward in two (default half, or the rest after the first)."""
    link_gbps: float | None = None
    """Gigabits per second from rank to rank (default: messages take no time)."""
    latency_us: float = 0.0
    """Latency of every message."""
    boundary_mb: float | None = None
    """Megabytes (10^6) that one microbatch sends from a chunk to the next."""
    recompute: bool = False
    """Keep the inputs of chunks only, and run their forwards again before the backwards."""
    svg: Path | None = None
    """Write the timeline to this file; without this and the next three, nothing is written."""
    png: Path | None = None
    """Write the timeline to this file."""
    trace: Path | None = None
    """Write the trace to this file, for ui.perfetto.dev or chrome://tracing."""
    out: Path | None = None
    """Write an SVG and a trace into this folder, if svg, png and trace name no files."""
    json: bool = False
    """Print JSON instead of tables."""
    all: bool = False
    """Every schedule in one picture; interleaved with 2 virtual stages, or as many as given."""


@dataclass(frozen=True)
class Simulated:
    """One schedule, simulated.

    Attributes:
        steps: that its lists go through; 1 if it flushes.
        first_layers: of each chunk, where a profile was cut.
    """

    pipeline: PipelineSchedule
    steps: int
    costs: Costs
    first_layers: tuple[int, ...]
    simulation: Simulation
    peaks: list[Peak]

    @property
    def step_seconds(self) -> float:
        """Time of a step; of a stream, in its steady state, if the stretch is long enough to have one."""
        steady = self.simulation.steady
        return (
            steady.microbatch_seconds * self.pipeline.microbatches if steady else self.simulation.makespan / self.steps
        )

    @property
    def shape(self) -> str:
        """Stages, microbatches and replicas as text."""
        layout, m = self.pipeline.layout, self.pipeline.microbatches
        replicas = ",".join(map(str, layout.replicas)) if layout.uneven else str(layout.replicas[0])
        extra = "" if replicas == "1" else f", replicas {replicas}"
        return f"{layout.stages} stage{'s' * (layout.stages > 1)}, {m} microbatch{'es' * (m > 1)}{extra}"

    @property
    def notes(self) -> tuple[str, ...]:
        """The figures beside the picture."""
        run, most = self.simulation, max(peak.in_flight for peak in self.peaks)
        versions = max(peak.weight_versions for peak in self.peaks)
        notes = [f"step {_time(self.step_seconds)}", f"bubble {run.bubble_fraction:.1%}"]
        if run.steady:
            notes[1] += f", steady {run.steady.bubble_fraction:.1%}"
        notes.append(f"{float(most):g} in flight at most")
        return (*notes, f"{versions} weight versions") if versions > 1 else tuple(notes)

    def ranks(self) -> dict[str, list[Any]]:
        """The figures of each rank; activations and weights where a profile has their bytes.

        The activations in flight are taken to be spread evenly over a rank's chunks.
        """
        run, layout, costs = self.simulation, self.pipeline.layout, self.costs
        stages = [layout.stage_of(rank) for rank in range(layout.ranks)]
        facts: dict[str, list[Any]] = {
            "stage": stages,
            "busy_seconds": [float(seconds) for seconds in run.busy],
            "idle_seconds": [float(seconds) for seconds in run.idle],
            "window_idle_seconds": [float(seconds) for seconds in run.window_idle],
            "peak_in_flight": [_plain(peak.in_flight) for peak in self.peaks],
            "weight_versions": [peak.weight_versions for peak in self.peaks],
            "receive_buffers": [peak.buffers for peak in self.peaks],
        }
        if self.first_layers:
            held = [layout.chunks_of(stage) for stage in stages]
            facts["activation_bytes"] = [
                costs.activation_bytes(chunks, peak.in_flight) for peak, chunks in zip(self.peaks, held, strict=True)
            ]
            facts["weight_bytes"] = [
                peak.weight_versions * sum(costs.parameter_bytes[c] for c in chunks)
                for peak, chunks in zip(self.peaks, held, strict=True)
            ]
        return facts

    def to_json(self) -> dict[str, Any]:
        """All figures, as plain JSON values."""
        run, layout = self.simulation, self.pipeline.layout
        facts: dict[str, Any] = {
            "schedule": self.pipeline.name,
            "stages": layout.stages,
            "virtual_stages": layout.chunks,
            "microbatches": self.pipeline.microbatches,
            "replicas": list(layout.replicas),
            "steps": self.steps,
            "step_seconds": float(self.step_seconds),
            "makespan_seconds": float(run.makespan),
            "bubble_fraction": float(run.bubble_fraction),
            "bubble_over_ideal": float(run.bubble_over_ideal),
        }
        if run.steady:
            facts["steady_microbatch_seconds"] = float(run.steady.microbatch_seconds)
            facts["steady_bubble_fraction"] = float(run.steady.bubble_fraction)
        if self.first_layers:
            facts["first_layers"] = list(self.first_layers)
        return facts | self.ranks()


def run_simulate(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ZeroshardError: options that do not fit, or a profile or file that cannot be read or written.
    """
    options = parse(SimulateOptions, argv, "zeroshard simulate")
    _check(options)
    with uncollected():  # of hundreds of thousands of live actions
        outcomes = [_simulated(options, name) for name in (EACH if options.all else (options.schedule,))]
        files = _write(options, outcomes)
    if options.json:
        facts = {"schedules": [o.to_json() for o in outcomes]} if options.all else outcomes[0].to_json()
        print(json.dumps(facts | {"files": {kind: str(path) for kind, path in files.items()}}))
        return
    console = Console(width=None if sys.stdout.isatty() else FILE_COLUMNS)
    console.print(_overview(outcomes) if options.all else _ranks_table(outcomes[0]))
    if not options.all:
        print(_summary(outcomes[0]))
    opened = {"trace": " (open it in ui.perfetto.dev)"}
    wrote = [f"Wrote {path}{opened.get(kind, '')}" for kind, path in files.items()]
    hint = wrapped("For its timeline add --svg FILE, --png FILE or --trace FILE, or --out DIR.", console.width)
    print("\n".join(wrote or [hint]))


def _check(options: SimulateOptions) -> None:
    """Refuse options that do not combine."""
    for option in fields(options):
        value = getattr(options, option.name)
        if isinstance(value, float) and not 0 <= value < math.inf:
            raise ConfigError(f"{option.name} is {value}; it must be 0 or more, and finite.")
    check_least(options, dict.fromkeys(("stages", "virtual_stages", "microbatches"), 1))
    if options.link_gbps == 0:
        raise ConfigError("link_gbps is 0, so no message would arrive; leave it out for messages that take no time.")
    by_hand = ("forward_ms", "backward_ms", "input_gradient_ms", "weight_gradient_ms", "boundary_mb")
    given = [name for name in by_hand if getattr(options, name) is not None]
    if options.profile and given:
        raise ConfigError(
            f"{given[0]}={getattr(options, given[0])} and profile={options.profile} both give the costs of a stage; "
            f"leave out one of the two."
        )
    if options.all or options.schedule not in SCHEDULES:
        return
    if options.steps is not None and options.schedule not in STREAMING:
        raise ConfigError(
            f"schedule={options.schedule!r} flushes after every step, and each step is like the first; leave out "
            f"steps, which are for {' and '.join(STREAMING)}."
        )
    if options.vertical_sync and options.schedule != "pipedream":
        raise ConfigError(f"schedule={options.schedule!r} has no vertical sync, which is for pipedream; leave it out.")


def _simulated(options: SimulateOptions, name: str) -> Simulated:
    chunks = options.virtual_stages
    if options.all:
        chunks = max(2, chunks) if name == "interleaved" else 1
    layout = _layout(options, chunks)
    sync = options.vertical_sync and name == "pipedream"
    pipeline = PipelineSchedule(name, layout, options.microbatches, vertical_sync=sync)
    usual = STEPS_BESIDE_OTHERS if options.all else STEPS
    steps = pipeline.unlike(usual if options.steps is None else options.steps)
    if steps < 1:
        raise ConfigError(f"steps is {steps}; it must be 1 or more.")
    _check_size(pipeline, steps)
    costs, first_layers = _costs(options, layout)
    lists = pipeline.stretch(steps)
    return Simulated(pipeline, steps, costs, first_layers, simulate(lists, layout, costs), peaks(lists, chunks))


def _check_size(pipeline: PipelineSchedule, steps: int) -> None:
    """Refuse simulations of minutes and gigabytes.

    Raises:
        ConfigError: with the setting that alone brings it down, and its largest value.
    """
    layout = pipeline.layout
    sizes = {"microbatches": pipeline.microbatches, "steps": steps}
    sizes |= {"virtual_stages": layout.chunks, "stages": layout.stages}
    count = 2 * layout.stages * layout.chunks * pipeline.microbatches * steps
    if count > MOST:
        name = max(sizes, key=lambda name: sizes[name])
        of = ", ".join(f"{each}={size}" for each, size in sizes.items() if size > 1)
        raise ConfigError(
            f"{of} make {count:,} forwards and backwards, and {MOST:,} are simulated at most; set {name} to "
            f"{max(1, sizes[name] * MOST // count)} or less."
        )


def _layout(options: SimulateOptions, chunks: int) -> Layout:
    try:
        replicas = tuple(int(word) for word in options.replicas.split(","))
    except ValueError as error:
        raise ConfigError(
            f"replicas is {options.replicas!r}; give one number for all stages, or one for each, such as 2,1."
        ) from error
    ranks = sum(replicas) * ((options.stages or STAGES) if len(replicas) == 1 else 1)
    if ranks > MOST_RANKS:
        raise ConfigError(
            f"stages={options.stages or STAGES} with replicas={options.replicas} make {ranks:,} ranks, and "
            f"{MOST_RANKS:,} are simulated at most; take fewer of either."
        )
    return Layout.described(replicas, options.stages, chunks, STAGES)


def _costs(options: SimulateOptions, layout: Layout) -> tuple[Costs, tuple[int, ...]]:
    """The costs, and the first layers of the chunks where a profile was cut."""
    rate = math.inf if options.link_gbps is None else options.link_gbps * 1e9 / 8
    rest: dict[str, Any] = {
        "bytes_per_second": rate,
        "latency_seconds": options.latency_us / 1e6,
        "recompute": options.recompute,
    }
    if options.profile is not None:
        layers = Profile.load(options.profile).layers
        first_layers = balance([layer.forward_seconds + layer.backward_seconds for layer in layers], layout.all_chunks)
        chunks = [layers[first:end] for first, end in pairwise([*first_layers, len(layers)])]
        costs = Costs(
            forward=tuple(sum(layer.forward_seconds for layer in chunk) for chunk in chunks),
            backward=tuple(sum(layer.backward_seconds for layer in chunk) for chunk in chunks),
            boundary_bytes=tuple(chunk[-1].activation_bytes for chunk in chunks),
            saved_bytes=tuple(sum(layer.saved_bytes for layer in chunk) for chunk in chunks),
            parameter_bytes=tuple(sum(layer.parameter_bytes for layer in chunk) for chunk in chunks),
            **rest,
        )
        return costs, tuple(first_layers)
    forward = FORWARD_MS if options.forward_ms is None else options.forward_ms
    whole, first, second = _backward(options)
    sent = (round((options.boundary_mb or 0) * 1e6),) * layout.all_chunks
    parts = (milliseconds / 1e3 for milliseconds in (forward, whole, first, second))
    return Costs.uniform(layout, *parts, boundary_bytes=sent, **rest), ()


def _backward(options: SimulateOptions) -> tuple[float, float, float]:
    """Milliseconds of the whole backward, its first and its second part."""
    whole, first, second = options.backward_ms, options.input_gradient_ms, options.weight_gradient_ms
    if whole is None:
        whole = BACKWARD_MS if first is None or second is None else first + second
    if first is None:
        first = whole / 2 if second is None else whole - second
    second = whole - first if second is None else second
    if min(first, second) < 0 or not math.isclose(first + second, whole):
        raise ConfigError(
            f"The parts of a backward take {first:g} and {second:g} ms and the whole {whole:g} ms; give two of "
            f"backward_ms, input_gradient_ms and weight_gradient_ms, and the parts no longer than the whole."
        )
    return whole, first, second


def _write(options: SimulateOptions, outcomes: Sequence[Simulated]) -> dict[str, Path]:
    """Write the pictures and the trace that the options name; returns their paths by kind."""
    files = {"svg": options.svg, "png": options.png, "trace": options.trace}
    if options.out is not None and not any(files.values()):
        stem = options.out / f"timeline-{'all' if options.all else options.schedule}"
        files = {"svg": stem.with_suffix(".svg"), "trace": stem.with_suffix(".json")}
    if options.all:
        title = f"All schedules, {outcomes[0].shape}"
        timelines = [Timeline(o.pipeline.title, o.simulation.spans, o.notes) for o in outcomes]
    else:
        title = ""
        timelines = [Timeline(f"{o.pipeline.title}: {o.shape}", o.simulation.spans, o.notes) for o in outcomes]
    written = {kind: path for kind, path in files.items() if path is not None}
    for kind, path in written.items():
        content = _drawn(kind, timelines, title)
        try:
            if options.out is not None and path.parent == options.out:
                options.out.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written ({error.strerror}); name a file that can be written."
            ) from error
    return written


def _drawn(kind: str, timelines: Sequence[Timeline], title: str) -> bytes:
    if kind == "svg":
        return timeline_svg(timelines, title).encode()
    if kind == "trace":
        return timeline_trace(timelines).encode()
    from zeroshard.report.timeline_png import timeline_png

    return timeline_png(timelines, title)


def _overview(outcomes: Sequence[Simulated]) -> Table:
    table = plain_table(f"All schedules, {outcomes[0].shape}")
    table.box = None  # 60 columns are enough then
    table.add_column("schedule")
    for column in ("step", "bubble", "of\nideal", "steady\nbubble", "in\nflight", "versions"):
        table.add_column(column, justify="right", no_wrap=True)
    for o in outcomes:
        run, steady = o.simulation, o.simulation.steady
        table.add_row(
            o.pipeline.name + (f", v = {o.pipeline.layout.chunks}" if o.pipeline.layout.chunks > 1 else ""),
            _time(o.step_seconds),
            f"{run.bubble_fraction:.2%}",
            f"{run.bubble_over_ideal:.2%}",
            f"{steady.bubble_fraction:.2%}" if steady else "",
            f"{float(max(peak.in_flight for peak in o.peaks)):g}",
            str(max(peak.weight_versions for peak in o.peaks)),
        )
    return table


def _ranks_table(outcome: Simulated) -> Table:
    facts = outcome.ranks()

    def time(seconds: float) -> str:
        return _time(seconds, outcome.simulation.makespan)

    formats: dict[str, Callable[[float], str]] = dict.fromkeys(
        ("busy_seconds", "idle_seconds", "window_idle_seconds"), time
    )
    formats |= dict.fromkeys(("activation_bytes", "weight_bytes"), format_bytes)
    table = plain_table(f"{outcome.pipeline.title}: {outcome.shape}")
    table.add_column("rank", justify="right")
    for name in facts:
        head = name.removesuffix("_seconds").removesuffix("_bytes").replace("_", "\n")
        table.add_column(head, justify="right")
    for rank, row in enumerate(zip(*facts.values(), strict=True)):
        table.add_row(str(rank), *(formats.get(name, str)(cell) for name, cell in zip(facts, row, strict=True)))
    return table


def _summary(outcome: Simulated) -> str:
    run = outcome.simulation
    lines = [
        f"step time          {_time(outcome.step_seconds)}",
        f"bubble fraction    {run.bubble_fraction:.2%}",
        f"bubble over ideal  {run.bubble_over_ideal:.2%}",
    ]
    if run.steady:
        lines[0] += f" in steady state, where {run.steady.bubble_fraction:.2%} is bubble"
        lines.insert(1, f"whole stretch      {_time(run.makespan)} for {outcome.steps} steps, with fill and drain")
    if outcome.first_layers:
        lines.append(f"chunks begin at    layers {', '.join(map(str, outcome.first_layers))} of the profile")
    return "\n".join(lines)


def _time(seconds: float, largest: float | None = None) -> str:
    """Seconds in the unit for the largest of them."""
    unit, factor = time_unit(seconds if largest is None else largest)
    return f"{round(float(seconds) * factor, 6) + 0.0:.4g} {unit}"


def _plain(number: Fraction) -> float:
    """A whole number as an int, else a float."""
    return int(number) if number.denominator == 1 else float(number)
