"""`zeroshard plan --json`: the whole answer for programs; `docs/plan.md` lists every key, and a test compares them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeroshard.cli.plan_answer import listed
from zeroshard.cli.plan_options import PlanOptions
from zeroshard.doctor.hardware import Machines
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.planner.predict.result import Found, with_short_timeline
from zeroshard.planner.search.text import changes, why_first
from zeroshard.report.plans_page import ListedPlan
from zeroshard.tensor.find.explain import ExplainedLayer

SCHEMA = 1  # of the keys; a change that breaks programs makes it 2
Layers = tuple[int, list[ExplainedLayer], list[str]]


def as_json(
    found: Found,
    task: TrainingTask,
    machines: Machines,
    options: PlanOptions,
    files: Sequence[Path],
    layers: Layers | None,
    boundaries: Sequence[str] = (),
) -> dict[str, Any]:
    """The answer as values of JSON: bytes, seconds and shares as plain numbers, None where a number is not known."""
    rehearsed = [_plan(one) for one in listed(found, task, machines, options)]
    best, fitting = len(found.best), len(found.best) + len(found.others)
    unfit = iter(rehearsed[fitting:])
    refused = [one.as_dict() | {"prediction": next(unfit) if one.prediction else None} for one in found.refused]
    device = machines.device
    return {
        "schema": SCHEMA,
        "model": task.name,
        "global_batch": task.rows,
        "sequence": task.sequence,
        "machines": str(machines),
        "devices": {
            "name": device.name,
            "kind": device.kind,
            "count": machines.count,
            "per_node": machines.per_node,
            "memory_bytes": device.memory_bytes,
            "host_memory_bytes": machines.host_memory,
        },
        "rates": device.source,
        "looked_at": found.looked_at,
        "left_out": found.left_out,
        "seconds": found.seconds,
        "earlier_search": found.kept,
        "plans": rehearsed[:best],
        "others": rehearsed[best:fitting],
        "refused": refused,
        "why_first": why_first(found.best) if found.best else None,
        "ways": list(found.ways),
        "files": [str(path) for path in files],
        "layers": None if layers is None else [row.as_dict() for row in layers[1]],
        "sequences": None if layers is None else layers[2],
        "boundaries": list(boundaries),
    }


def _plan(one: ListedPlan) -> dict[str, Any]:
    return {
        "name": one.name,
        "options": one.options or None,
        "python": one.python,
        "model_flops_share": one.flops_share,
        "hours_per_billion_tokens": one.hours,
        "changes": list(changes(one.prediction)),
        **with_short_timeline(one.prediction).whole_dict(),
    }
