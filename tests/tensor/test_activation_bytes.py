"""Bytes that a split GPT block saves, by the ledger, beside the formula of 2205.05198 (section 4).

The block is in 16 bits, with attention in single operations. Beside the formula's tensors torch saves some that the
paper leaves out; they are counted apart, by name.
"""

import math

import pytest
import torch
from pool import Pool
from reproduce.block_formulas import saved_bytes
from torch import Tensor, nn
from torch.nn import functional as F

import zeroshard as zs
from zeroshard.reproduce.block_times import BlockShape

ROWS, POSITIONS, WIDTH, HEADS = 2, 64, 64, 4
SHAPE = BlockShape(ROWS, POSITIONS, WIDTH, HEADS)


class Attention(nn.Module):
    """Causal attention in single operations."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.num_heads, self.head_dim)
        query, key, value = (each(x).view(shape).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj))
        scores = query @ key.transpose(2, 3) / math.sqrt(self.head_dim)
        mixed = F.dropout(scores.softmax(-1), 0.1, self.training) @ value
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """The block of the paper, without a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Blocks(nn.Module):
    """Blocks, and a loss."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def torch_saves(ranks: int, sequence: bool) -> dict[str, float]:
    """What torch saves on a CPU and the formula leaves out."""
    parts = ranks if sequence else 1
    return {
        "masks of dropouts in 16 bits and not in 8": 2 * SHAPE.elements / parts + SHAPE.scores / ranks,
        "mean and deviation of norms in fp32": 2 * 2 * 4 * ROWS * POSITIONS / parts,
    }


def saved(mesh: zs.Mesh, ranks: int, sequence: bool) -> int:
    """Bytes that a block more saves."""
    peaks = []
    for count in (1, 3):
        torch.manual_seed(0)
        plan = zs.Plan(precision="bf16", tensor_parallel=zs.TensorParallel(ranks, sequence=sequence))
        engine = zs.Engine(Blocks(count), lambda p: torch.optim.SGD(p, lr=0.1), plan, mesh=mesh)
        with engine.trace(memory=True):
            engine.train_step(torch.randn(ROWS, POSITIONS, 3))
        peaks.append(engine.memory()["activations"].peak_bytes)
    return (peaks[1] - peaks[0]) // 2


@pytest.mark.parametrize("ranks, sequence", [(1, False), (2, False), (2, True), (4, True)])
def test_saved_bytes_equal_the_formula(pool: Pool, ranks: int, sequence: bool) -> None:
    wanted = float(sum(saved_bytes(SHAPE, ranks, sequence).values())) + sum(torch_saves(ranks, sequence).values())
    for found in pool.run(saved, ranks, ranks, sequence):
        assert found == pytest.approx(wanted, rel=0.01)
