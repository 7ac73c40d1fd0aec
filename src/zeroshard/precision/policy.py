"""The loss scale of a plan."""

from dataclasses import dataclass
from typing import Literal

from zeroshard.errors import PlanError
from zeroshard.planning.foreign_names import explains_unknown
from zeroshard.planning.settings import check_number, check_whole, shown


@explains_unknown
@dataclass(frozen=True, repr=False)
class LossScale:
    """Settings of loss scaling (1710.03740, section 3.2).

    Raises:
        PlanError: a value out of range.
    """

    value: float | Literal["auto", "dynamic", "off"] = "auto"
    """A fixed loss scale, "dynamic", or "off"; "auto" is dynamic for fp16 and off otherwise."""
    initial: float = 65536.0
    """First value of a dynamic loss scale."""
    growth: float = 2.0
    """Factor on the dynamic loss scale after a window of good steps."""
    backoff: float = 0.5
    """Factor on the dynamic loss scale after an overflow."""
    window: int = 2000
    """Good steps before the dynamic loss scale grows."""
    hysteresis: int = 1
    """Overflows after which the dynamic loss scale backs off."""
    floor: float = 1.0
    """Lowest dynamic loss scale; an overflow there is an error."""

    def __post_init__(self) -> None:
        if self.value not in ("auto", "dynamic", "off"):
            if isinstance(self.value, str):
                raise PlanError(f"loss_scale is {self.value!r}; it must be a number, 'auto', 'dynamic' or 'off'.")
            check_number("loss_scale", self.value)
        for name in ("initial", "growth", "backoff", "floor"):
            check_number(f"loss_scale.{name}", getattr(self, name))
        for name in ("window", "hysteresis"):
            check_whole(f"loss_scale.{name}", getattr(self, name))
        if self.growth < 1 or self.backoff > 1:
            raise PlanError(
                f"loss_scale.growth is {self.growth} and loss_scale.backoff {self.backoff}; growth must be at least 1 "
                f"and backoff in (0, 1]."
            )

    def is_on(self, precision: str) -> bool:
        """Whether the loss is scaled under a precision."""
        return precision == "fp16" if self.value == "auto" else self.value != "off"

    def __repr__(self) -> str:
        return shown(self)
