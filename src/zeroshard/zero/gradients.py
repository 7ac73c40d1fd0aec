"""Gradients of one flat buffer: received from autograd, reduced to the rank that owns the slice, kept or dropped.

[Note: life of a gradient] Autograd hands over each parameter's gradient once per backward. It is copied (or, from
the second backward without a reduction on, added) into `landing`, laid out like the parameters, so that what goes on
the wire is contiguous. A reduction sends each slice to its owner, who adds the ranks' copies in rank order in fp32,
divides by N, and adds the mean to `total`. The update consumes `total`.

[Note: fp32 accumulation] While a step has a single backward, nothing is accumulated over time and 16-bit gradients stay
16-bit: the paper's 2Ψ bytes. From the second backward of a step on, sums are kept in fp32 (`accumulate_in_fp32`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeroshard.comm import Comm, Pending, Purpose
from zeroshard.errors import PlanError
from zeroshard.ledger import Arena, Category, Ledger
from zeroshard.units import Flat
from zeroshard.zero.residency import Residency


@dataclass(frozen=True, slots=True)
class Accumulation:
    """How the gradients of several backwards come together.

    Attributes:
        wire_dtype: dtype on the wire; None for that of the gradients themselves, which loses nothing.
        local: several backwards add up before they are reduced.
        reduced: several reductions add up before the update.
    """

    wire_dtype: torch.dtype | None = None
    local: bool = False
    reduced: bool = False


class GradientShards:
    """The gradients of a trainable flat under a residency.

    Attributes:
        interval: first and one past the last element of the slice that this rank owns.
        written: per parameter, whether it got a gradient since the last reduction.
        written_in_step: per parameter, whether it got a gradient since the last update.
    """

    def __init__(
        self,
        flat: Flat,
        residency: Residency,
        comm: Comm,
        ledger: Ledger,
        arena: Arena,
        accumulation: Accumulation = Accumulation(),
    ) -> None:
        self.flat = flat
        self._comm, self._ledger, self._arena = comm, ledger, arena
        self._wire_dtype = accumulation.wire_dtype
        self._ranks = comm.mesh.ranks
        self.interval = flat.index.interval(comm.mesh.rank)
        self._keeps_landing = not residency.slice_gradients or self._ranks == 1
        self._gathers = not residency.slice_states and self._ranks > 1
        sums = torch.promote_types(flat.dtype, torch.float32)
        adds_locally = accumulation.local or (accumulation.reduced and self._ranks == 1)
        self._landing_dtype = sums if adds_locally else flat.dtype
        self._landing: torch.Tensor | None = None
        self._total: torch.Tensor | None = None
        self._exchange: tuple[Pending, torch.Tensor, torch.Tensor] | None = None
        self._reduced = False
        self._wide: torch.Tensor | None = None
        self._touched: set[torch.nn.Parameter] = set()
        self._number_of: dict[torch.nn.Parameter, int] = {}
        self.written = bytearray(len(flat.parameters))
        self.written_in_step = bytearray(len(flat.parameters))
        if self._keeps_landing:
            self._landing = self._persistent_landing()
        if not self._keeps_landing or (accumulation.reduced and self._ranks > 1):
            self._total = self._new_total(sums if accumulation.reduced or accumulation.local else flat.dtype)

    @property
    def open_to_autograd(self) -> bool:
        """Whether autograd can add up gradients in `landing` itself: it is kept, and of the parameters' dtype."""
        return self._keeps_landing and self._landing_dtype == self.flat.dtype

    @property
    def opened(self) -> bool:
        """Whether autograd adds up in `landing` itself."""
        return bool(self._number_of)

    def open(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Let autograd add the gradients of these parameters, which stand for those of the flat, into `landing`.

        Nothing else is called then but `mark_written` before a reduction.
        """
        assert self.open_to_autograd and self._landing is not None
        if not self.opened:  # else there may be gradients, which the update under way is about to use
            self._landing.zero_()
        for number, parameter in enumerate(parameters):
            parameter.grad = self.flat.view(self._landing, number)
            self._number_of[parameter] = number
            parameter.register_post_accumulate_grad_hook(self._touched.add)

    def mark_written(self) -> None:
        """Note which parameters autograd has added to since the last call."""
        for parameter in self._touched:
            number = self._number_of[parameter]
            self.written[number] = self.written_in_step[number] = 1
        self._touched.clear()

    def receive(self, number: int, gradient: torch.Tensor) -> None:
        """Take in the gradient of parameter `number`, adding to what came since the last reduction.

        Raises:
            PlanError: a sparse gradient.
        """
        if gradient.layout is not torch.strided:
            name = self.flat.index.entries[number].name
            raise PlanError(
                f"The gradient of '{name}' is sparse; flat buffers are dense. Build its layer with sparse=False."
            )
        if self._exchange is not None:
            self.finish_reduce()  # a gradient that comes after its unit was sent waits for the next reduction
        if self._landing is None:
            self._landing = self._arena.take(
                self.flat.index.padded_numel, self._landing_dtype, f"gradients {self.flat.label}"
            )
        if self._reduced and self._total is None:
            self._separate_total()
        view = self.flat.view(self._landing, number)
        if self.written[number] or self.opened:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        self.written[number] = self.written_in_step[number] = 1

    def accumulate_in_fp32(self) -> None:
        """Keep sums over several backwards in fp32 from now on ([Note: fp32 accumulation])."""
        if self.flat.dtype.itemsize >= 4:
            return
        if self._keeps_landing and self._total is None and self._reduced:
            self._separate_total()
        if self._total is not None and self._total.dtype.itemsize < 4:
            self._separate_total()
        if self._landing_dtype.itemsize < 4 and any(self.written):
            self._widen_landing()

    @property
    def layout(self) -> tuple[bool, bool]:
        """Whether 16-bit gradients have come to be summed in fp32: over reductions, and on this rank before one."""
        narrow = self.flat.dtype.itemsize < 4
        return (
            narrow and self._total is not None and self._total.itemsize >= 4,
            narrow and self._landing_dtype.itemsize >= 4,
        )

    def restore_layout(self, wide_total: bool, wide_landing: bool) -> None:
        """Take the buffers that an earlier run had come to need, so that sums round alike here."""
        if wide_total and not self.layout[0]:
            self._separate_total()
        if wide_landing and not self.layout[1]:
            if self._landing is None:
                self._landing_dtype = torch.float32
            else:
                self._widen_landing()

    def start_reduce(self) -> None:
        """Send every slice of what was received to its owner; parameters without a gradient count as zeros."""
        if self._ranks == 1:
            return
        index = self.flat.index
        if self._exchange is not None:
            self.finish_reduce()
        if self._landing is None:
            self._landing = self._arena.take(index.padded_numel, self._landing_dtype, f"gradients {self.flat.label}")
        if self._reduced and self._total is None:
            self._separate_total()
        self._zero_unwritten(self._landing)
        wire = self._landing
        if self._wire_dtype is not None and self._wire_dtype != wire.dtype:
            wire = self._arena.take(index.padded_numel, self._wire_dtype, f"wire {self.flat.label}")
            wire.copy_(self._landing)
        into = self._arena.take(index.padded_numel, wire.dtype, f"reduce {self.flat.label}")
        pending = self._comm.exchange(into, wire, self.flat.label, index.padding)
        self._exchange = (pending, wire, into)
        self.written = bytearray(len(self.written))

    def try_finish_reduce(self, seconds: float) -> None:
        """As `finish_reduce`, unless the other ranks take longer than `seconds`.

        A rank that blocked here could wait for one that waits for this rank's next gather.
        """
        if self._exchange is not None and self._exchange[0].arrives_within(seconds):
            self.finish_reduce()

    def finish_reduce(self) -> None:
        """Wait for the other ranks' copies of this rank's slice and add their mean to the total."""
        if self._exchange is None:
            return
        pending, wire, into = self._exchange
        self._exchange = None
        pending.wait()
        if wire is not self._landing:
            self._arena.give(wire)
        if not self._keeps_landing:
            assert self._landing is not None
            self._arena.give(self._landing)
            self._landing = None
        copies = into.view(self._ranks, -1)
        mean = self._arena.take(copies.shape[1], torch.promote_types(into.dtype, torch.float32), "sum over ranks")
        torch.add(copies[0], copies[1], out=mean) if mean.dtype == into.dtype else mean.copy_(copies[0]).add_(copies[1])
        for rank in range(2, self._ranks):
            mean.add_(copies[rank])
        mean.mul_(1.0 / self._ranks)
        total = self.total
        total.add_(mean) if self._reduced else total.copy_(mean)
        self._reduced = True
        self._arena.give(mean)
        self._arena.give(into)

    @property
    def total(self) -> torch.Tensor:
        """The reduced mean of this rank's slice [S]; it may lie inside `landing`, whose other slices are then spent."""
        if self._total is not None:
            return self._total
        assert self._landing is not None
        return self._landing[self.interval[0] : self.interval[1]]

    def settle(self) -> torch.Tensor:
        """The total of the step [S], zero where nothing was written; call it when nothing is left to reduce."""
        self.finish_reduce()
        if self._ranks == 1 and self._landing is not None:
            self._zero_unwritten(self._landing)
        elif not self._reduced:
            self.total.zero_()
        return self.total

    def for_update(self) -> torch.Tensor:
        """The gradient over what this rank updates: its slice [S], or at stage 0 everything [N*S], gathered."""
        if not self._gathers:
            return self.total
        assert self._landing is not None
        total, index, whole = self.total, self.flat.index, self._landing
        if total.dtype != whole.dtype:
            whole = self._wide = self._arena.take(index.padded_numel, total.dtype, f"sums {self.flat.label}")
        self._comm.gather(whole, total, Purpose.GATHER_GRADIENTS, self.flat.label, index.padding).wait()
        return whole

    def updated(self) -> None:
        """What `for_update` returned is not needed any more."""
        if self._wide is not None:
            self._arena.give(self._wide)
            self._wide = None

    def consume(self) -> None:
        """Forget the step's gradients: they were used, or the step was skipped."""
        if self._landing is not None and not self._keeps_landing:
            self._arena.give(self._landing)
            self._landing = None
        if self.opened and self._landing is not None:
            self._landing.zero_()
        self._touched.clear()
        self._reduced = False
        self.written = bytearray(len(self.written))
        self.written_in_step = bytearray(len(self.written))

    def _zero_unwritten(self, landing: torch.Tensor) -> None:
        for number, entry in enumerate(self.flat.index.entries):
            if not self.written[number]:
                landing[entry.offset : entry.stop].zero_()
        landing[self.flat.index.numel :].zero_()

    def _persistent_landing(self) -> torch.Tensor:
        index, label = self.flat.index, f"gradients {self.flat.label}"
        device = self._comm.mesh.device
        return self._ledger.empty(
            index.padded_numel, self._landing_dtype, device, Category.GRADIENTS, label, index.padding
        )

    def _new_total(self, dtype: torch.dtype) -> torch.Tensor:
        index, label = self.flat.index, f"gradient slice {self.flat.label}"
        padding = index.padding_in(*self.interval)
        return self._ledger.empty(index.slice_numel, dtype, self._comm.mesh.device, Category.GRADIENTS, label, padding)

    def _separate_total(self) -> None:
        """Move the total into a buffer of its own, fp32 at least."""
        old = self._total
        total = self._new_total(torch.promote_types(self.flat.dtype, torch.float32))
        total.copy_(self.total)
        self._total = total
        if old is not None:
            padding = self.flat.index.padding_in(*self.interval) * old.itemsize
            self._ledger.give(Category.GRADIENTS, old.nbytes, f"gradient slice {self.flat.label}", padding)

    def _widen_landing(self) -> None:
        """Make the landing buffer fp32, with what it holds."""
        old, self._landing_dtype = self._landing, torch.float32
        assert old is not None
        index, label = self.flat.index, f"gradients {self.flat.label}"
        if self._keeps_landing:
            self._landing = self._persistent_landing()
            self._ledger.give(Category.GRADIENTS, old.nbytes, label, index.padding * old.itemsize)
        else:
            self._landing = self._arena.take(index.padded_numel, torch.float32, label)
            self._arena.give(old)
        self._landing.copy_(old)
