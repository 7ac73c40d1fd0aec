"""accelerate's `Accelerator` over an engine: the loop stays, and the engine owns parameters, gradients and updates.

    accelerator = ZeroshardAccelerator(zs.Plan(zero=3), gradient_accumulation_steps=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

Needs accelerate (the extra `hf`), which the rest of the package never imports.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import TorchDynamoPlugin
from torch import nn

from zeroshard.comm.mesh import init_mesh, ranks_of_job
from zeroshard.engine import Engine
from zeroshard.errors import ModelError, OptimizerError, PlanError
from zeroshard.interop.huggingface import from_pretrained
from zeroshard.interop.loops import check_loop, with_dtype
from zeroshard.interop.optimizer import EngineOptimizer
from zeroshard.interop.states import load_states, save_states
from zeroshard.plan import Plan
from zeroshard.platform.accelerator import kind
from zeroshard.units.compiling import check_options
from zeroshard.validation.arguments import check_compiling

DTYPES = {"no": "fp32"}  # accelerate's names that plans do not share


class ZeroshardAccelerator(Accelerator):
    """An `Accelerator` whose `prepare(model, optimizer, ...)` makes an engine.

    The model that it returns is the given one. Loaders, schedulers, trackers and the gathering of metrics stay
    accelerate's. `mixed_precision` becomes the precision of the plan: 16-bit compute with fp32 master weights in the
    place of autocast. A `dynamo_backend` compiles blocks by `Engine.compile`. `accumulate` and `no_sync` leave out
    reductions only where the plan has them once a step.

    Args:
        plan: for the engine; one microbatch and no split layers, because the loop and the loaders are the user's.
        weights: a folder of `save_pretrained`, of which each rank reads its slices for a model on the meta device.
        settings: arguments of `Accelerator`, with `cpu=True` by default where several ranks run on CPUs.

    Attributes:
        engine: from the first `prepare` of a model and its optimizer on.

    Raises:
        PlanError: a plan in which the loop would be the engine's, or two precisions; or FSDP, DeepSpeed or a
            parallelism of accelerate beside the plan; or accelerate counts other processes than the job has.
    """

    _models: list[nn.Module]
    _optimizers: list[torch.optim.Optimizer]

    def __init__(self, plan: Plan | None = None, weights: str | PathLike[str] | None = None, **settings: Any) -> None:
        if ranks_of_job() > 1 and kind() == "cpu":
            settings.setdefault("cpu", True)  # without it, accelerate takes each process for a job of its own
        super().__init__(**settings)
        self._take(plan or Plan(), weights)

    @classmethod
    def over(cls, accelerator: Accelerator, plan: Plan, weights: str | PathLike[str] | None = None) -> Self:
        """A copy of an accelerator that has prepared nothing yet, with a plan and weights.

        Raises:
            PlanError: as the constructor.
        """
        copied = cls.__new__(cls)
        copied.__dict__.update(vars(accelerator))
        copied._take(plan, weights)
        return copied

    def _take(self, plan: Plan, weights: str | PathLike[str] | None) -> None:
        check_loop(plan, "accumulate by gradient_accumulation_steps")
        if self.distributed_type.value not in ("NO", "MULTI_CPU", "MULTI_GPU"):
            raise PlanError(
                f"The job runs under {self.distributed_type.value} of accelerate, and the plan divides the states "
                f"itself. Start it with torchrun, or with `accelerate launch --multi_gpu`."
            )
        if self.num_processes != ranks_of_job():
            raise PlanError(
                f"The job has {ranks_of_job()} processes and accelerate counts {self.num_processes}, so each would "
                f"train on the rows of all. On CPUs pass use_cpu=True to TrainingArguments, and cpu=True to the first "
                f"Accelerator; or start the script with torchrun."
            )
        if self.parallelism_config is not None:
            raise PlanError("parallelism_config and a plan both divide the model. Leave parallelism_config out.")
        self.plan = with_dtype(plan, DTYPES.get(self.mixed_precision, self.mixed_precision), "mixed_precision")
        self.engine: Engine | None = None
        self._weights = weights
        self.native_amp, self.scaler = False, None  # the engine casts and scales
        self._graphs: dict[str, Any] = self.state.dynamo_plugin.to_kwargs()
        if self._graphs:
            check_compiling(self.plan)
            check_options(self._graphs)
            self.state.dynamo_plugin = TorchDynamoPlugin(backend="no")  # which would compile gathers too

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Make the engine of a model and its optimizer, and prepare the others as accelerate does.

        Args:
            args: a model with its optimizer, or an engine; loaders and schedulers, in this call or another one.
            device_placement: for loaders, as accelerate takes it.

        A second model with its optimizer takes the place of the first.

        Raises:
            ModelError: a model without its optimizer, or two models. OptimizerError: two optimizers.
        """
        optimizers = [each for each in args if isinstance(each, torch.optim.Optimizer) and not _owned(each)]
        models = [each for each in args if isinstance(each, nn.Module) and not self._has(each)]
        engines = [each for each in args if isinstance(each, Engine)]
        if engines:
            self.engine = engines[0]
        elif models or optimizers:
            self.engine = self._made(models, optimizers)
        return super().prepare(*args, device_placement=device_placement)

    def _made(self, models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> Engine:
        if len(models) != 1:
            raise ModelError(
                f"prepare() was given {len(models)} models, and an engine trains one with its optimizer. Call "
                f"prepare(model, optimizer, ...) once; models that are not trained need no prepare: move them with "
                f".to(accelerator.device)."
            )
        if len(optimizers) != 1:
            raise OptimizerError(
                f"prepare() was given a model and {len(optimizers)} optimizers, and the engine takes one. Put the "
                f"parameters into groups of one optimizer, and pass it in the call of the model."
            )
        mesh = init_mesh(self.plan.timeout, self.device.type)
        if self._weights is None:
            engine = Engine(models[0], optimizers[0], self.plan, mesh=mesh)
        else:
            engine = from_pretrained(self._weights, optimizers[0], self.plan, model=models[0], mesh=mesh)
        return engine.compile(**self._graphs) if self._graphs else engine

    def _has(self, model: Any) -> bool:
        return self.engine is not None and model is self.engine.model

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """The engine's model as it is; other models for evaluation alone.

        Raises:
            ModelError: another model, for training.
        """
        if self._has(model):
            if not any(model is each for each in self._models):
                self._models.append(model)
            return model
        if not evaluation_mode:
            raise ModelError(
                "prepare_model() was given a model without its optimizer, which the engine needs. Call "
                "prepare(model, optimizer), or prepare_model(model, evaluation_mode=True) for one that is not trained."
            )
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        """The engine's optimizer in the wrapper of accelerate, whose steps wait for the end of an accumulation.

        Raises:
            OptimizerError: it is not the engine's.
        """
        if isinstance(optimizer, SteppingOptimizer):
            prepared = optimizer
        elif self.engine is not None and optimizer is self.engine.optimizer:
            prepared = SteppingOptimizer(EngineOptimizer(self.engine), device_placement=False)
        else:
            raise OptimizerError("prepare_optimizer() needs the model too. Call prepare(model, optimizer).")
        if not any(prepared is each for each in self._optimizers):
            self._optimizers.append(prepared)
        return prepared

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Add the gradients of the loss, divided by `gradient_accumulation_steps`, to those of the step.

        Raises:
            PlanError: no model has been prepared; or arguments of `Tensor.backward`.
        """
        given = sorted(name for name, value in kwargs.items() if value is not None)
        if given:
            raise PlanError(f"backward({given[0]}=...) is not for an engine. Call backward(loss) alone.")
        self._needed("backward").backward(loss / self.gradient_accumulation_steps)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """No reductions inside, where the plan has one a step (`zero=0`, or `reduce_every="step"`)."""
        if self.engine is None or self.plan.reduces_each_microbatch:
            return nullcontext()
        return self.engine.no_sync()

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip the norm over all parameters at the next step; returns it as it was before. A collective call.

        Raises:
            PlanError: only some of the model's parameters are given.
        """
        engine = self._needed("clip_grad_norm_")
        self._check_all(parameters)
        return torch.tensor(engine.clip_grad_norm(float(max_norm), float(norm_type)), device=self.device)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Limit every element of the gradients now; a collective call.

        Raises:
            PlanError: only some of the model's parameters are given.
        """
        engine = self._needed("clip_grad_value_")
        self._check_all(parameters)
        engine.clip_grad_value(float(clip_value))

    def _check_all(self, parameters: Iterable[torch.Tensor] | torch.Tensor) -> None:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        known = {id(each) for each in given}
        missing = [name for name, each in self._trained() if id(each) not in known]
        if missing:
            raise PlanError(
                f"Clipping was asked for {len(given)} parameters, and the engine clips all that train; "
                f"{missing[0]!r} is missing. Pass model.parameters()."
            )

    def _trained(self) -> list[tuple[str, torch.Tensor]]:
        model = self._needed("clip_grad_norm_").model
        return [(name, each) for name, each in model.named_parameters() if each.requires_grad]

    def _needed(self, method: str) -> Engine:
        if self.engine is None:
            raise PlanError(f"{method}() needs an engine. Call prepare(model, optimizer) first.")
        return self.engine

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> str:
        """Write a folder: the engine's states, and accelerate's own of schedulers, loaders, random numbers and objects.

        A collective call. The engine's part loads under other plans and numbers of ranks.

        Raises:
            PlanError: no model has been prepared. CheckpointError: as `Engine.save`.
        """
        engine, models, optimizers = self._needed("save_state"), self._models, self._optimizers
        self._models, self._optimizers = [], []
        try:
            folder = super().save_state(output_dir, safe_serialization, **kwargs)
        finally:
            self._models, self._optimizers = models, optimizers
        save_states(engine, Path(folder), {})
        return str(folder)

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Go on from a folder of `save_state`; a collective call.

        Raises:
            CheckpointError: the folder has no states of an engine, or those of another model or optimizer.
            PlanError: no folder is given, or no model has been prepared.
        """
        engine, models, optimizers = self._needed("load_state"), self._models, self._optimizers
        if input_dir is None:
            raise PlanError("load_state() needs the folder that save_state() returned.")
        load_states(engine, Path(input_dir))
        self._models, self._optimizers = [], []
        try:
            super().load_state(input_dir, load_kwargs, **kwargs)
        finally:
            self._models, self._optimizers = models, optimizers

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state dict on every rank; a collective call for the engine's model."""
        if self.engine is not None and self._has(model):
            return self.engine.state_dict()
        return dict(super().get_state_dict(model, unwrap))


class SteppingOptimizer(AcceleratedOptimizer):
    """accelerate's wrapper, which asks the engine whether the last step was skipped."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether gradients that are not finite made the engine skip the update."""
        result = self.optimizer.result
        return result is not None and bool(result.skipped)


def _owned(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `prepare` has returned it."""
    return isinstance(optimizer, SteppingOptimizer)
