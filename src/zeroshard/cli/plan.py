"""`zeroshard plan`: which plans fit, how long a step takes under each, and why others do not fit."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console

from zeroshard.cli.plan_answer import answer_lines, differing, is_trained_by_name, job_of, listed
from zeroshard.cli.plan_json import Layers, as_json
from zeroshard.cli.plan_options import ROWS, SEQUENCE, PlanOptions, precision_for
from zeroshard.doctor.hardware import Machines
from zeroshard.errors import ConfigError
from zeroshard.plan import Plan
from zeroshard.planner.predict.cuts import boundaries_of
from zeroshard.planner.predict.predict import predict, way_of
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.planner.predict.result import Found, Prediction
from zeroshard.planner.predict.shallow import quiet
from zeroshard.planner.predict.torch_internals import fakes
from zeroshard.planner.search.adapted import trained_as, with_adapters
from zeroshard.planner.search.auto import failures_of
from zeroshard.planner.search.kept import search_once
from zeroshard.planner.search.text import describe, left_out, looked_at, named, why_first
from zeroshard.planning.adapters import Adapters
from zeroshard.report.plain_table import plain_table
from zeroshard.report.plan_page import write_plan
from zeroshard.report.plan_text import (
    causes_table,
    layers_table,
    memory_picture,
    modes_lines,
    plans_table,
    refusals_table,
    sizes_lines,
    sizes_table,
    timeline_picture,
    wire_table,
)
from zeroshard.report.plans_page import write_plans
from zeroshard.tensor.find.explain import ExplainedLayer, explain, explain_sequences
from zeroshard.tensor.find.layers import find
from zeroshard.text import format_bytes
from zeroshard.train.config import TrainConfig
from zeroshard.train.family import SOURCE, default_plans, largest_table
from zeroshard.train.model_shape import row_length
from zeroshard.train.option_values import NONE
from zeroshard.train.planning import beside_spinner
from zeroshard.train.task import language_task, other_task, own_task, with_cheaper
from zeroshard.zero.byte_formulas import state_bytes

FILE_COLUMNS = 120
WIDEST = 120  # of a picture
CURVES = 128  # blocks times microbatches of all plans of the page whose blocks are all rehearsed
BETWEEN_LINES = 10.0  # seconds, without a terminal


def run_plan(options: PlanOptions, machines: Machines | None) -> None:
    """Print the plans that the options ask for; exits with 1 when none fits.

    Args:
        machines: None for the formulas alone, which `params` asks for.

    Raises:
        ZeroshardError: a model or machines that cannot be planned for.
    """
    if machines is None:
        _print_formulas(int(options.params or 0), options.ranks or options.gpus or 1, options.json)
        return
    if options.largest:
        _print_largest(options, machines)
        return
    options = replace(options, precision=precision_for(options, machines))
    task, base = described_task(options, machines.count)
    rows = "per step, each counted as a token" if task.sequence == 1 else f"of {task.sequence} tokens per step"
    title = f"{task.name}, {task.rows} rows {rows}, on {machines}"
    with _status() as say, failures_of(task.name):
        found = search_once(
            task,
            machines,
            base,
            options.top,
            say,
            options.offload,
            first=partial(_print_estimates, title),
            fresh=options.fresh,
        )
        if options.explain is not None:
            found = _with_events(found, options.explain, task, machines)
    files = _write_plans(options, found, task)
    if options.html is not None:
        with _status() as say:
            found = _with_curves(found, task, machines, say)
        rates = f"Rates: {machines.device.source}"
        write_plans(options.html, listed(found, task, machines, options), found, title, (rates,))
        files.append(options.html)
    layers, boundaries = None, list[str]()
    if options.explain is not None:
        boundaries = boundaries_of(task, found.best[options.explain - 1].plan)
        layers = _explained_layers(found.best[options.explain - 1].plan, task)
        stem = options.pictures / f"{Path(task.name.replace(':', '.')).stem}-{options.explain}"
        explained = found.best[options.explain - 1]
        files += write_plan(explained, stem, title, (f"Rates: {machines.device.source}",))
    if options.json:
        content = as_json(found, task, machines, options, files, layers, boundaries)
        print(json.dumps(content, indent=1, allow_nan=False))
    else:
        _print(found, machines, title, options.explain, [*answer_lines(found, task, machines, options)], files)
        if layers is not None:
            _print_layers(*layers)
        for line in boundaries:
            _console().print(line, markup=False, highlight=False)
    if not found.best:
        sys.exit(1)


def described_task(options: PlanOptions, devices: int) -> tuple[TrainingTask, Plan]:
    """The training task, and the settings that all plans have in common.

    Raises:
        ModelError: no such model, or one that cannot be built.
    """
    sequence = row_length(options.model, options.sequence, SEQUENCE)
    config = TrainConfig(model=options.model, tokenizer="bytes", sequence=sequence, optimizer=options.optimizer)
    rows = options.global_batch or ROWS * devices
    if options.own:
        task, plan = own_task(config, rows, options.batch_of, options.sequence), Plan(**options.fields)
    elif (other := other_task(config, rows)) is not None:
        task, plan = other, Plan(**options.fields)
    else:
        task, plan = language_task(config, rows), replace(config.plan, **options.fields)
    if options.adapters is not None:
        return with_adapters(task, Adapters(options.adapters, options.adapter_rank)), plan
    return with_cheaper(task, config), plan


def _with_events(found: Found, number: int, task: TrainingTask, machines: Machines) -> Found:
    """Add memory over the step to one plan, by rehearsing all its blocks where only some were rehearsed."""
    chosen = _numbered(number, found, "explain")
    if not chosen.events:
        chosen = _whole(chosen, task, machines)
    return replace(found, best=(*found.best[: number - 1], chosen, *found.best[number:]))


def _with_curves(found: Found, task: TrainingTask, machines: Machines, say: Callable[[str], None]) -> Found:
    """Add memory over the step to plans that fit, the first ones first, as far as `CURVES` goes."""
    fitting, left = [], CURVES
    for chosen in (*found.best, *found.others):
        depth = sum(stack.depth for stack in task.facts.stacks)
        size = 0 if chosen.events else way_of(chosen.plan).whole(chosen.plan, depth)
        if 0 < size <= left:
            left -= size
            say(f"{named(chosen)}, whole, for its memory over the step")
            chosen = _whole(chosen, task, machines)
        fitting.append(chosen)
    shown = len(found.best)
    return replace(found, best=tuple(fitting[:shown]), others=tuple(fitting[shown:]))


def _whole(chosen: Prediction, task: TrainingTask, machines: Machines) -> Prediction:
    """A prediction with memory over the step, from all blocks, and with the time of before if that was measured."""
    whole = predict(trained_as(task, chosen), chosen.plan, machines, chosen.batch, deep=True)
    return replace(whole, causes=chosen.causes, time_mode=chosen.time_mode)


def _explained_layers(plan: Plan, task: TrainingTask) -> Layers | None:
    """How tensor parallelism splits the layers of the model, and where sequences are whole; None without it."""
    ranks = plan.tensor.ranks
    if ranks == 1:
        return None
    with fakes(), quiet():
        model = task.build()
        found = find(model, ranks, plan.tensor)
    return ranks, explain(model, found, ranks), explain_sequences(found, plan.tensor.sequence)


def _print_layers(ranks: int, rows: Sequence[ExplainedLayer], sequences: Sequence[str]) -> None:
    console = _console()
    console.print(layers_table(rows, ranks))
    console.print()
    for line in sequences:
        console.print(line)


def _numbered(number: int, found: Found, option: str) -> Prediction:
    if number > len(found.best):
        have = f"{len(found.best)} plans fit" if found.best else "no plan fits"
        raise ConfigError(f"{option} names plan {number} and {have}; name one of those, or change the job.")
    return found.best[number - 1]


def _write_plans(options: PlanOptions, found: Found, task: TrainingTask) -> list[Path]:
    """Write the plans that --out and --write name."""
    wanted = [(1, options.out)] if options.out else []
    wanted += [options.write] if options.write else []
    for number, path in wanted:
        text = plan_toml(_numbered(number, found, "write"), task, options)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written ({error.strerror}); name a file that can be written."
            ) from error
    return [path for _, path in wanted]


def plan_toml(prediction: Prediction, task: TrainingTask, options: PlanOptions) -> str:
    """The plan as `zeroshard train --config` takes it; as `zs.Plan` does, for models that it lacks."""
    about = f"# {named(prediction)}; {prediction.batch} rows of one step per rank or replica\n"
    whole = prediction.plan.as_dict()
    if not is_trained_by_name(prediction, task, options):
        return about + tomli_w.dumps(differing(whole, Plan().as_dict()))
    return about + tomli_w.dumps({**job_of(prediction, task, options), "plan": _spelled_out(whole)})


def _spelled_out(values: Mapping[str, Any]) -> dict[str, Any]:
    """All settings as TOML values."""
    return {
        name: _spelled_out(value) if isinstance(value, Mapping) else NONE if value is None else value
        for name, value in values.items()
    }


def _print(
    found: Found, machines: Machines, title: str, explain: int | None, answer: Sequence[str], files: Sequence[Path]
) -> None:
    console = _console()
    console.print(title)
    if found.best:
        for owners in dict.fromkeys(filter(None, (prediction.owners for prediction in found.best))):
            console.print(owners)
        console.print(plans_table(found.best, console.width))
        console.print(why_first(found.best))
    else:
        console.print("\nNo plan fits.")
    if found.refused:
        console.print(refusals_table(found.refused, machines.count, found.looked_at))
    console.print()
    for line in modes_lines(found.best, machines.device.source):
        console.print(line, style="dim")
    earlier = ", in an earlier search; --fresh searches again" if found.kept else ""
    console.print(f"{looked_at(found)}{earlier}.", style="dim")
    console.print()
    for line in answer:
        console.print(line, soft_wrap=line.startswith("  "))
    if explain is not None:
        _print_explained(console, found.best[explain - 1], explain)
    for path in files:
        console.print(f"Wrote {path}", soft_wrap=True)


def _print_explained(console: Console, chosen: Prediction, number: int) -> None:
    width, colour = min(console.width, WIDEST), console.color_system is not None
    console.print(f"\nPlan {number}", style="bold")
    for line in describe(chosen):
        console.print(line)
    if chosen.events:
        waiting = "".join(f", without {left.label}" for left in left_out(chosen))
        console.print(f"\nMemory over one step of rank {chosen.rank}{waiting}", style="italic")
        console.print(memory_picture(chosen, width, colour))
    if chosen.spans:
        console.print("Timeline of one step, by rank", style="italic")
        console.print(timeline_picture(chosen.spans, width))
    console.print(causes_table(chosen))
    if any(chosen.wire_bytes.values()):
        console.print(wire_table(chosen))
    console.print()


def _print_largest(options: PlanOptions, machines: Machines) -> None:
    """The largest GPT under each stage of ZeRO."""
    rows, sequence = max(1, (options.global_batch or 0) // machines.count), options.sequence or SEQUENCE
    plans = [replace(plan, **options.fields) for plan in default_plans(machines, rows)]
    with _status() as say:
        found = largest_table(machines, rows, sequence, plans, say=say)
    if options.json:
        print(json.dumps([largest.as_dict() for largest in found], indent=1, allow_nan=False))
        return
    console = _console()
    console.print(f"The largest GPT on {machines}, {rows} row{'s' * (rows > 1)} of {sequence} tokens per device")
    console.print(sizes_table(found, console.width))
    console.print()
    for line in (*sizes_lines(found), f"Sizes: {SOURCE}."):
        console.print(line, style="dim")


def _print_estimates(title: str, found: Found) -> None:
    """Print the first estimates at once, then the first plan that fits, on stderr, apart from the result."""
    console, best = _console(stderr=True), found.best[0]
    if best.mode != "estimate":
        peak = f"{format_bytes(best.peak_bytes)} of {format_bytes(best.capacity_bytes)}"
        console.print(f"Fits: {named(best)}; peak {peak}, {best.tokens_per_second:,.0f} tokens/s. The search goes on.")
        return
    console.print(title)
    console.print(plans_table(found.best, console.width, "First estimates, best first; every plan is rehearsed now"))
    console.print()


@contextmanager
def _status(now: Callable[[], float] = time.monotonic) -> Iterator[Callable[[str], None]]:
    """Show the current rehearsal: on a terminal always, else in a line now and then."""
    console = Console(stderr=True, highlight=False, markup=False)
    if console.is_terminal:
        with console.status("Rehearsing") as status:
            yield lambda text: status.update(beside_spinner(f"Rehearsing {text}", console.width))
        return
    last = now()

    def say(text: str) -> None:
        nonlocal last
        if now() - last >= BETWEEN_LINES:
            last = now()
            console.print(f"Rehearsing {text}", soft_wrap=True)

    yield say


def _console(stderr: bool = False) -> Console:
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(width=None if terminal else FILE_COLUMNS, highlight=False, markup=False, stderr=stderr)


def _print_formulas(parameters: int, ranks: int, as_json: bool) -> None:
    """Bytes of model states per rank for every ZeRO stage, mixed-precision Adam (ZeRO paper, table 1)."""
    states = [state_bytes(parameters, ranks, zero) for zero in range(4)]
    if as_json:
        print(json.dumps([{"zero": zero, "model_state_bytes": round(s.total)} for zero, s in enumerate(states)]))
        return
    title = f"GB of model states per rank: {parameters:.4g} parameters, {ranks} ranks, 16-bit Adam"
    heads = ("zero", "parameters", "gradients", "master\nweights", "optimizer\nstates", "total")
    table = plain_table(title, right=heads)
    for zero, s in enumerate(states):
        parts = (s.parameters, s.gradients, s.master_weights, s.optimizer_states, s.total)
        table.add_row(str(zero), *(f"{float(part) / 1e9:,.2f}" for part in parts))
    Console().print(table)
