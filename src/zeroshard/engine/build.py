"""A plan, a model and an optimizer become parts: the one place where fields of the plan choose techniques."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from zeroshard.comm.collectives import Comm
from zeroshard.comm.over_budget import begin_engine
from zeroshard.errors import PlanError
from zeroshard.memory.ledger import Arena, Category, Ledger
from zeroshard.offload.tiers import HostSlice, HostTiers, agreed_on_host
from zeroshard.offload.updaters import HostAdam, HostScratch, HostUpdater
from zeroshard.offload.updates import HostSum, HostUpdates
from zeroshard.optim import SpanOptimizer, StateLayout, Steps, deal_out, layout_of, spans_of
from zeroshard.optim.slices.updater import DeviceUpdater, LateMasters, Untrained
from zeroshard.parts.axes import Axes
from zeroshard.parts.gradients import GradientSum, Reduction
from zeroshard.parts.part import LateUpdates, OneVersion, Part, Parts, RandomNumbers
from zeroshard.parts.place import DENSE, Axis, Partial, Place, PlaceKind, Split
from zeroshard.parts.technique import Technique
from zeroshard.parts.updater import Updater
from zeroshard.parts.weights import Gatherer, Weights
from zeroshard.pipeline.stage import Stage
from zeroshard.pipeline.whole import WholeModel
from zeroshard.plan import Plan
from zeroshard.precision.cast import DTYPES, Precision, keep_in_fp32
from zeroshard.quantized.weights import take_apart
from zeroshard.rng.exact import random_numbers_of
from zeroshard.rng.rows import Rows
from zeroshard.saved.savers import Savers, SavingPlan, savers_of
from zeroshard.units import Flat, Unit, is_small
from zeroshard.units.materialise import FileValues, Initialiser, Materialiser, is_absent, seed_of
from zeroshard.validation.arguments import groups_of, refuse_split, refuse_used
from zeroshard.validation.memory import RoomChecks, raise_on_all_ranks
from zeroshard.zero import Accumulation, BufferedGradients, ByChunk, ByPass, Residency
from zeroshard.zero.gradients import GradientBuffer
from zeroshard.zero.reduce import AllReduce, BufferSum, DeviceSum, Direct, OwnSlice, Scatter
from zeroshard.zero.weights import Arrivals, Arriving, Keeper, Mapped, OnDevice, Sliced, share_memory, shared_bytes

Kinds = dict[tuple[torch.dtype, bool, PlaceKind], dict[str, nn.Parameter]]


@dataclass(slots=True)
class Assembly:
    """A model and an optimizer as a plan composes them.

    Attributes:
        parts: by unit.
        optimizer: the user's, over slices.
        gatherer: gathers sliced units.
        late: updates that run beside the steps.
        saver: stores tensors that autograd saves.
        weights: of each unit, as the gatherer has them.
        magnitudes: as `Materialiser.magnitudes`.
    """

    parts: Parts
    optimizer: SpanOptimizer
    precision: Precision
    gatherer: Gatherer
    late: LateUpdates
    saver: Savers
    weights: list[list[Weights]]
    magnitudes: Sequence[str] = ()


class StepReadings(NamedTuple):
    """Readings of the step under way.

    Attributes:
        steps: gives the number of steps taken.
        unclipped: gives the factor on the gradients of the step under way, unless they are clipped.
    """

    steps: Callable[[], int]
    unclipped: Callable[[], float]


class Chosen(NamedTuple):
    """The parameters of this rank's stage under a plan.

    Attributes:
        units: that hold them.
        groups: the optimizer group of each trained one.
        fp32: those that stay in fp32.
        on_host: numbers of the units that are updated on the host.
    """

    units: list[Unit]
    groups: dict[nn.Parameter, int]
    fp32: set[nn.Parameter]
    on_host: set[int]


class Builder:
    """Materialises a model unit by unit, with the states of each unit under the plan."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        axes: Axes,
        ledger: Ledger,
        stage: Stage | WholeModel,
        progress: StepReadings,
    ) -> None:
        self._stage, self._progress = stage, progress
        self._axes, comm = axes, axes.dense.slices.comm
        self._model, self._plan, self._comm, self._ledger = model, plan, comm, ledger
        self._on_host: set[int] = set()  # numbers of units that are updated there
        self._precision = Precision.named(plan.precision)
        self._cuts: dict[nn.Parameter, Split | Partial] = {}
        self._arenas = {comm: Arena(ledger, comm.buffer)}
        self._lower: HostTiers | None = None
        self._files = LateUpdates()
        self._whole: Callable[[Flat, Comm, Ledger, bool], Weights] = Weights
        if plan.overlap_gather:
            self._files = arrivals = Arrivals()
            self._whole = partial(Arriving, arrivals=arrivals)

    def build(
        self,
        torch_optimizer: torch.optim.Optimizer,
        initialise: Initialiser | None,
        techniques: Sequence[Technique] = (),
    ) -> Assembly:
        """Cut the model into flats, give them values, and point the optimizer at the slices that this rank updates.

        Raises:
            PlanError, ModelError, OptimizerError: plan, model or optimizer do not fit together.
        """
        begin_engine(self._axes.world.mesh)
        refuse_used(torch_optimizer)
        layout = layout_of(torch_optimizer)
        materialiser = Materialiser(self._model, self._plan.seed, initialise, self._stage.skipped_modules)
        self._from_files = isinstance(initialise, FileValues)
        for technique in techniques:
            self._cut(technique, torch_optimizer, materialiser)
        refuse_split(torch_optimizer, layout, self._cuts)
        groups = groups_of(torch_optimizer, self._model)
        fp32 = keep_in_fp32(self._model, self._plan.fp32_modules, self._precision)
        self._spans = SpanOptimizer(torch_optimizer, self._ledger, layout)
        units = self._stage.units
        self._on_host = self._offload(units, torch_optimizer)
        chosen = Chosen(units, groups, fp32, self._on_host)
        kinds = [self._kinds(unit, chosen) for unit in units]
        self._place(chosen, kinds, layout)
        parts = self._materialise(chosen, kinds, materialiser)
        return replace(self._equip(units, parts, techniques), magnitudes=materialiser.magnitudes)

    def _place(self, chosen: Chosen, kinds: list[Kinds], layout: StateLayout) -> None:
        """Check that the states fit, map memory that ranks share, and assign whole parameters to owners."""
        units, precision = chosen.units, self._precision
        checks = RoomChecks(self._plan, self._comm.mesh, self._ledger, self._stage, layout)
        itemsize = lambda p: precision.dtype_of(p, p in chosen.fp32).itemsize  # noqa: E731
        check = partial(checks.all, units, chosen.groups, itemsize, chosen.on_host, self._lower)
        raise_on_all_ranks(self._axes.world, check)
        if not (self._plan.transport == "network" or self._plan.streams or self._plan.offloading.parameters):
            nbytes, demanded = partial(self._shared_bytes, units), self._plan.transport == "shared"
            share_memory(self._comm.mesh, self._slicing, self._axes.world, nbytes, demanded)
        if self._lower is not None:
            gathers = all(self._gathers(axis.comm) for axis in self._slicing)
            unclipped = self._progress.unclipped
            self._files = HostUpdates(self._lower, self._spans, self._arena, unclipped, len(units), gathers)
        if layout.whole is not None:
            apart = (self._residency.slice_gradients, self._residency.slice_parameters, bool(precision.compute))
            owned = 4 * sum(apart) if self._residency.slice_states else None
            optimizer = self._spans.optimizer
            self._spans.owners = deal_out(kinds, self._axes, chosen.groups, optimizer, owned, self._cuts)

    def _materialise(self, chosen: Chosen, kinds: list[Kinds], materialiser: Materialiser) -> list[list[Part]]:
        """Materialise this rank's parameters and buffers, unit by unit; returns its parts."""
        parts = list[list[Part]]()
        for unit, of_unit in zip(chosen.units, kinds, strict=True):
            for owner in unit.owners:
                materialiser.materialise(owner)
            flats, on_host = self._flats(unit, of_unit, materialiser), unit.number in chosen.on_host
            parts.append([self._part(flat, place, own, chosen.groups, on_host) for flat, place, own in flats])
        for module in self._model.modules():
            materialiser.materialise(module)  # buffers of modules without parameters
        dtype_of = lambda p: self._precision.dtype_of(p, p in chosen.fp32)  # noqa: E731
        self._stage.release_other_stages(chosen.units, materialiser.real, dtype_of, self._ledger)
        take_apart(self._model)  # quantised weights refer to the real parameters now
        self._place_buffers(self._stage.skipped_modules)
        self._comm.agree(b"", "weights are in place")
        self._axes.begin()
        return parts

    def _equip(self, units: list[Unit], parts: list[list[Part]], techniques: Sequence[Technique]) -> Assembly:
        """Point the optimizer at the slices; make gatherer, scratch, savers and random numbers."""
        self._spans.install_spans()
        self._files.spans_installed()
        weights = [[part.weights for part in of_unit] for of_unit in parts]
        gatherer = self._gatherer(units, weights)
        messages = self._arena if self._comm.shared is None else Arena(self._ledger, self._axes.world.buffer)
        raise_on_all_ranks(self._axes.world, self._room_for_states)
        return Assembly(
            Parts(units, parts, self._arena, messages, gatherer, self._random_numbers(techniques)),
            self._spans, self._precision, gatherer, self._files, self._savers(), weights,
        )  # fmt: skip

    def _savers(self) -> Savers:
        policy, tier = self._plan.saving, self._lower if self._plan.offloading.activations else None
        return savers_of(SavingPlan(policy.compress, tier, policy.copies_ahead, self._key), self._model, self._ledger)

    def _room_for_states(self) -> None:
        """Refuse states that do not fit before the first step, in which torch makes them."""
        more = self._spans.state_bytes() - self._ledger.account(Category.OPTIMIZER_STATES).current
        self._ledger.check_room(Category.OPTIMIZER_STATES, more, "the first step")

    def _cut(self, technique: Technique, optimizer: torch.optim.Optimizer, materialiser: Materialiser) -> None:
        """Replace parameters by this rank's parts, in the model and in the optimizer."""
        materialiser.uncut.keep(self._model)
        cuts, new = self._stage.cut(technique, self._axes.new)
        parts = {part: cut.part_of for part, cut in cuts.items() if isinstance(cut, Split)}
        materialiser.uncut.cut(self._model, parts)
        self._cuts |= cuts
        for group in optimizer.param_groups:
            group["params"] = [new.get(parameter, parameter) for parameter in group["params"]]

    def _offload(self, units: list[Unit], optimizer: torch.optim.Optimizer) -> set[int]:
        """Open the host tiers, if the plan uses them; returns the numbers of the units that are updated there."""
        policy = self._plan.offloading
        if not self._plan.offloading.kinds:
            return set()
        ranks = max(len(group) for axis in self._slicing for group in axis.groups)  # so that all ranks refuse
        if policy.optimizer and not self._residency.slice_states and ranks > 1:
            raise PlanError(
                f"offload='optimizer' and zero=0 do not combine on {ranks} ranks: each would update all the states on "
                f"the same hosts. Use zero=1, 2 or 3; or one rank."
            )
        self._lower = HostTiers(policy, self._comm.mesh, self._ledger, optimizer, self._plan.timeout)
        return agreed_on_host(units, policy.fraction, self._axes.alike) if policy.optimizer else set()

    def _gatherer(self, units: list[Unit], weights: list[list[Weights]]) -> Gatherer:
        if not any(each.sliced for of_unit in weights for each in of_unit):
            return Gatherer()
        return ByChunk(units, weights) if self._plan.pipelined else ByPass(units, weights, self._comm)

    def _key(self) -> int:
        """Key of this rank's random numbers in the current step that belong to no layer."""
        return seed_of(self._plan.seed, "step", self._progress.steps(), "rank", self._axes.world.mesh.rank)

    def _random_numbers(self, techniques: Sequence[Technique]) -> RandomNumbers:
        """Torch's own streams, or numbers keyed by parameter, row and step."""
        axes, plan = self._axes, self._plan
        rows = Rows(axes.world, axes.data_rank, axes.data_ranks, plan.microbatches, self._progress.steps)
        zones = next((each.zones for each in techniques if each.zones is not None), None)
        return random_numbers_of(self._model, plan.rng == "exact", plan.seed, rows, zones)

    @property
    def _residency(self) -> Residency:
        return Residency.of_stage(self._plan.zero)

    @property
    def _slicing(self) -> list[Axis]:
        """The axes among whose ranks flats are sliced, each group of ranks once."""
        kinds = dict.fromkeys([DENSE, *map(PlaceKind.of, self._cuts.values())])
        found: dict[Comm, Axis] = {}
        for kind in kinds:
            axis = self._axes.place(kind).slices
            found.setdefault(axis.comm, axis)
        return list(found.values())

    def _shared_bytes(self, units: list[Unit], axis: Axis) -> int:
        """Bytes that the ranks of an axis share."""
        comm_of = {kind: self._axes.place(kind).slices.comm for kind in map(PlaceKind.of, [None, *self._cuts.values()])}
        kinds = [[(p.numel(), PlaceKind.of(self._cuts.get(p))) for p in u.parameters.values()] for u in units]
        mine = [[numel for numel, kind in of_unit if comm_of[kind] is axis.comm] for of_unit in kinds]
        by_unit = self._plan.zero >= 2 and self._plan.reduces_each_microbatch
        return shared_bytes(self._plan.zero, by_unit, axis.size, list(map(sum, mine)))

    def _kinds(self, unit: Unit, chosen: Chosen) -> Kinds:
        """A unit's parameters by (dtype, trainable, kind of their place).

        Small ones come last, grouped by optimizer group: in one order on all ranks, whose parts may be uneven.
        """

        def order(item: tuple[str, nn.Parameter]) -> tuple[bool, int]:
            cut, numel = self._cuts.get(item[1]), item[1].numel()
            if isinstance(cut, Split):
                numel = math.prod(cut.shape) // self._axes.new[cut.axis].size
            return is_small(numel), chosen.groups.get(item[1], -1)

        kinds: Kinds = {}
        for name, parameter in sorted(unit.parameters.items(), key=order):
            key = (
                self._precision.dtype_of(parameter, parameter in chosen.fp32),
                parameter in chosen.groups and parameter.requires_grad,
                PlaceKind.of(self._cuts.get(parameter)),
            )
            kinds.setdefault(key, {})[name] = parameter
        return kinds

    def _flats(
        self, unit: Unit, kinds: Kinds, materialiser: Materialiser
    ) -> Iterator[tuple[Flat, Place, dict[str, nn.Parameter]]]:
        """Each flat of a unit with its place, and its parameters as they were before they were real, by name."""
        for (dtype, trainable, kind), members in kinds.items():
            place = self._axes.place(kind)
            for own, bounds, label in self._spans.owners.flats(members, place.slices.size):
                real = {name: materialiser.real(parameter) for name, parameter in own.items()}
                called = ", ".join(filter(None, (str(kind), label)))
                yield Flat(unit, real, dtype, trainable, place.slices.size, called, bounds), place, own

    def _part(
        self,
        flat: Flat,
        place: Place,
        members: dict[str, nn.Parameter],
        groups: dict[nn.Parameter, int],
        on_host: bool,
        values: torch.Tensor | None = None,
    ) -> Part:
        """Give a flat its buffers and values.

        Args:
            members: its parameters as they were before they were real, by name.
            groups: the optimizer group of each of these.
            on_host: whether it is updated on the host, if it is trained.
            values: of all ranks [N*S]; by default initial ones.
        """
        on_meta = [parameter.is_meta for parameter in members.values()]
        keyed = any(on_meta)  # by name; else values are rank 0's
        numbers = [groups.get(parameter, -1) for parameter in members.values()]
        splits = {name: cut for name, p in members.items() if isinstance(cut := self._cuts.get(p), Split)}
        weights, index = self._weights(flat, place), flat.index
        start, stop = index.interval(weights.rank) if self._residency.slice_states else (0, index.padded_numel)
        if values is not None:
            weights.load(values)
        elif self._from_files and all(on_meta):
            values = torch.zeros((), dtype=flat.precise_dtype()).expand(index.padded_numel)  # buffers are zero already
            weights.load(None)
        else:
            values = self._load(weights, place, keyed, exact=flat.trainable and (flat.dtype.itemsize < 4 or on_host))
        if not flat.trainable:
            values, first = (weights.own, start) if weights.sliced else (weights.full, 0)
            untrained = Untrained(weights, values, first)
            return Part(flat, place, splits, weights, None, untrained, OneVersion(weights), flat.edits)
        accumulation = self._accumulation()
        spans = partial(spans_of, self._spans, members, splits, self._axes.new, place.slices, flat.label, self._arena)
        if on_host:
            total = self._host_sum(flat, place, accumulation)
            updater = self._host_updater(weights, values[start:stop], start, numbers, total, spans)
            gradients = self._gradients(flat, place, accumulation, total)
        else:
            updater = self._updater(weights, values[start:stop], start, numbers, spans(self._arena))
            gradients = self._gradients(flat, place, accumulation, None)
        return Part(flat, place, splits, weights, gradients, updater, OneVersion(weights), flat.edits)

    def replacement(self, flat: Flat, part: Part, groups: Mapping[str, int], values: torch.Tensor) -> Part:
        """A part of parameters that another part has had, with these values [N*S].

        Args:
            groups: the optimizer groups of those that are trained, by name.
        """
        own = dict(zip((entry.name for entry in flat.index.entries), flat.parameters, strict=True))
        self._cuts |= {own[name]: split for name, split in part.splits.items() if name in own}
        numbers = {own[name]: group for name, group in groups.items() if name in own}
        return self._part(flat, part.place, own, numbers, flat.unit.number in self._on_host, values)

    def _weights(self, flat: Flat, place: Place) -> Weights:
        """Whole, shared or sliced parameters."""
        residency, comm, ledger = self._residency, place.slices.comm, self._ledger
        if residency.slice_states and comm.shared is not None:
            return Mapped(flat, comm, ledger, publishes=True)
        keeper: Keeper | None = self._lower if self._lower is not None and self._lower.policy.parameters else None
        if self._gathers(comm):
            return Sliced(flat, comm, ledger, keeper or OnDevice(comm.mesh.device, ledger))
        return self._whole(flat, comm, ledger, residency.publish_after_update)

    def _load(self, weights: Weights, place: Place, keyed: bool, exact: bool) -> torch.Tensor:
        """Set the parameters to their initial values; these [N*S], apart from the parameters if `exact`."""
        flat, dtype = weights.flat, weights.flat.precise_dtype()
        if exact or weights.sliced or dtype != flat.dtype:
            values = torch.zeros(flat.index.padded_numel, dtype=dtype, device=self._comm.mesh.device)
            self._fill(values, flat, keyed, place.owners)
            weights.load(values)
            return values
        if weights.copied:
            self._fill(weights.full, flat, keyed, place.owners)
        elif weights.rank == 0:
            self._fill(weights.full, flat, keyed, place.copies)
        flat.attach()
        return weights.full

    def _updater(self, weights: Weights, values: torch.Tensor, start: int, groups: list[int], spans: Steps) -> Updater:
        """The user's optimizer over the parameters, or over fp32 master weights."""
        if weights.flat.dtype.itemsize >= 4:
            own = weights.own if self._residency.slice_states else weights.full
            return DeviceUpdater(weights, own, start, spans, groups, self._arena)
        label, device = f"master weights {weights.flat.label}", self._comm.mesh.device
        padding = weights.flat.index.padding_in(start, start + values.numel())
        masters = self._ledger.empty(values.numel(), torch.float32, device, Category.MASTER_WEIGHTS, label, padding)
        if not is_absent(values):
            masters.copy_(values)
        return LateMasters(weights, masters, start, spans, groups, self._arena)

    def _gathers(self, comm: Comm) -> bool:
        """Whether units sliced among these ranks are gathered for use; those that ranks share are there for all."""
        several = comm.mesh.ranks > 1 or self._plan.offloading.parameters or self._plan.strict
        return self._residency.slice_parameters and several and comm.shared is None

    def _host_updater(
        self, weights: Weights, values: torch.Tensor, start: int, groups: list[int], total: HostSum,
        spans: Callable[[HostScratch], Steps],
    ) -> Updater:  # fmt: skip
        """The host's own Adam where it replaces the user's optimizer, else that optimizer on the host."""
        lower, updates, flat = self._lower, self._files, weights.flat
        assert lower is not None and isinstance(updates, HostUpdates)
        padding, unit = flat.index.padding_in(start, start + values.numel()), flat.unit.number
        if lower.adam and flat.dtype.itemsize <= 4:
            host_slice: HostSlice = lower.slice_of(flat, values.numel(), padding)
            with host_slice.fetched(writes=True) as pages:
                pages.master.copy_(values)
                return HostAdam(weights, start, self._spans, groups, updates, unit, host_slice, total)
        dtype, label = flat.precise_dtype(torch.float32), f"master weights {flat.label}"
        masters = lower.host.slab(values.numel(), dtype, Category.MASTER_WEIGHTS, label, padding)
        masters.copy_(values)
        return HostUpdater(weights, masters, start, spans(HostScratch(lower.host)), groups, updates, unit)

    def _host_sum(self, flat: Flat, place: Place, accumulation: Accumulation) -> HostSum:
        """The sum of the gradients of a slice that is updated on the host."""
        assert self._lower is not None
        several = accumulation.local or accumulation.reduced
        dtype = flat.precise_dtype(torch.float32) if several else flat.dtype
        lower, rank = self._lower, place.slices.rank
        return HostSum(lower.link, lower.host, self._arena, flat, dtype, rank, lower.policy.delayed_update)

    def _gradients(
        self, flat: Flat, place: Place, accumulation: Accumulation, total: GradientSum | None
    ) -> BufferedGradients:
        """Buffer, sum and reduction of a flat's gradients.

        Args:
            total: where they add up, if not on the device.
        """
        comm, ledger, residency = place.slices.comm, self._ledger, self._residency
        arena = self._arena_of(comm)
        on_host = total is not None
        alone = comm.mesh.ranks == 1 and place.divisor == 1 and not on_host
        sums = torch.promote_types(flat.dtype, torch.float32)
        locally = accumulation.local or (accumulation.reduced and alone)
        kept = not residency.slice_gradients or alone
        buffer = GradientBuffer(flat, comm, ledger, arena, sums if locally else flat.dtype, kept)
        opens = kept and buffer.dtype == flat.dtype and (alone or not accumulation.reduced) and self._plan.pipelined
        reduction: Reduction = OwnSlice()
        if total is None and alone:
            total = BufferSum(buffer)
        elif total is None:
            apart = not kept or accumulation.reduced
            several = accumulation.reduced or accumulation.local
            total = DeviceSum(buffer, flat, comm, ledger, (sums if several else flat.dtype) if apart else None)
        if comm.mesh.ranks > 1:
            kind = Scatter if residency.slice_states else AllReduce
            wire = None if flat.dtype.is_complex else accumulation.wire_dtype  # the dtypes of plans are real
            reduction = kind(flat, comm, arena, buffer, total, wire, place.divisor)
        elif not alone:
            reduction = Direct(buffer, total, place.divisor)
        interval = flat.index.interval(comm.mesh.rank)
        return BufferedGradients(flat, buffer, total, reduction, interval, opens, batches=not on_host)

    @property
    def _arena(self) -> Arena:
        return self._arenas[self._comm]

    def _arena_of(self, comm: Comm) -> Arena:
        """Scratch that the ranks can read, if they share memory."""
        kept = self._comm if comm.shared is None else comm
        return self._arenas.setdefault(kept, Arena(self._ledger, kept.buffer))

    def _fill(self, values: torch.Tensor, flat: Flat, keyed: bool, axis: Axis | None) -> None:
        """Set `values` [padded] to the initial ones, as precise as the user's model holds them: rank 0's of an axis."""
        for number, parameter in enumerate(flat.parameters):
            flat.view(values, number).copy_(parameter.detach())
        if not keyed and axis is not None:
            axis.comm.broadcast(values, f"initial weights {flat.label}")

    def _accumulation(self) -> Accumulation:
        plan = self._plan
        wire = DTYPES[plan.reduce_dtype] if plan.reduce_dtype else None
        return Accumulation(wire, local=plan.adds_up_locally, reduced=plan.reductions > 1)

    def _place_buffers(self, skip: set[nn.Module]) -> None:
        """Bring buffers to the device; those of modules that run on other stages alone belong there."""
        for module in self._model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if module in skip:
                    module._buffers[name] = torch.empty_like(buffer, device="meta")
                    continue
                module._buffers[name] = placed = buffer.to(self._comm.mesh.device).contiguous()
                self._axes.alike.broadcast(placed, f"buffer {name}")
                self._ledger.take(Category.BUFFERS, placed.nbytes, f"buffer {name}")
                self._ledger.remember(placed)
