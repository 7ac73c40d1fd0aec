"""Pretraining on parquet, stopped and resumed to the sample: `torchrun --nproc-per-node 2 examples/pretrain_parquet.py
runs/parquet`.

It makes two parquet files and a tiny model, trains half of the steps, and goes on with a new engine and a new loader
from the checkpoint, as a job that was killed does. It runs on one process too, in less than a minute on two cores, and
the batches are the same on any number of ranks. It needs pyarrow: `pip install "zeroshard[data]"`.
"""

import sys
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

import zeroshard as zs
from zeroshard.data.loader import Loader, open_data

SEQUENCE, ROWS, STEPS = 64, 8, 20


class Model(torch.nn.Module):
    """Predicts each byte from the one before it; returns the loss."""

    def __init__(self, vocabulary: int = 256, width: int = 64) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, width)
        up, down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.layers = torch.nn.Sequential(up, torch.nn.GELU(), down)
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of `labels` [B, T], shifted by one."""
        hidden = self.embedding(input_ids)
        logits = self.head(hidden + self.layers(hidden))
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def write_parquet(folder: Path) -> None:
    """Two files of numbered sentences."""
    for name, first in (("a", 0), ("b", 5000)):
        texts = [f"The square of {n} is {n * n}, and its cube is {n**3}." for n in range(first, first + 5000)]
        pq.write_table(pa.table({"text": texts}), folder / f"{name}.parquet", row_group_size=1000)


def train(folder: Path, last: int, mesh: zs.Mesh) -> list[float]:
    """Go on from the newest checkpoint, if there is one, to step `last`; returns the losses of these steps."""
    torch.manual_seed(0)
    engine = zs.Engine(Model(), partial(torch.optim.AdamW, lr=3e-3), zs.Plan(zero=2), mesh=mesh)
    data = open_data(folder / "data", sequence=SEQUENCE, seed=0)
    loader = Loader(data, batch=ROWS // engine.data_ranks, rank=engine.data_rank, ranks=engine.data_ranks)
    checkpoints = zs.Checkpoints(engine, folder / "checkpoints", loader=loader)
    checkpoints.resume()
    losses = []
    while engine.steps < last:
        result = engine.train_step(next(loader))
        losses.append(float(result.loss))
        if engine.steps % 10 == 0:
            checkpoints.save(wait=True)
    loader.close()
    return losses


def main(folder: Path) -> None:
    """Train, stop, and go on."""
    mesh = zs.init_mesh()
    if mesh.rank == 0 and not (folder / "data").exists():
        (folder / "data").mkdir(parents=True)
        write_parquet(folder / "data")
    if mesh.ranks > 1:
        torch.distributed.barrier()  # until the files are there
    first = train(folder, STEPS // 2, mesh)
    rest = train(folder, STEPS, mesh)
    if mesh.rank == 0 and first:
        print(f"loss {first[0]:.3f} at step 1, {first[-1]:.3f} at step {STEPS // 2}, {rest[-1]:.3f} at step {STEPS}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/parquet"))
