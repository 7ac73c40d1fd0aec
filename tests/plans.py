"""Settings of plans, for tests."""

from collections.abc import Iterable
from typing import Any

from zeroshard import Plan
from zeroshard.planning.settings import flat

DISK = "DISK"  # stands for a folder of the test's own
# Plans that use a device in ways of their own, on one rank.
ON_ONE_DEVICE: dict[str, dict[str, Any]] = {
    "optimizer on the host": {"offload": "optimizer"},
    "optimizer on the host, clipped": {"offload": "optimizer", "clip_norm": 0.5, "microbatches": 2},
    "half of the optimizer on the host": {"offload": "optimizer", "offload.fraction": 0.5},
    "without guesses": {"offload": "optimizer", "offload.speculate": False, "clip_norm": 0.5},
    "parameters on the host": {"zero": 3, "offload": "optimizer,parameters"},
    "activations on the host": {"offload": "activations"},
    "everything on the host": {"zero": 3, "offload": "optimizer,parameters,activations"},
    "states on disk": {"offload": "optimizer", "offload.disk": DISK},
    "everything on disk": {
        "zero": 3,
        "offload": "optimizer,parameters",
        "offload.disk": DISK,
        "offload.disk_parameters": True,
    },
    "blocks, zero=3": {"recompute": "blocks", "zero": 3},
    "sqrt": {"recompute": "sqrt"},
    "selective": {"recompute": "selective"},
    "auto": {"recompute": "auto", "device_memory": "4GiB"},
    "arena": {"activations.recompute": "blocks", "activations.arena": True},
    "inputs of blocks on the host": {"recompute": "blocks", "offload": "activations"},
    "compressed activations": {"activations.compress": ("binarize", "sparse", "inplace")},
    "exact random numbers": {"rng": "exact"},
}


def settings_of(plan: Plan, names: Iterable[str]) -> dict[str, Any]:
    """Settings by names such as "offload.disk"; the first setting of a group by the group's name."""
    every = dict(flat(plan.as_dict()))
    firsts = {"pipeline_parallel": "stages", "offload": "parts", "loss_scale": "value"}
    return {name: every[f"{name}.{firsts[name]}" if name in firsts else name] for name in names}
