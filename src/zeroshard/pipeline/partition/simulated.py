"""The partitioner's choice under the simulator: of the splits that both published cost models find, the fastest.

Neither model covers all waits of a pipeline. The paper hides an exchange behind the computation, and counts its bytes
m/1 times over; the authors' program adds it up and counts them twice; both ignore waits for messages. Here PipeDream's
schedule (SOSP 2019, section 3.2) runs on a clock, with exchanges that begin when the backwards of a round have ended,
and 2 (m-1)/m of the weights from each of m replicas, as in the engine.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from zeroshard.errors import PlanError
from zeroshard.pipeline.partition.cluster import Cluster
from zeroshard.pipeline.partition.graph import LayerGraph
from zeroshard.pipeline.partition.pipedream import (
    OBJECTIVES,
    SHAPES,
    Partition,
    PartitionStage,
    Shape,
    least_memory,
    partition,
)
from zeroshard.pipeline.partition.profile import LayerCost
from zeroshard.schedule import Layout, PipelineSchedule
from zeroshard.schedule.simulate import Costs, simulate

SIMULATED, MEMORY = "simulated", "memory"
STEPS = 8  # of which the second half shows the rhythm
MOST_COMPUTES = 40_000  # forwards on all ranks; beyond, the slowest stage or message stands for the simulation
TICKS = 1e9  # of a second: messages are given to the simulator by their time, as links differ


def fastest(
    layers: Sequence[LayerCost] | LayerGraph,
    cluster: Cluster,
    memory: int | None = None,
    state_copies: float = 0,
    shape: Shape = "any",
) -> Partition:
    """The split with the shortest simulated time per microbatch, of those that `partition` finds.

    Args:
        memory: see `partition`; so are the others.

    Raises:
        PlanError: as `partition` does.
    """
    refused: PlanError | None = None
    found: dict[tuple[object, ...], Partition] = {}
    for kind in SHAPES if shape == "any" else (shape,):
        for objective in OBJECTIVES:
            try:
                split = partition(layers, cluster, objective, memory, state_copies, kind)  # type: ignore[arg-type]
            except PlanError as error:
                refused = refused or error
                continue
            stages = tuple((s.first, s.last, s.replicas) for s in split.stages)
            found.setdefault((stages, split.layers), split)
    if not found:
        assert refused is not None
        raise refused
    return min((timed(split.layers, split, cluster) for split in found.values()), key=lambda split: split.seconds)


def leanest(
    layers: Sequence[LayerCost] | LayerGraph,
    cluster: Cluster,
    memory: int | None = None,
    state_copies: float = 0,
    shape: Shape = "any",
) -> Partition:
    """Of the splits whose device with the largest need has the least of all, the fastest as `fastest` finds it.

    Args:
        memory: see `partition`; so are the others.

    Raises:
        PlanError: as `partition` does.
    """
    limit = cluster.memory_bytes if memory is None else memory
    least = least_memory(layers, cluster, state_copies, shape)
    return replace(
        fastest(layers, cluster, least if limit is None else min(least, limit), state_copies, shape), objective=MEMORY
    )


def timed(layers: Sequence[LayerCost], split: Partition, cluster: Cluster) -> Partition:
    """The split with its simulated time per microbatch, and the times of its stages and messages."""
    stages = list(_stages(layers, split, cluster))
    bound = max(max(stage.seconds, stage.send_seconds / 2) for stage in stages)
    seconds = bound if len(stages) == 1 else _simulated(layers, stages, bound)
    return Partition(tuple(stages), seconds, SIMULATED, split.layers, split.merged)


def _stages(layers: Sequence[LayerCost], split: Partition, cluster: Cluster) -> Iterator[PartitionStage]:
    """Its stages on devices one after another, as the engine numbers its ranks."""
    first = 0
    for number, stage in enumerate(split.stages):
        m, last = stage.replicas, first + stage.replicas - 1
        part = layers[stage.first : stage.last + 1]
        compute = sum(y.forward_seconds + y.backward_seconds for y in part) / m
        sync = 2 * (m - 1) / m * sum(y.parameter_bytes for y in part) / _bandwidth(cluster, first, last) / m
        send = 0.0
        if number + 1 < len(split.stages):
            after = split.stages[number + 1].replicas
            message = part[-1].activation_bytes / _bandwidth(cluster, first, last + after)
            send = 2 * message / min(m, after)
        yield replace(stage, compute_seconds=compute, sync_seconds=sync, seconds=compute + sync, send_seconds=send)
        first += m


def _bandwidth(cluster: Cluster, first: int, last: int) -> float:
    """Of the slowest link between two of these devices."""
    crossed, size = math.inf, 1
    for level in cluster.levels:
        if first // size != last // size:
            crossed = min(crossed, level.bandwidth)
        size *= level.count
    return crossed


def _simulated(layers: Sequence[LayerCost], stages: Sequence[PartitionStage], bound: float) -> float:
    """Seconds per microbatch in the rhythm of a long stretch."""
    layout = Layout(tuple(stage.replicas for stage in stages))
    forward = [sum(y.forward_seconds for y in layers[s.first : s.last + 1]) for s in stages]
    ways = [min(a.replicas, b.replicas) for a, b in pairwise(stages)]
    costs = Costs(
        forward=tuple(forward),
        backward=tuple(s.compute_seconds * s.replicas - f for s, f in zip(stages, forward, strict=True)),
        reduce=tuple(s.sync_seconds * s.replicas for s in stages),
        boundary_bytes=(*(round(TICKS * s.send_seconds / 2 * n) for s, n in zip(stages, ways, strict=False)), 0),
        bytes_per_second=TICKS,
    )
    around = math.lcm(*layout.replicas) if layout.uneven else 1
    microbatches = around * -(-2 * max(len(stages), layout.ranks // layout.replicas[0]) // around)
    if STEPS * microbatches * len(stages) > MOST_COMPUTES:
        return bound
    steady = simulate(PipelineSchedule("pipedream", layout, microbatches).stretch(STEPS), layout, costs).steady
    if steady is None:
        return bound
    return steady.microbatch_seconds / (1 if layout.uneven else layout.replicas[0])
