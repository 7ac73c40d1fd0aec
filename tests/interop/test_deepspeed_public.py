"""Configurations with the keys of those that people share: taken over, or refused with a reason and the way out."""

import warnings
from typing import Any

import pytest
import torch
from plans import settings_of
from torch import nn

import zeroshard as zs
from zeroshard.errors import ConfigError

CPU = {"device": "cpu", "pin_memory": True}
LEFT = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
)
FP16 = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
EITHER = {"fp16": {"enabled": "auto", **FP16}, "bf16": {"enabled": "auto"}}
BUCKETS = {
    **{"allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": True, "reduce_scatter": True},
    **{"reduce_bucket_size": "auto", "contiguous_gradients": True, "round_robin_gradients": True},
}
THREE = {
    **{"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9},
    **{"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    **{"stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9},
    **{"stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": "auto"},
}
BOTH = {"offload_optimizer": CPU, "offload_param": CPU}
ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
DECAY = {
    "type": "WarmupDecayLR",
    "params": dict.fromkeys(("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
}
PRINTS = {"steps_per_print": 2000, "wall_clock_breakdown": False}
RUN = {"total_num_steps": 100, "warmup_num_steps": 10, "warmup_max_lr": 2e-5, "lr": 2e-5}


def template(zero: dict[str, Any]) -> dict[str, Any]:
    """As accelerate's templates: everything of the optimizer and the schedule is left to the caller."""
    parts = {"optimizer": ADAMW, "scheduler": DECAY, "zero_optimization": zero}
    return {"fp16": {"enabled": True, **FP16}, **parts, **LEFT, "gradient_accumulation_steps": 1, **PRINTS}


TAKEN: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # accelerate
    "accelerate-1": (template({"stage": 1}), RUN, {"zero": 1, "precision": "fp16"}),
    "accelerate-2": (template({"stage": 2, **BUCKETS}), RUN, {"zero": 2, "offload": ""}),
    "accelerate-2-offload": (template({"stage": 2, "offload_optimizer": CPU}), RUN, {"offload": "optimizer"}),
    "accelerate-3": (template(THREE), RUN, {"zero": 3, "offload": ""}),
    "accelerate-3-offload": (template({**THREE, **BOTH}), RUN, {"offload": "optimizer,parameters"}),
    # stanford_alpaca
    "alpaca": (
        {"bf16": {"enabled": "auto"}, "optimizer": ADAMW, "scheduler": DECAY, "zero_optimization": {**THREE, **BOTH}},
        {**RUN, "precision": "bf16"},
        {"zero": 3, "precision": "bf16", "offload": "optimizer,parameters"},
    ),
    # transformers
    "transformers-2": (
        {
            **{"fp16": {"enabled": "auto", **FP16}, "bf16": {"enabled": "auto"}, "optimizer": ADAMW},
            **{"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}}},
            **{"zero_optimization": {"stage": 2, "offload_optimizer": CPU, **BUCKETS}, **LEFT, **PRINTS},
        },
        {"precision": "fp16", "warmup_num_steps": 5, "warmup_max_lr": 1e-3, "lr": 1e-3, "gradient_clipping": 1.0},
        {"zero": 2, "precision": "fp16", "clip_norm": 1.0, "loss_scale": "dynamic"},
    ),
    "transformers-3": (
        {
            **{"fp16": {"enabled": True, **FP16}, "zero_optimization": {**THREE, **BOTH, "sub_group_size": 1e14}},
            **{"optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8}}, **PRINTS},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_num_steps": 500}},
        },
        {},
        {"zero": 3, "precision": "fp16"},
    ),
    # FastChat
    "fastchat-2": ({"zero_optimization": {"stage": 2, "offload_optimizer": CPU, **BUCKETS}, **LEFT}, {}, {"zero": 2}),
    "fastchat-3": (
        {"fp16": {"enabled": "auto", **FP16}, "zero_optimization": {**THREE, **BOTH, "sub_group_size": 1e12}, **LEFT},
        {"precision": "bf16", "gradient_accumulation_steps": 4},
        {"precision": "bf16", "microbatches": 4, "nonfinite": "skip"},
    ),
    # LLaMA-Factory
    "llama-factory-0": (
        {
            **{"zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 0, **BUCKETS}, **EITHER, **LEFT},
            **{"comms_config": {"verbose": False}, "monitor_config": {"enabled": True, "tag": "x"}},
        },
        {"precision": "fp32"},
        {"zero": 0, "precision": "fp32"},
    ),
    "llama-factory-2": ({**EITHER, **LEFT, "zero_optimization": {"stage": 2, **BUCKETS}}, {}, {"precision": "fp32"}),
    "llama-factory-2-offload": (
        {**EITHER, **LEFT, "zero_optimization": {"stage": 2, "offload_optimizer": CPU, **BUCKETS}},
        {"precision": "bf16"},
        {"offload": "optimizer", "precision": "bf16"},
    ),
    "llama-factory-3": ({**EITHER, **LEFT, "zero_optimization": THREE}, {"precision": "fp16"}, {"precision": "fp16"}),
    "llama-factory-3-fp8": (
        {"fp16": {"enabled": False, **FP16}, "fp8": {"enabled": True, "hysteresis": 2}, "zero_optimization": THREE},
        {},
        {"precision": "fp32"},
    ),
    # axolotl
    "axolotl-1": ({**EITHER, **LEFT, "zero_optimization": {"stage": 1, "overlap_comm": True}}, {}, {"zero": 1}),
    "axolotl-2-compile": (
        {**EITHER, **LEFT, "compile": {"disable": False, "backend": "inductor"}, "zero_optimization": {"stage": 2}},
        {"precision": "bf16"},
        {"zero": 2},
    ),
    "axolotl-3-bf16": ({"bf16": {"enabled": True}, **LEFT, "zero_optimization": THREE}, {}, {"precision": "bf16"}),
    "axolotl-3-cpuoffload-params": (
        {
            **{"zero_force_ds_cpu_optimizer": False, "bf16": {"enabled": True}, **LEFT},
            "zero_optimization": {**THREE, "offload_param": CPU, "max_live_parameters": 0, "max_reuse_distance": 0},
        },
        {},
        {"offload": "optimizer,parameters"},
    ),
    # DeepSpeedExamples
    "megatron-offload": (
        {
            **{"train_batch_size": 16, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0, **PRINTS},
            **{"zero_optimization": {"stage": 2, "cpu_offload": True}, "fp16": {"enabled": True, "loss_scale": 0}},
            **{"optimizer": {"type": "Adam", "params": {"lr": 0.00015}}},
            "activation_checkpointing": {"partition_activations": True, "contiguous_memory_optimization": False},
        },
        {},
        {"zero": 2, "offload": "optimizer", "clip_norm": 1.0},
    ),
    "megatron-infinity": (
        {
            **{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0},
            **{"fp16": {"enabled": True, "loss_scale": 1024}, "aio": {"block_size": 1048576, "thread_count": 2}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "nvme", "buffer_count": 4, "pipeline_read": False},
                "offload_param": {"device": "nvme", "nvme_path": "nvme", "max_in_cpu": 1},
            },
        },
        {},
        {"offload.disk": "nvme", "offload.disk_parameters": True, "loss_scale": 1024.0},
    ),
    "autotuning": ({"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}}, {}, {"zero": 3}),
    # elsewhere
    "with-a-comment": (
        {"_comment": "of a tutorial", "//": "and", "zero_optimization": {"stage": 2, "_note": 1}},
        {},
        {},
    ),
    "first-batch": (
        {"scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": -1, "warmup_num_steps": 10000}}},
        {},
        {},
    ),
    "llama-factory-2-autotp": (
        {"_comment": "models", "zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 2}},
        {},
        {"zero": 2, "tensor_parallel.ranks": 2},
    ),
    "legacy-3": (
        {"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_params": True}},
        {},
        {"offload": "optimizer,parameters"},
    ),
}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "accelerate, no steps": (
        template({"stage": 2}),
        {},
        r"total_num_steps is missing, .*pass total_num_steps=\.\.\. to",
    ),
    "megatron, misspelt": (
        {"zero_optimization": {"stage": 3, "stage3_param_persitance_threshold": 1e5}},
        {},
        "did you mean zero_optimization.stage3_param_persistence_threshold",
    ),
    "bert, norms in the optimizer": (
        {"optimizer": {"type": "Adam", "params": {"lr": 2e-4, "max_grad_norm": 1.0}}},
        {},
        "max_grad_norm is no option of torch's optimizers: write gradient_clipping",
    ),
    "bert, ranks": (
        {"train_batch_size": 4096, "train_micro_batch_size_per_gpu": 64},
        {},
        "Pass ranks=..., or write gradient_accumulation_steps",
    ),
    "qanet": ({"scheduler": {"type": "OneCycle", "params": {}}}, {}, "make a torch.optim.lr_scheduler"),
    "onebit": ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-4}}}, {}, "is not in torch.optim"),
    "precision twice": (
        {"bf16": {"enabled": True}},
        {"precision": "fp16"},
        "'fp16' was passed, .* enables bf16 and fp16",
    ),
    "precision against": ({"bf16": {"enabled": True}}, {"precision": "fp32"}, "'fp32' was passed, .* enables bf16"),
    "no such precision": ({"bf16": {"enabled": "auto"}}, {"precision": "half"}, "it must be 'fp32', 'bf16' or 'fp16'"),
    "nothing is auto": ({"zero_optimization": {"stage": 2}}, {"lr": 0.1}, "lr=0.1 was passed, .* no lr of 'auto'"),
    "goes on": (
        {"scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": 7}}},
        {},
        "last_batch_iteration is not -1: load the state",
    ),
}


def read(config: dict[str, Any], passed: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return zs.from_deepspeed(config, **passed)


@pytest.mark.parametrize("name", TAKEN)
def test_configurations_that_are_taken_over(name: str) -> None:
    config, passed, plan = TAKEN[name]
    found = read(config, passed)
    assert settings_of(found.plan, plan) == plan
    assert {key for key in config if not isinstance(config[key], dict)} <= {note.key for note in found.notes}
    optimizer = (found.optimizer or torch.optim.SGD)([nn.Parameter(torch.ones(2))])
    if found.scheduler is not None:
        schedule = found.scheduler(optimizer)
        for _ in range(20):
            optimizer.step()
            schedule.step()
        if "total_num_steps" in passed:
            assert 0 < schedule.get_last_lr()[0] < RUN["lr"] and schedule.warmup == 10
            assert optimizer.defaults["lr"] == RUN["lr"]


@pytest.mark.parametrize("name", REFUSED)
def test_configurations_that_are_refused(name: str) -> None:
    config, passed, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        read(config, passed)


@pytest.mark.parametrize(
    "config, told",
    [
        ({"bf16": {"enabled": "auto"}}, "bf16.enabled = .auto.: left open: pass precision='bf16', 'fp16' or 'fp32'"),
        ({"fp8": {"enabled": True}}, "fp8 = .*: not supported: DeepSpeed does not know it and ignores it too"),
        ({"quux_of_ours": 1}, "quux_of_ours = 1: not supported: DeepSpeed does not know it and ignores it too"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}},
            r"left open: pass warmup_num_steps=",
        ),
    ],
)
def test_what_is_left_open_or_ignored_is_told(config: dict[str, Any], told: str) -> None:
    with pytest.warns(UserWarning, match=told):
        zs.from_deepspeed({"gradient_clipping": 1.0, **config})


def test_comments_need_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = zs.from_deepspeed({"gradient_clipping": 1.0, "_comment": "x", "zero_optimization": {"//": "y"}})
    assert [note.text for note in found.notes if "comment" in note.key or "//" in note.key] == ["it is a comment"] * 2
