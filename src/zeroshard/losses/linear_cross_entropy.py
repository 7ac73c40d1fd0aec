"""Cross entropy of an output layer's logits, which exist for a chunk of rows at a time.

[Note: gradients made in the forward] The forward makes the logits of a chunk, turns them into the gradient of the loss
in their own place, and adds from it to the gradients of hidden states and weight; the backward multiplies these by the
gradient of the loss. So there are three products, as without chunks, and the backward needs neither the hidden states
nor the weight. In exchange the gradient of the weight is kept from the forward to the backward.

Shapes: N rows, D width, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from zeroshard.autograd.gradient_slot import slot_of
from zeroshard.errors import BatchError, ModelError, PlanError
from zeroshard.losses.row_gradients import WHOLE, CrossEntropy, Vocabulary

ROWS, NBYTES = (
    1024,
    2**26,
)  # default of a chunk: this many rows, or more if their fp32 logits fit in this many bytes
BLOCK_NBYTES = 2**24  # of a 16-bit product that is added to the gradient of the weight in fp32
REDUCTIONS = ("mean", "sum")
OPTIONS = ("ignore_index", "label_smoothing", "z_loss", "reduction", "chunk")


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """The layer that makes logits of hidden states h: z = scale·(h·Wᵀ + b), or c·tanh(z / c) with a soft cap c.

    Attributes:
        weight: W [V, D].
        bias: b [V].
        scale: of the logits, as in Granite and Cohere.
        softcap: c, above 0, as in Gemma 2 (2408.00118, section 2).
        vocabulary: the classes of the rows of W; a subclass if ranks split them.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    vocabulary: Vocabulary = WHOLE


def default_chunk(vocabulary: int) -> int:
    """The default rows of a chunk: 1024, or more if 64 MiB hold their fp32 logits."""
    return max(ROWS, NBYTES // (4 * vocabulary))


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor | OutputLayer,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk: int | None = None,
) -> Tensor:
    """`cross_entropy(linear(hidden, weight), labels)` without the logits of more than `chunk` rows at a time.

    Chunks follow one another in the order of the rows, so the result depends on `chunk` in the last bits and on nothing
    else. Products are computed in the dtype of `hidden`; in 16 bits, logits and their gradient are rounded to it, all
    sums over the vocabulary are in fp32, and chunks add up in fp32 to the gradient of the weight, which is rounded at
    the end. The loss is at least fp32.

    Gradients are made with the loss ([Note: gradients made in the forward]), so one backward may follow each call, and
    each loss keeps a gradient of the weight, in fp32, until its backward. Without gradients nothing is kept.

    If ranks split the vocabulary, each has the same hidden states and the weights of some classes, and gets the same
    loss, the gradient of its weights, and the whole gradient of the hidden states. A chunk takes two messages of its
    rows, and one of their hidden states' gradient under the products of the next.

    Args:
        hidden: [..., D].
        weight: [V, D]; or an `OutputLayer`, for a bias, a scale or a soft cap.
        labels: class numbers [...], int64.
        ignore_index: the label of rows that do not count. Their gradient is zero.
        label_smoothing: the share of the target spread evenly over all classes, 0 to 1.
        z_loss: the coefficient of (log Σ exp logits)², added for each row that counts (2204.02311, section 5).
        reduction: "mean" over the rows that count (NaN if there are none, as in torch), or "sum" (then 0).
        chunk: rows whose logits exist at once; by default `default_chunk` of the columns.

    Returns:
        The loss, a scalar.

    Raises:
        ModelError: shapes or dtypes that do not fit. PlanError: an option out of its range. BatchError: a second
            backward, or one that is to be differentiated.
    """
    if has_torch_function((hidden,)):
        return _handed_on(hidden, weight, labels, (ignore_index, label_smoothing, z_loss, reduction, chunk))
    layer = weight if isinstance(weight, OutputLayer) else OutputLayer(weight)
    low = _autocast_dtype(hidden.device)
    if low is not None:
        bias = None if layer.bias is None else layer.bias.to(low)
        hidden, layer = hidden.to(low), replace(layer, weight=layer.weight.to(low), bias=bias)
    _check_options(layer, label_smoothing, z_loss, reduction, chunk)
    _check_tensors(hidden, layer, labels)
    terms = CrossEntropy(ignore_index, label_smoothing, z_loss, layer.scale, layer.softcap)
    chunk = chunk or default_chunk(layer.vocabulary.widest(layer.weight.shape[0]))
    job = _Job(terms, chunk, reduction == "mean", torch.is_grad_enabled(), layer.vocabulary)
    rows = hidden.reshape(-1, hidden.shape[-1])
    with nullcontext() if low is None else torch.autocast(hidden.device.type, enabled=False):
        loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            rows, layer.weight, layer.bias, labels.reshape(-1), job
        )
    return loss


def _handed_on(hidden: Tensor, weight: Tensor | OutputLayer, labels: Tensor, options: tuple[Any, ...]) -> Tensor:
    """The loss of a torch function override, such as a layer with a split vocabulary."""
    given: dict[str, Any] = dict(zip(OPTIONS, options, strict=True))
    return handle_torch_function(linear_cross_entropy, (hidden,), hidden, weight, labels, **given)


@dataclass(frozen=True, slots=True)
class _Job:
    """Settings of the computation.

    Attributes:
        chunk: rows.
        mean: the sum is divided by the number of rows that count.
        trains: whether gradients are on.
        vocabulary: the classes of the rows of the weight.
    """

    terms: CrossEntropy
    chunk: int
    mean: bool
    trains: bool
    vocabulary: Vocabulary

    def chunks(self, rows: int) -> Iterator[slice]:
        """The rows of each chunk, in their order."""
        return (slice(start, min(start + self.chunk, rows)) for start in range(0, rows, self.chunk))


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss, with its gradients made in the forward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, job: _Job) -> Tensor:
        """[N, D], [V, D], [V], [N] -> a scalar."""
        wanted = [job.trains and needed for needed in ctx.needs_input_grad[:3]]
        gradients = _Gradients(rows, weight, bias, wanted, job.vocabulary)
        wide = torch.promote_types(rows.dtype, torch.float32)
        made = rows.new_empty(min(job.chunk, len(rows)), len(weight))
        sums, counts = [torch.zeros((), dtype=wide, device=rows.device)], [labels.new_zeros(())]
        for part in job.chunks(len(rows)):
            z = made[: part.stop - part.start]
            if bias is None:
                torch.mm(rows[part], weight.t(), out=z)
            else:
                torch.addmm(bias, rows[part], weight.t(), out=z)
            precise = z.to(wide)
            total, counting = job.terms.sum_(precise, labels[part], gradients.any, job.vocabulary)
            if precise is not z:
                z.copy_(precise)
                del precise  # before that of the next chunk is made
            gradients.add(part, z, counting.to(z.dtype).unsqueeze(1))
            sums.append(total)
            counts.append(counting.sum())
        gradients.finish()
        loss, count = torch.stack(sums).sum(), torch.stack(counts).sum()
        factor = count.clamp(min=1).to(wide).reciprocal() if job.mean else None
        ctx.save_for_backward(gradients.rows, gradients.weight, gradients.bias, factor)
        ctx.dtypes, ctx.used = (rows.dtype, weight.dtype, None if bias is None else bias.dtype), False
        ctx.weight = weight
        return loss / count if job.mean else loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        """The gradients of the forward times the gradient of the loss, in place."""
        if torch.is_grad_enabled():
            raise BatchError(
                "The gradient of linear_cross_entropy was asked for with create_graph=True, and has no derivative of "
                "its own. Use torch.nn.functional.cross_entropy of the logits where second derivatives are needed."
            )
        if ctx.used:
            raise BatchError(
                "A second backward went through one linear_cross_entropy, whose gradients the first has used up. Call "
                "it again for each backward, or add up the losses and call backward once."
            )
        ctx.used = True
        *made, factor = ctx.saved_tensors
        scale = gradients[0] if factor is None else gradients[0] * factor
        of_rows, of_weight, of_bias = (
            None if one is None else _scaled(one, scale, dtype, of)
            for one, dtype, of in zip(made, ctx.dtypes, (None, ctx.weight, None), strict=True)
        )
        return of_rows, of_weight, of_bias, None, None


class _Gradients:
    """The gradients of the sum of losses over the chunks so far; None if not required.

    Attributes:
        rows: [N, D], in their dtype.
        weight: [V, D], at least fp32.
        bias: [V], at least fp32.
    """

    def __init__(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool], vocabulary: Vocabulary
    ) -> None:
        self._given, self._vocabulary = (rows, weight), vocabulary
        self._sum: Any = None  # pending, of a chunk's rows over the ranks
        wide = torch.promote_types(rows.dtype, torch.float32)
        self.rows = torch.empty_like(rows, memory_format=torch.contiguous_format) if wanted[0] else None
        make = torch.empty if len(rows) else torch.zeros
        self.weight = make(weight.shape, dtype=wide, device=weight.device) if wanted[1] else None
        self.bias = torch.zeros(bias.shape, dtype=wide, device=bias.device) if bias is not None and wanted[2] else None
        self.any = any(wanted)

    def add(self, part: slice, z: Tensor, counting: Tensor) -> None:
        """Add a chunk's gradients, from those of its logits, [n, V].

        Args:
            counting: 1 for rows that count, 0 for others, [n, 1].
        """
        rows, weight = self._given
        if self.rows is not None:
            torch.mm(z, weight, out=self.rows[part])
            self.rows[part].mul_(counting)
            self.finish()
            self._sum = self._vocabulary.start_sum(self.rows[part])
        if self.weight is not None and len(self.weight):
            _add_product(self.weight, z.t(), rows[part] * counting, begins=not part.start)
        if self.bias is not None:
            self.bias += z.mul_(counting).sum(0, dtype=self.bias.dtype)

    def finish(self) -> None:
        """Wait for the pending sum over the ranks."""
        if self._sum is not None:
            self._sum.result()
            self._sum = None


def _scaled(made: Tensor, scale: Tensor, dtype: torch.dtype, of: Tensor | None) -> Tensor:
    """The gradient `made` times `scale`: in place, or in the slot of its parameter."""
    slot = None if of is None else slot_of(of)
    lent = None if slot is None or of is None else slot.lend(of)
    if lent is None:
        return made.mul_(scale).to(dtype)
    if lent.adds:
        return lent.tensor.add_(made.mul_(scale).to(dtype))
    return torch.mul(made, scale, out=lent.tensor)


def _add_product(total: Tensor, left: Tensor, right: Tensor, begins: bool) -> None:
    """Add left·right to `total`; if its dtype is wider, by blocks, so that the narrow product is never whole.

    Args:
        begins: `total` is uninitialised.
    """
    if total.dtype == left.dtype:
        torch.mm(left, right, out=total) if begins else total.addmm_(left, right)
        return
    block, inverse = max(1, BLOCK_NBYTES // (right.shape[1] * right.itemsize)), None
    if left.dtype is torch.float16:
        factor = _within_range(left, right)
        right, inverse = right * factor, factor.to(total.dtype).reciprocal().view(1, 1)
    for start in range(0, len(total), block):
        product, part = left[start : start + block] @ right, total[start : start + block]
        if begins:
            part.zero_()
        part.add_(product) if inverse is None else part.addcmul_(product, inverse)


def _within_range(left: Tensor, right: Tensor) -> Tensor:
    """The largest power of two, at most 1, that scales left·right into half the range of fp16."""
    largest = [torch.stack(one.aminmax()).abs().amax().float() for one in (left, right)]
    most = largest[0] * largest[1] * left.shape[1]
    return (2.0**15 / most).log2().floor().clamp(max=0).exp2().to(right.dtype)


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of products under `torch.autocast`; None if it is off."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.get_autocast_dtype(device.type) if available and torch.is_autocast_enabled(device.type) else None


def _check_options(
    layer: OutputLayer, label_smoothing: float, z_loss: float, reduction: str, chunk: int | None
) -> None:
    if not 0 <= label_smoothing <= 1:
        raise PlanError(f"label_smoothing is {label_smoothing!r}; it must be a number from 0 to 1.")
    if not 0 <= z_loss < float("inf"):
        raise PlanError(f"z_loss is {z_loss!r}; it must be a finite number of 0 or more.")
    if layer.softcap is not None and not 0 < layer.softcap < float("inf"):
        raise PlanError(f"softcap is {layer.softcap!r}; it must be a finite number above 0, or None.")
    if reduction not in REDUCTIONS:
        raise PlanError(
            f"reduction is {reduction!r}; it must be 'mean' or 'sum', since gradients are made with the loss. Use "
            f"torch.nn.functional.cross_entropy for the loss of each row."
        )
    if chunk is not None and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
        raise PlanError(f"chunk is {chunk!r}; it must be a whole number of rows, 1 or more, or None.")


def _check_tensors(hidden: Tensor, layer: OutputLayer, labels: Tensor) -> None:
    weight, bias = layer.weight, layer.bias
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ModelError(
            f"hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}; they must be [..., D] and "
            f"[V, D]."
        )
    if labels.shape != hidden.shape[:-1] or labels.dtype is not torch.int64:
        raise ModelError(
            f"labels are {labels.dtype} of shape {tuple(labels.shape)}; they must be torch.int64 class numbers of "
            f"shape {tuple(hidden.shape[:-1])}, one for each row of hidden."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ModelError(f"bias has shape {tuple(bias.shape)}; it must be ({weight.shape[0]},), one for each class.")
    dtypes = {tensor.dtype for tensor in (hidden, weight, bias) if tensor is not None}
    if len(dtypes) > 1 or not hidden.is_floating_point():
        raise ModelError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}{'' if bias is None else f', bias {bias.dtype}'}; they "
            f"must share one floating-point dtype. Convert them, or compute under torch.autocast."
        )
