"""Muon (Jordan et al., 2024; Liu et al., 2502.16982): orthogonalised momentum for matrices, AdamW for other parameters.

One optimizer serves a whole model. It orthogonalises parameters of at least two dimensions (besides `batch_dims`), in
parameter groups with `orthogonalize=True`, the default. `muon_groups` makes groups that leave embeddings and the output
layer to AdamW; `Muon.table` prints the result.

Matrices are orthogonalised by a quintic Newton-Schulz iteration, X' = (a I + b A + c A^2) X with A = X X^T, on the
smaller side of a matrix: three products. On CPUs the identity is added to the diagonal, so that only products pass over
the matrix, and the symmetric A and A^2 are computed by blocks on and under the diagonal. On other devices matrices of
one shape are batched.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from zeroshard.optim.algorithms.adam_math import adamw_steps, moments
from zeroshard.optim.algorithms.tensor_optimizer import (
    Options,
    State,
    TensorOptimizer,
    as_matrices,
    check_range,
    checked,
    matrix_shape,
    opened,
    put_back,
    state_dtype,
)
from zeroshard.platform.accelerator import on_cpus

Coefficients = tuple[float, float, float]
QUINTIC: Coefficients = (3.4445, -4.7750, 2.0315)  # of Jordan's Muon, with the steepest slope at 0
SMALLEST = 1e-7  # norm that a matrix is divided by
BLOCK = 256  # rows of a symmetric product that are not divided further


def orthogonalize(
    stack: torch.Tensor, coefficients: Coefficients = QUINTIC, steps: int = 5, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Matrices [B, n, m] with the singular vectors of `stack` and singular values near 1.

    Args:
        dtype: of the iteration; None for bfloat16, on CPUs for the dtype of `stack`, since bfloat16 is no faster there.
    """
    on_cpu = on_cpus(stack)
    kind = dtype or (stack.dtype if on_cpu else torch.bfloat16)
    tall = stack.shape[-2] > stack.shape[-1]
    start = (stack.mT if tall else stack).to(kind)
    start = start / torch.linalg.matrix_norm(start, keepdim=True).clamp_(min=SMALLEST)
    one_by_one = on_cpu and kind in (torch.float32, torch.float64)
    result = (_one_by_one if one_by_one else _batched)(start, coefficients, steps)
    return (result.mT if tall else result).to(stack.dtype)


def symmetric_product(
    left: torch.Tensor, out: torch.Tensor, added: torch.Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> None:
    """Set `out` [n, n] to alpha L L^T + beta S, by blocks on and under the diagonal.

    Args:
        left: L [n, k].
        added: S [n, n], symmetric; None for none.
    """
    n = len(left)
    if n <= BLOCK:
        _product(left, left.T, out, added, beta, alpha)
        return
    cut = -(-n // 128) * 64  # half of it, in whole vectors of the processor
    low, high = slice(0, cut), slice(cut, n)
    for part in (low, high):
        symmetric_product(left[part], out[part, part], None if added is None else added[part, part], beta, alpha)
    rest = None if added is None else added[high, low]
    _product(left[high], left[low].T, out[high, low], rest, beta, alpha)
    out[low, high].copy_(out[high, low].T)


def _product(
    left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, added: torch.Tensor | None, beta: float, alpha: float
) -> None:
    if added is None:
        torch.mm(left, right, out=out)
    else:
        torch.addmm(added, left, right, beta=beta, alpha=alpha, out=out)


def _one_by_one(stack: torch.Tensor, coefficients: Coefficients, steps: int) -> torch.Tensor:
    """Iterate on each matrix alone, in shared buffers."""
    a, b, c = coefficients
    n = stack.shape[-2]
    gram, polynomial = stack.new_empty(n, n), stack.new_empty(n, n)
    buffers = [torch.empty_like(stack[0]) for _ in range(2)]
    result = torch.empty_like(stack)
    for matrix, last in zip(stack, result, strict=True):
        current = matrix
        for step in range(steps):
            symmetric_product(current, gram)
            symmetric_product(gram, polynomial, gram, b, c)
            polynomial.diagonal().add_(a)
            target = last if step == steps - 1 else buffers[step % 2]
            current = torch.mm(polynomial, current, out=target)
        if not steps:
            last.copy_(matrix)
    return result


def _batched(stack: torch.Tensor, coefficients: Coefficients, steps: int) -> torch.Tensor:
    a, b, c = coefficients
    for _ in range(steps):
        gram = torch.bmm(stack, stack.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        stack = torch.baddbmm(stack, polynomial, stack, beta=a)
    return stack


SCALES = ("match_rms_adamw", "original", "none")
GROUP_OPTIONS = {"orthogonalize": True, "betas": (0.9, 0.95), "eps": 1e-8, "batch_dims": None, "dtype": None}


def scale_of(rule: str, rows: int, columns: int) -> float:
    """The factor of the learning rate for a matrix [rows, columns].

    Args:
        rule: "match_rms_adamw" for 0.2 sqrt(max(rows, columns)), which gives updates the size of AdamW's (2502.16982,
            section 2.2); "original" for sqrt(max(1, rows/columns)); "none" for 1.
    """
    if rule == "none":
        return 1.0
    return 0.2 * math.sqrt(max(rows, columns)) if rule == "match_rms_adamw" else math.sqrt(max(1.0, rows / columns))


def muon_groups(model: nn.Module) -> list[Options]:
    """Parameter groups with names; embeddings and the output layer have `orthogonalize=False`.

    An output layer is a linear layer that shares its weight with an embedding, or has as many output features as an
    embedding has rows.
    """
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    excluded = {id(m.weight) for m in embeddings}
    vocabularies = {m.num_embeddings for m in embeddings}
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    excluded |= {id(m.weight) for m in linear if m.out_features in vocabularies}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [(name, p) for name, p in named if (id(p) in excluded) != orthogonal], "orthogonalize": orthogonal}
        for orthogonal in (True, False)
    ]
    return [group for group in groups if group["params"]]


class Muon(TensorOptimizer):
    """Muon for matrices and AdamW for all other parameters, with states in fp32.

    Both use the group's learning rate, weight decay and schedules. Parameter groups may also set `orthogonalize`
    (default true), `betas` and `eps` of AdamW, `batch_dims`, and `dtype` of the iteration.

    Args:
        momentum: its decay.
        nesterov: whether to use Nesterov momentum.
        ns_coefficients: of the quintic iteration.
        ns_steps: the number of its iterations.
        adjust_lr_fn: how the learning rate depends on a matrix's shape, as in `scale_of`. None for the first of these,
            so that one learning rate serves AdamW too; `torch.optim.Muon` takes None for "original".

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = QUINTIC,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        check_range("ns_coefficients", ns_coefficients, len(ns_coefficients) == 3, "three numbers")
        check_range("ns_steps", ns_steps, 0 <= ns_steps < 100, "at least 0 and less than 100")
        known = adjust_lr_fn is None or adjust_lr_fn in SCALES
        check_range("adjust_lr_fn", adjust_lr_fn, known, f"None or one of {', '.join(SCALES)}")
        defaults = checked(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov)
        defaults |= {"ns_coefficients": ns_coefficients, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        super().__init__(params, {**defaults, **GROUP_OPTIONS})

    def table(self) -> str:
        """A line for each parameter: its name or number, its shape, and how it is updated."""
        rows = [("parameter", "shape", "update")]
        number = 0
        for group in self.param_groups:
            names = group.get("param_names") or [str(number + n) for n in range(len(group["params"]))]
            for name, parameter in zip(names, group["params"], strict=True):
                shape = "x".join(map(str, matrix_shape(parameter.shape, group["batch_dims"])))
                how = f"orthogonalised as {shape}" if _is_matrix(parameter, group) else "AdamW"
                rows.append((name, "x".join(map(str, parameter.shape)) or "scalar", how))
            number += len(names)
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{name:<{widths[0]}}  {shape:<{widths[1]}}  {how}" for name, shape, how in rows)

    def _step_group(self, group: Options, parameters: Sequence[torch.Tensor]) -> None:
        others = [p for p in parameters if not _is_matrix(p, group)]
        if others:
            adamw_steps(others, [self._state(p, group) for p in others], group)
        matrices = [p for p in parameters if _is_matrix(p, group)]
        if matrices and not on_cpus(matrices[0]):
            self._change_batched(matrices, group)
            return
        for parameter in matrices:
            state = self._state(parameter, group)
            self._change(parameter, state, group)

    def _start(self, parameter: torch.Tensor, group: Options) -> State:
        if not _is_matrix(parameter, group):
            return moments(parameter)
        return {"momentum_buffer": torch.zeros(parameter.shape, dtype=state_dtype(parameter), device=parameter.device)}

    def _change(self, parameter: torch.Tensor, state: State, group: Options) -> None:
        update = _momentum(parameter, state, group)
        _apply(parameter, orthogonalize(update, group["ns_coefficients"], group["ns_steps"], group["dtype"]), group)

    def _change_batched(self, parameters: Sequence[torch.Tensor], group: Options) -> None:
        """As `_change`, with all matrices of one shape in one batch."""
        stacks: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for parameter in parameters:
            update = _momentum(parameter, self._state(parameter, group), group)
            stacks.setdefault((update.shape[1:], update.dtype), []).append((parameter, update))
        for members in stacks.values():
            stack = torch.cat([update for _, update in members])
            results = orthogonalize(stack, group["ns_coefficients"], group["ns_steps"], group["dtype"])
            parts = results.split([len(update) for _, update in members])
            for (parameter, _), result in zip(members, parts, strict=True):
                _apply(parameter, result, group)


def _is_matrix(parameter: torch.Tensor, group: Options) -> bool:
    return bool(group["orthogonalize"]) and len(matrix_shape(parameter.shape, group["batch_dims"])) == 3


def _momentum(parameter: torch.Tensor, state: State, group: Options) -> torch.Tensor:
    """Update the momentum by the gradient, and return the direction [B, n, m] to orthogonalise."""
    _, gradient = opened(parameter, group["batch_dims"])
    momentum = as_matrices(state["momentum_buffer"], group["batch_dims"])
    momentum.lerp_(gradient, 1.0 - group["momentum"])
    return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def _apply(parameter: torch.Tensor, update: torch.Tensor, group: Options) -> None:
    weights, _ = opened(parameter, group["batch_dims"])
    scale = scale_of(group["adjust_lr_fn"] or SCALES[0], update.shape[-2], update.shape[-1])
    weights.mul_(1.0 - group["lr"] * group["weight_decay"])
    weights.sub_(update.mul_(group["lr"] * scale))
    put_back(parameter, weights)
