"""The loss contract: a loss is a mean, or a sum with its count, and sums are divided by the count of the whole step.

[Note: losses by sum] The gradient of a step is that of the sum of all losses over the sum of all counts, over ranks and
microbatches, so every token weighs the same wherever it lies. The count is known when all forwards are done. So each
backward runs on its loss divided by a power of two near the count of the last step, the same on all ranks, which is
exact and keeps 16-bit gradients in range; the rest of the division is a factor on the reduced gradients, multiplied
into the one of clipping and loss scale.

[Note: penalties] Modules such as routers add penalties to the loss by themselves. A penalty hangs on an activation of
its module: its gradient is there when the activation's is, whatever the model returns, wherever it is cut into stages,
and in every kind of recomputation. It weighs what its microbatch weighs in the mean of the step, so over a step
penalties are averaged over microbatches and data ranks, with the counts of tokens where losses are sums. The engine
sets the weight, times the loss scale; in a plain `loss.backward()` it is 1.

[Note: same batches] Ranks that work on the same data compare a checksum of their batches, in messages that are sent
anyway: of shapes, and of one sum over the bits of each tensor, weighted by row. Sums stay on the device until the
message is made, which waits for the device by itself.
"""

import math
import struct
import zlib
from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeroshard.comm.left_passes import LeftPasses
from zeroshard.comm.mesh import Mesh
from zeroshard.errors import BatchError
from zeroshard.step.context import context
from zeroshard.units.hooks import tensors_of

BY_MEAN, BY_SUM, DOUBLE = 1, 2, 4  # the last: in float64
FIRST_COUNT = 1024.0  # of each data rank, before the first step with counts
WAY_OUT = "engine.backward(loss_sum, count=n), or a loss function that returns (loss_sum, n)"


class Loss(NamedTuple):
    """The loss of one backward, a scalar: a mean, or a sum with its count.

    Attributes:
        value: with its graph.
        items: how many tokens or rows the sum is over, as a number or a scalar tensor; None for a mean.
        share: of a mean: the factor on it, the weight of its microbatch, which `value` has.
    """

    value: Tensor
    items: float | Tensor | None = None
    share: float = 1.0

    @classmethod
    def of(cls, given: Any) -> "Loss":
        """A loss function's result as a `Loss`: a mean, (sum, count), or (sum, count, penalty).

        Raises:
            BatchError: as `by_sum`; or a tuple of another length.
        """
        if not isinstance(given, (tuple, list)):
            return cls(given)
        if isinstance(given, cls):
            return given
        if not 2 <= len(given) <= 3:
            raise BatchError(
                f"The loss function returned {len(given)} values; return the mean loss, (sum, count), or (sum, count, "
                f"penalty)."
            )
        return cls.by_sum(*given)

    @classmethod
    def by_sum(cls, total: Any, count: Any, penalty: Any = None) -> "Loss":
        """A sum over `count` tokens or rows, with a penalty that is no such sum and weighs 1 in the step's mean.

        A sum over no tokens is 0, whatever a mean over none (0/0) has made of it. A count that is no number is refused
        in the agreement on the step, on all ranks.

        Raises:
            BatchError: the sum is no scalar tensor, or in 16 bits that end at 65,504.
        """
        if not isinstance(total, Tensor) or total.numel() != 1:
            found = f"of shape {list(total.shape)}" if isinstance(total, Tensor) else repr(total)
            raise BatchError(f"The loss that was given with a count is {found}; it must be a scalar tensor, a sum.")
        if total.dtype == torch.float16:
            raise BatchError(
                "The loss that was given by sum is in float16, which ends at 65,504; compute it from logits.float()."
            )
        number = _number(count)
        total = _of_none(total, number)
        return cls(total.reshape(()) if penalty is None else total.reshape(()) + number * penalty, number)

    def weighted(self, weight: float) -> "Loss":
        """A mean times the weight of its microbatch; a sum as it is."""
        return self if self.items is not None else Loss(self.value * weight, share=self.share * weight)


class Unjoined:
    """The calls of an engine outside of `engine.join()`, where ranks have equally many batches."""

    def announce(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Nothing: every rank makes this call."""

    def weighed(self, loss: Loss) -> Loss:
        """The loss itself."""
        return loss


class LossReport(NamedTuple):
    """One rank's losses in a step, as reported to the other ranks.

    Attributes:
        kinds: how they were given, `BY_MEAN`, `BY_SUM` and `DOUBLE`; 0 for none.
        total: the sum of those by sum.
        items: the sum of their counts; or one that is no count.
    """

    kinds: int = 0
    total: float = 0.0
    items: float = 0.0


REPORT = struct.Struct("<Bdd")


class StepLosses:
    """The losses of the backwards since the last update, and the count that divides losses by sum.

    Args:
        skips: whether a step without any token is skipped; otherwise its gradient is 0, and so is its loss.
        mesh: of the engine, for errors of passes.

    Attributes:
        values: of those backwards, unscaled, as far as they are on this rank.
        kinds: how they were given, `BY_MEAN`, `BY_SUM` and `DOUBLE`; 0 for none.
        report: of this rank, as far as its tensors were read.
        count: of each data rank in the last step, on average; None before the first whose losses were sums.
        mean: of the last step, the whole sum over the whole count; None where losses are means.
        gain: the factor on the reduced gradients of the last step that makes them those of the mean.
        batches: of the forwards, to be compared between ranks that work on the same data.
        updates: of the weights so far, for a forward and its backward to compare.
        passes: that this rank left, to be compared between all ranks.
    """

    def __init__(self, skips: bool = False, mesh: Mesh | None = None) -> None:
        self._skips, self.passes = skips, LeftPasses(mesh or Mesh())
        self.updates = 0
        self.values: list[Tensor] = []
        self._counts: list[float | Tensor] = []
        self.kinds = 0
        self.report = LossReport()
        self.count: float | None = None
        self._next: float | None = None
        self.mean: Tensor | None = None
        self.gain = 1.0
        self.batches = SameBatches([])

    @property
    def divisor(self) -> float:
        """The power of two that divides losses by sum in the current step ([Note: losses by sum])."""
        fraction, exponent = math.frexp(self.count or FIRST_COUNT)
        return 2.0 ** (exponent - (fraction < math.sqrt(0.5)))

    def likely(self, scale: float) -> float:
        """The factor on the gradients under a loss scale, without clipping and with the count of the last step."""
        return 1.0 / scale * (self.divisor / self.count if self.count else 1.0)

    def scaled(self, loss: Loss, scale: float) -> Tensor:
        """The tensor on which the backward runs, under a loss scale.

        Raises:
            BatchError: the loss is no scalar tensor, or was made without the model's parameters.
        """
        value = loss.value
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            found = f"a {type(value).__name__}"
            if isinstance(value, Tensor):
                found = f"of shape {list(value.shape)}" if value.numel() != 1 else "a tensor that requires no gradient"
            raise BatchError(
                f"The loss is {found}; a backward needs a scalar tensor that was made with the model's parameters, "
                f"with gradients on, such as output.loss of an output of transformers."
            )
        factor = scale if loss.items is None else scale / self.divisor
        return loss.value if factor == 1.0 else loss.value * factor

    def weight(self, loss: Loss, scale: float) -> float | Tensor:
        """The weight in that backward of a penalty that weighs 1 in the mean of its microbatch ([Note: penalties])."""
        return scale * loss.share if loss.items is None else loss.items * (scale / self.divisor)

    def add(self, loss: Loss) -> None:
        """Record a loss whose backward is part of the step."""
        self.values.append(loss.value.detach().reshape(()))
        self.kinds |= (BY_MEAN if loss.items is None else BY_SUM) | DOUBLE * (loss.value.dtype == torch.float64)
        count = loss.items
        if isinstance(count, Tensor):
            count = count.float() if count.device.type != "cpu" else float(count)
        self._counts += [] if count is None else [count]

    def unread(self) -> list[Tensor]:
        """Scalars to be read with the gradients' norms, in one wait for the device."""
        return [*self.values, *(count for count in self._counts if isinstance(count, Tensor))]

    def read(self, numbers: Sequence[float]) -> bool:
        """Record the values of `unread`; returns whether the losses are finite."""
        losses, rest = numbers[: len(self.values)], iter(numbers[len(self.values) :])
        counts = [next(rest) if isinstance(count, Tensor) else count for count in self._counts]
        none = next((count for count in counts if not 0 <= count < math.inf), None)
        self.report = LossReport(self.kinds, sum(losses), sum(counts) if none is None else none)
        return all(map(math.isfinite, losses))

    def close(self, reports: Sequence[LossReport], data_ranks: int | None = None) -> float:
        """Divide the losses of all ranks; returns the factor that turns the reduced gradients into those of the mean.

        Args:
            reports: of all ranks, in their order.
            data_ranks: over how many the reduced gradients are a mean; by default all that report.

        Raises:
            BatchError: a count is no number of 0 or more; or some losses are sums and others means.
        """
        self.mean, self.gain = None, 1.0
        _refuse(reports)
        if not any(report.kinds & BY_SUM for report in reports):
            return self.gain
        count = sum(report.items for report in reports)
        each = count / (data_ranks or len(reports))
        self._next, nothing = each or None, math.nan if self._skips else 0.0
        dtype = torch.float64 if any(report.kinds & DOUBLE for report in reports) else None
        self.mean = torch.tensor(sum(report.total for report in reports) / count if count else nothing, dtype=dtype)
        self.gain = self.divisor / each if each else nothing
        return self.gain

    def shown(self, mean: Tensor | None) -> Tensor | None:
        """The loss of the last step: that of all ranks where losses are sums, else `mean`."""
        return mean if self.mean is None else self.mean

    def clear(self) -> None:
        """Clear all: the step is over, or its gradients are discarded."""
        self.values.clear()
        self._counts.clear()
        self.batches.clear()
        self.kinds, self.report = 0, LossReport()
        self.count, self._next = self._next or self.count, None


def _of_none(total: Tensor, count: float | Tensor) -> Tensor:
    """A sum, or zeros in the place of NaN or infinity where the count is 0; without a wait for the device."""
    device = count.device if isinstance(count, Tensor) else torch.device("cpu")
    if device not in (torch.device("cpu"), total.device) or (device.type == "cpu" and count != 0):
        return total
    empty = ~torch.isfinite(total.detach()) & (count == 0)
    return torch.where(empty, torch.zeros_like(total), total)


def _number(count: Any) -> float | Tensor:
    """A count as a number that can be added up; NaN if it is none."""
    if isinstance(count, Tensor) and count.numel() == 1 and not count.is_complex():
        return count.detach().reshape(())
    return float(count) if isinstance(count, Real) and not isinstance(count, bool) else math.nan


def _refuse(reports: Sequence[LossReport]) -> None:
    for rank, report in enumerate(reports):
        if not 0 <= report.items < math.inf:
            found = "is not a number" if math.isnan(report.items) else f"is {report.items:g}"
            raise BatchError(
                f"The count of a loss {found} on rank {rank}, and it must be the number of tokens or rows that the sum "
                f"is over, 0 or more: {WAY_OUT}."
            )
    means = [str(rank) for rank, report in enumerate(reports) if report.kinds & BY_MEAN]
    sums = [str(rank) for rank, report in enumerate(reports) if report.kinds & BY_SUM]
    if means and sums:
        raise BatchError(
            f"The loss was given by sum on rank {', '.join(sums)} and by mean on rank {', '.join(means)}; give all "
            f"losses of a step by sum with their counts, or all as means."
        )


MARK = "adds_penalty"  # an attribute, true of modules that may call `penalised`


def penalised(activation: Tensor, penalty: Tensor) -> Tensor:
    """The activation; its backward adds the gradient of the penalty (a scalar) with the weight of the microbatch."""
    result: Tensor = _Penalised.apply(activation, penalty)  # type: ignore[no-untyped-call]
    return result


def adds_penalties(model: nn.Module) -> bool:
    """Whether a module of the model may add penalties."""
    return any(getattr(module, MARK, False) for module in model.modules())


class _Penalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: Tensor, penalty: Tensor) -> Tensor:
        ctx.penalty = penalty.dtype, penalty.device
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.penalty
        return gradients[0], torch.ones((), dtype=dtype, device=device) * context.penalty_weight


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FACTOR = 1_000_003  # on the sums of earlier tensors
ROWS = 2**20  # the weights of rows begin anew after so many


class SameBatches:
    """Checksum of the batches of a step.

    Args:
        together: groups of ranks, each of which works on the same data.

    Attributes:
        watched: whether any group has several ranks; else nothing is computed or sent.
    """

    def __init__(self, together: Sequence[Sequence[int]]) -> None:
        self._together = together
        self.watched = any(len(ranks) > 1 for ranks in together)
        self._shapes, self._sums = 0, dict[torch.device, Tensor]()  # one on each device

    def add(self, batch: Any) -> None:
        """Add a batch of this rank to the checksum."""
        if not self.watched:
            return
        for leaf in tensors_of(batch):
            self._shapes = zlib.crc32(f"{list(leaf.shape)} {leaf.dtype}".encode(), self._shapes)
            total = _sum(leaf.detach())
            if type(total) is Tensor and not total.is_meta:  # neither a rehearsal's nor a plan's
                self._sums[total.device] = self._sums.get(total.device, 0) * FACTOR + total

    def read(self) -> tuple[int, ...]:
        """The checksum of the step so far; nothing where no ranks are compared. Waits for the device."""
        if not self.watched:
            return ()
        sums = [int(total) for total in self._sums.values()]
        return (zlib.crc32(struct.pack(f"<{len(sums)}q", *sums), self._shapes),)

    def clear(self) -> None:
        """Clear the checksum: the step is over."""
        self._shapes = 0
        self._sums.clear()

    def check(self, checksums: Sequence[int], step: int) -> None:
        """Compare the checksums of all ranks; every rank raises alike.

        Raises:
            BatchError: ranks that work on the same data were given different batches.
        """
        if not self.watched:
            return
        for number, ranks in enumerate(sorted(self._together, key=min)):
            other = next((rank for rank in ranks if checksums[rank] != checksums[ranks[0]]), None)
            if other is not None:
                raise BatchError(
                    f"In step {step + 1} the ranks {ranks[0]} and {other} were given different batches, and both work "
                    f"on the data of data rank {number}: they hold parts or stages of one model. Give every rank the "
                    f"batch of its engine.data_rank, not of its rank, such as DistributedSampler(dataset, "
                    f"num_replicas=engine.data_ranks, rank=engine.data_rank), with one seed."
                )


@torch.no_grad()
def _sum(tensor: Tensor) -> Tensor:
    """A checksum of values and the order of rows; exact, so equal wherever the bits are."""
    if tensor.layout != torch.strided or not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_floating_point():
        tensor = tensor.view(INTEGERS[tensor.dtype.itemsize])
    if not tensor.dim():
        return tensor.to(torch.int64)
    rows = tensor.sum(dim=tuple(range(1, tensor.dim())), dtype=torch.int64) if tensor.dim() > 1 else tensor
    weights = torch.arange(1, len(rows) + 1, device=rows.device).remainder_(ROWS)
    return (rows.to(torch.int64) * weights).sum()
