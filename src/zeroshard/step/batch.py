"""Batches cut into microbatches, and the loss in a model's output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from zeroshard.errors import BatchError
from zeroshard.losses.labels import labels_that_count
from zeroshard.precision.clash import raise_explained
from zeroshard.step.losses import Loss
from zeroshard.units.hooks import map_tensors, tensors_of


@dataclass(frozen=True)
class Microbatches:
    """The microbatches of one step, cut by the caller, where tensors of a batch have unlike first dimensions.

    Patches of all images in one tensor (Qwen2-VL) and rows packed into one are such. Means count alike.
    """

    parts: Sequence[Any]
    """A batch for each of `plan.microbatches`, as `train_step` takes them."""

    def of(self, count: int) -> list[Any]:
        """The parts.

        Raises:
            BatchError: their number is not `count`.
        """
        if len(self.parts) != count:
            raise BatchError(
                f"zs.Microbatches has {len(self.parts)} parts and the plan microbatches={count}; give {count}."
            )
        return list(self.parts)


def microbatches(batch: Any, count: int) -> list[Any]:
    """Cut every tensor of a batch, in dataclasses too, along its first dimension into `count` even parts.

    Raises:
        BatchError: a tensor whose first dimension does not divide, or no tensor at all.
    """
    if isinstance(batch, Microbatches):
        return batch.of(count)
    if count == 1:
        return [batch]
    size = _common_size(batch)
    if size == 0 or size % count:
        raise BatchError(
            f"A batch of {size} does not divide into {count} microbatches; make the batch a multiple of {count}, "
            f"change microbatches, or give the loss as (sum, count)."
        )
    return [_rows(batch, size * m // count, size * (m + 1) // count) for m in range(count)]


def uneven_microbatches(batch: Any, count: int) -> list[tuple[Any, float]]:
    """Cut a batch into `count` microbatches as even as can be, each with its share of the batch's rows.

    Raises:
        BatchError: fewer rows than microbatches, or tensors of unlike first dimensions.
    """
    if isinstance(batch, Microbatches):
        return [(part, 1 / count) for part in batch.of(count)]
    if count == 1:
        return [(batch, 1.0)]
    size = _common_size(batch)
    if size < count:
        raise BatchError(f"A batch of {size} does not make {count} microbatches; give {count} rows or more at a time.")
    ends = [size * k // count for k in range(count + 1)]
    return [(_rows(batch, first, last), (last - first) / size) for first, last in pairwise(ends)]


def even_share(loss: Loss, share: float, batch: Any, count: int) -> Loss:
    """One microbatch's share in the mean over `count` microbatches, which must be even; a sum is unchanged.

    Args:
        share: of the batch's rows in the microbatch.

    Raises:
        BatchError: a mean over a microbatch that is not even.
    """
    if loss.items is not None:
        return loss
    if share != 1.0 / count:
        microbatches(batch, count)  # raises
    return Loss(loss.value / count, share=loss.share / count)


def _rows(batch: Any, first: int, last: int) -> Any:
    """A batch with these rows of every tensor."""
    return map_tensors(lambda tensor: tensor[first:last], batch)


def _common_size(batch: Any) -> int:
    """The first dimension of all tensors of a batch."""
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors_of(batch)}
    if len(sizes) != 1:
        raise BatchError(
            f"The batch's tensors have the first dimensions {sorted(sizes)}; microbatches need one common size to "
            f"cut. Cut them yourself: train_step(zs.Microbatches([...]))."
        )
    return int(sizes.pop())


def loss_in(output: Any) -> torch.Tensor:
    """The scalar loss in a model's output: the output itself, its `.loss`, or its "loss" entry.

    Raises:
        BatchError: there is none.
    """
    candidates = [output, getattr(output, "loss", None), output.get("loss") if isinstance(output, Mapping) else None]
    for candidate in candidates:
        if isinstance(candidate, torch.Tensor) and candidate.numel() == 1:
            return candidate.reshape(())
    found = f"Tensor of shape {(*output.shape,)}" if isinstance(output, torch.Tensor) else type(output).__name__
    raise BatchError(
        f"The model returned a {found} without a scalar loss. Return the loss, an object with .loss, or pass "
        f"Engine(..., loss=function of (output, batch))."
    )


def loss_of(model: Any, output: Any, batch: Any) -> Loss:
    """The loss in a model's output: a mean; or the sum, where the batch gives transformers' `num_items_in_batch`.

    With that argument a transformers model returns the sum over the tokens that have labels, divided by it. It may be
    any number above 0: the count is that of the labels.

    Raises:
        BatchError: there is no loss; or with that argument, as `labels_that_count`.
    """
    loss = loss_in(output)
    items = batch.get("num_items_in_batch") if isinstance(batch, Mapping) else None
    if items is None:
        return Loss(loss)
    count = labels_that_count(model, batch)
    balance = getattr(output, "aux_loss", None)  # of a mixture of experts, which the model has added to its loss
    if balance is None:
        return Loss.by_sum(loss * items, count)
    penalty = model.config.router_aux_loss_coef * balance
    return Loss.by_sum((loss - penalty) * items, count, penalty)


def call_with(model: Any, batch: Any) -> Any:
    """Call a model with a batch: a mapping as keywords, a tuple or list as arguments, anything else as one argument.

    Raises:
        ModelError: a module computed with tensors of different dtypes, or by a transform that hooks do not reach.
        BatchError: the forward takes other arguments.
    """
    try:
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    except (RuntimeError, TypeError, ValueError) as error:
        raise_explained(error, model, batch)
        raise
