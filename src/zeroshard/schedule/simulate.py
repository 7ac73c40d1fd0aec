"""Simulation: the time of every action of the lists, given the costs of each chunk.

The lists are those that are executed. Times are in seconds; whole numbers and fractions stay exact.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from statistics import median
from typing import Any

from zeroshard.errors import PlanError
from zeroshard.schedule.actions import Action, Kind, Schedule
from zeroshard.schedule.layout import Layout
from zeroshard.schedule.lower import Skip
from zeroshard.schedule.pipeline import PipelineSchedule

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT  # noqa: E741
SEND_F, SEND_B = Kind.SEND_FORWARD, Kind.SEND_BACKWARD
RECEIVE_F, RECEIVE_B = Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD
MESSAGES = frozenset((SEND_F, SEND_B, RECEIVE_F, RECEIVE_B))
Span = tuple[Action, float, float]
PER_CHUNK = "forward backward input_gradient weight_gradient update reduce boundary_bytes saved_bytes parameter_bytes"


@dataclass(frozen=True)
class Costs:
    """The costs of each chunk, one number per chunk; times and activations are those of one microbatch.

    Attributes:
        forward: seconds.
        backward: seconds, of the whole.
        input_gradient: seconds of the backward's first part; half of `backward` by default.
        weight_gradient: seconds of its second part; likewise.
        update: seconds of one update; 0 by default.
        reduce: seconds of one reduction over the replicas, once all of them are there; 0 by default.
        boundary_bytes: of the chunk's output, and of its gradient; 0 by default.
        skip_bytes: of every message that passes over chunks ([Note: skips]).
        saved_bytes: that its forward saves for its backward; 0 by default.
        parameter_bytes: of one version of its weights; 0 by default.
        loan_bytes: of the weights that two chunks share.
        bytes_per_second: of every link.
        latency_seconds: from the end of a send to the arrival of the last byte.
        recompute: only the chunk's input is kept, and its forward runs again before its backward, except where that
            backward comes directly after the forward (GPipe, 1811.06965, section 2.3).

    Raises:
        PlanError: a number that is negative or not a number, or tuples of different lengths.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    input_gradient: tuple[float, ...] = ()
    weight_gradient: tuple[float, ...] = ()
    update: tuple[float, ...] = ()
    reduce: tuple[float, ...] = ()
    boundary_bytes: tuple[int, ...] = ()
    skip_bytes: Mapping[Skip, int] = field(default_factory=dict)
    saved_bytes: tuple[int, ...] = ()
    parameter_bytes: tuple[int, ...] = ()
    loan_bytes: int = 0
    bytes_per_second: float = math.inf
    latency_seconds: float = 0
    recompute: bool = False

    def __post_init__(self) -> None:
        half = tuple(seconds / 2 for seconds in self.backward)
        none = (0,) * len(self.forward)
        for name in PER_CHUNK.split():
            given = getattr(self, name) or (half if name.endswith("gradient") else none)
            object.__setattr__(self, name, given)
            if len(given) != len(self.forward):
                raise PlanError(
                    f"There are {len(given)} values of {name} and {len(self.forward)} of forward; give one per chunk."
                )
            for chunk, value in enumerate(given):
                if not 0 <= value < math.inf:
                    raise PlanError(f"{name} of chunk {chunk} is {value}; it must be 0 or more, and finite.")
        if not self.bytes_per_second > 0 or not 0 <= self.latency_seconds < math.inf:
            raise PlanError(
                f"A link of {self.bytes_per_second} bytes per second and {self.latency_seconds} seconds of latency "
                f"cannot be; the rate must be above 0, and the latency 0 or more, and finite."
            )

    @classmethod
    def uniform(
        cls,
        layout: Layout,
        forward: float,
        backward: float,
        input_gradient: float | None = None,
        weight_gradient: float | None = None,
        **rest: Any,
    ) -> "Costs":
        """Equal chunks; the times are of one microbatch through a rank's whole share, of which a chunk takes 1/v.

        `rest` are fields of `Costs`.
        """

        def chunks(seconds: float | None) -> tuple[float, ...]:
            return () if seconds is None else (seconds / layout.chunks,) * layout.all_chunks

        return cls(chunks(forward), chunks(backward), chunks(input_gradient), chunks(weight_gradient), **rest)

    def whole_backward(self, chunk: int, split: bool) -> float:
        """Seconds of a chunk's backward, in one part or `split` in two."""
        return self.input_gradient[chunk] + self.weight_gradient[chunk] if split else self.backward[chunk]

    def activation_bytes(self, chunks: Sequence[int], in_flight: Fraction) -> int:
        """Bytes that a rank with these chunks keeps of so many microbatches, spread evenly over the chunks.

        With recomputation, the inputs of all chunks and the saved tensors of the one that is recomputed.
        """
        if not self.recompute:
            return round(in_flight * sum(self.saved_bytes[c] for c in chunks))
        inputs = (0, *self.boundary_bytes)
        return round(in_flight * sum(inputs[c] for c in chunks)) + max(self.saved_bytes[c] for c in chunks)

    def travel(self, nbytes: int) -> float:
        """Seconds that a message occupies its channel."""
        return 0 if math.isinf(self.bytes_per_second) else nbytes / self.bytes_per_second


@dataclass(frozen=True)
class Timeline:
    """The actions of every rank with their times, simulated or measured, for a drawing.

    Attributes:
        name: the title.
        spans: for each rank, (action, start, end) in seconds, in order, from any zero of time.
        notes: figures beside the title.
    """

    name: str
    spans: list[list[Span]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Steady:
    """A stream between fill and drain.

    Attributes:
        microbatch_seconds: from one microbatch of a data rank to the next (of all data ranks, where stages share
            them).
        bubble_fraction: idle time over all time, of all ranks.
    """

    microbatch_seconds: float
    bubble_fraction: float


@dataclass(frozen=True)
class Simulation:
    """The simulated times. Idle time is counted until the slowest rank ends, or between a rank's own start and end.

    Attributes:
        spans: for each rank, (action, start, end) of computes, and of updates and reductions that take time.
        makespan: from the start to the end of the slowest rank; for a schedule that flushes, the time of a step.
        steady: of a stream; None for a schedule that flushes, or for too few steps.
    """

    spans: list[list[Span]]
    makespan: float
    steady: Steady | None = None
    busy: list[float] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "busy", [sum([end - start for _, start, end in row]) for row in self.spans])

    @property
    def idle(self) -> list[float]:
        """Idle seconds of each rank, from the start to the makespan."""
        return [self.makespan - busy for busy in self.busy]

    @property
    def window_idle(self) -> list[float]:
        """Idle seconds of each rank, from its own first start to its own last end.

        This idle time remains where the update waits for no other rank (2401.10241, section 4).
        """
        return [row[-1][2] - row[0][1] - busy if row else 0 for row, busy in zip(self.spans, self.busy, strict=True)]

    @property
    def bubble_fraction(self) -> float:
        """Idle time over all time, of all ranks."""
        whole = self.makespan * len(self.spans)
        return sum(self.idle) / whole if whole else 0

    @property
    def bubble_over_ideal(self) -> float:
        """Idle time over busy time, of all ranks."""
        busy = sum(self.busy)
        return sum(self.idle) / busy if busy else 0


def simulate(lists: Sequence[Schedule], layout: Layout, costs: Costs) -> Simulation:
    """Run the lists of all ranks (`PipelineSchedule.stretch`) on a clock.

    A compute starts when its rank is free and its input has arrived. Sending costs the rank nothing; the messages of
    one channel (source, destination, kind) leave one after another. A reduction waits for all replicas of its chunk,
    a COLLECT for its message, and the forward of a BORROW's microbatch for the borrowed weights.

    Raises:
        PlanError: costs for another number of chunks, or lists that wait for each other for ever.
    """
    if len(costs.forward) != layout.all_chunks:
        raise PlanError(
            f"There are costs of {len(costs.forward)} chunks, and the layout has {layout.all_chunks} (stages x "
            f"chunks); give one cost per chunk."
        )
    run = _Run(lists, layout, costs)
    while run.ready:
        run.advance(run.ready.pop())
    stuck = [
        (rank, actions[at]) for rank, (actions, at) in enumerate(zip(lists, run.at, strict=True)) if at < len(actions)
    ]
    if stuck:
        raise PlanError(
            f"The lists wait for each other for ever: {', '.join(f'rank {r} before {a}' for r, a in stuck[:4])}; no "
            f"list sends what they wait for. Use the lists of `PipelineSchedule`, or check yours with `verify`."
        )
    makespan = max(run.clock, default=0)
    return Simulation(run.spans, makespan, _steady(lists, run.spans, layout))


class _Run:
    """The clocks of all ranks, and the messages between them. Ranks in `ready` can go on in their lists."""

    def __init__(self, lists: Sequence[Schedule], layout: Layout, costs: Costs) -> None:
        ranks = range(len(lists))
        self.lists, self.layout, self.costs = lists, layout, costs
        self.at = [0 for _ in ranks]
        self.clock: list[float] = [0 for _ in ranks]
        self.spans: list[list[Span]] = [[] for _ in ranks]
        self.ready = [*reversed(ranks)]
        self.arrived: dict[Hashable, float] = {}
        self.waiting: dict[Hashable, int] = {}
        self.channels: dict[Hashable, float] = {}  # when a channel is free again
        self.travels = [costs.travel(nbytes) for nbytes in costs.boundary_bytes]
        self.numbers: Counter[Hashable] = Counter()  # of messages that no microbatch identifies
        self.pending: dict[Hashable, list[Hashable]] = {}  # messages that a forward or a COLLECT needs
        self.meetings: dict[Hashable, dict[int, float]] = {}
        self.met: Counter[tuple[int, int]] = Counter()

    def advance(self, rank: int) -> None:
        """Go on in a rank's list until an input is missing."""
        costs, actions, arrived, spans = self.costs, self.lists[rank], self.arrived, self.spans[rank]
        chunks, now, local = len(self.travels), self.clock[rank], self.layout.stages == 1
        forward, backward, last = costs.forward, costs.backward, len(self.travels) - 1
        for at in range(self.at[rank], len(actions)):
            action = actions[at]
            kind, chunk, number, _, peer = action
            key = 2 * chunks * (number or 0) + chunk  # identifies a forward's input; `chunks` more, a backward's
            if kind in MESSAGES and costs.skip_bytes and self._skips(rank, action, now):
                continue
            if kind is RECEIVE_F or kind is RECEIVE_B:
                continue
            if kind is SEND_F:
                self._send(key + 1, (rank, peer, 0), now, self.travels[chunk])
                continue
            if kind is SEND_B:
                self._send(key + chunks - 1, (rank, peer, 1), now, self.travels[chunk - 1])
                continue
            if kind is F:
                seconds, waits, onward = forward[chunk], chunk > 0, key + 1 if chunk < last else None
                settled = self._settle(rank, (F, chunk, number), now) if self.pending else now
                if settled is None:
                    break
                now = settled
            elif kind is B or kind is I:
                settled = self._settle(rank, (B, chunk, number), now) if self.pending else now
                if settled is None:
                    break
                now = settled
                seconds, waits = (backward if kind is B else costs.input_gradient)[chunk], chunk < last
                key += chunks
                onward = key - 1 if chunk > 0 else None
                if costs.recompute and not (spans and spans[-1][0][:3] == (F, chunk, number)):
                    seconds += forward[chunk]
            elif kind is W:
                seconds, waits, onward = costs.weight_gradient[chunk], False, None
            else:
                after = self._other(rank, action, now)
                if after is None:
                    break
                now = after
                continue
            if waits:
                arrival = arrived.pop(key, None)
                if arrival is None:
                    self.waiting[key] = rank
                    break
                now = arrival if arrival > now else now
            start, now = now, now + seconds
            spans.append((action, start, now))
            if local and onward is not None:
                self._arrive(onward, now)
        else:
            at = len(actions)
        self.at[rank], self.clock[rank] = at, now

    def _skips(self, rank: int, action: Action, now: float) -> bool:
        """Whether a message passes over chunks; if so, send it, or note that its compute waits for it."""
        kind, chunk, number, _, peer = action
        assert peer is not None
        further = kind is SEND_F or kind is RECEIVE_B
        other = self.layout.target_of(chunk, peer) if further else self.layout.source_of(chunk, peer)
        if abs(other - chunk) == 1:
            return False
        skip, compute = Skip(min(chunk, other), max(chunk, other)), F if kind in (SEND_F, RECEIVE_F) else B
        key = compute, skip, number
        if kind is SEND_F or kind is SEND_B:
            self._send(key, (rank, peer, compute), now, self.costs.travel(self.costs.skip_bytes[skip]))
        else:
            self.pending.setdefault((rank, (compute, chunk, number)), []).append(key)
        return True

    def _send(self, key: Hashable, channel: Hashable, now: float, travel: float) -> None:
        if travel:
            free = self.channels.get(channel, now)
            now = (free if free > now else now) + travel
            self.channels[channel] = now
        self._arrive(key, now + self.costs.latency_seconds)

    def _arrive(self, key: Hashable, when: float) -> None:
        self.arrived[key] = when
        waiter = self.waiting.pop(key, None)
        if waiter is not None:
            self.ready.append(waiter)

    def _other(self, rank: int, action: Action, now: float) -> float | None:
        """The time after an action other than a compute or a message between chunks; None if the rank must wait."""
        kind, chunk, number, _, peer = action
        if kind is Kind.UPDATE:
            return self._spend(rank, action, now, self.costs.update[chunk])
        if kind is Kind.REDUCE:
            met = self._meet(rank, chunk, now)
            return None if met is None else self._spend(rank, action, met, self.costs.reduce[chunk])
        if kind is Kind.REPAY or kind is Kind.LEND:
            loan = self.costs.travel(self.costs.loan_bytes)
            self._send(self._next("out", kind, rank, peer), (kind, rank, peer), now, loan)
        elif kind is Kind.BORROW:
            self.pending.setdefault((rank, (F, chunk, number)), []).append(self._next("in", Kind.LEND, peer, rank))
        elif kind is Kind.COLLECT:
            if (rank, kind) not in self.pending:
                self.pending[rank, kind] = [self._next("in", Kind.REPAY, peer, rank)]
            return self._settle(rank, kind, now)
        return now

    def _next(self, side: str, *channel: Hashable) -> Hashable:
        """The key of a channel's next message, which no microbatch identifies."""
        self.numbers[side, channel] += 1
        return channel, self.numbers[side, channel]

    def _settle(self, rank: int, need: Hashable, now: float) -> float | None:
        """The time at which all pending messages of `need` are there; None if that is not known yet."""
        keys = self.pending.get((rank, need), [])
        for key in keys:
            if key not in self.arrived:
                self.waiting[key] = rank
                return None
        self.pending.pop((rank, need), None)
        return max([now, *(self.arrived.pop(key) for key in keys)])

    def _meet(self, rank: int, chunk: int, now: float) -> float | None:
        """The time at which the last replica of a chunk is at its reduction; None if that is not known yet."""
        replicas = self.layout.replicas[chunk % self.layout.stages]
        if replicas == 1:
            return now
        meeting = self.meetings.setdefault((chunk, self.met[rank, chunk]), {})
        if rank not in meeting:
            meeting[rank] = now
            if len(meeting) == replicas:
                self.ready += [other for other in meeting if other != rank]
        if len(meeting) < replicas:
            return None
        self.met[rank, chunk] += 1
        return max(meeting.values())

    def _spend(self, rank: int, action: Action, now: float, seconds: float) -> float:
        if seconds:
            self.spans[rank].append((action, now, now + seconds))
        return now + seconds


def _steady(lists: Sequence[Schedule], spans: list[list[Span]], layout: Layout) -> Steady | None:
    """Seconds a microbatch and bubble, by the first rank's forwards in the later half of a stream, in whole rounds."""
    kinds = [action.kind for action in lists[0]]
    if B not in kinds or Kind.UPDATE not in kinds or F not in kinds[kinds.index(Kind.UPDATE) :]:
        return None
    warm_up = kinds[: kinds.index(B)].count(F)
    shared = layout.replicas[0] if layout.uneven else 1  # data ranks whose microbatches the stages share
    every = kinds[: kinds.index(Kind.UPDATE)].count(B) * math.lcm(*layout.replicas) // layout.replicas[0]
    starts = [start for action, start, _ in spans[0] if action.kind is F]
    rounds = (len(starts) - 1 - warm_up) // every
    if rounds < 1:
        return None
    count = (rounds + 1) // 2 * every
    first, last = starts[-1 - count], starts[-1]
    within = [max(0, min(end, last) - max(start, first)) for row in spans for _, start, end in row]
    whole = (last - first) * len(spans)
    return Steady((last - first) / (count * shared), (whole - sum(within)) / whole if whole else 0)


TIMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "input_gradient",
    Kind.WEIGHT_GRADIENT: "weight_gradient",
    Kind.UPDATE: "update",
}


def costs_of(spans: Sequence[Sequence[Span]], pipeline: PipelineSchedule) -> Costs:
    """The costs of each chunk: the median seconds of each kind of action. Messages cost nothing."""
    seconds = medians(spans)
    given: dict[str, Any] = {}
    for kind, name in TIMES.items():
        values = tuple(seconds.get((kind, c), 0.0) for c in range(pipeline.layout.all_chunks))
        if any(values) or name in ("forward", "backward"):
            given[name] = values
    return Costs(**given, skip_bytes=dict.fromkeys(pipeline.skips, 0))


def medians(spans: Sequence[Sequence[Span]]) -> dict[tuple[Kind, int], float]:
    """The median seconds of each kind of action, by kind and chunk."""
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for rank in spans:
        for action, start, end in rank:
            times[action.kind, action.chunk].append(end - start)
    return {key: median(seconds) for key, seconds in times.items()}
