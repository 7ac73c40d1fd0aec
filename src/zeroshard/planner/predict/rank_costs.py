"""One rank's numbers at the model's depth and the plan's microbatches, from rehearsals at few of both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from zeroshard.plan import Plan
from zeroshard.planner.choices import choices_of
from zeroshard.planner.predict.rehearse import Rehearsed, TrainingTask, highest_of
from zeroshard.planner.predict.result import FETCHED, TEMPORARIES, Span
from zeroshard.planner.predict.shallow import FEW, Stack, deepen, shallow, shallow_copies
from zeroshard.schedule.simulate import TIMES, medians


@dataclass(frozen=True, slots=True)
class RankCosts:
    """One rank's numbers, at the model's depth and the plan's microbatches.

    Attributes:
        phases: bytes by category at the peak of each phase of a step.
        wire: bytes by purpose.
        spent: seconds by cause.
        snapshot_nbytes: bytes of its shard of a checkpoint.
        host: bytes by category that it keeps in host memory.
        disk_nbytes: bytes that it keeps on a disk.
        last: the rehearsal nearest to the plan.
        exact: whether `last` was of the plan itself, with all blocks and microbatches.
        costs: of a pipeline's stage, seconds by kind of action and chunk, such as "forward/3".
        actions: seconds of all rehearsed actions.
        waits: seconds of rehearsed forwards and backwards that are waits for transfers.
        microbatch_waits: those of one microbatch.
        host_mean: mean bytes in host memory over the ranks of a slice group; None if equal on all.
    """

    rank: int
    phases: Mapping[str, Mapping[str, int]]
    wire: Mapping[str, int]
    spent: Mapping[str, float]
    snapshot_nbytes: int
    host: Mapping[str, int]
    disk_nbytes: int
    last: Rehearsed
    exact: bool
    costs: Mapping[str, float] = field(default_factory=dict)
    actions: float = 0.0
    waits: float = 0.0
    microbatch_waits: float = 0.0
    host_mean: int | None = None

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by category at the peak."""
        return dict(highest_of(self.phases))

    @property
    def on_host(self) -> int:
        """Bytes in host memory: offloaded tensors, and the checkpoint's copy of the states."""
        return self.snapshot_nbytes + sum(self.host.values()) if self.host_mean is None else self.host_mean


@dataclass(frozen=True, slots=True)
class Times:
    """The time of a step.

    Attributes:
        causes: seconds by cause.
        spans: actions of each rank, in a pipeline.
        notes: remarks for the reader, a sentence each.
    """

    causes: Mapping[str, float]
    spans: tuple[tuple[Span, ...], ...] = ()
    notes: tuple[str, ...] = ()


def rank_costs_of(
    last: Rehearsed,
    seen: Sequence[Rehearsed] = (),
    stacks: Sequence[Stack] = (),
    more: int = 0,
    depths: tuple[int, int] = (FEW, 1),
) -> RankCosts:
    """A rank's numbers from rehearsals at few depths, with `more` microbatches than were rehearsed."""
    numbers = deepen(stacks, [numbers_of(one, more) for one in seen or [last]], *depths)
    return rank_costs_from(numbers, last, not stacks and not more)


def rank_costs_from(numbers: Mapping[str, float], last: Rehearsed, exact: bool) -> RankCosts:
    """A rank's `RankCosts` from numbers as `numbers_of` gives them, extrapolated over depths and microbatches."""
    return RankCosts(
        last.rank,
        _phases(numbers),
        _whole(_part(numbers, "wire")),
        _part(numbers, "spent"),
        round(numbers["snapshot"]),
        _whole(_part(numbers, "host")),
        round(numbers["disk"]),
        last,
        exact,
        _part(numbers, "cost"),
        numbers["actions"],
        numbers["waits"],
        numbers["microbatch_waits"],
    )


def numbers_of(one: Rehearsed, more: int) -> dict[str, float]:
    """All numbers of a rehearsal with `more` further microbatches, in one mapping to extrapolate."""
    each = one.per_microbatch
    numbers = memory_numbers(one, one.plan.microbatches + more)
    for purpose, (_, nbytes, _) in one.wire.items():
        numbers[f"wire/{purpose}"] = nbytes + (more * each.wire.get(purpose, 0) if each and more else 0)
    for cause, seconds in one.spent.items():
        numbers[f"spent/{cause}"] = seconds + (more * each.spent.get(cause, 0.0) if each and more else 0.0)
    numbers |= {
        f"host/{category}": nbytes for category, nbytes in {**one.host, FETCHED: one.sizes[2]}.items() if nbytes
    }
    numbers |= {f"cost/{TIMES[kind]}/{c}": s for (kind, c), s in medians([one.spans]).items() if kind in TIMES if s}
    actions = sum(end - start for _, start, end in one.spans)
    kept = {"snapshot": one.sizes[0], "disk": one.disk_nbytes}
    return {**numbers, **kept, "actions": actions, "waits": one.waits[0], "microbatch_waits": one.waits[1]}


def memory_numbers(one: Rehearsed, microbatches: int) -> dict[str, float]:
    """Bytes by phase and category, with a batch of so many microbatches."""
    numbers = {f"memory/{p}/{name}": float(n) for p, memory in one.phases.items() for name, n in memory.items()}
    further = one.sizes[1] / one.plan.microbatches * (microbatches - one.plan.microbatches)
    for phase in one.phases:
        numbers[f"memory/{phase}/{TEMPORARIES}"] += further
    return numbers


def _phases(numbers: Mapping[str, float]) -> dict[str, dict[str, int]]:
    """Bytes by phase and category."""
    phases: dict[str, dict[str, int]] = {}
    for key, nbytes in _part(numbers, "memory").items():
        phase, _, name = key.partition("/")
        phases.setdefault(phase, {})[name] = round(nbytes)
    return phases


def _part(numbers: Mapping[str, float], name: str) -> dict[str, float]:
    return {key.partition("/")[2]: value for key, value in numbers.items() if key.startswith(f"{name}/")}


def _whole(numbers: Mapping[str, float]) -> dict[str, int]:
    return {name: round(value) for name, value in numbers.items()}


def with_few_blocks(task: TrainingTask, depths: Mapping[str, int]) -> TrainingTask:
    """The task of a model with its stacks cut to `depths`, for a rehearsal."""
    return replace(task, build=(shallow if task.values is True else shallow_copies)(task.build, depths))


FEW_RANKS = 3  # most ranks to rehearse: the two with the most bytes, and the next, which bounds all others


def owner_ranks(task: TrainingTask, plan: Plan, first: int, slices: int) -> list[int]:
    """The ranks to rehearse in the group that begins at `first`; one of equal ranks."""
    if task.layout.whole is None:
        return [first]
    split = plan.tensor.ranks  # each matrix has an owner among them too
    chosen = range(min(choices_of(plan).slicing.updated_by(slices), FEW_RANKS))
    return [first + number * split + place for number in chosen for place in range(min(split, FEW_RANKS))]


def largest_of(per_rank: Sequence[RankCosts], ranks: int) -> RankCosts:
    """The numbers of the rank with the most bytes, with the time of the slowest.

    Args:
        ranks: of one stage and one slice group, over which bytes in host memory are averaged.
    """
    fullest = max(per_rank, key=lambda one: sum(one.memory.values()))
    slowest = max(per_rank, key=lambda one: sum(one.spent.values()))
    if len(per_rank) == 1:
        return fullest
    on_host = [one.on_host for one in per_rank]
    mean = -(-(sum(on_host) + (ranks - len(per_rank)) * on_host[-1]) // ranks)
    return replace(fullest, spent=slowest.spent, host_mean=mean)
