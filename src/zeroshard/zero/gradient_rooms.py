"""The rooms of the gradients of one flat, for functions that make gradients where they belong.

See [Note: gradients in place] in `autograd.gradient_slot`.
"""

import torch
from torch import Tensor

from zeroshard.autograd.gradient_slot import Lent, RowGradient
from zeroshard.errors import PlanError
from zeroshard.parts.gradients import GradientSum, Reduction
from zeroshard.units import Flat
from zeroshard.zero.gradient_buffer import GradientBuffer


class GradientRooms:
    """The gradient buffer of a flat, parameter by parameter.

    Args:
        total: shares memory with the buffer, perhaps.
        reduction: sends what is in the buffer.
    """

    def __init__(self, flat: Flat, buffer: GradientBuffer, total: GradientSum, reduction: Reduction) -> None:
        self._flat, self._buffer, self._sum, self._reduction = flat, buffer, total, reduction
        self._lent: dict[int, int] = {}  # by number, the backward that has not handed the gradient over yet
        self._rows: dict[int, list[RowGradient]] = {}  # by number, to be added to the gradient once it has come

    def ready(self) -> Tensor:
        """The gradient buffer, free to be written."""
        self._reduction.finish()  # the caller finishes reductions of several flats in order
        self._reduction.release()
        buffer = self._buffer.ready()
        self._sum.make_way()
        return buffer

    def begin(self) -> None:
        """A backward begins; what an interrupted one had borrowed is free again."""
        self._lent.clear()
        self._rows.clear()

    def lend(self, number: int, adds: bool) -> Lent | None:
        """The room of parameter `number`; None while it is lent, or where the buffer has another dtype.

        Args:
            adds: whether there is an earlier gradient in it.
        """
        if self._buffer.dtype is not self._flat.dtype or number in self._lent:
            return None
        self._lent[number] = torch._C._current_graph_task_id()
        return Lent(self._flat.view(self.ready(), number), adds)

    def leave(self, number: int, rows: RowGradient) -> bool:
        """Keep rows until the gradient has come that is made in this room; False where none is, by this backward."""
        if self._lent.get(number) != torch._C._current_graph_task_id():
            return False
        self._rows.setdefault(number, []).append(rows)
        return True

    def complete(self, number: int, gradient: Tensor) -> None:
        """Add the rows that were left to the gradient that has come."""
        for rows in self._rows.pop(number, ()):
            rows.add_to(gradient)

    def holds(self, number: int) -> bool:
        """Whether a gradient is made in this room that was not handed over."""
        return number in self._lent

    def take_back(self, number: int) -> bool:
        """Whether the gradient that comes now contains what was made in its room; from then on it is not lent."""
        if self._lent.get(number) != torch._C._current_graph_task_id():
            return False
        del self._lent[number]
        return True

    def refuse_lent(self) -> None:
        """Refuse to send a gradient that a backward around this one is still making.

        Raises:
            PlanError: with the name of a parameter.
        """
        if self._lent:
            name = self._flat.index.entries[next(iter(self._lent))].name
            raise PlanError(
                f"The gradient of '{name}' is made by two backwards, one inside of the other: its module is called "
                f"both in a re-entrant recomputation and outside of it. Use checkpoint(use_reentrant=False)."
            )
