"""The classes that the columns of logits are: all of them, or those of which one of several ranks has the weights."""

from typing import Any

from torch import Tensor


class Vocabulary:
    """All classes, in the order of the columns.

    A subclass says how ranks that have a part of the classes each bring together what a loss needs of all.
    """

    def classes(self, columns: int) -> int:
        """How many there are in all, of which these columns are some."""
        return columns

    def widest(self, columns: int) -> int:
        """The most columns of any rank."""
        return columns

    def find(self, numbers: Tensor) -> tuple[Tensor, Tensor | None]:
        """The columns of class numbers, and where the class is another rank's, so that the column means nothing."""
        return numbers, None

    def maximum(self, largest: Tensor) -> Tensor:
        """The largest over all classes, of the largest over the columns."""
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
        """Start to add up, in place, the ranks' gradients of something that all ranks have alike.

        Returns:
            what waits for it with `result()`; None where there is nothing to add.
        """


WHOLE = Vocabulary()
