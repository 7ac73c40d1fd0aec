"""Saved tensors that are made again from others that are saved, by one cheap operation.

The input of a product is often what an activation function, a norm or a multiplication made of tensors that are saved
too. Autograd's graph says so: `grad_fn` of the tensor is the node of that operation, and the node has its inputs until
its own backward, which comes after those of all that read the result. So the tensor is freed in the forward, and made
from its node where a backward reads it; nothing else of the block is computed again. torch.compile's partitioner does
the same for graphs that it has compiled.

[Note: the same bits] Where a block is measured, each such tensor is made once beside the one that is there; those of
other bits or another layout are kept. Nodes have all that their operation took but for the epsilon of layer norms; that
is the one that gave the same bits, and each time its statistics are compared with those that the node has.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeroshard.recompute.context import RecomputeContext
from zeroshard.units.hooks import place_of

VIEWS = ("View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute", "Expand", "Alias", "Squeeze", "Unsqueeze")
RESULTS = ("Softmax", "SafeSoftmax", "Relu", "Sigmoid", "Tanh", "Exp", "Rsqrt", "Sqrt")  # nodes that have their result
SMALLEST = 2**14  # bytes
READERS = 4  # of one tensor, each of which makes it anew
FREED = "through the graph a second time"  # of torch's error: another backward has freed the tensors of the node
MAKE = 5e-5  # seconds that making a tensor takes besides


class NotSaved(Exception):
    """A node lacks an input of its operation."""


class Inputs:
    """Inputs of the operation of a node.

    Args:
        node: of autograd.
        weights: whether parameters are read themselves, as in a forward, where the node's must not be gathered.

    Attributes:
        weights: as given.
    """

    def __init__(self, node: Any, weights: bool) -> None:
        self._node, self.weights = node, weights

    def __getitem__(self, name: str) -> Any:
        return getattr(self._node, f"_saved_{name}")

    def parameter(self, name: str, number: int) -> Tensor | None:
        """The parameter of that name, if there is one; the node's edge of that number leads to it."""
        edge = self._node.next_functions[number][0]
        if not self.weights:
            found: Tensor | None = self[name]
            return found
        return edge.variable.detach() if edge is not None and kind_of(edge) == "AccumulateGrad" else None

    def tensor(self, name: str, number: int) -> Tensor:
        """The input of that name; the node's edge of that number leads to the operation that made it."""
        edge = self._node.next_functions[number][0] if number < len(self._node.next_functions) else None
        found = self.parameter(name, number) if self.weights and edge is not None else None
        found = self[name] if found is None else found
        if found is None and edge is not None and kind_of(edge) in RESULTS:
            found = edge._saved_result
        if found is None:
            raise NotSaved
        result: Tensor = found
        return result


def _layer_norm(inputs: Inputs, epsilon: float | None) -> Tensor:
    assert epsilon is not None
    weight, bias = inputs.parameter("weight", 1), inputs.parameter("bias", 2)
    shape = inputs["normalized_shape"]
    made, _, spread = torch.native_layer_norm(inputs.tensor("input", 0), shape, weight, bias, epsilon)
    same = _same_bits(spread, inputs["result2"]).all()
    if not inputs.weights:
        torch._assert_async(same, "a layer norm has another epsilon than before")
    elif _has_values(spread) and not same:
        raise NotSaved
    return made


Rule = Callable[[Inputs, float | None], Tensor]
RULES: Mapping[str, Rule] = {
    "NativeLayerNorm": _layer_norm,
    "Mul": lambda inputs, _: inputs.tensor("self", 0) * inputs.tensor("other", 1),
    "Div": lambda inputs, _: inputs.tensor("self", 0) / inputs.tensor("other", 1),
    "Pow": lambda inputs, _: inputs.tensor("self", 0) ** inputs["exponent"],
    "Gelu": lambda inputs, _: F.gelu(inputs.tensor("self", 0), approximate=inputs["approximate"]),
    "Silu": lambda inputs, _: F.silu(inputs.tensor("self", 0)),
    "Mish": lambda inputs, _: F.mish(inputs.tensor("self", 0)),
    "Hardswish": lambda inputs, _: F.hardswish(inputs.tensor("self", 0)),
    "LeakyRelu": lambda inputs, _: F.leaky_relu(inputs.tensor("self", 0), inputs["negative_slope"]),
    "Hardtanh": lambda inputs, _: F.hardtanh(inputs.tensor("self", 0), inputs["min_val"], inputs["max_val"]),
    "Softplus": lambda inputs, _: F.softplus(inputs.tensor("self", 0), inputs["beta"], inputs["threshold"]),
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a tensor is made again.

    Attributes:
        number: of the tensor among all that its block saves.
        rule: the kind of its node.
        epsilon: of a layer norm.
    """

    number: int
    rule: str
    epsilon: float | None = None


@dataclass(frozen=True, slots=True)
class RemadeCosts:
    """A storage of which every saved tensor can be made again.

    Attributes:
        recipes: of these.
        nbytes: of the storage.
        seconds: of making them.
    """

    recipes: tuple[Recipe, ...]
    nbytes: int
    seconds: float


class RemadeSlot(Protocol):
    """Where a saved tensor stands in the graph."""

    held: Any

    def tensor(self) -> Tensor:
        """The tensor; where nothing is held, its block is computed again."""


class TimedBlock(Protocol):
    """A block of which tensors are made again."""

    made: float


class Remade:
    """Placeholder of a tensor until it is read.

    Args:
        tensor: that is freed.
        recipe: how it is made.
        slot: gets it then.
        context: holds it on the device until its backward is over.
        block: counts the seconds.
    """

    def __init__(
        self, tensor: Tensor, recipe: Recipe, slot: RemadeSlot, context: RecomputeContext, block: TimedBlock
    ) -> None:
        self._node, self._recipe, self._slot = node_of(tensor), recipe, ref(slot)
        self._context, self._block = context, block
        self._layout, self._device = (tensor.size(), tensor.stride(), tensor.storage_offset()), tensor.device.type

    def tensor(self) -> Tensor:
        """The tensor again."""
        slot, began = self._slot(), self._context.now()
        try:
            made = _make(self._recipe.rule, Inputs(self._node, False), self._recipe.epsilon, self._device)
        except RuntimeError as error:
            if slot is None or FREED not in str(error):
                raise
            slot.held = None
            return slot.tensor()
        kept = self._context.hold(made.as_strided(*self._layout))
        self._block.made += self._context.now() - began
        if slot is not None:
            slot.held = kept
        return kept.tensor()


def remade(
    tensor: Tensor, recipe: Recipe, slot: RemadeSlot, context: RecomputeContext, block: TimedBlock
) -> Remade | None:
    """The placeholder of a tensor that is freed; None if its node is of another kind than the recipe's."""
    node = node_of(tensor)
    return Remade(tensor, recipe, slot, context, block) if node is not None and kind_of(node) == recipe.rule else None


def costs_of(
    saved: Sequence[tuple[int, Tensor]], since: int, epsilons: Sequence[float], now: Callable[[], float]
) -> tuple[RemadeCosts, ...]:
    """The storages that a block need not keep.

    Args:
        saved: what it saves, with numbers; the nodes' inputs can be read now.
        since: the first sequence number of its nodes.
        epsilons: of its layer norms.
        now: seconds, once the device has done all.
    """
    by_storage: dict[int, list[tuple[int, Tensor]]] = {}
    for number, tensor in saved:
        by_storage.setdefault(place_of(tensor), []).append((number, tensor))
    return tuple(cost for tensors in by_storage.values() for cost in _cost_of(tensors, since, epsilons, now))


def next_number() -> int:
    """The sequence number of the next node of this thread."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def epsilons_of(block: nn.Module) -> list[float]:
    """The epsilons that layer norms of a block may have."""
    found = {getattr(module, "eps", None) for module in block.modules()}
    return sorted({1e-5, *(each for each in found if isinstance(each, float))})


def _cost_of(
    tensors: Sequence[tuple[int, Tensor]], since: int, epsilons: Sequence[float], now: Callable[[], float]
) -> Iterator[RemadeCosts]:
    nbytes = tensors[0][1].untyped_storage().nbytes()
    if len(tensors) > READERS or nbytes < SMALLEST:
        return
    recipes, seconds = [], 0.0
    for number, tensor in tensors:
        found = _recipe_of(number, tensor, since, epsilons, now)
        if found is None:
            return
        recipes.append(found[0])
        seconds += found[1] + MAKE
    yield RemadeCosts(tuple(recipes), nbytes, seconds)


def _recipe_of(
    number: int, tensor: Tensor, since: int, epsilons: Sequence[float], now: Callable[[], float]
) -> tuple[Recipe, float] | None:
    """The recipe of a tensor with the same bits, and its seconds; None if there is none."""
    node = None if is_traceable_wrapper_subclass(tensor) else node_of(tensor)
    if node is None or kind_of(node) not in RULES or node._sequence_nr() < since:
        return None
    for epsilon in epsilons if kind_of(node) == "NativeLayerNorm" else (None,):
        start = now()
        try:
            made = _make(kind_of(node), Inputs(node, True), epsilon, tensor.device.type)
        except (NotSaved, RuntimeError):
            continue
        seconds = now() - start
        if made.untyped_storage().nbytes() != tensor.untyped_storage().nbytes() or made.dtype != tensor.dtype:
            continue
        again = made.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        if not _has_values(tensor) or bool(_same_bits(again, tensor.detach()).all()):
            return Recipe(number, kind_of(node), epsilon), seconds
    return None


def node_of(tensor: Tensor) -> Any:
    """The node of the operation that made a tensor's storage, past views of it; None if there is none."""
    node = tensor.grad_fn
    while node is not None and kind_of(node) in VIEWS:
        node = node.next_functions[0][0]
    return node


def kind_of(node: Any) -> str:
    """The name of a node without its ending; other numbers than 0 are of operations with numbers for tensors."""
    return str(node.name()).removeprefix("torch::autograd::").removesuffix("Backward0")


def _make(rule: str, inputs: Inputs, epsilon: float | None, device: str) -> Tensor:
    casts = torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
    with torch.no_grad(), casts:
        return RULES[rule](inputs, epsilon)


def _has_values(tensor: Tensor) -> bool:
    return tensor.untyped_storage().device.type != "meta"


def _same_bits(one: Tensor, other: Tensor) -> Tensor:
    return one.contiguous().view(-1).view(torch.uint8) == other.contiguous().view(-1).view(torch.uint8)
