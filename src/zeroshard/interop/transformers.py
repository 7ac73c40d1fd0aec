"""transformers' and TRL's trainers over an engine: the loop, batches, schedules, logs and callbacks stay theirs.

    trainer = ZeroshardTrainer(model, TrainingArguments(...), plan=zs.Plan(zero=3), train_dataset=rows)

For other trainers, `class T(ZeroshardMixin, SFTTrainer)` adds the argument `plan`. Needs transformers and
accelerate (the extra `hf`), which this module alone imports.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME

from zeroshard.engine import Engine
from zeroshard.errors import CheckpointError, ConfigError, ModelError
from zeroshard.interop.accelerate import ZeroshardAccelerator
from zeroshard.interop.loops import absent_weights
from zeroshard.interop.states import STATES, has_states, load_states, save_states
from zeroshard.interop.trainer_arguments import plan_of
from zeroshard.plan import Plan


class ZeroshardMixin(Trainer):
    """Puts an engine under a trainer that derives from transformers' `Trainer`; name it before that class.

    Checkpoints hold the model's files, as without an engine, and a folder "zeroshard" with optimizer states, which
    loads under other plans and numbers of ranks. `bf16` and `fp16` are 16-bit compute with fp32 master weights, in the
    place of autocast.

    Args:
        args, kwargs: those of the trainer.
        plan: for the engine; by default that of `fsdp` of the arguments, or `Plan()`.
        weights: a folder of `save_pretrained`, of which each rank reads its slices for a model that was built inside
            `torch.device("meta")`, so that no rank holds it whole.
        resume_without_states: let `train(resume_from_checkpoint=...)` begin with new optimizer states if the
            checkpoint has none; otherwise it is refused.

    Raises:
        ConfigError: training arguments that an engine does not carry out, each by its name with the way out.
        PlanError: a plan that does not go with a trainer. ModelError: a model that transformers divided.
    """

    accelerator: ZeroshardAccelerator

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the order of the bases.

        Raises:
            ConfigError: the mixin stands behind the trainer that it is for.
        """
        super().__init_subclass__(**kwargs)
        mixin, before = ZeroshardMixin, cls.__mro__[: cls.__mro__.index(ZeroshardMixin)]
        hidden = [each.__name__ for each in before if Trainer in each.__mro__ and mixin not in each.__mro__]
        if hidden:
            raise ConfigError(
                f"{cls.__name__} names {hidden[0]} before ZeroshardMixin, whose methods would be hidden. Write "
                f"`class {cls.__name__}(ZeroshardMixin, {hidden[0]})`."
            )

    def __init__(
        self,
        *args: Any,
        plan: Plan | None = None,
        weights: str | PathLike[str] | None = None,
        resume_without_states: bool = False,
        **kwargs: Any,
    ) -> None:
        self.plan, self.weights, self.resume_without_states = plan, weights, resume_without_states
        super().__init__(*args, **kwargs)
        self._cast_reference()
        if hasattr(self, "_dist"):  # of TRL's trainers that generate, which enter this context around it
            self._dist.summon_full_params = lambda module, **kwargs: self._whole()

    @property
    def engine(self) -> Engine | None:
        """The engine, from the first `train` on."""
        return self.accelerator.engine

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, then one like it over an engine."""
        self.plan = plan_of(self.args, self.plan)
        if getattr(self.model, "is_distributed_loading_by_transformers", False):
            raise ModelError(
                "The model was divided among the ranks as it was loaded, and the plan divides it too. Load it without "
                "distributed_config."
            )
        without_fsdp = {"fsdp": None, "fsdp_plugin_args": None}
        given = {name: getattr(self.args, name) for name in without_fsdp}
        self.args.__dict__.update(without_fsdp)
        super().create_accelerator_and_postprocess()
        self.args.__dict__.update(given)
        self.accelerator = ZeroshardAccelerator.over(self.accelerator, self.plan, self.weights)
        gather = self.accelerator.gather_for_metrics
        self.gather_function = partial(gather, use_gather_object=self.args.eval_use_gather_object)

    def _cast_reference(self) -> None:
        """Bring a reference model, as DPO has one, to the precision in which the engine computes."""
        reference = getattr(self, "ref_model", None)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.accelerator.plan.precision)
        if isinstance(reference, torch.nn.Module) and dtype is not None:
            reference.to(dtype)

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """Leave a model on the host or on the meta device if the engine takes it from there unit by unit."""
        if not (absent_weights(self.accelerator.plan) or any(each.is_meta for each in model.parameters())):
            super()._move_model_to_device(model, device)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's; `resume_from_checkpoint=True` takes the newest complete checkpoint.

        Raises:
            CheckpointError: there is no such checkpoint; or it has no optimizer states, and `resume_without_states` is
                false.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(self._newest(Path(self.args.output_dir)))
        if resume_from_checkpoint:
            self._check_resumable(Path(resume_from_checkpoint))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], torch.Tensor | int | None]:
        """As the trainer's; a step without a label on any rank counts 1, so its loss is 0 and not 0/0."""
        batches, count = super().get_batch_samples(*args, **kwargs)
        if isinstance(count, torch.Tensor):
            return batches, count.clamp(min=1)
        return batches, max(count, 1) if count is not None else None

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """As the trainer's; in training, a model's mean over a batch without a label is 0 and not 0/0."""
        labels = inputs.get("labels")
        found = super().compute_loss(model, inputs, return_outputs, **kwargs)
        if not (model.training and isinstance(labels, torch.Tensor)):
            return found
        loss, *outputs = found if return_outputs else (found,)
        loss = torch.where(labels.eq(-100).all(), loss.nan_to_num(0.0), loss)
        return (loss, *outputs) if return_outputs else loss

    def _newest(self, folder: Path) -> Path:
        numbered = [(path.name.rpartition("-")[2], path) for path in folder.glob("checkpoint-*")]
        found = sorted((int(number), path) for number, path in numbered if number.isdecimal())
        complete = [path for _, path in found if (path / TRAINER_STATE_NAME).is_file()]
        if not complete:
            raise CheckpointError(
                f"{folder} has no complete checkpoint (found: {', '.join(path.name for _, path in found) or 'none'}). "
                f"Leave resume_from_checkpoint out to begin anew."
            )
        return complete[-1]

    def _check_resumable(self, folder: Path) -> None:
        if not (folder / TRAINER_STATE_NAME).is_file():
            raise CheckpointError(
                f"{folder} has no {TRAINER_STATE_NAME}: it is no checkpoint of a trainer, or its writing was cut off. "
                f"Name another one, or begin from its weights with from_pretrained."
            )
        if not has_states(folder) and not self.resume_without_states:
            raise CheckpointError(
                f"{folder} has no optimizer states of an engine (no folder {STATES!r}), so the run would go on with "
                f"new ones. It was written with save_only_model=True or without an engine. Pass "
                f"resume_without_states=True to the trainer if you mean it."
            )

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's; inside of `gathered()` if it generates and parameters are sliced."""
        with self._whole() if getattr(self.args, "predict_with_generate", False) else nullcontext():
            return super().evaluation_loop(*args, **kwargs)

    def _whole(self) -> AbstractContextManager[None]:
        """Whole parameters on the device, for forwards of which each rank runs its own number."""
        engine = self.engine
        return engine.gathered() if engine is not None and absent_weights(engine.plan) else nullcontext()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save whole weights for `from_pretrained`; a collective call, in which rank 0 holds them in host memory."""
        if self.engine is None:
            super().save_model(output_dir, _internal_call)
            return
        with self._saving(_whole_weights(self.engine)):
            super().save_model(output_dir, _internal_call)
        self.engine.world.agree(b"", "model saved")

    @contextmanager
    def _saving(self, weights: dict[str, torch.Tensor]) -> Iterator[None]:
        self._weights = weights
        yield
        del self._weights

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, getattr(self, "_weights", state_dict) if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.engine is not None
        save_states(self.engine, Path(output_dir), {"scheduler": _plain(self.lr_scheduler.state_dict())})

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self.engine is None or not has_states(Path(checkpoint)):
            return
        self.lr_scheduler.load_state_dict(load_states(self.engine, Path(checkpoint))["scheduler"])

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """Load weights alone; states bring theirs."""
        if has_states(Path(resume_from_checkpoint)):
            return
        with nullcontext() if self.engine is None else self.engine.gathered():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        assert self.engine is not None
        best = Path(self.state.best_model_checkpoint)
        if has_states(best) and self.weights is not None:
            self.engine.load(best / STATES)  # which may leave out a frozen base, and load_weights needs all weights
        elif has_states(best):
            self.engine.load_weights(best / STATES)
        else:
            with self.engine.gathered():
                super()._load_best_model()


class ZeroshardTrainer(ZeroshardMixin):
    """transformers' `Trainer` over an engine, with the further arguments of `ZeroshardMixin`."""


def _whole_weights(engine: Engine) -> dict[str, torch.Tensor]:
    """Whole weights on rank 0, in host memory; nothing elsewhere. A collective call."""
    kept = {}
    for name, value in engine.weights(dtype={"fp32": None}.get(engine.plan.precision, torch.float32)):
        if engine.rank == 0:
            kept[name] = value.cpu()
    return kept


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a schedule in plain values: those of one that wraps another too."""
    return {key: value for key, value in state.items() if not callable(value)}
