"""Checks of layers on the autograd graph of one forward, which also find parameters that the code around blocks reads.

A node of the graph that is older than its layer, and is reached without passing a value that enters the layer, belongs
to an earlier layer: no message would bring its result.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zeroshard.errors import ModelError
from zeroshard.pipeline.cut.carried import Carried
from zeroshard.pipeline.cut.layers import Layer
from zeroshard.pipeline.cut.probe import Probe


@dataclass(frozen=True, slots=True)
class GraphCheck:
    """The check of one probe's layers.

    Attributes:
        names: of the model's parameters.
        free: parameters that frames own, whose layer the graph shows.
        hint: advice for the model, at the head of the way out.
    """

    layers: list[Layer]
    probe: Probe
    names: dict[Any, str]
    free: set[nn.Parameter]
    hint: str

    def run(self, output: Any, carried: Carried) -> None:
        """Refuse values that no message brings to a layer; enter the parameters that a layer reads itself.

        Args:
            output: of the model.

        Raises:
            ModelError: with the layer and the parameter that such a value is made with.
        """
        ends = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
        marks, nodes = self.probe.marks, self.probe.learned.nodes
        for layer in self.layers:
            entrances: Collection[Any]
            if carried.needed:
                starts = [nodes[key] for key, (made, _) in carried.reach.items() if made == layer.number]
                entrances = {nodes[key] for key in carried.at(layer.number)}
            else:
                starts = marks[layer.number : layer.number + 1]
                entrances = marks[layer.number - 1 : layer.number] if layer.number else ()
            met = self._check(layer, starts + (ends if layer is self.layers[-1] else []), entrances)
            for key in carried.at(layer.number) if met else ():  # read as what no function around the blocks took
                carried.read(key, [layer.number] if nodes[key] in met else ())
        for parameter in self.free - {p for layer in self.layers for p in layer.parameters.values()}:
            self.layers[0].parameters[self.names[parameter]] = parameter

    def _check(self, layer: Layer, starts: Sequence[Any], entrances: Collection[Any]) -> set[Any]:
        """Check a layer; returns the entrances that it uses."""
        met: set[Any] = set()
        for node in _reach(starts, entrances, met):
            parameter = self._parameter(node)
            if parameter is not None:
                layer.parameters.setdefault(self.names[parameter], parameter)
            elif not hasattr(node, "variable") and node._sequence_nr() < self.probe.learned.began[layer.number]:
                raise ModelError(self._refusal(layer, node))
        return met

    def _refusal(self, layer: Layer, node: Any) -> str:
        for number, shape in sorted(self.probe.learned.unknown.items()):
            return (
                f"{self.layers[number].name!r} reads a tensor of shape {list(shape)} that was made with parameters by "
                f"code which torch's functions do not show (an autograd.Function, a full backward hook, a view of "
                f"memory that was overwritten), so no stage can send it. Move that code into a module, or use "
                f"pipeline_parallel=1."
            )
        below = (self._parameter(each) for each in _reach([node], (), set()))
        name = next((self.names[parameter] for parameter in below if parameter is not None), node.name())
        return (
            f"{layer.name!r} uses something made with {name!r} that does not come through the layers before it (an "
            f"attribute, or a variable around the model), so no stage can send it; {self.hint}return it from the "
            f"module that makes it, or use pipeline_parallel=1."
        )

    def _parameter(self, node: Any) -> nn.Parameter | None:
        """The parameter at a node of the graph; None if there is none."""
        variable = getattr(node, "variable", None)
        parameter = self.probe.stands_for.get(variable, variable)
        return parameter if parameter in self.names else None


def hint_of(model: nn.Module) -> str:
    """The advice for mixtures of transformers, whose loss reads every block's router logits."""
    if not getattr(getattr(model, "config", None), "output_router_logits", False):
        return ""
    return "set output_router_logits=False in its configuration, which trains without the routers' auxiliary loss, "


def _reach(starts: Sequence[Any], entrances: Collection[Any], met: set[Any]) -> Iterator[Any]:
    """The nodes of the graph below `starts`, not past `entrances`; `met` gets those of them that it comes to."""
    seen: set[Any] = set()
    stack = [node for node in starts if node is not None]
    first = set(stack)
    while stack:
        node = stack.pop()
        if node in entrances:
            met.add(node)
        if node in seen or node in entrances:
            continue
        seen.add(node)
        if node not in first:
            yield node
        stack.extend(next_node for next_node, _ in node.next_functions if next_node is not None)
