"""A batch cut into microbatches, and the loss in what a model returned."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from zeroshard.errors import BatchError
from zeroshard.precision import raise_clash
from zeroshard.schedule import Kind, Schedule


def microbatches(batch: Any, count: int) -> list[Any]:
    """Cut every tensor of a batch along its first dimension into `count` even parts.

    Raises:
        BatchError: a tensor whose first dimension does not divide, or no tensor at all.
    """
    if count == 1:
        return [batch]
    leaves, spec = tree_flatten(batch)
    size = _common_size(leaves)
    if size == 0 or size % count:
        raise BatchError(
            f"A batch of {size} does not divide into {count} microbatches; make the batch a multiple of {count}, or "
            f"change microbatches."
        )
    cut = [leaf.chunk(count) if isinstance(leaf, torch.Tensor) else [leaf] * count for leaf in leaves]
    return [tree_unflatten([part[m] for part in cut], spec) for m in range(count)]


def uneven_microbatches(batch: Any, count: int) -> list[tuple[Any, float]]:
    """Cut a batch into `count` microbatches as even as can be, each with its share of the batch's rows.

    Raises:
        BatchError: fewer rows than microbatches, or tensors of unlike first dimensions.
    """
    if count == 1:
        return [(batch, 1.0)]
    leaves, spec = tree_flatten(batch)
    size = _common_size(leaves)
    if size < count:
        raise BatchError(f"A batch of {size} does not make {count} microbatches; give {count} rows or more at a time.")
    ends = [size * k // count for k in range(count + 1)]
    cut = [
        [leaf[a:b] for a, b in pairwise(ends)] if isinstance(leaf, torch.Tensor) else [leaf] * count for leaf in leaves
    ]
    return [(tree_unflatten([part[m] for part in cut], spec), (ends[m + 1] - ends[m]) / size) for m in range(count)]


def accumulate(
    schedule: Schedule,
    parts: list[Any],
    run: Callable[[Any], torch.Tensor],
    backward: Callable[[torch.Tensor], None],
    local: Callable[[], AbstractContextManager[None]],
) -> Iterator[torch.Tensor]:
    """Carry out a schedule of one stage up to its update; yields each microbatch's share of the mean loss.

    Args:
        parts: the microbatches.
        run: a forward, to its loss.
        local: a context in which backwards are not reduced.
    """
    reduced = {action.microbatch for action in schedule if action.kind is Kind.REDUCE}
    losses: dict[int, torch.Tensor] = {}
    for action in schedule:
        m = action.microbatch
        if action.kind is Kind.FORWARD and m is not None:
            losses[m] = run(parts[m]) / len(parts)
        elif action.kind is Kind.BACKWARD and m is not None:
            loss = losses.pop(m)
            yield loss.detach()
            with nullcontext() if m in reduced else local():
                backward(loss)
        # [Note: hooks carry them out] gathers, frees and reductions, inside the forward or backward that they surround


def _common_size(leaves: list[Any]) -> int:
    """The first dimension of all tensors among the leaves."""
    sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in leaves if isinstance(leaf, torch.Tensor)}
    if len(sizes) != 1:
        raise BatchError(
            f"The batch's tensors have the first dimensions {sorted(sizes)}; microbatches need one common size to cut."
        )
    return int(sizes.pop())


def call(model: Any, *args: Any, **kwargs: Any) -> Any:
    """What a model returns.

    Raises:
        ModelError: tensors of different dtypes met in it.
    """
    try:
        return model(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        raise_clash(error)
        raise


def call_with(model: Any, batch: Any) -> Any:
    """Call a model with a batch: a mapping as keywords, a tuple or list as arguments, anything else as it is."""
    if isinstance(batch, Mapping):
        return call(model, **batch)
    return call(model, *batch) if isinstance(batch, (tuple, list)) else call(model, batch)


def loss_in(output: Any) -> torch.Tensor:
    """The scalar loss in a model's output: the output itself, its `.loss`, or its "loss" entry.

    Raises:
        BatchError: there is none.
    """
    candidates = [output, getattr(output, "loss", None), output.get("loss") if isinstance(output, Mapping) else None]
    for candidate in candidates:
        if isinstance(candidate, torch.Tensor) and candidate.numel() == 1:
            return candidate.reshape(())
    shape = f" of shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else ""
    raise BatchError(
        f"The model returned a {type(output).__name__}{shape} without a scalar loss. Return the loss, an object with "
        f".loss, or pass "
        "Engine(..., loss=function of (output, batch))."
    )
