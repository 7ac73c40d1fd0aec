"""Unknown settings of a plan: the setting that a name of another library means, or the nearest name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

from zeroshard.errors import PlanError

_OPTIMIZER = "it belongs to the optimizer: zs.Engine(model, functools.partial(torch.optim.AdamW, {name}=...), plan)"
_BATCH = "the batch is the one that each rank's loop gives to the engine; microbatches=N cuts it into N"
MEANT = {  # what to write, by names as libraries have them
    **dict.fromkeys(
        ("tensor", "tp", "tp_size", "tensor_parallel_size", "tensor_model_parallel_size"),
        "write tensor_parallel={value}",
    ),
    **dict.fromkeys(
        ("pipeline", "pp", "pp_size", "stages", "num_stages", "pipeline_parallel_size", "pipeline_model_parallel_size"),
        "write pipeline_parallel={value}",
    ),
    **dict.fromkeys(
        ("ep", "ep_size", "experts", "expert_parallel_size", "expert_model_parallel_size"),
        "write expert_parallel={value}",
    ),
    **dict.fromkeys(
        ("dp", "dp_size", "data", "data_parallel", "data_parallel_size", "world_size", "ranks", "num_gpus"),
        "data ranks are those of the job that stages, tensor and expert ranks leave; start more processes",
    ),
    **dict.fromkeys(
        (
            *("gradient_accumulation_steps", "grad_accumulation_steps", "accumulate_grad_batches", "accumulation"),
            *("accumulation_steps", "num_microbatches", "micro_batches", "num_micro_batches"),
        ),
        "write microbatches={value}, which cuts the batch of train_step; backwards before a step add up without it",
    ),
    **dict.fromkeys(("stage", "zero_stage", "zero_optimization", "level"), "write zero={value}"),
    **dict.fromkeys(
        ("sharding_strategy", "fsdp", "reshard_after_forward"), "write zero=3, or zero=2 to keep weights whole"
    ),
    **dict.fromkeys(("fp16", "half"), 'write precision="fp16"'),
    **dict.fromkeys(("bf16", "bfloat16"), 'write precision="bf16"'),
    **dict.fromkeys(
        ("dtype", "mixed_precision", "mp_policy", "amp", "autocast", "torch_dtype"), 'write precision="bf16" or "fp16"'
    ),
    **dict.fromkeys(
        ("cpu_offload", "offload_optimizer", "offload_param", "offload_params", "offload_policy", "optimizer_offload"),
        'write offload="optimizer", or "optimizer,parameters", or "optimizer,parameters,activations"',
    ),
    **dict.fromkeys(("offload_activations", "activation_offload"), 'write offload="activations"'),
    **dict.fromkeys(("nvme", "nvme_path", "nvme_offload"), 'write offload=zs.Offload("optimizer", disk="/path")'),
    **dict.fromkeys(
        ("gradient_clipping", "max_grad_norm", "clip_grad", "clip_grad_norm", "gradient_clip_val", "max_norm"),
        "write clip_norm={value}",
    ),
    **dict.fromkeys(
        ("gradient_checkpointing", "activation_checkpointing", "checkpointing", "recompute_granularity", "remat"),
        'write recompute="blocks", or "sqrt", "selective" or "auto"',
    ),
    **dict.fromkeys(("lr", "learning_rate", "weight_decay", "betas", "eps", "optimizer", "momentum"), _OPTIMIZER),
    **dict.fromkeys(
        ("batch_size", "train_batch_size", "micro_batch_size", "per_device_train_batch_size", "batch"), _BATCH
    ),
    **dict.fromkeys(("memory", "max_memory", "budget", "device_budget"), "write device_memory={value}"),
    **dict.fromkeys(("compile", "torch_compile"), "call engine.compile() once the engine is made"),
    "schedule": "write pipeline_parallel=zs.Pipeline(stages, schedule={value})",
}


Kind = TypeVar("Kind")


def explains_unknown(kind: type[Kind]) -> type[Kind]:
    """A class decorator: keyword arguments that no field has raise `PlanError` with the setting that is meant."""
    make: Callable[..., None] = kind.__init__
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]

    meant = MEANT if kind.__name__ == "Plan" else {}
    most = sum(not field.kw_only for field in fields(kind))  # type: ignore[arg-type]

    @wraps(make)
    def initialise(self: Any, *args: Any, **settings: Any) -> None:
        for name, value in settings.items():
            if name not in names:
                raise PlanError(f"{kind.__name__} has no setting {name!r}; {way_out(name, value, names, meant)}.")
        if len(args) > most:
            raise PlanError(
                f"{kind.__name__} takes {most} value{'s' * (most != 1)} without a name, and was given "
                f"{', '.join(map(repr, args))}; write {kind.__name__}({names[most]}={args[most]!r})."
            )
        make(self, *args, **settings)

    kind.__init__ = initialise  # type: ignore[method-assign]
    return kind


def way_out(name: str, value: Any, names: Sequence[str], meant: Mapping[str, str] = MEANT) -> str:
    """The advice for an unknown setting of a plan, or of one of its groups without `meant`."""
    if name.casefold() in meant:
        return meant[name.casefold()].format(name=name, value=repr(value))
    near = get_close_matches(name, [*names, *meant], n=1)
    if near and near[0] in names:
        return f"write {near[0]}={value!r}"
    if near:
        return f"{near[0]!r} is none either: {meant[near[0]].format(name=near[0], value=repr(value))}"
    return f"those that it has are {', '.join(names)}"
