"""Loss scaling (1710.03740, section 3.2): shift gradients into fp16's range, step only if all of them are finite."""

from dataclasses import dataclass

from zeroshard.errors import NonFiniteError
from zeroshard.precision.policy import LossScale


@dataclass(slots=True)
class LossScaler:
    """A static or dynamic loss scale.

    After an overflow the step is skipped; once `hysteresis` overflows came without a full window of good steps between
    them, the scale is multiplied by `backoff`. After `window` good steps it is multiplied by `growth`.

    Attributes:
        scale: the factor on the loss.
        dynamic: whether the scale changes.
        floor: the lowest scale; an overflow there is an error.
        good: steps without overflow since the last change.
        left: overflows until the scale backs off.
    """

    scale: float = 65536.0
    dynamic: bool = True
    growth: float = 2.0
    backoff: float = 0.5
    window: int = 2000
    hysteresis: int = 1
    floor: float = 1.0
    good: int = 0
    left: int = 0

    @classmethod
    def of(cls, policy: LossScale) -> "LossScaler":
        """The scaler of a policy, static or dynamic."""
        if isinstance(policy.value, (int, float)):
            return cls(float(policy.value), dynamic=False)
        return cls(policy.initial, True, policy.growth, policy.backoff, policy.window, policy.hysteresis, policy.floor)

    def __post_init__(self) -> None:
        self.left = self.left or self.hysteresis

    def update(self, overflow: bool) -> None:
        """Change the scale after a step, depending on whether it overflowed.

        Raises:
            NonFiniteError: an overflow with the scale at its floor.
        """
        if not self.dynamic:
            return
        if not overflow:
            self.good += 1
            if self.good >= self.window:
                self.scale, self.good, self.left = self.scale * self.growth, 0, self.hysteresis
            return
        self.good, self.left = 0, self.left - 1
        if self.left > 0:
            return
        if self.scale <= self.floor:
            raise NonFiniteError(
                f"The gradients overflow with the loss scale at its floor of {self.floor:g}. The loss itself is "
                f"probably not finite: "
                "lower the learning rate, use precision='bf16', or lower loss_scale.floor."
            )
        self.scale, self.left = max(self.scale * self.backoff, self.floor), self.hysteresis

    def state(self) -> dict[str, float]:
        """The values for a checkpoint."""
        return {"scale": self.scale, "good": self.good, "left": self.left}

    def load(self, state: dict[str, float]) -> None:
        """Continue from `state()`."""
        self.scale, self.good, self.left = state["scale"], int(state["good"]), int(state["left"])
