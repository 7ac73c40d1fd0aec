"""The plans that run on a device of paper, each with its number of ranks and of waits of the host for the device.

The waits are those of the main thread in a step of the steady state, one number for each rank. All plans have one:
the loss and the norms of the gradients come to the host together, once a step. The others are

- 2 where flats are sliced: whether a parameter was written while its values were absent (`written_while_absent`);
- 1 for each flat whose gradients an update on the host reads, before it may read them;
- 2 on the rank that draws the loss of a pipeline, 1 more on the ranks that agree on it;
- with experts 1 for the sizes of messages and 2 for the readings of a router; 2 more on the first rank of a group;
- 2 for each tensor that is compressed by its zeros, whose number is a size.
"""

from typing import Any

from plans import ON_ONE_DEVICE

Settings = dict[str, Any]
STAGES = "pipeline_parallel"


def _staged(schedule: str, ranks: int = 2, **more: Any) -> Settings:
    balance = {f"{STAGES}.balance": "parameters"}  # which no clock decides
    return {STAGES: ranks, f"{STAGES}.schedule": schedule, "microbatches": 4, **balance, **more}


ALONE: dict[str, Settings] = {
    **ON_ONE_DEVICE,
    "zero 2, microbatches, clipped": {"zero": 2, "microbatches": 4, "clip_norm": 0.5},
    "zero 3, loss in chunks": {"zero": 3, "loss_chunk": 32},
    "guesses in bf16": {"offload": "optimizer", "precision": "bf16", "clip_norm": 1e3},
    "delayed update": {"offload": "optimizer", "offload.delayed_update": True, "offload.delayed_warmup": 1},
    "delayed update of half": {
        "offload": "optimizer",
        "offload.delayed_update": True,
        "offload.delayed_warmup": 1,
        "offload.fraction": 0.5,
    },
    "parameters on the host, bf16": {
        "zero": 3,
        "offload": "optimizer,parameters",
        "precision": "bf16",
        "clip_norm": 1e3,
    },
    "moments of 8 bits on the host": {"offload": "optimizer", "offload.moments": "8bit"},
}
TWO: dict[str, Settings] = {
    **{f"zero {zero}": {"zero": zero} for zero in range(4)},
    "overlapped gather": {"zero": 2, "overlap_gather": True},
    "zero 2, two microbatches": {"zero": 2, "microbatches": 2, "clip_norm": 0.5},
    "zero 3, blocks": {"zero": 3, "recompute": "blocks"},
    "optimizer on the host, two ranks": {"offload": "optimizer", "clip_norm": 0.5},
    "optimizer on the host, zero 3": {"zero": 3, "offload": "optimizer"},
    "everything on the host, two ranks": {"zero": 3, "offload": "optimizer,parameters,activations"},
    "tensor parallel": {"tensor_parallel": 2},
    "tensor parallel, zero 3, selective": {"tensor_parallel": 2, "zero": 3, "recompute": "selective"},
    "naive": _staged("naive"),
    "gpipe": _staged("gpipe"),
    "1f1b": _staged("1f1b"),
    "zb-h1": _staged("zb-h1"),
    "interleaved": _staged("interleaved", **{f"{STAGES}.virtual_stages": 2}),
    "pipedream": _staged("pipedream"),
    "2bw": _staged("2bw"),
    "stages, arena": _staged("1f1b", **{"activations.recompute": "blocks", "activations.arena": True}),
    "stages, optimizer on the host": _staged("1f1b", offload="optimizer"),
    "experts": {"expert_parallel": 2},
    "experts, zero 3": {"expert_parallel": 2, "zero": 3},
    "users": {"zero": 3, "SAVE": True, "GATHERED": True, "EVALUATE": True, "STATE": True},
    "users, on the host": {
        "zero": 3,
        "offload": "optimizer,parameters",
        "SAVE": True,
        "GATHERED": True,
        "EVALUATE": True,
    },
}
FOUR: dict[str, Settings] = {
    "groups of two": {"zero": 3, "shard_group": 2},
    "experts on two machines": {
        "expert_parallel.ranks": 4,
        "expert_parallel.two_level": True,
        "zero": 2,
        "MACHINES": True,
    },
    "stages and tensor parallel": {STAGES: 2, "tensor_parallel": 2, "microbatches": 2},
    "stages and tensor parallel, whole sequences": {
        STAGES: 2,
        "tensor_parallel": 2,
        "tensor_parallel.sequence": False,
        "microbatches": 2,
    },
}
# Beside the plan: what a user or a model does, without which waits of some lines would order nothing.
ALONE |= {
    "by hand, clipped by value": {"offload": "optimizer", "BY_HAND": True},
    "a block left out, bf16": {"offload": "optimizer", "precision": "bf16", "LEFT_OUT": True},
    "skipped step": {
        "offload": "optimizer",
        "precision": "fp16",
        "loss_scale": 128.0,
        "microbatches": 2,
        "SPIKE": True,
    },
    "a copy after a copy": {"COPIES": True},
    "model that outlives its engine": {"offload": "optimizer", "OUTLIVES": True},
}
TWO |= {
    "messages as large as tied weights": _staged("1f1b", microbatches=2),
    "tensor parallel, loss in chunks": {"tensor_parallel": 2, "loss_chunk": 32},
    "inputs of blocks divided": {
        "tensor_parallel": 2,
        "tensor_parallel.sequence": False,
        "recompute": "blocks",
        "activations.partition": True,
    },
    "tensor parallel, muon": {"tensor_parallel": 2, "zero": 1, "OPTIMIZER": "Muon"},
    "tensor parallel, adafactor": {"tensor_parallel": 2, "OPTIMIZER": "Adafactor"},
    "under a profiler": {"zero": 1, "PROFILED": True},
    "experts with buffers": {"expert_parallel": 2, "COUNTING": True},
    "losses over the global batch": {"zero": 2, "EXPERTS": True, "GLOBAL": True},
    "stages, experts, blocks": _staged("1f1b", EXPERTS=True, recompute="blocks"),
}
FOUR |= {"adafactor of cut matrices": {"zero": 2, "OPTIMIZER": "Adafactor", "CUT": True}}
RANKS = {**dict.fromkeys(ALONE, 1), **dict.fromkeys(TWO, 2), **dict.fromkeys(FOUR, 4)}
PLANS = {**ALONE, **TWO, **FOUR}
