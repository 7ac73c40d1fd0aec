"""Own tokens where layers around a mixture are split: their ranks have the same tokens, and each sends a part of them.

Routers work on all tokens, alike on all these ranks; what experts get is cut after it, and joined before other layers
see it. So every rank of a stage may hold experts of its own, those that split layers too (Switch, 2101.03961, section
5.5), and of an expert no gradient is made twice.
"""

from dataclasses import replace

from torch import Tensor

from zeroshard.moe.routing.record import Routing
from zeroshard.parts.place import Axis
from zeroshard.tensor.split.collectives import CutRows, JoinRows, TensorRanks


class OwnTokens:
    """The tokens of this rank among those that have the same."""

    def __init__(self, axis: Axis) -> None:
        self._ranks = TensorRanks(axis)

    def cut(self, x: Tensor, routing: Routing, label: str) -> tuple[Tensor, Routing]:
        """Of tokens [T, D] and their routing this rank's; gradients are joined."""
        start, stop = self._ranks.rows(len(x))
        kept = None if routing.kept is None else routing.kept[start:stop]
        gates = self._cut(routing.gates, f"gates of {label}")
        return self._cut(x, label), replace(routing, experts=routing.experts[start:stop], gates=gates, kept=kept)

    def join(self, output: Tensor, tokens: int, label: str) -> Tensor:
        """The outputs [T, D] of so many tokens, from this rank's; gradients are cut."""
        joined: Tensor = JoinTokens.apply(output, self._ranks, 0, tokens, label)  # type: ignore[no-untyped-call]
        return joined

    def _cut(self, x: Tensor, label: str) -> Tensor:
        own: Tensor = CutTokens.apply(x, self._ranks, 0, label)  # type: ignore[no-untyped-call]
        return own


class CutTokens(CutRows):
    """As `CutRows`, around parameters that are no parts or copies of those of split layers."""


class JoinTokens(JoinRows):
    """As `JoinRows`, likewise."""
