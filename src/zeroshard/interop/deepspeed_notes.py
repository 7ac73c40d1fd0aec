"""Plan, optimizer and schedule from a DeepSpeed configuration, with a note on every key."""

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard import optim
from zeroshard.interop.deepspeed_keys import Fate
from zeroshard.plan import Plan

SET_ASIDE = ("not supported", "left open")


@dataclass(frozen=True, slots=True)
class Note:
    """The fate of one key.

    Attributes:
        key: its path, such as "zero_optimization.stage".
        value: its value; None for a missing key whose default counts.
        fate: "kept", "needs nothing", "not supported" or "left open".
        text: the setting that it became, the reason, or the way out.
    """

    key: str
    value: Any
    fate: Fate
    text: str

    def __str__(self) -> str:
        return f"{self.key} = {json.dumps(self.value, default=str)}: {self.fate}: {self.text}"


@dataclass(frozen=True, slots=True)
class FromDeepSpeed:
    """Plan, optimizer and schedule from a DeepSpeed configuration; printed, it lists the fate of every key.

    Attributes:
        plan: for the engine.
        optimizer: for the engine, a function of the parameters; None where the configuration names none.
        scheduler: makes the learning-rate schedule of `engine.optimizer`; None where there is none.
        rows: rows of data that each rank gives to one `train_step`: `train_micro_batch_size_per_gpu` times
            `gradient_accumulation_steps`; None where the configuration leaves it open.
        notes: the fate of each key.
    """

    plan: Plan
    optimizer: Callable[..., torch.optim.Optimizer] | None
    scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None
    rows: int | None
    notes: tuple[Note, ...]

    @property
    def set_aside(self) -> tuple[Note, ...]:
        """The notes that the warning lists: keys without an effect here, and those left open."""
        return tuple(note for note in self.notes if note.fate in SET_ASIDE)

    def __str__(self) -> str:
        return "\n".join(map(str, self.notes))


def own_optimizer(kind: str) -> str:
    """The end of a sentence on an optimizer that torch lacks, with the way out."""
    own = {name.lower(): name for name in optim.__all__ if inspect.isclass(found := getattr(optim, name))
           and issubclass(found, torch.optim.Optimizer)}  # fmt: skip
    if kind.lower() in own:
        name = own[kind.lower()]
        return (
            f". zs.optim.{name} is {name} as its paper has it, with options and a rule of its own that are not "
            f"DeepSpeed's: remove the section and give the engine partial(zs.optim.{name}, lr=...)."
        )
    return (
        f", nor is one of that name among those of zs.optim ({', '.join(own.values())}). Remove the section and give "
        f"the engine another optimizer, which makes another run, or a torch.optim.Optimizer of your own that has its "
        f"rule."
    )
