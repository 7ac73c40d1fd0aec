"""Models whose vocabulary is split among the ranks of a mesh, and a look at the widths of all tensors that are made."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zeroshard as zs
from zeroshard.comm.collectives import Comm
from zeroshard.parts.place import Axis
from zeroshard.tensor.split.collectives import TensorRanks
from zeroshard.tensor.split.cross_entropy import SplitVocabulary
from zeroshard.tensor.split.vocabulary import split_embedding, split_output
from zeroshard.traffic import Purpose


class Ranks(TensorRanks):
    """All ranks of a mesh, and what they send."""

    def __init__(self, mesh: zs.Mesh) -> None:
        super().__init__(Axis("tensor", (tuple(range(mesh.ranks)),), Comm(mesh)))

    def sent(self) -> dict[str, tuple[int, int]]:
        """(messages, their elements) by purpose, since the last call."""
        halves = {Purpose.SUM_ACTIVATIONS, Purpose.SUM_LOSSES}  # of which comm counts each element twice
        counts = {p.name: (c.calls, c.elements // (1 + (p in halves))) for p, c in self.comm.counts.items()}
        self.comm.reset()
        return counts

    def part(self, whole: Tensor, dim: int = 0) -> Tensor:
        """This rank's rows of a copy."""
        start, stop = self.rows(whole.shape[dim])
        return whole.detach().narrow(dim, start, stop - start).clone()

    def vocabulary(self, total: int) -> SplitVocabulary:
        return SplitVocabulary(self, *self.rows(total), total, "head")


def split(model: nn.Module, ranks: TensorRanks, embeddings: list[str], outputs: list[str]) -> None:
    """Split the vocabulary of a model's layers, as the technique does."""
    chosen: dict[str, Any] = {name: model.get_submodule(name) for name in [*embeddings, *outputs]}
    whole = {parameter for module in chosen.values() for parameter in module.parameters(recurse=False)}
    parts = {one: nn.Parameter(one.detach()[slice(*ranks.rows(len(one)))].clone(), one.requires_grad) for one in whole}
    totals = {name: len(module.weight) for name, module in chosen.items()}
    for holder in model.modules():
        for key, parameter in holder._parameters.items():
            holder._parameters[key] = parts.get(parameter, parameter) if parameter is not None else None
    for name, module in chosen.items():
        place = (*ranks.rows(totals[name]), totals[name], name)
        if name in embeddings:
            split_embedding(module, ranks, *place)
        else:
            split_output(model, module, ranks, *place)


class Widths(TorchDispatchMode):
    """Notes operations that make a tensor with a dimension of a given size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size, self.found = size, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and self._size in leaf.shape:
                self.found.add(str(func))
        return result


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    """Equal within `tolerance` of the largest element."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if expected.numel():
        largest = expected.double().abs().max().clamp(min=1e-30)
        error = ((found.double() - expected.double()).abs().max() / largest).item()
        assert error <= tolerance, error


def seeded(seed: int) -> None:
    """Let all ranks draw the same."""
    torch.manual_seed(seed)
