"""A strategy for lightning's Trainer: lightning owns the loop, the engine owns parameters, gradients and updates.

    Trainer(strategy=ZeroshardStrategy(Plan(zero=3, precision="bf16")), devices=2, accelerator="cpu")

The steps of the LightningModule (`training_step` and so on) run as the forward of the engine's model, so they may
call any submodule. Needs lightning (the extra of that name), which the rest of the package never imports.
"""

import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import nn

from zeroshard.comm.mesh import init_mesh
from zeroshard.engine import Engine
from zeroshard.errors import OptimizerError, PlanError
from zeroshard.interop.loops import check_loop
from zeroshard.interop.optimizer import EngineOptimizer
from zeroshard.plan import Plan

PREFIX = "module."
LIGHTNINGS = "lightning.ckpt"  # beside the engine's own files in the folder of a checkpoint


class ZeroshardStrategy(DDPStrategy):
    """Trains the LightningModule with an engine.

    Precision comes from the plan, so leave the Trainer's at its default. `gradient_clip_val` clips the norm over all
    ranks, or with `gradient_clip_algorithm="value"` each element. With `accumulate_grad_batches`, every backward
    reduces, unless the plan says `reduce_every="step"`. Checkpoints are folders: the engine's, which load under any
    plan and number of ranks, with lightning's file among them, from which `load_from_checkpoint` takes the whole
    weights.

    Args:
        plan: for the engine; one microbatch and no pipeline, because lightning owns the loop.
        settings: arguments of `DDPStrategy`.

    Attributes:
        engine: from the first `fit` on.

    Raises:
        PlanError: a plan in which the loop would be the engine's.
    """

    optimizers: list[torch.optim.Optimizer]  # lightning's own property

    def __init__(self, plan: Plan | None = None, **settings: Any) -> None:
        self.plan = plan or Plan()
        check_loop(self.plan, "give accumulate_grad_batches to the Trainer")
        self.engine: Engine | None = None
        super().__init__(precision_plugin=EnginePrecision(self), **settings)

    def setup(self, trainer: Any) -> None:
        """Make the engine in a fit; other runs before the first fit use the module as it is.

        Raises:
            OptimizerError: not exactly one optimizer.
            PlanError: a second fit, manual optimization under stage 3, or a plan that the engine refuses.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            if self.engine is None:
                super().setup(trainer)
            return
        if self.engine is not None:
            raise PlanError(
                "The engine of the first fit still holds the module. Make Trainer, strategy and module anew, and go on "
                "with fit(..., ckpt_path=...)."
            )
        module = self.lightning_module
        if self.plan.zero == 3 and not module.automatic_optimization:
            raise PlanError(
                "Manual optimization runs backwards inside of training_step, which zero=3 does not allow. Use "
                "automatic optimization, or zero=2."
            )
        self.accelerator.setup(trainer)
        self.setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise OptimizerError(
                f"configure_optimizers gave {len(self.optimizers)} optimizers, and the engine takes one. Put the "
                f"parameters into groups of one optimizer."
            )
        mesh = init_mesh(self.plan.timeout, self.root_device.type)
        self.engine = Engine(_Steps(module), self.optimizers[0], self.plan, mesh=mesh)
        self.optimizers = [EngineOptimizer(self.engine)]
        self.setup_precision_plugin()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """`training_step` of the LightningModule inside the engine's forward."""
        if not self.lightning_module.automatic_optimization:
            return self.lightning_module.training_step(*args, **kwargs)
        return self._run("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """`validation_step` of the LightningModule inside the engine's forward."""
        return self._run("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """`test_step` of the LightningModule inside the engine's forward."""
        return self._run("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """`predict_step` of the LightningModule inside the engine's forward."""
        return self._run("predict_step", *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Skip the reduction in backwards before the last of an accumulation."""
        if self.engine is None or self.plan.reduces_each_microbatch:
            yield
            return
        with self.engine.no_sync():
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The LightningModule's whole state dict on every rank; a collective call."""
        if self.engine is None:
            return dict(super().lightning_module_state_dict())
        return {name.removeprefix(PREFIX): value for name, value in self.engine.state_dict().items()}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Empty once an engine exists, which saves the states of its slices."""
        return {} if self.engine is not None else dict(super().optimizer_state(optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder, replacing an older one of that name; a collective call."""
        if self.engine is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        folder = Path(self.broadcast(str(filepath)))
        fresh = folder.with_name(f"{folder.name}.new")
        if self.is_global_zero:
            shutil.rmtree(fresh, ignore_errors=True)
        self.barrier()
        self.engine.save(fresh, wait=True)
        super().save_checkpoint(checkpoint, fresh / LIGHTNINGS, storage_options)
        if self.is_global_zero:
            if folder.exists():
                shutil.rmtree(folder)
            fresh.rename(folder)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the folder into the engine; returns lightning's own state.

        Raises:
            CheckpointError: it is no folder of this strategy, or of another model or optimizer.
        """
        file = Path(checkpoint_path)
        if self.engine is not None:
            self.engine.load(file)
        return dict(super().load_checkpoint(file / LIGHTNINGS if file.is_dir() else file, weights_only))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing if an engine exists: it has loaded the weights already."""
        if self.engine is None:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: the engine has loaded the states already."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: only the engine can load, and `setup` makes it."""
        return True

    def teardown(self) -> None:
        """Leave the parameters where the engine holds them."""
        self.precision_plugin.teardown()
        self.cluster_environment.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _run(self, step: str, *args: Any, **kwargs: Any) -> Any:
        if self.engine is None:
            return getattr(self.lightning_module, step)(*args, **kwargs)
        return self.engine(step, *args, **kwargs)


class EnginePrecision(Precision):
    """A precision plugin with the engine's loss scaling and gradient clipping."""

    def __init__(self, strategy: ZeroshardStrategy) -> None:
        super().__init__()
        self._strategy = strategy

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Add the gradients of the loss to those of the step."""
        if self._strategy.engine is None:
            super().backward(tensor, model, optimizer, *args, **kwargs)
        else:
            self._strategy.engine.backward(tensor)

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: float | None = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType | None = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip the norm over all ranks at the next step, or each element now."""
        engine = self._strategy.engine
        if not clip_val or engine is None:
            return
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            engine.clip_grad_value(clip_val)
        else:
            engine.clip_grad_norm(clip_val)


class _Steps(nn.Module):
    """The LightningModule as a model whose forward runs one of its steps by name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, step: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, step)(*args, **kwargs)
