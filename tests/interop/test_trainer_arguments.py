"""Every training argument has a fate: the trainer reads it, the plan takes it over, or it is refused by its name."""

import dataclasses
import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest

import zeroshard as zs
from zeroshard.errors import ConfigError, PlanError
from zeroshard.interop.trainer_arguments import FIELDS, Field, plan_of, plan_of_fsdp

for needed in ("transformers", "accelerate", "trl"):
    pytest.importorskip(needed)
KINDS = (
    *("transformers.TrainingArguments", "transformers.Seq2SeqTrainingArguments"),
    *("trl.SFTConfig", "trl.DPOConfig", "trl.RewardConfig", "trl.KTOConfig", "trl.GRPOConfig", "trl.RLOOConfig"),
)
REFUSED: dict[str, Any] = {  # a value of each argument that is refused, and words of the way out
    "torch_compile_mode": ("reduce-overhead", "max-autotune-no-cudagraphs"),
    "bf16_full_eval": (True, "the plan's precision"),
    "fp16_full_eval": (True, "the plan's precision"),
    "use_liger_kernel": (True, "loss_chunk"),
    "liger_kernel_config": ({"rope": True}, "loss_chunk"),
    "auto_find_batch_size": (True, "Plan.auto"),
    "save_on_each_node": (True, "one folder"),
    "enable_jit_checkpoint": (True, "zeroshard run"),
    "debug": ("underflow_overflow", "zeroshard verify"),
    "ddp_broadcast_buffers": (True, "each rank"),
    "parallelism_config": (object(), "the plan divides"),
    "deepspeed": ("ds_config.json", "zs.from_deepspeed"),
    "optim": ("lomo", "adamw_torch"),
    "sync_ref_model": (True, "zero=2"),
    "use_vllm": (True, "leave it out"),
    "use_transformers_continuous_batching": (True, "leave it out"),
    "use_transformers_paged": (True, "leave it out"),
    "cast_lm_head_to_fp32": (True, "precisions"),
    "activation_offloading": (True, "offload='activations'"),
}
AFTERWARDS = {"parallelism_config", "deepspeed", "enable_jit_checkpoint", "optim"}  # which need packages or devices


def kind_of(name: str) -> Any:
    """The class of training arguments of this name."""
    package, _, kind = name.partition(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that are imported
        return getattr(importlib.import_module(package), kind)


def fields_of(name: str) -> set[str]:
    """The names of the fields of a class of training arguments."""
    return {field.name for field in dataclasses.fields(kind_of(name))}


def made(folder: Path, kind: str = KINDS[0], **settings: Any) -> Any:
    """Arguments, of which some are set after the checks of transformers."""
    later = {name: settings.pop(name) for name in AFTERWARDS & settings.keys()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = kind_of(kind)(output_dir=str(folder), use_cpu=True, report_to="none", **settings)
    vars(arguments).update(later)
    return arguments


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_has_a_fate(kind: str) -> None:
    assert fields_of(kind) <= FIELDS.keys()


def test_every_fate_is_of_a_field() -> None:
    assert FIELDS.keys() == set().union(*map(fields_of, KINDS))


def test_every_refusal_has_a_case_below() -> None:
    refused = {name for name, field in FIELDS.items() if field.fate == "refused" or field.refuses is not None}
    assert refused == set(REFUSED)


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_refused_nowhere(tmp_path: Path, kind: str) -> None:
    plan = plan_of(made(tmp_path, kind), zs.Plan(zero=3))
    assert plan == zs.Plan(zero=3, precision="bf16" if kind.startswith("trl") else "fp32")  # TRL's own default


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_argument_and_the_way_out(tmp_path: Path, name: str) -> None:
    value, way_out = REFUSED[name]
    kind = next(kind for kind in KINDS if name in fields_of(kind))
    with pytest.raises(ConfigError, match=name) as caught:
        plan_of(made(tmp_path, kind, **{name: value}), zs.Plan(zero=3))
    assert way_out in str(caught.value)


@pytest.mark.parametrize("optimizer", ["adamw_torch_8bit", "adamw_torch_4bit", "adalomo"])
def test_optimizers_whose_steps_are_no_steps_of_slices(tmp_path: Path, optimizer: str) -> None:
    with pytest.raises(ConfigError, match=f"{optimizer}.* is not carried out by an engine: .*take adamw_torch"):
        plan_of(made(tmp_path, optim=optimizer), zs.Plan(zero=2))


def test_a_field_of_a_newer_version_is_refused_once_it_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FIELDS, "data_seed")
    plan_of(made(tmp_path), None)
    with pytest.raises(ConfigError, match="data_seed=3 is an argument that this version does not know"):
        plan_of(made(tmp_path, data_seed=3), None)


def test_fields_of_a_users_own_class_are_the_users(tmp_path: Path) -> None:
    own = dataclasses.make_dataclass("Own", [("rows", int, 3)], bases=(kind_of(KINDS[0]),))
    assert plan_of(own(str(tmp_path), use_cpu=True, rows=5), zs.Plan(zero=1)) == zs.Plan(zero=1)
    with pytest.raises(ConfigError, match=r"Own\.bf16_full_eval=True is not carried out"):
        plan_of(own(str(tmp_path), use_cpu=True, rows=5, bf16_full_eval=True), None)


def test_an_argument_without_an_effect_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="ddp_bucket_cap_mb=25 has no effect"):
        plan_of(made(tmp_path, ddp_bucket_cap_mb=25), None)


def test_precisions_become_those_of_the_plan(tmp_path: Path) -> None:
    assert plan_of(made(tmp_path, bf16=True), zs.Plan(zero=1)) == zs.Plan(zero=1, precision="bf16")
    assert plan_of(made(tmp_path, fp16=True), None).precision == "fp16"
    assert plan_of(made(tmp_path), zs.Plan(precision="bf16")).precision == "bf16"
    with pytest.raises(PlanError, match="asks for bf16, and the plan for precision='fp16'"):
        plan_of(made(tmp_path, bf16=True), zs.Plan(precision="fp16"))


def test_fsdp_becomes_a_plan(tmp_path: Path) -> None:
    config = {
        "cpu_offload": True,
        "activation_checkpointing": True,
        "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    }
    plan = plan_of(made(tmp_path, fsdp=True, fsdp_config=config), None)
    blocks = ("LlamaDecoderLayer",)
    assert plan == zs.Plan(zero=3, offload="optimizer,parameters", recompute="blocks", units=blocks)
    assert plan_of(made(tmp_path, fsdp=True, fsdp_config={"reshard_after_forward": False}), None) == zs.Plan(zero=2)
    assert plan_of_fsdp({"fsdp_version": 1, "fsdp_reshard_after_forward": "no_shard"}) == zs.Plan(zero=0)
    for wrong, words in (
        ({"reshard_after_forward": "hybrid_shard"}, "shard_group"),
        ({"xla": True}, "XLA"),
        ({"sharding": 3}, "which no plan carries out"),
    ):
        with pytest.raises(ConfigError, match=words):
            plan_of_fsdp(wrong)
    with pytest.raises(PlanError, match="both divide the states"):
        plan_of(made(tmp_path, fsdp=True), zs.Plan())


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (zs.Plan(pipeline_parallel=2, microbatches=2), "the loop is not the engine's"),
        (zs.Plan(tensor_parallel=2), "the same rows"),
        (zs.Plan(clip_norm=1.0), "both clip"),
    ],
)
def test_plans_that_do_not_go_with_a_trainer(tmp_path: Path, plan: zs.Plan, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan_of(made(tmp_path), plan)


def test_a_plan_is_a_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"plan is 'zero3', a str; pass a plan, such as zs.Plan\(zero=3\)"):
        plan_of(made(tmp_path), "zero3")  # type: ignore[arg-type]


def test_fields_say_why() -> None:
    assert all(field.text for field in FIELDS.values() if field.fate in ("needless", "refused"))
    assert isinstance(FIELDS["bf16"], Field) and FIELDS["bf16"].fate == "plan"
