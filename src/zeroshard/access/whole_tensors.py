"""Whole tensors from the parts that ranks hold, on the host, one tensor at a time."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zeroshard.parts.part import Parts
from zeroshard.parts.place import Axis, Piece, Split


class WholeTensors:
    """Puts the parts of split parameters together.

    Args:
        axes: over which parameters are split, by name.
        tied: for parameters with several names, each further name and the first.
    """

    def __init__(self, parts: Parts, axes: Mapping[str, Axis], tied: Mapping[str, str]) -> None:
        self._axes, self._tied = axes, tied
        self._held = {name: split for part in parts.all for name, split in part.splits.items()}
        self._everywhere: dict[str, list[Split]] = {}  # by name, the parts of the ranks of its axis

    def put_together(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict of this rank with whole tensors on the host in the place of parts; a collective call."""
        return {key: self.copy(key, value) if self._name(key) in self._held else value for key, value in state.items()}

    def copy(self, key: str, value: Any) -> Any:
        """A copy of an entry of a state dict on the host, of a split parameter the whole; a collective call."""
        if not isinstance(value, Tensor):
            return value
        split = self._held.get(self._name(key))
        return value.detach().cpu().clone() if split is None else self._whole(self._name(key), split, value.detach())

    def _name(self, key: str) -> str:
        return self._tied.get(key, key)

    def _whole(self, name: str, split: Split, part: Tensor) -> Tensor:
        whole, comm = torch.empty(split.shape, dtype=part.dtype), self._axes[split.axis].comm
        for rank, theirs in enumerate(self._of_ranks(name, split)):
            values = part.contiguous() if rank == comm.mesh.rank else part.new_empty(theirs.part_shape)
            comm.broadcast(values, f"part of {name}", rank)
            theirs.put(values, whole)
        return whole

    def _of_ranks(self, name: str, split: Split) -> list[Split]:
        """The parts of all ranks of an axis; a collective call the first time, for all parameters split over it."""
        if name not in self._everywhere:
            names = sorted(n for n, other in self._held.items() if other.axis == split.axis)
            mine = [[[piece.start, piece.stop] for piece in self._held[n].pieces] for n in names]
            by_rank = self._axes[split.axis].comm.agree_on(mine, f"parts over {split.axis}")
            for n, everyone in zip(names, zip(*by_rank, strict=True), strict=True):
                self._everywhere[n] = [
                    replace(self._held[n], pieces=tuple(Piece(*ends) for ends in pieces)) for pieces in everyone
                ]
        return self._everywhere[name]
