"""The stage of a rank: its layers, the weights that it shares with other stages, and its replicas.

A model that is not cut has the stage `pipeline.whole.WholeModel`.
"""

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import Mesh, part_of
from zeroshard.errors import ModelError, PlanError
from zeroshard.memory.ledger import Category, Ledger
from zeroshard.parts.place import Axis
from zeroshard.parts.planned import Planned
from zeroshard.parts.technique import Technique
from zeroshard.pipeline.cut.chain import Chain
from zeroshard.pipeline.cut.layers import Layer
from zeroshard.pipeline.partition.balance import balance
from zeroshard.pipeline.partition.measure import REPEATS, measure
from zeroshard.pipeline.policy import Cut
from zeroshard.pipeline.refusals import refuse_ignored, refuse_loans, refuse_shared_buffers
from zeroshard.pipeline.run.borrowed import Borrowed
from zeroshard.pipeline.run.deferred import Deferral
from zeroshard.pipeline.run.scattered import Scattered
from zeroshard.pipeline.whole import DtypeOf, Replaced, WholeModel, planned_ignored, replaced
from zeroshard.schedule import Action, Kind, Loan, PipelineSchedule, verify
from zeroshard.schedule.orders import warm_up
from zeroshard.schedule.run import peer_of
from zeroshard.step.losses import Loss
from zeroshard.step.sequence import Run
from zeroshard.units import Unit
from zeroshard.units.compiling import uncompiled
from zeroshard.units.hooks import in_place_of
from zeroshard.units.ignored import is_ignored, note_elsewhere

VERIFIED_STEPS = 3  # of a schedule that never flushes


@dataclass(slots=True)
class Stage:
    """This rank's stage of a model.

    Attributes:
        world: all ranks of the pipeline; messages between stages go through it.
        mesh: the ranks of all replicas of this stage.
        pipeline: the schedule, loans included.
        chain: the model as layers.
        firsts: the first layer of every chunk, and one past the last layer.
        units: the layers of this rank, with the parameters that it owns.
        chunk_of: the chunk of each unit.
        loans: the names of the weights in each loan.
        deferral: for schedules that split the backward.
        borrowed: the weights of each loan that this stage borrows.
        whole_shapes: shapes of parameters that techniques have replaced by parts, by name.
        scattered: scattered messages of activations, by the layer that they enter.
        example: the microbatch on which the model was cut.
    """

    world: Comm
    mesh: Mesh
    pipeline: PipelineSchedule
    chain: Chain
    firsts: list[int]
    units: list[Unit] = field(default_factory=list)
    chunk_of: list[int] = field(default_factory=list)
    loans: dict[Loan, list[str]] = field(default_factory=dict)
    deferral: Deferral | None = None
    borrowed: dict[Loan, Borrowed] = field(default_factory=dict)
    whole_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    scattered: dict[int | None, Scattered] = field(default_factory=dict)
    example: Any = None

    @property
    def rank(self) -> int:
        """This rank in the whole pipeline."""
        return self.world.mesh.rank

    @property
    def number(self) -> int:
        """The number of this stage."""
        return self.pipeline.layout.stage_of(self.rank)

    @property
    def data_ranks(self) -> int:
        """The number of batches of a step: one per replica if all stages have equally many, else one."""
        layout = self.pipeline.layout
        return 1 if layout.uneven else layout.replicas[0]

    @property
    def data_rank(self) -> int:
        """The number of the batch that this rank works on."""
        return self.pipeline.layout.replica_of(self.rank) if self.data_ranks > 1 else 0

    @property
    def ranks_per_data_rank(self) -> int:
        """Replicas of this stage among which the microbatches of a batch are dealt out."""
        return self.pipeline.layout.replicas[self.number] if self.pipeline.layout.uneven else 1

    @property
    def place(self) -> int:
        """This rank's number within its replica, whose ranks have the same data."""
        return self.pipeline.layout.place_of(self.rank)

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.number == self.pipeline.layout.stages - 1

    @property
    def versions(self) -> int:
        """Versions of this stage's weights that are kept once the pipeline is full (2006.09503, section 3.1)."""
        pipeline = self.pipeline
        if pipeline.name == "pipedream":
            return 1 + warm_up(pipeline.layout, 0 if pipeline.vertical_sync else self.number)
        return 2 if pipeline.name == "2bw" else 1

    @property
    def borrowed_versions(self) -> int:
        """Versions of borrowed weights: those in use, and without flushes one in flight."""
        in_flight = warm_up(self.pipeline.layout, self.number) + 1
        return 1 if not self.pipeline.streams else 1 + (in_flight if self.pipeline.name == "pipedream" else 1)

    @property
    def skipped_modules(self) -> set[nn.Module]:
        """Modules whose own parameters are all on other stages."""
        own_parameters = {id(p) for layer in self.layers for p in layer.parameters.values()}
        every = [module for layer in self.chain.layers for top in layer.modules for module in top.modules()]
        elsewhere = set(every) - {module for layer in self.layers for top in layer.modules for module in top.modules()}
        elsewhere -= self.chain.everywhere
        return {m for m in elsewhere if not any(id(p) in own_parameters for p in m.parameters(recurse=False))}

    @property
    def layers(self) -> list[Layer]:
        """This rank's layers."""
        chunks = self.pipeline.layout.chunks_of(self.number)
        return [layer for c in chunks for layer in self.chain.layers[self.firsts[c] : self.firsts[c + 1]]]

    @property
    def split(self) -> tuple[str, ...]:
        """The first layer of every chunk after the first, by name."""
        return tuple(self.chain.layers[first].name for first in self.firsts[1:-1])

    @property
    def called(self) -> str:
        """A phrase for messages about its ranks."""
        return " of a stage"

    @property
    def facts(self) -> list[Any]:
        """The numbers of stages and chunks, and of ranks of each stage, for a checkpoint."""
        layout = self.pipeline.layout
        return [layout.stages, layout.chunks, list(map(len, self.parts))]

    @property
    def parts(self) -> list[list[int]]:
        """The ranks of each stage."""
        layout = self.pipeline.layout
        return [list(layout.members(number)) for number in range(layout.stages)]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The whole shapes of the parameters of all stages that are not ignored."""
        every = (item for layer in self.chain.layers for item in layer.parameters.items())
        return {name: tuple(p.shape) for name, p in every if not is_ignored(p)} | self.whole_shapes

    def cut(self, technique: Technique, axes: Mapping[str, Axis]) -> Replaced:
        """Apply a technique, which replaces parameters of all stages by parts of the same names."""
        cuts, new = replaced(self.chain.model, technique, axes)
        for layer in self.chain.layers:
            for name, parameter in layer.parameters.items():
                if parameter in new:
                    self.whole_shapes.setdefault(name, tuple(parameter.shape))
        self.chain.replace(new)
        for unit in self.units:
            unit.parameters.update({name: new[p] for name, p in unit.parameters.items() if p in new})
        for first in self.firsts[1:-1] if not self.chain.carried.needed else ():
            axis = technique.replicated_over(self.chain.layers[first].name)
            if axis is not None and axes[axis].size > 1:
                self.scattered[first] = Scattered(axes[axis].comm)
        return cuts, new

    def blocks(self) -> list[tuple[nn.Module, int]]:
        """The blocks of this stage, with the numbers of their units."""
        blocks = {layer.name: layer.modules[0] for layer in self.chain.layers[1:-1]}
        return [(blocks[unit.name], unit.number) for unit in self.units if unit.name in blocks]

    def is_elsewhere(self, module: nn.Module) -> bool:
        """Whether a module runs on other stages alone."""
        if module in self.chain.everywhere:
            return False
        return not any(module in top.modules() for layer in self.layers for top in layer.modules)

    def release_other_stages(
        self, units: list[Unit], real: Callable[[nn.Parameter], nn.Parameter], dtype: DtypeOf, ledger: Ledger
    ) -> None:
        """Borrow weights of other stages, and move the rest of the model to the meta device, freeing its storage.

        Args:
            units: this rank's units.
            real: maps a parameter of the model to its present replacement.
            dtype: maps a parameter to its dtype of computation.
        """
        device, chain = self.mesh.device, self.chain
        named = {name: p for layer in chain.layers for name, p in layer.parameters.items()}
        dtypes = {name: p.dtype if is_ignored(p) else dtype(p) for name, p in named.items()}
        made = {name: real(p) for name, p in named.items()}
        for loan, lent in self.loans.items():
            if loan.borrower % self.pipeline.layout.stages == self.number:
                sites = [list(chain.sites(made[name])) for name in lent]
                values = [in_place_of(made[n], made[n].detach().to(device, dtypes[n]).contiguous()) for n in lent]
                self.borrowed[loan] = Borrowed(values, sites, ledger)
        own_parameters = {id(real(p)) for unit in units for p in unit.parameters.values()}
        own_parameters |= {id(made[n]) for layer in self.layers for n, p in layer.parameters.items() if is_ignored(p)}
        lent_names = {name for loan in self.borrowed for name in self.loans[loan]}
        for name, parameter in made.items():
            if id(parameter) in own_parameters:
                continue
            if not parameter.is_meta:  # a reference to the parameter must not keep the values alive
                parameter.data = torch.zeros((), dtype=parameter.dtype).to(parameter.device).expand(parameter.shape)
            if name in lent_names:
                continue
            for module, attribute in list(chain.sites(parameter)):
                absent = torch.empty(parameter.shape, dtype=dtypes[name], device="meta")
                if module in chain.frames:  # its forward runs here, and must find a tensor
                    absent = torch.full((), float("nan"), dtype=dtypes[name], device=device).expand(parameter.shape)
                module._parameters[attribute] = new = nn.Parameter(absent, requires_grad=False)
                if is_ignored(parameter):
                    note_elsewhere(new)
        chain.placeholders.forget(any(dtypes[name] is not p.dtype for name, p in named.items()))

    def planned(self) -> Iterator[Planned]:
        """Planned bytes of borrowed weights and their gradients, and of ignored parameters."""
        yield from planned_ignored(self.chain.model, self.mesh.device)
        for borrowed in self.borrowed.values():
            copies = self.borrowed_versions * borrowed.numel * borrowed.dtype.itemsize
            yield Planned("device", Category.PARAMETERS, Fraction(copies), Fraction(0))
            yield Planned("device", Category.GRADIENTS, Fraction(borrowed.gradient.nbytes), Fraction(0))

    def gathered_at_once(self, sizes: Sequence[int]) -> tuple[int, str]:
        """The least size of units gathered at once, from the units' sizes, and its description."""
        chunks: Counter[int] = Counter()
        for chunk, size in zip(self.chunk_of, sizes, strict=True):
            chunks[chunk] += size
        return max(chunks.values(), default=0), "the largest of its chunks"

    def stage_of_buffer(self, module: nn.Module, name: str) -> int:
        """The stage of a buffer, which runs its module; of an ignored parameter, the first that uses it."""
        path, chain = f"{self.chain.path(module)}.{name}".removeprefix("."), self.chain
        using = (layer.number for layer in chain.layers if path in layer.parameters)
        return self.chunk_of_layer(next(using, chain.layer_of_buffer(module, name))) % self.pipeline.layout.stages

    def copy_of(self, stage: int) -> int:
        """The rank whose copy of a stage's buffers this rank uses: itself, or the rank of its data rank."""
        return self.rank if stage == self.number else self.pipeline.layout.rank_of(stage, self.data_rank, self.place)

    def other(self, action: Action) -> int:
        """The chunk at the other end of a message between chunks."""
        layout, peer = self.pipeline.layout, peer_of(action)
        further = action.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD)
        return (layout.target_of if further else layout.source_of)(action.chunk, peer)

    def chunk_of_layer(self, layer: int) -> int:
        """The chunk of a layer."""
        return bisect_right(self.firsts[:-1], layer) - 1


def make_stage(model: nn.Module, cut: Cut, mesh: Mesh, example: Any, run: Run) -> Stage | WholeModel:
    """This rank's part of `model`; a collective call.

    Args:
        example: one microbatch, as `train_step` will cut them.
        run: runs the model on a microbatch, down to the loss.

    Raises:
        ModelError: no chain, or too few blocks. PlanError: the ranks do not fit the stages.
    """
    if not cut.pipeline.cuts:
        return WholeModel(model, cut, mesh)
    pipeline = cut.schedule(mesh.ranks, ())
    if example is None:
        raise PlanError("A pipeline is cut on an example: pass Engine(..., example=one microbatch).")
    run = means_alone(run, pipeline.name) if pipeline.streams else run
    world = Comm(mesh)
    world.session = world.agree_on(time.time_ns(), "start of a pipeline")[0] & 0xFFFFFFFF
    where = _whereabouts(model)
    if where.type != "meta":
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            world.broadcast(tensor.data, f"initial {name}")
    deferral = Deferral(model) if cut.defers else None
    on_device = tree_map(partial(_to, device=mesh.device), example)
    beside = tree_map(partial(_to, device=where), example) if where.type != "meta" else on_device
    with uncompiled(model):
        with mesh.platform.beside_devices():
            chain = Chain(model, lambda: run(beside), cut.units, mesh.device)
        chain.crossing.follow(world.agree_on(chain.crossing.plain(), "values beside activations")[0])
        firsts = _cut(model, cut, chain, world, lambda: run(on_device))
    _refuse_other_ways(chain, world)
    chain.crossing.refuse_asides(firsts[1:-1], [layer.name for layer in chain.layers])
    refuse_shared_buffers(chain, firsts, cut.pipeline)
    layout = pipeline.layout
    replicas = part_of(mesh, [layout.members(s) for s in range(layout.stages)], "stage")
    stage = Stage(world, replicas, pipeline, chain, firsts, deferral=deferral, example=example)
    _share_out(stage)
    if stage.loans:
        refuse_loans(stage.pipeline, stage.loans)
        stage.pipeline = cut.schedule(mesh.ranks, tuple(stage.loans))
    stage.pipeline = chain.route(firsts, stage.pipeline)
    if world.on_accelerator or mesh.platform.imitates:
        kinds = {"neighbours": True, "wraps": layout.chunks > 1, "loans": bool(stage.loans)}
        world.message_groups.separate([kind for kind, needed in kinds.items() if needed])
    verify(stage.pipeline.distinct.stretch(VERIFIED_STEPS))
    return stage


def _to(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf


def _whereabouts(model: nn.Module) -> torch.device:
    devices = {parameter.device for parameter in model.parameters()}
    if len({device.type for device in devices}) != 1:
        raise ModelError(
            f"The model's parameters are on {', '.join(sorted(map(str, devices)))}; to be cut into stages it must be "
            f"wholly on the meta device, or wholly real."
        )
    return devices.pop()


def _cut(model: nn.Module, cut: Cut, chain: Chain, world: Comm, forward: Callable[[], Any]) -> list[int]:
    """The first layer of every chunk, and one past the last layer; the same on all ranks."""
    policy, chunks = cut.pipeline, cut.pipeline.chunks
    if chunks > chain.blocks:
        raise PlanError(
            f"pipeline_parallel={policy.stages} times virtual_stages={policy.virtual_stages} makes {chunks} chunks and "
            f"the model has {chain.blocks} blocks, and each chunk needs one. Make their product {chain.blocks} or "
            f"less, or name more units."
        )
    if policy.split:
        firsts = [0, *(chain.number(name) for name in policy.split)]
        if firsts != sorted(set(firsts)):
            names = [layer.name for layer in chain.layers]
            raise PlanError(f"split={policy.split} is not in the order of the layers, which is {', '.join(names)}.")
    else:
        if policy.balance == "parameters":
            weights = [float(sum(p.numel() for p in layer.parameters.values())) for layer in chain.layers]
        else:
            weights = _times(model, chain, world, forward)
        blocks = weights[1:-1]
        blocks[0] += weights[0]
        blocks[-1] += weights[-1]
        firsts = [0, *(block + 1 for block in balance(blocks, chunks)[1:])]
    return [*firsts, len(chain.layers)]


def _times(model: nn.Module, chain: Chain, world: Comm, forward: Callable[[], Any]) -> list[float]:
    """The seconds of each layer on the rank that measures them, on all ranks.

    Raises:
        ModelError: the model failed there; on that rank its own error.
    """
    times: list[float] = []
    failed: Exception | None = None
    if world.mesh.platform.decides(world.mesh.rank):
        try:
            with torch.random.fork_rng(devices=[]):  # the other ranks draw nothing here
                repeats = REPEATS if world.mesh.platform.measured else 1
                costs = measure(model, chain, forward, world.mesh.device, repeats, world.mesh.now)
            times = [cost.forward_seconds + cost.backward_seconds for cost in costs]
        except Exception as error:
            failed = error
    text = f"{type(failed).__name__}: {failed}" if failed else ""
    times, text = world.agree_on([times, text], "times of the layers")[0]
    if failed is not None:
        raise failed
    if text:
        raise ModelError(
            f"The times of the layers were measured on rank 0, where the example failed in the model ({text}). Correct "
            f"the model or the example."
        )
    return list(map(float, times))


def _refuse_other_ways(chain: Chain, world: Comm) -> None:
    """Refuse ranks whose examples took other ways through the model's code: their messages have other values.

    Layers that read a value on one rank get it on all.

    Raises:
        ModelError: on all ranks, with a value that one rank's layers hand on and another's do not.
    """
    everyone = world.agree_on(chain.carried.plain(), "values between the layers")
    for rank, theirs in enumerate(everyone):
        for (one, _), (other, _) in zip_longest(everyone[0], theirs, fillvalue=("nothing more", ())):
            if one != other:
                raise ModelError(
                    f"The forwards of the example differ between ranks. From layer to layer rank 0 hands on {one}; "
                    f"rank {rank}, {other}. Give all ranks examples of one shape, and let the model's code take the "
                    f"same way on all of them."
                )
        for key, (_, reads) in zip(chain.carried.reach, theirs, strict=False):
            chain.carried.read(key, reads)


def _share_out(stage: Stage) -> None:
    """Assign every parameter to the first stage that uses it; later stages borrow it. Ignored ones have no owner."""
    d = stage.pipeline.layout.stages
    owner_of: dict[nn.Parameter, int] = {}
    given: set[nn.Parameter] = set()
    for layer in stage.chain.layers:
        chunk = stage.chunk_of_layer(layer.number)
        borrowed: dict[Loan, list[str]] = {}
        mine: dict[str, nn.Parameter] = {}
        for name, parameter in layer.parameters.items():
            owner = owner_of.setdefault(parameter, chunk)
            if is_ignored(parameter):
                refuse_ignored(name, parameter, owner % d, chunk % d)
            elif owner % d != chunk % d:
                borrowed.setdefault(Loan(owner, chunk), []).append(name)
            elif parameter not in given:
                given.add(parameter)
                mine[name] = parameter
        for loan, names in borrowed.items():
            same = (k for k in stage.loans if k.owner == loan.owner and k.borrower % d == loan.borrower % d)
            lent = stage.loans.setdefault(next(same, loan), [])
            lent.extend(name for name in names if name not in lent)
        if chunk % d == stage.number and mine:
            owners = [m for m in stage.chain.modules if set(m.parameters(recurse=False)) & set(mine.values())]
            stage.units.append(Unit(len(stage.units), layer.name, owners[0], mine, owners))
            stage.chunk_of.append(chunk)


def means_alone(run: Callable[[Any], Any], schedule: str) -> Callable[[Any], Any]:
    """A forward that refuses a loss by sum, for stages that update before the count is complete.

    Raises:
        PlanError: in the call, the loss is a sum.
    """

    def checked(batch: Any) -> Any:
        loss = run(batch)
        if isinstance(loss, Loss) and loss.items is not None:
            raise PlanError(
                f"The loss is given by sum with a count, and schedule={schedule!r} lets stages update before they know "
                f"the count of the whole update; return the mean, or use schedule='1f1b'."
            )
        return loss

    return checked


def refuse_last_hook(layers: Sequence[Layer], firsts: Sequence[int]) -> None:
    """Refuse a full backward hook of the last block if its output goes to another stage; for the start of each step.

    Raises:
        ModelError: on all ranks, before any waits for another's message.
    """
    *_, last, suffix = layers
    if suffix.number in firsts and last.modules[0]._backward_hooks:
        raise ModelError(
            f"The block {last.name!r} has a full backward hook, and the next stage has only what comes after the "
            f"blocks. Cut before an earlier block (pipeline_parallel.split), or register the hook on a "
            f"module inside of the block."
        )
