"""Runs of lightning's Trainer on two ranks, for test_lightning.py: started as by torchrun, writes what rank 0 saw."""

import inspect
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from interop.regression import Regression, batches
from jobs import error_of
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.strategies import SingleDeviceStrategy
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self(batch[0]).float(), batch[1])
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


class Normed(Module):
    """With statistics of batches, which averages of weights have to find anew."""

    def __init__(self) -> None:
        super().__init__()
        self.model.blocks[0] = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))


class Saves(lightning.Callback):
    """Saves in the second epoch, before the average takes the place of the weights."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path, weights_only=False)


class Unfreezes(Module):
    """Begins with its last layer; a callback of lightning's puts the others into the optimizer later."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.model.blocks

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Gan(lightning.LightningModule):
    """Two optimizers by turns, as in Lightning's example of a GAN, and a layer without any; with a third of one number.

    Args:
        heat: whether there is the third, whose parameter is the module's own.
    """

    def __init__(self, heat: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        linear, tanh = torch.nn.Linear, torch.nn.Tanh
        self.generator = torch.nn.Sequential(linear(4, 16), tanh(), linear(16, 4))
        self.features = linear(4, 4)
        self.critic, self.judge = torch.nn.Sequential(linear(4, 16), tanh()), linear(16, 1)
        self.heat = torch.nn.Parameter(torch.ones(1)) if heat else None
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.generator(x)

    def said(self, x: torch.Tensor) -> torch.Tensor:
        """The discriminator's output, of two modules."""
        said = self.judge(self.critic(self.features(x)))
        return said if self.heat is None else said * self.heat.detach()

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        """A step of each optimizer."""
        first, second, *third = self.optimizers()
        real, noise = batch[0], batch[0].flip(1)
        self.toggle_optimizer(first)
        loss = torch.nn.functional.softplus(-self.said(self(noise)).float()).mean()
        self.losses.append(loss.item())
        self.turn(first, loss)
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        loss = torch.nn.functional.softplus(self.said(self(noise).detach()) - self.said(real)).float().mean()
        self.turn(second, loss)
        self.untoggle_optimizer(second)
        for each in third:
            self.turn(each, (self.heat - real.mean()).square().sum())
        for schedule in self.lr_schedulers():
            schedule.step()

    def turn(self, optimizer: Any, loss: torch.Tensor) -> None:
        """One update."""
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="norm")
        optimizer.step()

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("held out", self.said(self(batch[0])).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        groups = [self.generator.parameters(), [*self.critic.parameters(), *self.judge.parameters()]]
        made = [torch.optim.Adam(group, lr=1e-2) for group in groups]
        if self.heat is not None:
            made.append(torch.optim.SGD([self.heat], lr=0.1))
        return made, [torch.optim.lr_scheduler.StepLR(each, 3, 0.5) for each in made]


class Halves(Gan):
    """One optimizer has all biases, and the other all matrices, of the same layers."""

    def configure_optimizers(self) -> Any:
        halves = [[p for p in self.parameters() if p.ndim == n] for n in (1, 2)]
        made = [torch.optim.AdamW(half, lr=1e-2) for half in halves]
        return made, [torch.optim.lr_scheduler.StepLR(each, 3, 0.5) for each in made]


class Rows:
    """A loader of this rank's rows that goes on from its state, which Lightning asks for in the middle of an epoch.

    Args:
        rank, ranks: whose rows.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        x, y = batches()
        self._rows, self._batch, self._next = (x[rank::ranks], y[rank::ranks]), 8 // ranks, 0

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        while self._next < len(self):
            first = self._next * self._batch
            self._next += 1
            yield [each[first : first + self._batch] for each in self._rows]
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


class Fails(lightning.Callback):
    """Fails after a step, as a job that is killed."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise ValueError("killed")


class Masters(lightning.Callback):
    """Copies the first master weights at the start and after each step."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.on_train_batch_end(trainer)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seen.append(dict(trainer.strategy.engine.weights(dtype=torch.float32))["module.model.first.weight"])


PASSED: dict[str, Any] = {  # to lightning's own loop, each with a value that is not its default
    "logger": False, "fast_dev_run": False, "max_epochs": 3, "min_epochs": 1, "max_steps": 6, "min_steps": 2,
    "max_time": "00:01:00:00", "limit_train_batches": 4, "limit_val_batches": 2, "limit_test_batches": 1,
    "limit_predict_batches": 1, "overfit_batches": 0.0, "val_check_interval": 2, "check_val_every_n_epoch": 1,
    "num_sanity_val_steps": 1, "log_every_n_steps": 1, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "deterministic": True, "benchmark": False, "inference_mode": False,
    "profiler": "simple", "detect_anomaly": True, "barebones": False, "plugins": [],
    "reload_dataloaders_every_n_epochs": 1, "enable_autolog_hparams": False, "model_registry": None, "num_nodes": 1,
    "use_distributed_sampler": True,
}  # fmt: skip


def loader() -> DataLoader:
    """The rows r, r + 2, ... in batches; lightning's own sampler would shuffle them."""
    rows = TensorDataset(*batches())
    sampler = DistributedSampler(rows, 2, int(os.environ["RANK"]), shuffle=False)
    return DataLoader(rows, 4, sampler=sampler)


def fit(folder: Path, plan: zs.Plan, module: Any = None, ckpt: Path | None = None, **settings: Any) -> Any:
    """Fit; returns the Trainer, the module, its losses here and the whole weights."""
    rows, ranks = settings.pop("rows", None) or loader(), int(os.environ["WORLD_SIZE"])
    module = module or Module()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    own = {"use_distributed_sampler": False, "max_steps": 8, "gradient_clip_val": 1.0, **quiet, **settings}
    trainer = lightning.Trainer(
        strategy=ZeroshardStrategy(plan), accelerator="cpu", devices=ranks, default_root_dir=folder, **own
    )
    trainer.fit(module, rows, loader(), ckpt_path=ckpt, weights_only=False)
    return trainer, module.losses, trainer.strategy.lightning_module_state_dict()


def alone(folder: Path, module: Any, **settings: Any) -> Any:
    """The same fit by lightning in one process over the rows of both ranks."""
    trainer = lightning.Trainer(
        strategy=SingleDeviceStrategy("cpu"), accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, use_distributed_sampler=False,
        **settings,
    )  # fmt: skip
    rows = DataLoader(TensorDataset(*batches()), 8)
    trainer.fit(module, rows, rows)
    return dict(trainer.callback_metrics), module.state_dict()


def averaged(folder: Path, found: dict[str, Any], whole: bool) -> None:
    """Averages of weights by lightning's callbacks, beside those of one process; and one that goes on."""
    makers: dict[str, Any] = {
        "EMA": lambda: EMAWeightAveraging(decay=0.7, update_every_n_steps=2),
        "SWA": lambda: StochasticWeightAveraging(5e-3, swa_epoch_start=1, annealing_epochs=2),
    }
    for name, make in makers.items():
        settings = {"max_epochs": 3, "max_steps": -1, "gradient_clip_val": 0.5}
        wanted = alone(folder, Module(), callbacks=[make()], **settings)
        for zero in range(4) if whole else (3,):
            plan = zs.Plan(zero=zero, transport="network" if zero == 3 else "auto")
            trainer, _, weights = fit(folder, plan, callbacks=[make()], **settings)
            found[f"{name} {zero}"] = (dict(trainer.callback_metrics), weights), wanted
            found[f"{name} {zero} tested"] = trainer.test(trainer.lightning_module, loader(), verbose=False)[0]
    settings = {"max_steps": -1, "gradient_clip_val": 0.5}
    fit(folder, zs.Plan(zero=2), callbacks=[makers["EMA"](), Saves(folder / "average")], max_epochs=2, **settings)
    again = fit(folder, zs.Plan(zero=1), callbacks=[makers["EMA"]()], ckpt=folder / "average", max_epochs=3, **settings)
    found["EMA goes on"] = (
        (dict(again[0].callback_metrics), again[2]),
        alone(folder, Module(), callbacks=[makers["EMA"]()], max_epochs=3, **settings),
    )
    found["statistics"] = fit(folder, zs.Plan(zero=2), Normed(), callbacks=[makers["SWA"]()], max_epochs=2, **settings)[
        2
    ]


def averages_in_16_bits(folder: Path) -> dict[str, Any]:
    """The master weights after each step, and those that averages end with."""
    found = {}
    makers = {
        "EMA": lambda: EMAWeightAveraging(decay=0.9),
        "SWA": lambda: StochasticWeightAveraging(5e-3, swa_epoch_start=1, annealing_epochs=2),
    }
    for (name, make), zero in zip(makers.items(), (3, 2), strict=True):
        watch = Masters()
        plan = zs.Plan(zero=zero, precision="bf16")
        trainer = fit(folder, plan, callbacks=[watch, make()], max_epochs=3, max_steps=-1, gradient_clip_val=None)[0]
        ends = dict(trainer.strategy.engine.weights(dtype=torch.float32))["module.model.first.weight"]
        found[name] = watch.seen, ends
    return found


def turns(folder: Path, found: dict[str, Any], whole: bool) -> None:
    """Several optimizers by turns, beside lightning in one process; one run goes on under another plan."""
    settings: dict[str, Any] = {"max_steps": 24, "gradient_clip_val": None}
    wanted = {heat: alone(folder, Gan(heat), **settings)[1] for heat in (False, True)}
    plans = {
        "zero 2": zs.Plan(zero=2),
        "zero 3": zs.Plan(zero=3, transport="network"),
        "zero 0": zs.Plan(zero=0),
        "zero 1": zs.Plan(zero=1, offload="optimizer"),
        "offload": zs.Plan(zero=3, offload="optimizer,parameters"),
    }
    for name, plan in plans.items() if whole else [*plans.items()][:2]:
        heat = name in ("zero 2", "zero 1")
        trainer, _, weights = fit(folder, plan, Gan(heat), **settings)
        found[f"turns, {name}"] = weights, wanted[heat]
        if name == "zero 2":
            trainer.save_checkpoint(folder / "turns", weights_only=False)
            found["turns saved"] = torch.load(folder / "turns" / LIGHTNINGS, weights_only=True)["state_dict"]
    ours = {**settings, "max_steps": 48}
    again = fit(folder, zs.Plan(zero=1), Gan(True), ckpt=folder / "turns", **ours)
    found["turns go on"] = again[2], alone(folder, Gan(True), **ours)[1]
    rounded = fit(folder, zs.Plan(zero=2, precision="bf16"), Gan(True), **settings)
    found["turns in bf16"] = rounded[1]
    made = Gan()
    made.configure_optimizers = lambda: [
        torch.optim.SGD(made.parameters(), 0.1),
        torch.optim.SGD([made.judge.bias], 0.1),
    ]
    found["turns of halves"] = (
        fit(folder, zs.Plan(zero=2, offload="optimizer"), Halves(), **settings)[2],
        alone(folder, Halves(), **settings)[1],
    )
    found["turns refused"] = [
        error_of(lambda: fit(folder, zs.Plan(), made, **settings)),
        error_of(lambda: fit(folder, zs.Plan(zero=3), Halves(), **settings)),
        error_of(lambda: fit(folder, zs.Plan(zero=3), Gan(True), **settings)),
        error_of(lambda: fit(folder, zs.Plan(precision="fp16"), Gan(), **settings)),
        error_of(lambda: trainer.strategy.engine),
    ]


STOPS = {5: {"zero": 0}, 7: {"zero": 1}, 10: {"zero": 2}, 14: {"zero": 3}, 19: {"zero": 3, "offload": "optimizer"}}


def kills(folder: Path) -> dict[str, Any]:
    """Losses of runs of 20 steps without a stop, and of those that fail after a step and go on from a checkpoint."""
    found: dict[str, Any] = {}
    rank, own = int(os.environ["RANK"]), {"max_steps": 20, "val_check_interval": 1.0, "limit_val_batches": 0}
    for stop, plan in STOPS.items():
        made, inside = zs.Plan.from_dict(plan), folder / f"stop-{stop}"
        straight = fit(inside, made, rows=Rows(rank, 2), **own)[1]
        keeps = lightning.callbacks.ModelCheckpoint(inside, "{step}", every_n_train_steps=3, save_top_k=-1)
        calls = {"callbacks": [keeps, Fails(stop)], "enable_checkpointing": True}
        assert "killed" in error_of(lambda: fit(inside, made, rows=Rows(rank, 2), **own, **calls))  # noqa: B023
        kept = inside / f"step={stop // 3 * 3}.ckpt"
        losses = fit(inside, made, ckpt=kept, rows=Rows(rank, 2), **own)[1]
        found[f"stop {stop}"] = straight, losses, str(kept)
    return found


def on_one_rank(folder: Path, kept: str) -> list[float]:
    """Losses of a run that goes on from a checkpoint of two ranks in one process, with their batch."""
    own: dict[str, Any] = {"max_steps": 20, "limit_val_batches": 0}
    return fit(folder, zs.Plan(zero=1), ckpt=Path(kept), rows=Rows(0, 1), **own)[1]


def precisions(folder: Path) -> dict[str, Any]:
    """What a Trainer's own arguments give, at its construction."""

    def plan_of(plan: zs.Plan | None = None, strategy: dict[str, Any] | None = None, **settings: Any) -> str:
        made = ZeroshardStrategy(plan, **(strategy or {}))
        trainer = lightning.Trainer(
            strategy=made, accelerator="cpu", devices=2, logger=False, default_root_dir=folder, **settings
        )
        return f"{made.plan.precision} {trainer.precision}"

    calls: dict[str, Any] = {
        "default": plan_of,
        "of the plan": lambda: plan_of(zs.Plan(precision="bf16")),
        "bf16-mixed": lambda: plan_of(precision="bf16-mixed"),
        "bf16": lambda: plan_of(zs.Plan(precision="bf16"), precision="bf16"),
        "bf16-true": lambda: plan_of(precision="bf16-true"),
        "64": lambda: plan_of(precision=64),
        "other": lambda: plan_of(zs.Plan(precision="fp16"), precision="bf16-mixed"),
        "plugin": lambda: plan_of(plugins=[lightning.plugins.HalfPrecision("bf16-true")]),
        "sync_batchnorm": lambda: plan_of(sync_batchnorm=True),
        "DDP": lambda: plan_of(strategy={"find_unused_parameters": True}),
    }
    found: dict[str, Any] = {}
    for name, call in calls.items():
        said = error_of(call)
        found[name] = call() if said == "nothing" else said
    return found


def main(folder: Path, whole: bool) -> None:
    """All runs, one after the other; or those that the test shows by default."""
    found: dict[str, Any] = kills(folder) if whole else {}
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
    for zero in range(4) if whole else (2, 3):
        plan = zs.Plan(zero=zero, transport="network" if zero == 3 else "auto")
        found[f"manual {zero}"] = fit(folder, plan, Module(manual=True), gradient_clip_val=None)[1:]
    averaged(folder, found, whole)
    found["averages in bf16"] = averages_in_16_bits(folder)
    turns(folder, found, whole)
    found["precisions"] = precisions(folder)
    arguments = inspect.signature(lightning.Trainer.__init__).parameters
    found["arguments"] = [name for name in arguments if name != "self"], list(PASSED)
    passed = fit(folder, zs.Plan(zero=3), **PASSED)
    found["passed"] = passed[0].global_step, len(passed[1]), passed[2]
    bf16 = fit(folder, zs.Plan(zero=2), precision="bf16-mixed")
    found["bf16"] = bf16[0].strategy.engine.plan.precision, bf16[1]
    scaled = fit(folder, zs.Plan(zero=2, precision="fp16", loss_scale=1024.0))
    result = scaled[0].optimizers[0].result
    found["fp16"] = (scaled[1], result.loss_scale, result.skipped)

    unfreezing: dict[str, Any] = {"max_steps": 12, "gradient_clip_val": 1.0}
    alike = alone(folder, Unfreezes(), callbacks=[BackboneFinetuning(1)], **unfreezing)[1]
    found["unfrozen"] = (
        fit(folder, zs.Plan(zero=2), Unfreezes(), callbacks=[BackboneFinetuning(1)], **unfreezing)[2], alike,
    )  # fmt: skip

    first, losses, _ = fit(folder, zs.Plan(zero=2), max_steps=8)
    for _ in range(2):  # the second takes the place of the first
        first.save_checkpoint(folder / "run.ckpt", weights_only=False)
    ours = folder / "run.ckpt"
    again = fit(folder, zs.Plan(zero=3), ckpt=ours, max_steps=16)
    found["resumed"] = (losses + again[1], again[2])
    groups = first.optimizers[0].param_groups
    members = {id(p) for p in first.strategy.engine.model.parameters()}
    found["groups"] = (
        groups is first.strategy.engine.optimizer.param_groups,
        all(id(p) in members for group in groups for p in group["params"]),
    )
    loaded = Module.load_from_checkpoint(ours / LIGHTNINGS, weights_only=True)
    found["loaded"] = (loaded.state_dict(), first.strategy.lightning_module_state_dict())
    found["files"] = sorted(path.name for path in folder.iterdir() if "ckpt" in path.name)

    unmade = Module()
    unmade.configure_optimizers = lambda: None  # type: ignore[method-assign]
    found["errors"] = [
        error_of(lambda: ZeroshardStrategy(zs.Plan(microbatches=2))),
        error_of(lambda: fit(folder, zs.Plan(), Module(optimizers=2, manual=True), gradient_clip_val=None)),
        error_of(lambda: first.fit(Module(), loader())),
        error_of(lambda: fit(folder, zs.Plan(), unmade)),
    ]
    if trainer.global_rank == 0:
        torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if "--one" in sys.argv:
        torch.save(on_one_rank(Path(sys.argv[1]), sys.argv[-1]), Path(sys.argv[1]) / "one.pt")
    else:
        main(Path(sys.argv[1]), "--whole" in sys.argv)
