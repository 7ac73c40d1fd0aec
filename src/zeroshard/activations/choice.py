"""Answers on activations to the planner."""

from dataclasses import dataclass

from zeroshard.parts.choice import Choice, Description

SHOWN = {"schedule": (), "off": ("no recompute",), "blocks": ("recompute",)}


@dataclass(frozen=True)
class Recomputing(Choice):
    """What of the activations a plan has computed again.

    Attributes:
        recompute: its name in `Activations`.
    """

    recompute: str = "schedule"

    def describe(self, ranks: int | None) -> Description:
        """What is recomputed, unless it is as the schedule says."""
        return Description(settings=SHOWN.get(self.recompute, (f"recompute {self.recompute}",)))

    @property
    def alike(self) -> bool:
        """With segments by the square root, a further block costs less than the last."""
        return self.recompute != "sqrt"
