"""The engine: a model, an optimizer and a plan, with torch's own semantics.

`backward` always adds, `step` always consumes; any number of forwards and backwards in any order is right in every
stage. `train_step` runs the same actions from a schedule.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Self, overload

import torch
from torch import nn

from zeroshard.access.adapter_export import ExportSizes, export_adapters
from zeroshard.access.editing import Editing, set_magnitudes, state_dict_by_unit
from zeroshard.access.forward_methods import MethodAccess
from zeroshard.access.given import LoadedKeys
from zeroshard.access.gradient_shares import GradientShare, shares_of
from zeroshard.access.join import JoinAccess, Joins
from zeroshard.access.rebuilding import RebuildAccess, retire_engine
from zeroshard.access.step_gradients import GradientAccess, StepGradients, WholeGradients
from zeroshard.access.unfreezing import Unfreezing
from zeroshard.access.whole_weights import Bucket, WholeWeights
from zeroshard.checkpoint import LoadReport, Saving, WeightSource
from zeroshard.checkpoint.export import SHARD_SIZE
from zeroshard.checkpoint.file_names import Names
from zeroshard.checkpoint.writer import Savings
from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import Mesh, keep_freed_memory, shared_mesh
from zeroshard.engine.build import Builder, StepReadings
from zeroshard.engine.forward import Forward
from zeroshard.engine.state import State
from zeroshard.engine.techniques import cut_of, decision_of, recomputing_of, step_ends_of, techniques_of
from zeroshard.errors import PlanError
from zeroshard.losses.causal_models import set_loss_chunk
from zeroshard.memory.ledger import Ledger
from zeroshard.optim import BetweenSteps, members_of
from zeroshard.optim.states.other_forms import Members
from zeroshard.parts.axes import Axes
from zeroshard.parts.part import SpeculationCounts
from zeroshard.parts.planned import Work
from zeroshard.parts.tables import memory_table, traffic_table
from zeroshard.parts.technique import Technique
from zeroshard.pipeline.buffers import whole_state_dict
from zeroshard.pipeline.run.steps import PipelineOrder, scope_of
from zeroshard.pipeline.stage import Stage, make_stage
from zeroshard.plan import Plan
from zeroshard.planning.tables import MemoryTable, TrafficTable
from zeroshard.platform.accelerator import is_accelerator, total_memory
from zeroshard.precision.cast import Precision
from zeroshard.precision.clash import raise_explained
from zeroshard.quantized.weights import take_apart
from zeroshard.recompute.arena import ArenaUse
from zeroshard.schedule import Layout, PipelineSchedule
from zeroshard.step.backward import Backward, ListedBackward, receive_from
from zeroshard.step.batch import call_with, loss_of
from zeroshard.step.decision import Verdict, check_settings
from zeroshard.step.gradient_accumulation import OneStage
from zeroshard.step.losses import Loss, StepLosses
from zeroshard.step.sequence import (
    AllRanks,
    Scope,
    StepOrder,
    StepResult,
    StepSequence,
    train_parts,
)
from zeroshard.step.trace import Trace, traced
from zeroshard.text import parse_bytes
from zeroshard.traffic import Count, Purpose, merged, seconds_waited
from zeroshard.units.compiling import compile_blocks
from zeroshard.units.forwards import layers_of
from zeroshard.units.hooks import Hook
from zeroshard.units.ignored import OptimizerLike, made_for, place_ignored
from zeroshard.units.materialise import Initialiser, take_from_rank_0
from zeroshard.validation.arguments import (
    check_arguments,
    check_compiling,
    check_options,
    check_within,
    refuses_unfreezing,
    unjoined,
)
from zeroshard.validation.memory import raises_budget_exceeded, room_to_train
from zeroshard.validation.model_checks import FIRST_STEPS, check_computing, check_model, guard, warn_of_unused
from zeroshard.validation.ranks import check_alike, check_replicas, tied_names
from zeroshard.version import __version__

LossFunction = Callable[[Any, Any], Any]
INTERNAL = ("comm", "comms", "ledger", "world")  # public within the package alone


class Engine(GradientAccess, JoinAccess, MethodAccess, RebuildAccess):
    """Trains `model` as `plan` says.

    Args:
        model: any `nn.Module`; on the meta device it is materialised unit by unit, otherwise rank 0's weights are
            taken.
        optimizer: a `torch.optim` optimizer over the model's parameters, or a function of the parameters that makes
            one, such as `partial(torch.optim.AdamW, lr=3e-4)`. One that needs whole tensors has an owner for each.
        plan: states of each rank, precision, accumulation.
        mesh: this process's place; by default from torchrun's environment.
        loss: for `train_step`, a function of (model output, microbatch) to the mean loss, or to (sum, count) or (sum,
            count, penalty) as `backward` takes them; by default the output itself or its `.loss`.
        initialise: for a model on the meta device, called with each module; by default its `reset_parameters()`.
        example: for pipelines, one microbatch, on which the model is cut into stages.

    Raises:
        PlanError, ModelError, OptimizerError, BudgetExceeded: arguments do not fit together, or into memory.

    Attributes:
        model: the model, whose parameters are slices between steps at zero=3.
        plan: as given, or by default `Plan()`.
        mesh: this process's place among all ranks.
        steps: updates so far, those that were skipped included.
        skipped: steps without an update, because a gradient was not finite.
        schedule: the actions of one step on this rank.
        exposed: seconds of the last step in which this rank waited for offloaded tensors, by cause.
        loaded: the tensors that `zs.from_pretrained` read, and those that it did not.
    """

    loaded: LoadReport | None = None
    _check_model = staticmethod(check_model)

    @raises_budget_exceeded
    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerLike,
        plan: Plan | None = None,
        *,
        mesh: Mesh | None = None,
        loss: LossFunction | None = None,
        initialise: Initialiser | None = None,
        example: Any = None,
    ) -> None:
        check_arguments(model, optimizer, plan)
        check_options(mesh, loss=loss, initialise=initialise)
        retire_engine(model, optimizer, self)
        quantized = take_apart(model, optimizer if isinstance(optimizer, torch.optim.Optimizer) else None)
        check_model(model)
        self.model, self.plan = model, plan or Plan()
        check_computing(quantized, model, Precision.named(self.plan.precision).compute)
        self.mesh = mesh or shared_mesh(self.plan.timeout)
        self.ledger = self._limited_ledger()
        self._loss = loss or partial(loss_of, model)
        optimizer = made_for(model, optimizer, self.plan.ignored)
        check_alike(Comm(self.mesh), model, optimizer, self.plan)
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        set_loss_chunk(model, self.plan.loss_chunk)
        # Cut the model into stages, and place this rank on the axes.
        techniques = techniques_of(self.plan)
        self._stage = make_stage(model, cut_of(self.plan, techniques, self.mesh.ranks), self.mesh, example, self._run)
        self._axes = Axes(self._stage, self.plan.shard_group, techniques)
        self.world, self.comm = self._axes.world, self._axes.dense.slices.comm
        tied, members = tied_names(model), members_of(optimizer, model)
        # Materialise: flats with their weights, gradients and updaters.
        losses = StepLosses(self.plan.nonfinite == "skip", self.mesh)
        progress = StepReadings(lambda: self.steps, lambda: losses.likely(self.loss_scale))
        self._builder = Builder(model, self.plan, self._axes, self.ledger, self._stage, progress)
        self._assembly = self._builder.build(optimizer, initialise, techniques)
        self._gatherer, self._late = self._assembly.gatherer, self._assembly.late
        # Equip: forward, backward, recomputation, the sequence of a step, checkpoints.
        self.steps = self.skipped = 0
        self.exposed: Mapping[str, float] = {}
        self._equip(losses, techniques)
        self._state = State(model, self._assembly, self._axes, self.ledger, self._stage, tied)
        self._step_gradients = StepGradients(
            self._sequence, partial(self._state.wholes_of, WholeGradients, lambda: self.steps), self.optimizer,
            lambda: self.steps, cut=self._stage.pipeline is not None, agree=not self.plan.streams,
        )  # fmt: skip
        self._join = Joins(self.world, self._backward, lambda: self.optimizer.param_groups, unjoined(self.plan))
        self._savings, self._takes_apart = Savings(), False
        # Hook: the user's own calls of the model and the optimizer.
        model.register_state_dict_pre_hook(Hook(self._refuse_partial))
        self._forward.writes.watch(frozen)
        self._between_steps = BetweenSteps(self._assembly, self.world, members, self._discard, self.flush)
        self._unfreezing = self._unfreezing_of(members)
        self._forward.unfreeze = self._unfreeze
        guard(model, self._forward, self.plan.pipelined)
        set_magnitudes(model, self._editing, self._assembly.magnitudes)
        self._sent: list[Mapping[Purpose, Count]] = []  # in the last step
        self._reset_counts()

    def _unfreezing_of(self, members: Members) -> Unfreezing:
        """The training of parameters later that are frozen now."""
        optimizer, replacement = self._assembly.optimizer, self._builder.replacement
        refused = refuses_unfreezing(self.plan, optimizer, self.mesh.ranks)
        room = room_to_train(self.ledger, self.plan, optimizer.layout)
        return Unfreezing(self._assembly.parts, self.world, members, replacement, refused, room)

    def _limited_ledger(self) -> Ledger:
        """The ledger of this rank's memory, under the plan's budget."""
        if not is_accelerator(self.mesh.device):
            keep_freed_memory()
        budget = self.plan.device_budget
        self.mesh.platform.limit(self.mesh.device, budget)
        return Ledger({} if budget is None else {"device": budget}, self.mesh.now)

    def _equip(self, losses: StepLosses, techniques: Sequence[Technique]) -> None:
        """Make the objects along a step: backward, forward, recomputation, decision, sequence and order."""
        plan, stage, axes, parts = self.plan, self._stage, self._axes, self._assembly.parts
        take_from_rank_0(self.model, axes.alike, ignored=True)
        place_ignored(self.model, self.mesh.device, self.ledger)
        backward = ListedBackward if plan.pipelined else Backward
        self._backward = backward(parts, self._gatherer, self._late, self.comm, losses, plan.scales_loss)
        self._forward = Forward(self.model, self._assembly, self._backward, self.ledger)
        writes = self._forward.writes
        self._editing = Editing(parts, self._gatherer, self._late, self.world, writes)
        self._recomputation, inputs = recomputing_of(plan, self.model, stage, parts, self._forward, axes.new)
        self._step_ends = step_ends_of(self.model, stage, axes.alike, techniques, self._recomputation)
        self._decision = decision_of(plan, self._step_ends)
        self._order: StepOrder
        self._order_anew: Callable[[], StepOrder | None] = lambda: None  # after an unfreezing, over stages
        if isinstance(stage, Stage):
            scope = scope_of(stage, axes.alike, losses)
            self._sequence = self._sequence_over(scope)
            assert inputs is not None
            make = partial(PipelineOrder, stage, parts, self._sequence, scope, inputs, self.model, self._run)
            self._order, self._order_anew = make(), make
        else:
            self._sequence = self._sequence_over(AllRanks(axes, losses))
            lists = PipelineSchedule("naive", Layout((1,)), plan.microbatches, reduce_each=plan.reduces_each_microbatch)
            self._order = OneStage(
                self.model, self.mesh, parts, self._gatherer, lists, self._sequence, self._run, lambda: self.steps
            )
        self.schedule = self._order.actions

    def _sequence_over(self, scope: Scope) -> StepSequence:
        """The sequence of a step that these ranks decide on together."""
        return StepSequence(
            self._assembly.parts, self._assembly.optimizer, self._late, self._backward, self._decision, self._axes,
            scope, reconcile=partial(self._forward.writes.reconcile, thoroughly=True),
        )  # fmt: skip

    @raises_budget_exceeded
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward.

        A pipelined model is evaluated so, with gradients off, and trained by `train_step`.

        Raises:
            PlanError: gradients are on and the model is cut into stages. ModelError: dtypes do not fit in the forward.
        """
        self._joins.announce("__call__", *args, **kwargs)
        try:
            with nullcontext() if torch.is_grad_enabled() else self._axes.evaluating():
                return self._order.evaluate(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            raise_explained(error)
            raise

    @raises_budget_exceeded
    def __dir__(self) -> list[str]:
        """Only the names that docs/api.md describes, and Python's own."""
        names = (name for name in super().__dir__() if name not in INTERNAL)
        return [name for name in names if not name.startswith("_") or name.startswith("__")]

    def backward(self, loss: torch.Tensor, count: Any = None, penalty: torch.Tensor | None = None) -> None:
        """Add the gradients of `loss` (a scalar) to those of the step, with loss scaling of the scaled loss.

        A loss that is not finite counts, in the next `step`, as a gradient that is not.

        Args:
            count: the loss is a sum over so many tokens or rows, a number or a scalar tensor, and the step's gradient
                is that of all ranks' sums over all counts; without it the loss is a mean, and ranks count alike.
            penalty: a scalar that is no sum over tokens; averaged by the counts, it is added to the step's mean once.

        Raises:
            BatchError: a sum in float16, or of several elements. `step` refuses a wrong count, on all ranks.
        """
        self._refuse_in_stages("backward")
        self._joins.announce("backward")
        given = Loss(loss) if count is None and penalty is None else Loss.by_sum(loss, count, penalty)
        self._sequence.add(self._joins.weighed(given))

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside add up on each rank without a reduction; the next one outside, or `step`, reduces the sum.

        Costs the memory of whole gradients under stages 2 and 3.
        """
        return self._backward.local()

    def zero_grad(self) -> None:
        """Discard the gradients of all backwards since the last step, on every rank alike.

        So do `zero_grad` of the optimizer and of the model, and `p.grad = None` for one parameter. A step consumes the
        gradients by itself.
        """
        self._discard()

    @raises_budget_exceeded
    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scale the gradients down at the next `step` so that their norm over all parameters is at most `max_norm`.

        A collective call, after the last backward of the step. Returns the norm before clipping, exact over slices.

        Args:
            max_norm: the same on all ranks; infinity measures the norm alone, after any backward.
            norm_type: p of the p-norm, above 0; infinity for the largest magnitude.
        """
        self._refuse_in_stages("clip_grad_norm")
        self._joins.announce("clip_grad_norm", max_norm, norm_type)
        norm = self._sequence.norm(self.steps, norm_type, max_norm) / self.loss_scale
        return self._decision.clip.limit(max_norm, norm, self._backward.count)

    def clip_grad_value(self, clip_value: float) -> None:
        """Limit every element of the gradients to [-clip_value, clip_value] now; a collective call.

        Gradients that are not finite stay so, unless the plan ignores them: the step decides about them.
        """
        self._refuse_in_stages("clip_grad_value")
        self._joins.announce("clip_grad_value", clip_value)
        hides = self.plan.nonfinite == "ignore" and not self.plan.scales_loss
        factor = self._decision.clip.of(self._backward.count)
        self._sequence.clip_values(self.steps, clip_value, self.loss_scale / factor if factor else math.inf, hides)

    @raises_budget_exceeded
    def step(self) -> StepResult:
        """Update the weights with the gradients of the backwards since the last step; a collective call.

        Raises:
            NonFiniteError: gradients are not finite and the plan says `nonfinite="raise"`.
            CommError: the ranks did different things, or a rank is gone. PlanError: no rank has any gradient.
            BatchError: a count is no number of 0 or more; or some losses are sums and others means.
        """
        self._refuse_in_stages("step")
        self._refuse_in_gathered("step")
        self._joins.announce("step")
        self._assembly.parts.random_numbers.end_step()
        self._sequence.take(self.steps)
        return self._conclude(self._decision.last, None)

    def _unfreeze(self) -> None:
        """Make gradients and states of parameters that were frozen and require gradients now ([Note: unfreezing])."""
        names = self._forward.writes.unfrozen()
        if not names:
            return
        self._unfreezing.agree(names, bool(self._backward.count))
        self.flush()
        never, assembly = self._backward.reductions.never_written, self._assembly
        new = self._unfreezing.carry_out(names, self._state.base, assembly.weights)
        assembly.optimizer.install_spans()
        self._late.spans_installed()
        receive_from(self._backward, assembly.parts)
        self._backward.reductions.never_written = never
        self._forward.take_parts(new)
        self._step_gradients.forget()
        train_parts(self._sequence)
        self._order = self._order_anew() or self._order

    def _refuse_in_stages(self, method: str) -> None:
        if self._stage.pipeline is not None:
            raise PlanError(
                f"engine.{method}() is for models in one stage, and this one is cut into {self.plan.pipeline.stages}: "
                f"use engine.train_step(batch) to train and engine.state_dict() to take the weights out."
            )

    def _refuse_in_gathered(self, method: str) -> None:
        if self._forward.writes.allowed:
            raise PlanError(
                f"engine.{method}() was called inside `with engine.gathered():`, at whose end the gathered copies "
                f"become the weights, so the update would be lost. Call it after the block; forward and backward may "
                f"be inside."
            )

    def _discard(self, drop: bool = True) -> None:
        """Discard the gradients of the step so far, as `StepSequence.discard` does."""
        self._sequence.discard(drop)
        self._decision.clip.forget()
        self._assembly.parts.random_numbers.discard()

    @raises_budget_exceeded
    def train_step(self, batch: Any) -> StepResult:
        """One step of the schedule on this rank's batch: tensors [B, ...], cut into `plan.microbatches` microbatches.

        A mapping is passed to the model as keywords, a tuple or list as arguments. Microbatches whose losses are means
        count alike and must be even; a loss function that returns (sum, count) counts tokens, and needs neither.

        Raises:
            BatchError: the batch does not divide, the model returned no loss, or as `step`. After an error, one of the
                model too, the gradients of the step are gone.
        """
        self._refuse_in_gathered("train_step")
        self._joins.announce("train_step", batch)
        self._unfreeze()
        with self._backward.losses.passes.train_step(self._discard, self.mesh):
            loss = self._order.step(batch)
        return self._conclude(self._decision.last, loss)

    @raises_budget_exceeded
    def flush(self) -> None:
        """Finish microbatches of a schedule without flushes, and offloaded updates; a collective call.

        Evaluating, saving and taking the model out do it by themselves.
        """
        self._forward.writes.reconcile(thoroughly=True)
        self._late.flush()
        self._order.flush()

    def gathered(self, writer: int | None = None) -> AbstractContextManager[None]:
        """Gathered parameters on every rank inside, also under stage 3; a collective call.

        Writes to parameters inside stay, in slices and fp32 masters too. A parameter that is split inside
        of its layer (tensor parallelism) is this rank's part there, as it is in the forward; `state_dict()` has the
        whole.

        Args:
            writer: the rank whose values all other ranks take; by default every rank writes the same.

        Raises:
            PlanError: ranks wrote different values; or the call is inside of the model's forward under stage 3.
        """
        self._refuse_in_stages("gathered")
        if self._forward.writes.allowed and writer is None:
            return nullcontext()  # inside of another such context, which takes everything over
        if self._forward.writes.allowed:
            raise PlanError(
                f"gathered(writer={writer}) is nested in another gathered(); pass writer= to the outer one."
            )
        if self._gatherer.gathers and self._forward.running:
            raise PlanError(
                "engine.gathered() was entered inside of the model's forward or backward, where units come and go "
                "(zero=3). Weights of other units are gathered there when they are read: leave gathered() out, or put "
                "it around the whole call of the engine."
            )
        self.flush()
        return self._editing.gathered(writer)

    @raises_budget_exceeded
    def state_dict(self) -> dict[str, Any]:
        """The model's own complete state dict on every rank, copied to the CPU; a collective call."""
        self.flush()
        wholes = self._state.wholes
        if isinstance(self._stage, Stage):
            with self._editing.whole():
                local = wholes.put_together(self.model.state_dict())
                return whole_state_dict(local, self._stage, self._state.buffers)
        if self.plan.offloading.parameters and not self._forward.writes.allowed:
            self._takes_apart = True
            return state_dict_by_unit(self.model, self._assembly.parts, self._gatherer, wholes)
        with self._editing.whole():
            return {key: wholes.copy(key, value) for key, value in self.model.state_dict().items()}

    @overload
    def weights(
        self, *, dtype: torch.dtype | str | None = None, names: Names = None, buckets: None = None
    ) -> Iterator[tuple[str, torch.Tensor]]: ...

    @overload
    def weights(
        self, *, dtype: torch.dtype | str | None = None, names: Names = None, buckets: str | int
    ) -> Iterator[Bucket]: ...

    def weights(
        self, *, dtype: torch.dtype | str | None = None, names: Names = None, buckets: str | int | None = None
    ) -> Iterator[tuple[str, torch.Tensor]] | Iterator[Bucket]:
        """Whole parameters and persistent buffers one at a time on every rank: (name, tensor), or buckets of them.

        The call and each step of the loop are collective: all ranks take all tensors, between two steps, in the order
        of the model's state dict, tied ones once. Tensors are copies on this rank's device, and memory is that of one
        besides those that the loop still holds. To leave the loop early, all ranks leave it at the same tensor;
        otherwise they stop with a `CommError`.

        Args:
            dtype: of floating-point tensors; by default the dtype in which the model computes. With `torch.float32` the
                values are those of the fp32 master weights, where there are any.
            names: a function from the model's names to others; or "transformers" for names and shapes in the files of
                the model's family.
            buckets: most bytes, such as "1GiB", of a `Bucket` of consecutive tensors; a larger tensor has its own.

        Raises:
            PlanError: the call is inside of `gathered()`, or a step is taken inside of the loop.
            ConfigError: `names` or `buckets` is something else.
        """
        most = None if buckets is None else parse_bytes(buckets, "buckets")
        whole = self._whole_weights("weights")
        groups = whole.groups(dtype, names, masters=False)
        return whole.named(groups) if most is None else whole.walk_buckets(groups, most)

    @raises_budget_exceeded
    def export(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype | str | None = None,
        shard_size: str | int = SHARD_SIZE,
        adapters: bool | str = False,
        merge: bool = False,
    ) -> None:
        """Write the weights as `from_pretrained` of transformers reads them, while the run goes on; a collective call.

        Names are those in the files of the model's family, with `config.json`, `generation_config.json`, and tokenizer
        and chat template from the folder of the model; of other models those of the state dict. Rank 0 writes, and no
        rank holds more than one whole tensor. The folder appears when it is complete.

        Args:
            folder: which must not exist yet.
            dtype: of floating-point tensors; by default as kept, which is fp32 where there are master weights.
            shard_size: most bytes of tensors in a file.
            adapters: of a model of peft, write the active adapter alone, or the one of this name, as
                `PeftModel.from_pretrained` reads it.
            merge: of a model of peft, write the base with the active adapters added to it.

        Raises:
            CheckpointError: the folder exists or cannot be written, or a value does not fit the dtype.
            PlanError: the call is inside of `gathered()`, or the model has no such adapter. ConfigError: `shard_size`
                is no size.
        """
        whole, out = self._whole_weights("export"), Path(folder).absolute()
        if adapters or merge:
            export_adapters(whole, self.model, out, adapters, merge, ExportSizes(dtype, shard_size))
        else:
            whole.export(out, dtype, shard_size)

    def _whole_weights(self, method: str) -> WholeWeights:
        if self._forward.writes.allowed:
            raise PlanError(
                f"engine.{method}() was called inside `with engine.gathered():`, whose writes become the weights at "
                f"its end. Call it after the block."
            )
        self.flush()
        return self._state.wholes_of(WholeWeights, lambda: self.steps)

    @raises_budget_exceeded
    def save(
        self,
        path: str | Path,
        extra: Mapping[str, Any] | None = None,
        *,
        keep: int | None = None,
        wait: bool = False,
        base: bool = False,
    ) -> Saving:
        """Write a checkpoint folder: weights, optimizer states, random numbers, step; a collective call.

        Training may go on at once: the states are copied to the host's memory, and a thread brings them onto the disk.
        States without room for a copy there are waited for, with a `CheckpointWarning` the first time.
        A checkpoint that is still being written is waited for first. One that fails is a `CheckpointWarning` in the
        next step, unless `saving.wait()` raised it before.
        Frozen weights that `load_weights` read from files, and that nothing wrote since, are left out: the checkpoint
        holds their digests, and `load` compares these with the base that was read again.

        Args:
            extra: other state of the run, as plain values; `load` returns it.
            keep: how many checkpoints named like `step-00000100` stay in the folder, this one included; all by default.
            wait: return once the checkpoint is on the disk, without a copy in host memory.
            base: write frozen weights from files too.

        Raises:
            CheckpointError: the path exists already or cannot be made; with `wait`, whatever went wrong.
        """
        self.flush()
        check_settings(self.world, self.optimizer.param_groups)
        facts = {
            "zeroshard": __version__,
            "torch": str(torch.__version__),
            "plan": self.plan.as_dict(),
            "step": self.steps,
            "skipped": self.skipped,
            "loss_scale": self._decision.scaler.state() if self._decision.scaler else None,
            "loss_count": self._backward.losses.count,
            "last_update": self._decision.state(),
            "never_written": self._backward.reductions.never_written,
            "extra": dict(extra or {}),
        }
        return self._savings.begin(lambda: self._state.save(Path(path).absolute(), facts, keep, wait, base))

    @raises_budget_exceeded
    def load(self, path: str | Path) -> dict[str, Any]:
        """Go on from a checkpoint folder, written under any plan; a collective call.

        At the same number of ranks and under the same plan the run goes on bit for bit. Returns the `extra` of `save`.
        After an error the weights may be partly those of the checkpoint: load another one before going on. Of a
        checkpoint without the frozen base, that is read from its files first, unless `load_weights` has read it.

        Raises:
            CheckpointError: no checkpoint, or one of another model or optimizer, or over another base. DamagedError:
                one whose content is not what was written.
        """
        self._unfreeze()
        self.flush()
        self._savings.wait()
        if (source := self._state.unread_base(Path(path))) is not None:
            self.load_weights(source)
        check_settings(self.world, self.optimizer.param_groups)  # waits, since other ranks may still read shared memory
        facts = self._state.load(Path(path))
        self._take_over()
        self._backward.losses.passes.restart()
        self._backward.reductions.never_written = facts["never_written"]
        self.steps, self.skipped = facts["step"], facts["skipped"]
        if self._decision.scaler and facts["loss_scale"]:
            self._decision.scaler.load(facts["loss_scale"])
        self._backward.losses.count = facts.get("loss_count")
        last = facts.get("last_update", {})
        self._decision.load(last.get(str(self._stage.number), next(iter(last.values()), None)))
        extra: dict[str, Any] = facts["extra"]
        return extra

    @raises_budget_exceeded
    def load_weights(self, path: str | Path | WeightSource, states: bool = False) -> None:
        """Start from given weights: a safetensors file, a folder of them as transformers writes it, or a checkpoint.

        A collective call; each rank reads only the parts that it keeps. Optimizer states stay as they are.

        Args:
            path: of the files; or a source of tensors under the model's names, such as `zs.from_pretrained` opens.
            states: take the optimizer's states too, from a folder of `torch.distributed.checkpoint`; its options stay.

        Raises:
            CheckpointError: no such files, weights of another model, or no such states.
        """
        self.flush()
        self._savings.wait()
        self.world.agree(b"", "load weights")
        self._state.load_weights(Path(path) if isinstance(path, str | PathLike) else path, states)
        set_magnitudes(self.model, self._editing, self._assembly.magnitudes)
        self._take_over()

    @raises_budget_exceeded
    def load_state_dict(self, state: Mapping[str, Any] | None, strict: bool = True) -> LoadedKeys:
        """Start from a complete state dict, as `state_dict()` of an engine or a model gives it; a collective call.

        Under every plan, pipelines too. fp32 master weights take its values as they are; optimizer states stay as they
        are. Load hooks of modules are not called. A model that a host cannot hold whole reads files: `load_weights`.

        Args:
            state: by name, whole tensors in the shapes of the model's own `state_dict()`; the same on every rank, or
                on rank 0 alone, and None on the others. Buffers may be each rank's own.
            strict: refuse names that are missing or unknown; otherwise they are returned, and weights that are missing
                stay as they are.

        Raises:
            CheckpointError: it is of another model; or ranks give different values. PlanError: the call is inside of
                `gathered()`.
        """
        if self._forward.writes.allowed:
            raise PlanError(
                "engine.load_state_dict() was called inside `with engine.gathered():`, at whose end the gathered "
                "copies become the weights, so what is loaded would be lost. Call it outside of the block."
            )
        self.flush()
        keys = self._state.load_state_dict(state, strict)
        self._take_over()
        return keys

    def train(self, mode: bool = True) -> Self:
        """Put the model into training mode, or with `mode=False` into evaluation mode, as `nn.Module.train` does."""
        self.model.train(mode)
        return self

    def eval(self) -> Self:
        """Put the model into evaluation mode (dropout off, running statistics in use), as `nn.Module.eval` does."""
        return self.train(False)

    def check_replicas(self) -> None:
        """Compare copies of weights and states that several ranks hold; a collective call.

        Raises:
            DivergenceError: they differ, with the parameters and the ranks.
        """
        self.flush()
        check_replicas(self._assembly.parts, self.world, self._axes.named)

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
        """Number of processes in the job."""
        return self.mesh.ranks

    @property
    def comms(self) -> list[Comm]:
        """The collectives of each group that this rank is in."""
        return self._axes.all

    @property
    def recomputed(self) -> int:
        """Block forwards recomputed by backwards so far; chunks of a pipeline do not count."""
        return getattr(self._recomputation, "recomputed", 0)

    @property
    def activation_decisions(self) -> list[dict[str, Any]]:
        """Decisions of `recompute="auto"` on each block of this rank, with predicted and measured values."""
        return getattr(self._recomputation, "decisions", [])

    @property
    def checkpoint_arena(self) -> ArenaUse | None:
        """The use of the buffer of blocks' inputs, with `Activations(arena=True)`."""
        return getattr(self._recomputation, "arena", None)

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
        """Work and cost of the owners of whole parameters, in sentences; empty where slices are even."""
        return self._assembly.optimizer.owners.summary

    @property
    def loss_scale(self) -> float:
        """The factor that `backward` puts on the loss."""
        return self._decision.scale

    @property
    def seconds_waiting(self) -> float:
        """Seconds for which this rank waited for other ranks in the last step, and since the step before it."""
        return seconds_waited(self._sent)

    @property
    def speculation_counts(self) -> SpeculationCounts:
        """Offloaded updates that ran during backwards: how many were kept, and how many undone."""
        return self._late.speculation_counts

    def watch_gradients(self, watcher: Callable[[list[GradientShare]], None]) -> None:
        """Call `watcher` in each step from now on with this rank's shares of the mean gradients, before any clipping.

        The loss scale and counts of losses are divided out; the values are copies on the host.
        """
        parts, ranks, losses = self._assembly.parts, self._stage.ranks_per_data_rank, self._backward.losses
        self._decision.watcher = lambda: watcher(shares_of(parts, losses.gain * ranks / self.loss_scale))

    def trace(self, memory: bool = False, profile: str | PathLike[str] | None = None) -> AbstractContextManager[Trace]:
        """Record the times of forwards, backwards, updates, copies and host tasks inside; complete when it ends.

        On a GPU a copy is recorded when it is issued to its stream. Traces may be nested.

        Args:
            memory: record every change of memory too, activations included, which slows the forward down.
            profile: a folder for a profile by torch.profiler, in which each rank writes `rank0.json`, `rank1.json`
                and so on when the trace ends; ui.perfetto.dev and chrome://tracing open them.
        """
        file = None if profile is None else Path(profile) / f"rank{self._axes.world.mesh.rank}.json"
        ledger = self.ledger if memory else None
        return traced(self._order.interpreter, self._late.background, ledger, file)

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
        """The batch of this rank: its rank, or in a pipeline the number of its stage's replica."""
        return self._axes.data_rank

    @property
    def data_ranks(self) -> int:
        """How many batches, one per data rank, make up a step."""
        return self._axes.data_ranks

    @property
    def has_loss(self) -> bool:
        """Whether `train_step` returns the loss here: everywhere, but on the last stage if nothing flushes."""
        return not self.plan.streams or self._stage.is_last

    @property
    def reports(self) -> bool:
        """True on the one rank that logs for the job; it has the loss."""
        place = self._stage.mesh if self.plan.streams else self.mesh
        return self.has_loss and place.rank == 0

    @property
    def pipeline(self) -> PipelineSchedule | None:
        """The action lists of all ranks, where the model is cut into stages."""
        return self._stage.pipeline

    @property
    def layers(self) -> list[str]:
        """The names of the layers on this rank, where the model is cut into stages."""
        return [layer.name for layer in self._stage.layers]

    @property
    def split(self) -> tuple[str, ...]:
        """The layers with which the chunks after the first begin; a plan with this `split` gives the same cut."""
        return self._stage.split

    @property
    def checkpoint_nbytes(self) -> int:
        """Bytes of this rank's part of a checkpoint."""
        return self._state.nbytes

    @property
    def fetched_nbytes(self) -> int:
        """Bytes that a checkpoint takes in host memory at least, for states on a disk or in fewer bits."""
        return self._state.fetched_nbytes

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
        check_within(self.model, module)
        return layers_of(module)

    def compile(self, **options: Any) -> Self:
        """Compile the forward of each block by `torch.compile(**options)`, inside of its gathers; returns the engine.

        Raises:
            PlanError: an option or a plan that does not go with compiled blocks, or a block is compiled already.
        """
        check_compiling(self.plan)
        compile_blocks([unit.module for unit in self._assembly.parts.units if unit.module is not self.model], options)
        return self

    def memory(self) -> MemoryTable:
        """Bytes on this rank by category: planned by the formula, measured by the ledger.

        Optimizer states appear with the first step, in which torch makes them.
        """
        return memory_table(self._assembly.parts, self.ledger, self._stage.planned(), total_memory(self.device))

    def traffic(self) -> TrafficTable:
        """Traffic of the last step over the wire: formula and measured."""
        messages = self._order.planned_messages()
        return traffic_table(self._assembly.parts, self._work, merged(self._sent), messages)

    @property
    def sent_so_far(self) -> dict[Purpose, Count]:
        """Traffic of the current step over the wire, by purpose."""
        return merged(comm.counts for comm in self._axes.all)

    @property
    def communicators(self) -> int:
        """Number of communicators that this rank's collectives and messages have needed so far: on GPUs, NCCL's."""
        return len({each for comm in self._axes.all for each in comm.communicators})

    def _take_over(self) -> None:
        """Continue with the loaded weights."""
        self.world.agree(b"", "loaded")
        self._sequence.consume()
        self._order.reloaded()
        self._reset_counts()

    def _run(self, batch: Any) -> Loss:
        """The model's loss on a microbatch."""
        return self._joins.weighed(Loss.of(self._loss(call_with(self.model, batch), batch)))

    def _conclude(self, verdict: Verdict | None, loss: torch.Tensor | None) -> StepResult:
        """Count a step and its traffic."""
        self.steps += 1
        torch.clear_autocast_cache()  # of the weights before the update
        if self.mesh.heartbeat is not None:
            self.mesh.heartbeat.step(self.steps)
        if self._savings.last is not None:
            self._savings.warn_of_failure()
        norm, scale, skipped = (verdict.norm, verdict.scale, verdict.skip) if verdict else (math.nan, 1.0, False)
        self.skipped += skipped
        self._backward.losses.updates = self.steps - self.skipped
        if self.steps - self.skipped == FIRST_STEPS and self._axes.alike.mesh.rank == 0:
            warn_of_unused(self._assembly.parts, self._backward.reductions.never_written or ())
        self._forward.end_step()
        for each in self._step_ends:
            each.end_step(skipped)
        moved, self.exposed = self._late.background.reset()
        self._sent = [*(dict(comm.counts) for comm in self._axes.all), moved]
        self._reset_counts()
        return StepResult(self.steps, norm, scale, skipped, self._backward.losses.shown(loss))

    def _reset_counts(self) -> None:
        for comm in self._axes.all:
            comm.reset()

    def _refuse_partial(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._late.flush()
        asked, self._takes_apart = self._takes_apart, False
        if not asked and not self._gatherer.all_gathered:
            raise PlanError(
                "The parameters are sliced (zero=3), so the model's state_dict would hold NaN. Use "
                "engine.state_dict(), or call model.state_dict() inside `with engine.gathered():` on every rank."
            )

    def _work(self, unit: int) -> Work:
        """A step of this rank on a unit."""
        plan, around = self.plan, self._stage.ranks_per_data_rank
        recomputation = self._recomputation
        again = plan.microbatches * (recomputation is not None and recomputation.brings_twice(unit))
        updates = plan.microbatches // (plan.microbatches_per_update * (around if plan.streams else 1))
        return Work(
            plan.microbatches,
            self._order.gathers(unit) + again,
            updates,
            plan.reductions // around if plan.reductions > 1 else 1,
        )
