"""Gradients of embeddings, made row by row in the engine's buffers: the same bits, and no matrix of zeros."""

from functools import partial
from typing import Any

import pytest
import torch
from moe.large_tensors import made_by
from pool import Pool
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from zeroshard.autograd.gradient_slot import Lent
from zeroshard.losses import linear_cross_entropy
from zeroshard.zero.gradients import BufferedGradients, GradientBuffer

V, W, T = 900, 32, 12  # more elements than small parameters have


class Net(nn.Module):
    """An embedding with an output layer: `tied`, through our loss or torch's; `twice` looked up twice."""

    def __init__(self, tied: bool = True, ours: bool = True, twice: bool = False, padding: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, W, padding_idx=padding)
        self.middle = nn.Linear(W, W)
        self.head = nn.Linear(W, V, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.ours, self.twice = ours, twice
        self.recompute = ""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.recompute:
            x = checkpoint(self.embedding, tokens, use_reentrant=self.recompute == "re-entrant")
        else:
            x = self.embedding(tokens)
        if self.twice:
            x = x + self.embedding(tokens.flip(1))
        x = self.middle(x.tanh_())  # in place: the output is the user's as ever
        if self.ours:
            return linear_cross_entropy(x, self.head.weight, targets)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def batch(step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens, many of them more than once, and targets."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(9, (2, T), generator=generator), torch.randint(V, (2, T), generator=generator)


def train(plan: zs.Plan, mesh: Any = None, microbatches: int = 1, recompute: str = "", **options: Any) -> list[Tensor]:
    """Losses of three steps, and the weights after them."""
    model = Net(**options)
    model.recompute = recompute
    engine = zs.Engine(model, partial(torch.optim.AdamW, lr=1e-2), plan, mesh=mesh)
    found = []
    for step in range(3):
        for microbatch in range(microbatches):
            loss = engine(*batch(3 * step + microbatch, 0 if mesh is None else mesh.rank))
            engine.backward(loss)
            found.append(loss.detach())
        engine.step()
    with engine.gathered():
        return [*found, *(parameter.detach().clone() for parameter in model.parameters())]


def compare(plan: zs.Plan, mesh: Any = None, tolerance: float = 0.0, **options: Any) -> tuple[int, int]:
    """Train with slots and without; how many slots were lent, and how often rows were left for one that was."""
    lends, leaves = [0], [0]
    lend, leave = BufferedGradients.lend, GradientBuffer.leave

    def counted_lend(*args: Any) -> Lent | None:
        lent = lend(*args)
        lends[0] += lent is not None
        return lent

    def counted_leave(*args: Any) -> bool:
        left = leave(*args)
        leaves[0] += left
        return left

    try:
        BufferedGradients.lend, GradientBuffer.leave = counted_lend, counted_leave  # type: ignore[method-assign]
        rows = train(plan, mesh, **options)
        counts = lends[0], leaves[0]
        BufferedGradients.lend = lambda *args: None  # type: ignore[method-assign]
        GradientBuffer.leave = lambda *args: False  # type: ignore[method-assign]
        dense = train(plan, mesh, **options)
    finally:
        BufferedGradients.lend, GradientBuffer.leave = lend, leave  # type: ignore[method-assign]
    assert len(rows) == len(dense) > 3
    for each, expected in zip(rows, dense, strict=True):
        torch.testing.assert_close(each, expected, rtol=tolerance, atol=tolerance)
    return counts


CASES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "tied": ({}, (3, 3)),
    "tied, torch's loss": ({"ours": False}, (3, 0)),
    "untied": ({"tied": False}, (6, 0)),
    "untied, torch's loss": ({"tied": False, "ours": False}, (3, 0)),
    "twice": ({"twice": True}, (3, 6)),
    "twice, untied": ({"twice": True, "tied": False}, (6, 3)),
    "padding": ({"padding": 2, "tied": False}, (6, 0)),
    "two backwards": ({"microbatches": 2, "tolerance": 1e-6}, (6, 6)),  # (earlier + head) + rows
    "recomputed": ({"recompute": "yes"}, (3, 3)),
    "recomputed by another backward": ({"recompute": "re-entrant"}, (3, 0)),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_give_the_bits_of_a_whole_gradient(name: str) -> None:
    options, counts = CASES[name]
    assert compare(zs.Plan(zero=1), **options) == counts


def on_ranks(mesh: zs.Mesh, zero: int, transport: str, recompute: str) -> tuple[int, int]:
    plan = zs.Plan(zero=zero, transport=transport)  # type: ignore[arg-type]
    return compare(plan, mesh, microbatches=2, recompute=recompute)


@pytest.mark.parametrize("recompute", ["", "re-entrant"])
@pytest.mark.parametrize(
    ("zero", "transport"), [(0, "network"), (1, "shared"), (2, "network"), (3, "network"), (3, "shared")]
)
def test_rows_change_no_bit_on_several_ranks(pool: Pool, zero: int, transport: str, recompute: str) -> None:
    assert pool.run(on_ranks, 2, zero, transport, recompute) == [(6, 0 if recompute else 6)] * 2


def sgd(model: nn.Module) -> zs.Engine:
    return zs.Engine(model, partial(torch.optim.SGD, lr=0.1), zs.Plan())


def test_no_matrix_is_made_for_a_lookup() -> None:
    model = Net(tied=False, ours=False)
    engine, size = sgd(model), model.embedding.weight.nbytes
    model.head.requires_grad_(False)
    for step in range(2):
        loss = engine(*batch(step))
        assert made_by(lambda loss=loss: engine.backward(loss), size) == 0  # type: ignore[misc]
        engine.step()


@pytest.mark.parametrize("call", ["grad", "inputs"])
@pytest.mark.parametrize("name", ["tied", "experts"])
def test_a_backward_that_does_not_reach_a_parameter_leaves_its_gradient_alone(name: str, call: str) -> None:
    """The functions that make gradients in slots run in it as well, since they make those of their inputs."""

    def step(between: bool) -> Tensor:
        if name == "tied":
            model: nn.Module = Net()
        else:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(48, 48), zs.moe.MoE(48, 96, 8, router="mixtral", expert=zs.moe.SWIGLU))
        hidden: list[Tensor] = []
        first = model.middle if isinstance(model, Net) else model[0]  # type: ignore[index]
        first.register_forward_hook(lambda _module, _inputs, output: hidden.append(output))
        engine = sgd(model)
        loss = engine(*batch(0)) if name == "tied" else engine(torch.ones(6, 48)).square().sum()
        engine.backward(loss)
        if between:
            other = engine(*batch(1)) if name == "tied" else engine(2 * torch.ones(6, 48)).square().sum()
            if call == "grad":
                torch.autograd.grad(other, hidden[-1])
            else:
                hidden[-1].retain_grad()
                other.backward(inputs=[hidden[-1]])
        engine.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    assert torch.equal(step(True), step(False))


def test_hooks_of_users_see_and_change_whole_gradients() -> None:
    model = Net(tied=False)
    engine, seen = sgd(model), []
    model.embedding.weight.register_hook(lambda g: seen.append(g.count_nonzero(1).count_nonzero().item()) or 0 * g)  # type: ignore[func-returns-value]
    before = model.embedding.weight.detach().clone()
    tokens, targets = batch(0)
    engine.backward(engine(tokens, targets))
    engine.step()
    assert seen == [tokens.unique().numel()] and torch.equal(model.embedding.weight, before)


def test_lookups_are_differentiated_twice_as_ever() -> None:
    model = Net(tied=False, ours=False)
    plain = Net(tied=False, ours=False)
    engine = sgd(model)

    def penalty(net: nn.Module) -> Tensor:
        net.embedding.register_forward_hook(lambda _module, _inputs, output: kept.append(output))  # type: ignore[union-attr,operator]
        tokens, targets = batch(0)
        kept: list[Tensor] = []
        loss = (engine if net is model else net)(tokens, targets)
        (gradient,) = torch.autograd.grad(loss, kept[-1], create_graph=True)
        return loss + gradient.square().sum()

    ours, theirs = penalty(model), penalty(plain)
    assert torch.equal(ours, theirs)
    engine.backward(ours)
    theirs.backward()
    engine.step()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter -= 0.1 * parameter.grad  # type: ignore[operator]
    for mine, yours in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, yours)


def test_an_embedding_with_a_forward_of_its_own_is_left_alone() -> None:
    found = []
    for engine in (True, False):
        model = Net(tied=False)
        lookup = model.embedding.forward
        model.embedding.forward = lambda tokens, lookup=lookup: 2 * lookup(tokens)  # type: ignore[assignment,misc]
        run: Any = sgd(model) if engine else model
        loss = run(*batch(0))
        if engine:
            run.backward(loss)
            run.step()
        else:
            loss.backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        found.append(model.embedding.weight.detach())
    torch.testing.assert_close(*found)
