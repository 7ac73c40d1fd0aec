"""The readings of an engine: its place among the ranks, its tables, and its traces."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import Mesh
from zeroshard.engine.build import Assembly
from zeroshard.engine.state import State
from zeroshard.errors import PlanError
from zeroshard.memory.ledger import Ledger
from zeroshard.parts.axes import Axes
from zeroshard.parts.gradient_shares import GradientShare, shares_of
from zeroshard.parts.part import SpeculationCounts
from zeroshard.parts.planned import Work
from zeroshard.parts.tables import MemoryTable, TrafficTable, memory_table, traffic_table
from zeroshard.parts.technique import StepEnd
from zeroshard.pipeline.stage import Stage
from zeroshard.pipeline.whole import WholeModel
from zeroshard.plan import Plan
from zeroshard.recompute.arena import ArenaUse
from zeroshard.schedule import PipelineSchedule
from zeroshard.step.backward import Backward
from zeroshard.step.decision import Decision
from zeroshard.step.sequence import StepOrder
from zeroshard.step.trace import Trace, traced
from zeroshard.traffic import BETWEEN_TIERS, Count, Purpose, merged
from zeroshard.units.forwards import layers_of


class Readings:
    """The part of an engine that only reads."""

    model: nn.Module
    plan: Plan
    mesh: Mesh
    steps: int
    skipped: int
    ledger: Ledger
    comm: Comm
    _assembly: Assembly
    _counts: Mapping[Purpose, Count]
    _axes: Axes
    _backward: Backward
    _decision: Decision
    _order: StepOrder
    _stage: Stage | WholeModel
    _state: State
    _step_ends: Sequence[StepEnd]

    def __repr__(self) -> str:
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        skipped += f"\n  {self.owners}" if self.owners else ""
        return (
            f"Engine of {type(self.model).__name__} ({self._state.numel:,} parameters)\n  {self.plan!r}\n"
            f"  rank {self.rank} of {self.ranks} on {self.device}, {self.steps} steps{skipped}"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """An engine is one of a job's ranks, with its connections and buffers.

        Raises:
            PlanError: it was to be copied or pickled.
        """
        raise PlanError(
            "The engine was to be copied or pickled, and it holds connections to other ranks and buffers that they "
            "share. Save it by engine.save(path), or take engine.state_dict() or copy.deepcopy(engine.model)."
        )

    @property
    def device(self) -> torch.device:
        """Where this rank computes, and batches belong."""
        return self.mesh.device

    @property
    def rank(self) -> int:
        """This process among all, from 0."""
        return self.mesh.rank

    @property
    def ranks(self) -> int:
        """How many processes train together."""
        return self.mesh.ranks

    @property
    def comms(self) -> list[Comm]:
        """The collectives of each group that this rank is in."""
        return self._axes.all

    @property
    def recomputed(self) -> int:
        """How many forwards of blocks backwards have computed again so far; of chunks of a pipeline, none count."""
        return getattr(self._assembly.recomputation, "recomputed", 0)

    @property
    def activation_decisions(self) -> list[dict[str, Any]]:
        """What `recompute="auto"` does with each block of this rank, predicted beside measured."""
        return getattr(self._assembly.recomputation, "decisions", [])

    @property
    def checkpoint_arena(self) -> ArenaUse | None:
        """The use of the buffer of blocks' inputs, with `Activations(arena=True)`."""
        return getattr(self._assembly.recomputation, "arena", None)

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.model.training

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer, now over slices; give it to a learning-rate scheduler."""
        return self._assembly.optimizer.optimizer

    @property
    def owners(self) -> str:
        """What owners of whole parameters do and cost, in sentences; empty where slices are even."""
        return self._assembly.optimizer.owners.summary

    @property
    def loss_scale(self) -> float:
        """The factor that `backward` puts on the loss."""
        return self._decision.scale

    @property
    def seconds_waiting(self) -> float:
        """How long this rank stood waiting for others in the last step."""
        return sum(count.seconds for purpose, count in self._counts.items() if purpose not in BETWEEN_TIERS)

    @property
    def speculation_counts(self) -> SpeculationCounts:
        """Of the offloaded updates that ran beside backwards, how many were taken over, and how many undone."""
        return self._assembly.late.speculation_counts

    def watch_gradients(self, watcher: Callable[[list[GradientShare]], None]) -> None:
        """Call `watcher` in each step from now on with this rank's shares of the mean gradients, before any clipping.

        The loss scale and counts of losses are divided out; the values are copies on the host.
        """
        parts, ranks, losses = self._assembly.parts, self._stage.ranks_per_data_rank, self._backward.losses
        self._decision.watcher = lambda: watcher(shares_of(parts, losses.gain * ranks / self.loss_scale))

    def trace(self, memory: bool = False, profile: str | PathLike[str] | None = None) -> AbstractContextManager[Trace]:
        """Keep when forwards, backwards, updates, copies and jobs of the host inside run; complete when it ends.

        On a GPU, copies are entered when they are handed to their streams. A trace may be inside of another.

        Args:
            memory: keep every change of memory too, activations included, which slows the forward down.
            profile: a folder for a profile by torch.profiler, in which each rank writes `rank0.json`, `rank1.json`
                and so on when the trace ends; ui.perfetto.dev and chrome://tracing open them.
        """
        file = None if profile is None else Path(profile) / f"rank{self._axes.world.mesh.rank}.json"
        ledger = self.ledger if memory else None
        return traced(self._order.interpreter, self._assembly.late.background, ledger, file)

    @property
    def layer_readings(self) -> dict[str, Mapping[str, Any]]:
        """Readings of this rank's mixtures of experts in the last step, over all data ranks, by the path of the layer.

        Each has `load` (choices of each expert, before capacity), `dropped` (the part of all choices that had no
        place), `entropy` (of the router, mean over tokens, nats), `most_by_mean` (load), `dead` (experts without a
        token) and `losses` (weighted penalties by name, mean over forwards).
        """
        return {layer: reading for each in self._step_ends for layer, reading in each.readings.items()}

    def all_layer_readings(self) -> dict[str, Mapping[str, Any]]:
        """`layer_readings` of all stages on every rank; a collective call, if the model has such layers."""
        if not any(each.reads for each in self._step_ends):
            return {}
        everyone = self._axes.world.agree_on(self.layer_readings, "readings of layers")
        return {layer: reading for readings in everyone for layer, reading in readings.items()}

    @property
    def data_rank(self) -> int:
        """Which batch this rank works on: its rank, or in a pipeline which replica of its stage it is."""
        return self._axes.data_rank

    @property
    def data_ranks(self) -> int:
        """How many batches, one per data rank, make up a step."""
        return self._axes.data_ranks

    @property
    def knows_loss(self) -> bool:
        """Whether `train_step` returns the loss here: everywhere, but on the last stage if nothing flushes."""
        return not self.plan.streams or self._stage.is_last

    @property
    def reports(self) -> bool:
        """Whether this is the one rank that is to speak for all: it knows the loss."""
        place = self._stage.mesh if self.plan.streams else self.mesh
        return self.knows_loss and place.rank == 0

    @property
    def pipeline(self) -> PipelineSchedule | None:
        """The lists of all ranks, where the model is cut into stages."""
        return self._stage.pipeline

    @property
    def layers(self) -> list[str]:
        """The names of the layers on this rank, where the model is cut into stages."""
        return [layer.name for layer in self._stage.layers]

    @property
    def split(self) -> tuple[str, ...]:
        """The layers with which the chunks after the first begin; a plan with this `split` cuts the model alike."""
        return self._stage.split

    @property
    def checkpoint_nbytes(self) -> int:
        """Bytes of this rank's part of a checkpoint."""
        return self._state.nbytes

    @property
    def order(self) -> dict[str, list[str]]:
        """Under ZeRO 3, the units in the order in which each kind of pass gathers them; recorded in the first step."""
        return self._assembly.gatherer.orders

    @property
    def units(self) -> list[str]:
        """The names of the units in their fixed order."""
        return [unit.label for unit in self._assembly.parts.units]

    def layers_of(self, module: nn.Module) -> tuple[str, ...]:
        """The layers around a module's forward on this rank, outermost first; docs/concepts/units.md has their names.

        The last is "own", the forward of the module's class, or "user", one that was set on the module.

        Raises:
            PlanError: `module` is no module of this engine's model.
        """
        if not isinstance(module, nn.Module) or all(module is not each for each in self.model.modules()):
            found = f"a {type(module).__name__} of elsewhere" if isinstance(module, nn.Module) else repr(module)
            raise PlanError(
                f"layers_of takes a module of the engine's model, and was given {found}. Pass engine.model, or one of "
                f"its modules by engine.model.get_submodule('its.path')."
            )
        return layers_of(module)

    def memory(self) -> MemoryTable:
        """Bytes on this rank by category: planned by the formula, measured by the ledger.

        Optimizer states appear with the first step, in which torch makes them.
        """
        return memory_table(self._assembly.parts, self.ledger, self._stage.planned())

    def traffic(self) -> TrafficTable:
        """Traffic of the last step over the wire: formula and measured."""
        messages = self._order.planned_messages()
        return traffic_table(self._assembly.parts, self._work, self._counts, messages)

    @property
    def sent_so_far(self) -> dict[Purpose, Count]:
        """Traffic of the step under way over the wire, by purpose."""
        return merged(comm.counts for comm in self._axes.all)

    def _work(self, unit: int) -> Work:
        """A step of this rank on a unit."""
        plan, around = self.plan, self._stage.ranks_per_data_rank
        recomputation = self._assembly.recomputation
        again = plan.microbatches * (recomputation is not None and recomputation.brings_twice(unit))
        updates = plan.microbatches // (plan.microbatches_per_update * (around if plan.streams else 1))
        return Work(
            plan.microbatches,
            self._order.gathers(unit) + again,
            updates,
            plan.reductions // around if plan.reductions > 1 else 1,
        )
