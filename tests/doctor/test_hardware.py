"""Devices, links and machines, against numpy's interpolation, hand-made sums and the vendors' sheets."""

import dataclasses
import itertools
import math
import random
from pathlib import Path

import numpy
import pytest

from zeroshard.doctor.hardware import OPERATIONS, Device, HardwareTable, Link, Machines, preset, preset_names
from zeroshard.errors import ConfigError, PlanError

CPU = Device("a CPU", "cpu", 2**33, {"fp32": 1e11, "bf16": 2e11}, 1e10, 1e-6)
GPU = Device("a GPU", "cuda", 2**35, {"fp32": 1e13}, 1e12, 5e-6, overhead_bytes=2**30, host_link=1e10)


def test_a_table_interpolates_as_numpy_does_and_goes_on_in_proportion() -> None:
    chance = random.Random(0)
    sizes = sorted(chance.sample(range(1, 10**6), 9))
    seconds = [chance.uniform(1e-6, 1e-3) for _ in sizes]
    table = HardwareTable(tuple(zip(sizes, seconds, strict=True)))
    for nbytes in [0, *sizes, *(chance.uniform(0, sizes[-1]) for _ in range(200))]:
        assert table.seconds(nbytes) == pytest.approx(numpy.interp(nbytes, sizes, seconds), rel=1e-12)
    assert table.seconds(3 * sizes[-1]) == pytest.approx(3 * seconds[-1])


@pytest.mark.parametrize("points", [(), ((2.0, 1.0), (1.0, 1.0)), ((1.0, 1.0), (1.0, 2.0)), ((1.0, 0.0),), ((0, 1.0),)])
def test_a_table_refuses_what_is_none(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ConfigError, match="table"):
        HardwareTable(points)


def test_an_operation_takes_as_long_as_its_slower_side() -> None:
    assert CPU.op_seconds(0, 0) == 1e-6
    assert CPU.op_seconds(1e9, 1e6) == pytest.approx(1e-2 + 1e-6)  # bound by the matrix rate
    assert CPU.op_seconds(1e9, 1e6, "bf16") == pytest.approx(5e-3 + 1e-6)
    assert CPU.op_seconds(1e9, 1e6, "fp16") == CPU.op_seconds(1e9, 1e6)  # no rate of its own
    assert CPU.op_seconds(1e6, 1e8) == pytest.approx(1e-2 + 1e-6)  # bound by the memory
    assert (CPU.rounds, GPU.rounds, GPU.capacity_bytes) == (1, 512, 2**35 - 2**30)
    assert dataclasses.replace(GPU, kind="xpu").rounds == 512


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "tpu"},
        {"matrix_flops": {"bf16": 1.0}},
        {"matrix_flops": {"fp32": 1.0, "fp8": 1.0}},
        {"matrix_flops": {"fp32": 0.0}},
        {"memory_bandwidth": math.inf},
        {"host_link": 0.0},
        {"launch_seconds": -1.0},
        {"overhead_bytes": 2**33},
    ],
)
def test_a_device_refuses_what_cannot_be(change: dict[str, object]) -> None:
    facts = {"name": "mine", "kind": "cpu", "memory_bytes": 2**33, "matrix_flops": {"fp32": 1.0}}
    with pytest.raises(ConfigError, match="mine"):
        Device(**{**facts, "memory_bandwidth": 1.0, "launch_seconds": 0.0, **change})  # type: ignore[arg-type]


def test_a_link_sends_what_each_rank_has_to_send() -> None:
    link = Link(1e9, 1e-3)
    assert link.seconds("gather", 4e9, 4) == pytest.approx(3 * 1e-3 + 3.0)
    assert link.seconds("exchange", 4e9, 2) == pytest.approx(1e-3 + 2.0)
    assert link.seconds("send", 4e9, 4) == pytest.approx(1e-3 + 4.0)
    assert {link.seconds(operation, 4e9, 1) for operation in OPERATIONS} == {0.0}
    measured = Link(tables={name: HardwareTable(((10.0, k), (20.0, 2.0 * k))) for k, name in enumerate(OPERATIONS, 1)})
    assert [measured.seconds(operation, 20, 2) for operation in OPERATIONS] == [1.0, 2.0, 6.0]
    assert Link(1e9, tables={"gather": HardwareTable(((1.0, 7.0),))}).seconds("gather", 2, 2) == 7.0
    for wrong in (
        {},
        {"bandwidth": 0.0},
        {"bandwidth": 1.0, "latency": -1.0},
        {"tables": {"send": HardwareTable(((1.0, 1.0),))}},
    ):
        with pytest.raises(ConfigError, match="link"):
            Link(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 8), (4, 8), (3, 4), (2, 6), (8, 1)])
def test_groups_that_leave_a_node_are_found_by_looking_at_every_group(nodes: int, per_node: int) -> None:
    count = nodes * per_node
    machines = Machines(GPU, count, per_node, Link(1e11), Link(1e9))
    for ranks, stride in itertools.product(range(1, count + 1), repeat=2):
        if count % (ranks * stride):
            continue
        blocks = range(0, count, ranks * stride)
        groups = [range(b + i, b + ranks * stride, stride) for b in blocks for i in range(stride)]
        leaves = any(len({rank // per_node for rank in group}) > 1 for group in groups)
        assert machines.leaves(ranks, stride) == leaves, (ranks, stride)
        assert machines.link(ranks, stride) is (machines.between if leaves else machines.inside)


def crossing(machines: Machines, ranks: int, stride: int, hops: str) -> float:
    """Shares of the buffer that the busiest node sends out, message by message, for all its groups at once."""
    sent = [0.0] * machines.nodes
    for first in (b + i for b in range(0, machines.count, ranks * stride) for i in range(stride)):
        group = [first + k * stride for k in range(ranks)]
        for k, rank in enumerate(group):
            others = group[:k] + group[k + 1 :] if hops == "pairwise" else [group[(k + 1) % ranks]]
            share = 1 / ranks if hops == "pairwise" else (ranks - 1) / ranks
            for other in others:
                if other // machines.per_node != rank // machines.per_node:
                    sent[rank // machines.per_node] += share
    return max(sent)


@pytest.mark.parametrize(("ranks", "stride"), [(16, 1), (4, 4), (2, 8), (4, 8), (8, 2), (2, 16)])
@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "cuda"])
def test_what_crosses_between_nodes_is_counted_message_by_message(device: Device, ranks: int, stride: int) -> None:
    machines = Machines(device, 32, 8, Link(1e20), Link(1.0))
    for operation, hops in (("exchange", "pairwise"), ("gather", "pairwise" if device is CPU else "ring")):
        found = machines.wire_seconds(operation, 1.0, ranks, stride)  # type: ignore[arg-type]
        assert found == pytest.approx(crossing(machines, ranks, stride, hops)), operation
    assert machines.wire_seconds("send", 1.0, ranks, stride) == min(stride, 8)


def test_inside_a_node_only_the_inner_link_counts() -> None:
    machines = Machines(GPU, 32, 8, Link(2.0), Link(1e-9))
    assert machines.wire_seconds("gather", 8.0, 8) == 3.5
    assert machines.wire_seconds("exchange", 8.0, 2, 4) == 2.0
    assert machines.wire_seconds("gather", 8.0, 1, 8) == 0.0
    slow_inside = Machines(GPU, 32, 8, Link(1e-9), Link(1.0))
    assert slow_inside.wire_seconds("gather", 32.0, 32) == pytest.approx(31e9)


def test_presets_are_what_the_sheets_say() -> None:
    sheets = {"V100-32": (125, 900), "A100-80": (312, 2039), "H100-80": (989.5, 3350), "H200": (989.5, 4800)}
    for name, (tflops, gbytes) in sheets.items():
        device = preset(name)
        assert device.matrix_flops["fp16"] == pytest.approx(0.6e12 * tflops)
        assert device.memory_bandwidth == pytest.approx(0.8e9 * gbytes)
        assert "datasheet" in device.source and "assumed" in device.source
    assert preset("V100-16").memory_bytes == 16 * 2**30 and "bf16" not in preset("V100-16").matrix_flops
    assert preset(" rtx4090").name == preset("RTX 4090").name == "RTX 4090"
    for name in preset_names():
        machines = Machines.of(name.lower(), 16)
        assert (machines.nodes, machines.device) == (2, preset(name))
        assert machines.wire_seconds("gather", 1e9, 16) > machines.wire_seconds("gather", 1e9, 8)
    assert Machines.of("H200", 4, per_node=2, between_gbps=80).between.bandwidth == pytest.approx(1e10 * 0.75)


def test_an_unknown_device_is_told_its_near_matches() -> None:
    with pytest.raises(PlanError, match="did you mean A100-40 or A100-80"):
        preset("a100")
    with pytest.raises(PlanError, match="V100-32"):
        preset("V10O-32")
    with pytest.raises(PlanError, match=r"the devices are V100-16, .*RTX 4090"):
        preset("abacus")


DESCRIBED = """
nodes = 2
per_node = 4
inside_gbps = 80
between_gbps = 8
host_memory = "64GiB"
[device]
name = "mine"
memory = "24GiB"
overhead = "512MiB"
tflops = { fp32 = 20, bf16 = 80 }
memory_gbytes = 800
host_gbytes = 25
launch_us = 4
"""


def test_machines_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "machines.toml"
    file.write_text(DESCRIBED)
    machines = Machines.load(file)
    assert (machines.count, machines.nodes, machines.host_memory) == (8, 2, 2**36)
    assert (machines.inside.bandwidth, machines.between.bandwidth) == (1e10, 1e9)
    device = machines.device
    assert (device.name, device.kind, device.memory_bytes, device.overhead_bytes) == ("mine", "cuda", 24 * 2**30, 2**29)
    assert (device.matrix_flops, device.memory_bandwidth) == ({"fp32": 2e13, "bf16": 8e13}, 8e11)
    assert (device.host_link, device.launch_seconds) == (2.5e10, pytest.approx(4e-6))
    assert str(machines) == "8 x mine (24.00 GiB) in 2 nodes"
    file.write_text('device = "v100-32"\nnodes = 2\nper_node = 16\nbetween_gbps = 800')
    named, standard = Machines.load(file), Machines.of("V100-32", 32, 16)
    assert (named.device, named.inside, named.count) == (standard.device, standard.inside, 32)
    assert named.between.bandwidth == 1e11
    file.write_text('[device]\nkind = "cpu"\nmemory = "4GiB"\ntflops = { fp32 = 0.1 }\nmemory_gbytes = 10')
    assert Machines.load(file).device.capacity_bytes == 2**32


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "there is no device"),
        ("device = 3", "it must be a name"),
        ('device = "V1000"', "did you mean"),
        ('device = "H200"\nnode = 2', "node is no key"),
        ('device = "H200"\nnodes = 0', "nodes is 0"),
        ('device = "H200"\nnodes = 2\nper_node = true', "per_node is True"),
        ('device = "H200"\nper_node = 2\ninside_gbps = -1', "inside_gbps is -1"),
        ('device = "H200"\nhost_memory = "much"', "memory is 'much'"),
        ("device = ", "not valid TOML"),
        (DESCRIBED.replace("inside_gbps = 80", ""), "inside_gbps is missing"),
        (DESCRIBED.replace("between_gbps = 8", ""), "between_gbps is missing"),
        (DESCRIBED.replace("memory_gbytes = 800", ""), "the device has no memory_gbytes"),
        (DESCRIBED.replace("launch_us", "lunch_us"), "lunch_us is no key of a device"),
        (DESCRIBED.replace("{ fp32 = 20, bf16 = 80 }", "20"), "tflops is 20"),
        (DESCRIBED.replace("fp32 = 20", 'fp32 = "20"'), "fp32 is '20'"),
        (DESCRIBED.replace("512MiB", "32GiB"), "some memory must be left"),
    ],
)
def test_a_wrong_file_is_refused_by_its_name(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "machines.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=complaint) as refusal:
        Machines.load(file)
    assert str(file) in str(refusal.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Machines.load(tmp_path / "none.toml")
