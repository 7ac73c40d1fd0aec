"""Mixed precision as a choice of the planner."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zeroshard.planning.questions import Choice, Description, States


@dataclass(frozen=True)
class Computing(Choice):
    """The dtype of a plan.

    Attributes:
        precision: "fp32", "bf16" or "fp16".
        scales_loss: whether a loss scale is in use.
        adds_up: whether gradients of several backwards add up to those of a step.
    """

    precision: str = "fp32"
    scales_loss: bool = False
    adds_up: bool = False

    def describe(self, ranks: int | None) -> Description:
        """The dtype."""
        return Description((self.precision,))

    def share(self, states: States, ranks: int) -> States:
        """16-bit parameters and gradients have master weights of 4 bytes (1710.03740, section 3.1), and sums too."""
        if self.precision == "fp32":
            return states
        return replace(states, parameter=2, gradient=2, master_weight=4, gradient_sum=4 if self.adds_up else 0)

    def rehearsed(self, settled: int, meaningless: bool) -> Mapping[str, Any]:
        """Settings under which no step is skipped: gradients of meaningless values may overflow."""
        if not meaningless:
            return {}
        return {"nonfinite": "ignore", "loss_scale": 1.0 if self.scales_loss else "auto"}
