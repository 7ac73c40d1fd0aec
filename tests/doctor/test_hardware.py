"""Devices, links and machines, against numpy's interpolation, hand-made sums and the vendors' sheets."""

import dataclasses
import itertools
import math
import random
import re
from pathlib import Path

import numpy
import pytest

from zeroshard.doctor.hardware import OPERATIONS, Device, HardwareTable, Link, Machines, preset
from zeroshard.doctor.presets import card_names
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


SHEETS = {  # dense 16-bit and fp32 TFLOPS, GB/s and bytes of the memory, GB/s to the other cards of a node
    "V100-16": (125, 15.7, 900, 16, 150),
    "V100-32": (125, 15.7, 900, 32, 150),
    "A100-40": (312, 19.5, 1555, 40, 300),
    "A100-80": (312, 19.5, 2039, 80, 300),
    "A100-40-PCIe": (312, 19.5, 1555, 40, 31.5),
    "A100-80-PCIe": (312, 19.5, 1935, 80, 31.5),
    "H100-80": (1979 / 2, 67, 3350, 80, 450),
    "H100-PCIe": (1513 / 2, 51, 2000, 80, 63),
    "H200": (1979 / 2, 67, 4800, 139.8, 450),
    "B200": (4500 / 2, 75, 8000, 178.3, 900),
    "B300": (4500 / 2, 75, 8000, 267, 900),
    "L40S": (362, 91.6, 864, 44.5, 31.5),
    "RTX 3090": (71, 35.6, 936, 24, 31.5),
    "RTX 4090": (165.2, 82.6, 1008, 24, 31.5),
    "RTX 5090": (209.5, 104.8, 1792, 32, 63),
    "MI300X": (1307.4, 163.4, 5300, 192, 448),
    "MI325X": (1307.4, 163.4, 6000, 256, 448),
    "MI355X": (2516.6, 157.3, 8000, 288, 537.6),
}


def test_presets_are_what_the_sheets_say() -> None:
    assert set(SHEETS) == set(card_names())
    for name, (half, single, gbytes, gib, inside) in SHEETS.items():
        device, machines = preset(name), Machines.of(name.lower(), 16)
        assert device.matrix_flops["fp16"] == pytest.approx(0.6e12 * half)
        assert device.matrix_flops["fp32"] == pytest.approx(0.6e12 * single)
        assert device.matrix_flops.get("bf16") == (None if "V100" in name else device.matrix_flops["fp16"])
        assert device.memory_bandwidth == pytest.approx(0.8e9 * gbytes)
        assert device.memory_bytes == pytest.approx(gib * 2**30, abs=1)
        assert re.search(r"(datasheet|data sheet|paper).*\(20[12]\d\); .*assumed", device.source)
        assert machines.inside.bandwidth == pytest.approx(0.75e9 * inside)
        assert (machines.nodes, machines.device) == (2, device)
        assert machines.wire_seconds("gather", 1e9, 16) > machines.wire_seconds("gather", 1e9, 8)
    assert Machines.of("H200", 4, per_node=2, between_gbps=80).between.bandwidth == pytest.approx(1e10 * 0.75)


@pytest.mark.parametrize(
    "typed, name",
    [
        *((spelt, "RTX 4090") for spelt in ("rtx4090", " RTX  4090", "rtx-4090", "4090", "NVIDIA GeForce RTX 4090")),
        *((spelt, "A100-80") for spelt in ("a100-80gb", "A100 80 GB", "a100_80g", "a100-sxm4-80gb", "A100-80GiB")),
        *((spelt, "H100-80") for spelt in ("h100-sxm", "H100 SXM5", "h100-80gb", "NVIDIA H100 80GB HBM3")),
        *((spelt, "H100-PCIe") for spelt in ("h100-pcie", "NVIDIA H100 PCIe", "h100-80gb-pcie")),
        *(("a100-40gb", "A100-40"), ("NVIDIA A100-PCIE-40GB", "A100-40-PCIe"), ("a100 80gb pcie", "A100-80-PCIe")),
        *(
            ("mi300x", "MI300X"),
            ("AMD Instinct MI355X", "MI355X"),
            ("l40s", "L40S"),
            ("b200", "B200"),
            ("b300", "B300"),
        ),
        *(("h200-141gb", "H200"), ("rtx3090", "RTX 3090"), ("5090", "RTX 5090"), ("mi325x", "MI325X")),
    ],
)
def test_a_device_has_the_names_that_people_type(typed: str, name: str) -> None:
    assert preset(typed).name == name


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("a100", "did you mean A100-40 or A100-80 or A100-40-PCIe or A100-80-PCIe[?]"),
        ("h100", "did you mean H100-80 or H100-PCIe[?]"),
        ("V10O-32", "V100-32"),
        ("rtx 4080", "RTX 4090"),
        ("abacus", "the devices are V100-16, .*RTX 4090.*MI355X[.]"),
        ("", "the devices are V100-16"),
    ],
)
def test_an_unknown_device_is_told_its_near_matches(typed: str, meant: str) -> None:
    with pytest.raises(PlanError, match=meant):
        preset(typed)


CARD = """
memory = "12GiB"
peak_tflops = { fp32 = 10, bf16 = 40 }
memory_gbytes = 500
"""


def test_a_card_of_ones_own_has_the_keys_of_the_built_in_ones(tmp_path: Path) -> None:
    file = tmp_path / "half-a-card.toml"
    file.write_text(CARD)
    device, machines = preset(str(file)), Machines.of(str(file), 2)
    assert (device.name, device.memory_bytes, device.capacity_bytes) == ("half-a-card", 12 * 2**30, 11 * 2**30)
    assert device.matrix_flops == pytest.approx({"fp32": 6e12, "bf16": 24e12})
    assert device.memory_bandwidth == pytest.approx(4e11)
    assert machines.inside.bandwidth == pytest.approx(0.75 * 12e9)  # PCIe 3, as without a word about it
    assert "half-a-card.toml" in device.source and "assumed" in device.source
    file.write_text(
        CARD + 'name = "half"\ninside_gbytes = 100\nbetween_gbps = 80\nsource = "its box"\npublished = 2024'
    )
    whole = Machines.of(str(file), 2)
    assert (whole.device.name, whole.inside.bandwidth, whole.between.bandwidth) == ("half", 75e9, 7.5e9)
    assert whole.device.source.startswith("its box (2024)")


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("memory = '12GiB'", "peak_tflops is missing"),
        (CARD.replace("memory_gbytes", "memory_gbyte"), "memory_gbyte is no key of a card; did you mean memory_gbytes"),
        (CARD.replace("40", "-40"), "peak_tflops.bf16 is -40"),
        (CARD.replace("fp32", "fp64"), "peak_tflops is {'fp64'"),
        (CARD.replace("12GiB", "much"), "memory: .*'much'"),
        (CARD + "host_gbytes = true", "host_gbytes is True"),
        (CARD + "=", "not valid TOML"),
    ],
)
def test_a_wrong_card_is_refused_by_its_key(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "card.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"card.toml.*{complaint}"):
        preset(str(file))
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        preset(str(tmp_path / "none.toml"))


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
