"""The sequence of a step: reduce gradients, agree, decide, apply, end; the norm is exact over all slices.

`agree` reduces gradients that are left and exchanges a message ([Note: agreement]); a `Scope` widens the result to all
ranks that decide together. `decide` takes the verdict; `update` applies it to all parts or to those of a chunk and ends
the step.
"""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, Protocol

import torch

from zeroshard.comm.collectives import Comm
from zeroshard.errors import BatchError, BudgetExceeded, NonFiniteError, PlanError
from zeroshard.optim import SpanOptimizer
from zeroshard.parts.axes import Axes
from zeroshard.parts.gradients import edit_sum
from zeroshard.parts.part import Counted, LateUpdates, Part, Parts
from zeroshard.platform import ranges
from zeroshard.schedule import Schedule
from zeroshard.schedule.run import Interpreter
from zeroshard.step.backward import Backward, either, note_discard
from zeroshard.step.decision import (
    Agreed,
    Answer,
    Decision,
    OptimizerSettings,
    Verdict,
    check_same_step,
    check_settings,
    written_flags,
)
from zeroshard.step.losses import Loss, LossReport, SameBatches, StepLosses
from zeroshard.traffic import Purpose
from zeroshard.units import wide_norm
from zeroshard.zero.reduce import average

Run = Callable[[Any], Any]  # runs the model on a microbatch, down to the loss


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step.

    Attributes:
        step: steps taken or skipped so far, this one included.
        grad_norm: 2-norm of the whole mean gradient before clipping, as it is (it may be infinite or NaN).
        loss_scale: the loss scale of this step, 1.0 without loss scaling.
        skipped: whether the weights were left as they are.
        loss: where losses are given by sum, the sum of all over their count; else of `train_step` this rank's mean loss
            (over stages that of all), and None after `step`. Over ranks in fp32, or in float64 where losses are.
    """

    step: int
    grad_norm: float
    loss_scale: float
    skipped: bool
    loss: torch.Tensor | None = None


class StepOrder(Protocol):
    """Steps as lists of actions: over one stage, which the defaults are for, or over several.

    Attributes:
        interpreter: of the actions.
        actions: this rank's list of one step; the first step's, where steps differ.
    """

    interpreter: Interpreter
    actions: Schedule

    def step(self, batch: Any) -> torch.Tensor | None:
        """One step on this data rank's batch; the mean loss, where this rank has it."""

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the whole model for this data rank's arguments."""

    def flush(self) -> None:
        """Finish the microbatches in flight; there are none in one stage."""
        return

    def reloaded(self) -> None:
        """React to replaced weights; a collective call. One stage has no copies of them."""
        return

    def gathers(self, unit: int) -> int:
        """How often a step gathers a unit of sliced weights."""

    def planned_messages(self) -> dict[Purpose, int]:
        """Elements that this rank sends to other stages in a step."""
        return {}


class Scope(Protocol):
    """The ranks that decide on a step in one agreement.

    Attributes:
        comm: of these ranks.
        whole: whether each of them has the whole model, so that a rank without any gradient lacks a backward.
    """

    comm: Comm
    whole: bool

    def widen(self, agreed: Agreed, reports: Sequence[LossReport], step: int) -> Agreed:
        """A stage's agreement, whose ranks reported these losses, extended to all stages; may be a collective call.

        Raises:
            BatchError: as `StepLosses.close`.
        """


class AllRanks:
    """The ranks that train a model in one stage.

    Attributes:
        comm, whole: of a `Scope`.
    """

    whole = True

    def __init__(self, axes: Axes, losses: StepLosses) -> None:
        self.comm, self._losses = axes.alike, losses
        losses.batches = SameBatches(axes.same_data)

    def widen(self, agreed: Agreed, reports: Sequence[LossReport], step: int) -> Agreed:
        """Divide the losses by their counts: all ranks are in the agreement already."""
        gain = self._losses.close(reports)
        return Agreed(agreed.norm * gain, agreed.written, agreed.finite, gain)


class StepSequence:
    """Takes steps with the gradients of one model.

    Args:
        reconcile: takes over, or refuses, writes of the user into parameters and gradients.

    Attributes:
        backward: adds up the gradients.
        decision: on a step.
    """

    def __init__(
        self,
        parts: Parts,
        optimizer: SpanOptimizer,
        late: LateUpdates,
        backward: Backward,
        decision: Decision,
        axes: Axes,
        scope: Scope,
        reconcile: Callable[[], None],
    ) -> None:
        self._parts, self._optimizer, self._late = parts, optimizer, late
        self.backward, self.decision = backward, decision
        self._axes, self._scope, self._reconcile = axes, scope, reconcile
        self._trained, self._turns = parts.trained, parts.turns
        self._agreed: tuple[int, Agreed] | None = None  # with the number of backwards
        self._verdict: Verdict | None = None  # of the step under way
        self._averaged = 0  # backwards of the step whose gradients were averaged over the replicas
        self._step = 0
        self._settings = OptimizerSettings()
        self._finite = True  # whether the losses of this rank are

    @property
    def losses(self) -> StepLosses:
        """Those of the backwards since the last update."""
        return self.backward.losses

    def add(self, loss: Loss) -> float | torch.Tensor:
        """Run the backward of a loss under the loss scale; returns the weight of penalties in it."""
        losses, scale = self.losses, self.decision.scale
        weight = losses.weight(loss, scale)
        with self.backward.scaled(weight):
            losses.scaled(loss, scale).backward()
        losses.add(loss)
        return weight

    def agree(self, step: int, wanted: str = "") -> Agreed:
        """Reduce the remaining gradients and agree with all ranks; a collective call, made once per step.

        Args:
            wanted: an operation on the gradients before the step, on which the ranks agree too.

        Raises:
            CommError: the ranks are at different steps, did different things on the way, or want different things.
            PlanError: weights or gradients were written where that is lost.
            BatchError: as `StepLosses.close`.
        """
        self._reconcile()
        if self.backward.take_back():
            self._agreed = None
        if self._agreed is not None and self._agreed[0] == self.backward.count:
            if wanted:
                self._axes.alike.agree(b"", f"{wanted} in step {step}")
            return self._agreed[1]
        self._step = step
        self.finish()
        answers = self._exchange(step, wanted)
        left = sorted({unit for answer in answers for unit in answer.unreduced})
        if left:
            self.backward.reductions.reduce(left)
        averages = self._averaged != self.backward.count and self._average()
        self._averaged = self.backward.count
        if left or averages:
            answers = self._exchange(step, wanted)
        norm = math.sqrt(sum(answer.squares for answer in answers))
        written = reduce(either, (answer.written for answer in answers))
        agreed = Agreed(norm, written, all(answer.finite for answer in answers))
        agreed = self._scope.widen(agreed, [answer.losses for answer in answers], step)
        self._agreed = (self.backward.count, agreed)
        self._publish_written(agreed)
        return agreed

    def norm(self, step: int, kind: float, limit: float) -> float:
        """The p-norm of the mean gradient as it is (scaled), for p = `kind`; a collective call.

        Args:
            limit: of the norm, equal on all ranks: each clips its own slices to it.

        Raises:
            PlanError: `kind` is no number above 0, or `limit` none of 0 or more.
        """
        if not kind > 0:
            raise PlanError(f"norm_type is {kind!r}; it must be above 0, or infinity.")
        if isinstance(limit, str) or not limit >= 0:
            raise PlanError(f"max_norm is {limit!r}; it must be 0 or more, or infinity to leave the gradients alone.")
        agreed = self.agree(step, f"clip_grad_norm({limit:.9g}, {kind:.9g})")
        if kind == 2:
            return agreed.norm
        sums = [values for each in self._counted() if (values := each.settle()).numel()]  # slices may be empty
        parts = [wide_norm(values, kind) for values in sums]
        own = torch.linalg.vector_norm(torch.tensor(parts, dtype=torch.float64), kind).item() if parts else 0.0
        everyone = self._axes.alike.agree(struct.pack("<d", own), f"norm of step {step}")
        norms = torch.tensor([struct.unpack("<d", answer)[0] for answer in everyone], dtype=torch.float64)
        return float(torch.linalg.vector_norm(norms, kind)) * agreed.gain

    def clip_values(self, step: int, limit: float, scale: float, hides: bool) -> None:
        """Limit every element of the mean gradient, which is `scale` times the true one; a collective call.

        Args:
            limit: of a true element's magnitude.
            hides: whether gradients that are not finite are limited too; else they stay for the step's decision.

        Raises:
            PlanError: `limit` is no number above 0.
        """
        if not limit > 0:
            raise PlanError(f"clip_value is {limit!r}; it must be above 0.")
        agreed = self.agree(step, f"clip_grad_value({limit:.9g})")
        if hides or math.isfinite(agreed.norm):
            for _, gradients in self._trained:
                edit_sum(gradients, partial(_clamp, limit=limit * scale / (agreed.gain or 1.0)))
            self._agreed = None  # the norm is another one now

    def discard(self, drop: bool = True) -> None:
        """Discard the gradients of the backwards since the last step; the agreement checks that all ranks do so.

        Args:
            drop: whether parameters count as without a gradient then, or have one of zeros.
        """
        if not self.backward.count or not self._scope.whole:
            return
        if drop:
            self.consume()
            note_discard(self.backward, "all gradients")
        elif self.backward.take_back(everything=True):
            self._agreed = None

    def note_edit(self, label: str = "") -> None:
        """Measure the norm of reduced gradients again, which were changed; ranks compare the label in the agreement."""
        self._agreed = None
        if label:
            note_discard(self.backward, label)

    def decide(self, step: int) -> None:
        """Reduce, agree and decide, before the first update of a step; a collective call.

        Raises:
            PlanError: no parameter got a gradient on any rank, or a backward came after `clip_grad_norm`.
            NonFiniteError: gradients are not finite, and the plan refuses them.
        """
        if self._verdict is not None:
            return
        self.backward.forget_interrupted()
        try:
            agreed = self._demand(step)
            self.decision.clip.of(self.backward.count)
            if self.decision.before_update is not None:
                self.decision.before_update(agreed)
                agreed = self._measured(agreed)
            self._verdict = self._decide(agreed)
        except (BatchError, BudgetExceeded, NonFiniteError):
            self.consume()
            raise
        finally:
            self.decision.clip.forget()

    def update(self, parts: Sequence[Part] | None = None, last: bool = True) -> None:
        """Apply the verdict: one optimizer step, or none; parameters without a gradient stay as they are.

        Args:
            parts: those to update; all by default.
            last: whether the step ends with this update.
        """
        assert self._verdict is not None and self._agreed is not None
        factor = self._verdict.factor * self._agreed[1].gain
        if not self._verdict.skip and ranges.profiler._is_profiler_enabled:
            with ranges.named("update", f"step {self._step}"):
                self._apply(factor, parts)
        elif not self._verdict.skip:
            self._apply(factor, parts)
        elif parts is None:
            self._late.skip()
        else:
            for part in parts:
                part.next_version()
        if last:
            self.backward.reductions.learn()
            self.consume()

    def take(self, step: int) -> None:
        """All of a step, for a model in one stage; a collective call."""
        self.begin()
        self.decide(step)
        self.update()

    def begin(self) -> None:
        """Begin a list of actions; a step that was interrupted after its decision is decided again."""
        self._verdict = None

    def finish(self) -> None:
        """Wait until the weights of all updates begun are on the device."""
        self._late.finish()

    def consume(self) -> None:
        """Drop the step's gradients; the step is over."""
        self._verdict = None
        self.backward.reductions.end()  # of a backward that ended in an exception; may begin updates, which are dropped
        self._late.forget()
        self._optimizer.one_step.end()
        for _, gradients in self._trained:
            gradients.consume()
        self.backward.restart()
        self._averaged = 0
        self._agreed = None

    def _demand(self, step: int) -> Agreed:
        """As `agree`, for a step that needs gradients; a rank may have none where another has some."""
        agreed = self.agree(step)
        if self._scope.whole and not any(agreed.written):
            self._agreed = None  # or a rank without a backward next time would not agree again
            raise PlanError(
                f"engine.step() number {step + 1} found no gradient on any rank: no backward since the last step has "
                f"reached a parameter that is trained. Call engine.backward(loss) before it, once per step at least, "
                f"with a loss that depends on the parameters."
            )
        return agreed

    def _decide(self, agreed: Agreed) -> Verdict:
        try:
            return self.decision.decide(agreed, self._refuse_nonfinite)
        except Exception:
            self.consume()
            raise

    def _refuse_nonfinite(self, norm: float) -> None:
        """Raise with the names of the parameters whose gradients are not finite."""
        mine = [name for part, gradients in self._trained for name in part.nonfinite(gradients)]
        losses = [loss for loss in map(float, self.losses.values) if not math.isfinite(loss)]
        everyone = self._scope.comm.agree_on([mine, str(losses[0]) if losses else None], "non-finite gradients")
        found = list(dict.fromkeys(name for names, _ in everyone for name in names))
        shown = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
        what = [f"The gradient of {shown} is not finite (norm {norm})"] if found else []
        bad = [(rank, loss) for rank, (_, loss) in enumerate(everyone) if loss]
        if bad:
            ranks = ", ".join(str(rank) for rank, _ in bad)
            what.append(f"The loss is {bad[0][1]} on rank{'s' if len(bad) > 1 else ''} {ranks}")
        raise NonFiniteError(
            f"{'. '.join(what)}; the weights were left as they are. Look at the batch (no token to predict, an empty "
            f"part) and the loss, lower the learning rate, set clip_norm, or choose nonfinite='skip' to leave such "
            f"steps out."
        )

    def _apply(self, factor: float, parts: Sequence[Part] | None) -> None:
        """One optimizer step with the gradients times `factor`."""
        assert self._agreed is not None
        chosen = None if parts is None else set(map(id, parts))
        written_in_step, turns = self._agreed[1].written, []
        for part, gradients, place in self._turns:
            written = written_in_step[place : place + len(part.flat.parameters)]
            if chosen is not None and id(part) not in chosen:
                continue
            part.next_version()
            if any(written):
                gradients.reduction.start_whole()
                turns.append((part, gradients, written))
        for part, gradients, written in turns:
            part.updater.update(gradients, written, factor)
        self._optimizer.flush()
        for part, _ in self._trained:
            part.weights.published()
        self._late.start(factor, self._step)
        self._optimizer.account()

    def _measured(self, agreed: Agreed) -> Agreed:
        """The agreement with the norm of changed gradients; a collective call of all stages, if they were changed."""
        if self._agreed is None:
            own = struct.pack("<d", self._squares() * agreed.gain**2)
            everyone = self._axes.world.agree(own, "norm of changed gradients")
            norm = math.sqrt(sum(struct.unpack("<d", each)[0] for each in everyone))
            self._agreed = (self.backward.count, replace(agreed, norm=norm))
        return self._agreed[1]

    def _exchange(self, step: int, wanted: str) -> list[Answer]:
        unreduced, units = self.backward.reductions.unreduced(), len(self._parts.units)
        squares = 0.0 if unreduced else self._squares()
        groups = self._optimizer.optimizer.param_groups
        settings = self._settings.checksum(groups) if self._axes.alike.mesh.ranks > 1 else 0
        written = b"".join(map(written_flags, self.backward.gradients))
        losses = self.losses.report
        batches, passes, axes = self.losses.batches, self.losses.passes, self._axes.digests
        digests = *axes, passes.left, *batches.read()
        mine = Answer(step, digests, settings, squares, self._finite, losses, unreduced, written)
        label = f"agreement on step {step}" + (f", {wanted}" if wanted else "")
        frames = self._axes.alike.agree(mine.pack(units), label)
        answers = [Answer.unpack(frame, units, len(mine.digests)) for frame in frames]
        unlike = passes.check([answer.digests[len(axes)] for answer in answers], self._axes.alike, step)
        if unlike is not None:
            self.consume()
            raise unlike
        check_same_step(answers, self._axes.new_groups, self._axes.alike, self.backward.discards)
        batches.check([answer.digests[-1] for answer in answers], step)
        if len({answer.settings for answer in answers}) > 1:
            check_settings(self._axes.alike, groups)
        return answers

    def _average(self) -> bool:
        """Average each sum over all copies of its slice, a collective call; returns whether there are copies."""
        arena, copied = self._parts.arena, [item for item in self._trained if item[0].place.copies is not None]
        for part, gradients in copied:
            assert part.place.copies is not None
            over = partial(average, comm=part.place.copies.comm, arena=arena, label=f"replicas of {part.flat.label}")
            edit_sum(gradients, over, filled=True)
        return bool(copied)

    def _counted(self) -> list[Counted]:
        """The gradients that this rank counts."""
        return [each for part, gradients in self._trained for each in part.counted(gradients.settle())]

    def _squares(self) -> float:
        """This rank's share of the squared norm."""
        sums = self._counted()
        found = [*(each.norm() for each in sums), *self.losses.unread()]
        if len({(norm.device, norm.dtype) for norm in found}) > 1:
            found = [norm.to(found[0].device, torch.float64) for norm in found]
        norms: list[float] = torch.stack(found).tolist() if found else []  # one wait for the device, not one per flat
        self._finite = self.losses.read(norms[len(sums) :])
        pairs = zip(sums, norms, strict=False)  # of infinite norms, perhaps only the squares do not fit
        norms = [wide_norm(one.settle()) if math.isinf(norm) else norm for one, norm in pairs]
        return sum(norm * norm for norm in norms)

    def _publish_written(self, agreed: Agreed) -> None:
        """Mark a parameter with a gradient on any rank as written on this rank too: its own gradient may be zero."""
        place = 0
        for gradients in self.backward.gradients:
            count = len(gradients.flat.parameters)
            gradients.written_in_step = agreed.written[place : place + count]
            place += count


def _clamp(total: torch.Tensor, limit: float) -> None:
    """Limit gradients in place. Under a loss scale fp16 may not reach the limit; an overflow stays an overflow."""
    if limit < torch.finfo(total.dtype).max:
        total.clamp_(-limit, limit)


def train_parts(sequence: StepSequence) -> None:
    """Make a sequence find the trained parts again, of which some were replaced."""
    sequence._trained, sequence._turns = sequence._parts.trained, sequence._parts.turns
