"""Orthogonalisation of matrices by a quintic Newton-Schulz iteration (Jordan et al., Muon, 2024; 2502.16982).

An iteration is X' = (a I + b A + c A^2) X with A = X X^T, on the side of a matrix that is smaller: three products. On
CPUs the identity is added to the diagonal, so that nothing but products passes over the matrix, and A and A^2, which
are symmetric, are computed by blocks on and under the diagonal. Elsewhere matrices of one shape go together.
"""

import torch

from zeroshard.optim.host.devices import on_cpus

Coefficients = tuple[float, float, float]
QUINTIC: Coefficients = (3.4445, -4.7750, 2.0315)  # of Jordan's Muon, with the steepest slope at 0
SMALLEST = 1e-7  # norm that a matrix is divided by
BLOCK = 256  # rows of a symmetric product that are not divided further


def orthogonalize(
    stack: torch.Tensor, coefficients: Coefficients = QUINTIC, steps: int = 5, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Matrices [B, n, m] with the singular vectors of those of `stack` and singular values near 1.

    Args:
        dtype: of the iteration; None for bfloat16, and on CPUs for the dtype of `stack`, where bfloat16 is no faster.
    """
    on_cpu = on_cpus(stack)
    kind = dtype or (stack.dtype if on_cpu else torch.bfloat16)
    tall = stack.shape[-2] > stack.shape[-1]
    start = (stack.mT if tall else stack).to(kind)
    start = start / torch.linalg.matrix_norm(start, keepdim=True).clamp_(min=SMALLEST)
    one_by_one = on_cpu and kind in (torch.float32, torch.float64)
    result = (_one_by_one if one_by_one else _together)(start, coefficients, steps)
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
    """Iterate on each matrix alone, in buffers that all share."""
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


def _together(stack: torch.Tensor, coefficients: Coefficients, steps: int) -> torch.Tensor:
    a, b, c = coefficients
    for _ in range(steps):
        gram = torch.bmm(stack, stack.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        stack = torch.baddbmm(stack, polynomial, stack, beta=a)
    return stack
