"""Gradients of one flat, from autograd to the update."""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from zeroshard.parts.planned import Planned, Wire, Work
from zeroshard.units import Flat


class GradientSum(Protocol):
    """Sum of the means of a slice [S] until the update: on the device, or on a tier below it."""

    @property
    def adds(self) -> bool:
        """Whether `slot()` holds a sum, to which the next mean is added."""

    @property
    def apart(self) -> bool:
        """Whether `slot()` lies outside of the gradient buffer."""

    @property
    def wide(self) -> bool:
        """Whether 16-bit gradients are summed in fp32."""

    def slot(self) -> torch.Tensor:
        """Memory for the next mean [S]."""

    def put(self, mean: torch.Tensor) -> None:
        """Add a mean [S], in its slot or elsewhere; the caller leaves it unchanged until `release`."""

    def release(self) -> None:
        """Wait until the slot is free again."""

    def make_way(self) -> None:
        """Prepare for a write into the gradient buffer."""

    def widen(self, empty: bool = False) -> None:
        """Sum in fp32 from now on, `empty` or not."""

    def settle(self) -> torch.Tensor:
        """The sum [S] since the last `consume`, zeros if there was none."""

    def norm(self) -> torch.Tensor:
        """Its 2-norm, a scalar."""

    def clear(self, low: int, high: int) -> None:
        """Zero elements [low, high) of the sum."""

    def changed(self, filled: bool = False) -> None:
        """Note a change of the sum in place; with `filled`, it holds gradients of other ranks."""

    def consume(self) -> None:
        """Begin a new sum with the next mean."""

    def planned(self) -> Iterator[Planned]:
        """Planned bytes of the sum."""

    def wire(self, work: Work) -> Wire:
        """Planned elements moved between tiers in a step."""


class Reduction(Protocol):
    """Reduces the gradient buffer into the sum of the slice's owner."""

    needed: bool
    local: bool
    lasts: bool

    @property
    def in_flight(self) -> bool:
        """Whether a reduction was started and not finished."""

    def start(self) -> None:
        """Start to send the gradient buffer."""

    def finish(self, seconds: float | None = None) -> bool:
        """Wait until the mean is in the sum; False if that takes longer than `seconds`."""

    def release(self) -> None:
        """Wait until the gradient buffer is free again."""

    def meet(self) -> None:
        """Finish and release, where other ranks wait for this rank's part."""

    def start_whole(self) -> None:
        """Start the gather for `whole`, if it needs no memory."""

    def whole(self, total: torch.Tensor) -> torch.Tensor:
        """The gradient over the elements that this rank updates, from its slice of the sum."""

    def pieces(self, total: torch.Tensor) -> list[torch.Tensor]:
        """The contents of `whole` as consecutive pieces, for reads only."""

    def used(self) -> None:
        """Note that the update has read the tensors of `whole` or `pieces`."""

    def reserve(self, total: torch.Tensor) -> None:
        """Reserve the scratch of `whole` in the arena."""

    def wire(self, work: Work) -> Wire:
        """Planned elements sent in a step."""


class Gradients(Protocol):
    """The gradients of a trainable flat, for updaters and accounts; `zero.gradients.BufferedGradients` has more."""

    flat: Flat
    reduction: Reduction

    @property
    def written_in_step(self) -> bytes:
        """Per parameter, 1 where it got a gradient since the last update."""

    @property
    def layout(self) -> tuple[bool, bool]:
        """Whether 16-bit gradients were widened to fp32: in the sum over reductions, and in this rank's buffer."""

    @layout.setter
    def layout(self, wide: tuple[bool, bool]) -> None:
        """Restore the dtypes of the buffers from an earlier run."""

    def receive(self, number: int, gradient: torch.Tensor | None) -> None:
        """Add the gradient of parameter `number`; None where autograd reached the parameter without a gradient."""

    def collect(self) -> None:
        """Copy gradients that autograd has accumulated itself to the buffer."""

    def settle(self) -> GradientSum:
        """The sum of the step, with nothing under way."""

    def for_update(self, reads: bool = False) -> list[torch.Tensor]:
        """The gradient over the elements that this rank updates; `reduction.used` comes after the update.

        Args:
            reads: for reads only, so it may be several consecutive tensors, of all ranks.
        """

    def consume(self) -> None:
        """Drop the step's gradients."""

    def planned(self) -> Iterator[Planned]:
        """Planned bytes of the gradients."""

    def wire(self, work: Work) -> Wire:
        """Planned elements sent in a step."""


def edit_sum(gradients: Gradients, edit: Callable[[torch.Tensor], object], filled: bool = False) -> None:
    """Change the sum of a step [S] in place, once all gradients are reduced.

    Args:
        filled: from now on the sum holds gradients of other ranks, even if this rank has none.
    """
    total = gradients.settle()
    values = total.settle()
    total.changed(filled)
    edit(values)
