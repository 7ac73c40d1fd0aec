"""The nearest ways where no plan fits: host memory and devices, each with enough for what it names."""

from dataclasses import replace

import pytest
import torch

from zeroshard.doctor.hardware import Machines
from zeroshard.plan import Plan
from zeroshard.planner.search.search import search
from zeroshard.planner.search.text import changes
from zeroshard.text import parse_bytes
from zeroshard.train.family import gpt_task
from zeroshard.train.sizes import GPTConfig

CONFIG = GPTConfig(vocabulary=512, context=64, width=512, heads=8, layers=6)


def test_ways_name_what_they_need_and_fit_with_it() -> None:
    one = Machines.of("A100-80", 1)
    device = replace(one.device, memory_bytes=one.device.overhead_bytes + 2**27)
    machines = replace(one, device=device, host_memory=2**25)
    task, base = gpt_task(CONFIG), Plan(precision="bf16")
    found = search(task, machines, base)
    assert not found.best
    more_host, *_ = (way for way in found.ways if "of host memory on each node: zero 3" in way)
    assert any(way.startswith("4 x A100-80") for way in found.ways)
    needed = parse_bytes(more_host.partition(" of host")[0].replace(" ", ""))
    again = search(task, replace(machines, host_memory=int(1.01 * needed)), base)
    assert again.best and not again.ways


def test_states_that_host_memory_cannot_hold_are_never_rehearsed() -> None:
    one = Machines.of("A100-80", 1)
    device = replace(one.device, memory_bytes=one.device.overhead_bytes + 2**27)
    heard: list[str] = []
    found = search(gpt_task(CONFIG), replace(one, device=device, host_memory=2**20), Plan(), say=heard.append)
    assert any("offloaded states alone take" in refusal.why for refusal in found.refused)
    assert not [line for line in heard if "offload" in line and "disk" not in line and "zeroshard-offload" not in line]


@pytest.mark.whole
def test_where_every_plan_waits_for_a_disk_plans_with_other_results_are_tried_too() -> None:
    one = Machines.of("A100-80", 1)
    device = replace(one.device, memory_bytes=one.device.overhead_bytes + 140 * 2**20)
    task = replace(gpt_task(CONFIG), others={}, host_optimizer=torch.optim.AdamW)  # a disk is for unfused ones
    found = search(task, replace(one, device=device, host_memory=200 * 2**20), Plan(precision="bf16"))
    exact, rounded = ([p for p in found.best if bool(changes(p)) == other] for other in (False, True))
    assert exact and all(p.bound == "disk" for p in exact) and found.best[0] in exact
    assert any(p.bound != "disk" and p.seconds < exact[0].seconds / 2 for p in rounded)


def test_rows_that_do_not_divide_are_the_only_way_named() -> None:
    found = search(gpt_task(CONFIG, 5), Machines.of("A100-80", 7), Plan())
    assert not found.best
    assert found.ways == ("7 rows of one step (--global-batch 7), or another multiple of 7.",)
