"""The partitioner: which layers make a stage, and on how many devices (PipeDream, SOSP 2019, section 3.1).

A dynamic program over layers i to j (both included) and m of the components of level k of the cluster:

    A^0(i, j)    = time of layers i to j
    T^k(i, j, m) = 1/m · max{ A^(k-1)(i, j, m_(k-1)), 2 (m-1) · parameter bytes of i to j / B_k }
    A^k(i, j, m) = min{ T^k(i, j, m), min over s and n of max{ A^k(i, s, m-n), 2 a_s / B_k, T^k(s+1, j, n) } }

All components are used. A memory limit is exact: the versions of the weights that a stage keeps depend on the devices
after it, and those are known. As all m_k parts of a component are used, a stage that ends the best of m parts has the
other m_k - m after it; and a table of A^(k-1) is made for each number of devices that can come after a copy of the
component that it is for. A layer range that does not fit a device with that many after it takes infinitely long.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Literal

from zeroshard.errors import PlanError
from zeroshard.pipeline.partition.cluster import Cluster
from zeroshard.pipeline.partition.graph import LayerGraph
from zeroshard.pipeline.partition.profile import LayerCost
from zeroshard.pipeline.partition.states import CutStates, states_of
from zeroshard.text import format_bytes

Shape = Literal["any", "straight", "data parallel"]
SHAPES = ("any", "straight", "data parallel")
TIE = 1 - 1e-12  # a cut must be better than no cut by more than rounding


@dataclass(frozen=True, slots=True)
class PartitionStage:
    """Layers `first` to `last` (both included) on `replicas` devices; times are seconds per microbatch of the pipeline,
    as the objective counts them.

    Attributes:
        compute_seconds: forward and backward, divided by the replicas.
        sync_seconds: its share of the exchange of gradients between replicas.
        seconds: of both, as the objective joins them.
        send_seconds: of the message to the next stage and its answer, 0 after the last.
        versions: of its weights, and microbatches in flight, that each device keeps: ⌈N / replicas⌉, with N the
            replicas of this and all later stages (section 3.2).
        memory_bytes: of one device.
    """

    first: int
    last: int
    replicas: int
    compute_seconds: float
    sync_seconds: float
    send_seconds: float
    seconds: float = 0.0
    versions: int = 1
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Partition:
    """A split of layers into stages.

    Attributes:
        seconds: predicted time per microbatch, that of the slowest stage or message.
        layers: in the order of the stages; those of a graph have as `activation_bytes` what crosses a cut behind them.
        merged: whether each branch of a graph was taken as one layer, because there were too many places for a cut.
    """

    stages: tuple[PartitionStage, ...]
    seconds: float
    objective: str
    layers: tuple[LayerCost, ...] = field(default=(), repr=False)
    merged: bool = False

    @property
    def replicas(self) -> tuple[int, ...]:
        """Devices of each stage."""
        return tuple(stage.replicas for stage in self.stages)

    @property
    def throughput(self) -> float:
        """Predicted microbatches per second."""
        return 1 / self.seconds if self.seconds else math.inf

    @property
    def memory_bytes(self) -> int:
        """Bytes of the device with the largest need."""
        return max(stage.memory_bytes for stage in self.stages)


def partition(
    layers: Sequence[LayerCost] | LayerGraph,
    cluster: Cluster,
    objective: str = "paper",
    memory: int | None = None,
    state_copies: float = 0,
    shape: Shape = "any",
) -> Partition:
    """The split with the shortest predicted time per microbatch, on all devices.

    The objective "paper" is that of the module's docstring. "released" is what the authors' program computes:

    - a stage takes compute plus exchange, (A^(k-1) + 4 (m-1) · parameter bytes / (B_k · m)) / m: a sum instead of the
      longer of the two, and per replica twice the bytes, divided by m;
    - for the first stage of each component, the one without a cut before it, the exchange is divided by m_(k-1) too;
    - a message takes 2 a_s / (B_k · n), with n the replicas of the stage that receives it, and 2 a_j / (B_k · n) also
      counts for what that stage sends on, unless j is the last layer of all.

    The limit on memory is the same for both (the authors' program leaves out the microbatch that is being computed).

    Args:
        layers: a chain of them, or a graph.
        memory: limit on the bytes of one device, instead of the cluster's.
        state_copies: copies of its parameters that a device keeps besides the versions of the weights: gradients and
            optimizer states (3 for AdamW).
        shape: choose among all splits, those without replicas, or the one without cuts.

    Raises:
        PlanError: nothing to split, an unknown name, too few layers for the shape, a graph with too many branches side
            by side, or no split fits the memory, and by how much.
    """
    states = _checked(layers, objective, shape, cluster)
    limit = cluster.memory_bytes if memory is None else memory
    task = _Task(states, cluster, OBJECTIVES[objective], shape, state_copies, limit, limit is not None)
    whole = task.table(len(cluster.levels), Fraction(0))
    seconds = whole.best(0, len(states) - 1)
    if math.isinf(seconds):
        raise _does_not_fit(task)
    return _split(task, seconds, whole.stages(0, len(states) - 1), objective)


def least_memory(
    layers: Sequence[LayerCost] | LayerGraph, cluster: Cluster, state_copies: float = 0, shape: Shape = "any"
) -> int:
    """Bytes of the device that needs most, of the split of all devices in which they are fewest.

    Raises:
        PlanError: as `partition` does, without a limit.
    """
    states = _checked(layers, "paper", shape, cluster)
    return _least_memory(_Task(states, cluster, _Memory(), shape, state_copies, None, True))


def _least_memory(task: "_Task") -> int:
    whole = replace(task, objective=_Memory(), limit=None).table(len(task.cluster.levels), Fraction(0))
    return math.ceil(whole.best(0, len(task.states) - 1))


def _split(task: "_Task", seconds: float, stages: Sequence[PartitionStage], objective: str) -> Partition:
    """The stages as ranges of layers, with their versions and memory."""
    layers, counts = task.states.chain([stage.last for stage in stages])
    kept = [
        replace(stage, first=first, last=last - 1)
        for stage, first, last in zip(_kept(task, stages), (0, *counts), counts, strict=False)
    ]
    return Partition(tuple(kept), seconds, objective, layers, task.states.merged)


def _checked(layers: Sequence[LayerCost] | LayerGraph, objective: str, shape: str, cluster: Cluster) -> CutStates:
    costs = layers.layers if isinstance(layers, LayerGraph) else layers
    if not costs:
        raise PlanError("There are no layers to split; profile a model that has some.")
    for layer in costs:
        for name in ("forward_seconds", "backward_seconds", "activation_bytes", "saved_bytes", "parameter_bytes"):
            if not 0 <= getattr(layer, name) < math.inf:
                raise PlanError(
                    f"The layer {layer.name} has {name} = {getattr(layer, name)}; it must be 0 or more and finite. "
                    f"Profile the model again."
                )
    for what, name, names in (("objective", objective, OBJECTIVES), ("shape", shape, SHAPES)):
        if name not in names:
            raise PlanError(f"There is no {what} {name!r}; choose one of {', '.join(names)}.")
    states = states_of(layers)
    if shape == "straight" and states.places < cluster.devices:
        raise PlanError(
            f"{states.places} layers cannot make {cluster.devices} stages without replicas; use {states.places} "
            f"devices or fewer, or replicas."
        )
    return states


def _does_not_fit(task: "_Task") -> PlanError:
    """The error with the need of the split that needs least memory."""
    least, limit = _least_memory(task), task.limit or 0
    return PlanError(
        f"No split of the {len(task.states.layers)} layers over {task.cluster.devices} devices fits into "
        f"{format_bytes(limit)} per device: the leanest needs {format_bytes(least)}, {format_bytes(least - limit)} "
        f"more. Use devices with more memory, more devices, or a profile with fewer rows per microbatch."
    )


def _kept(task: "_Task", stages: Sequence[PartitionStage]) -> Iterator[PartitionStage]:
    """The stages with their total time, versions and memory."""
    for number, stage in enumerate(stages):
        versions = -(-sum(other.replicas for other in stages[number:]) // stage.replicas)
        kept = math.ceil(task.memory(stage.first, stage.last, versions))
        seconds = task.objective.join(stage.compute_seconds, stage.sync_seconds)
        yield replace(stage, seconds=seconds, versions=versions, memory_bytes=kept)


class _Objective:
    """The quantity that the dynamic program minimises: here the paper's seconds per microbatch."""

    adds = False  # the exchange to all that goes on inside, and what a stage sends on to what it receives

    def leaf(self, task: "_Task", i: int, j: int, versions: int) -> float:
        return task.seconds(i, j)

    def sync(self, weights: int, m: int, bandwidth: float, lower_ranks: int) -> float:
        return 2 * (m - 1) * weights / bandwidth

    def join(self, inner: float, sync: float) -> float:
        return max(inner, sync)

    def share(self, value: float, m: int) -> float:
        return value / m

    def send(self, activation: int, n: int, bandwidth: float) -> float:
        return 2 * activation / bandwidth


class _Released(_Objective):
    adds = True

    def sync(self, weights: int, m: int, bandwidth: float, lower_ranks: int) -> float:
        return 4 * (m - 1) * weights / (bandwidth * m * lower_ranks)

    def join(self, inner: float, sync: float) -> float:
        return inner + sync

    def send(self, activation: int, n: int, bandwidth: float) -> float:
        return 2 * activation / (bandwidth * n)


class _Memory(_Objective):
    """The bytes of the device that needs most, for the error when nothing fits."""

    def leaf(self, task: "_Task", i: int, j: int, versions: int) -> float:
        return task.memory(i, j, versions)

    def sync(self, weights: int, m: int, bandwidth: float, lower_ranks: int) -> float:
        return 0

    def share(self, value: float, m: int) -> float:
        return value

    def send(self, activation: int, n: int, bandwidth: float) -> float:
        return 0


OBJECTIVES = {"paper": _Objective(), "released": _Released()}


@dataclass(frozen=True)
class _Task:
    """One problem, with a table for each level and number of devices after."""

    states: CutStates
    cluster: Cluster
    objective: _Objective
    shape: str
    state_copies: float
    limit: int | None
    counts_versions: bool

    @cached_property
    def tables(self) -> "dict[tuple[int, Fraction], _Table | _Device]":
        """Those made so far."""
        return {}

    def seconds(self, i: int, j: int) -> float:
        return self.states.seconds[j + 1] - self.states.seconds[i]

    def weights(self, i: int, j: int) -> int:
        return self.states.parameters[j + 1] - self.states.parameters[i]

    def memory(self, i: int, j: int, versions: int) -> float:
        weights, saved = self.weights(i, j), self.states.saved[j + 1] - self.states.saved[i]
        return versions * (weights + saved) + self.state_copies * weights

    def table(self, k: int, after: Fraction) -> "_Table | _Device":
        """A^k where `after` devices come after each copy of a component of level k."""
        if (k, after) not in self.tables:
            self.tables[k, after] = _Table(self, k, after) if k else _Device(self, after)
        return self.tables[k, after]


class _Device:
    """A^0: a component of level 0 is one device."""

    def __init__(self, task: _Task, after: Fraction) -> None:
        self.task = task
        self.versions = math.ceil(1 + after)

    def best(self, i: int, j: int) -> float:
        """Of layers i to j; infinite where they do not fit."""
        task = self.task
        if task.limit is not None and task.memory(i, j, self.versions) > task.limit:
            return math.inf
        return task.objective.leaf(task, i, j, self.versions)

    def stages(self, i: int, j: int) -> list[PartitionStage]:
        """The one stage."""
        return [PartitionStage(i, j, 1, self.task.seconds(i, j), 0.0, 0.0)]


class _Table:
    """A^k(i, j, m) for one component of level k >= 1: the best of layers i to j on m of its parts, and the last cut."""

    def __init__(self, task: _Task, k: int, after: Fraction) -> None:
        self.task, self.k, self.after = task, k, after
        level = task.cluster.levels[k - 1]
        self.count, self.bandwidth = level.count, level.bandwidth
        self.lower_ranks = task.cluster.levels[k - 2].count if k > 1 else 1
        self.values: dict[int, list[list[float]]] = {}  # by i, then m and j
        self.cuts: dict[int, list[list[tuple[int, int] | None]]] = {}  # (s, n): the last stage is s + 1 to j on n parts
        self.inners: dict[tuple[int, int], _Table | _Device] = {}
        self.lasts: dict[tuple[int, int], list[list[float]]] = {}
        self.sends = [[self._send(j, n) for j in range(len(task.states))] for n in range(1, self.count + 1)]

    def best(self, i: int, j: int) -> float:
        """Of layers i to j on the whole component; infinite where nothing fits."""
        if i not in self.values:
            self._fill(i)
        return self.values[i][self.count][j]

    def stages(self, i: int, j: int) -> list[PartitionStage]:
        """The stages of `best(i, j)`, with the times of one copy of this component."""
        found: list[PartitionStage] = []
        for first, last, n, rest, cut in self._chain(i, j):
            sync = self._sync(first, last, n, cut)
            parts = [self._copied(stage, n, sync) for stage in self._inner(n, rest).stages(first, last)]
            if cut:
                found[-1] = _sending(found[-1], self.sends[n - 1][first - 1])
                parts[-1] = _sending(parts[-1], self._sends_on(last, n))
            found += parts
        return found

    def _fill(self, i: int) -> None:
        """The rows of A^k for all j and m."""
        states, counts, shape = self.task.states, range(self.count + 1), self.task.shape
        self.values[i] = [[math.inf] * len(states) for _ in counts]
        self.cuts[i] = [[None] * len(states) for _ in counts]
        for j in states.ends(i):
            for m in counts[1:]:
                if shape != "straight" or m == 1:
                    self.values[i][m][j] = self._stage(i, j, m, self.count - m, cut=False)
                if shape != "data parallel":
                    for n in range(1, min(m, 2) if shape == "straight" else m):
                        self._try_cuts(i, j, m, n)

    def _try_cuts(self, i: int, j: int, m: int, n: int) -> None:
        """Whether a cut, with n of the m parts behind it, betters A^k(i, j, m)."""
        before, last, sends = self.values[i][m - n], self._last(n, self.count - m)[j], self.sends[n - 1]
        best, floor = self.values[i][m][j], self._sends_on(j, n)
        for s in self.task.states.within(i, j):
            if last[s + 1] < best and before[s] < best:
                value = max(before[s], sends[s], last[s + 1], floor)
                if value < best * TIE:
                    best, self.cuts[i][m][j] = value, (s, n)
        self.values[i][m][j] = best

    def _last(self, n: int, rest: int) -> list[list[float]]:
        """T^k(i, j, n) of stages behind a cut, by j and i, with `rest` parts of this component after them."""
        key = n, rest if self.task.counts_versions else 0  # else they do not depend on what comes after
        if key not in self.lasts:
            self.lasts[key] = [self._ends(j, n, rest) for j in range(len(self.task.states))]
        return self.lasts[key]

    def _ends(self, j: int, n: int, rest: int) -> list[float]:
        """T^k(i, j, n) by i; infinite where no range is from i to j."""
        found = [math.inf] * (j + 1)
        for i in self.task.states.starts(j):
            found[i] = self._stage(i, j, n, rest, cut=True)
        return found

    def _stage(self, i: int, j: int, n: int, rest: int, cut: bool) -> float:
        objective = self.task.objective
        inner = self._inner(n, rest).best(i, j)
        return objective.share(objective.join(inner, self._sync(i, j, n, cut)), n)

    def _inner(self, n: int, rest: int) -> "_Table | _Device":
        """One of n copies; each of them has 1/n of all the devices that come after."""
        if (n, rest) not in self.inners:
            behind = self.task.cluster.sizes[self.k - 1] * rest + self.after
            self.inners[n, rest] = self.task.table(self.k - 1, behind / n if self.task.counts_versions else Fraction(0))
        return self.inners[n, rest]

    def _sync(self, i: int, j: int, n: int, cut: bool) -> float:
        return self.task.objective.sync(self.task.weights(i, j), n, self.bandwidth, 1 if cut else self.lower_ranks)

    def _send(self, j: int, n: int) -> float:
        return self.task.objective.send(self.task.states.sent[j], n, self.bandwidth)

    def _sends_on(self, j: int, n: int) -> float:
        return self.sends[n - 1][j] if self.task.objective.adds and j < len(self.task.states) - 1 else 0.0

    def _chain(self, i: int, j: int) -> list[tuple[int, int, int, int, bool]]:
        """First layer, last layer, replicas, parts after, and whether a cut comes before, for each stage in turn."""
        chain = []
        m = self.count
        while (cut := self.cuts[i][m][j]) is not None:
            s, n = cut
            chain.append((s + 1, j, n, self.count - m, True))
            j, m = s, m - n
        return [(i, j, m, self.count - m, False), *reversed(chain)]

    def _copied(self, stage: PartitionStage, n: int, sync: float) -> PartitionStage:
        """One of the stages inside, with n copies that exchange their gradients for `sync` seconds."""
        objective, send = self.task.objective, stage.send_seconds
        return replace(
            stage,
            replicas=n * stage.replicas,
            compute_seconds=stage.compute_seconds / n,
            sync_seconds=objective.join(stage.sync_seconds, sync) / n,
            send_seconds=(objective.join(send, sync) if send and objective.adds else send) / n,
        )


def _sending(stage: PartitionStage, seconds: float) -> PartitionStage:
    return replace(stage, send_seconds=max(stage.send_seconds, seconds))
