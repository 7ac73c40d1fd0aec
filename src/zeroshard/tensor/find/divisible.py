"""Heads and features that the ranks do not divide: one refusal for all of a model, with the numbers that would do."""

from collections.abc import Sequence

from zeroshard.errors import PlanError
from zeroshard.tensor.find.layout import every


class DoesNotDivide(Exception):
    """One module whose heads or features the ranks do not divide.

    Attributes:
        path: of the module.
        found: the module, and the number that it has.
        why: what the ranks do not do.
        fine: numbers of ranks that would do.
        called: the module in the advice to leave it whole.
    """

    def __init__(self, path: str, found: str, why: str, fine: Sequence[int], called: str) -> None:
        super().__init__(found)
        self.path, self.found, self.why, self.fine, self.called = path, found, why, fine, called


def refusal(found: Sequence[DoesNotDivide], ranks: int) -> PlanError:
    """The error that names each kind of module once, and numbers of ranks that suit all."""
    kinds = {every(each.path): each for each in reversed(found)}
    first, *others = list(kinds.values())[::-1]
    fine = [number for number in first.fine if all(number in each.fine for each in others)]
    numbers = " and ".join(each.found for each in (first, *others))
    why = first.why if not others else "divides none of these" if len(others) > 1 else "divides neither"
    whole = dict.fromkeys(reversed(kinds), "whole")
    return PlanError(
        f"{numbers}, and tensor_parallel={ranks} {why}. Set tensor_parallel to {_one_of(fine)}, or leave "
        f"{'them' if others else first.called} whole: TensorParallel({ranks}, layers={whole!r})."
    )


def _one_of(numbers: Sequence[int]) -> str:
    return f"{'one of ' if len(numbers) > 1 else ''}{', '.join(map(str, numbers)) or '1'}"
