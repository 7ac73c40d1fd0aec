"""Cross entropy of logits whose classes are split among ranks: two messages per forward, none in the backward.

Megatron-LM (1909.08053, section 3): for each row the ranks reduce the maximum of their logits, and then in one message
their shares of Σ exp z and of the rest of the loss: the logit of the label and, under label smoothing, the sum of all
logits. Each rank then has the loss, and the gradient of its own logits.

Shapes: N rows, V classes, V/t of them on this rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zeroshard.errors import BatchError, ModelError
from zeroshard.losses.row_gradients import CrossEntropy, Vocabulary
from zeroshard.tensor.split.collectives import TensorRanks
from zeroshard.traffic import Purpose


class SplitVocabulary(Vocabulary):
    """The classes [start, stop) of this rank, its `ranks.rows` of all.

    A deep copy works with the same ranks; an object loaded from a file has none, and raises an error if it needs them.

    Args:
        total: classes in all, V.
        name: of the layer, for messages.
    """

    def __init__(self, ranks: TensorRanks, start: int, stop: int, total: int, name: str) -> None:
        assert (start, stop) == ranks.rows(total), (start, stop, total)
        self.start, self.stop, self.total, self.name = start, stop, total, name
        self._ranks: TensorRanks | None = ranks
        self._warned = False

    @property
    def ranks(self) -> TensorRanks:
        """The ranks that hold the classes.

        Raises:
            ModelError: the object was loaded from a file.
        """
        if self._ranks is None:
            raise ModelError(
                f"{self.name} has the rows {self.start} to {self.stop} of {self.total} and was loaded without the "
                f"ranks that have the others. Save whole weights with engine.save() and `zeroshard export`, and load "
                f"these into a model of your own."
            )
        return self._ranks

    def itself(self) -> "SplitVocabulary":
        """This object; a search for tensors does not look into a bound method."""
        return self

    def warn_once(self) -> bool:
        """Whether this is the first call, for a warning."""
        first, self._warned = not self._warned, True
        return first

    def classes(self, columns: int) -> int:
        """V."""
        return self.total

    def widest(self, columns: int) -> int:
        """⌈V/t⌉."""
        return -(-self.total // self.ranks.size)

    def find(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The columns, and a mask of other ranks' classes (column 0); invalid class numbers stay invalid."""
        elsewhere = (numbers < self.start) | (numbers >= self.stop)
        elsewhere &= (numbers >= 0) & (numbers < self.total)
        return (numbers - self.start).masked_fill_(elsewhere, 0), elsewhere

    def maximum(self, largest: Tensor) -> Tensor:
        """One message of N elements."""
        return self.ranks.maximum(largest.clone(), f"largest logits of {self.name}")

    def join(self, losses: Tensor, log_sums: Tensor, largest: Tensor, top: Tensor) -> tuple[Tensor, Tensor, Any]:
        """One message of 2·N elements."""
        own = log_sums.add_(largest.sub_(top))  # log Σ exp(z - top) over own columns
        both = torch.cat((own.exp(), losses), 1)
        both = self.ranks.sum(both, f"losses of {self.name}", Purpose.SUM_LOSSES)
        log_sum = both[:, :1].log()
        return both[:, 1:] + log_sum, log_sum + top, own.sub_(log_sum).exp_()

    def start_sum(self, gradient: Tensor) -> Any:
        """One message of a hidden state for each row."""
        self.ranks.plan(Purpose.SUM_ACTIVATIONS, 2 * gradient.numel())
        return self.ranks.start_sum(gradient, f"gradient of {self.name}")

    def __deepcopy__(self, memo: Any) -> "SplitVocabulary":
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _without_ranks, (self.start, self.stop, self.total, self.name)


def _without_ranks(start: int, stop: int, total: int, name: str) -> SplitVocabulary:
    made = SplitVocabulary.__new__(SplitVocabulary)
    made.start, made.stop, made.total, made.name = start, stop, total, name
    made._ranks, made._warned = None, False
    return made


def vocabulary_cross_entropy(
    logits: Tensor, labels: Tensor, vocabulary: Vocabulary, terms: CrossEntropy, reduction: str = "mean"
) -> Tensor:
    """The loss of logits [N, V/t] with labels [N], at least fp32; the same on all ranks.

    Args:
        labels: class numbers of the whole vocabulary, int64.
        terms: the terms of a row's loss.
        reduction: "mean" over the rows that count (NaN if there are none, as in torch), "sum", or "none": [N].

    Raises:
        BatchError: its gradient is to be differentiated.
    """
    return _Loss.apply(logits, labels, terms, vocabulary, reduction, torch.is_grad_enabled())  # type: ignore[no-any-return, no-untyped-call]


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        terms: CrossEntropy,
        vocabulary: Vocabulary,
        reduction: str,
        trains: bool,
    ) -> Tensor:
        """Keep the gradient of each row in the dtype of the logits."""
        trains = trains and ctx.needs_input_grad[0]
        wide = torch.promote_types(logits.dtype, torch.float32)
        z = logits.to(wide, copy=True, memory_format=torch.contiguous_format)
        losses, counts = terms.rows_(z, labels, trains, vocabulary)
        divisor = counts.sum() if reduction == "mean" else None
        if trains:
            factor = counts.to(wide) if divisor is None else counts / divisor.clamp(min=1).to(wide)
            ctx.save_for_backward(z.to(logits.dtype), factor)
        if reduction == "none":
            return losses
        return losses.sum() if divisor is None else losses.sum() / divisor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of each row, times the gradient of its loss."""
        if torch.is_grad_enabled():
            raise BatchError(
                "The gradient of a vocabulary-parallel cross entropy was asked for with create_graph=True, and has no "
                "derivative of its own. Compute with `logits.whole()` where second derivatives are needed."
            )
        z, factor = ctx.saved_tensors
        rows = (factor * gradients[0]).unsqueeze(1)
        return (z * rows).to(z.dtype), None, None, None, None, None
