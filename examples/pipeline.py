"""A model of your own in two pipeline stages: `torchrun --nproc-per-node 2 examples/pipeline.py`."""

from functools import partial

import torch
from torch import Tensor, nn

import zeroshard as zs


class Block(nn.Sequential):
    def forward(self, h: Tensor) -> Tensor:
        return h + super().forward(h)  # a residual must be inside of its block


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(16, 128)
        self.blocks = nn.ModuleList(Block(nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU()) for _ in range(6))
        self.leave = nn.Linear(128, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.enter(x)
        for block in self.blocks:
            h = block(h)
        return nn.functional.mse_loss(self.leave(h), y)


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :4].sum(1, keepdim=True).sin()


plan = zs.Plan(pipeline_parallel=zs.Pipeline(2, schedule="1f1b"), microbatches=8, clip_norm=1.0)
engine = zs.Engine(Net(), partial(torch.optim.AdamW, lr=1e-3), plan, example=batch(8, seed=0))  # one microbatch
for step in range(80):
    result = engine.train_step(
        batch(64, seed=1 + engine.data_ranks * step + engine.data_rank)
    )  # both stages get the same batch
with torch.no_grad():
    loss = engine(*batch(256, seed=0))  # collective; all get the output
print(f"rank {engine.rank} has {', '.join(engine.layers)}\n", end="", flush=True)  # one write per rank
if engine.reports:
    print(f"step {result.step}: loss {result.loss:.3f}, and {loss:.3f} on other rows")
    print(*engine.schedule[:12], "...")
