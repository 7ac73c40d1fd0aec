"""A strategy for lightning's Trainer: lightning owns the loop, the engine owns parameters, gradients and updates.

    Trainer(strategy=ZeroshardStrategy(Plan(zero=3, precision="bf16")), devices=2, accelerator="cpu")

The steps of the LightningModule (`training_step` and so on) run as the forward of the engine's model, so they may
call any submodule. Several optimizers have an engine each. Needs lightning (the extra of that name), which the rest of
the package never imports.
"""

import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.plugins import LayerSync, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType

from zeroshard.comm.mesh import init_mesh
from zeroshard.engine import Engine
from zeroshard.errors import OptimizerError, PlanError
from zeroshard.interop.lightning_engines import PartsOfModule, WholeModule, gathered
from zeroshard.interop.loops import check_loop, rounds_weights
from zeroshard.interop.master_weights import MasterWeights
from zeroshard.interop.optimizer import EngineOptimizer
from zeroshard.plan import Plan

DTYPES = {  # by Lightning's plugin and precision, that of the plan; "" leaves it as it is
    ("NoneType", ""): "",
    ("Precision", "32-true"): "",
    ("MixedPrecision", "16-mixed"): "fp16",
    ("MixedPrecision", "bf16-mixed"): "bf16",
}
OF_PROCESSES = (  # arguments of DDPStrategy that are about processes, and not about gradients
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io"),
    *("process_group_backend", "timeout", "start_method"),
)
LIGHTNINGS = "lightning.ckpt"  # beside the engine's own files in the folder of a checkpoint


class ZeroshardStrategy(DDPStrategy):
    """Trains the LightningModule with an engine.

    The Trainer's `precision` "bf16-mixed" and "16-mixed" become the plan's; others are refused. `gradient_clip_val`
    clips the norm over all ranks, or with `gradient_clip_algorithm="value"` each element. With
    `accumulate_grad_batches`, every backward reduces, unless the plan says `reduce_every="step"`. Callbacks that
    average weights (`WeightAveraging`, `StochasticWeightAveraging`) read and write whole parameters, under 16 bits the
    master weights; hooks of others do so inside `with trainer.strategy.engine.gathered():`. Checkpoints are folders:
    the engine's, which load under any plan and number of ranks, with lightning's file among them, from which
    `load_from_checkpoint` takes the whole weights.

    Of several optimizers, in manual optimization, each has an engine over the submodules that it trains.

    Args:
        plan: for the engine; one microbatch and no pipeline, because lightning owns the loop.
        settings: arguments of `DDPStrategy` about devices, processes and files.

    Attributes:
        engines: from the first `fit` on, in the order of the optimizers.

    Raises:
        PlanError: a plan in which the loop would be the engine's; or a setting of DDP, which there is none of.
    """

    optimizers: list[torch.optim.Optimizer]  # lightning's own property

    def __init__(self, plan: Plan | None = None, **settings: Any) -> None:
        self.plan = plan or Plan()
        check_loop(self.plan, "give accumulate_grad_batches to the Trainer")
        others = [name for name in settings if name not in OF_PROCESSES]
        if others:
            raise PlanError(
                f"ZeroshardStrategy({others[0]}=...) is a setting of DDP, and the engine takes its place. Leave it "
                f"out, and set Plan(...) for the reduction of gradients."
            )
        self._trained: WholeModule | PartsOfModule | None = None
        self._own_precision = EnginePrecision(self)
        super().__init__(**settings)

    @property
    def engines(self) -> list[Engine]:
        """The engine of each optimizer; none before the first `fit`."""
        return [] if self._trained is None else self._trained.engines

    @property
    def engine(self) -> Engine | None:
        """The engine, from the first `fit` on.

        Raises:
            PlanError: there are several.
        """
        if len(self.engines) > 1:
            raise PlanError(
                f"There are {len(self.engines)} optimizers, and each has an engine: take one of strategy.engines."
            )
        return self.engines[0] if self.engines else None

    @property
    def precision_plugin(self) -> Precision:
        """The engine's precision, whose name is that of the plan."""
        return self._own_precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        """Take over the Trainer's `precision`, when the Trainer is made.

        Raises:
            PlanError: the engine has no such precision, or the plan has another.
        """
        found, own = str(getattr(plugin, "precision", "")), self.plan.precision
        wanted: Any = DTYPES.get((type(plugin).__name__, found))
        if wanted is None or own not in ("fp32", wanted or own):
            raise PlanError(
                f"The Trainer has precision={found!r} ({type(plugin).__name__}), and the plan precision={own!r}. The "
                f"engine has fp32 master weights under 'bf16-mixed' and '16-mixed': give one of these to the Trainer, "
                f"or leave it out and say ZeroshardStrategy(Plan(precision='bf16'))."
            )
        self.plan = replace(self.plan, precision=wanted or own)

    @property
    def _layer_sync(self) -> LayerSync | None:
        return None

    @_layer_sync.setter
    def _layer_sync(self, plugin: LayerSync | None) -> None:
        """Refuse layers that synchronise over ranks.

        Raises:
            PlanError: there is a plugin.
        """
        if plugin is not None:
            raise PlanError(
                "sync_batchnorm=True converts layers, and the engine trains those of the module. Convert them before: "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm(module), on GPUs."
            )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Number and count of this rank's data, for Lightning's sampler."""
        if not self.engines:
            return dict(super().distributed_sampler_kwargs)
        return {"num_replicas": self.engines[0].data_ranks, "rank": self.engines[0].data_rank}

    def setup(self, trainer: Any) -> None:
        """Make the engines in a fit; other runs before the first fit use the module as it is.

        Raises:
            OptimizerError: no optimizer, or several that share parameters.
            PlanError: a second fit, or a plan that an engine refuses.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            if self._trained is None:
                super().setup(trainer)
            return
        if self._trained is not None:
            raise PlanError(
                "The engine of the first fit still holds the module. Make Trainer, strategy and module anew, and go on "
                "with fit(..., ckpt_path=...)."
            )
        module = self.lightning_module
        self.accelerator.setup(trainer)
        self.setup_optimizers(trainer)
        if not self.optimizers or isinstance(self.optimizers[0], _MockOptimizer):
            raise OptimizerError(
                "configure_optimizers gave no optimizer, and a fit under an engine needs one. Return an optimizer over "
                "the module's parameters."
            )
        mesh = init_mesh(self.plan.timeout, self.root_device.type)
        if len(self.optimizers) == 1:
            self._trained = WholeModule(module, self.optimizers[0], self.plan, mesh)
        else:
            self._trained = PartsOfModule(module, self.optimizers, self.plan, mesh)
        self.optimizers = [EngineOptimizer(engine) for engine in self._trained.engines]
        self.setup_precision_plugin()
        for callback in trainer.callbacks:
            self._gather_for(callback)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """`training_step` of the LightningModule, in automatic optimization inside the engine's forward."""
        if self._trained is None:
            return self.lightning_module.training_step(*args, **kwargs)
        return self._trained.training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """`validation_step` of the LightningModule inside the engine's forward."""
        return self._run("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """`test_step` of the LightningModule inside the engine's forward."""
        return self._run("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """`predict_step` of the LightningModule inside the engine's forward."""
        return self._run("predict_step", *args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure and update; without an update in the pass in which SWA finds statistics of batches."""
        if self.engines and getattr(self.lightning_module.trainer.fit_loop, "_skip_backward", False):
            return closure()
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Skip the reduction in backwards before the last of an accumulation."""
        with ExitStack() as stack:
            for engine in self.engines if not self.plan.reduces_each_microbatch else ():
                stack.enter_context(engine.no_sync())
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The LightningModule's whole state dict on every rank; a collective call."""
        if self._trained is None:
            return dict(super().lightning_module_state_dict())
        return self._trained.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Empty once an engine exists, which saves the states of its slices."""
        return {} if self.engines else dict(super().optimizer_state(optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder, replacing an older one of that name; a collective call."""
        if self._trained is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        folder = Path(self.broadcast(str(filepath)))
        fresh = folder.with_name(f"{folder.name}.new")
        if self.is_global_zero:
            shutil.rmtree(fresh, ignore_errors=True)
        self.barrier()
        self._trained.save(fresh)
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
        if self._trained is not None:
            self._trained.load(file)
        return dict(super().load_checkpoint(file / LIGHTNINGS if file.is_dir() else file, weights_only))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load tensors that no engine has: each has loaded its weights already."""
        if self._trained is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            self._trained.load_rest(checkpoint["state_dict"])

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

    def _gather_for(self, callback: Any) -> None:
        """Let a callback that averages weights read and write whole parameters."""
        hooks: dict[str, bool] = {}  # whether they write
        if isinstance(callback, StochasticWeightAveraging):
            hooks = {"update_parameters": False, "transfer_weights": True}
            callback.setup = _no_copy
        elif isinstance(callback, WeightAveraging):
            hooks = dict.fromkeys(("on_train_end", "on_validation_epoch_start", "on_validation_epoch_end"), True)
            average = callback._average_model
            if average is not None:  # read after some steps only, so not around each on_train_batch_end
                average.update_parameters = self._with_weights(average.update_parameters, writes=False)
            callback.on_load_checkpoint = self._loaded(callback.on_load_checkpoint)
        for hook, writes in hooks.items():
            setattr(callback, hook, self._with_weights(getattr(callback, hook), writes))

    def _with_weights(self, call: Callable[..., Any], writes: bool) -> Callable[..., Any]:
        """A call with whole weights: in the module's parameters, or of 16-bit plans `MasterWeights` in its place."""

        @wraps(call)
        def within(*args: Any, **kwargs: Any) -> Any:
            if not (self.engines and rounds_weights(self.plan)):
                with gathered(self.engines):
                    return call(*args, **kwargs)
            module = self.lightning_module
            under_way = module.trainer.fit_loop.epoch_loop._should_accumulate()
            if writes and under_way:
                raise PlanError(
                    f"{call.__name__} of a callback writes weights between two backwards of one step, whose gradients "
                    f"a plan with precision={self.plan.precision!r} would lose. Validate after whole steps: a "
                    f"val_check_interval that accumulate_grad_batches divides."
                )
            masters = MasterWeights(self.engines, module)
            found = call(*(masters if each is module else each for each in args), **kwargs)
            if writes:
                masters.write_back()
            return found

        return within

    def _loaded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A hook that loads weights of its own alone, since those of the module came from the engine's files."""

        @wraps(call)
        def loads(trainer: Any, module: Any, checkpoint: dict[str, Any]) -> Any:
            module.load_state_dict = lambda *_, **__: None
            try:
                return call(trainer, module, checkpoint)
            finally:
                del module.load_state_dict

        return loads

    def _run(self, step: str, *args: Any, **kwargs: Any) -> Any:
        if self._trained is None:
            return getattr(self.lightning_module, step)(*args, **kwargs)
        return self._trained.run(step, *args, **kwargs)


class EnginePrecision(Precision):
    """A precision plugin with the engine's loss scaling and gradient clipping."""

    def __init__(self, strategy: ZeroshardStrategy) -> None:
        super().__init__()
        self._strategy = strategy

    @property
    def precision(self) -> str:
        """In Lightning's words."""
        names = {own: name for (_, name), own in DTYPES.items()}
        return names.get(self._strategy.plan.precision, "32-true")

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Add the gradients of the loss to those of the step."""
        if self._strategy._trained is None:
            super().backward(tensor, model, optimizer, *args, **kwargs)
        else:
            self._strategy._trained.backward(tensor, *args, **kwargs)

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: float | None = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType | None = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip the norm of an optimizer's gradients over all ranks at the next step, or each element now."""
        engine = getattr(optimizer, "engine", None)  # through the wrapper of lightning
        if not clip_val or engine is None:
            return
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            engine.clip_grad_value(clip_val)
        else:
            engine.clip_grad_norm(clip_val)


def _no_copy(*_: Any, **__: Any) -> None:
    """`setup` of SWA in runs after the fit, which average nothing: lightning's own would copy the module again."""
