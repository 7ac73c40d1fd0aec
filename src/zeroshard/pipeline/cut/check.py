"""Checks of layers on the autograd graph of one forward, which also find the frames' own parameters of each layer."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zeroshard.errors import ModelError
from zeroshard.pipeline.cut.carried import Carried
from zeroshard.pipeline.cut.layers import Layer
from zeroshard.pipeline.cut.probe import Probe


class Weights(NamedTuple):
    """The names of a model's parameters, and those that frames own, whose layer the graph shows."""

    names: dict[nn.Parameter, str]
    free: set[nn.Parameter]


def check_layers(layers: list[Layer], probe: Probe, output: Any, weights: Weights, carried: Carried, hint: str) -> None:
    """Refuse values that no message brings to a layer; enter the frames' own parameters into layers.

    Args:
        output: of the model.
        hint: advice for the model, at the head of the way out.

    Raises:
        ModelError: with the layer and the parameter that such a value is made with.
    """
    ends = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    if carried.needed:
        _check_carried(layers, probe, ends, weights, carried)
    else:
        _check_chain(layers, probe, ends, weights, hint)
    for parameter in weights.free - {p for layer in layers for p in layer.parameters.values()}:
        layers[0].parameters[weights.names[parameter]] = parameter


def _check_chain(layers: list[Layer], probe: Probe, ends: list[Any], weights: Weights, hint: str) -> None:
    """Refuse a way from a layer's output back to earlier layers that does not pass its one input."""
    for layer in layers:
        starts = ends if layer.number == len(layers) - 1 else [probe.marks[layer.number]]
        entrance = probe.marks[layer.number - 1] if layer.number else None
        passed = {mark: n for n, mark in enumerate(probe.marks) if mark is not None and mark not in starts}
        for node in _reach(starts, (entrance,)):
            if node in passed:
                raise ModelError(
                    f"{layer.name!r} uses what entered {layers[passed[node] + 1].name!r}, past the layers between, so "
                    f"the model is no chain; {hint}name other blocks with units=(...), or use pipeline_parallel=1."
                )
            _enter(node, layer, probe, weights, hint)


def _check_carried(layers: list[Layer], probe: Probe, ends: list[Any], weights: Weights, carried: Carried) -> None:
    """Refuse a way from the values that a layer makes back to earlier layers that passes none of those it receives."""
    learned = probe.learned
    if learned.unknown:
        number, shape = min(learned.unknown.items())
        raise ModelError(
            f"{layers[number].name!r} reads a tensor of shape {list(shape)} that was made with parameters by code "
            f"which torch's functions do not show (an autograd.Function, a full backward hook, a view of memory that "
            f"was overwritten), so no stage can send it. Move that code into a module, or use pipeline_parallel=1."
        )
    for layer in layers:
        starts = [learned.nodes[key] for key, (made, _) in carried.reach.items() if made == layer.number]
        starts += ends if layer.number == len(layers) - 1 else []
        for node in _reach(starts, {learned.nodes[key] for key in carried.at(layer.number)}):
            early = not hasattr(node, "variable") and node._sequence_nr() < learned.began[layer.number]
            _enter(node, layer, probe, weights, "", early)


def _enter(node: Any, layer: Layer, probe: Probe, weights: Weights, hint: str, early: bool = False) -> None:
    """Enter a frame's own parameter into the layer that uses it.

    Raises:
        ModelError: the node is another layer's parameter, or `early`: an operation of an earlier layer.
    """
    variable = getattr(node, "variable", None)
    variable = probe.stands_for.get(variable, variable)
    if variable in weights.free:
        layer.parameters[weights.names[variable]] = variable
    elif early or (variable in weights.names and weights.names[variable] not in layer.parameters):
        made = f"a result of {node.name()}" if early else repr(weights.names[variable])
        raise ModelError(
            f"{layer.name!r} uses something made with {made} that does not come through the "
            f"layer before it, so the model is no chain; {hint}name other blocks with units=(...), or use "
            f"pipeline_parallel=1."
        )


def hint_of(model: nn.Module) -> str:
    """The advice for mixtures of transformers, whose loss reads every block's router logits."""
    if not getattr(getattr(model, "config", None), "output_router_logits", False):
        return ""
    return "set output_router_logits=False in its configuration, which trains without the routers' auxiliary loss, "


def _reach(starts: Sequence[Any], entrances: Collection[Any]) -> Iterator[Any]:
    """The nodes of the graph below `starts`, not past `entrances`."""
    seen: set[Any] = set()
    stack = [node for node in starts if node is not None]
    first = set(stack)
    while stack:
        node = stack.pop()
        if node in seen or node in entrances:
            continue
        seen.add(node)
        if node not in first:
            yield node
        stack.extend(next_node for next_node, _ in node.next_functions if next_node is not None)
