"""Cross entropy of some rows of logits, and its gradient in the place of the logits."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """What is computed of each row of logits z with label y, and lse = log Σ exp z.

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

    def sum_(self, z: Tensor, labels: Tensor, gradients: bool) -> tuple[Tensor, Tensor]:
        """The sum over the rows that count, and how many there are; `z` becomes the gradient of the sum.

        Args:
            z: what the output layer gives, [n, V], in fp32 or fp64; overwritten.
            labels: [n].
            gradients: whether the gradient is wanted; if not, `z` is left undefined.
        """
        counts = labels != self.ignore_index
        at = labels.masked_fill(~counts, 0).unsqueeze(1)
        slope = self._cap_(z)
        largest = z.amax(1, keepdim=True)
        z.sub_(largest)
        losses = z.gather(1, at).mul_(self.label_smoothing - 1)
        if self.label_smoothing:
            losses -= z.sum(1, keepdim=True).mul_(self.label_smoothing / z.shape[1])
        partition = z.exp_().sum(1, keepdim=True)
        log_partition = partition.log()
        losses += log_partition
        of_partition = torch.ones_like(losses)
        if self.z_loss:
            lse = log_partition.add_(largest)
            losses += lse.square().mul_(self.z_loss)
            of_partition += lse.mul_(2 * self.z_loss)
        weights = counts.unsqueeze(1).to(z.dtype)
        total = losses.masked_fill_(~counts.unsqueeze(1), 0).sum()
        if gradients:
            z.mul_(of_partition.mul_(weights).div_(partition))
            if self.label_smoothing:
                z.sub_(weights * (self.label_smoothing / z.shape[1]))
            z.scatter_add_(1, at, weights.mul_(self.label_smoothing - 1))
            if slope is not None:
                z.mul_(slope)
            if self.scale != 1:
                z.mul_(self.scale)
        return total, counts.sum()

    def _cap_(self, z: Tensor) -> Tensor | None:
        """Scale and cap `z` in place; the derivative of the cap, [n, V], if there is one."""
        if self.scale != 1:
            z.mul_(self.scale)
        if self.softcap is None:
            return None
        z.div_(self.softcap).tanh_()
        slope = z.square().neg_().add_(1)
        z.mul_(self.softcap)
        return slope
