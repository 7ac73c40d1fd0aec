"""Clipping by hand: norms limited between the backwards and the step, as `torch.nn.utils.clip_grad_norm_` does."""

import math

from zeroshard.errors import PlanError

CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


def clipping_factor(limit: float, norm: float) -> float:
    """What scales gradients of this norm down to the limit."""
    return min(1.0, float(limit) / (norm + CLIP_EPSILON))


class Clipping:
    """What `clip_grad_norm` asked for in this step: each of its calls clips what the ones before left.

    Attributes:
        factor: of all gradients at the step; None where nothing was asked for.
    """

    def __init__(self) -> None:
        self.factor: float | None = None
        self._backwards = 0

    def of(self, backwards: int) -> float:
        """The factor of the gradients of so many backwards.

        Raises:
            PlanError: they are more than were clipped.
        """
        if self.factor is None:
            return 1.0
        if backwards != self._backwards:
            raise PlanError(
                f"{backwards - self._backwards} of {backwards} backwards of this step came after "
                f"engine.clip_grad_norm(), which clips at the step. Call it after the last backward; "
                f"engine.clip_grad_norm(float('inf')) measures the norm alone, after any of them."
            )
        return self.factor

    def limit(self, largest: float, norm: float, backwards: int) -> float:
        """Clip the gradients of so many backwards, whose norm is `norm`; returns the norm that was left of it before.

        Args:
            largest: limit of the norm; infinity leaves the gradients alone.

        Raises:
            PlanError: as `of`.
        """
        if not math.isfinite(largest):
            return norm * (1.0 if self.factor is None else self.factor)
        before = self.of(backwards)
        self.factor, self._backwards = before * clipping_factor(largest, norm * before), backwards
        return norm * before

    def forget(self) -> None:
        """The gradients are gone."""
        self.factor = None
