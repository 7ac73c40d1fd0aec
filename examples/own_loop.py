"""zeroshard in your own training loop: `torchrun --nproc-per-node 2 examples/own_loop.py`."""

from functools import partial

import torch
from torch import nn

import zeroshard as zs

model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)], nn.Linear(256, 1))
engine = zs.Engine(model, partial(torch.optim.AdamW, lr=1e-3), zs.Plan(zero=3, clip_norm=1.0))
generator = torch.Generator().manual_seed(engine.rank)  # every rank sees other data
for _ in range(50):
    x = torch.randn(32, 256, generator=generator)
    y = x[:, :8].sum(1, keepdim=True).sin()
    loss = nn.functional.mse_loss(engine(x), y)
    engine.backward(loss)
    result = engine.step()
if engine.rank == 0:
    print(f"step {result.step}: loss {loss.item():.3f}, gradient norm {result.grad_norm:.3f}")
    print(engine.memory())
    print(engine.traffic())
