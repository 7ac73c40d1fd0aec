"""Scattered messages: each rank of a replica sends a part of the same activation to the next stage.

PTD-P (2104.04473, section 4.1) calls it scatter/gather: t tensor ranks would send the same tensor over t links. Each
sends 1/t of it, to the rank in its place, and the ranks of the next stage gather the whole on arrival, over the faster
links inside of a stage. The gradient goes back in the same way.
"""

import torch
from torch import Tensor

from zeroshard.comm.collectives import Comm
from zeroshard.traffic import Purpose

GATHERS = {  # the gather that follows the arrival of a part
    Purpose.SEND_ACTIVATIONS: Purpose.GATHER_MESSAGES,
    Purpose.SEND_GRADIENTS: Purpose.GATHER_MESSAGES,
    Purpose.SEND_TO_EVALUATE: Purpose.GATHER_TO_EVALUATE,
}


class Scattered:
    """Equal parts of tensors that are the same on all ranks of `comm`; the last may end in padding."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def numel(self, whole: int) -> int:
        """Elements of a part of `whole` elements."""
        return -(-whole // self._comm.mesh.ranks)

    def room(self, whole: int) -> int:
        """Elements of a buffer for all parts."""
        return self.numel(whole) * self._comm.mesh.ranks

    def part(self, tensor: Tensor) -> Tensor:
        """This rank's part [S] of a tensor."""
        size = self.numel(tensor.numel())
        part = tensor.reshape(-1)[size * self._comm.mesh.rank :][:size]
        return part if part.numel() == size else torch.cat([part, part.new_zeros(size - part.numel())])

    def own(self, room: Tensor) -> Tensor:
        """The view of this rank's part in a buffer [N*S] for all parts."""
        size = room.numel() // self._comm.mesh.ranks
        return room[size * self._comm.mesh.rank :][:size]

    def gather(self, room: Tensor, whole: int, sent: Purpose, label: str) -> None:
        """Fill a buffer [N*S] that has this rank's part with the parts of all ranks; a collective call.

        Args:
            whole: elements without padding.
            sent: the purpose of the messages that brought the parts.
            label: the same on all data ranks.
        """
        self._comm.gather(room, self.own(room), GATHERS[sent], label, room.numel() - whole).wait()
