"""Routings and routers for tests, and mixtures as literal loops over tokens."""

import torch
from torch import Tensor, nn

from zeroshard.moe.routing.record import Routing


def routing_of(tokens: int, experts: int, k: int, drops: float = 0.0, dtype: torch.dtype = torch.float32) -> Routing:
    """Random choices, of which a share `drops` is not kept; the last expert gets none if there are more than k."""
    open_to = max(k, experts - 1)
    chosen = torch.stack([torch.randperm(open_to)[:k] for _ in range(tokens)]) if tokens else torch.empty(0, k).long()
    gates = torch.rand(tokens, k, dtype=dtype, requires_grad=True)
    kept = torch.rand(tokens, k) >= drops if drops else None
    return Routing(chosen, gates, kept, torch.bincount(chosen.flatten(), minlength=experts))


class TopRouter(nn.Module):
    """Softmax and top k, with a balance loss; `drops` of the choices are not kept."""

    def __init__(self, width: int, experts: int, k: int, drops: float = 0.0, noise: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, experts, bias=False)
        self.k, self.drops, self.noise = k, drops, noise
        self.forwards = 0

    def forward(self, x: Tensor, valid: Tensor | None = None, group: int | None = None) -> Routing:
        self.forwards += 1
        logits = self.linear(x)
        if self.noise and self.training:
            logits = logits + self.noise * torch.randn_like(logits)
        p = logits.float().softmax(-1)
        gates, chosen = p.topk(self.k)
        counts = torch.bincount(chosen.flatten(), minlength=p.shape[-1])
        balance = p.shape[-1] * (counts / counts.sum() * p.mean(0)).sum()
        kept = torch.arange(chosen.numel()).view(chosen.shape) % 10 >= 10 * self.drops if self.drops else None
        entropy = -(p * p.clamp_min(1e-30).log()).sum(-1).mean().detach()
        return Routing(chosen, gates, kept, counts, {"balance": 0.01 * balance}, entropy)


def mixture_by_tokens(x: Tensor, routing: Routing, expert: "nn.Module | object") -> Tensor:
    """y[t] = sum over kept choices of gate * expert(e, x[t]), one token after the other."""
    outputs = []
    for t in range(len(x)):
        total = torch.zeros_like(x[t])
        for j in range(routing.choices):
            if routing.kept is None or routing.kept[t, j]:
                total = total + routing.gates[t, j] * expert(int(routing.experts[t, j]), x[t])  # type: ignore[operator]
        outputs.append(total)
    return torch.stack(outputs)
