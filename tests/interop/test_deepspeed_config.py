"""Every key of a DeepSpeed configuration is kept, explained or refused; the plan trains to DeepSpeed's weights."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from interop.network import REAL, STEPS, adamw, network, tokens
from plans import settings_of
from pool import Pool
from safetensors.torch import load_file
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.errors import ConfigError, PlanError
from zeroshard.interop.deepspeed_keys import KEPT, RULES
from zeroshard.interop.inert_pickle import load_inert

CLIPPED = {"gradient_clipping": 1.0}  # said, so that nothing is left open
KEYS_OF_0_19_6 = {  # the fields of its pydantic models, with their aliases
    "zero_optimization": """
        allgather_bucket_size allgather_partitions allgather_sequential contiguous_gradients cpu_offload
        cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks
        gather_16bit_weights_on_model_save ignore_unused_parameters leaf_module legacy_stage1 load_from_fp32_weights
        log_trace_cache_warnings max_live_parameters max_reuse_distance memory_efficient_linear
        mics_hierarchical_params_gather mics_shard_size model_persistence_threshold module_granularity_threshold
        offload_optimizer offload_param overlap_comm override_module_apply param_persistence_threshold
        pipeline_loading_checkpoint prefetch_bucket_size reduce_bucket_size reduce_scatter round_robin_gradients
        save_muon_momentum_buffer_in_memory stage stage3_allgather_sequential
        stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters
        stage3_max_reuse_distance stage3_model_persistence_threshold stage3_module_granularity_threshold
        stage3_param_persistence_threshold stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params
        sub_group_size use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce zenflow zero_hpz_partition_size
        zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights zeropp_loco_param""",
    "fp16": """auto_cast consecutive_hysteresis enabled fp16_master_weights_and_grads hysteresis initial_scale_power
        loss_scale loss_scale_window min_loss_scale""",
    "bf16": "bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow enabled immediate_grad_update",
    "tensor_parallel": """autotp_size dtype injection_policy_tuple keep_module_on_host kernel_inject partition_config
        preset_model replace_with_kernel_inject tensor_parallel tp tp_overlap_comm""",
}


def read(config: Any, ranks: int | None = None) -> Any:
    """Read quietly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return zs.from_deepspeed(config, ranks)


def fates(found: Any) -> dict[str, str]:
    return {note.key: note.fate for note in found.notes}


@pytest.mark.parametrize("section", KEYS_OF_0_19_6)
def test_every_key_that_deepspeed_validates_is_known(section: str) -> None:
    assert set(KEYS_OF_0_19_6[section].split()) <= {*RULES[section], *KEPT[section]}


@pytest.mark.parametrize("section", [name for name in RULES if name not in ("optimizer", "scheduler")])
def test_no_key_is_dropped_silently(section: str) -> None:
    for key, rule in RULES[section].items():
        config: dict[str, Any] = {key: 5, **({"enabled": True} if section == "expert_parallel" else {})}
        for name in reversed(section.split(".") if section else []):
            config = {name: config}
        path = f"{section}.{key}" if section else key
        if rule.fate == "changes results":
            with pytest.raises(ConfigError, match=rf"{path} would change the results and is not here"):
                read(config)
        else:
            assert fates(read(config))[path] == rule.fate
        if rule.fate == "not supported":
            with pytest.warns(UserWarning, match=rf"{path} = .*: not supported: "):
                zs.from_deepspeed({**CLIPPED, **config})


@pytest.mark.parametrize(
    "config",
    [
        {"amp": {"enabled": False}, "torch_autocast": {"enabled": False}, "gradient_allreduce_op": "mean"},
        {"zero_optimization": {"offload_param": {"device": "none"}, "cpu_offload": False, "zenflow": None}},
        {"zero_optimization": {"ignore_unused_parameters": True, "zero_quantized_weights": False}, "compile": {}},
        {"wall_clock_breakdown": False, "sequence_parallel_size": 1, "tensorboard": {"enabled": False}},
        {"bf16": {"enabled": False, "bf16_optimizer_states": False}, "zero_optimization": {"mics_shard_size": -1}},
        {"tensor_parallel": {"autotp_size": 0}, "expert_parallel": {"autoep_size": 4, "route_norm": True}},
        {"tensor_parallel": None, "expert_parallel": {"enabled": True, "autoep_size": 1, "top_k": "auto"}},
    ],
)
def test_what_is_off_is_no_matter(config: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = zs.from_deepspeed({**CLIPPED, **config})
    assert not found.set_aside


def test_ranks_that_split_layers_and_share_out_experts() -> None:
    found = read(
        {
            **{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}},
            "tensor_parallel": {"autotp_size": 2, "tp_overlap_comm": True, "preset_model": "llama"},
            "expert_parallel": {"enabled": True, "autoep_size": 4, "route_scale": 1.0},
        },
        ranks=4,
    )
    assert found.plan.tensor.ranks == 2 and found.plan.experts.ranks == 4 and found.plan.microbatches == 2
    assert "tensor_parallel.autotp_size = 2: kept: Plan(tensor_parallel=2)" in str(found)
    assert "expert_parallel.autoep_size = 4: kept: Plan(expert_parallel=4)" in str(found)
    with pytest.warns(UserWarning, match=r"partition_config = .*not supported: .*TensorParallel\(layers="):
        zs.from_deepspeed({**CLIPPED, "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": []}}})
    with pytest.raises(PlanError):
        read({"tensor_parallel": {"autotp_size": 2.5}})


def test_a_full_configuration(tmp_path: Path) -> None:
    config = {
        "train_batch_size": 96,
        "train_micro_batch_size_per_gpu": 3,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "zero_quantized_weights": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
        "fp16": {"enabled": True, "initial_scale_power": 12, "hysteresis": 4, "min_loss_scale": 2},
        "gradient_clipping": 0.5,
        "communication_data_type": "fp32",
        "optimizer": {"type": "Adam", "params": {"lr": 2e-4, "betas": [0.8, 0.99], "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "steps_per_print": 100,
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match=r"zero_quantized_weights = true: not supported: nothing is quant") as caught:
        found = zs.from_deepspeed(tmp_path / "ds.json", ranks=8)
    assert caught[0].filename == __file__ and len(str(caught[0].message).splitlines()) == 2
    assert found.plan == zs.Plan(
        zero=3, precision="fp16",
        loss_scale=zs.LossScale("dynamic", initial=4096.0, window=1000, hysteresis=4, floor=2),
        clip_norm=0.5, microbatches=4, reduce_dtype="fp32",
        offload="optimizer",
    )  # fmt: skip
    assert found.rows == 12
    optimizer = found.optimizer([nn.Parameter(torch.ones(2))])
    assert type(optimizer) is torch.optim.AdamW  # there, Adam decouples its decay
    assert optimizer.defaults["lr"] == 2e-4 and list(optimizer.defaults["betas"]) == [0.8, 0.99]
    schedule = found.scheduler(optimizer)
    assert schedule.get_last_lr() == [0.0] and schedule.warmup == 10
    assert "zero_optimization.stage = 3: kept: Plan(zero=3)\n" in str(found)
    assert "fp16.hysteresis = 4: kept: it starts again whenever the loss scale moves" in str(found)
    assert "fp16.loss_scale = 0: kept: Plan(loss_scale='dynamic'), by DeepSpeed's default" in str(found)


@pytest.mark.parametrize(
    "config, plan",
    [
        ({}, {"zero": 0}),
        ({"zero_optimization": True}, {"zero": 1}),
        ({"zero_optimization": {"stage": 2}}, {"zero": 2}),
        ({"communication_data_type": "FP32"}, {"reduce_dtype": "fp32"}),
        ({"bfloat16": {"enabled": True}}, {"precision": "bf16", "nonfinite": "skip"}),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, {"precision": "bf16", "nonfinite": "ignore"}),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, {"precision": "fp16", "loss_scale": 128.0}),
        ({"gradient_clipping": 0}, {"clip_norm": None}),
        ({"gradient_accumulation_steps": 4}, {"microbatches": 4, "reduce_every": "auto"}),
        ({"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 1}}, {"reduce_every": "step"}),
    ],
)
def test_plans(config: dict[str, Any], plan: dict[str, Any]) -> None:
    found = read({**CLIPPED, **config}).plan
    assert settings_of(found, plan) == plan


CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "fast/disk"}
STATES = "zero_optimization.offload_optimizer"


@pytest.mark.parametrize(
    "zero, plan",
    [
        ({"stage": 1, "offload_optimizer": CPU}, {"offload": "optimizer"}),
        ({"stage": 2, "cpu_offload": True}, {"offload": "optimizer"}),
        ({"stage": 2, "cpu_offload": True, "offload_optimizer": NVME}, {"offload.disk": "fast/disk"}),
        ({"stage": 3, "offload_optimizer": NVME}, {"offload": "optimizer", "offload.disk": "fast/disk"}),
        ({"stage": 3, "offload_optimizer": {**CPU, "ratio": 0.3}}, {"offload": "optimizer", "offload.fraction": 0.3}),
        ({"stage": 3, "offload_optimizer": {**CPU, "ratio": 1}}, {"offload": "optimizer", "offload.fraction": 1.0}),
        ({"stage": 3, "offload_optimizer": {**NVME, "ratio": 0}}, {"offload": "", "offload.disk": None}),
        (
            {"stage": 3, "offload_param": NVME, "offload_optimizer": NVME},
            {"offload": "optimizer,parameters", "offload.disk": "fast/disk", "offload.disk_parameters": True},
        ),
        ({"stage": 3, "offload_param": CPU, "offload_optimizer": CPU}, {"offload": "optimizer,parameters"}),
        ({"stage": 3, "cpu_offload": True, "cpu_offload_param": True}, {"offload": "optimizer,parameters"}),
        ({"stage": 3, "cpu_offload": True, "cpu_offload_params": True}, {"offload": "optimizer,parameters"}),
        (
            {"stage": 3, "offload_param": CPU, "offload_optimizer": {**NVME, "buffer_count": 4, "fast_init": True}},
            {"offload": "optimizer,parameters", "offload.disk": "fast/disk"},
        ),
        ({"stage": 2, "offload_optimizer": CPU, "offload_param": CPU}, {"offload": "optimizer"}),
        ({"stage": 2, "offload_param": {"device": "none", "max_in_cpu": 10}}, {"offload": ""}),
    ],
)
def test_offload_becomes_the_plans(zero: dict[str, Any], plan: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is set aside
        found = zs.from_deepspeed({**CLIPPED, "zero_optimization": zero})
    assert settings_of(found.plan, plan) == plan
    noted = {note.key.partition(".")[2] for note in found.notes}
    for section, value in zero.items():  # no key is dropped silently
        inside = {f"{section}.{key}" for key in value} if isinstance(value, dict) else {section}
        assert inside <= noted


@pytest.mark.parametrize(
    "zero, plan, told",
    [
        ({"stage": 0, "offload_optimizer": CPU}, {"offload": ""}, rf"{STATES}.device = .*take stage 1, 2 or 3"),
        *(
            (
                {"stage": 3, key: value},
                {"offload": "optimizer,parameters"},
                r"offload_param.device = .*states .* are offloaded too",
            )
            for key, value in (("offload_param", CPU), ("cpu_offload_param", True), ("cpu_offload_params", True))
        ),
        (
            {"stage": 3, "offload_param": NVME},
            {"offload": "optimizer,parameters", "offload.disk": None},
            r"offload_param.device = .*kept in host memory",
        ),
        (
            {"stage": 3, "offload_param": CPU, "offload_optimizer": {**CPU, "ratio": 0.5}},
            {"offload": "optimizer,parameters", "offload.fraction": 1.0},
            rf"{STATES}.ratio = 0.5: not supported: offload_param offloads",
        ),
        ({"stage": 2, "offload_optimizer": {"device": "auto"}}, {"offload": ""}, rf"{STATES}.device = .*left open"),
    ],
)
def test_what_offload_cannot_be_here_is_pointed_out(zero: dict[str, Any], plan: dict[str, Any], told: str) -> None:
    with pytest.warns(UserWarning, match=told):
        found = zs.from_deepspeed({**CLIPPED, "zero_optimization": zero})
    assert settings_of(found.plan, plan) == plan


@pytest.mark.parametrize(
    "zero, told",
    [
        ({"stage": 2, "offload_optimizer": {"device": "gpu"}}, rf"{STATES}.device is 'gpu', and it must be 'none', "),
        ({"stage": 2, "offload_optimizer": {"device": "nvme"}}, rf"{STATES}.nvme_path is missing"),
        ({"stage": 2, "offload_optimizer": True}, rf"{STATES} is True, and it must be an object with a device"),
        ({"stage": 2, "offload_optimizer": {**CPU, "pinmemory": True}}, "pinmemory is unknown .* did you mean "),
        (
            {"stage": 3, "offload_optimizer": {**CPU, "ratio": "half"}},
            rf"{STATES}.ratio is 'half', and it must be a num",
        ),
    ],
)
def test_wrong_offload_is_refused(zero: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read({**CLIPPED, "zero_optimization": zero})


def test_a_share_out_of_range_is_refused() -> None:
    with pytest.raises(PlanError, match=r"offload\.fraction is 2; it must be a number above 0"):
        read({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 2}}})


def test_groups_of_ranks_become_the_plans() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = zs.from_deepspeed({**CLIPPED, "zero_optimization": {"stage": 3, "mics_shard_size": 2}})
    assert found.plan.shard_group == 2
    with pytest.warns(UserWarning, match="zero_hpz_partition_size = 4: not supported: states too are sliced inside"):
        assert (
            zs.from_deepspeed({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}).plan.shard_group == 4
        )
    found = read({"zero_optimization": {"stage": 2, "mics_shard_size": -1, "zero_hpz_partition_size": 4}})
    assert found.plan.shard_group is None
    assert fates(found)["zero_optimization.zero_hpz_partition_size"] == "needs nothing"


def test_clipping_that_is_not_said_is_pointed_out() -> None:
    with pytest.warns(UserWarning, match=r"gradient_clipping = null: left open: .*before mid-2026 did not clip"):
        assert zs.from_deepspeed({}).plan.clip_norm == 1.0


@pytest.mark.parametrize(
    "total, micro, count, ranks, wanted",
    [
        (None, 4, None, None, (1, 4)),
        (None, 4, 2, None, (2, 8)),
        (64, 4, None, 2, (8, 32)),
        (64, None, 2, 4, (2, 16)),
        (64, None, None, 4, (1, 16)),
        (64, 4, 2, 8, (2, 8)),
        (64, 4, 2, None, (2, 8)),
        (64, None, 2, None, (2, None)),
        (64, 4, None, None, "give the microbatches only for a number of ranks"),
        (64, 4, 2, 4, "64 is not train_micro_batch_size_per_gpu 4 times gradient_accumulation_steps 2 times 4 ranks"),
        (64, 5, None, 4, "64 is not train_micro_batch_size_per_gpu 5 times"),
        (0, None, None, None, "train_batch_size is 0, and it must be a whole number of 1 or more"),
        (64, 4, None, 0, "ranks is 0, and it must be a whole number of 1 or more"),
    ],
)
def test_batch_arithmetic(total: Any, micro: Any, count: Any, ranks: int | None, wanted: Any) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {key: value for key, value in zip(keys, (total, micro, count), strict=True) if value is not None}
    if isinstance(wanted, str):
        with pytest.raises(ConfigError, match=wanted):
            read(config, ranks)
    else:
        found = read(config, ranks)
        assert (found.plan.microbatches, found.rows) == wanted


def test_rows_of_a_total_need_the_ranks() -> None:
    with pytest.warns(UserWarning, match="train_batch_size = 64: left open: it is over all ranks; pass ranks="):
        zs.from_deepspeed({**CLIPPED, "train_batch_size": 64})


def test_auto_is_left_open() -> None:
    found = read(
        {
            "bf16": {"enabled": "auto"},
            "gradient_clipping": "auto",
            "gradient_accumulation_steps": "auto",
            "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": 0.1}},
        }
    )
    assert {note.key for note in found.set_aside} == {
        "bf16.enabled",
        "gradient_clipping",
        "gradient_accumulation_steps",
        "optimizer.params.lr",
        "optimizer.params.weight_decay",
        "scheduler.params.warmup_num_steps",
    }
    assert found.optimizer.keywords == {"weight_decay": 0.0}
    assert found.scheduler.keywords == {"kind": "WarmupLR", "warmup_max_lr": 0.1}


@pytest.mark.parametrize(
    "optimizer, kind, weight_decay",
    [
        ({"type": "AdamW"}, torch.optim.AdamW, 0.0),
        ({"type": "AdamW", "params": {"torch_adam": True}}, torch.optim.AdamW, 0.01),
        ({"type": "adam", "params": {"weight_decay": 0.3}}, torch.optim.AdamW, 0.3),
        ({"type": "Adam", "params": {"adam_w_mode": False, "bias_correction": True}}, torch.optim.Adam, 0.0),
        ({"type": "Adagrad", "params": {"lr": 0.1}, "legacy_fusion": False}, torch.optim.Adagrad, 0),
        ({"type": "SGD", "params": {"momentum": 0.9}}, torch.optim.SGD, 0),
    ],
)
def test_optimizers(optimizer: dict[str, Any], kind: type, weight_decay: float) -> None:
    found = read({"optimizer": optimizer}).optimizer([nn.Parameter(torch.ones(2))])
    assert type(found) is kind
    assert found.defaults["weight_decay"] == weight_decay


def test_a_schedule_of_torch() -> None:
    found = read({"scheduler": {"type": "StepLR", "params": {"step_size": 3}}})
    schedule = found.scheduler(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0))
    assert type(schedule) is torch.optim.lr_scheduler.StepLR and schedule.step_size == 3


@pytest.mark.parametrize(
    "config, message",
    [
        ({"zero_optimisation": {"stage": 3}}, "zero_optimisation is unknown to DeepSpeed too; did you mean zero_opt"),
        ({"stage": 3}, r"stage is unknown to DeepSpeed too; did you mean zero_optimization\.stage"),
        ({"zero_optimization": {"stag": 3}}, r"zero_optimization\.stag is unknown .* zero_optimization\.stage"),
        ({"zero_optimization": {"xyzzy": 1}}, r"zero_optimization\.xyzzy is unknown to DeepSpeed too; remove it"),
        (
            {"optimizer": {"type": "Lamb"}},
            r"'Lamb' is not in torch.optim. zs.optim.LAMB is .*partial\(zs.optim.LAMB",
        ),
        ({"optimizer": {"type": "OneBitAdam"}}, r"'OneBitAdam' .*, nor .* of zs.optim \(LAMB, .*makes another run"),
        ({"tensor_parallel": {"autotp_size": "two"}}, r"tensor_parallel.autotp_size is 'two', and it must be a number"),
        ({"tensor_parallel": {"autotp": 2}}, r"tensor_parallel.autotp is unknown .*did you mean .*autotp_size"),
        ({"tensor_parallel": 2}, "tensor_parallel is 2, and it must be an object"),
        ({"expert_parallel": {"enabled": True, "top_k": 1}}, r"expert_parallel.top_k .*routing is that of the model"),
        ({"optimizer": {"type": "Optimizer"}}, "'Optimizer' is not in torch.optim"),
        ({"optimizer": {"params": {}}}, "None is not in torch.optim"),
        ({"optimizer": {"type": "SGD", "params": {"momentun": 1}}}, r"params\.momentun is unknown; did you mean mom"),
        ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, "bias_correction false is not in"),
        ({"optimizer": {"type": "SGD", "parms": {}}}, r"optimizer\.parms is unknown .* optimizer\.params"),
        ({"scheduler": {"type": "OneCycle"}}, "'OneCycle' is not here. Remove the section"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "total_num_steps is missing, and WarmupDecayLR needs it"),
        ({"scheduler": {"type": "WarmupLR", "params": {"steps": 3}}}, r"scheduler\.params\.steps is unknown"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16 and fp16 are both enabled"),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, "bf16 and bfloat16 are the same section"),
        ({"bf16": True}, "bf16 is True, and it must be an object"),
        ({"gradient_clipping": "yes"}, "gradient_clipping is 'yes', and it must be a number"),
        ({"fp16": {"enabled": True, "loss_scale": False}}, r"fp16\.loss_scale is False, and it must be a number"),
    ],
)
def test_what_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(config)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read({"stge": 1, "amp": {"enabled": True}, "zero_optimization": {"stage": 3, "foo": 1}})
    assert len(str(caught.value).splitlines()) == 4


def test_values_out_of_range_are_the_plans_matter() -> None:
    with pytest.raises(PlanError, match="zero is 4"):
        read({"zero_optimization": {"stage": 4}})


@pytest.mark.parametrize(
    "text, message",
    [
        ("{ // Hjson\n}", "is no JSON .* remove comments"),
        ('{"fp16": {}, "fp16": {}}', "says fp16 more than once"),
        ("[]", "holds a list"),
        (None, "cannot be read"),
    ],
)
def test_files_that_are_no_configuration(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read(str(tmp_path / "ds.json"))


def trained(mesh: zs.Mesh, config: dict[str, Any]) -> dict[str, Tensor]:
    model = network()
    engine = zs.Engine(model, adamw(model), read(config).plan, mesh=mesh)
    for step in range(STEPS):
        rows = tokens(step, mesh.rank)
        engine.backward(nn.functional.cross_entropy(engine(rows).float(), rows))
        engine.step()
    return engine.state_dict()


@pytest.mark.parametrize("stage", [2, 3])
def test_training_by_it_ends_at_deepspeeds_weights(pool: Pool, stage: int) -> None:
    folder = REAL / f"stage{stage}"  # stage 2 in fp32, stage 3 in bf16
    config = load_inert(folder / "global_step3" / f"{'bf16_' if stage == 3 else ''}{SLICE}")["ds_config"]
    wanted = load_file(folder / "expected.safetensors")
    start = network().state_dict()
    for state in pool.run(trained, 2, config):
        for name, value in state.items():
            close = {"rtol": 1e-5, "atol": 1e-6} if stage == 2 else {"rtol": 8e-3, "atol": 1e-3}
            torch.testing.assert_close(value.float(), wanted[name].float(), **close)
        moved = [name for name in start if not torch.equal(start[name].to(state[name].dtype), state[name])]
        assert set(moved) == {"embed.weight", "head.weight", "mid.weight", "mid.bias", "scale", "calls"}


SLICE = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
