"""The machines that this process runs on: as `zeroshard doctor` measured them, as known by name, or assumed."""

from dataclasses import replace
from pathlib import Path

import psutil
import torch

from zeroshard.comm.mesh import local_ranks, user_cache
from zeroshard.doctor.facts import memory_limit, processor
from zeroshard.doctor.hardware import Device, Link, Machines, preset
from zeroshard.doctor.presets import card_names, known_name, plain_name
from zeroshard.doctor.profile import MachineProfile, default_path
from zeroshard.errors import PlanError
from zeroshard.platform import accelerator

BETWEEN = Link(1.25e9, 5e-5)  # assumed between machines: 10 gigabits per second
ASSUMED = "Rates are assumed; zeroshard doctor measures those of this machine."
ASSUMED_CPU = {"matrix": 5e10, "memory": 1e10, "launch": 5e-6}  # FLOP/s, bytes/s and seconds of one rank
ASSUMED_LINK = Link(2e9, 5e-5)  # between processes of one machine


def local_machines(ranks: int, kind: str, profile: Path | None = None) -> Machines:
    """The machines of `ranks` ranks like this process.

    Args:
        kind: "cpu", or the type of an accelerator by torch's name.
        profile: file of this machine's profile; by default the one that `zeroshard doctor` writes.

    Raises:
        PlanError: a GPU that is not known by name.
        DataError: a profile that cannot be read.
    """
    per_node = min(ranks, local_ranks() or ranks)
    path = profile or default_path({"XDG_CACHE_HOME": user_cache()})
    measured = MachineProfile.load(path) if path.exists() else None
    if measured is not None and measured.kind == kind:
        memory = free_memory() // per_node if kind == "cpu" else None
        one = measured.machines(per_node, measured.transport if ranks == per_node else "network", memory=memory)
        return one if ranks == per_node else replace(one, count=ranks, between=BETWEEN)
    first = torch.device(kind, 0)
    name, memory = accelerator.title(first), accelerator.total_memory(first)
    if name is not None and memory is not None:
        return _known(name, memory, ranks, per_node)
    device = Device(
        name=processor(),
        kind="cpu",
        memory_bytes=free_memory() // per_node,
        matrix_flops={"fp32": ASSUMED_CPU["matrix"]},
        memory_bandwidth=ASSUMED_CPU["memory"],
        launch_seconds=ASSUMED_CPU["launch"],
        source=ASSUMED,
    )
    return Machines(device, ranks, per_node, ASSUMED_LINK, BETWEEN, free_memory(), local=ranks == per_node)


def free_memory() -> int:
    """Bytes of host memory that training can have now, to a sixteenth of the next lower power of two.

    So the same question, asked again, is about the same machine.
    """
    available = psutil.virtual_memory().available
    least = min(available, memory_limit() or available)
    step = max(1, 1 << max(0, least.bit_length() - 5))
    return least // step * step


def nearest_preset(name: str, memory: int) -> str | None:
    """The built-in device for a GPU of this name and so many bytes; None without one.

    Args:
        name: as the driver gives it, such as "NVIDIA A100-SXM4-80GB".
    """
    if (known := known_name(name)) is not None:
        return known
    models = {known: plain_name(known.partition("-")[0]) for known in card_names()}
    alike = [known for known, model in models.items() if model in plain_name(name)]
    return min(alike, key=lambda known: abs(preset(known).memory_bytes - memory), default=None)


def _known(name: str, memory: int, ranks: int, per_node: int) -> Machines:
    known = nearest_preset(name, memory)
    if known is None:
        raise PlanError(
            f"The GPU {name} is not known by name (known are {', '.join(card_names())}), and its rates were not "
            f"measured; run `zeroshard doctor`, or give machines."
        )
    machines = Machines.of(known, ranks, per_node)
    return replace(machines, device=replace(machines.device, memory_bytes=memory))
