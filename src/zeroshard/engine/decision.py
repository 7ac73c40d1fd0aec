"""The decision on a step, from its gradient norm: clipped, skipped because of an overflow, or refused."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from zeroshard.checkpoint.facts import plain, setting
from zeroshard.plan import Plan
from zeroshard.precision.loss_scaling import LossScaler
from zeroshard.step.clipping import Clipping, clipping_factor
from zeroshard.step.sequence import StepEnd, Verdict


class Decision:
    """Decides from the same numbers on every rank.

    Attributes:
        clip: by hand, in place of the plan's, for the next step alone.
        last: the verdict on the last update; None before the first.
        watcher: called before each verdict, when all gradients are reduced.
        step_ends: told of it before.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.watcher: Callable[[], None] = lambda: None
        self.step_ends: Sequence[StepEnd] = ()
        self.scaler = LossScaler.of(plan.loss_scaling) if plan.scales_loss else None
        self.clip = Clipping()
        self.last: Verdict | None = None
        # Stages that do not wait for each other clip alone, and keep the whole norm within the limit.
        self._shares = plan.pipeline.stages if plan.streams else 1

    @property
    def scale(self) -> float:
        """The factor on the loss."""
        return self.scaler.scale if self.scaler else 1.0

    def state(self) -> list[Any] | None:
        """The last update, for a checkpoint: its norm, and whether it was skipped and is not counted yet."""
        return None if self.last is None else [plain(self.last.norm), self.last.skip and self._plan.streams]

    def load(self, state: list[Any] | None) -> None:
        """Go on from `state()`: a stage that has not updated yet in a step shows its last update."""
        self.last = None if state is None else Verdict(setting(state[0]), 1.0, state[1] and self._plan.streams, 1.0)

    def decide(self, scaled_norm: float, refuse: Callable[[float], None], sound: bool = True) -> Verdict:
        """The verdict on gradients whose norm, loss scale included, is `scaled_norm`.

        Args:
            refuse: raises for a norm that is not finite, where the plan says so.
            sound: whether all losses are finite, on all ranks.
        """
        for each in self.step_ends:
            each.before_update()
        self.watcher()
        scale = self.scale
        norm = scaled_norm / scale
        finite = math.isfinite(norm) and sound
        if not finite and not self.scaler and self._plan.nonfinite == "raise":
            refuse(norm)
        skip = not finite and (self.scaler is not None or self._plan.nonfinite == "skip")
        limit, factor = self._plan.clip_norm, self.clip.factor
        if factor is None:
            factor = 1.0 if limit is None else clipping_factor(limit / math.sqrt(self._shares), norm)
        if self.scaler:
            self.scaler.update(overflow=not finite)
        self.last = Verdict(norm, scale, skip, factor / scale)
        return self.last
