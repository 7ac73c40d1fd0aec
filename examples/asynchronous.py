"""Asynchronous training with one slow worker: `torchrun --nproc-per-node 2 examples/asynchronous.py`."""

import time
from functools import partial

import torch
from torch import nn

import zeroshard as zs

model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
trainer = zs.AsynchronousTrainer(model, partial(torch.optim.AdamW, lr=1e-2), staleness=None)  # or a bound in steps
rank, lead = trainer.mesh.rank, 0
generator = torch.Generator().manual_seed(rank)  # every rank sees other data


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, 16, generator=generator)
    return x, x[:, :2].sum(1, keepdim=True).sin()


for _ in range(200 if rank == 0 else 50):
    x, y = batch(32)
    nn.functional.mse_loss(model(x), y).backward()
    if rank > 0:
        time.sleep(0.02)  # a slow machine
    result = trainer.step()
    lead = max(lead, result.lead)
staleness = trainer.finish()  # the weights are final now, and the same on every rank

print(f"worker {rank} was at most {lead} steps ahead\n", end="", flush=True)
if rank == 0:
    with torch.no_grad():
        x, y = batch(1000)
        print(f"loss {nn.functional.mse_loss(model(x), y):.3f} on other rows")
    print(staleness)
