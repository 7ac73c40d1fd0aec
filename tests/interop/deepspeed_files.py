"""Writes checkpoints in DeepSpeed's layout by plain torch.save, from whole tensors, without DeepSpeed.

The layout is that of the real files beside this module, which DeepSpeed 0.19.6 wrote.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


class ZeroStageEnum(IntEnum):
    """As DeepSpeed's, under whose name it is pickled."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


class LossScaler:
    """Likewise; loading a real one must not run this."""

    def __init__(self) -> None:
        self.cur_scale = 1.0

    def __setstate__(self, state: object) -> None:
        raise AssertionError("the class that the file names was used")


@contextmanager
def pickled_as(kind: type, module: str) -> Iterator[None]:
    """Let pickle write and find `kind` in a module that need not exist."""
    words = module.split(".")
    names = [".".join(words[:count]) for count in range(1, len(words) + 1)]
    kept = {name: sys.modules.get(name) for name in names}
    own = kind.__module__
    sys.modules.update({name: ModuleType(name) for name in names})
    setattr(sys.modules[module], kind.__name__, kind)
    kind.__module__ = module
    try:
        yield
    finally:
        kind.__module__ = own
        for name, found in kept.items():
            del sys.modules[name]
            if found is not None:
                sys.modules[name] = found


@contextmanager
def deepspeeds_names() -> Iterator[None]:
    """Let pickle write and find the classes of this module under the names of DeepSpeed's."""
    with (
        pickled_as(LossScaler, "deepspeed.runtime.fp16.loss_scaler"),
        pickled_as(ZeroStageEnum, "deepspeed.runtime.zero.config"),
    ):
        yield


def save(folder: Path, stage: int, ranks: int, groups: Sequence[Tensors], **rest: Any) -> None:
    """A checkpoint with the tag `global_step7` of parameters in optimizer groups.

    Args:
        rest: `frozen` and `buffers` by name, `shared` as alias to name, and `sub_groups`, how many flat tensors stage
            3 keeps in each rank.
    """
    frozen, buffers, shared = rest.get("frozen", {}), rest.get("buffers", {}), rest.get("shared", {})
    tag = folder / "global_step7"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    every = {name: value for group in groups for name, value in group.items()}
    for rank in range(ranks if stage == 3 else 1):
        whole = {**every, **frozen, **{alias: every[name] for alias, name in shared.items()}}
        empty = {name: torch.empty(0, dtype=torch.bfloat16) for name in whole}
        sliced = {name: cut_singly(value.bfloat16(), ranks)[rank] for name, value in frozen.items()}
        model = {
            "module": OrderedDict({**(empty if stage == 3 else half(whole)), **buffers}),
            "buffer_names": list(buffers),
            "param_shapes": [OrderedDict((name, value.shape) for name, value in group.items()) for group in groups],
            "frozen_param_shapes": OrderedDict((name, value.shape) for name, value in frozen.items()),
            "frozen_param_fragments": OrderedDict(sliced if stage == 3 else half(frozen)),
            "shared_params": shared,
            "global_steps": 7,
        }
        prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        torch.save(model, tag / f"{prefix}mp_rank_00_model_states.pt")
    for rank in range(ranks):
        if stage == 3:
            flat = torch.cat([cut_singly(value, ranks)[rank] for value in every.values()])
            state = {"fp32_flat_groups": list(flat.tensor_split(rest.get("sub_groups", 1))), "partition_count": ranks}
        else:
            state = {"single_partition_of_fp32_groups": [cut_whole(group, ranks)[rank] for group in groups]}
            state |= {"partition_count": [ranks] * len(groups)}
        state |= {"zero_stage": ZeroStageEnum(stage), "loss_scaler": LossScaler()}
        with deepspeeds_names():
            torch.save({"optimizer_state_dict": state}, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def half(tensors: Tensors) -> Tensors:
    """The tensors in bf16."""
    return {name: value.bfloat16() for name, value in tensors.items()}


def cut_singly(value: Tensor, ranks: int) -> list[Tensor]:
    """Stage 3: a tensor padded to a multiple of the ranks, in equal slices."""
    padding = -value.numel() % ranks
    return list(torch.cat([value.flatten(), value.new_full((padding,), 99.0)]).chunk(ranks)) or [value.flatten()]


def cut_whole(group: Tensors, ranks: int) -> list[Tensor]:
    """Stages 1 and 2: tensors end to end, padded to a multiple of twice the ranks, in equal slices."""
    flat = torch.cat([value.flatten() for value in group.values()])
    return list(torch.cat([flat, flat.new_full((-flat.numel() % (2 * ranks),), 99.0)]).chunk(ranks))
