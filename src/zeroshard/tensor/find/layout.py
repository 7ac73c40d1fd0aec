"""A layout: one way to split column-parallel layers and the row-parallel layer behind them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zeroshard.errors import PlanError
from zeroshard.tensor.find.found import HeadArgument, Segment


class CannotSplit(Exception):
    """The layers cannot be split; the message is the reason."""


@dataclass(frozen=True, slots=True)
class SplitLayout:
    """One way to split the layers of a group.

    Attributes:
        segments: of each layer by path, the row-parallel one included.
        heads: modules with a row or a column per head, by path.
        partial: paths of other modules whose parameters have the size of one head (per-head norms).
        unknown: paths of the other modules with parameters.
        sizes: attributes to set, by the path of their module.
        reasons: each layer's share, by path.
        head_size: features of a head; 0 without heads.
        certain: whether the order of features is known.
        number: number of heads; 0 without.
        arguments: arguments of the attention module that are made for all heads.
        narrow: whether its forward takes the features of its heads from the width of its input.
        gathers: norms over the features of all heads, by path, with the segments that a rank keeps.
        shared: whole layers, by path, with the number of last features that all heads read.
        reuses: whether keys and values come from another layer, so that a trial of the module alone shows nothing.
    """

    segments: Mapping[str, tuple[Segment, ...]]
    heads: Mapping[str, tuple[Segment, ...]] = field(default_factory=dict)
    partial: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    head_size: int = 0
    certain: bool = True
    number: int = 0
    arguments: tuple[HeadArgument, ...] = ()
    narrow: bool = False
    gathers: Mapping[str, tuple[Segment, ...]] = field(default_factory=dict)
    shared: Mapping[str, int] = field(default_factory=dict)
    reuses: bool = False

    @property
    def adapted(self) -> bool:
        """Whether modules need more than sizes, so that a trial is required."""
        return bool(self.arguments or self.narrow or self.gathers or self.shared)


def last_part(path: str) -> str:
    """The name of a module in the one that holds it."""
    return path.rpartition(".")[2]


def every(path: str) -> str:
    """The pattern of the same module in all blocks: numbers of blocks as `*`."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


class DoesNotDivide(Exception):
    """One module whose heads or features the ranks do not divide.

    Attributes:
        path: path of the module.
        found: text: the module and its number of heads or features.
        why: text: how the ranks do not fit.
        fine: numbers of ranks that fit.
        called: the module's name in the advice to leave it whole.
    """

    def __init__(self, path: str, found: str, why: str, fine: Sequence[int], called: str) -> None:
        super().__init__(found)
        self.path, self.found, self.why, self.fine, self.called = path, found, why, fine, called


def refusal(found: Sequence[DoesNotDivide], ranks: int, alone: bool) -> PlanError:
    """The error with each kind of module once, and numbers of ranks that fit all.

    Args:
        alone: whether no other layer of the model is split.
    """
    kinds = {every(each.path): each for each in reversed(found)}
    first, *others = list(kinds.values())[::-1]
    fine = [number for number in first.fine if all(number in each.fine for each in others)]
    numbers = " and ".join(each.found for each in (first, *others))
    why = first.why if not others else "divides none of these" if len(others) > 1 else "divides neither"
    whole = dict.fromkeys(reversed(kinds), "whole")
    left = f"{'them' if others else first.called} whole: TensorParallel({ranks}, layers={whole!r})"
    return PlanError(
        f"{numbers}, and tensor_parallel={ranks} {why}. Set tensor_parallel to {_one_of(fine)}, or leave "
        f"{'it out, as no other layer can be split' if alone else left}."
    )


def _one_of(numbers: Sequence[int]) -> str:
    return f"{'one of ' if len(numbers) > 1 else ''}{', '.join(map(str, numbers)) or '1'}"
