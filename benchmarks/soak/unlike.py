"""A script of two ranks that differ in one thing at a time: every engine must say so, on both ranks, by its name.

zeroshard run --nproc-per-node 2 unlike.py FILE COUNT
"""

import json
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zeroshard as zs
from zeroshard.errors import CommError
from zeroshard.planning.settings import flat

BASE: dict[str, Any] = {"zero": 1, "transport": "network"}
PLANS: dict[str, dict[str, Any]] = {  # by the field that the error must name: what rank 1 sets
    "zero": {"zero": 3},
    "precision": {"precision": "bf16"},
    "transport": {"transport": "auto"},
    "fp32_modules": {"fp32_modules": ("0",)},
    "reduce_dtype": {"reduce_dtype": "bf16"},
    "reduce_every": {"reduce_every": "step", "microbatches": 2},
    "loss_scale": {"loss_scale": 256.0},
    "loss_scale.initial": {"loss_scale.initial": 8.0},
    "loss_scale.growth": {"loss_scale.growth": 4.0},
    "loss_scale.backoff": {"loss_scale.backoff": 0.25},
    "loss_scale.window": {"loss_scale.window": 10},
    "loss_scale.hysteresis": {"loss_scale.hysteresis": 2},
    "loss_scale.floor": {"loss_scale.floor": 2.0},
    "microbatches": {"microbatches": 2},
    "pipeline_parallel": {"pipeline_parallel": 2, "zero": 0},
    "pipeline_parallel.schedule": {"pipeline_parallel": 2, "pipeline_parallel.schedule": "gpipe"},
    "pipeline_parallel.virtual_stages": {
        "pipeline_parallel": 2,
        "pipeline_parallel.virtual_stages": 2,
        "pipeline_parallel.schedule": "interleaved",
        "microbatches": 2,
    },
    "pipeline_parallel.replicas": {"pipeline_parallel": 2, "pipeline_parallel.replicas": (1, 1)},
    "pipeline_parallel.split": {"pipeline_parallel": 2, "pipeline_parallel.split": ("2",)},
    "pipeline_parallel.balance": {"pipeline_parallel.balance": "parameters"},
    "recompute": {"pipeline_parallel": 2, "recompute": "blocks"},
    "pipeline_parallel.vertical_sync": {
        "pipeline_parallel": 2,
        "pipeline_parallel.schedule": "pipedream",
        "pipeline_parallel.vertical_sync": True,
    },
    "clip_norm": {"clip_norm": 1.0},
    "nonfinite": {"nonfinite": "skip"},
    "units": {"units": ()},
    "seed": {"seed": 1},
    "shard_group": {"shard_group": 1},
    "offload": {"offload": "optimizer"},
    "offload.fraction": {"offload": "optimizer", "offload.fraction": 0.5},
    "offload.moments": {"offload": "optimizer", "offload.moments": "bf16"},
    "offload.delayed_update": {"offload": "optimizer", "offload.delayed_update": True},
    "offload.delayed_warmup": {"offload.delayed_warmup": 3},
    "offload.speculate": {"offload.speculate": False},
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
    """Names, rank 1's differing arguments, and the text that the error must have."""
    firsts = ("pipeline_parallel.stages", "offload.parts", "loss_scale.value")  # given by the name of the group
    settings = {name.partition(".")[0] if name in firsts else name for name, _ in flat(zs.Plan().as_dict())}
    plain = settings - {"device_memory", "offload.disk", "offload.disk_parameters"}
    assert plain == PLANS.keys(), plain ^ PLANS.keys()  # a new field of the plan must come here too
    said = {name.partition(".")[0]: name for name in firsts}
    found = [(f"plan.{name}", {"plan": plan}, f"plan.{said.get(name, name)} is") for name, plan in PLANS.items()]
    found += [(f"model {name}", {"model": make}, words) for name, (make, words) in MODELS.items()]
    found += [(f"option {key}", {"options": {key: value}}, f"group 0: {key} is") for key, value in OPTIONS.items()]
    return [*found, ("optimizer", {"optimizer": torch.optim.Adam}, "the optimizer is torch.optim.adam.Adam")]


def error_of(mesh: zs.Mesh, other: dict[str, Any]) -> str:
    """The error of an engine with differing arguments; empty without one."""
    make = partial(other.get("optimizer", torch.optim.AdamW), **{"lr": 1e-3, **other.get("options", {})})
    plan = zs.Plan.from_dict({**BASE, **other.get("plan", {})})
    try:
        zs.Engine(other.get("model", net)(), make, plan, mesh=mesh, example=torch.ones(2, 8))
    except CommError as error:
        return str(error)
    return ""


def main() -> None:
    """Try `count` differences at random, each at least once if `count` is large enough."""
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
