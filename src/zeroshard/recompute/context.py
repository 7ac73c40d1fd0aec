"""Services of the engine for recomputation: device, ledger, gathers, random numbers, clock."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from zeroshard.memory.ledger import Ledger
from zeroshard.recompute.arena import CheckpointArena
from zeroshard.recompute.shards import CheckpointPartition
from zeroshard.saved.kept import Kept
from zeroshard.saved.savers import Savers


@dataclass(slots=True)
class RecomputeContext:
    """Services of the engine for recomputation.

    Attributes:
        device: on which blocks compute.
        ledger: enters what is kept.
        places: the storages of weights now.
        hold: holds a tensor on the device for the backward, counted.
        gathered: a context in which a unit is gathered, to compute it again.
        draws: a context in which a module draws what it drew in its forward.
        now: seconds.
        partition: divides inputs of blocks that several ranks hold alike; None where none do.
        arena: has the inputs of blocks in one buffer, if they are to lie in one.
        saver: stores what is saved, as the plan says.
        exact: whether what is kept comes back as it was, so that recomputations are compared with their forwards.
    """

    device: torch.device
    ledger: Ledger
    places: Callable[[], set[int]]
    hold: Callable[[Tensor], Kept]
    gathered: Callable[[int], AbstractContextManager[None]]
    draws: Callable[[nn.Module], AbstractContextManager[None]]
    now: Callable[[], float]
    partition: CheckpointPartition | None = None
    arena: CheckpointArena | None = None
    saver: Savers = field(default_factory=lambda: Savers(()))
    exact: bool = True
