"""What hangs on each flat buffer, put together from a model, an optimizer and a plan."""

import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from zeroshard.comm import Comm
from zeroshard.engine.below import Below, units_below
from zeroshard.engine.fitting import Fitting
from zeroshard.engine.groups import Groups
from zeroshard.engine.refused import check_machine
from zeroshard.engine.stage import Stage, Whole
from zeroshard.errors import BudgetExceeded, OptimizerError, PlanError
from zeroshard.initialise import Initialiser, Materialiser
from zeroshard.ledger import Arena, Category, Ledger
from zeroshard.offload.gradients import HostGradients
from zeroshard.offload.slices import HostSlice
from zeroshard.optim import SpanOptimizer, StateLayout, check_elementwise
from zeroshard.pipeline.borrowed import Borrowed
from zeroshard.pipeline.versions import Versions
from zeroshard.plan import Plan
from zeroshard.precision import DTYPES, Precision, keep_in_fp32
from zeroshard.schedule import Loan
from zeroshard.units import Flat, Unit, is_small
from zeroshard.zero import Accumulation, Gatherer, GradientShards, ParameterShards, Residency
from zeroshard.zero.formulas import BytesPerParameter

OptimizerLike = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(slots=True)
class Shard:
    """One flat buffer with all that ZeRO, precision and the optimizer hang on it.

    Attributes:
        owned: what this rank updates, [S], or [N*S] at stage 0: the parameters themselves or their fp32 masters.
        start: the place of `owned` in the flat.
        spans: the number of the flat's spans in the optimizer; -1 when frozen.
        versions: older weights that a pipeline still needs; None where there is one version.
        edits: how often the user has written into the parameters where it was taken over.
        below: whether `owned`, gradients and states are below the device.
        home: where they are, if the host's own Adam updates them; None where the user's optimizer does.
    """

    flat: Flat
    parameters: ParameterShards
    gradients: GradientShards | None
    owned: torch.Tensor
    master: bool
    start: int
    spans: int = -1
    versions: Versions | None = None
    edits: int = 0
    below: bool = False
    home: HostSlice | None = None

    @property
    def target(self) -> torch.Tensor:
        """The parameters that belong to `owned`, in the dtype of computation."""
        whole = self.owned.numel() == self.flat.index.padded_numel
        return self.parameters.full if whole and not self.parameters.sliced else self.parameters.own

    @property
    def weights(self) -> list[torch.Tensor]:
        """The buffers of all versions of the parameters."""
        return [self.parameters.full] if self.versions is None else self.versions.buffers

    def keep_what_was_written(self) -> None:
        """Take over what the user wrote into the gathered parameters: into this rank's slice and master weights."""
        self.parameters.end_edit()
        if self.parameters.sliced:
            start, stop = self.flat.index.interval(self.parameters.rank)
            self.parameters.own.copy_(self.parameters.full[start:stop])
        self.edits = self.flat.edits
        if self.master:
            with nullcontext() if self.home is None else self.home.fetched(writes=True):
                target = self.target.to(self.owned.device)
                written = target != self.owned.to(target.dtype)
                self.owned[written] = target[written].to(self.owned.dtype)


@dataclass(slots=True)
class Assembly:
    """A model cut into units, with the shards of each unit."""

    units: list[Unit]
    shards: list[list[Shard]]
    optimizer: SpanOptimizer
    layout: StateLayout
    precision: Precision
    arena: Arena
    borrowed: dict[Loan, Borrowed] = field(default_factory=dict)
    below: Below | None = None

    @property
    def all_shards(self) -> list[Shard]:
        """All shards in the fixed order of units."""
        return [shard for shards in self.shards for shard in shards]

    def gatherer(self, comm: Comm) -> Gatherer | None:
        """What brings sliced units to this rank, if there are any."""
        parameters = [[shard.parameters for shard in shards] for shards in self.shards]
        sliced = any(shard.parameters.sliced for shard in self.all_shards)
        return Gatherer(self.units, parameters, comm) if sliced else None


class Assembler:
    """Builds an `Assembly`: materialises unit by unit, and keeps of each unit what the plan says."""

    def __init__(self, model: nn.Module, plan: Plan, groups: Groups, ledger: Ledger, stage: Stage | Whole) -> None:
        self._stage = stage
        self._groups, comm = groups, groups.slices
        self._model, self._plan, self._comm, self._ledger = model, plan, comm, ledger
        self._residency = Residency.of_stage(plan.zero)
        self._precision = Precision.named(plan.precision)
        self._arena = Arena(ledger, comm.buffer)

    def assemble(self, torch_optimizer: torch.optim.Optimizer, initialise: Initialiser | None) -> Assembly:
        """Cut the model into flats, give them values, and point the optimizer at what this rank updates.

        Raises:
            PlanError, ModelError, OptimizerError: what does not fit together.
        """
        layout = check_elementwise(torch_optimizer)
        _refuse_used(torch_optimizer)
        groups = _group_of(torch_optimizer, self._model)
        kept = keep_in_fp32(self._model, self._plan.fp32_modules, self._precision)
        units, skip = self._stage.units, self._stage.skipped_modules
        materialiser = Materialiser(self._model, self._plan.seed, initialise, skip)
        self._below = Below(self._plan, self._comm.mesh, self._ledger, torch_optimizer) if self._plan.offloads else None
        going = units_below(units, self._plan.offload_share) if "optimizer" in self._plan.offloads else set()
        self._check_budget(units, kept, groups, layout)
        self._check_machine(units, groups, going, layout)
        if self._below is not None:
            self._below.check_room(units, going, self._precision.compute, layout.bytes_per_element)
        self._share_memory(units)
        spans = SpanOptimizer(torch_optimizer, self._ledger)
        shards: list[list[Shard]] = []
        for unit in units:
            kinds = self._kinds(unit, groups, kept)
            for owner in unit.owners:
                materialiser.materialise(owner)
            shards.append([])
            for (dtype, trainable), members in kinds.items():
                real = {name: materialiser.real(parameter) for name, parameter in members.items()}
                flat = Flat(unit, real, dtype, trainable, self._comm.mesh.ranks)
                keyed = any(parameter.is_meta for parameter in members.values())
                shard = self._shard(flat, keyed, unit.number in going)
                if trainable:
                    numbers = [groups[parameter] for parameter in members.values()]
                    tier = "device" if not shard.below else "host" if shard.home is None else None
                    shard.spans = spans.add(flat.index, numbers, shard.owned, shard.start, tier)
                shards[-1].append(shard)
        for module in self._model.modules():
            materialiser.materialise(module)  # buffers of modules without parameters
        borrowed = self._stage.let_go(
            units, materialiser.real, lambda p: self._precision.dtype_of(p, p in kept), self._ledger
        )
        self._place_buffers(skip)
        self._comm.agree(b"", "weights are in place")
        spans.adopt()
        states = sum(_state_nbytes(shard, layout) for unit in shards for shard in unit)
        made = self._ledger.account(Category.OPTIMIZER_STATES).current
        self._ledger.check_room(Category.OPTIMIZER_STATES, states - made, "the first step")  # in which torch makes them
        return Assembly(units, shards, spans, layout, self._precision, self._arena, borrowed, self._below)

    def _check_budget(
        self, units: list[Unit], kept: set[nn.Parameter], groups: dict[nn.Parameter, int], layout: StateLayout
    ) -> None:
        """Refuse a budget that the weights alone exceed; and tell the ledger the way out of what it refuses later.

        Raises:
            BudgetExceeded: with the least that they need.
        """
        budget, ranks = self._plan.device_budget, self._comm.mesh.ranks
        if budget is None:
            return
        sizes = [
            sum(p.numel() * self._precision.dtype_of(p, p in kept).itemsize for p in unit.parameters.values())
            for unit in units
        ]
        if self._stage.pipeline is None:
            numel = sum(p.numel() for unit in units for p in unit.parameters.values())
            trained = sum(p.numel() for unit in units for p in unit.parameters.values() if p in groups)
            width = sum(sizes) // max(1, numel)
            each = BytesPerParameter(width, width, 4 if width < 4 else 0, layout.bytes_per_element)
            slices = self._comm.mesh.ranks
            fitting = Fitting(self._plan, slices, trained, numel - trained, tuple(sizes), each)
            self._ledger.way_out = fitting.way_out
        gathered = sum(sorted(sizes[:-1])[-2:]) + sizes[-1]  # two units beside the root
        needed, what = sum(sizes), "the weights"
        if self._residency.slice_parameters and (ranks > 1 or "parameters" in self._plan.offloads):
            slices = 0 if "parameters" in self._plan.offloads else sum(sizes) // ranks
            needed, what = slices + gathered, "two units at a time and the root"
        if needed > budget:
            way_out = "Set it to more than that, with gradients and activations on top, or use more stages."
            if self._ledger.way_out is not None:
                way_out = self._ledger.way_out(needed, budget)
            raise BudgetExceeded(f"device_memory is {budget:,} bytes, and {what} take {needed:,}.", way_out)

    def _check_machine(
        self, units: list[Unit], groups: dict[nn.Parameter, int], going: set[int], layout: StateLayout
    ) -> None:
        """Refuse optimizer states that the machine cannot hold; some kernels would end the process in the first step.

        Raises:
            BudgetExceeded: with the limit that is met.
        """
        stay = [unit for unit in units if unit.number not in going]
        numel = sum(p.numel() for unit in stay for p in unit.parameters.values() if p in groups)
        slices = self._comm.mesh.ranks if self._plan.zero else 1
        check_machine(self._comm.mesh, numel * layout.bytes_per_element // slices, "The optimizer's states")

    def _share_memory(self, units: list[Unit]) -> None:
        """Where the plan lets them and the machine can, let the ranks share memory."""
        plan, mesh = self._plan, self._comm.mesh
        if plan.transport == "network" or plan.pipelined or mesh.ranks == 1 or "parameters" in plan.offloads:
            return
        sizes = [sum(p.numel() for p in unit.parameters.values()) for unit in units]
        whole, gradients = sum(sizes), sum(sizes) if plan.zero <= 1 else 4 * max(sizes)
        nbytes = 4 * ((whole if plan.zero else 0) + mesh.ranks * gradients)
        reason: str | None = "the ranks do not compute on CPUs"
        if mesh.device.type == "cpu":
            reason = self._comm.share(nbytes)
            reasons = self._groups.world.agree_on(reason, "shared memory")  # groups that differed would wait for ever
            reason = next((found for found in reasons if found), None)
            if reason is not None:
                self._comm.shared = None
        if reason is not None and plan.transport == "shared":
            raise PlanError(f"transport='shared' cannot be: {reason}. Or leave transport='auto'.")

    def _kinds(
        self, unit: Unit, groups: dict[nn.Parameter, int], kept: set[nn.Parameter]
    ) -> dict[tuple[torch.dtype, bool], dict[str, nn.Parameter]]:
        """A unit's parameters by (dtype, trainable), small ones last, those of one optimizer group side by side."""
        kinds: dict[tuple[torch.dtype, bool], dict[str, nn.Parameter]] = {}
        by_group = sorted(unit.parameters.items(), key=lambda item: (is_small(item[1]), groups.get(item[1], -1)))
        for name, parameter in by_group:
            key = (
                self._precision.dtype_of(parameter, parameter in kept),
                parameter in groups and parameter.requires_grad,
            )
            kinds.setdefault(key, {})[name] = parameter
        return kinds

    def _shard(self, flat: Flat, keyed: bool, below: bool) -> Shard:
        """Give a flat its buffers and values; values that are not keyed by name are rank 0's."""
        index, rank = flat.index, self._comm.mesh.rank
        streamed = self._below if "parameters" in self._plan.offloads else None
        parameters = ParameterShards(flat, self._residency, self._comm, self._ledger, streamed)
        below = below and flat.trainable
        start, stop = index.interval(rank) if self._residency.slice_states else (0, index.padded_numel)
        has_master = flat.trainable and (flat.dtype.itemsize < 4 or below)
        if has_master or parameters.sliced or _precise(flat) != flat.dtype:
            values = torch.zeros(index.padded_numel, dtype=_precise(flat), device=self._comm.mesh.device)
            self._fill(values, flat, keyed, self._groups.alike)
            parameters.load(values)
        else:
            values = parameters.full
            if not parameters.common or rank == 0:
                self._fill(values, flat, keyed, self._groups.replicas if parameters.common else self._groups.alike)
            flat.attach()
        owned = parameters.own if self._residency.slice_states else parameters.full
        padding, home = index.padding_in(start, stop), None
        label, device = f"master weights {flat.label}", self._comm.mesh.device
        if below and self._below is not None and self._below.adam and flat.dtype.itemsize <= 4:
            home = self._below.slice_of(flat, stop - start, padding)
            with home.fetched(writes=True) as pages:
                owned = pages.master.copy_(values[start:stop])
        elif below and self._below is not None:
            dtype, category = _precise(flat, torch.float32), Category.MASTER_WEIGHTS
            owned = self._below.host.slab(stop - start, dtype, category, label, padding)
            owned.copy_(values[start:stop])
        elif has_master:
            owned = self._ledger.empty(stop - start, torch.float32, device, Category.MASTER_WEIGHTS, label, padding)
            owned.copy_(values[start:stop])
        gradients = None
        if flat.trainable:
            sums = self._accumulation()
            parts = (self._residency, self._comm, self._ledger, self._arena, sums)
            sink = self._sink(flat, stop - start, sums) if below else None
            gradients = GradientShards(flat, *parts, self._groups.replicas, sink)
        return Shard(flat, parameters, gradients, owned, has_master, start, edits=flat.edits, below=below, home=home)

    def _sink(self, flat: Flat, numel: int, sums: Accumulation) -> HostGradients:
        """Where the gradients of a slice [numel] go."""
        assert self._below is not None
        dtype = _precise(flat, torch.float32) if sums.local or sums.reduced else flat.dtype
        padding = flat.index.padding_in(*flat.index.interval(self._comm.mesh.rank))
        return HostGradients(*self._below.parts, numel, dtype, flat.label, padding, self._plan.delayed_update)

    def _fill(self, values: torch.Tensor, flat: Flat, keyed: bool, comm: Comm | None) -> None:
        """Set `values` [padded] to the initial ones, as precise as the user's model holds them: rank 0's of `comm`."""
        for number, parameter in enumerate(flat.parameters):
            flat.view(values, number).copy_(parameter.detach())
        if not keyed and comm is not None:
            comm.broadcast(values, f"initial weights {flat.label}")

    def _accumulation(self) -> Accumulation:
        several, each = self._plan.microbatches_per_update > 1, self._plan.reduces_each_microbatch
        wire = DTYPES[self._plan.reduce_dtype] if self._plan.reduce_dtype else None
        return Accumulation(wire, local=several and not each, reduced=several and each)

    def _place_buffers(self, skip: set[nn.Module]) -> None:
        """Bring buffers to the device; those of modules that run on other stages alone belong there."""
        for module in self._model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if module in skip:
                    module._buffers[name] = torch.empty_like(buffer, device="meta")
                    continue
                module._buffers[name] = placed = buffer.to(self._comm.mesh.device).contiguous()
                self._groups.alike.broadcast(placed, f"buffer {name}")
                self._ledger.take(Category.BUFFERS, placed.nbytes, f"buffer {name}")


def _state_nbytes(shard: Shard, layout: StateLayout) -> int:
    """Bytes of optimizer states that the first step makes for a shard."""
    if not shard.flat.trainable or shard.below:
        return 0
    return shard.owned.numel() * layout.bytes_per_element * shard.owned.itemsize // 4


def _precise(flat: Flat, least: torch.dtype | None = None) -> torch.dtype:
    """The widest dtype of a flat and of the user's parameters in it, and of `least`."""
    dtype = flat.dtype if least is None else torch.promote_types(flat.dtype, least)
    for parameter in flat.parameters:
        dtype = torch.promote_types(dtype, parameter.dtype)
    return dtype


def _refuse_used(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        if "momentum_buffer" in state or not bool(torch.as_tensor(state.get("step", 0)) == 0):
            raise OptimizerError(
                f"The {type(optimizer).__name__} has already taken steps; its states belong to whole tensors. Give "
                f"the engine a new "
                "optimizer, and load a zeroshard checkpoint to go on from an earlier run."
            )


def _group_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[nn.Parameter, int]:
    """The optimizer group of every parameter; trainable ones that are in none are frozen, with a warning."""
    groups = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    names = {parameter: name for name, parameter in model.named_parameters()}
    foreign = [p for p in groups if p not in names]
    if foreign:
        raise OptimizerError(
            f"The optimizer holds {len(foreign)} parameters that are not in the model (the first has shape "
            f"{tuple(foreign[0].shape)}). "
            "Make it from this model's parameters()."
        )
    left_out = [p for p in names if p.requires_grad and p not in groups]
    if left_out:
        warnings.warn(
            f"{len(left_out)} parameters require gradients but are in no optimizer group (the first is "
            f"{names[left_out[0]]!r}); "
            "they are frozen. Put them into the optimizer to train them.",
            stacklevel=5,
        )
        for parameter in left_out:
            parameter.requires_grad_(False)
    return groups
