"""Cross entropy of some rows of logits, whole or split by classes, and its gradient in place of the logits."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Vocabulary:
    """All classes, in the order of the columns.

    A subclass is for classes split among ranks, with the reductions over them that a loss needs.
    """

    def classes(self, columns: int) -> int:
        """The number of classes in all, for this number of columns."""
        return columns

    def widest(self, columns: int) -> int:
        """The most columns of any rank."""
        return columns

    def find(self, numbers: Tensor) -> tuple[Tensor, Tensor | None]:
        """The columns of class numbers, and a mask of other ranks' classes, whose column is arbitrary; None if none."""
        return numbers, None

    def maximum(self, largest: Tensor) -> Tensor:
        """The maximum over all classes, from the maximum over the columns."""
        return largest

    def join(self, losses: Tensor, log_sums: Tensor, largest: Tensor, top: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Join the parts of rows; arguments and results are [n, 1], and the former may be overwritten.

        Args:
            losses: the columns' share of each row's loss less the logarithm of Σ exp(z - top) over all classes.
            log_sums: log Σ exp(z - largest) over the columns.
            largest: logit of the columns.
            top: the largest of all classes.

        Returns:
            the losses, lse = log Σ exp z over all classes, and the columns' share of Σ exp z; None where it is 1.
        """
        losses += log_sums
        return losses, log_sums.add_(top), None

    def start_sum(self, gradient: Tensor) -> Any:
        """Start to sum, in place, the ranks' gradients of a tensor that is equal on all ranks.

        Returns:
            a handle with `result()`; None without other ranks.
        """


WHOLE = Vocabulary()


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """The loss and gradient of each row of logits z with label y, and lse = log Σ exp z.

    -(1 - s)·log p[y] - s·mean(log p) + z_loss·lse², where p = softmax(z): label smoothing s as in
    `torch.nn.functional.cross_entropy` (1512.00567, section 7), z-loss as in PaLM (2204.02311, section 5).

    Attributes:
        ignore_index: the label of rows that do not count.
        label_smoothing: s.
        z_loss: the coefficient of lse².
        scale: each row is multiplied by it first.
        softcap: c, if the scaled row becomes c·tanh(row / c) (Gemma 2, 2408.00118, section 2).
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    scale: float = 1.0
    softcap: float | None = None

    def sum_(self, z: Tensor, labels: Tensor, gradients: bool, vocabulary: Vocabulary = WHOLE) -> tuple[Tensor, Tensor]:
        """The sum over the rows that count, and their mask [n]; see `rows_`."""
        losses, counts = self.rows_(z, labels, gradients, vocabulary)
        return losses.sum(), counts

    def rows_(
        self, z: Tensor, labels: Tensor, gradients: bool, vocabulary: Vocabulary = WHOLE
    ) -> tuple[Tensor, Tensor]:
        """The loss of each row, 0 if it does not count, and the mask of rows that count, both [n]; `z` gets gradients.

        Rows that do not count have a gradient too; the caller masks it, at the cost of a hidden state each instead of a
        row of logits.

        Args:
            z: the output layer's result, [n, V], in fp32 or fp64; overwritten.
            labels: [n].
            gradients: whether the gradient is wanted; if not, `z` is left undefined.
            vocabulary: the classes of the columns.
        """
        counts = labels != self.ignore_index
        at, elsewhere = vocabulary.find(labels.masked_fill(~counts, 0).unsqueeze(1))
        slope = self._cap_(z)
        columns, classes = z.shape[1], vocabulary.classes(z.shape[1])
        if not columns:
            z = _no_column(z)
        largest = z.amax(1, keepdim=True)  # on CPUs a tenth of the time of a maximum with its place
        top = vocabulary.maximum(largest)
        losses = z.gather(1, at).sub_(top).mul_(self.label_smoothing - 1)
        if elsewhere is not None:
            losses.masked_fill_(elsewhere, 0)
        if self.label_smoothing:
            losses -= z.mean(1, keepdim=True).sub_(top).mul_(self.label_smoothing * (columns / classes))
        if elsewhere is not None:  # another rank may have a finite logit if all columns here are -inf
            z[:, :1].clamp_(min=torch.finfo(z.dtype).min)
            largest.clamp_(min=torch.finfo(z.dtype).min)
        torch.softmax(z, 1, out=z)
        losses, lse, share = vocabulary.join(losses, z.amax(1, keepdim=True).log_().neg_(), largest, top)
        if self.z_loss:
            losses += lse.square().mul_(self.z_loss)
        if gradients and columns:
            if share is not None:
                z.mul_(share)
            if self.z_loss:
                z.mul_(lse.mul_(2 * self.z_loss).add_(1))
            if self.label_smoothing:
                z.sub_(self.label_smoothing / classes)
            less = torch.full_like(losses, self.label_smoothing - 1)
            z.scatter_add_(1, at, less if elsewhere is None else less.masked_fill_(elsewhere, 0))
            if slope is not None:
                z.mul_(slope)
            if self.scale != 1:
                z.mul_(self.scale)
        return losses.squeeze(1).masked_fill_(~counts, 0), counts

    def _cap_(self, z: Tensor) -> Tensor | None:
        """Scale and cap `z` in place; returns the derivative of the cap, [n, V], or None."""
        if self.scale != 1:
            z.mul_(self.scale)
        if self.softcap is None:
            return None
        z.div_(self.softcap).tanh_()
        slope = z.square().neg_().add_(1)
        z.mul_(self.softcap)
        return slope


def _no_column(z: Tensor) -> Tensor:
    """A column [n, 1] of the smallest numbers, for a rank without a class."""
    return z.new_full((len(z), 1), torch.finfo(z.dtype).min)
