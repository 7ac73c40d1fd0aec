"""A script of two ranks that differ in one thing at a time: every engine must say so, on both ranks, by its name.

zeroshard run --nproc-per-node 2 unlike.py FILE COUNT
"""

import json
import random
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zeroshard as zs
from zeroshard.errors import CommError

BASE: dict[str, Any] = {"zero": 1, "transport": "network"}
PLANS: dict[str, dict[str, Any]] = {  # by the field that the error must name: what rank 1 sets
    "zero": {"zero": 3},
    "precision": {"precision": "bf16"},
    "transport": {"transport": "auto"},
    "fp32_modules": {"fp32_modules": ("0",)},
    "reduce_dtype": {"reduce_dtype": "bf16"},
    "reduce_every": {"reduce_every": "step", "microbatches": 2},
    "loss_scale": {"loss_scale": 256.0},
    "loss_scale_initial": {"loss_scale_initial": 8.0},
    "loss_scale_growth": {"loss_scale_growth": 4.0},
    "loss_scale_backoff": {"loss_scale_backoff": 0.25},
    "loss_scale_window": {"loss_scale_window": 10},
    "loss_scale_hysteresis": {"loss_scale_hysteresis": 2},
    "loss_scale_floor": {"loss_scale_floor": 2.0},
    "microbatches": {"microbatches": 2},
    "stages": {"stages": 2, "zero": 0},
    "schedule": {"stages": 2, "schedule": "gpipe"},
    "chunks": {"stages": 2, "chunks": 2, "schedule": "interleaved", "microbatches": 2},
    "replicas": {"stages": 2, "replicas": (1, 1)},
    "split": {"stages": 2, "split": ("2",)},
    "balance": {"balance": "parameters"},
    "recompute": {"stages": 2, "recompute": "chunk"},
    "vertical_sync": {"stages": 2, "schedule": "pipedream", "vertical_sync": True},
    "clip_norm": {"clip_norm": 1.0},
    "nonfinite": {"nonfinite": "skip"},
    "units": {"units": ()},
    "seed": {"seed": 1},
    "shard_ranks": {"shard_ranks": 1},
    "offload": {"offload": "optimizer"},
    "offload_share": {"offload": "optimizer", "offload_share": 0.5},
    "offload_moments": {"offload": "optimizer", "offload_moments": "bf16"},
    "delayed_update": {"offload": "optimizer", "delayed_update": True},
    "delayed_warmup": {"delayed_warmup": 3},
    "speculate": {"speculate": False},
    "timeout": {"timeout": 31.0},
}
OPTIONS: dict[str, Any] = {"lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.3, "amsgrad": True,
                           "maximize": True, "foreach": True, "fused": True}  # fmt: skip


def net(width: int = 8, depth: int = 4, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Some layers."""
    return nn.Sequential(*(nn.Linear(width, width, bias=bias) for _ in range(depth))).to(dtype)


def frozen() -> nn.Sequential:
    """One weight of which is not trained."""
    model = net()
    model[1].weight.requires_grad_(False)
    return model


def tied() -> nn.Sequential:
    """Two layers of which have one weight."""
    model = net()
    model[2].weight = model[0].weight
    return model


def with_buffer(size: int) -> nn.Sequential:
    """With a buffer, whose size must be the same."""
    model = net()
    model[0].register_buffer("mean", torch.zeros(size))
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "width": (partial(net, 16), "parameter '0.weight'"),
    "depth": (partial(net, depth=5), "parameter '4.weight'"),
    "bias": (partial(net, bias=False), "parameter '0.bias'"),
    "dtype": (partial(net, dtype=torch.float64), "float64"),
    "frozen": (frozen, "parameter '1.weight'"),
    "tied": (tied, "'2.weight' is tied to"),
    "buffer": (partial(with_buffer, 3), "buffer '0.mean'"),
    "names": (lambda: nn.Sequential(*net(), nn.Identity()).append(nn.Linear(8, 8)), "parameter '5.weight'"),
}


def differences() -> list[tuple[str, dict[str, Any], str]]:
    """Names, what rank 1 has instead, and what the error must say."""
    plain = {field.name for field in fields(zs.Plan)} - {"device_memory", "offload_disk", "offload_disk_parameters"}
    assert plain == PLANS.keys(), plain ^ PLANS.keys()  # a new field of the plan must come here too
    found = [(f"plan.{name}", {"plan": settings}, f"plan.{name} is") for name, settings in PLANS.items()]
    found += [(f"model {name}", {"model": make}, words) for name, (make, words) in MODELS.items()]
    found += [(f"option {key}", {"options": {key: value}}, f"group 0: {key} is") for key, value in OPTIONS.items()]
    return [*found, ("optimizer", {"optimizer": torch.optim.Adam}, "the optimizer is torch.optim.adam.Adam")]


def error_of(mesh: zs.Mesh, other: dict[str, Any]) -> str:
    """What an engine with something else says; empty if it says nothing."""
    make = partial(other.get("optimizer", torch.optim.AdamW), **{"lr": 1e-3, **other.get("options", {})})
    plan = zs.Plan(**{**BASE, **other.get("plan", {})})
    try:
        zs.Engine(other.get("model", net)(), make, plan, mesh=mesh, example=torch.ones(2, 8))
    except CommError as error:
        return str(error)
    return ""


def main() -> None:
    """As many differences as are asked for, at random and each at least once if there is time for it."""
    path, count = Path(sys.argv[1]), int(sys.argv[2])
    mesh, every, rng = zs.init_mesh(60.0, "cpu"), differences(), random.Random(0)
    chosen = [*rng.sample(every, min(count, len(every))), *rng.choices(every, k=max(0, count - len(every)))]
    silent = []
    for name, other, words in chosen:
        said = error_of(mesh, other if mesh.rank == 1 else {})
        if "on rank 1 " not in said or words not in said:
            silent.append(f"{name}: {said[:300] or 'nothing was said'}")
    assert error_of(mesh, {}) == "", "ranks that are alike were refused"
    path.with_suffix(f".{mesh.rank}").write_text(json.dumps({"fields": len(every), "tried": count, "silent": silent}))


main()
