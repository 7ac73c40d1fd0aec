"""The answer of `zeroshard plan`: options and Python that give the same plan, its speed, and the nearest ways."""

import ast
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from predictions import GIB, prediction

import zeroshard as zs
from zeroshard.cli.plan_answer import answer_lines, option_line, python_line
from zeroshard.cli.plan_options import PlanOptions, precision_for
from zeroshard.doctor.hardware import Machines
from zeroshard.planner.predict.result import Found
from zeroshard.planner.search.text import why_first
from zeroshard.train.config import TrainConfig
from zeroshard.train.family import gpt_task
from zeroshard.train.options import parse
from zeroshard.train.sizes import GPTConfig

MACHINES = Machines.of("A100-80", 8)
TASK = gpt_task(GPTConfig(vocabulary=64, context=32, width=64, heads=4, layers=2))
PLANS = [
    zs.Plan(zero=3, precision="bf16", microbatches=2, clip_norm=1.0),
    zs.Plan(
        zero=1, pipeline_parallel=zs.Pipeline(2, split=("blocks.1",)), microbatches=2, clip_norm=1.0, shard_group=4
    ),
    zs.Plan(offload=zs.Offload("optimizer", disk="a folder", speculate=False), recompute="blocks", clip_norm=None),
    zs.Plan(tensor_parallel=2, clip_norm=1.0, overlap_gather=False, reduce_every="auto", loss_chunk=1024),
]


@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
def test_the_option_line_and_the_python_line_give_the_plan(plan: zs.Plan) -> None:
    one = prediction(plan)
    program, command, *words = shlex.split(option_line(one, TASK, PlanOptions(gpu="A100-80")))
    config = parse(TrainConfig, words, "zeroshard train")
    assert (program, command, config.plan) == ("zeroshard", "train", plan)
    assert (config.batch_per_rank, config.ranks) == (4, 8)
    line = python_line(plan)
    assert ast.parse(line) and eval(line, {"zs": zs}) == plan


def lines(*best: Any, ways: tuple[str, ...] = ()) -> str:
    found = Found(best, (), 3, 1.0, ways)
    return "\n".join(answer_lines(found, TASK, MACHINES, PlanOptions(gpu="A100-80")))


def test_the_first_plan_has_a_reason_a_speed_and_its_trade() -> None:
    exact, rounded = prediction(PLANS[0]), replace(prediction(PLANS[0]), optimizer="adamw8bit")
    assert "Plan 1: peak 15.00 GiB of 20.00 GiB, 78,019 tokens/s, " in lines(exact)
    assert "3.6 hours per billion tokens" in lines(exact)
    assert why_first([exact, rounded]) == "Plan 1 is first because it is the fastest that changes no result."
    assert "other results by adamw8bit" in lines(rounded) and "--optimizer adamw8bit" in lines(rounded)
    assert lines(exact, rounded).count("--optimizer") == 1
    tight = replace(exact, host={"optimizer states": GIB}, host_bytes=3 * GIB, host_capacity_bytes=2 * GIB)
    assert tight.fits and "1.00 GiB of host memory on each node" in lines(tight)
    assert "training waits for each checkpoint" in lines(tight)


def test_a_plan_with_other_results_that_is_much_faster_is_named_and_ready_to_copy() -> None:
    slow = prediction(PLANS[0])
    rounded = replace(slow, optimizer="adamw8bit", causes={name: each / 30 for name, each in slow.causes.items()})
    why = why_first([slow, slow, rounded])
    assert why.endswith("as many as plan 2. Plan 3 has 30 times as many, with other results by adamw8bit.")
    assert "Plan 3: " in lines(slow, slow, rounded) and "--optimizer adamw8bit" in lines(slow, slow, rounded)
    assert "Plan 3" not in why_first([rounded, slow, slow])


def test_adapters_are_a_command_beside_pretrained_weights_and_lines_of_peft_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, python = replace(prediction(PLANS[0]), adapters="QLoRA of rank 8"), "peft.LoraConfig(r=8, lora_alpha=16"
    options = PlanOptions(gpu="A100-80", model=str(tmp_path))
    without = "\n".join(answer_lines(Found((one,), (), 3, 1.0), TASK, MACHINES, options))
    assert "zeroshard train" not in without and python in without
    (tmp_path / "model.safetensors").touch()
    (line,) = (each for each in answer_lines(Found((one,), (), 3, 1.0), TASK, MACHINES, options) if " train " in each)
    config = parse(TrainConfig, shlex.split(line)[2:], "zeroshard train")
    assert (config.model, config.adapters, config.adapter_rank) == (str(tmp_path), "qlora", 8)
    assert config.plan == PLANS[0]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").symlink_to(tmp_path)  # a folder named as a built-in size, which the command trains
    named = replace(options, model="gpt2")
    assert "zeroshard train" not in "\n".join(answer_lines(Found((one,), (), 3, 1.0), TASK, MACHINES, named))


def test_without_a_plan_there_are_ways() -> None:
    assert lines(ways=("two", "three")) == "The nearest ways:\n  1. two\n  2. three"


def test_the_precision_is_the_given_one_or_that_of_the_device_and_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    said = {"model": str(file), "gpu": "A100-80"}
    for dtype, wanted in (("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "bf16")):
        file.write_text(f'{{"torch_dtype": "{dtype}"}}')
        assert precision_for(PlanOptions(**said), MACHINES) == wanted
    assert precision_for(PlanOptions(gpu="A100-80"), MACHINES) == "bf16"
    assert precision_for(PlanOptions(gpu="V100-16"), Machines.of("V100-16", 1)) == "fp16"
    assert precision_for(PlanOptions(gpu="A100-80", precision="fp32"), MACHINES) == "fp32"
    slow = replace(MACHINES, device=replace(MACHINES.device, kind="cpu"))
    assert precision_for(PlanOptions(), slow) == "fp32"
