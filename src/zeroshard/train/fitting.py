"""The way out of a device budget too small for a run: the first plan that fits, by rehearsals."""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from pathlib import Path

import torch

from zeroshard.comm.mesh import Mesh
from zeroshard.engine.techniques import data_ranks_of
from zeroshard.errors import BudgetExceeded, ZeroshardError
from zeroshard.memory.ledger import MODEL_STATES
from zeroshard.offload.policy import Offload
from zeroshard.plan import Plan
from zeroshard.planner.predict.predict import predict
from zeroshard.planner.predict.result import TEMPORARIES, Prediction
from zeroshard.planner.search.this_machine import local_machines
from zeroshard.platform.accelerator import is_accelerator
from zeroshard.text import format_bytes
from zeroshard.train.config import TrainConfig
from zeroshard.train.task import language_task
from zeroshard.validation.fitting import changed, fitting_or_least, leaner, recomputing


def with_plan_that_fits(error: BudgetExceeded, config: TrainConfig, mesh: Mesh, profile: Path | None) -> BudgetExceeded:
    """The error with the options of a plan that fits, or the smallest budget that works.

    The engine itself is rehearsed under each plan, activations included. Every rank finds the same plan by itself,
    because the other ranks may have failed elsewhere.
    """
    plan, budget = config.plan, config.plan.device_budget
    on_device = any(text in error.found for text in ("device_memory is", "on the device"))
    if budget is None or plan.pipelined or not on_device:
        return error
    try:
        way_out = _way_out(config, mesh, profile, budget)
    except (ZeroshardError, RuntimeError):  # a model that cannot be rehearsed
        return error
    return BudgetExceeded(error.found, way_out)


def _way_out(config: TrainConfig, mesh: Mesh, profile: Path | None, budget: int) -> str:
    machines = local_machines(mesh.ranks, mesh.device.type, profile)
    machines = replace(machines, device=replace(machines.device, memory_bytes=machines.device.overhead_bytes + budget))
    task = language_task(config, config.batch_per_rank * data_ranks_of(config.plan, mesh.ranks))
    peaks: dict[Plan, int] = {}

    def needs() -> Iterator[tuple[Plan, int]]:
        states: dict[tuple[int, Offload], int] = {}  # bytes of model states at the peak
        for plan in _leaner(config.plan, config.batch_per_rank, mesh.ranks):
            settings = (plan.zero, plan.offloading)
            if states.get(settings, 0) > budget:
                continue  # fewer activations alone are no way out
            try:
                found = predict(task, plan, machines, config.batch_per_rank)
            except ZeroshardError:
                continue  # refused by the engine
            states[settings] = sum(found.memory.get(category, 0) for category in MODEL_STATES)
            if "host" not in found.full:  # otherwise no budget of the device helps
                peaks[plan] = _counted_bytes(found, mesh.device)
                yield plan, ceil(peaks[plan] / (1 - found.margin))

    try:
        plan, smallest = fitting_or_least(needs(), budget)
    except ValueError:
        return "No other plan was found that could fit; raise the budget, or use a smaller model."
    options = changed(config.plan, plan)
    if smallest <= budget:
        return (
            f"It fits with: {options} (a rehearsal took {format_bytes(peaks[plan])} of {format_bytes(budget)} at the "
            f"peak, activations included)."
        )
    return (
        f"No plan fits into {format_bytes(budget)}, with or without offload; the smallest budget that works is: "
        f"{f'{options} --device-memory {smallest}'.strip()}"
    )


def _counted_bytes(found: Prediction, device: torch.device) -> int:
    """Bytes of a predicted step that count against a budget: on a GPU all, on a CPU all but torch's temporaries."""
    if is_accelerator(device):
        return found.peak_bytes
    moments = [event.nbytes for event in found.events] or [dict(found.memory)]
    return max(sum(n for name, n in moment.items() if name != TEMPORARIES) for moment in moments)


def _leaner(plan: Plan, batch: int, ranks: int) -> Iterator[Plan]:
    """Plans that keep less on the device, the lightest first: stages, fewer activations, then offload, then all."""
    groups: dict[tuple[str, ...], list[Plan]] = {}  # by what is offloaded
    for other in (plan, *leaner(plan, ranks)):
        groups.setdefault(tuple(sorted(other.offloading.kinds)), []).append(other)
    first, *rest = groups.values()
    yield from first[1:]
    yield from _with_fewer_activations(first[-1], batch)
    for group in rest:
        yield from group
    for group in rest[-1:]:
        yield from _with_fewer_activations(group[-1], batch)


def _with_fewer_activations(plan: Plan, batch: int) -> Iterator[Plan]:
    """The plan with microbatches of a single row, then with blocks that are computed again too."""
    if plan.microbatches < batch:
        plan = replace(plan, microbatches=batch)
        yield plan
    if recomputing(plan, "blocks") != plan:
        yield recomputing(plan, "blocks")
