"""Blocks that stand in a model twice or run in another order, and layers that several modules have, when split."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.nn import functional as F

import zeroshard as zs
from zeroshard.errors import ModelError

WIDTH, HEADS, VOCABULARY, STEPS = 8, 4, 11, 3


class Attention(nn.Module):
    """Causal attention, by names that are known."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D]."""
        rows, positions, _ = x.shape
        q, k, v = (
            layer(x).view(rows, positions, self.num_heads, self.head_dim).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, positions, -1))


class FeedForward(nn.Module):
    """Widens and comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D]."""
        return self.down_proj(torch.relu(self.up_proj(x)))


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.second, self.mlp = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D]."""
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Model(nn.Module):
    """Runs its blocks in the order of these numbers; returns logits."""

    def __init__(self, order: Sequence[int] = (0, 1, 2)) -> None:
        super().__init__()
        self.embed, self.head, self.order = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY), order
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] -> [B, T, V]."""
        x = self.embed(tokens)
        for number in self.order:
            x = self.blocks[number](x)
        return self.head(x)


def loss_of(model: Callable[[Tensor], Tensor], step: int) -> Tensor:
    """The loss of a step."""
    batch = tokens(step)
    return F.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def first_again() -> Model:
    """The first block is the last, too."""
    model = Model()
    model.blocks[2] = model.blocks[0]
    return model


def one_layer_for_two() -> Model:
    """Two feed-forward layers have one module."""
    model = Model()
    one, other = (model.blocks[number].get_submodule("mlp") for number in (0, 2))
    other.up_proj = one.up_proj
    return model


def all_twice() -> Model:
    """Goes through all blocks twice."""
    return Model((0, 1, 2, 0, 1, 2))


def first_twice() -> Model:
    """Runs its first block again at once: its blocks work on whole sequences."""
    return Model((0, 0, 1, 2))


MODELS: dict[str, Callable[[], Model]] = {
    made.__name__: made for made in (first_again, one_layer_for_two, all_twice, first_twice)
}


def build(name: str) -> Model:
    torch.manual_seed(0)
    return MODELS[name]()


def tokens(step: int) -> Tensor:
    """One more position than ranks divide."""
    return torch.randint(VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(step))


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def follow(mesh: zs.Mesh, name: str) -> dict[str, Tensor]:
    """The weights of one rank."""
    engine = zs.Engine(build(name), optimizer, zs.Plan(tensor_parallel=2), mesh=mesh)
    for step in range(STEPS):
        engine.backward(loss_of(engine, step))
        engine.step()
    return engine.state_dict()


@pytest.mark.parametrize("name", MODELS)
def test_they_train_like_one_process(pool: Pool, name: str) -> None:
    model = build(name)
    updates = optimizer(model.parameters())
    for step in range(STEPS):
        updates.zero_grad()
        loss_of(model, step).backward()
        updates.step()
    for mine in pool.run(follow, 2, name):
        torch.testing.assert_close(mine, dict(model.state_dict()), rtol=1e-5, atol=1e-6)


ORDERS = {
    (0, 1): "'blocks.2', where .* did not run",
    (1, 2): "'blocks.1' runs before",
    (0, 1, 2, 0): "'blocks.2', where .* did not run",
}


def refused(mesh: zs.Mesh, order: tuple[int, ...]) -> float:
    """The loss without sequence parallelism of an order that is refused with it."""
    losses = []
    for sequence in (True, False):
        plan = zs.Plan(tensor_parallel=zs.TensorParallel(2, sequence=sequence))
        torch.manual_seed(0)
        engine = zs.Engine(Model(order), optimizer, plan, mesh=mesh)
        if sequence:
            with pytest.raises(ModelError, match=f"(?s){ORDERS[order]}.*sequence=False"):
                loss_of(engine, 0)
        else:
            losses.append(loss_of(engine, 0).item())
    return losses[0]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_orders_in_which_positions_would_be_lost_are_refused(pool: Pool, order: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    assert pool.run(refused, 2, order) == pytest.approx([loss_of(Model(order), 0).item()] * 2, rel=1e-5)
