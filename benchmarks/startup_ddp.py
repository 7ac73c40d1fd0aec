"""One rank of a script with DistributedDataParallel that trains the job of `zeroshard train` (see `startup.py`).

    torchrun --nproc-per-node 2 benchmarks/startup_ddp.py MODEL SEQUENCE ROWS

Model, text, order of its windows, optimizer and clipping are those of `zeroshard train` by default, and so are the
lines that rank 0 prints at the beginning and after the first step.
"""

import os
import sys
import time

import psutil
import torch
from ranks import answer, cpu_seconds
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zeroshard.data.corpus import Batches, standard_library_corpus
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import SIZES


def main() -> None:
    """Train two steps."""
    name, sequence, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.distributed.init_process_group("gloo")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(standard_library_corpus().train), dtype=torch.uint8)
    batches, model = Batches(text, sequence, 0), GPT(SIZES[name])
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
    engine = DistributedDataParallel(model)
    numel = f"{sum(p.numel() for p in model.parameters()):,}"
    if rank == 0:
        print(f"model  {name}, {numel} parameters", flush=True)
    figures = {}
    for step in range(2):
        tokens = batches.rows(range(step * rows * ranks, (step + 1) * rows * ranks), rank, ranks)
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}/2  loss {loss.item():.3f}", flush=True)
        since = time.time() - psutil.Process().create_time()
        figures = figures or {"cpu_s": cpu_seconds(), "wall_s": since, "parameters": numel}
    answer(figures)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
