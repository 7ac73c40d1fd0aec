"""A LightningModule with sliced states: `torchrun --nproc-per-node 2 examples/lightning_strategy.py`.

The only line that differs from a plain run of lightning is `strategy=...`.
"""

import tempfile
from pathlib import Path

import lightning.pytorch as lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zeroshard as zs
from zeroshard.interop.lightning import ZeroshardStrategy


class Regression(lightning.LightningModule):
    """Learns a sine of a sum."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)]
        self.network = nn.Sequential(*blocks, nn.Linear(16, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """The loss of one batch."""
        x, y = batch
        return nn.functional.mse_loss(self.network(x), y)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        """Log the loss on held-out rows."""
        self.log("loss on other rows", self.training_step(batch, index), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As in any LightningModule."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


generator = torch.Generator().manual_seed(0)
x = torch.randn(4096, 16, generator=generator)
rows = TensorDataset(x, x[:, :2].sum(1, keepdim=True).sin())
train, held_out = torch.utils.data.random_split(rows, (3584, 512), generator)
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(
        strategy=ZeroshardStrategy(zs.Plan(zero=3)),
        accelerator="cpu",
        devices=2,
        max_epochs=6,
        gradient_clip_val=1.0,
        enable_progress_bar=False,
        logger=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    trainer.fit(Regression(), DataLoader(train, 32, shuffle=True), DataLoader(held_out, 32))
    trainer.save_checkpoint(
        Path(folder) / "run", weights_only=False
    )  # a folder; trainer.fit(..., ckpt_path=...) goes on from it
engine = trainer.strategy.engine
if engine.rank == 0:
    print({name: round(value.item(), 3) for name, value in trainer.callback_metrics.items()})
    print(engine.memory())
