"""The content of a run folder as plain records. A number that is absent, null or not a number is NaN."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from zeroshard.schedule.simulate import Timeline

QUANTILES = ("least", "median", "greatest")  # of a quantity on many ranks


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """The choices of one step in one mixture of experts.

    Attributes:
        load: choices that fell on each expert, before capacity.
        dropped: fraction of all choices above their expert's capacity.
        entropy: of the router's probabilities, mean over tokens, in nats.
    """

    load: tuple[float, ...]
    dropped: float
    entropy: float

    @property
    def shares(self) -> tuple[float, ...]:
        """The load of each expert over the mean load; 1 at balance."""
        mean = math.fsum(self.load) / len(self.load)
        return tuple(n / mean if mean else 0.0 for n in self.load)


@dataclass(frozen=True, slots=True)
class TrainingPoint:
    """One optimizer step.

    Attributes:
        exposed: seconds that the step waited for offload, by cause; empty without offload.
        taken: speculative updates, run during the backward, that were kept.
        undone: speculative updates that were wrong.
        loads: of each mixture of experts, by the path of its layer.
        ranks: busy seconds, bytes and exposed seconds of every rank, by quantity; of many ranks the least, the median
            and the greatest.
        quantiles: whether ``ranks`` holds those three.
    """

    step: int
    bits_per_byte: float
    grad_norm: float
    tokens_per_s: float
    seconds: float
    rss_bytes: float
    skipped: bool
    exposed: dict[str, float] = field(default_factory=dict)
    taken: float = 0
    undone: float = 0
    loads: dict[str, ExpertLoad] = field(default_factory=dict)
    ranks: dict[str, tuple[float, ...]] = field(default_factory=dict)
    quantiles: bool = False
    learning_rate: float = math.nan
    mfu: float = math.nan

    @property
    def rank_names(self) -> tuple[str, ...]:
        """The names of the values in ``ranks``."""
        count = max(map(len, self.ranks.values()), default=0)
        return QUANTILES if self.quantiles else tuple(f"rank {rank}" for rank in range(count))


@dataclass(frozen=True, slots=True)
class ValidationPoint:
    """One pass over the validation bytes."""

    step: int
    bits_per_byte: float


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    """Bytes of one ledger category on one rank: the formula, its padding, the ledger at rest and at its highest.

    ``tier`` is where they are: "device", "host" or "disk".
    """

    category: str
    planned_bytes: float
    padding_bytes: float
    measured_bytes: float
    peak_bytes: float
    tier: str = "device"


@dataclass(frozen=True, slots=True)
class TrafficRecord:
    """The traffic of one purpose in one step."""

    purpose: str
    planned_elements: float
    measured_elements: float
    measured_bytes: float
    calls: float


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """The ledger right after one event; it holds until the next. ``nbytes`` follows ``MemoryStep.categories``.

    Attributes:
        layer: path of the module that ran; empty if it is not known.
        phase: "forward" or "backward" of that layer.
    """

    t: float
    label: str
    nbytes: tuple[float, ...]
    layer: str = ""
    phase: str = ""

    @property
    def place(self) -> str:
        """The event with its layer."""
        return f"{self.phase} {self.layer}: {self.label}" if self.layer else self.label

    @property
    def total(self) -> float:
        """Bytes in all categories together."""
        return sum(self.nbytes)


@dataclass(frozen=True, slots=True)
class MemoryStep:
    """The ledger of one rank over one training step, events in order of time."""

    rank: float
    categories: tuple[str, ...]
    events: tuple[MemoryEvent, ...]


@dataclass(frozen=True, slots=True)
class Timelines:
    """The timelines of a pipeline, measured and simulated, and the seconds of each."""

    measured_seconds: float
    simulated_seconds: float
    drawn: tuple[Timeline, ...]


@dataclass(frozen=True, slots=True)
class PredictionRow:
    """One number as predicted before the run and as measured: of `part` memory or wire in bytes, of time in seconds."""

    part: str
    name: str
    predicted: float
    measured: float


@dataclass(frozen=True, slots=True)
class ActivationRecord:
    """The decision on one block's activations and its costs: predicted and measured."""

    block: str
    action: str
    saved_bytes: float
    kept_bytes: float
    measured_kept_bytes: float
    again: float
    measured_again: float
    again_seconds: float
    measured_again_seconds: float
    stored_seconds: float
    measured_stored_seconds: float


@dataclass(frozen=True, slots=True)
class ArenaRecord:
    """The use of the buffer of blocks' inputs on the rank where it is the largest."""

    nbytes: float
    live_bytes: float
    checkpoints: float
    outside: float


@dataclass(frozen=True, slots=True)
class SpeedRecord:
    """The median speed of all ranks, model FLOPs of a rank, and their share of the peak rate (MFU)."""

    tokens_per_s: float
    tokens_per_s_per_rank: float
    flops_per_token: float
    tflops_per_rank: float
    mfu: float
    mfu_causal: float


@dataclass(frozen=True, slots=True)
class ForecastRecord:
    """Predicted and measured numbers of one rank up to a step, and warnings of missed tolerances."""

    rank: float
    step: float
    rows: tuple[PredictionRow, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The memory of one rank in the recorded step and at the end, and its waits for offload."""

    rank: float
    host: str
    peak_bytes: float
    rss_bytes: float
    exposed_seconds: float


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a run: the first, or one that resumed it.

    Attributes:
        date: in ISO 8601, with the offset from UTC.
        hosts: names of the machines.
        command: the command line.
        resume: the command that resumes the run.
        folder: the run folder, as the command named it.
        commit: of the working directory's git repository; empty without one.
        changed: number of files there that differ from the commit.
    """

    date: str
    hosts: tuple[str, ...]
    device: str
    command: str
    resume: str
    folder: str
    python: str
    zeroshard: str
    torch: str
    commit: str
    branch: str
    changed: float
    seed: float
    ranks: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary that the run wrote at its end; all fields are unknown if it died before."""

    title: str
    sample: str
    zeroshard: str
    torch: str
    train_bits_per_byte: float
    validation_bits_per_byte: float
    world_size: float
    parameters: float
    seconds: float
    corpus: dict[str, object]
    plan: dict[str, object]
    memory: tuple[MemoryRecord, ...]
    traffic: tuple[TrafficRecord, ...]
    activations: tuple[ActivationRecord, ...] = ()
    arena: ArenaRecord | None = None
    speed: SpeedRecord | None = None
    ranks: tuple[RankFacts, ...] = ()
    capacity_bytes: float = math.nan


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The content of a report; ``notes`` list missing and ignored content in whole sentences."""

    path: Path
    training: tuple[TrainingPoint, ...]
    validation: tuple[ValidationPoint, ...]
    summary: Summary
    memory: MemoryStep | None
    timelines: Timelines | None
    forecast: ForecastRecord | None
    notes: tuple[str, ...]
    memories: tuple[MemoryStep, ...] = ()
    starts: tuple[Start, ...] = ()

    @property
    def title(self) -> str:
        """The title of the run, or the name of its folder."""
        return self.summary.title or f"Run {self.path.resolve().name}"
