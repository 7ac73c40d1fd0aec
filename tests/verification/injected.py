"""Bugs as others have published them, put into the engine of one process for the time of a `with` block.

Each breaks the parts of one module where it can, so that a verification has a module to name.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

from zeroshard.engine import engine as engine_module
from zeroshard.pipeline.run.tied_weights import _Lent
from zeroshard.step import sequence as sequence_module
from zeroshard.step.losses import Loss
from zeroshard.tensor.split import technique as tensor_module
from zeroshard.tensor.split.layers import Input, RowForward
from zeroshard.zero.reduce import Scatter
from zeroshard.zero.weights import Sliced

Patch = Callable[..., Any]


@contextmanager
def around(owner: Any, name: str, patch: Patch) -> Iterator[None]:
    """Call `patch(original, *args)` in the place of a function or a method."""
    original = getattr(owner, name)
    with mock.patch.object(owner, name, lambda *args, **kwargs: patch(original, *args, **kwargs)):
        yield


def missing_sum_over_an_axis(rank: int) -> AbstractContextManager[None]:
    """Replicas of a slice keep their own means (NVIDIA/Megatron-LM#7452 lists such sums)."""

    def average(original: Patch, total: torch.Tensor, **kwargs: Any) -> None:
        if "blocks.1" not in kwargs["label"]:
            original(total, **kwargs)

    return around(sequence_module, "average", average)


def divided_by_the_wrong_group(rank: int) -> AbstractContextManager[None]:
    """A sum is divided by twice the ranks that are behind it."""

    def make(original: Patch, self: Scatter, flat: Any, *args: Any) -> None:
        original(self, flat, *args)
        self._divisor *= 2 if "blocks.2" in flat.label else 1

    return around(Scatter, "__init__", make)


def local_token_counts(rank: int) -> AbstractContextManager[None]:
    """Each rank and microbatch divides by its own count (huggingface/transformers#34191)."""

    def run(original: Patch, self: Any, batch: Any) -> Loss:
        loss = original(self, batch)
        return Loss(loss.value / loss.items)

    return around(engine_module.Engine, "_run", run)


def dropped_microbatch(rank: int) -> AbstractContextManager[None]:
    """Only the last microbatch stays in the sum (NVIDIA-NeMo/Automodel#3530)."""

    def finish(original: Patch, self: Scatter, *args: Any) -> bool:
        if "blocks.3" in self._flat.label and self._exchange is not None:
            self._sum.adds = False  # type: ignore[misc]
        return bool(original(self, *args))

    return around(Scatter, "finish", finish)


def untied_head(rank: int) -> AbstractContextManager[None]:
    """The gradient of the head does not come to the embedding that it is tied to (pytorch/torchtitan#2252)."""
    return around(_Lent, "add", lambda original, self, gradients: None)


def stale_weights(rank: int) -> AbstractContextManager[None]:
    """A unit is gathered once, and its forwards have that version for ever."""
    kept: dict[int, torch.Tensor] = {}

    def finish(original: Patch, self: Sliced) -> None:
        pending = self._pending is not None and self._lasting is None  # and not for the user
        original(self)
        if pending and "blocks.1" in self.flat.label:
            self.full.copy_(kept.setdefault(id(self), self.full.clone()))

    return around(Sliced, "finish_gather", finish)


def norm_without_a_shard(rank: int) -> AbstractContextManager[None]:
    """One rank's slice of one unit is not in the norm (NVIDIA-NeMo/Automodel#3817)."""

    def squares(original: Patch, self: Any) -> float:
        total: float = original(self)
        for part, gradients in self._trained:
            if rank == 1 and "blocks.2" in part.flat.label:
                total -= float(gradients.settle().norm()) ** 2
        return total

    return around(sequence_module.StepSequence, "_squares", squares)


def reduced_dtype(rank: int) -> AbstractContextManager[None]:
    """A gradient goes over the wire in bf16, though the plan says fp32."""

    def make(original: Patch, self: Scatter, flat: Any, *args: Any) -> None:
        original(self, flat, *args)
        if "blocks.3" in flat.label:
            self._wire_dtype = torch.bfloat16

    return around(Scatter, "__init__", make)


def dropped_bias(rank: int) -> AbstractContextManager[None]:
    """A linear layer runs without its bias."""

    def make(original: Patch, self: Any, model: torch.nn.Module, *args: Any) -> None:
        original(self, model, *args)
        layer: Any = model.get_submodule("blocks.2.up")
        layer.forward = lambda x: F.linear(x, layer.weight)

    return around(engine_module.Forward, "__init__", make)


def swapped_shard(rank: int) -> AbstractContextManager[None]:
    """The slices of two ranks come into each other's places when a unit is gathered."""

    def load(original: Patch, self: Sliced, values: torch.Tensor) -> None:
        if "blocks.1" in self.flat.label:
            values = torch.cat(values.chunk(self.flat.index.ranks)[::-1])
        original(self, values)

    return around(Sliced, "load", load)


def unsummed_input_gradient(rank: int) -> AbstractContextManager[None]:
    """The input of split layers gets the gradient of this rank's features alone."""

    def start(original: Patch, self: Input, gradient: torch.Tensor) -> torch.Tensor:
        return gradient if "blocks.1.mlp" in self.label else original(self, gradient)

    return around(Input, "start_sum", start)


def bias_of_every_rank(rank: int) -> AbstractContextManager[None]:
    """A row-parallel layer adds its bias on each rank before the sum."""

    def run(original: Patch, self: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = original(self, x)
        return y + (self._ranks.size - 1) * self._module().bias.detach() if "1.mlp" in self._label else y

    return around(RowForward, "__call__", run)


def unsummed_copies_of_heads(rank: int) -> AbstractContextManager[None]:
    """Ranks that hold the same key head keep the gradients of their own queries."""

    def add(original: Patch, segments: Any, ranks: Any, label: str, gradient: torch.Tensor, dimension: int) -> Any:
        return gradient if "layers.1.self_attn.k" in label else original(segments, ranks, label, gradient, dimension)

    return around(tensor_module, "sum_copies", add)


BUGS: dict[str, Callable[[int], AbstractContextManager[None]]] = {
    bug.__name__: bug
    for bug in (
        missing_sum_over_an_axis,
        divided_by_the_wrong_group,
        local_token_counts,
        dropped_microbatch,
        untied_head,
        stale_weights,
        norm_without_a_shard,
        reduced_dtype,
        dropped_bias,
        swapped_shard,
        unsummed_input_gradient,
        bias_of_every_rank,
        unsummed_copies_of_heads,
    )
}
