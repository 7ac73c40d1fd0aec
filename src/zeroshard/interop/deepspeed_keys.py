"""The fate of every key of a DeepSpeed configuration that has no field of its own in a `Plan`.

The keys are those of DeepSpeed 0.19.6 (its `runtime/config.py`, `runtime/zero/config.py`, `runtime/precision_config.py`
and the sections that these read). Keys of a `Plan` or the optimizer are read by
`zeroshard.interop.deepspeed_config`.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

Fate = Literal["kept", "needs nothing", "not supported", "left open", "changes results"]
NEEDLESS: Final = "needs nothing"
UNSUPPORTED: Final = "not supported"
DIFFERENT: Final = "changes results"


@dataclass(frozen=True, slots=True)
class Rule:
    """The fate of a key.

    Attributes:
        fate: "needs nothing", "not supported" (the results are the same without it), or "changes results", which is
            refused.
        text: why, or the way out.
        off: values at which the key does nothing, besides false, null, "none", an empty section, and a section whose
            `enabled` or `device` is one of these.
    """

    fate: Fate
    text: str
    off: tuple[Any, ...] = ()

    def applies(self, value: Any) -> bool:
        """Whether the key has an effect at this value."""
        if isinstance(value, dict):
            return bool(value) and self.applies(value.get("enabled", value.get("device", True)))
        return value not in (None, False, "none", *self.off)


def _all(fate: Fate, text: str, *keys: str) -> dict[str, Rule]:
    return dict.fromkeys(keys, Rule(fate, text))


ELSEWHERE = "set it up in your own loop or model, then remove the key"

TOP: dict[str, Rule] = {
    **_all(NEEDLESS, "the engine prints nothing; engine.step() returns the figures to print",
           "steps_per_print", "dump_state", "log_level", "timers", "vocabulary_size"),
    **_all(NEEDLESS, "every optimizer is tried on slices when the engine is made",
           "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    **_all(NEEDLESS, "gradients are added in fp32 in rank order and divided by the number of ranks once",
           "prescale_gradients", "gradient_predivide_factor"),
    **_all(NEEDLESS, "updated parameters are always gathered", "disable_allgather"),
    **_all(NEEDLESS, "engine.backward adds and engine.step consumes, in any order", "managed_gradient_accumulation"),
    **_all(NEEDLESS, "engine.traffic() counts every step", "comms_logger"),
    **_all(NEEDLESS, "every rank writes its own slices, and they load at any number of ranks", "checkpoint"),
    **_all(NEEDLESS, "whole pages go past the kernel's cache, in pieces of 8 MiB", "aio"),
    **_all(NEEDLESS, "it is for a mixture of experts or for sequence parallelism",
           "use_data_before_expert_parallelism", "seq_parallel_communication_data_type"),
    **_all(UNSUPPORTED, "log the result of engine.step() with a logger of your choice",
           "tensorboard", "wandb", "csv_monitor", "comet"),
    **_all(UNSUPPORTED, "use torch.profiler, and engine.memory() for bytes",
           "wall_clock_breakdown", "memory_breakdown"),
    **_all(UNSUPPORTED, "use torch.utils.flop_counter", "flops_profiler"),
    **_all(UNSUPPORTED, "use torch.utils.checkpoint in the model", "activation_checkpointing"),
    **_all(UNSUPPORTED, "save with engine.save", "nebula", "datastates_ckpt"),
    **_all(UNSUPPORTED, "compile blocks before the engine is made: block.compile()", "compile", "graph_harvesting"),
    **_all(UNSUPPORTED, "zs.Plan.auto finds a plan, and zeroshard plan prints the bytes of each", "autotuning"),
    **_all(UNSUPPORTED, "DeepSpeed does not know it and ignores it too; remove it",
           "comms_config", "monitor_config", "fp8", "gradient_checkpointing", "zero_init", "lr_scheduler"),
    **_all(UNSUPPORTED, "generate inside engine.gathered()", "hybrid_engine"),
    **_all(UNSUPPORTED, "gradients of nn.Embedding(sparse=True) are refused; use sparse=False", "sparse_gradients"),
    **_all(UNSUPPORTED, "give drop_last to your DataLoader", "dataloader_drop_last"),
    **_all(UNSUPPORTED, "cut the model with Plan(pipeline_parallel=...); PipelineModule is not needed", "pipeline"),
    "gradient_allreduce_op": Rule(
        DIFFERENT, "gradients are the mean over ranks; multiply the loss by the ranks, then remove the key", ("mean",)
    ),
    **_all(DIFFERENT, "it derives batch sizes from the number of ranks; write the sizes, then remove the key",
           "elasticity"),
    **_all(DIFFERENT, "put torch.autocast around the forward, or take bf16 or fp16; then remove the key",
           "amp", "torch_autocast"),
    **dict.fromkeys(
        ("sequence_parallel_size", "data_parallel_size"),
        Rule(DIFFERENT, "sequences are divided only among ranks that split layers, by tensor_parallel; start without, "
             "then remove the key", (1,)),
    ),
    **_all(DIFFERENT, ELSEWHERE, "sparse_attention", "progressive_layer_drop", "curriculum_learning", "data_efficiency",
           "compression_training", "quantize_training", "weight_quantization", "eigenvalue"),
}  # fmt: skip

DATA_TYPES: dict[str, Rule] = {
    **_all(NEEDLESS, "sums over more than one backward are fp32", "grad_accum_dtype"),
    **_all(
        DIFFERENT, "convert the model before the engine is made, then remove the key", "param_dtype", "buffer_dtype"
    ),
}

_SAVED = "engine.state_dict() is complete under every stage"
_SIZED = "buffers are as large as the model's units, which are gathered in the order of the first step"
_QUANTIZED = "nothing is quantized on the wire; communication_data_type can make it 16-bit"
ZERO: dict[str, Rule] = {
    **_all(NEEDLESS, "gradients are made in flat buffers, which are reduced while the backward goes on",
           "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce",
           "allgather_partitions", "allgather_bucket_size", "allgather_size", "overlap_comm", "round_robin_gradients",
           "legacy_stage1"),
    **_all(NEEDLESS, _SIZED, "sub_group_size", *(
        f"{prefix}{name}" for prefix in ("", "stage3_") for name in (
            "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold",
            "max_live_parameters", "max_reuse_distance", "module_granularity_threshold",
            "use_all_reduce_for_fetch_params", "allgather_sequential"))),
    **_all(NEEDLESS, _SAVED, "gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save",
           "stage3_gather_fp16_weights_on_model_save"),
    **_all(NEEDLESS, "checkpoints hold the fp32 weights, and load at any number of ranks",
           "load_from_fp32_weights", "elastic_checkpoint", "pipeline_loading_checkpoint"),
    **_all(NEEDLESS, "neither modules nor functions of torch are patched",
           "memory_efficient_linear", "override_module_apply"),
    **_all(NEEDLESS, "ranks compare what they did at every step", "enable_sanity_checks", "log_trace_cache_warnings"),
    **_all(NEEDLESS, "ranks may take different branches under every stage", "leaf_module"),
    **_all(NEEDLESS, "host memory is registered with CUDA once, when it is made", "cpu_offload_use_pin_memory"),
    **_all(NEEDLESS, "Muon is an optimizer here, zs.optim.Muon", "save_muon_momentum_buffer_in_memory"),
    **_all(NEEDLESS, "groups gather in one piece", "mics_hierarchical_params_gather"),
    "ignore_unused_parameters": Rule(
        UNSUPPORTED, "a parameter without a gradient is left alone; look for p.grad is None after a backward", (True,)
    ),
    **_all(UNSUPPORTED, _QUANTIZED, "zero_quantized_weights", "zero_quantized_nontrainable_weights",
           "zero_quantized_gradients", "zeropp_loco_param"),
    **_all(DIFFERENT, "it updates some columns late; remove the key", "zenflow"),
}  # fmt: skip

_PINNED = "host memory is registered with CUDA once, in the size that it has"
OFFLOAD_OPTIMIZER: dict[str, Rule] = {
    **_all(NEEDLESS, _PINNED, "pin_memory"),
    **_all(NEEDLESS, "each slice is read, updated and written in its turn",
           "buffer_count", "pipeline_read", "pipeline_write", "pipeline"),
    **_all(NEEDLESS, "the first weights are written where they stay", "fast_init"),
    **_all(NEEDLESS, "updates run beside the backward where Offload(speculate=True) lets them, and are undone exactly",
           "super_offload"),
    **_all(NEEDLESS, "updates have as many threads as torch.set_num_threads says", "cpuadam_cores_perc"),
}  # fmt: skip
OFFLOAD_PARAM: dict[str, Rule] = {
    **_all(NEEDLESS, _PINNED, "pin_memory"),
    **_all(NEEDLESS, "a window of two units is on the device", "buffer_count", "buffer_size", "max_in_cpu"),
    **_all(NEEDLESS, "parameters are on the disk of the optimizer's states, or in host memory", "nvme_path"),
}  # fmt: skip

_MASTERS = "master weights and sums of gradients are fp32, which is more exact and takes more memory"
BF16: dict[str, Rule] = {
    **_all(NEEDLESS, "gradients are added to the fp32 sums unit by unit", "immediate_grad_update"),
    **_all(UNSUPPORTED, _MASTERS, "bf16_master_weights_and_grads", "bf16_optimizer_states"),
}
FP16: dict[str, Rule] = {
    **_all(NEEDLESS, "the inputs of the model are always cast", "auto_cast"),
    **_all(UNSUPPORTED, _MASTERS, "fp16_master_weights_and_grads"),
    **_all(UNSUPPORTED, "the hysteresis starts again when the loss scale moves, not after every good step",
           "consecutive_hysteresis"),
}  # fmt: skip

TENSOR_PARALLEL: dict[str, Rule] = {
    **_all(NEEDLESS, "sums over ranks begin as early as they can", "tp_overlap_comm"),
    **_all(NEEDLESS, "autotp_size counts in training, in DeepSpeed too", "tp", "tensor_parallel"),
    **_all(NEEDLESS, "the sections bf16 and fp16 say it", "dtype"),
    **_all(NEEDLESS, "each rank makes its own part of the model", "keep_module_on_host"),
    **_all(NEEDLESS, "it is for inference", "replace_with_kernel_inject", "kernel_inject"),
    **_all(NEEDLESS, "the model's own plan or its structure shows how layers split", "preset_model"),
    **_all(UNSUPPORTED, "the model's own plan or its structure shows how layers split; to say it yourself, give "
           "TensorParallel(layers=...), with paths in the place of patterns",
           "partition_config", "injection_policy_tuple"),
}  # fmt: skip
_ROUTED = "routing is that of the model; set it in the model's configuration, then remove the key"
EXPERT_PARALLEL: dict[str, Rule] = {
    **_all(NEEDLESS, "experts are found by their structure",
           "preset_model", "moe_layer_pattern", "expert_pattern", "router_pattern", "expert_w1", "expert_w2",
           "expert_w3", "num_experts_attr", "top_k_attr", "has_shared_experts", "shared_experts_pattern",
           "shared_experts_gate_pattern", "expert_activation"),
    **_all(NEEDLESS, "there is one way to compute and to send rows",
           "use_grouped_mm", "disable_triton_grouped_mm", "grouped_mm_backend", "combine_impl", "row_weighting_impl",
           "gate_up_impl", "comm_backend", "comm_num_sm", "comm_qp_margin", "comm_max_tokens_per_rank",
           "async_split_plan", "validate_folding_routing"),
    "expert_tensor_parallel_size": Rule(UNSUPPORTED, "experts are whole on their rank", (1,)),
    **dict.fromkeys(("score_apply", "score_func", "top_k", "routed_scaling_factor"),
                    Rule(DIFFERENT, _ROUTED, ("auto",))),
    "route_scale": Rule(DIFFERENT, _ROUTED, (1, 1.0)),
    **_all(DIFFERENT, _ROUTED, "route_norm", "num_expert_groups", "num_limited_groups", "load_balance_coeff"),
}  # fmt: skip

KEPT: dict[str, tuple[str, ...]] = {  # by section: keys that deepspeed_config.py reads itself
    "": ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
         "communication_data_type", "zero_optimization", "bf16", "bfloat16", "fp16", "data_types", "optimizer",
         "scheduler", "tensor_parallel", "expert_parallel"),
    "zero_optimization": ("stage", "mics_shard_size", "zero_hpz_partition_size", "offload_optimizer", "offload_param",
                          "cpu_offload", "cpu_offload_param", "cpu_offload_params"),
    "zero_optimization.offload_optimizer": ("device", "nvme_path", "ratio"),
    "zero_optimization.offload_param": ("device",),
    "bf16": ("enabled", "check_grad_overflow"),
    "fp16": ("enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"),
    "data_types": (),
    "tensor_parallel": ("autotp_size",),
    "expert_parallel": ("enabled", "autoep_size"),
    "optimizer": ("type", "params"),
    "scheduler": ("type", "params"),
}  # fmt: skip
RULES: dict[str, dict[str, Rule]] = {
    "": TOP,
    "zero_optimization": ZERO,
    "zero_optimization.offload_optimizer": OFFLOAD_OPTIMIZER,
    "zero_optimization.offload_param": OFFLOAD_PARAM,
    "bf16": BF16,
    "fp16": FP16,
    "data_types": DATA_TYPES,
    "tensor_parallel": TENSOR_PARALLEL,
    "expert_parallel": EXPERT_PARALLEL,
    "optimizer": _all(NEEDLESS, "there is one way to update", "legacy_fusion"),
    "scheduler": {},
}


def path_of(section: str, key: str) -> str:
    """A key with its section."""
    return f"{section}.{key}" if section else key


def known_keys() -> dict[str, str]:
    """Every key of the tables, with its path."""
    sections = [*((s, tuple(rules)) for s, rules in RULES.items()), *KEPT.items()]
    return {key: path_of(section, key) for section, keys in reversed(sections) for key in keys}


def near(key: str, known: Mapping[str, str]) -> list[str]:
    """A list of the nearest known key; empty without one."""
    return difflib.get_close_matches(key, known, n=1)


def suggestion(key: str, known: Mapping[str, str]) -> str:
    """The end of a sentence on an unknown key."""
    close = near(key, known)
    return f"; did you mean {known[close[0]]}?" if close else "; remove it"
