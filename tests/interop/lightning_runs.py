"""Runs of lightning's Trainer on two ranks, for test_lightning.py: started as by torchrun, writes what rank 0 saw."""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from interop.regression import Regression, batches
from jobs import error_of
from lightning.pytorch.callbacks import BackboneFinetuning
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import zeroshard as zs
from zeroshard.interop.lightning import LIGHTNINGS, ZeroshardStrategy


class Module(lightning.LightningModule):
    """The regression as a LightningModule."""

    def __init__(self, manual: bool = False, optimizers: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.model, self.count = Regression(), optimizers
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = self.model.loss(*batch)
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("held out", self.model.loss(*batch), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.count > 1 or not self.automatic_optimization:
            return [optimizer] * self.count
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Unfreezes(Module):
    """Begins with its last layer; a callback of lightning's puts the others into the optimizer later."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.model.blocks

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def loader() -> DataLoader:
    """The rows r, r + 2, ... in batches; lightning's own sampler would shuffle them."""
    rows = TensorDataset(*batches())
    sampler = DistributedSampler(rows, 2, int(os.environ["RANK"]), shuffle=False)
    return DataLoader(rows, 4, sampler=sampler)


def fit(folder: Path, plan: zs.Plan, module: Module | None = None, ckpt: Path | None = None, **settings: Any) -> Any:
    """Fit; returns the Trainer, the module, its losses here and the whole weights."""
    module = module or Module()
    trainer = lightning.Trainer(
        strategy=ZeroshardStrategy(plan), accelerator="cpu", devices=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, use_distributed_sampler=False,
        **{"max_steps": 8, "gradient_clip_val": 1.0, **settings},
    )  # fmt: skip
    trainer.fit(module, loader(), loader(), ckpt_path=ckpt, weights_only=False)
    return trainer, module.losses, trainer.strategy.lightning_module_state_dict()


def main(folder: Path, whole: bool) -> None:
    """All runs, one after the other; or those that the test shows by default."""
    found: dict[str, Any] = {}
    for zero in range(4) if whole else (1, 3):
        module = Module()
        trainer, losses, weights = fit(folder, zs.Plan(zero=zero), module)
        result = trainer.optimizers[0].result
        found[f"zero {zero}"] = (losses, weights, result.step, result.grad_norm, dict(trainer.callback_metrics))
        found[f"test {zero}"] = trainer.test(module, loader(), verbose=False)
    plans = (zs.Plan(zero=0), zs.Plan(zero=1, reduce_every="step"), zs.Plan(zero=3))
    for plan in plans if whole else plans[1:2]:
        found[f"accumulate {plan.zero}"] = fit(folder, plan, accumulate_grad_batches=2, max_steps=4)[1:]
    found["by value"] = fit(folder, zs.Plan(zero=2), gradient_clip_algorithm="value", gradient_clip_val=1e-3)[1:]
    manual = fit(folder, zs.Plan(zero=2), Module(manual=True), gradient_clip_val=None)
    found["manual"] = manual[1:]
    scaled = fit(folder, zs.Plan(zero=2, precision="fp16", loss_scale=1024.0))
    result = scaled[0].optimizers[0].result
    found["fp16"] = (scaled[1], result.loss_scale, result.skipped)

    first, losses, _ = fit(folder, zs.Plan(zero=2), max_steps=8)
    for _ in range(2):  # the second takes the place of the first
        first.save_checkpoint(folder / "run.ckpt", weights_only=False)
    ours = folder / "run.ckpt"
    again = fit(folder, zs.Plan(zero=3), ckpt=ours, max_steps=16)
    found["resumed"] = (losses + again[1], again[2])
    loaded = Module.load_from_checkpoint(ours / LIGHTNINGS, weights_only=True)
    found["loaded"] = (loaded.state_dict(), first.strategy.lightning_module_state_dict())
    found["files"] = sorted(path.name for path in folder.iterdir() if "ckpt" in path.name)

    found["errors"] = [
        error_of(lambda: ZeroshardStrategy(zs.Plan(microbatches=2))),
        error_of(lambda: fit(folder, zs.Plan(), Module(optimizers=2, manual=True), gradient_clip_val=None)),
        error_of(lambda: fit(folder, zs.Plan(zero=3), Module(manual=True), gradient_clip_val=None)),
        error_of(lambda: fit(folder, zs.Plan(zero=2), Unfreezes(), callbacks=[BackboneFinetuning(1)], max_steps=12)),
        error_of(lambda: first.fit(Module(), loader())),
    ]
    if trainer.global_rank == 0:
        torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), "--whole" in sys.argv)
