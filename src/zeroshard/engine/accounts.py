"""What the plan's formulas say beside what the ledger and comm counted: `engine.memory()` and `engine.traffic()`."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, Generic, TypeVar

import torch

from zeroshard.comm import Count, Purpose
from zeroshard.engine.assembly import Assembly, Shard
from zeroshard.engine.groups import Groups
from zeroshard.engine.stage import Stage, Whole
from zeroshard.ledger import Category, Ledger
from zeroshard.plan import Plan
from zeroshard.tiers import in_pages
from zeroshard.zero import StateBytes, state_bytes, wire_elements
from zeroshard.zero.formulas import BytesPerParameter

TIERS = ("device", "host", "disk")
MOMENT_BYTES = {"fp32": 4, "bf16": 2, "8bit": 1}  # of each of Adam's two moments, per element
SCALE_BYTES = 4  # of a block of 8-bit moments


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes of one category on one tier of this rank.

    Attributes:
        tier: "device", "host" or "disk".
        planned_bytes: by the paper's formula for Ψ parameters; None where there is none. A fraction where N does not
            divide Ψ.
        padding_bytes: by the same formula for the padding elements; below the device also what is left of the last page
            of each piece.
        measured_bytes: what the ledger holds now.
        peak_bytes: the most it held.
    """

    category: str
    tier: str
    planned_bytes: Fraction | None
    padding_bytes: Fraction | None
    measured_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class TrafficRow:
    """What the last step moved for one purpose, by the paper's count (an all-gather of Ψ elements counts Ψ)."""

    purpose: str
    planned_elements: int | None
    measured_elements: int
    padding_elements: int
    measured_bytes: int
    sent_bytes: int
    calls: int
    seconds: float


Row = TypeVar("Row", bound=MemoryRow | TrafficRow)


class _Table(Generic[Row]):
    """Rows that print as a table and come as dicts."""

    rows: list[Row]
    title: str

    def as_dicts(self) -> list[dict[str, Any]]:
        """The rows as plain values; fractions become floats."""
        return [{k: float(v) if isinstance(v, Fraction) else v for k, v in asdict(row).items()} for row in self.rows]

    def _shown(self, row: dict[str, Any]) -> dict[str, Any]:
        return row

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __str__(self) -> str:
        dicts = [self._shown(row) for row in self.as_dicts()]
        cells = [[key.replace("_", " ") for key in dicts[0]], *([_text(v) for v in row.values()] for row in dicts)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = []
        for name, *numbers in cells:
            right = (number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True))
            lines.append("  ".join([name.ljust(widths[0]), *right]))
        return "\n".join([self.title, *lines])


class MemoryTable(_Table[MemoryRow]):
    """Bytes per rank: planned by the formula, padding, measured by the ledger.

    All categories of the device, and of the tiers below it those that were ever held.
    """

    def __init__(self, rows: list[MemoryRow]) -> None:
        self.rows = rows
        self.title = "bytes on this rank"

    def __getitem__(self, key: str | tuple[str, str]) -> MemoryRow:
        """The row of a category on the device, or of (category, tier)."""
        wanted = (key, "device") if isinstance(key, str) else key
        return next(row for row in self.rows if (row.category, row.tier) == wanted)

    def _shown(self, row: dict[str, Any]) -> dict[str, Any]:
        """The tier beside the category, where it is not the device."""
        tier = row.pop("tier")
        return row if tier == "device" else {**row, "category": f"{row['category']}, {tier}"}


class TrafficTable(_Table[TrafficRow]):
    """Elements and bytes on the wire in the last step: formula and measured."""

    def __init__(self, rows: list[TrafficRow]) -> None:
        self.rows = rows
        self.title = "on the wire in the last step"

    def __getitem__(self, purpose: str) -> TrafficRow:
        return next(row for row in self.rows if row.purpose == purpose)


def memory_table(assembly: Assembly, plan: Plan, ranks: int, ledger: Ledger, stage: Stage | Whole) -> MemoryTable:
    """The formula and the ledger, tier by tier and category by category; what ranks share counts in equal parts."""
    zero = StateBytes(*[Fraction(0)] * 4)
    planned, padding = dict.fromkeys(TIERS, zero), dict.fromkeys(TIERS, zero)
    for shard in assembly.all_shards:
        each, index = _costs(shard, assembly, plan, ranks), shard.flat.index
        frozen = not shard.flat.trainable
        for numel, sums in ((index.numel, planned), (index.padding, padding)):
            states = _with_sums(state_bytes(numel, ranks, plan.zero, each, frozen), numel, shard, plan, ranks)
            if shard.parameters.common:
                states = replace(states, parameters=Fraction(numel * each.parameter, ranks))
            older = 0 if frozen else numel * each.parameter * (stage.versions - 1)
            sums["device"] += _on_device(states, shard, plan) + _parameters(older)
        for piece in _pieces_below(shard, assembly, plan):
            kept = Fraction(piece.nbytes * index.numel, index.padded_numel)
            planned[piece.tier] += replace(zero, **{piece.field: kept})
            padding[piece.tier] += replace(zero, **{piece.field: piece.held - kept})
    for borrowed in assembly.borrowed.values():
        copies = stage.borrowed_versions * borrowed.numel * borrowed.dtype.itemsize
        planned["device"] += replace(_parameters(copies), gradients=Fraction(borrowed.gradient.nbytes))
    rows = []
    for tier, category in itertools.product(TIERS, Category):
        account = ledger.account(category, tier)
        field = str(category).replace(" ", "_")
        formula, extra = getattr(planned[tier], field, None), getattr(padding[tier], field, None)
        if tier == "device" or formula or account.peak:
            rows.append(MemoryRow(str(category), tier, formula, extra, account.current, account.peak))
    return MemoryTable(rows)


def traffic_table(
    assembly: Assembly,
    plan: Plan,
    groups: Groups,
    counts: Mapping[Purpose, Count],
    messages: Mapping[str, int],
    stage: Stage | Whole,
) -> TrafficTable:
    """The formula and comm's counts of the last step, purpose by purpose.

    Args:
        messages: planned elements of what goes between pipeline stages.
    """
    trainable = sum(s.flat.index.numel for s in assembly.all_shards if s.flat.trainable)
    frozen = sum(s.flat.index.numel for s in assembly.all_shards if not s.flat.trainable)
    ranks = groups.slices.mesh.ranks
    around = stage.ranks_per_lane
    updates = plan.microbatches // (plan.microbatches_per_update * (around if plan.streams else 1))
    reductions = plan.reductions // around if plan.reductions > 1 else 1
    each = wire_elements(trainable, ranks, plan.zero, plan.microbatches_per_update, reductions)
    planned = {purpose: elements * updates for purpose, elements in each.items()} | dict(messages)
    if any(shard.parameters.common for shard in assembly.all_shards):
        planned["gather parameters"] = 0  # they are there once for all ranks
    elif plan.zero == 3 and ranks > 1:
        planned["gather parameters"] += 2 * plan.microbatches * frozen
    if groups.replicas is not None:  # a slice there and back
        owned = sum(s.owned.numel() for s in assembly.all_shards if s.gradients is not None)
        planned["average replicas"] = 2 * owned * updates
    planned |= _between_tiers(assembly, plan)
    rows = []
    for purpose in Purpose:
        count = counts.get(purpose, Count())
        formula = planned.get(str(purpose))
        if formula is not None or count.calls:
            measured = (count.elements, count.padding, count.nbytes, count.sent_nbytes, count.calls, count.seconds)
            rows.append(TrafficRow(str(purpose), formula, *measured))
    return TrafficTable(rows)


def _between_tiers(assembly: Assembly, plan: Plan) -> dict[str, int]:
    """Elements of this rank's slices that go down, once per reduction, and up: once per update, or to each use."""
    down = up = 0
    for shard in assembly.all_shards:
        index, parameters = shard.flat.index, shard.parameters
        own = index.slice_numel - index.padding_in(*index.interval(parameters.rank))
        down += own * plan.reductions if shard.below else 0
        up += own * 2 * plan.microbatches if parameters.lives_below else own if shard.below else 0
    return {"gradients down": down, "parameters up": up} if up else {}


@dataclass(frozen=True, slots=True)
class _Piece:
    """What is kept of a slice [S] below the device, in one place: its bytes, and those with the rest of a page."""

    tier: str
    field: str
    nbytes: int
    held: int


def _pieces_below(shard: Shard, assembly: Assembly, plan: Plan) -> Iterator[_Piece]:
    """By ZeRO-Offload (2101.06840, section 4): 4S of master weights, 8S of moments, 2S of gradients in 16 bits."""
    parameters, size = shard.parameters, shard.flat.dtype.itemsize
    count = shard.flat.index.slice_numel
    if parameters.lives_below:
        yield _paged("disk" if plan.offload_disk_parameters else "host", "parameters", count * size)
    if not shard.below:
        return
    several = plan.microbatches_per_update > 1
    gradient = shard.owned.itemsize if several else size
    for _ in range(2 if plan.delayed_update else 1):
        yield _paged("host", "gradients", count * gradient)
    tier = "host" if plan.offload_disk is None else "disk"
    yield _paged(tier, "master_weights", count * shard.owned.itemsize)
    if shard.home is None:  # torch.optim makes them, in memory of its own
        nbytes = count * assembly.layout.bytes_per_element * shard.owned.itemsize // 4
        yield _Piece(tier, "optimizer_states", nbytes, nbytes)
        return
    for _ in range(2):
        yield _paged(tier, "optimizer_states", count * MOMENT_BYTES[plan.offload_moments])
        yield _paged(tier, "optimizer_states", shard.home.form.blocks * SCALE_BYTES)


def _paged(tier: str, field: str, nbytes: int) -> _Piece:
    return _Piece(tier, field, nbytes, in_pages(nbytes))


def _on_device(states: StateBytes, shard: Shard, plan: Plan) -> StateBytes:
    """What stays of it there; below stage 2 whole gradients do."""
    if shard.parameters.lives_below:
        states = replace(states, parameters=Fraction(0))
    if shard.below:
        states = replace(states, master_weights=Fraction(0), optimizer_states=Fraction(0))
        if plan.zero >= 2:
            states = replace(states, gradients=Fraction(0))
    return states


def _parameters(nbytes: int) -> StateBytes:
    return StateBytes(Fraction(nbytes), Fraction(0), Fraction(0), Fraction(0))


def _costs(shard: Shard, assembly: Assembly, plan: Plan, ranks: int) -> BytesPerParameter:
    size = shard.flat.dtype.itemsize
    gradient = size
    if plan.microbatches_per_update > 1 and (
        not plan.reduces_each_microbatch or (ranks == 1 and not shard.below) or plan.zero >= 2
    ):
        gradient = torch.promote_types(shard.flat.dtype, torch.float32).itemsize if shard.flat.trainable else size
    states = assembly.layout.bytes_per_element * max(size, 4) // 4
    return BytesPerParameter(size, gradient, 4 if shard.master else 0, states)


def _with_sums(states: StateBytes, numel: int, shard: Shard, plan: Plan, ranks: int) -> StateBytes:
    """Under accumulation, stages 0 and 1 keep the sum of the reduced slices beside the whole gradients."""
    separate = plan.microbatches_per_update > 1 and plan.reduces_each_microbatch and plan.zero <= 1 and ranks > 1
    if not separate or not shard.flat.trainable or shard.below:
        return states
    each = torch.promote_types(shard.flat.dtype, torch.float32).itemsize
    sums = Fraction(numel * each, ranks)
    return states + StateBytes(Fraction(0), sums, Fraction(0), Fraction(0))


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
