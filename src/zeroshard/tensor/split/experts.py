"""Split experts: each rank computes some inner features of every expert, and the outputs are summed.

The module's own forward runs on this rank's parts of its stacked parameters. Its tokens and their weights are equal on
all ranks, and their gradients are summed; its output is summed. Biases that all ranks would add are divided by their
number. Trials and the model itself use the same functions.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from zeroshard.tensor.find.found import FoundLayer, pieces_of
from zeroshard.units.forwards import insert


class SumBorders(Protocol):
    """Operations at the borders between whole activations and one rank's part of a sum."""

    def entered(self, path: str, x: Tensor) -> Tensor:
        """x; its gradient is summed over the ranks."""

    def summed(self, path: str, y: Tensor) -> Tensor:
        """The sum of y over the ranks."""


@contextmanager
def divided_biases(module: Any, layer: FoundLayer, ranks: int) -> Iterator[None]:
    """Within, the module reads biases that all ranks add as 1/ranks of their values."""
    names = [cut.name for cut in layer.cuts if not cut.segments] if ranks > 1 else []
    for name in names:
        vars(module)[name] = module._parameters[name] / ranks  # before the parameter in the order of attributes
    try:
        yield
    finally:
        for name in names:
            del vars(module)[name]


def fit_experts(module: nn.Module, layer: FoundLayer, borders: SumBorders, ranks: int) -> None:
    """Sum a module's output over the ranks, and the gradients of its arguments.

    Args:
        ranks: 1 for the whole model, in a trial.
    """

    def around(forward: Callable[..., Any]) -> Callable[..., Any]:
        def summed(*args: Any, **kwargs: Any) -> Tensor:
            count = 0

            def enter(leaf: Any) -> Any:
                nonlocal count
                count += 1
                floats = isinstance(leaf, Tensor) and leaf.is_floating_point()
                return borders.entered(f"{layer.name}.{count}", leaf) if floats else leaf

            args, kwargs = tree_map(enter, (args, kwargs))
            with divided_biases(module, layer, ranks):
                output: Tensor = forward(*args, **kwargs)
            return borders.summed(layer.name, output)

        return summed

    insert(module, "divided", around)


def cut_experts(module: Any, layer: FoundLayer, ranks: int, rank: int) -> None:
    """Cut the parameters of a trial's copy of experts to one rank's inner features."""
    for cut in layer.cuts:
        if cut.segments:
            whole = module._parameters[cut.name].detach()
            parts = [whole.narrow(cut.dimension, p.start, p.length) for p in pieces_of(cut.segments, ranks, rank)]
            module._parameters[cut.name] = nn.Parameter(torch.cat(parts, cut.dimension))
    for name, value in layer.sizes:
        vars(module)[name] = value
