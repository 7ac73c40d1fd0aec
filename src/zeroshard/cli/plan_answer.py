"""The answer of `zeroshard plan`: the first plan as options and as Python, with its speed, or the nearest ways."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zeroshard.cli.plan_options import PlanOptions
from zeroshard.doctor.hardware import Machines
from zeroshard.plan import GROUPS, Plan, option_of
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.planner.predict.result import Found, Prediction
from zeroshard.planner.search.adapted import peft_lines
from zeroshard.planner.search.text import changes, much_faster
from zeroshard.planning.adapters import Adapters
from zeroshard.report.plans_page import ListedPlan
from zeroshard.text import format_bytes
from zeroshard.train.config import TrainConfig
from zeroshard.train.named_models import has_weights
from zeroshard.train.option_values import NONE

NAMED = "|".join(kind.__name__ for kind in (Plan, *GROUPS.values()))


def answer_lines(found: Found, task: TrainingTask, machines: Machines, options: PlanOptions) -> Iterator[str]:
    """The first plan, and one that is much faster, ready to copy; the nearest ways where none fits."""
    faster = much_faster(found.best)
    for place, best in ((place, one) for place, one in enumerate(found.best) if place in (0, faster)):
        yield f"Plan {1 + place}: {', '.join(_speed(best, task, machines))}."
        if is_trained_by_name(best, task, options):
            yield f"  {option_line(best, task, options)}"
        yield from (f"  {line}" for line in python_lines(best))
    if found.ways:
        yield "The nearest ways to train every weight:" if found.best else "The nearest ways:"
        yield from (f"  {number}. {way}" for number, way in enumerate(found.ways, 1))


def is_trained_by_name(prediction: Prediction, task: TrainingTask, options: PlanOptions) -> bool:
    """Whether `zeroshard train --model` trains it: no code of the user, no other class of transformers.

    Adapters need a folder with pretrained weights.
    """
    weights = not prediction.adapters or has_weights(options.model)
    return weights and not options.own and not task.name.startswith(f"{options.model}:")


def option_line(prediction: Prediction, task: TrainingTask, options: PlanOptions) -> str:
    """The command that trains under a plan."""
    usual = TrainConfig()
    job = job_of(prediction, task, options)
    words = [f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in job.items()]
    words += [*_plan_options(differing(prediction.plan.as_dict(), usual.plan.as_dict()))]
    return " ".join(["zeroshard train", *words])


def python_lines(prediction: Prediction) -> Iterator[str]:
    """The adapters as lines of Python with peft, and the plan as an expression after `import zeroshard as zs`."""
    if prediction.adapters:
        yield from peft_lines(Adapters.parse(prediction.adapters))
    yield python_line(prediction.plan)


def python_line(plan: Plan) -> str:
    """The plan as a Python expression, after `import zeroshard as zs`."""
    return re.sub(rf"\b({NAMED})\(", r"zs.\1(", repr(plan))


def job_of(prediction: Prediction, task: TrainingTask, options: PlanOptions) -> dict[str, Any]:
    """The options of `zeroshard train` besides the plan's."""
    job: dict[str, Any] = {"model": options.model, "sequence": task.sequence, "batch_per_rank": prediction.batch}
    if prediction.adapters:
        adapters = Adapters.parse(prediction.adapters)
        job |= {"adapters": adapters.name, "adapter_rank": adapters.rank}
    return job | {"optimizer": prediction.optimizer or options.optimizer, "ranks": prediction.ranks}


def differing(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not at their defaults, as TOML values."""
    table: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            table |= {name: inner} if (inner := differing(value, defaults[name])) else {}
        elif value != defaults[name]:
            table[name] = NONE if value is None else value
    return table


def listed(found: Found, task: TrainingTask, machines: Machines, options: PlanOptions) -> list[ListedPlan]:
    """All rehearsed plans of a search with their lines to copy: those that fit in their order, then the others."""
    unfit = [(one.prediction, f"{one.why} {one.way_out}") for one in found.refused if one.prediction is not None]
    plans = [*((one, "") for one in (*found.best, *found.others)), *unfit]
    return [
        ListedPlan(
            one,
            option_line(one, task, options) if is_trained_by_name(one, task, options) else "",
            "\n".join(python_lines(one)),
            model_flops_share(one, task, machines),
            why,
        )
        for one, why in plans
    ]


def model_flops_share(prediction: Prediction, task: TrainingTask, machines: Machines) -> float | None:
    """Model FLOPs utilization (2204.02311, appendix B): 6 FLOPs per token and used parameter, 4 if that is frozen.

    None where the tokens of a row, or the parameters that a token uses, are not known.
    """
    device, used = machines.device, task.facts.used_parameters
    if used is None or task.sequence == 1:
        return None
    rate = device.matrix_flops.get(prediction.plan.precision, device.matrix_flops["fp32"]) / device.peak_share
    return (4 if prediction.adapters else 6) * used * prediction.tokens_per_second / (rate * prediction.ranks)


def _speed(best: Prediction, task: TrainingTask, machines: Machines) -> Iterator[str]:
    yield f"peak {format_bytes(best.peak_bytes)} of {format_bytes(best.capacity_bytes)}"
    below = {"host memory on each node": best.host_needed_bytes, "disk for each rank": best.disk_bytes}
    yield from (f"{format_bytes(nbytes)} of {tier}" for tier, nbytes in below.items() if nbytes > 0)
    yield f"{best.tokens_per_second:,.0f} {'rows' if task.sequence == 1 else 'tokens'}/s"
    share = model_flops_share(best, task, machines)
    if share is not None:
        yield f"{share:.0%} of the peak rate (MFU)" if share >= 0.01 else f"{share:.1%} of the peak rate (MFU)"
    if best.tokens_per_second and task.sequence > 1:
        yield f"{1e9 / best.tokens_per_second / 3600:,.1f} hours per billion tokens"
    if best.waits_for_checkpoints:
        yield "training waits for each checkpoint, as with save(wait=True)"
    yield from (f"other results by {change}" for change in changes(best))


def _plan_options(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _plan_options(value, f"{prefix}{name}.")
            continue
        option = option_of(f"{prefix}{name}").replace("_", "-")
        if isinstance(value, bool):
            yield f"--{option}" if value else f"--{'.'.join(_no(option.split('.')))}"
        else:
            values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
            yield f"--{option} {' '.join(shlex.quote(str(one)) for one in values)}"


def _no(names: Sequence[str]) -> list[str]:
    return [*names[:-1], f"no-{names[-1]}"]
