"""Gradients of one flat buffer: received from autograd, reduced to the rank that owns the slice, kept or dropped.

The states of one parameter's gradient (`GradientState`), and the calls that change them:

    EMPTY     no gradient came in this step                lend -> LENT, receive -> ARRIVED
    LENT      a function writes it into its slot           receive -> ARRIVED
    ARRIVED   in the gradient buffer; more may be added    start_reduce -> REDUCING
    REDUCING  under way to the owner of each slice         reduction.finish -> SUMMED
    SUMMED    its mean is in the owner's sum               receive -> ARRIVED, consume -> EMPTY

`take_back` leads from any state to EMPTY. On a single rank without a lower tier the buffer is the sum, and ARRIVED the
last state. The objects on the way: the slot of a parameter (its hooks), `ShownGradients` (`p.grad`), `GradientBuffer`,
a `Reduction`, a `GradientSum`; `step.backward.Reductions` says which unit is reduced next.

[Note: life of a gradient] Autograd passes each parameter's gradient once per backward. It is copied (or, from the
second backward without a reduction on, added) into the gradient buffer, laid out like the parameters, so that messages
are contiguous. A reduction brings each slice to its owner, which adds the ranks' copies in rank order in fp32, divides
by the data ranks, and adds the mean to the sum. The update consumes the sum.

[Note: small parameters] Biases and norms lie behind one another at the end of a flat. Autograd keeps their gradients
itself until those of the unit are there, and one copy takes them all into the gradient buffer, so Python has little to
do for each. Big gradients are copied one by one, while they are in the cache.

[Note: fp32 accumulation] While a step has a single backward, nothing is accumulated over time and 16-bit gradients stay
16-bit: the paper's 2Ψ bytes. From the second backward of a step on, sums are kept in fp32 (`widen`). Where an order of
actions says beforehand that gradients will add up, they are so from the start.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter

import torch

from zeroshard.autograd.gradient_slot import Lent, RowGradient
from zeroshard.comm.collectives import Comm
from zeroshard.errors import PlanError
from zeroshard.memory.ledger import Arena, Category, Ledger
from zeroshard.parts.gradients import GradientSum, Reduction
from zeroshard.parts.planned import Planned, Wire, Work, on_device
from zeroshard.units import Flat
from zeroshard.zero.grad_attribute import ShownGradients

LAYOUT = attrgetter("layout")


class GradientState(IntEnum):
    """The state of one parameter's gradient, by the table above."""

    EMPTY = 0
    LENT = 1
    ARRIVED = 2
    REDUCING = 3
    SUMMED = 4


EMPTY, ARRIVED, REDUCING = map(int, (GradientState.EMPTY, GradientState.ARRIVED, GradientState.REDUCING))
# Tables for bytes.translate, one byte for each parameter.
GOT = bytes(state != EMPTY for state in range(256))
SENT = bytes(REDUCING if state == ARRIVED else state for state in range(256))


@dataclass(frozen=True, slots=True)
class Accumulation:
    """Settings of the accumulation of gradients over several backwards.

    Attributes:
        wire_dtype: dtype on the wire; None for that of the gradients themselves, which loses nothing.
        local: several backwards add up before they are reduced.
        reduced: several reductions add up before the update.
    """

    wire_dtype: torch.dtype | None = None
    local: bool = False
    reduced: bool = False


class GradientBuffer:
    """A buffer [N*S] with a slot for each gradient of a flat, contiguous so that reductions send it as it is.

    Slots are lent to functions that make gradients in place (see [Note: gradients in place] in
    `autograd.gradient_slot`).

    Args:
        kept: hold it permanently; else it comes from the arena with the first gradient and returns after the reduction.

    Attributes:
        dtype: of the gradients in it.
        tensor: the buffer [N*S]; None without one.
    """

    def __init__(self, flat: Flat, comm: Comm, ledger: Ledger, arena: Arena, dtype: torch.dtype, kept: bool) -> None:
        self._flat, self._comm, self._ledger, self._arena = flat, comm, ledger, arena
        self.dtype, self.kept = dtype, kept
        self.tensor: torch.Tensor | None = self._make() if kept else None
        self._planned = on_device(flat.index, Category.GRADIENTS, dtype.itemsize)
        self._lent: dict[int, int] = {}  # by number, the backward in which the slot is filled
        self._rows: dict[int, list[RowGradient]] = {}  # by number, to be added to the gradient once it has come

    def ready(self) -> torch.Tensor:
        """The buffer [N*S], taken from the arena if there is none."""
        if self.tensor is None:
            label = f"gradients {self._flat.label}"
            self.tensor = self._arena.take(self._flat.index.padded_numel, self.dtype, label)
        return self.tensor

    def drop(self) -> None:
        """Free the buffer, unless it is kept."""
        if self.tensor is not None and not self.kept:
            self._arena.give(self.tensor)
            self.tensor = None

    def widen(self) -> None:
        """Convert the buffer to fp32 for good, values included."""
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
        """Bytes of whole gradients, where the buffer is kept, in its first dtype."""
        if self.kept:
            yield self._planned

    def begin(self) -> None:
        """Begin a backward; slots that an interrupted backward had borrowed are free again."""
        self._lent.clear()
        self._rows.clear()

    def lend(self, number: int) -> bool:
        """Lend the slot of parameter `number`; False while it is lent, or where the buffer has another dtype."""
        if self.dtype is not self._flat.dtype or number in self._lent:
            return False
        self._lent[number] = torch._C._current_graph_task_id()
        return True

    def lent(self, number: int) -> bool:
        """Whether a gradient is being made in this slot."""
        return number in self._lent

    def leave(self, number: int, rows: RowGradient) -> bool:
        """Add rows later to the gradient that this backward makes in a slot; False where it makes none."""
        if self._lent.get(number) != torch._C._current_graph_task_id():
            return False
        self._rows.setdefault(number, []).append(rows)
        return True

    def store(self, view: torch.Tensor, number: int, gradient: torch.Tensor, adds: bool) -> None:
        """Copy a gradient to its slot, or add it to the earlier gradient there.

        Args:
            view: the slot.
            adds: whether there is an earlier one.
        """
        if self._lent.get(number) == torch._C._current_graph_task_id():
            del self._lent[number]
            if gradient.untyped_storage()._cdata != view.untyped_storage()._cdata:
                view.copy_(gradient)  # the gradient made in the slot was summed with others, or copied
        elif adds or number in self._lent:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        for rows in self._rows.pop(number, ()):
            rows.add_to(view)

    def refuse_lent(self) -> None:
        """Refuse to reduce while an enclosing backward is still making a gradient.

        Raises:
            PlanError: with the name of a parameter.
        """
        if self._lent:
            name = self._flat.index.entries[next(iter(self._lent))].name
            raise PlanError(
                f"The gradient of '{name}' is made by two backwards, one inside of the other: its module is called "
                f"both in a re-entrant recomputation and outside of it. Use checkpoint(use_reentrant=False)."
            )

    def _make(self) -> torch.Tensor:
        index = self._flat.index
        nbytes, padding = (n * self.dtype.itemsize for n in (index.padded_numel, index.padding))
        self._ledger.take(Category.GRADIENTS, nbytes, f"gradients {self._flat.label}", padding)
        return self._comm.buffer(index.padded_numel, self.dtype)


class BufferedGradients:
    """The gradients of a trainable flat.

    Args:
        interval: first and one past the last element of the slice that this rank owns.
        opens: autograd accumulates all gradients in the buffer, which is kept, of their dtype, and reduced once all are
            in; then only `collect` is called before a reduction.
        batches: autograd accumulates the gradients of small parameters ([Note: small parameters]).

    Attributes:
        reduction: brings them to the rank that owns the slice.
        shown: the `p.grad` of its parameters.
        buffer: receives the gradients.
        first_small: the number from which on autograd accumulates gradients itself ([Note: small parameters]).
        arrived: per parameter, whether the current backward reached it, even without a gradient, as far as collected.
    """

    def __init__(
        self,
        flat: Flat,
        buffer: GradientBuffer,
        total: GradientSum,
        reduction: Reduction,
        interval: tuple[int, int],
        opens: bool = False,
        batches: bool = True,
    ) -> None:
        self.flat, self.reduction, self._opens = flat, reduction, opens
        self.buffer, self._sum, self._interval = buffer, total, interval
        self.first_small = 0 if opens else flat.first_small if batches else len(flat.parameters)
        self.shown = ShownGradients(flat, self.first_small)
        self.arrived = bytearray(len(flat.parameters))
        self._states = bytearray(len(flat.parameters))  # EMPTY, ARRIVED or REDUCING; `state_of` finds the others
        self._planned = total.wide, buffer.dtype.itemsize >= 4

    @property
    def written_in_step(self) -> bytes:
        """Per parameter, 1 where it got a gradient since the last update, on this rank or as set."""
        return bytes(self._states.translate(GOT))

    @written_in_step.setter
    def written_in_step(self, written: bytes) -> None:
        """Set the parameters with a gradient on any rank, once all are reduced."""
        if written == self.written_in_step:
            return
        for number, state in enumerate(self._states):
            if bool(state) != bool(written[number]):
                self._states[number] = REDUCING if written[number] else EMPTY
                if written[number] and not self.shown.opened:  # else `take_back` would find it taken away
                    self.shown.hide(self.flat.parameters[number], number)

    @property
    def holds(self) -> bool:
        """Whether any gradient arrived in the buffer since the last reduction."""
        return ARRIVED in self._states or self._holds_others

    def listen(self, parameters: Sequence[torch.nn.Parameter]) -> int:
        """Receive the gradients of these parameters, which replace the flat's.

        Returns:
            the number of those that need a call of `receive` each; autograd accumulates the gradients of the others.
        """
        if not self._opens:
            self.shown.listen(parameters)
            return self.first_small
        buffer = self.buffer.ready()
        if not self.shown.opened:  # else there may be gradients, which the update under way is about to use
            buffer.zero_()
        self.shown.open(parameters, buffer)
        return self.first_small

    def collect(self) -> None:
        """Copy the gradients that autograd has accumulated itself since the last call to the buffer."""
        if not self.shown.fresh:
            return
        earlier = self.shown.earlier
        (numbers, filled, found), self.shown.earlier = self.shown.collect(), 0
        if found:
            self._take(found)
        if not earlier and len(found) == len(self._states) - self.first_small:
            self.arrived[self.first_small :] = b"\1" * len(found)
            self._states[self.first_small :] = bytes([ARRIVED]) * len(found)
            return
        for number in filled:
            self._states[number] = ARRIVED
        for number in numbers[earlier:]:
            self.arrived[number] = 1

    def take_back(self, everything: bool = False) -> list[int]:
        """Discard the gradients that the user has set to None or zeroed; with `everything`, zero all.

        Returns:
            the numbers of their parameters.

        Raises:
            PlanError: `p.grad` is a tensor that the user has set.
        """
        self.collect()
        gone, zeroed = self.shown.discarded(self.written_in_step, everything)
        found = [*gone, *zeroed]
        if found:
            self._zero(found)
        for number in gone:
            self._states[number] = EMPTY
        return found

    def receive(self, number: int, gradient: torch.Tensor | None) -> None:
        """Copy the gradient of parameter `number` to its slot, or add it to the earlier gradient there.

        Args:
            gradient: None where autograd reached the parameter without a gradient, which leaves it unwritten.

        Raises:
            PlanError: a sparse gradient.
        """
        self.arrived[number] = 1
        if gradient is None:
            return
        if gradient.layout is not torch.strided:
            name = self.flat.index.entries[number].name
            raise PlanError(
                f"The gradient of '{name}' is sparse; flat buffers are dense. Build its layer with sparse=False."
            )
        adds = self._states[number] == ARRIVED or self.shown.opened or self._holds_others
        self.buffer.store(self.flat.view(self._writable(), number), number, gradient, adds)
        self._states[number] = ARRIVED

    def lend(self, number: int) -> Lent | None:
        """The slot of parameter `number`, for a function that makes its gradient there; None where it is in use."""
        if not self.buffer.lend(number):
            return None
        return Lent(self.flat.view(self._writable(), number), self._adds(number))

    def widen(self) -> None:
        """Keep sums over several backwards in fp32 from now on ([Note: fp32 accumulation])."""
        if self.flat.dtype.itemsize >= 4:
            return
        self._sum.widen()
        if self.buffer.dtype.itemsize < 4 and self.holds:
            self.buffer.widen()

    @property
    def layout(self) -> tuple[bool, bool]:
        """Whether 16-bit gradients were widened to fp32: in the sum over reductions, and in this rank's buffer.

        False where the plan has them in fp32 from the start.
        """
        if self.flat.dtype.itemsize >= 4:
            return False, False
        planned_sum, planned_buffer = self._planned
        return self._sum.wide and not planned_sum, self.buffer.dtype.itemsize >= 4 and not planned_buffer

    @layout.setter
    def layout(self, wide: tuple[bool, bool]) -> None:
        """Restore the dtypes of the buffers from an earlier run, so that sums round alike."""
        wide_sum, wide_buffer = wide
        if wide_buffer and self.buffer.dtype.itemsize < 4:
            self.buffer.widen()
        if wide_sum and not self._sum.wide:
            self._sum.widen(empty=True)

    def start_reduce(self) -> None:
        """Start to reduce every slice to its owner; parameters without a gradient count as zeros."""
        if not self.reduction.needed:
            return
        self.collect()
        if self.reduction.local and not self.holds:
            return
        self.buffer.refuse_lent()
        self._zero_unwritten(self._writable())
        self.reduction.start()
        self._states = self._states.translate(SENT)

    def settle(self) -> GradientSum:
        """Finish the step's reductions; returns the sum."""
        self.reduction.finish()
        self.reduction.release()
        if not self.reduction.needed:
            self._zero_unwritten(self.buffer.ready())
        return self._sum

    def for_update(self, reads: bool = False) -> list[torch.Tensor]:
        """The gradient over the elements that this rank updates: its slice [S], or at stage 0 all [N*S], gathered.

        Args:
            reads: for reads only, so it may be several consecutive tensors, of all ranks.
        """
        total = self._sum.settle()
        return self.reduction.pieces(total) if reads else [self.reduction.whole(total)]

    def consume(self) -> None:
        """Drop the step's gradients: they were used, or the step was skipped."""
        self.reduction.release()
        self.buffer.drop()
        if self.shown.opened:
            self.buffer.ready().zero_()
        self.shown.forget()
        self._sum.consume()
        self._states = bytearray(len(self._states))
        self.shown.consumed()

    def planned(self) -> Iterator[Planned]:
        """Planned bytes of the buffer and the sum."""
        yield from self.buffer.planned()
        yield from self._sum.planned()

    def wire(self, work: Work) -> Wire:
        """Planned elements that reductions and the sum send in a step."""
        yield from self.reduction.wire(work)
        yield from self._sum.wire(work)

    def _take(self, found: Mapping[int, torch.Tensor]) -> None:
        """Copy gradients of small parameters to their slots, or add them to the earlier gradients there."""
        buffer, index, numbers = self._writable(), self.flat.index, range(self.first_small, len(self._states))
        earlier = len(numbers) if self._holds_others else self._states.count(ARRIVED, self.first_small)
        if torch.is_grad_enabled() or set(map(LAYOUT, found.values())) != {torch.strided}:
            found = {n: each.detach().to_dense() for n, each in found.items()}
        if len(found) == len(numbers) and earlier in (0, len(numbers)):
            region = buffer[index.entries[self.first_small].offset : index.numel]
            each = torch._C._nn.flatten_dense_tensors([found[number] for number in numbers])
            region.add_(each) if earlier else region.copy_(each)
            return
        for number, gradient in found.items():
            view = self.flat.view(buffer, number)
            view.add_(gradient) if self._adds(number) else view.copy_(gradient)

    def _zero(self, numbers: Sequence[int]) -> None:
        """Zero the gradients of these parameters in this step, on this rank: in the buffer and in the sum."""
        self.reduction.finish()
        self.reduction.release()
        self._sum.changed()
        start, stop = self._interval
        for entry in (self.flat.index.entries[number] for number in numbers):
            low, high = max(start, entry.offset), min(stop, entry.stop)
            if self.buffer.tensor is not None:
                self.buffer.tensor[entry.offset : entry.stop].zero_()
            if low < high:
                self._sum.clear(low - start, high - start)

    def _writable(self) -> torch.Tensor:
        """The gradient buffer, once no reduction and no sum reads it."""
        self.reduction.finish()  # the caller finishes reductions of several flats in order
        self.reduction.release()
        buffer = self.buffer.ready()
        self._sum.make_way()
        return buffer

    @property
    def _holds_others(self) -> bool:
        """Whether the buffer, which is the sum, holds replicas' gradients of all parameters."""
        return not self.reduction.needed and self._sum.adds

    def _adds(self, number: int) -> bool:
        """Whether the slot of a parameter holds an earlier gradient."""
        return self._states[number] == ARRIVED or self._holds_others

    def _zero_unwritten(self, buffer: torch.Tensor) -> None:
        if self._states.count(ARRIVED) < len(self._states) and not self._holds_others:
            for state, entry in zip(self._states, self.flat.index.entries, strict=True):
                if state != ARRIVED:
                    buffer[entry.offset : entry.stop].zero_()
        if self.flat.index.padding:
            buffer[self.flat.index.numel :].zero_()


def state_of(gradients: BufferedGradients, number: int) -> GradientState:
    """The state of the gradient of parameter `number` of a flat."""
    if gradients.buffer.lent(number):
        return GradientState.LENT
    state = gradients._states[number]
    return GradientState.SUMMED if state == REDUCING and not gradients.reduction.in_flight else GradientState(state)


def zero_all(gradients: BufferedGradients) -> None:
    """Zero all gradients of a flat on this rank, those too that its sum holds of other ranks alone."""
    gradients._zero(range(len(gradients.flat.parameters)))
