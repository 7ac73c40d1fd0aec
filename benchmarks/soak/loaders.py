"""A script as people write them: no guard, a data loader with processes of its own, an engine at the top level.

zeroshard run --nproc-per-node 2 loaders.py FILE WORKERS START_METHOD
"""

import json
import sys
from pathlib import Path

import torch
import torch.multiprocessing
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zeroshard as zs

path, workers, method = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
engine = zs.Engine(model, lambda ps: torch.optim.SGD(ps, lr=0.1), zs.Plan(zero=2, timeout=60.0))
data = TensorDataset(torch.arange(64.0).reshape(16, 4) / 64)
context = None if method == "default" or not workers else method
loader = DataLoader(data, batch_size=4, num_workers=workers, multiprocessing_context=context)
losses = []
for _ in range(2):
    for (x,) in loader:
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
path.with_suffix(f".{engine.mesh.rank}").write_text(json.dumps(losses))
