"""The plain loop in one process that an engine has to follow under every plan."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Part = TypeVar("Part")


@dataclass
class PlainRun:
    """Losses and gradient norms of each step, and the last state dict."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)


def plain_loop(
    model: nn.Module,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    steps: Iterable[Sequence[Part]],
    loss: Callable[[nn.Module, Part], Tensor],
    clip: float | None = None,
) -> PlainRun:
    """Train on the mean of the losses of each step's parts: microbatches, and those of data-parallel ranks."""
    seen = PlainRun()
    updates = optimizer([p for p in model.parameters() if p.requires_grad])
    for parts in steps:
        updates.zero_grad()
        total = 0.0
        for part in parts:
            value = loss(model, part) / len(parts)
            value.backward()  # type: ignore[no-untyped-call]
            total += value.item()
        seen.losses.append(total)
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        if clip is not None:
            nn.utils.clip_grads_with_norm_(model.parameters(), clip, norm)
        seen.norms.append(float(norm))
        updates.step()
    seen.weights = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in model.state_dict().items()}
    return seen


def follows_plain_loop(
    answers: Sequence[tuple[list[float], dict[str, Any]]], wanted: PlainRun, tolerance: float = 1e-5
) -> None:
    """The mean of the ranks' losses, and the weights of every rank, are those of the loop; else an AssertionError."""
    losses = torch.tensor([mine for mine, _ in answers], dtype=torch.float64).mean(0)
    torch.testing.assert_close(losses, torch.tensor(wanted.losses, dtype=torch.float64), rtol=tolerance, atol=0)
    for rank, (_, weights) in enumerate(answers):
        assert weights.keys() == wanted.weights.keys()
        for name, value in weights.items():
            where = f"{name} on rank {rank}"
            assert value.dtype == wanted.weights[name].dtype, where
            torch.testing.assert_close(
                value,
                wanted.weights[name],
                rtol=tolerance,
                atol=tolerance,
                msg=lambda text, where=where: f"{where}: {text}",
            )
