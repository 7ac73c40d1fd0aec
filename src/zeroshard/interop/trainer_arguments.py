"""The fate of every training argument of transformers' and TRL's trainers under an engine.

The fields are those of transformers 5.23 (`TrainingArguments`, `Seq2SeqTrainingArguments`) and TRL 1.16 (`SFTConfig`,
`DPOConfig`, `RewardConfig`, `KTOConfig`, `GRPOConfig`, `RLOOConfig`). A field without a rule is refused once it is set,
so that a newer version drops nothing silently.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from zeroshard.errors import ConfigError, PlanError
from zeroshard.interop.loops import absent_weights, check_loop, with_dtype
from zeroshard.plan import Plan
from zeroshard.units.compiling import RECORDS_ADDRESSES

Source = Literal["trainer", "plan", "needless", "refused"]


@dataclass(frozen=True, slots=True)
class Field:
    """The fate of an argument.

    Attributes:
        fate: "trainer" (the trainer reads it, as without an engine), "plan" (the plan or the engine takes it over),
            "needless" (the results are the same without it; a warning says so), or "refused".
        text: why, or the way out.
        refuses: whether this value is refused, given the plan; of refused arguments by default each value but the
            field's default.
    """

    fate: Source
    text: str = ""
    refuses: Callable[[Any, Plan], bool] | None = None


def _all(fate: Source, text: str, *names: str) -> dict[str, Field]:
    return dict.fromkeys(names, Field(fate, text))


_UNSLICED = ("lomo", "adalomo", "layerwise", "torch_8bit", "torch_4bit")  # the last two compile their own steps
_EVALUATES = "the engine evaluates in the plan's precision: set bf16=True or fp16=True, and leave it out"
_KNOWN_UNUSED = "the engine reduces gradients itself, and parameters without a gradient are left alone"
# read by the trainers, as without an engine: of TrainingArguments,
_READ = """
output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
lr_scheduler_kwargs warmup_steps optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon optim_target_modules
gradient_accumulation_steps average_tokens_across_devices max_grad_norm label_smoothing_factor tf32
activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs
use_cache neftune_noise_alpha torch_empty_cache_steps logging_strategy logging_steps logging_first_step
log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica disable_tqdm
report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy eval_steps
eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start eval_do_concat_batches
eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics save_only_model save_strategy
save_steps save_total_limit push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push
hub_revision load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu accelerator_config
dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names
train_sampling_strategy length_column_name ddp_backend ddp_timeout skip_memory_metrics do_train do_eval do_predict
resume_from_checkpoint local_rank
"""
# of Seq2SeqTrainingArguments,
_OF_SEQ2SEQ = """
sortish_sampler predict_with_generate generation_max_length generation_num_beams generation_config
"""
# of SFTConfig, DPOConfig, RewardConfig and KTOConfig,
_OF_TRL = """
model_init_kwargs trust_remote_code router_aux_loss_coef chat_template_path dataset_text_field dataset_kwargs
dataset_num_proc eos_token max_length truncation_mode shuffle_dataset packing packing_strategy padding_free
pad_to_multiple_of eval_packing completion_only_loss assistant_only_loss loss_type pad_token disable_dropout
precompute_ref_log_probs precompute_ref_batch_size loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef
label_smoothing beta use_weighting discopop_tau ref_model_mixup_alpha ref_model_sync_steps
center_rewards_coefficient desirable_weight undesirable_weight
"""
# and of GRPOConfig and RLOOConfig, whose trainers generate
_OF_GENERATING = """
num_generations num_generations_eval max_completion_length ds3_gather_for_generation generation_batch_size
steps_per_generation temperature top_p top_k min_p generation_kwargs chat_template_kwargs repetition_penalty
cache_implementation num_iterations epsilon delta epsilon_high sapo_temperature_neg sapo_temperature_pos vespo_k_pos
vespo_lambda_pos vespo_k_neg vespo_lambda_neg importance_sampling_level reward_weights multi_objective_aggregation
scale_rewards normalize_advantages reward_clip_range mask_truncated_completions top_entropy_quantile entropy_coef
use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target max_tool_calling_iterations
off_policy_mask_threshold use_bias_correction_kl log_completions log_multimodal num_completions_to_print
log_unique_prompts log_completions_hub_repo vllm_mode vllm_model_impl vllm_enable_sleep_mode
vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size
vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max
vllm_importance_sampling_clip_min vllm_importance_sampling_cap transformers_continuous_batching_config
"""
FIELDS: Final[dict[str, Field]] = {
    **_all("trainer", "", *_READ.split()),
    **_all("trainer", "", *_OF_SEQ2SEQ.split()),
    **_all("trainer", "", *_OF_TRL.split()),
    **_all("trainer", "", *_OF_GENERATING.split()),
    **_all("refused", "it generates by copies of the weights, and an engine has slices of them; leave it out",
           "use_vllm", "use_transformers_continuous_batching", "use_transformers_paged"),
    "cast_lm_head_to_fp32": Field("refused", "the plan decides precisions; leave it out"),
    **_all("plan", "", "bf16", "fp16", "fsdp", "fsdp_config"),
    **_all("plan", "engine.compile() compiles the blocks", "torch_compile", "torch_compile_backend"),
    "torch_compile_mode": Field(
        "plan", "it records CUDA graphs, and the engine's buffers move: take 'default' or 'max-autotune-no-cudagraphs'",
        refuses=lambda value, plan: value in RECORDS_ADDRESSES,
    ),
    **_all("needless", _KNOWN_UNUSED, "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_static_graph"),
    "ddp_broadcast_buffers": Field(
        "needless", "buffers stay those of each rank", refuses=lambda value, plan: bool(value)
    ),
    "optim": Field(
        "trainer", "it updates in the backward, or compiles its steps; take adamw_torch, adamw_8bit or adafactor",
        refuses=lambda value, plan: any(name in str(getattr(value, "value", value)) for name in _UNSLICED),
    ),
    "sync_ref_model": Field(
        "trainer", "it reads weights outside of the model's forward, where they are absent; take zero=2",
        refuses=lambda value, plan: value and absent_weights(plan),
    ),
    "debug": Field("refused", "find the first module that differs with zeroshard verify, and leave it out"),
    "deepspeed": Field("refused", "pass plan=zs.from_deepspeed('ds_config.json').plan, and leave it out"),
    **_all("refused", _EVALUATES, "bf16_full_eval", "fp16_full_eval"),
    **_all("refused", "Plan(loss_chunk=1024) computes the loss without whole logits; leave it out",
           "use_liger_kernel", "liger_kernel_config"),
    "auto_find_batch_size": Field(
        "refused", "ranks that run out of memory at different sizes would wait for each other: find the size by "
        "zs.Plan.auto, or set per_device_train_batch_size",
    ),
    "parallelism_config": Field("refused", "the plan divides the model; leave it out"),
    "save_on_each_node": Field("refused", "a checkpoint is one folder that all ranks write; leave it out"),
    "enable_jit_checkpoint": Field(
        "refused", "ranks would save at different steps: start the job by `zeroshard run`, with save_steps"
    ),
    "activation_offloading": Field("refused", "take Plan(offload='activations'), and leave it out"),
}  # fmt: skip

FSDP: Final[dict[str, Field]] = {  # keys of fsdp_config, without the prefix "fsdp_"
    **_all("plan", "", "version", "reshard_after_forward", "cpu_offload", "transformer_layer_cls_to_wrap",
           "activation_checkpointing"),
    **_all("plan", "", "auto_wrap_policy", "min_num_params"),
    **_all("needless", "", "state_dict_type", "cpu_ram_efficient_loading", "forward_prefetch", "backward_prefetch",
           "use_orig_params", "sync_module_states", "limit_all_gathers"),
    **_all("refused", "FSDP of XLA is not here; leave it out", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt",
           "xla_fsdp_settings"),
}  # fmt: skip
RESHARDING: Final = {"true": 3, "false": 2, "full_shard": 3, "shard_grad_op": 2, "no_shard": 0}  # the plan's `zero`
SWITCHES: Final[dict[str, Callable[[Plan], Plan]]] = {
    "cpu_offload": lambda plan: replace(plan, offload={3: "optimizer,parameters"}.get(plan.zero, "optimizer")),
    "activation_checkpointing": lambda plan: replace(plan, recompute="blocks"),
}


def plan_of(arguments: Any, plan: Plan | None) -> Plan:
    """The given plan of a trainer, or the plan of its argument `fsdp`; with the precision of the arguments.

    Warns of arguments that have no effect.

    Raises:
        ConfigError: arguments that an engine does not carry out, each by its name with the way out.
        PlanError: a plan that does not go with a trainer, or two settings for one thing.
    """
    if arguments.fsdp:
        if plan is not None:
            raise PlanError(
                f"fsdp={arguments.fsdp!r} and a plan both divide the states. Leave fsdp and fsdp_config out."
            )
        plan = plan_of_fsdp(arguments.fsdp_config or {})
    plan = plan or Plan()
    check_loop(plan, "accumulate by gradient_accumulation_steps")
    refusals = list(_refusals(arguments, plan))
    if refusals:
        raise ConfigError("\n".join(refusals))
    if plan.clip_norm is not None and arguments.max_grad_norm:
        raise PlanError(
            f"clip_norm={plan.clip_norm} of the plan and max_grad_norm={arguments.max_grad_norm} of the arguments both "
            f"clip. Leave clip_norm out."
        )
    if arguments.n_gpu > 1:
        raise ConfigError(
            f"This process sees {arguments.n_gpu} GPUs, and each rank trains on one. Start the script with "
            f"`torchrun --nproc-per-node {arguments.n_gpu}`, or set CUDA_VISIBLE_DEVICES=0."
        )
    asked = "bf16" if arguments.bf16 else "fp16" if arguments.fp16 else "fp32"
    return with_dtype(plan, asked, type(arguments).__name__)


def _refusals(arguments: Any, plan: Plan) -> Iterator[str]:
    """Sentences about arguments that are refused; warns of those without an effect."""
    kind = type(arguments).__name__
    packages = [each for each in type(arguments).__mro__ if each.__module__.startswith(("transformers.", "trl."))]
    theirs = {name for each in packages for name in getattr(each, "__dataclass_fields__", ())}  # not a user's own
    for field in dataclasses.fields(arguments):
        value, rule = getattr(arguments, field.name), FIELDS.get(field.name)
        if _is_default(field, value) or field.name not in theirs:
            continue
        if rule is None:
            yield (
                f"{kind}.{field.name}={value!r} is an argument that this version does not know: leave it out, or take "
                f"a version of transformers or TRL that the extras name."
            )
        elif rule.refuses(value, plan) if rule.refuses is not None else rule.fate == "refused":
            yield f"{kind}.{field.name}={value!r} is not carried out by an engine: {rule.text}."
        elif rule.fate == "needless":
            warnings.warn(f"{kind}.{field.name}={value!r} has no effect here: {rule.text}.", stacklevel=2)


def _is_default(field: "dataclasses.Field[Any]", value: Any) -> bool:
    made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return value is None or value == made or (value in (False, [], {}) and made in (None, False, ""))


def plan_of_fsdp(config: Mapping[str, Any]) -> Plan:
    """The plan of an `fsdp_config` of transformers: its stage, offload, units and recomputation.

    Raises:
        ConfigError: a key that is unknown, or that no plan carries out.
    """
    settings = {key.removeprefix("fsdp_"): value for key, value in config.items()}
    for key, value in settings.items():
        rule = FSDP.get(key)
        if rule is None:
            raise ConfigError(f"fsdp_config has the key {key!r}, which no plan carries out. Known: {', '.join(FSDP)}.")
        if rule.fate == "refused" and value:
            raise ConfigError(f"fsdp_config[{key!r}]={value!r}: {rule.text}.")
    chosen = str(settings.get("reshard_after_forward", True)).lower()
    if chosen not in RESHARDING:
        raise ConfigError(
            f"fsdp_config['reshard_after_forward']={chosen!r} has no plan of its own: pass plan=zs.Plan(zero=3, "
            f"shard_group=...) with the ranks of a machine, and leave fsdp out."
        )
    plan = Plan(zero=RESHARDING[chosen])  # type: ignore[arg-type]
    for key, change in SWITCHES.items():
        if _on(settings.get(key)):
            plan = change(plan)
    classes = settings.get("transformer_layer_cls_to_wrap")
    if classes:
        plan = replace(plan, units=(classes,) if isinstance(classes, str) else tuple(classes))
    return plan


def _on(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes", "on")
