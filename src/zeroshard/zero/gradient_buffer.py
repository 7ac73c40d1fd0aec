"""The gradient buffer: where autograd's gradients of one flat arrive, laid out like the parameters."""

from collections.abc import Iterator

import torch

from zeroshard.comm.collectives import Comm
from zeroshard.memory.ledger import Arena, Category, Ledger
from zeroshard.parts.planned import Planned, on_device
from zeroshard.units import Flat


class GradientBuffer:
    """A buffer [N*S], contiguous so that reductions send it as it is.

    Args:
        kept: hold it for good; else it comes from the arena with the first gradient and goes back when it was reduced.

    Attributes:
        dtype: of the gradients in it.
        tensor: the buffer [N*S]; None while there is none.
    """

    def __init__(self, flat: Flat, comm: Comm, ledger: Ledger, arena: Arena, dtype: torch.dtype, kept: bool) -> None:
        self._flat, self._comm, self._ledger, self._arena = flat, comm, ledger, arena
        self.dtype, self.kept = dtype, kept
        self.tensor: torch.Tensor | None = self._make() if kept else None
        self._planned = on_device(flat.index, Category.GRADIENTS, dtype.itemsize)

    def ready(self) -> torch.Tensor:
        """The buffer [N*S], taken from the arena if there is none."""
        if self.tensor is None:
            label = f"gradients {self._flat.label}"
            self.tensor = self._arena.take(self._flat.index.padded_numel, self.dtype, label)
        return self.tensor

    def drop(self) -> None:
        """Hand it back, unless it is kept."""
        if self.tensor is not None and not self.kept:
            self._arena.give(self.tensor)
            self.tensor = None

    def widen(self) -> None:
        """Convert the buffer to fp32, values included, and stay there."""
        old, self.dtype = self.tensor, torch.float32
        if old is None:
            return
        index, label = self._flat.index, f"gradients {self._flat.label}"
        if self.kept:
            self.tensor = self._make()
            self._ledger.give(Category.GRADIENTS, old.nbytes, label, index.padding * old.itemsize)
        else:
            self.tensor = self._arena.take(index.padded_numel, torch.float32, label)
            self._arena.give(old)
        self.tensor.copy_(old)

    def planned(self) -> Iterator[Planned]:
        """Bytes of whole gradients, where they are kept, in the dtype of the start."""
        if self.kept:
            yield self._planned

    def _make(self) -> torch.Tensor:
        index = self._flat.index
        nbytes, padding = (n * self.dtype.itemsize for n in (index.padded_numel, index.padding))
        self._ledger.take(Category.GRADIENTS, nbytes, f"gradients {self._flat.label}", padding)
        return self._comm.buffer(index.padded_numel, self.dtype)
