"""The nearest ways to train every weight where no plan fits that does, each with its needs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from zeroshard.doctor.hardware import Machines
from zeroshard.plan import Plan
from zeroshard.planner.choices import choices_of
from zeroshard.planner.predict.predict import predict
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.planner.predict.result import MARGIN, Prediction, Refusal
from zeroshard.planner.predict.states import Sizes, least_bytes, states_of
from zeroshard.planner.search.text import short
from zeroshard.text import format_bytes

TIMES = tuple(2**n for n in range(1, 13))  # times as many devices
STREAMED = {"zero": 3, "offload": "optimizer,parameters", "activations.recompute": "blocks", "offload.speculate": False}


def nearest_ways(
    task: TrainingTask,
    base: Plan,
    machines: Machines,
    sizes: Sizes,
    seen: Sequence[Prediction],
    refused: Sequence[Refusal] = (),
) -> Iterator[str]:
    """Sentences: more host memory, and more devices, as far as each would do; or more rows, where no plan has enough.

    Args:
        seen: all rehearsed plans.
        refused: those that are refused; no way is near where the engine refuses the task.
    """
    if not seen and task.rows % machines.count:
        more = -(-task.rows // machines.count) * machines.count
        yield f"{more} rows of one step (--global-batch {more}), or another multiple of {machines.count}."
        return
    if refused and not seen and not any(one.way_out for one in refused):
        return
    beside = min((_beside_states(one) for one in seen), default=0)
    room = int(machines.device.capacity_bytes * (1 - MARGIN)) - beside
    yield from _with_host_memory(task, base, machines, sizes)
    yield from _on_further_devices(base, machines, sizes, room)


def _beside_states(one: Prediction) -> int:
    """Activations, buffers and temporaries of a rehearsed plan."""
    return sum(nbytes for name, nbytes in one.memory.items() if name in ("activations", "buffers", "temporaries"))


def _with_host_memory(task: TrainingTask, base: Plan, machines: Machines, sizes: Sizes) -> Iterator[str]:
    """The least host memory with which a plan fits that changes no result and uses no disk."""
    rows, left = divmod(task.rows, machines.count)
    if machines.host_memory is None or left:
        return
    ample, plan = replace(machines, host_memory=None), base.with_settings(STREAMED)
    if least_bytes(sizes, plan, machines.count) > machines.device.capacity_bytes:
        return
    one = predict(task, plan, ample, rows)
    if one.fits:
        held = format_bytes(one.host_needed_bytes)
        yield f"{held} of host memory on each node: {short(plan, machines.count)}."


def _on_further_devices(base: Plan, machines: Machines, sizes: Sizes, room: int) -> Iterator[str]:
    """The fewest devices that hold the states under stage 3, with and without offload to the same host memory."""
    per_node = machines.per_node
    for settings in ({"zero": 3}, {"zero": 3, "offload": "optimizer"}):
        for count in (machines.count * times for times in TIMES):
            plan, more = base.with_settings(settings), replace(machines, count=count)
            states = states_of(sizes, plan, count)
            kept = min(per_node, count) * sum(each.least_host_bytes(states, count) for each in choices_of(plan))
            if least_bytes(sizes, plan, count) <= room and more.node_holds(kept):
                need = f", {format_bytes(kept)} of host memory on each node" if kept else ""
                yield f"{more}{need}: {short(plan, count)}, by states alone."
                break
