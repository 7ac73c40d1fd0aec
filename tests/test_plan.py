"""A plan holds what was said, refuses what cannot be, and says how to go on."""

import dataclasses
import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard import Plan
from zeroshard.errors import PlanError
from zeroshard.offload.policy import Offload
from zeroshard.pipeline.policy import Pipeline
from zeroshard.planning.settings import flat
from zeroshard.precision.policy import LossScale

INF, NAN = math.inf, math.nan
WRONG: dict[str, list[Any]] = {
    "zero": [4, -1, True, "2", None, [1]],
    "precision": ["fp8", "FP32", None, 16],
    "fp32_modules": ["LayerNorm", 7, None, (7,)],
    "transport": ["gloo", None],
    "shard_group": [0, 1.5, True],
    "reduce_dtype": ["fp64", 32],
    "loss_scale": ["fixed", 0, -1.0, INF, NAN, None, True],
    "loss_scale.initial": [0, -1.0, INF, NAN, "big", None],
    "loss_scale.growth": [0.5, INF, NAN, "fast", None],
    "loss_scale.backoff": [0, 1.5, -0.5, NAN, "slow", None],
    "loss_scale.window": [0, -1, 1.5, "long", None],
    "loss_scale.hysteresis": [0, -1, 1.5, "much", None],
    "loss_scale.floor": [0, -1.0, INF, NAN, "low", None],
    "microbatches": [0, -1, 1.5, "2", True, None],
    "pipeline_parallel": [0, -1, 1.5, "2", True, None],
    "pipeline_parallel.schedule": ["fifo", None, 1],
    "pipeline_parallel.virtual_stages": [0, -1, 1.5, "2", True, None],
    "pipeline_parallel.replicas": [(1,), (1, 0), 7, "12"],
    "pipeline_parallel.split": ["blocks.1", 7, (7,)],
    "pipeline_parallel.balance": ["luck", None],
    "activations": ["all", "auto", None, True],
    "activations.operations": ["norms", ("adds",), 7],
    "activations.save_sums": [1, "yes", None],
    "activations.compress": ["fp8", ("zip",), 7, ("fp8", "int4"), ("inplace",)],
    "activations.partition": [1, "host", None],
    "activations.arena": [1, "auto", None],
    "pipeline_parallel.vertical_sync": [True, 1, "yes"],
    "tensor_parallel": [0, -1, 1.5, "2", True, None],
    "tensor_parallel.sequence": [1, "yes", None],
    "expert_parallel": [0, -1, 1.5, "2", True, None],
    "expert_parallel.two_level": [1, "yes", None],
    "tensor_parallel.layers": [7, "up", ("up",), ("=column",), ("up=",)],
    "loss_chunk": [0, -1, 1.5, "2", True],
    "reduce_every": ["epoch", None, 1],
    "rng": ["slow", None, True],
    "clip_norm": [0, -1.0, INF, NAN, "1", True],
    "nonfinite": ["stop", None],
    "units": ["Block", 7, (7,)],
    "ignored": ["Block", 7, None, (7,)],
    "seed": ["x", 1.5, None],
    "offload": ["disk", "optimizer,disk", 7, None, ["optimizer"], True],
    "offload.fraction": [0, 2, -0.5, NAN, "half", None],
    "offload.disk": ["fast/disk", "", 7],
    "offload.disk_parameters": [True, 1, "yes", None],
    "offload.moments": ["fp16", 8, None],
    "offload.delayed_update": [True, 1, "yes", None],
    "offload.delayed_warmup": [-1, 1.5, "long", True, None],
    "offload.speculate": [0, "no", None],
    "overlap_gather": (1, "yes"),
    "strict": (1, "yes"),
    "device_memory": ["lots", "", "12 parsecs", -1, True],
    "timeout": [0, -1, INF, NAN, "soon", None],
}
GOOD: dict[str, list[Any]] = {
    "zero": [0, 1, 2, 3],
    "precision": ["fp32", "bf16", "fp16"],
    "fp32_modules": [(), ("LayerNorm", "head")],
    "reduce_dtype": [None, "fp32", "bf16", "fp16"],
    "loss_scale": ["auto", "dynamic", "off", 128.0, 1],
    "loss_scale.growth": [1.0, 4],
    "loss_scale.backoff": [1.0, 0.25],
    "microbatches": [1, 3],
    "loss_chunk": [None, 1, 512],
    "reduce_every": ["auto", "microbatch"],
    "clip_norm": [None, 1, 0.5],
    "nonfinite": ["raise", "skip", "ignore"],
    "units": [None, (), ("Block",)],
    "ignored": [(), ("tower", "blocks.*.gate")],
    "seed": [0, -3, 2**40],
    "rng": ["fast", "exact"],
    "device_memory": [None, 1, "512MiB"],
    "offload": ["", "activations"],
    "offload.speculate": [True, False],
    "offload.delayed_warmup": [0, 100],
}
PLANS = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in GOOD.items()}).filter(
    lambda d: (
        not (d.get("precision") == "fp16" and d.get("loss_scale") == "off" and d.get("nonfinite", "raise") == "raise")
    )
)


def test_every_field_has_a_wrong_value_here() -> None:
    settings = dict(flat(Plan().as_dict()))
    firsts = {
        "pipeline_parallel.stages": "pipeline_parallel",
        "tensor_parallel.ranks": "tensor_parallel",
        "expert_parallel.ranks": "expert_parallel",
        "activations.recompute": "activations",
        "offload.parts": "offload",
        "loss_scale.value": "loss_scale",
    }
    assert set(WRONG) == {firsts.get(name, name) for name in settings}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_named_with_the_way_out(name: str, value: Any) -> None:
    with pytest.raises(PlanError, match=r"must be|must have|write|use|set ") as error:
        Plan.from_dict({name: value})
    assert name.partition(".")[2] in str(error.value) or name in str(error.value)


@pytest.mark.parametrize("name, value", [(name, value) for name, values in GOOD.items() for value in values])
def test_a_right_value_is_kept(name: str, value: Any) -> None:
    plan = Plan.from_dict({name: value})
    assert dict(flat(plan.as_dict())).get(name, getattr(plan, name.partition(".")[0])) == value


def test_groups_and_their_short_forms_are_equal() -> None:
    assert Plan(pipeline_parallel=Pipeline(2)) == Plan(pipeline_parallel=2)
    assert Plan(pipeline_parallel=Pipeline(2)).pipeline_parallel == 2
    assert Plan(pipeline_parallel={"stages": 2, "schedule": "gpipe"}) == Plan(
        pipeline_parallel=Pipeline(2, schedule="gpipe")
    )
    assert Plan(offload=Offload("optimizer")) == Plan(offload="optimizer")
    assert Plan(loss_scale=LossScale(128.0)) == Plan(loss_scale=128.0)
    assert hash(Plan(pipeline_parallel=Pipeline(2, split=["a"]))) == hash(
        Plan(pipeline_parallel=Pipeline(2, split=("a",)))
    )


def test_a_plan_shows_settings_that_differ_from_the_defaults() -> None:
    assert repr(Plan()) == "Plan()"
    assert repr(Plan(zero=3, offload="optimizer", pipeline_parallel=2)) == (
        "Plan(zero=3, pipeline_parallel=2, offload='optimizer')"
    )
    plan = Plan(pipeline_parallel=Pipeline(2, schedule="gpipe"), loss_scale=LossScale(window=10))
    assert repr(plan) == (
        "Plan(loss_scale=LossScale(window=10), pipeline_parallel=Pipeline(stages=2, schedule='gpipe'))"
    )
    names = {"Plan": Plan, "Pipeline": Pipeline, "LossScale": LossScale}
    assert eval(repr(plan), names) == plan


def test_settings_of_a_group_are_changed_by_their_names() -> None:
    plan = Plan(pipeline_parallel=Pipeline(4, schedule="gpipe"), offload="optimizer")
    other = plan.with_settings({"pipeline_parallel.split": ("a", "b", "c"), "offload.fraction": 0.5, "zero": 1})
    assert other.pipeline == Pipeline(4, schedule="gpipe", split=("a", "b", "c"))
    assert (other.zero, other.offloading) == (1, Offload("optimizer", fraction=0.5))


def test_a_plan_of_an_earlier_version_is_upgraded() -> None:
    stored = {
        **{"zero": 2, "shard_ranks": 2, "stages": 2, "schedule": "interleaved", "chunks": 2, "replicas": None},
        **{"split": [], "balance": "parameters", "vertical_sync": False, "microbatches": 4, "loss_scale": "auto"},
        **{"loss_scale_initial": 1024.0, "loss_scale_growth": 2.0, "loss_scale_backoff": 0.5, "loss_scale_window": 7},
        **{"loss_scale_hysteresis": 1, "loss_scale_floor": 1.0, "offload": "optimizer", "offload_share": 0.5},
        **{"offload_disk": None, "offload_disk_parameters": False, "offload_moments": "8bit", "delayed_update": False},
        **{"delayed_warmup": 3, "speculate": False},
    }
    assert Plan.from_dict(stored) == Plan(
        shard_group=2,
        microbatches=4,
        pipeline_parallel=Pipeline(2, schedule="interleaved", virtual_stages=2, balance="parameters"),
        loss_scale=LossScale(initial=1024.0, window=7),
        offload=Offload("optimizer", fraction=0.5, moments="8bit", delayed_warmup=3, speculate=False),
    )


def test_settings_that_no_version_knows_are_refused() -> None:
    with pytest.raises(PlanError, match="a setting 'stage', and this version knows zero"):
        Plan.from_dict({"stage": 3})
    with pytest.raises(PlanError, match="offload has no setting 'share'; its settings are parts, fraction"):
        Plan(offload={"parts": "optimizer", "share": 0.5})


BELOW: dict[str, Any] = {"offload": "optimizer"}


@pytest.mark.parametrize(
    "values, told",
    [
        (
            {**BELOW, "pipeline_parallel": 2, "pipeline_parallel.schedule": "pipedream"},
            r"offload='optimizer' and schedule='pipedream' do not comb",
        ),
        ({"offload": "optimizer,parameters", "zero": 2}, r"with zero=2 does not combine.*Use zero=3"),
        ({"offload": "parameters", "zero": 3}, r"offload='parameters' with zero=3 does not combine"),
        ({"offload": "optimizer,parameters", "zero": 3, "offload.fraction": 0.5}, r"Leave fraction out"),
        ({"offload": "activations", "offload.disk": "fast/disk"}, r"offload.disk='fast/disk' is for offloaded opt"),
        ({"offload.moments": "8bit"}, r"offload.moments='8bit' is for offloaded optimizer states; set offload="),
        *(
            ({**BELOW, "offload.fraction": share}, r"offload.fraction is .*above 0 and at most 1")
            for share in (0, 2, NAN, "x")
        ),
        *(({**BELOW, "offload.disk": folder}, r"offload.disk is .*must be the path") for folder in ("", 7)),
        *(
            ({**BELOW, "offload.delayed_update": value}, r"delayed_update is .*must be True or")
            for value in (1, "yes", None)
        ),
    ],
)
def test_offload_that_cannot_be(values: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        Plan.from_dict(values)


def test_what_is_offloaded() -> None:
    assert Plan().offloading.kinds == frozenset()
    assert Plan(offload=" optimizer, activations").offloading.kinds == {"optimizer", "activations"}
    everything = {"offload": "optimizer,parameters,activations", "zero": 3, "offload.disk": "fast/disk"}
    assert (
        len(
            Plan.from_dict(
                {**everything, "offload.delayed_update": True, "offload.delayed_warmup": 0, "offload.moments": "8bit"}
            ).offloading.kinds
        )
        == 3
    )


def test_a_list_of_names_becomes_a_tuple() -> None:
    plan = Plan(units=["Block"], fp32_modules=["LayerNorm"])
    assert (plan.units, plan.fp32_modules) == (("Block",), ("LayerNorm",))
    hash(plan)


def test_settings_that_do_not_combine() -> None:
    with pytest.raises(PlanError, match=r"loss_scale='off'.*bf16"):
        Plan(precision="fp16", loss_scale="off")
    Plan(precision="fp16", loss_scale="off", nonfinite="skip")
    Plan(precision="bf16", loss_scale="off")


@pytest.mark.parametrize("zero, microbatches", list(itertools.product(range(4), (1, 2))))
def test_reductions_once_a_step_need_several_microbatches(zero: int, microbatches: int) -> None:
    if microbatches == 1 and zero >= 2:
        with pytest.raises(PlanError, match=r"reduce_every='step'.*microbatches"):
            Plan(zero=zero, microbatches=microbatches, reduce_every="step")
    else:
        assert Plan(zero=zero, microbatches=microbatches, reduce_every="step").reductions == 1


@pytest.mark.parametrize(
    "zero, reduce_every, reductions",
    [(0, "auto", 1), (0, "microbatch", 4), (0, "step", 1)]
    + [(zero, *rest) for zero in (1, 2, 3) for rest in (("auto", 4), ("microbatch", 4), ("step", 1))],
)
def test_reductions_of_four_microbatches(zero: int, reduce_every: str, reductions: int) -> None:
    plan = Plan(zero=zero, microbatches=4, reduce_every=reduce_every)
    assert plan.reductions == reductions
    assert plan.reduces_each_microbatch is (reductions == 4)


@pytest.mark.parametrize(
    "loss_scale, scaled",
    [
        ("auto", {"fp32": False, "bf16": False, "fp16": True}),
        ("dynamic", {"fp32": True, "bf16": True, "fp16": True}),
        (128.0, {"fp32": True, "bf16": True, "fp16": True}),
        ("off", {"fp32": False, "bf16": False, "fp16": False}),
    ],
)
def test_when_the_loss_is_scaled(loss_scale: float | str, scaled: dict[str, bool]) -> None:
    for precision, expected in scaled.items():
        plan = Plan(precision=precision, loss_scale=loss_scale, nonfinite="skip")
        assert plan.scales_loss is expected


def test_a_plan_is_frozen_and_made_by_keyword() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan().zero = 3
    with pytest.raises(PlanError, match=r"0 values without a name, and was given 2; write Plan\(zero=2\)"):
        Plan(2)


@settings(derandomize=True, deadline=None)
@given(PLANS)
def test_a_plan_survives_json(values: dict[str, Any]) -> None:
    plan = Plan.from_dict(values)
    assert Plan.from_dict(plan.as_dict()) == plan
    assert Plan.from_dict(json.loads(json.dumps(plan.as_dict()))) == plan


def test_a_budget_is_a_size() -> None:
    assert Plan(device_memory="1.5GiB").device_budget == 1_610_612_736
    with pytest.raises(PlanError, match=r"device_memory is '1 PB'.*KiB, MiB, GiB"):
        Plan(device_memory="1 PB")


def test_no_budget() -> None:
    assert Plan().device_budget is None
