"""The recomputation that a policy asks for."""

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Any

from torch import nn

from zeroshard.activations.operations import operations_of
from zeroshard.activations.policy import Activations
from zeroshard.activations.recomputation import Recomputation
from zeroshard.activations.segments import Surroundings


def recomputation_of(
    policy: Activations, model: nn.Module, blocks: Sequence[tuple[nn.Module, int]], around: Surroundings, staged: bool
) -> Recomputation:
    """Recompute the blocks of a model as a policy says.

    Args:
        staged: whether the model is cut into stages, so that other forwards come before a forward's backward.
    """
    operations = operations_of(policy.operations) if policy.recompute == "selective" else _no_operations
    lengths, last = LENGTHS[policy.recompute], staged or policy.recompute != "sqrt"
    return Recomputation(model, blocks, lengths, around, operations, policy.save_sums, last)


def one_by_one(blocks: int) -> list[int]:
    """Segments of one block each."""
    return [1] * blocks


def by_square_root(blocks: int) -> list[int]:
    """The lengths of about √l segments of l blocks, which differ by one at most (1604.06174, section 3)."""
    segments = max(1, round(sqrt(blocks)))
    return [blocks * (n + 1) // segments - blocks * n // segments for n in range(segments)]


LENGTHS: Mapping[str, Callable[[int], list[int]]] = {
    "blocks": one_by_one,
    "selective": one_by_one,
    "sqrt": by_square_root,
}


def _no_operations(region: Any) -> None:
    return None
