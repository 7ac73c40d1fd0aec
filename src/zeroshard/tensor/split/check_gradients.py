"""A check of each block's first autograd graph: which gradients are parts of sums, and which are whole.

A parameter that is not split gets a part of its gradient on each rank if it works on this rank's features or positions,
and the whole gradient elsewhere. The check follows the autograd graph, from the nodes that sum and cut, and compares it
with the assumption of the model's cut; a model that mixes both in one tensor is refused.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zeroshard.errors import ModelError
from zeroshard.parts.place import Partial, Split
from zeroshard.tensor.split.collectives import CopyIn, CutRows, Gathered, JoinRows, Summed, SumOut, Zone, Zones
from zeroshard.tensor.split.heads import GatheredFeatures, SharedFeatures
from zeroshard.tensor.split.layers import AwaitedInput, is_column_product
from zeroshard.units.hooks import Hook, tensors_in

# the zone before a node, towards the parameters, by its kind
BEFORE: dict[Any, Callable[[Any], Zone]] = {
    SumOut: lambda node: Zone.COLUMNS,
    Summed: lambda node: Zone.COLUMNS,
    CopyIn: lambda node: Zone.WHOLE,
    Gathered: lambda node: Zone.SEQUENCE,
    AwaitedInput: lambda node: Zone.WHOLE if node.input.rows is None else Zone.SEQUENCE,
    JoinRows: lambda node: Zone.SEQUENCE,
    SharedFeatures: lambda node: Zone.WHOLE,
    GatheredFeatures: lambda node: Zone.COLUMNS,
    CutRows: lambda node: Zone.WHOLE,
}


class GradientCheck:
    """Check of one block in its first forward with gradients.

    Args:
        places: places of split and partial parameters, by name.
    """

    def __init__(self, block: nn.Module, name: str, places: Mapping[str, Split | Partial], zones: Zones) -> None:
        self._name, self._places, self._zones = name, places, zones
        self._hook = block.register_forward_hook(Hook(self._check), with_kwargs=True)

    def _check(self, block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if not isinstance(first, torch.Tensor):
            first = next(iter(tensors_in(output)), None)  # what else it returns may lie among the ranks as it likes
        ends = [] if first is None or first.grad_fn is None else [first.grad_fn]
        if not torch.is_grad_enabled() or not ends:
            return
        entered = {x.grad_fn for x in tensors_in((args, kwargs))}
        names = {parameter: f"{self._name}.{name}" for name, parameter in block.named_parameters()}
        found = zones_of_leaves(ends, self._zones.around, entered, self._name)
        for leaf, zone in found.items():
            name = names.get(leaf)
            place = None if name is None else self._places.get(name)
            if name is None or isinstance(place, Split):
                continue
            if (zone is not Zone.WHOLE) != isinstance(place, Partial):
                works = "own features or positions" if zone is not Zone.WHOLE else "what all ranks have alike"
                raise ModelError(
                    f"{name!r} works on {works} in {self._name!r}, so that its gradient would be "
                    f"{'a part' if zone is not Zone.WHOLE else 'summed several times'}. Split the layers around it "
                    f"with TensorParallel(..., layers={{...}}) so that it stands outside of them, or leave its "
                    f"module whole with those that it works on."
                )
        self._hook.remove()


def zones_of_leaves(ends: list[Any], around: Zone, entered: set[Any], name: str) -> dict[Any, Zone]:
    """The zone in which each leaf of a graph is used.

    Args:
        ends: nodes of the output, in the zone `around`.
        entered: nodes of the input, which belong to another block.

    Raises:
        ModelError: a tensor is used in two zones.
    """
    zones: dict[Any, Zone] = {}
    leaves: dict[Any, Zone] = {}
    stack = [(node, around) for node in ends if node not in entered]
    while stack:
        node, zone = stack.pop()
        if node in zones:
            if zones[node] is not zone and not _is_shared(node):
                raise ModelError(_mixed(name, node, zones[node], zone))
            continue
        zones[node] = zone
        _check_columns(name, node, zone)
        if hasattr(node, "variable"):
            leaves[node.variable] = zone
            continue
        before = BEFORE.get(getattr(node, "_forward_cls", None))
        inside = zone if before is None else before(node)
        stack += [(each, inside) for each, _ in node.next_functions if each is not None and each not in entered]
    return leaves


def _check_columns(name: str, node: Any, zone: Zone) -> None:
    """Refuse one rank's features outside of the zone of columns.

    Raises:
        ModelError: a column-parallel layer's output is used in another zone.
    """
    if zone is not Zone.COLUMNS and is_column_product(node):
        raise ModelError(
            f"{name!r} uses features or heads of one rank, which a column-parallel layer of another block made, in "
            f"layers that are whole, so that its result would be wrong. Leave the layers that make them whole, too: "
            f"TensorParallel(..., layers={{...: 'whole'}})."
        )


def _is_shared(node: Any) -> bool:
    """Whether a result is a chain of views of features that all heads read."""
    before = [each for each, _ in node.next_functions if each is not None]
    kind = getattr(node, "_forward_cls", None)
    return kind is SharedFeatures or (kind is None and len(before) == 1 and _is_shared(before[0]))


def _mixed(name: str, node: Any, one: Zone, other: Zone) -> str:
    what = f"a parameter of shape {tuple(node.variable.shape)}" if hasattr(node, "variable") else node.name()
    return (
        f"In {name!r} the result of {what} is used as {one} and as {other} under tensor parallelism, so that its "
        f"gradient would be wrong. Leave the layers that use it whole: TensorParallel(..., layers={{...: 'whole'}})."
    )
