"""Results of the planner: predictions of plans, and refusals of those that do not fit or do not work."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

from zeroshard.memory.ledger import Event
from zeroshard.plan import Plan
from zeroshard.planner.formulas import MARGIN as MARGIN
from zeroshard.schedule import Action

Mode = Literal["fake", "shallow-real", "estimate"]
TimeMode = Literal["roofline", "shallow-real", "estimate"]
CAUSES = ("compute", "optimizer", "wire", "host link", "host update", "disk", "bubble")
FETCHED = "a checkpoint's values"  # in host memory, of one part whose states are on a disk or in fewer bits
COPY = "a checkpoint's copy"  # in host memory, of the states on their way to the disk
TEMPORARIES = "temporaries"  # bytes of torch at the peak outside of the ledger
MOST_ACTIONS = 4000  # of the timeline of a plan that is not among the best
Span = tuple[Action, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Memory and time of a step under one plan, on its fullest rank.

    Attributes:
        batch: rows per data rank and step (a rank, or a replica of the whole pipeline).
        ranks: number of ranks.
        rank: the rank with the highest peak.
        mode: method of the memory: the engine on tensors without values, on real ones with few layers, or a first
            estimate.
        time_mode: method of the time: each operation by rates of the device, few layers really run, or a first
            estimate.
        memory: bytes by category at the peak; their sum is `peak_bytes`.
        phases: bytes by category at the peak of each phase: build (making the engine), forward, backward and update.
        capacity_bytes: bytes of the device for tensors.
        communicators: NCCL communicators of the rank, which have buffers of `communicator_bytes` together, by an
            assumption for each, outside of the capacity.
        margin: share of the capacity that stays free.
        host: bytes by category that this rank keeps in host memory.
        disk_bytes: bytes that it keeps on a disk.
        host_bytes: on one node, of all its ranks: what is offloaded, and the copies of a checkpoint on its way to the
            disk.
        node_ranks: ranks of one node.
        loading_bytes: on one node before the first step, where its ranks make the model, each of them whole.
        host_capacity_bytes: bytes of the node for them; None is no limit.
        wire_bytes: by purpose, of this rank in one step, by the paper's count (an all-gather counts its result).
        causes: seconds of one step by what they are spent on; their sum is `seconds`.
        tokens: of one step, all ranks together.
        events: memory over one step, by category.
        spans: for pipelines, the actions of each rank with their times.
        notes: remarks on these numbers, a sentence each.
        owners: what owners of whole parameters do and cost, in sentences; empty where slices are even.
        optimizer: the name of another optimizer than the one that was asked for.
        adapters: that are trained instead of the model, in words; empty without.
    """

    plan: Plan
    batch: int
    ranks: int
    rank: int
    mode: Mode
    time_mode: TimeMode
    memory: Mapping[str, int]
    capacity_bytes: int
    host_bytes: int
    wire_bytes: Mapping[str, int]
    causes: Mapping[str, float]
    tokens: int
    margin: float = MARGIN
    host_capacity_bytes: int | None = None
    host: Mapping[str, int] = field(default_factory=dict)
    disk_bytes: int = 0
    events: tuple[Event, ...] = ()
    spans: tuple[tuple[Span, ...], ...] = ()
    notes: tuple[str, ...] = field(default=())
    owners: str = ""
    communicators: int = 0
    communicator_bytes: int = 0
    node_ranks: int = 1
    loading_bytes: int = 0
    optimizer: str = ""
    adapters: str = ""
    phases: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def host_parts(self) -> dict[str, int]:
        """Bytes of one node's host memory by use; their sum is `host_bytes`."""
        parts = {name: nbytes * self.node_ranks for name, nbytes in self.host.items() if nbytes}
        return {**parts, COPY: max(0, self.host_bytes - sum(parts.values()))}

    @property
    def host_needed_bytes(self) -> int:
        """Bytes without which the plan does not work: `host_bytes` without copies, which can be left out."""
        return self.host_bytes - self.host_parts[COPY]

    @property
    def host_between_steps(self) -> dict[str, int]:
        """Bytes by category in the host memory of the rank while no checkpoint is written."""
        return {category: nbytes for category, nbytes in self.host.items() if category != FETCHED}

    @property
    def waits_for_checkpoints(self) -> bool:
        """Whether host memory holds the plan, but not with whole copies of a checkpoint beside it."""
        return self.host_bytes > self._host_capacity

    @property
    def _host_capacity(self) -> float:
        return math.inf if self.host_capacity_bytes is None else self.host_capacity_bytes

    @property
    def peak_bytes(self) -> int:
        """Bytes at the peak, on the fullest rank."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the peak leaves the margin free, and host memory suffices, a checkpoint's copy aside."""
        return not self.full

    @property
    def full(self) -> list[str]:
        """The tiers, "host" and "device", whose capacity the plan exceeds."""
        rooms = {
            "host": (self.host_needed_bytes, self._host_capacity),
            "device": (self.peak_bytes, self.capacity_bytes * (1 - self.margin)),
        }
        return [tier for tier, (held, room) in rooms.items() if held > room]

    @property
    def smallest_capacity_bytes(self) -> int:
        """The least device capacity that fits the plan: its peak and the margin."""
        return int(self.peak_bytes / (1 - self.margin)) + 1

    @property
    def seconds(self) -> float:
        """Seconds of one step."""
        return sum(self.causes.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def bound(self) -> str:
        """The cause with the most seconds of the step."""
        return max(self.causes, key=lambda cause: self.causes[cause]) if self.causes else "compute"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them; the plan as `Plan.from_dict` takes it."""
        return {
            "plan": self.plan.as_dict(),
            "batch": self.batch,
            "ranks": self.ranks,
            "rank": self.rank,
            "mode": self.mode,
            "time_mode": self.time_mode,
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "capacity_bytes": self.capacity_bytes,
            "margin": self.margin,
            "communicators": self.communicators,
            "communicator_bytes": self.communicator_bytes,
            "memory": dict(self.memory),
            "phases": {phase: dict(memory) for phase, memory in self.phases.items()},
            "host": dict(self.host),
            "disk_bytes": self.disk_bytes,
            "host_bytes": self.host_bytes,
            "host_parts": self.host_parts,
            "host_needed_bytes": self.host_needed_bytes,
            "node_ranks": self.node_ranks,
            "loading_bytes": self.loading_bytes,
            "waits_for_checkpoints": self.waits_for_checkpoints,
            "optimizer": self.optimizer,
            "adapters": self.adapters,
            "host_capacity_bytes": self.host_capacity_bytes,
            "wire_bytes": dict(self.wire_bytes),
            "seconds": self.seconds,
            "causes": dict(self.causes),
            "bound": self.bound,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "notes": list(self.notes),
            "owners": self.owners,
        }

    def whole_dict(self) -> dict[str, Any]:
        """`as_dict`, with memory over the step and the timeline: each rank's actions as they print, start and end."""
        events = [{"seconds": event.t, "label": event.label, "bytes": event.nbytes} for event in self.events]
        timeline = [[[str(action), start, end] for action, start, end in row] for row in self.spans]
        return self.as_dict() | {"memory_over_step": events, "timeline": timeline}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """The prediction that `as_dict` or `whole_dict` gave."""
        values = {one.name: stored[one.name] for one in fields(cls) if one.name in stored}
        values |= {"plan": Plan.from_dict(stored["plan"]), "notes": tuple(stored["notes"])}
        events = stored.get("memory_over_step", ())
        values["events"] = tuple(Event(one["seconds"], one["label"], one["bytes"]) for one in events)
        values["spans"] = tuple(
            tuple((Action.parse(text), start, end) for text, start, end in row) for row in stored.get("timeline", ())
        )
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A plan that is refused.

    Attributes:
        why: one sentence.
        way_out: one sentence: the single change that would make it fit.
        prediction: its memory and time, where it was rehearsed.
    """

    plan: Plan
    batch: int
    why: str
    way_out: str
    prediction: Prediction | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        shown = {"plan": self.plan.as_dict(), "batch": self.batch, "why": self.why, "way_out": self.way_out}
        number = None if self.prediction is None else with_short_timeline(self.prediction).whole_dict()
        return shown | {"prediction": number}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """The refusal that `as_dict` gave."""
        one = stored["prediction"]
        plan, number = Plan.from_dict(stored["plan"]), None if one is None else Prediction.from_dict(one)
        return cls(plan, stored["batch"], stored["why"], stored["way_out"], number)


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search.

    Attributes:
        best: predictions of plans that fit, the fastest first.
        refused: in the order in which they were looked at.
        looked_at: number of plans.
        seconds: duration of the search.
        ways: where no plan fits that trains every weight, sentences about the nearest ways, each with its needs.
        others: further plans that fit, in the same order.
        kept: whether it is that of an earlier search.
        left_out: plans that were expected at the start of the search and turned out not to be needed.
    """

    best: tuple[Prediction, ...]
    refused: tuple[Refusal, ...]
    looked_at: int
    seconds: float
    ways: tuple[str, ...] = ()
    others: tuple[Prediction, ...] = ()
    kept: bool = False
    left_out: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        return {
            "best": [one.whole_dict() for one in self.best],
            "others": [with_short_timeline(one).whole_dict() for one in self.others],
            "refused": [one.as_dict() for one in self.refused],
            "looked_at": self.looked_at,
            "left_out": self.left_out,
            "seconds": self.seconds,
            "ways": list(self.ways),
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """The result that `as_dict` gave."""
        best, others = (tuple(Prediction.from_dict(one) for one in stored[name]) for name in ("best", "others"))
        refused = tuple(Refusal.from_dict(one) for one in stored["refused"])
        ways, left_out = tuple(stored["ways"]), stored["left_out"]
        return cls(best, refused, stored["looked_at"], stored["seconds"], ways, others, left_out=left_out)


def with_short_timeline(prediction: Prediction) -> Prediction:
    """The prediction, without a timeline of more than `MOST_ACTIONS`."""
    return prediction if sum(map(len, prediction.spans)) <= MOST_ACTIONS else replace(prediction, spans=())
