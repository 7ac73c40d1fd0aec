"""Zones of activations: the part of an activation on a rank where layers are split, for random numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from zeroshard.parts.place import Axis


class Zone(StrEnum):
    """How activations lie among the ranks that split layers."""

    WHOLE = "whole"
    """Equal on all ranks."""
    COLUMNS = "columns"
    """This rank's features or heads, between a column-parallel and a row-parallel layer."""
    SEQUENCE = "sequence"
    """This rank's positions of each sequence, between the split layers of blocks."""


@dataclass(frozen=True, slots=True)
class Division:
    """A dimension of activations of which each rank has a run.

    Attributes:
        whole: its size on one process.
        first: the number of this rank's first element.
        size: of this rank's run; several ranks may have the same one.
    """

    whole: int
    first: int
    size: int


@dataclass(frozen=True, slots=True)
class DividedActivations:
    """The activations of which a rank has a part: the dimensions that may be divided, and how. B rows, T positions.

    Attributes:
        positions: of [B, T, ...], or of [B·T, ...].
        heads: of attention probabilities [B, H, T, S], or of [B·H, T, S]; several where layers are divided unlike.
        features: of [B, T, F] or [N, F]; several where layers are divided unlike.
    """

    positions: Division | None = None
    heads: tuple[Division, ...] = ()
    features: tuple[Division, ...] = ()

    def described(self) -> str:
        """This rank's part, in words."""
        kinds = {
            "positions": (self.positions,) if self.positions else (),
            "heads": self.heads,
            "features": self.features,
        }
        parts = [f"{each.size} of {each.whole} {name}" for name, divisions in kinds.items() for each in divisions]
        return " or ".join(parts) or "parts of no known size"


Moved = Callable[[Zone | None, bool], None]
"""Told of each border: the zone that is entered, or None back to the one around split layers; and whether the zone is
from here on the one around them."""


class ActivationZones(Protocol):
    """Zones in a model's forwards where activations are divided among the ranks of an axis.

    Attributes:
        axis: of those ranks; None before the model is cut.
        moved: called at each border.
    """

    axis: Axis | None
    moved: Moved

    @property
    def divided(self) -> DividedActivations | None:
        """How the activations of the next operation are divided; None where they are whole."""

    def reset(self) -> None:
        """Begin a forward, of a model or of some of its layers."""
