"""The whole batch of a step against its parts: whether the mean over parts is the loss of the whole batch.

A loss that is the mean over the tokens of its own part is not, where parts hold unlike numbers of tokens: padding,
masks and weights of samples make them unlike. Then the gradient of the whole batch is still a sum of the parts'
gradients, with other weights than those that they have in the step, and least squares find them. Where no weights
explain the difference, rows of a batch act on each other (batch norms, losses over pairs of rows), and only the whole
is the whole.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.step.losses import Loss
from zeroshard.verification.plain import Plain

FOLDED = 1024  # random sums of elements in which gradients are compared
CLOSE = 1e-3  # relative difference up to which weights count as equal
EXPLAINED = 1 / 8  # largest unexplained share of the difference
EXACT = 2.0**-18  # relative error of a loss that is made of the parts' losses, and of the mean of their weights
GENERIC = 2  # least elements per part; fewer fit any weights
ROUNDING = {torch.float16: 2.0**-5, torch.bfloat16: 2.0**-3}  # allowed with weights in these dtypes
SINGLE = 2.0**-9  # and in others; smaller differences could be counts that are nearly equal


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """The whole batch of a step against the mean over its parts.

    Attributes:
        loss: of the whole batch in one forward.
        mean: of the parts' losses, as the step weighs them.
        error: of the mean gradient over parts, relative to that of the whole batch.
        tolerance: the error up to which they count as equal.
        weights: of the parts in the whole batch, relative to those in the step; None if none explain it.
    """

    loss: float
    mean: float
    error: float
    tolerance: float
    weights: Sequence[float] | None

    @property
    def equal(self) -> bool:
        """Whether the mean over parts is the loss of the whole batch."""
        return self.error <= self.tolerance

    @property
    def cause(self) -> str:
        """The cause of a different mean, and the way out."""
        weights = self.weights or (1.0,)
        losses = f"the parts' losses have the mean {self.mean:.6g}, the whole batch has {self.loss:.6g}"
        if _alike(weights):
            why = f"the loss of the whole batch is {weights[0]:.4g} times a mean over parts, so it is no mean over rows"
            return f"{why} ({losses}); let a loss function return the mean, or (sum, count)"
        shown = ", ".join(f"{value:.3g}" for value in weights[:6]) + (", ..." if len(weights) > 6 else "")
        why = "parts count alike although they hold unlike numbers of tokens, or unlike weights of samples"
        return (
            f"{why}: in the whole batch they count {shown} times ({losses}); return (sum, count) from a loss function"
        )

    @property
    def note(self) -> str:
        """A remark on rows that act on each other."""
        return (
            f"rows of a batch act on each other (batch norms, capacities, losses over pairs of rows): the mean of the "
            f"parts' losses is {self.mean:.6g}, and the loss of the whole batch in one forward {self.loss:.6g}"
        )


def of_whole_batch(plain: Plain, number: int) -> WholeBatch | None:
    """A step's whole batch against its parts, from the initial buffers; None if it cannot run whole."""
    try:
        whole, gradient = _with_gradient(plain, plain.alone(plain.whole(number)))
    except RuntimeError:
        return None  # the model has a fixed batch size
    batches = [each for rank in range(plain.job.data_ranks) for each in plain.job.microbatches(number, rank)]
    parts = [plain.alone(batch) for batch, _ in batches]
    total = sum(float(part.items) for part in parts if part.items is not None)
    weighed = [
        Loss(part.value * share if part.items is None else part.value / max(total, 1.0))
        for part, (_, share) in zip(parts, batches, strict=True)
    ]
    found = [_with_gradient(plain, part) for part in weighed]
    losses, pieces = [loss for loss, _ in found], torch.stack([piece for _, piece in found], 1)
    error = _relative(pieces.sum(1) - gradient, gradient)
    tolerance = max(ROUNDING.get(p.dtype, SINGLE) for p in plain.model.parameters())
    numbers = sum(p.numel() for p in plain.trained.values())
    if not math.isfinite(error):
        return None
    weights: list[float] | None = None
    if error > tolerance and numbers >= GENERIC * len(parts):
        weights, rest = _weights(pieces, gradient)
        exact = max(EXACT, 8 * rest)
        apart = abs(sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) - whole)
        mean = sum(weight * share for weight, (_, share) in zip(weights, batches, strict=True))
        is_mean = total > 0 or _alike(weights) or abs(mean - 1) <= exact
        if rest > EXPLAINED * error or apart > exact * max(abs(whole), *map(abs, losses)) or not is_mean:
            weights = None
    return WholeBatch(whole, sum(losses), error, tolerance, weights)


def _with_gradient(plain: Plain, loss: Loss) -> tuple[float, Tensor]:
    """A loss, and random sums of its gradient's elements [FOLDED]."""
    value = loss.value if loss.items is None else loss.value / max(float(loss.items), 1.0)
    gradients = torch.autograd.grad(value, list(plain.trained.values()), allow_unused=True)
    return float(value.detach()), _folded(dict(enumerate(gradients)))


def _folded(gradients: Mapping[int, Tensor | None]) -> Tensor:
    total = torch.zeros(FOLDED, dtype=torch.float64)
    for seed, gradient in gradients.items():
        if gradient is not None:
            values = gradient.detach().reshape(-1).to("cpu", torch.float64)
            generator = torch.Generator().manual_seed(seed)
            places = torch.randint(FOLDED, values.shape, generator=generator)
            signs = torch.randint(0, 2, values.shape, generator=generator, dtype=torch.float64) * 2 - 1
            total.index_add_(0, places, values * signs)
    return total


def _weights(pieces: Tensor, gradient: Tensor) -> tuple[list[float], float]:
    """The weights of the parts' gradients, a column each, whose sum is nearest to a gradient; and the relative rest."""
    sizes = pieces.norm(dim=0)
    sizes = sizes.clamp(min=float(sizes.max()) * 1e-12 or 1.0)
    solution = torch.linalg.lstsq(pieces / sizes, gradient.unsqueeze(1), driver="gelsd").solution[:, 0] / sizes
    found: list[float] = solution.tolist()
    return found, _relative(pieces @ solution - gradient, gradient)


def _alike(weights: Sequence[float]) -> bool:
    return max(weights) - min(weights) <= CLOSE * max(map(abs, weights))


def _relative(difference: Tensor, wanted: Tensor) -> float:
    return float(difference.norm() / max(float(wanted.norm()), 1e-30))
