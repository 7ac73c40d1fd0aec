"""A small model with mixtures, routers whose choices are known or starve experts, and a plain loop to compare with."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from zeroshard.moe.experts.experts import ExpertModules, Experts
from zeroshard.moe.routing.record import Routing
from zeroshard.step.context import Within
from zeroshard.step.losses import penalised

WIDTH, HIDDEN, EXPERTS, ROWS, POSITIONS, VOCABULARY = 8, 12, 6, 4, 5, 11
KINDS = ("learned", "starved", "one", "by row")


class Router(nn.Module):
    """Top 2 of a softmax over experts, with a balance loss.

    Args:
        kind: "learned"; "starved", where the last two experts get no tokens; "one", where the first two get all; "by
            row", where row r of a batch goes to experts 2r and 2r + 1.
    """

    def __init__(self, kind: str, experts: int = EXPERTS) -> None:
        super().__init__()
        self.kind, self.experts = kind, experts
        self.weight = nn.Parameter(torch.empty(experts, WIDTH))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.7)

    def forward(self, x: Tensor, rows: int) -> Routing:
        """[T, D], of so many rows."""
        logits = F.linear(x.float(), self.weight.float())
        asked = logits.detach()
        if self.kind == "starved":
            asked = asked - 100.0 * (torch.arange(self.experts, device=x.device) >= self.experts - 2)
        elif self.kind == "one":
            asked = asked + 100.0 * (torch.arange(self.experts, device=x.device) < 2)
        elif self.kind == "by row":
            row = torch.arange(len(x), device=x.device) // (len(x) // rows)
            asked = asked + 100.0 * (
                torch.arange(self.experts, device=x.device) // 2 == row[:, None] % (self.experts // 2)
            )
        chosen = asked.topk(2).indices
        probabilities = logits.softmax(-1)
        gates = probabilities.gather(1, chosen)
        counts = (chosen.unsqueeze(-1) == torch.arange(self.experts, device=x.device)).sum((0, 1))
        fractions = counts / chosen.numel()
        loss = 0.3 * self.experts * (probabilities.mean(0) * fractions).sum()
        return Routing(chosen, gates, None, counts, {"balance": loss})


class Mixture(nn.Module):
    """A router and experts; stacked, or modules."""

    adds_penalty = True

    def __init__(self, kind: str, modules: bool, experts: int = EXPERTS) -> None:
        super().__init__()
        self.router = Router(kind, experts)
        make = lambda: nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))  # noqa: E731
        self.experts = ExpertModules(make, experts) if modules else Experts(WIDTH, HIDDEN, experts, "gelu", bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D]."""
        tokens = x.reshape(-1, WIDTH)
        routing = self.router(tokens, len(x))
        self.experts.statistics.add(routing)
        output = self.experts(tokens, routing)
        if self.training and routing.penalty is not None:
            output = penalised(output, routing.penalty)
        return output.view(x.shape)


class Dense(nn.Module):
    """A feed-forward layer, which ranks may split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D]."""
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    """A residual block with a dense layer and a mixture."""

    def __init__(self, kind: str, modules: bool, experts: int, checkpointed: bool, inlined: bool = False) -> None:
        super().__init__()
        self.norm, self.inlined, dense = nn.LayerNorm(WIDTH), inlined, Dense()
        if inlined:
            self.up, self.down = dense.up, dense.down
        else:
            self.dense = dense
        self.mixture, self.checkpointed = Mixture(kind, modules, experts), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + (self.down(torch.tanh(self.up(h))) if self.inlined else self.dense(h))
        if self.checkpointed and x.requires_grad:
            return x + checkpoint(self.mixture, x, use_reentrant=False)
        return x + self.mixture(x)


class Mixed(nn.Module):
    """Embedding, blocks, head; returns the loss, a mean or a sum with its count.

    Args:
        frozen: the last of the experts, which are modules, do not train.
        inlined: blocks compute their dense layers themselves.
    """

    def __init__(
        self,
        kind: str = "learned",
        modules: bool = False,
        experts: int = EXPERTS,
        checkpointed: bool = False,
        summed: bool = False,
        blocks: int = 2,
        frozen: bool = False,
        inlined: bool = False,
    ) -> None:
        super().__init__()
        self.embed, self.summed = nn.Embedding(VOCABULARY, WIDTH), summed
        self.blocks = nn.ModuleList(Block(kind, modules, experts, checkpointed, inlined) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        for block in self.blocks if frozen else ():
            block.mixture.experts.networks[-1].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Any:
        """[B, T + 1]."""
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits, targets = self.head(x).flatten(0, 1), tokens[:, 1:].flatten()
        if self.summed:
            counted = targets > 1  # another number in each batch
            return F.cross_entropy(logits[counted], targets[counted], reduction="sum"), int(counted.sum())
        return F.cross_entropy(logits, targets)


def build(model: Mapping[str, Any], seed: int = 0) -> Mixed:
    """A model of these options."""
    torch.manual_seed(seed)
    return Mixed(**model)


def batch(step: int, data_rank: int, rows: int = ROWS) -> Tensor:
    """A data rank's batch of a step."""
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    return torch.randint(VOCABULARY, (rows, POSITIONS + 1), generator=generator)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Sensitive to the scale of gradients, as Adam is not."""
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.5)


def plain(
    model: Mapping[str, Any], data_ranks: int, steps: int, clip: float | None = None, microbatches: int = 1
) -> dict[str, Any]:
    """Mean losses, gradient norms and weights of a loop in one process."""
    net = build(model)
    updates, losses, norms = optimizer(net.parameters()), [], []
    for step in range(steps):
        updates.zero_grad()
        parts = [part for rank in range(data_ranks) for part in batch(step, rank).chunk(microbatches)]
        found = [net(part) for part in parts]
        if net.summed:
            total = sum(count for _, count in found)
            shares = [(value / total, count / total) for value, count in found]
        else:
            shares = [(value / len(parts), 1 / len(parts)) for value in found]
        for value, weight in shares:
            with Within(penalty_weight=weight):
                value.backward()
        losses.append(sum(float(value.detach()) for value, _ in shares))
        limit = float("inf") if clip is None else clip
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), limit)))
        updates.step()
    return {"losses": losses, "norms": norms, "weights": net.state_dict()}


def engine_of(mesh: zs.Mesh, model: Mapping[str, Any], plan: Mapping[str, Any], seed: int = 0) -> zs.Engine:
    """An engine of such a model."""
    settings = {"pipeline_parallel.balance": "parameters", **plan}
    of = zs.Plan.from_dict(settings)
    return zs.Engine(
        build(model, seed), optimizer, of, mesh=mesh, loss=lambda output, _: output, example=batch(0, 0, 2)
    )


def take(engine: zs.Engine, first: int, last: int) -> list[zs.StepResult]:
    """Some steps."""
    return [engine.train_step(batch(step, engine.data_rank)) for step in range(first, last)]


def follow(mesh: zs.Mesh, model: Mapping[str, Any], plan: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """What one rank sees of a run."""
    engine = engine_of(mesh, model, plan, seed=mesh.rank)
    results = take(engine, 0, steps)
    engine.flush()
    engine.check_replicas()
    return {
        "losses": [None if each.loss is None else each.loss.item() for each in results],
        "norms": [each.grad_norm for each in results],
        "wire": {row.purpose: (row.planned_elements, row.measured_elements) for row in engine.traffic()},
        "memory": {
            row.category: (row.planned_bytes + row.padding_bytes, row.measured_bytes)
            for row in engine.memory()
            if row.planned_bytes is not None
        },
        "shapes": {name: tuple(p.shape) for name, p in engine.model.named_parameters()},
        "weights": engine.state_dict(),
    }


def follow_all(mesh: zs.Mesh, runs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], steps: int) -> list[Any]:
    """What one rank sees of several runs."""
    return [follow(mesh, model, plan, steps) for model, plan in runs]
