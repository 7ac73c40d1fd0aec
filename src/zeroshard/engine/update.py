"""The update: ranks agree on which gradients exist, the norm is exact over all slices, and each slice takes one step.

[Note: agreement] Once per step, every rank sends one small message: the step's number, checksums of the collectives so
far, which units it has not reduced, which parameters got a gradient, and its share of the squared norm. Everything that
could differ between ranks (an unused parameter, an overflow, a lost step) is decided by all from the same messages.
"""

import math
import struct
from collections.abc import Sequence
from functools import partial, reduce

import torch

from zeroshard.access.writes import Writes
from zeroshard.comm.collectives import Comm
from zeroshard.engine.backward import Backward
from zeroshard.engine.build import Assembly
from zeroshard.errors import NonFiniteError, PlanError
from zeroshard.parts.axes import Axes
from zeroshard.parts.gradients import edit_sum
from zeroshard.parts.part import Counted, Part
from zeroshard.platform import ranges
from zeroshard.step.agreement import Answer, check_together, written_flags
from zeroshard.step.losses import SameBatches
from zeroshard.step.sequence import Settled
from zeroshard.units import wide_norm
from zeroshard.validation.ranks import Settings, check_settings
from zeroshard.zero.reduce import average
from zeroshard.zero.reductions import either


class Update:
    """Takes steps with the gradients of one model."""

    def __init__(self, assembly: Assembly, backward: Backward, axes: Axes, writes: Writes) -> None:
        self._parts, self._optimizer, self._late = assembly.parts, assembly.optimizer, assembly.late
        self._backward, self._axes = backward, axes
        self._comm = axes.alike
        self._trained = assembly.parts.trained
        self._turns = assembly.parts.turns
        self._settled: tuple[int, Settled] | None = None
        self._averaged = 0  # backwards of the step whose gradients were averaged over the replicas
        self._writes = writes
        self._step = 0
        self._settings = Settings()
        if not backward.explicit:  # an order of several stages compares batches itself
            backward.losses.batches = SameBatches(axes.same_data)
        self._sound = True  # whether the losses of this rank are finite

    def settle(self, step: int, wanted: str = "") -> Settled:
        """Reduce the remaining gradients and agree with all ranks; a collective call, made once per step.

        Args:
            wanted: what is to be done with the gradients before the step, on which the ranks agree too.

        Raises:
            CommError: the ranks are at different steps, did different things on the way, or want different things.
            PlanError: weights or gradients were written where that is lost.
            BatchError, NonFiniteError: as `StepLosses.close`, which an order of several stages calls itself.
        """
        self._writes.reconcile(thoroughly=True)
        if self._backward.take_back():
            self._settled = None
        if self._settled is not None and self._settled[0] == self._backward.count:
            if wanted:
                self._comm.agree(b"", f"{wanted} in step {step}")
            return self._settled[1]
        self._step = step
        self.finish()
        answers = self._agree(step, wanted)
        left = sorted({unit for answer in answers for unit in answer.unreduced})
        if left:
            self._backward.reductions.reduce_units(left)
        averages = self._averaged != self._backward.count and self._average()
        self._averaged = self._backward.count
        if left or averages:
            answers = self._agree(step, wanted)
        norm = math.sqrt(sum(answer.squares for answer in answers))
        gain = 1.0 if self._backward.explicit else self._backward.losses.close([a.losses for a in answers])
        written = reduce(either, (answer.written for answer in answers))
        settled = Settled(norm * gain, written, all(answer.sound for answer in answers), gain)
        self._settled = (self._backward.count, settled)
        self._publish_written(settled)
        return settled

    def norm(self, step: int, kind: float, limit: float) -> float:
        """The p-norm of the mean gradient as it is (scaled), for p = `kind`; a collective call.

        Args:
            limit: of the norm, which is to be the same on all ranks: each clips its own slices to it.

        Raises:
            PlanError: `kind` is no number above 0, or `limit` none of 0 or more.
        """
        if not kind > 0:
            raise PlanError(f"norm_type is {kind!r}; it must be above 0, or infinity.")
        if not limit >= 0:
            raise PlanError(f"max_norm is {limit!r}; it must be 0 or more, or infinity to leave the gradients alone.")
        settled = self.settle(step, f"clip_grad_norm({limit:.9g}, {kind:.9g})")
        if kind == 2:
            return settled.norm
        sums = [values for each in self._counted() if (values := each.settle()).numel()]  # slices may be empty
        parts = [wide_norm(values, kind) for values in sums]
        own = torch.linalg.vector_norm(torch.tensor(parts, dtype=torch.float64), kind).item() if parts else 0.0
        everyone = self._comm.agree(struct.pack("<d", own), f"norm of step {step}")
        norms = torch.tensor([struct.unpack("<d", answer)[0] for answer in everyone], dtype=torch.float64)
        return float(torch.linalg.vector_norm(norms, kind)) * settled.gain

    def clip_values(self, step: int, limit: float, scale: float, hides: bool) -> None:
        """Limit every element of the mean gradient, which is `scale` times the true one; a collective call.

        Args:
            limit: of a true element's magnitude.
            hides: whether gradients that are not finite are limited too; else the step meets them as they are.

        Raises:
            PlanError: `limit` is no number above 0.
        """
        if not limit > 0:
            raise PlanError(f"clip_value is {limit!r}; it must be above 0.")
        settled = self.settle(step, f"clip_grad_value({limit:.9g})")
        if hides or math.isfinite(settled.norm):
            for _, gradients in self._trained:
                edit_sum(gradients, partial(_clamp, limit=limit * scale / settled.gain))
            self._settled = None  # the norm is another one now

    def discard(self, drop: bool = True) -> None:
        """Discard the gradients of the backwards since the last step; the agreement sees that all ranks do so.

        Args:
            drop: whether parameters count as without a gradient then, or have one of zeros.
        """
        if not self._backward.count or self._backward.explicit:
            return
        if drop:
            self.consume()
            self._backward.note_discard("all gradients")
        elif self._backward.take_back(everything=True):
            self._settled = None

    def demand(self, step: int) -> Settled:
        """As `settle`, for a step that needs gradients; a rank may have none where another has some.

        Raises:
            PlanError: no parameter got a gradient on any rank.
        """
        settled = self.settle(step)
        if not any(settled.written):
            self._settled = None  # or a rank that has no backward next time either would not agree anew
            raise PlanError(
                f"engine.step() number {step + 1} found no gradient on any rank: no backward since the last step has "
                f"reached a parameter that is trained. Call engine.backward(loss) before it, once per step at least, "
                f"with a loss that depends on the parameters."
            )
        return settled

    def refuse_nonfinite(self, norm: float, comm: Comm | None = None) -> None:
        """Raise with the names of the parameters whose gradients are not finite.

        Args:
            comm: all ranks that refuse; by default those that share the parameters.

        Raises:
            NonFiniteError: always.
        """
        mine = [name for part, gradients in self._trained for name in part.nonfinite(gradients)]
        losses = [loss for loss in map(float, self._backward.losses.values) if not math.isfinite(loss)]
        everyone = (comm or self._comm).agree_on([mine, str(losses[0]) if losses else None], "non-finite gradients")
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

    def apply(self, factor: float, parts: Sequence[Part] | None = None) -> None:
        """One optimizer step with the gradients times `factor`; parameters without a gradient stay as they are.

        Args:
            parts: those to update; all by default.
        """
        if ranges.profiler._is_profiler_enabled:
            with ranges.named("update", f"step {self._step}"):
                self._apply(factor, parts)
        else:
            self._apply(factor, parts)

    def _apply(self, factor: float, parts: Sequence[Part] | None) -> None:
        assert self._settled is not None
        chosen = None if parts is None else set(map(id, parts))
        written_in_step, turns = self._settled[1].written, []
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

    def leave_out(self) -> None:
        """Count a step without an update."""
        self._late.skip()

    def finish(self) -> None:
        """Wait until the weights of all updates begun are on the device."""
        self._late.finish()

    def skip(self, parts: Sequence[Part]) -> None:
        """Count a new version of these parts' weights that is the same as the last."""
        for part in parts:
            part.next_version()

    def consume(self) -> None:
        """Drop the step's gradients."""
        self._backward.reductions.end()  # of a backward that ended in an exception; may begin updates, to be forgotten
        self._late.forget()
        self._optimizer.one_step.end()
        for _, gradients in self._trained:
            gradients.consume()
        self._backward.count = self._averaged = 0
        self._backward.losses.clear()
        self._settled = None

    def _agree(self, step: int, wanted: str) -> list[Answer]:
        unreduced, units = self._backward.unreduced(), len(self._parts.units)
        squares = 0.0 if unreduced else self._squares()
        groups = self._optimizer.optimizer.param_groups
        settings = self._settings.checksum(groups) if self._comm.mesh.ranks > 1 else 0
        written = b"".join(map(written_flags, self._backward.gradients))
        losses = self._backward.losses.report
        batches = self._backward.losses.batches
        digests = *self._axes.digests, *batches.read()
        mine = Answer(step, digests, settings, squares, self._sound, losses, unreduced, written)
        label = f"agreement on step {step}" + (f", {wanted}" if wanted else "")
        frames = self._comm.agree(mine.pack(units), label)
        answers = [Answer.unpack(frame, units, len(mine.digests)) for frame in frames]
        check_together(answers, self._axes.new_groups)
        batches.check([answer.digests[-1] for answer in answers], step)
        if len({answer.settings for answer in answers}) > 1:
            check_settings(self._comm, groups)
        return answers

    def _average(self) -> bool:
        """Let each sum be the mean over all copies of its slice, a collective call; whether there are any."""
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
        found = [*(each.norm() for each in sums), *self._backward.losses.unread()]
        if len({(norm.device, norm.dtype) for norm in found}) > 1:
            found = [norm.to(found[0].device, torch.float64) for norm in found]
        norms: list[float] = torch.stack(found).tolist() if found else []  # one wait for the device, not one per flat
        self._sound = self._backward.losses.read(norms[len(sums) :])
        norms = norms[: len(sums)]
        for number, norm in enumerate(norms):
            if math.isinf(norm):  # perhaps only their squares do not fit
                norms[number] = wide_norm(sums[number].settle())
        return sum(norm * norm for norm in norms)

    def _publish_written(self, settled: Settled) -> None:
        """Mark a parameter that got a gradient on any rank as written on this rank too: its own may be zeros."""
        place = 0
        for gradients in self._backward.gradients:
            count = len(gradients.written_in_step)
            gradients.written_in_step = settled.written[place : place + count]
            place += count


def _clamp(total: torch.Tensor, limit: float) -> None:
    """Limit gradients in place. Under a loss scale fp16 may not reach the limit; what overflowed stays an overflow."""
    if limit < torch.finfo(total.dtype).max:
        total.clamp_(-limit, limit)
