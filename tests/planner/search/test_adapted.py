"""Adapters in a search: where no plan trains every weight, or where they are asked for."""

from dataclasses import replace

import pytest

from zeroshard.doctor.hardware import Machines
from zeroshard.plan import Plan
from zeroshard.planner.search.adapted import peft_lines, with_adapters
from zeroshard.planner.search.search import search
from zeroshard.planner.search.text import changes, describe, named
from zeroshard.planning.adapters import Adapters
from zeroshard.train.family import gpt_task
from zeroshard.train.sizes import GPTConfig

CONFIG = GPTConfig(vocabulary=512, context=64, width=512, heads=8, layers=3)
A100 = Machines.of("A100-80", 1)
BF16 = Plan(precision="bf16")


def card(nbytes: int) -> Machines:
    """One device with so many bytes for tensors, and hardly any host memory."""
    device = replace(A100.device, memory_bytes=A100.device.overhead_bytes + nbytes)
    return replace(A100, device=device, host_memory=2**25)


def test_adapters_come_last_and_are_marked_beside_the_nearest_ways() -> None:
    found = search(replace(gpt_task(CONFIG), others={}), card(2**26), BF16)
    assert {one.adapters for one in found.best} == {"LoRA of rank 16", "QLoRA of rank 16"}
    assert all(one.fits and changes(one) == (one.adapters,) for one in found.best)
    assert all(named(one).startswith(one.adapters) and named(one) in describe(one)[0] for one in found.best)
    assert any(" x A100-80 (" in way for way in found.ways)


def test_no_adapters_are_tried_where_every_weight_can_be_trained() -> None:
    roomy = search(replace(gpt_task(CONFIG), others={}), card(2**33), BF16)
    assert roomy.best and not any(one.adapters for one in roomy.best) and not roomy.ways


def test_adapters_that_are_asked_for_are_searched_as_any_task() -> None:
    found = search(with_adapters(gpt_task(CONFIG), Adapters("qlora", 64)), card(2**30), BF16)
    assert found.best[0].adapters == "QLoRA of rank 64" and not found.ways
    widths = 512 * (1 + 3) + 512 * (1 + 1) + 512 * (1 + 4) * 2  # inputs and outputs of a block's layers
    assert found.best[0].memory["optimizer states"] == 8 * 64 * widths * CONFIG.layers


@pytest.mark.whole
def test_the_weights_come_from_host_memory_where_the_device_cannot_hold_them_in_4_bits() -> None:
    deep = gpt_task(replace(CONFIG, layers=24))
    found = search(replace(deep, others={}), replace(card(2**25), host_memory=2**28), BF16)
    assert found.best and all(one.plan.offloading.parameters for one in found.best)
    assert {one.adapters for one in found.best} == {"LoRA of rank 16"}


def test_peft_makes_such_models() -> None:
    assert peft_lines(Adapters("lora", 8)) == [
        'model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))'
    ]
    packed, _ = peft_lines(Adapters("qlora"))
    assert "load_in_4bit" in packed
