"""The zoo as jobs to verify: every model of the tests that draws no random numbers under forty plans.

The families of tensor parallelism are verified under plans that split their layers.
"""

import importlib.util
from functools import partial
from typing import Any

import torch
from engine import models, zoo
from split_models import training
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

import zeroshard as zs
from zeroshard.verification.job import VerificationJob

OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
DRAWS = {"Dropped", "Spiked"}  # dropout, and infinity
APART = {"choosy", "fickle"}  # models that take other ways on other ranks on purpose
PLANS: dict[str, dict[str, Any]] = {
    **{f"zero{z}": {"zero": z} for z in range(4)},
    **{f"zero{z}-m2": {"zero": z, "microbatches": 2} for z in range(4)},
    **{f"zero{z}-network": {"zero": z, "transport": "network"} for z in (1, 2, 3)},
    **{f"zero{z}-clip": {"zero": z, "clip_norm": 0.05} for z in range(4)},
    **{f"zero{z}-step": {"zero": z, "microbatches": 2, "reduce_every": "step"} for z in (2, 3)},
    **{f"zero{z}-overlap": {"zero": z, "transport": "network", "overlap_gather": True} for z in (1, 2)},
    **{f"zero{z}-host": {"zero": z, "offload": "optimizer"} for z in (1, 2, 3)},
    "zero3-host-all": {"zero": 3, "offload": "optimizer,parameters"},
    "zero2-half": {"zero": 2, "offload": "optimizer", "offload.fraction": 0.5},
    "zero2-late": {"zero": 2, "offload": "optimizer", "offload.delayed_update": True, "offload.delayed_warmup": 0},
    "zero2-scaled": {"zero": 2, "loss_scale": 128.0, "microbatches": 2},
    "zero2-saved": {"zero": 2, "offload": "optimizer,activations"},
    "zero3-one-unit": {"zero": 3, "transport": "network", "units": ()},
    "zero3-network-m2-clip": {"zero": 3, "transport": "network", "microbatches": 2, "clip_norm": 0.05},
    "naive": {"pipeline_parallel": 2, "pipeline_parallel.schedule": "naive", "microbatches": 2},
    "gpipe": {"pipeline_parallel": 2, "pipeline_parallel.schedule": "gpipe", "microbatches": 4},
    "1f1b": {"pipeline_parallel": 2, "microbatches": 4},
    "zb-h1": {"pipeline_parallel": 2, "pipeline_parallel.schedule": "zb-h1", "microbatches": 4},
}
WIDE: dict[str, dict[str, Any]] = {  # on four ranks
    **{f"group2-zero{z}": {"zero": z, "shard_group": 2, "transport": "network"} for z in (1, 2, 3)},
    "replicas-zero0": {"zero": 0, "pipeline_parallel": 2, "microbatches": 2},
    "replicas-zero2-clip": {"zero": 2, "pipeline_parallel": 2, "microbatches": 2, "clip_norm": 0.05},
    "replicas-zero3-again": {"zero": 3, "pipeline_parallel": 2, "microbatches": 2, "recompute": "blocks"},
    "interleaved": {
        **{"zero": 2, "pipeline_parallel": 2, "pipeline_parallel.schedule": "interleaved"},
        **{"pipeline_parallel.virtual_stages": 2, "microbatches": 4},
    },
}
TWO = {"tensor_parallel": 2}
WHOLE = {"tensor_parallel.sequence": False}
STAGED = {**TWO, "pipeline_parallel": 2, "microbatches": 4}
SPLIT: dict[int, dict[str, dict[str, Any]]] = {  # plans that split layers, by ranks
    2: {
        "tensor2": TWO,
        "tensor2-whole": {**TWO, **WHOLE},
        "tensor2-m2-clip": {**TWO, "microbatches": 2, "clip_norm": 0.05},
        "tensor2-whole-network": {**TWO, **WHOLE, "transport": "network"},
        "tensor2-chunk": {**TWO, "loss_chunk": 5},
    },
    4: {
        "tensor4": {"tensor_parallel": 4},
        "tensor4-whole": {"tensor_parallel": 4, **WHOLE},
        "tensor4-network-m2": {"tensor_parallel": 4, "transport": "network", "microbatches": 2},
        **{f"tensor2-zero{z}": {**TWO, "zero": z, "microbatches": 2} for z in range(4)},
        **{f"tensor2-whole-zero{z}-clip": {**TWO, **WHOLE, "zero": z, "clip_norm": 0.05} for z in range(4)},
        **{f"tensor2-zero{z}-network": {**TWO, "zero": z, "transport": "network"} for z in (1, 2, 3)},
        "tensor2-zero2-host": {**TWO, "zero": 2, "offload": "optimizer"},
        "tensor2-zero3-host-all": {**TWO, "zero": 3, "offload": "optimizer,parameters"},
        **{f"tensor2-{s}": {**STAGED, "pipeline_parallel.schedule": s} for s in ("gpipe", "1f1b", "zb-h1")},
        **{f"tensor2-whole-{s}": {**STAGED, **WHOLE, "pipeline_parallel.schedule": s} for s in ("naive", "zb-h1")},
        "tensor2-1f1b-again-clip": {**STAGED, "recompute": "blocks", "clip_norm": 0.05},
        "tensor2-interleaved": {
            **{**STAGED, "pipeline_parallel.schedule": "interleaved", "pipeline_parallel.virtual_stages": 2},
        },
    },
    8: {
        **{f"tensor2-1f1b-zero{z}": {**STAGED, "zero": z} for z in range(4)},
        "tensor2-whole-zb-h1-zero2": {**STAGED, **WHOLE, "pipeline_parallel.schedule": "zb-h1", "zero": 2},
        "tensor4-zero3": {"tensor_parallel": 4, "zero": 3},
        "tensor4-gpipe": {**STAGED, "tensor_parallel": 4, "pipeline_parallel.schedule": "gpipe"},
        "tensor4-whole-1f1b": {**STAGED, "tensor_parallel": 4, **WHOLE},
    },
}
SETTINGS = {**PLANS, **WIDE, **{name: plan for plans in SPLIT.values() for name, plan in plans.items()}}
RANKS = {
    **{**dict.fromkeys(PLANS, 2), **dict.fromkeys(WIDE, 4)},
    **{name: ranks for ranks, plans in SPLIT.items() for name in plans},
}
OURS = [name for name in (*models.MODELS, *models.LONGER) if name not in DRAWS]
OTHERS = [name for name in zoo.ZOO if name not in APART and not name.startswith("compiled")]
HF = importlib.util.find_spec("transformers") is not None
FAMILIES = ["gpt2", "llama", "mixtral", "t5", "vit"] if HF else []
SPLITS = {f"split-{name}": name for name in training.MODELS if HF or name == "gpt"}
MODELS = [*OURS, *OTHERS, *FAMILIES, *SPLITS]
ROWS = 16


def plans_of(model: str) -> list[str]:
    """The plans under which a model is verified."""
    return [name for name in SETTINGS if (name in PLANS or name in WIDE) != (model in SPLITS)]


def case_of(name: str) -> zoo.Case:
    """The case of a model of the zoo or of transformers."""
    if name in zoo.ZOO:
        return zoo.ZOO[name]
    from engine import test_transformers_models as families

    found: zoo.Case = families.CASES[name]
    return found


def make(name: str) -> nn.Module:
    """A model; random numbers were seeded before."""
    if name in OURS:
        made: nn.Module = {**models.MODELS, **models.LONGER}[name]()
        return made
    if name in SPLITS:
        return training.family_of(SPLITS[name])
    return case_of(name).build()


def batch(name: str, step: int) -> Any:
    """Sixteen rows of a step."""
    if name in OURS:
        return models.batch(step, 0, 1, ROWS), step
    if name in SPLITS:
        return training.batch(SPLITS[name], step, ROWS)
    drawn = [case_of(name).batch(torch.Generator().manual_seed(100 * step + k)) for k in range(ROWS)]
    leaves, spec = [tree_flatten(each)[0] for each in drawn], tree_flatten(drawn[0])[1]
    rows = leaves[0][0].shape[0]
    return tree_unflatten([torch.cat(same) for same in zip(*leaves[: ROWS // rows], strict=True)], spec)


def loss(name: str, output: Any, rows: Any) -> torch.Tensor:
    """The loss of what a model returned."""
    if name in SPLITS:
        return training.loss_of(output)
    return output if name in OURS else case_of(name).loss(output, rows)


def job(model: str, plan: str) -> VerificationJob:
    """Two steps of a model under a plan."""
    made = zs.Plan.from_dict(SETTINGS[plan])
    functions = partial(make, model), made, partial(batch, model), OPTIMIZER, partial(loss, model)
    return VerificationJob(*functions, RANKS[plan], steps=2).exact()
