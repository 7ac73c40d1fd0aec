"""Divided activations that a model returns: own positions between blocks, and attention weights of own heads.

A model of transformers returns them by `output_hidden_states` and `output_attentions`, and a model of images beside
text reads an inner layer of its tower. Modules around a stack of blocks join those that are in their outputs, so a loss
on them is that of whole tensors; work on a joined tensor is the same on all ranks, and its gradient is cut again.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from zeroshard.errors import ModelError
from zeroshard.tensor.find.found import AttentionSizes
from zeroshard.tensor.split.collectives import JoinRows, TensorRanks
from zeroshard.units.hooks import Hook

HEADS = -3  # the dimension of heads in attention weights [B, H, T, S]


class NotedActivation(NamedTuple):
    """An activation of which each rank has a part along a dimension.

    Attributes:
        total: the size of the dimension over all ranks; 0 if the parts cannot be joined.
    """

    activation: weakref.ref[Tensor]
    dimension: int
    total: int
    label: str


class ReturnedActivations:
    """The divided activations of the current forward.

    Args:
        stacks: names of the blocks of each stack.
        attentions: the split ones.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: TensorRanks,
        stacks: Iterable[Sequence[str]],
        attentions: Iterable[AttentionSizes],
    ) -> None:
        self._ranks = ranks
        self._divided: list[NotedActivation] = []
        model.register_forward_pre_hook(Hook(lambda *_: self._divided.clear()))
        modules, ends = dict(model.named_modules()), [(stack[0], stack[-1]) for stack in stacks]
        for attention in attentions:
            modules[attention.name].register_forward_hook(Hook(_OfHeads(self, attention, ranks.size)))
        for path, module in modules.items():
            if not path or any(all(f"{name}.".startswith(f"{path}.") for name in pair) for pair in ends):
                module.register_forward_hook(Hook(self._join))

    def note(self, activation: Tensor, dimension: int, total: int, label: str) -> None:
        """Note an activation of a forward, but not of one that is compiled or repeated in a backward."""
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1:
            self._divided.append(NotedActivation(weakref.ref(activation), dimension, total, label))

    def _join(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Join those among a module's outputs.

        Raises:
            ModelError: the heads of the ranks are not as many.
        """
        known = {id(value): each for each in self._divided if (value := each.activation()) is not None}
        if not known or not any(id(leaf) in known for leaf in tree_leaves(output)):
            return None
        return tree_map(lambda leaf: self._joined(leaf, known[id(leaf)]) if id(leaf) in known else leaf, output)

    def _joined(self, x: Tensor, each: NotedActivation) -> Tensor:
        if not each.total:
            raise ModelError(
                f"The model returns the {each.label}, of which each of {self._ranks.size} tensor ranks has its own "
                f"heads alone, and the ranks do not divide these. Leave output_attentions out, or train without "
                f"tensor_parallel."
            )
        joined: Tensor = JoinRows.apply(x, self._ranks, each.dimension, each.total, each.label)  # type: ignore[no-untyped-call]
        return joined


class _OfHeads:
    """A forward hook of an attention, which notes its weights."""

    def __init__(self, returned: ReturnedActivations, attention: AttentionSizes, ranks: int) -> None:
        self._returned, self._label = returned, f"attention weights of {attention.name}"
        self._heads, self._own = attention.heads, attention.heads / ranks

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        for x in output[1:] if isinstance(output, tuple) else ():
            if isinstance(x, Tensor) and x.dim() == 4 and x.is_floating_point():
                self._returned.note(x, HEADS, self._heads if x.shape[HEADS] == self._own else 0, self._label)
