"""The engine: a model, an optimizer and a plan, with torch's own semantics.

`backward` always adds, `step` always consumes; any number of forwards and backwards in any order is right in every
stage. `train_step` runs the same actions from a schedule.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard import schedule as schedules
from zeroshard.comm import Comm, Count, Purpose
from zeroshard.engine.accounts import MemoryTable, TrafficTable, memory_table, traffic_table
from zeroshard.engine.assembly import Assembler, OptimizerLike
from zeroshard.engine.backward import Backward
from zeroshard.engine.batch import call_with, loss_in, microbatches
from zeroshard.engine.forward import Forward
from zeroshard.engine.state import State
from zeroshard.engine.update import CLIP_EPSILON, Update
from zeroshard.errors import PlanError
from zeroshard.initialise import Initialiser
from zeroshard.ledger import Event, Ledger
from zeroshard.mesh import Mesh, init_mesh
from zeroshard.plan import Plan
from zeroshard.precision import LossScaler
from zeroshard.schedule import Kind, Schedule
from zeroshard.version import __version__
from zeroshard.zero import Gatherer

LossFunction = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did.

    Attributes:
        step: steps taken or skipped so far, this one included.
        grad_norm: 2-norm of the whole mean gradient before clipping, as it is (it may be infinite or NaN).
        loss_scale: the loss scale of this step, 1.0 without loss scaling.
        skipped: whether the weights were left as they are.
        loss: of `train_step`, this rank's mean loss; None after `step`.
    """

    step: int
    grad_norm: float
    loss_scale: float
    skipped: bool
    loss: torch.Tensor | None = None


class Engine:
    """Trains `model` as `plan` says.

    Args:
        model: any `nn.Module`; on the meta device it is materialised unit by unit, otherwise rank 0's weights are
            taken.
        optimizer: a `torch.optim` optimizer over the model's parameters, or a function of the parameters that makes
            one, such as `partial(torch.optim.AdamW, lr=3e-4)`. It must treat each element alone.
        plan: what each rank keeps, precision, accumulation.
        mesh: this process's place; by default from torchrun's environment.
        loss: for `train_step`, a function of (model output, microbatch) to the scalar loss; by default the output
            itself or its `.loss`.
        initialise: for a model on the meta device, called with each module; by default its `reset_parameters()`.

    Raises:
        PlanError, ModelError, OptimizerError, BudgetExceeded: what does not fit together.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerLike,
        plan: Plan | None = None,
        *,
        mesh: Mesh | None = None,
        loss: LossFunction | None = None,
        initialise: Initialiser | None = None,
    ) -> None:
        self.model = model
        self.plan = plan or Plan()
        self.mesh = mesh or init_mesh(self.plan.timeout)
        budget = self.plan.device_budget
        self.ledger = Ledger({} if budget is None else {"device": budget})
        self.comm = Comm(self.mesh)
        self._loss = loss or (lambda output, batch: loss_in(output))
        self._assembly = Assembler(model, self.plan, self.comm, self.ledger).assemble(optimizer, initialise)
        sliced = self.plan.zero == 3 and self.mesh.ranks > 1
        parameters = [[shard.parameters for shard in shards] for shards in self._assembly.shards]
        self._gatherer = Gatherer(self._assembly.units, parameters, self.comm) if sliced else None
        self._backward = Backward(self._assembly, self._gatherer, self.comm, self.plan.scales_loss)
        self._forward = Forward(model, self._assembly, self._gatherer, self._backward, self.ledger)
        self._update = Update(self._assembly, self._backward, self.comm)
        self._state = State(model, self._assembly, self.comm)
        self._scaler = _scaler(self.plan)
        self._clip: float | None = None
        self._counts: Mapping[Purpose, Count] = {}
        self.steps = 0
        self.skipped = 0
        self.schedule = self._make_schedule()
        model.register_state_dict_pre_hook(self._refuse_partial)
        self.comm.reset()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward."""
        return self.model(*args, **kwargs)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer, now over slices; give it to a learning-rate scheduler."""
        return self._assembly.optimizer.optimizer

    @property
    def loss_scale(self) -> float:
        """The factor that `backward` puts on the loss."""
        return self._scaler.scale if self._scaler else 1.0

    @property
    def order(self) -> dict[str, list[str]]:
        """Under ZeRO 3, the units in the order in which each kind of pass gathers them; recorded in the first step."""
        return self._gatherer.orders if self._gatherer else {}

    @property
    def units(self) -> list[str]:
        """The names of the units in their fixed order."""
        return [unit.label for unit in self._assembly.units]

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss` (a scalar) to those of the step; with loss scaling, of the scaled loss."""
        self._backward.forget_interrupted()
        self._backward.under_scale = True
        try:
            (loss * self.loss_scale if self._scaler else loss).backward()
        finally:
            self._backward.under_scale = False
            self._backward.forget_interrupted()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside add up on each rank without a reduction; the next one outside, or `step`, reduces the sum.

        Costs the memory of whole gradients under stages 2 and 3.
        """
        return self._backward.local()

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale the gradients down at the next `step` so that their 2-norm over all parameters is at most `max_norm`.

        A collective call. Returns the norm before clipping, exact over slices.
        """
        self._clip = max_norm
        return self._update.settle(self.steps).norm / self.loss_scale

    def step(self) -> StepResult:
        """Update the weights with what the backwards since the last step added up; a collective call.

        Raises:
            NonFiniteError: gradients are not finite and the plan says `nonfinite="raise"`.
            CommError: the ranks did different things, or a rank is gone.
        """
        self._backward.forget_interrupted()
        scale = self.loss_scale
        norm = self._update.settle(self.steps).norm / scale
        finite = math.isfinite(norm)
        if not finite and not self._scaler and self.plan.nonfinite == "raise":
            try:
                self._update.refuse_nonfinite(norm)
            finally:
                self._update.consume()
        skip = not finite and (self._scaler is not None or self.plan.nonfinite == "skip")
        if not skip:
            self._update.apply(self._clip_factor(norm) / scale)
        self._backward.expect()
        self._update.consume()
        self._clip = None
        if self._scaler:
            self._scaler.update(overflow=not finite)
        self.steps += 1
        self.skipped += skip
        self._counts = {purpose: replace(count) for purpose, count in self.comm.counts.items()}
        self.comm.reset()
        return StepResult(self.steps, norm, scale, skip)

    def train_step(self, batch: Any) -> StepResult:
        """One step of the schedule on this rank's batch: tensors [B, ...], cut into `plan.accumulate` microbatches.

        A mapping is passed to the model as keywords, a tuple or list as arguments. Each microbatch counts alike: its
        loss must be a mean.

        Raises:
            BatchError: the batch does not divide, or the model returned no loss.
        """
        parts = microbatches(batch, self.plan.accumulate)
        reduced = {action.microbatch for action in self.schedule if action.kind is Kind.REDUCE}
        losses: dict[int, torch.Tensor] = {}
        mean = torch.zeros((), device=self.mesh.device)
        result: StepResult | None = None
        for action in self.schedule:
            m = action.microbatch
            match action.kind:
                case Kind.FORWARD:
                    assert m is not None
                    losses[m] = self._loss(call_with(self, parts[m]), parts[m]) / len(parts)
                case Kind.BACKWARD:
                    assert m is not None
                    loss = losses.pop(m)
                    mean += loss.detach().to(mean.device)
                    if m in reduced:
                        self.backward(loss)
                    else:
                        with self.no_sync():
                            self.backward(loss)
                case Kind.UPDATE:
                    result = self.step()
                case Kind.GATHER | Kind.FREE | Kind.REDUCE:
                    pass  # [Note: hooks carry them out] unit by unit, inside the forward or backward that they surround
        assert result is not None
        return replace(result, loss=mean)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Whole parameters on every rank inside, also under stage 3; a collective call.

        What is written to parameters inside stays, slices and fp32 masters included; write alike on every rank.
        """
        with self._whole():
            yield
            for shard in self._assembly.all_shards:
                shard.keep_what_was_written()

    def state_dict(self) -> dict[str, Any]:
        """The model's own complete state dict on every rank, copied to the CPU; a collective call."""
        with self._whole():
            return {
                k: v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v
                for k, v in self.model.state_dict().items()
            }

    def memory(self) -> MemoryTable:
        """Bytes on this rank by category: planned by the formula, measured by the ledger.

        Optimizer states appear with the first step, in which torch makes them.
        """
        return memory_table(self._assembly, self.plan, self.mesh.ranks, self.ledger)

    def traffic(self) -> TrafficTable:
        """What the last step moved over the wire: formula and measured."""
        return traffic_table(self._assembly, self.plan, self.mesh.ranks, self._counts)

    def save(self, path: str | Path, extra: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint folder: weights, optimizer states, random numbers, step; a collective call.

        Args:
            extra: what else the run needs to go on, as plain JSON values; `load` returns it.

        Raises:
            CheckpointError: the path exists already, or a rank could not write.
        """
        facts = {
            "zeroshard": __version__,
            "plan": self.plan.as_dict(),
            "step": self.steps,
            "skipped": self.skipped,
            "loss_scale": self._scaler.state() if self._scaler else None,
            "never_written": self._backward.never_written,
            "extra": dict(extra or {}),
        }
        self._state.save(Path(path), facts)
        return Path(path)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Go on from a checkpoint folder: what any plan saved, any plan loads; a collective call.

        At the same number of ranks and under the same plan the run goes on bit for bit. Returns the `extra` of `save`.

        Raises:
            CheckpointError: no checkpoint, a damaged one, or one of another model or optimizer.
        """
        facts = self._state.load(Path(path))
        self._update.consume()
        self._backward.never_written = facts["never_written"]
        self.steps, self.skipped = facts["step"], facts["skipped"]
        if self._scaler and facts["loss_scale"]:
            self._scaler.load(facts["loss_scale"])
        self.comm.reset()
        extra: dict[str, Any] = facts["extra"]
        return extra

    @contextmanager
    def recording(self) -> Iterator[list[Event]]:
        """Keep every change of memory inside, activations included; the list is filled when the block ends."""
        events: list[Event] = []
        self.ledger.record()
        try:
            yield events
        finally:
            events.extend(self.ledger.stop())

    @contextmanager
    def _whole(self) -> Iterator[None]:
        if self._gatherer is None:
            yield
            return
        self._gatherer.pin()
        try:
            yield
        finally:
            self._gatherer.unpin()

    def _make_schedule(self) -> Schedule:
        plan = self.plan
        compute = schedules.accumulation(plan.accumulate)
        reduced = schedules.with_reductions(compute, plan.reduces_each_microbatch)
        actions = schedules.with_gathers(reduced) if self._gatherer else reduced
        actions = schedules.with_update(actions)
        schedules.verify(actions)
        return actions

    def _clip_factor(self, norm: float) -> float:
        limit = self._clip if self._clip is not None else self.plan.clip_norm
        return 1.0 if limit is None else min(1.0, limit / (norm + CLIP_EPSILON))

    def _refuse_partial(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self._gatherer is not None and not self._gatherer.everything_here():
            raise PlanError(
                "The parameters are sliced (zero=3), so the model's state_dict would hold NaN. Use "
                "engine.state_dict(), or call "
                "model.state_dict() inside `with engine.gathered():` on every rank."
            )


def _scaler(plan: Plan) -> LossScaler | None:
    if not plan.scales_loss:
        return None
    if isinstance(plan.loss_scale, (int, float)):
        return LossScaler(float(plan.loss_scale), dynamic=False)
    return LossScaler(
        plan.loss_scale_initial,
        growth=plan.loss_scale_growth,
        backoff=plan.loss_scale_backoff,
        window=plan.loss_scale_window,
        hysteresis=plan.loss_scale_hysteresis,
        floor=plan.loss_scale_floor,
    )
