"""Inputs of recomputed forwards: stored as the plan says, and restored for the recomputation.

[Note: kept tensors] A tensor that is not computed again goes to the hooks of saved tensors around the forward, if there
are any: they count it, bring its unit, or send it to the host.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from zeroshard.recompute.arena import CheckpointArena, PlacedCheckpoint
from zeroshard.recompute.context import RecomputeContext
from zeroshard.saved.kept import Kept

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class KeptInput:
    """A tensor that is not computed again ([Note: kept tensors]), in the arena of checkpoints if it takes it."""

    __slots__ = ("place", "requires_grad", "saved", "unpack")

    def __init__(self, tensor: Tensor, hooks: Hooks | None, arena: CheckpointArena | None = None) -> None:
        self.requires_grad = tensor.requires_grad
        self.place = None if arena is None else arena.place(tensor)
        self.saved: Any
        self.unpack: Callable[[Any], Tensor]
        if self.place is not None and self.place.held is not None:
            self.saved, self.unpack = self.place, PlacedCheckpoint.tensor
        elif hooks:
            is_itself = isinstance(tensor, nn.Parameter) or not tensor.requires_grad
            self.saved = hooks[0](tensor if is_itself else tensor.detach())
            self.unpack = hooks[1]
        else:
            self.saved, self.unpack = Kept(tensor), Kept.tensor

    def tensor(self) -> Tensor:
        """The tensor again, cut off from its graph; one that had none is itself."""
        tensor = self.unpack(self.saved)
        return tensor.detach() if self.requires_grad or tensor.requires_grad else tensor


class _KeptShard(KeptInput):
    """A tensor of which this rank keeps a shard."""

    __slots__ = ("partition", "shape")

    def __init__(self, tensor: Tensor, hooks: Hooks | None, context: RecomputeContext) -> None:
        partition = context.partition
        assert partition is not None
        super().__init__(partition.part(tensor), hooks, context.arena)
        self.partition, self.shape, self.requires_grad = partition, tensor.shape, tensor.requires_grad

    def tensor(self) -> Tensor:
        """The tensor again, gathered: a collective call."""
        return self.partition.whole(super().tensor(), self.shape)


def keep_input(tensor: Tensor, hooks: Hooks | None, context: RecomputeContext, places: bool = True) -> KeptInput:
    """Keep an input of a recomputed forward, or this rank's part of it.

    Args:
        places: whether it may lie in the arena.
    """
    if context.partition is not None and context.partition.takes(tensor):
        return _KeptShard(tensor, hooks, context)
    return KeptInput(tensor, hooks, context.arena if places else None)
