"""Gradients of one flat buffer: received from autograd, reduced to the rank that owns the slice, kept or dropped.

[Note: life of a gradient] Autograd hands over each parameter's gradient once per backward. It is copied (or, from
the second backward without a reduction on, added) into `landing`, laid out like the parameters, so that what goes on
the wire is contiguous. A reduction brings each slice to its owner, who adds the ranks' copies in rank order in fp32,
divides by N, and adds the mean to `total`. The update consumes `total`.

[Note: small parameters] Biases and norms lie behind one another at the end of a flat. Autograd adds their gradients up
in a small buffer itself, and one copy takes them all into `landing`, so what Python does does not grow with their
number. Big gradients are copied one by one, while they are in the cache: cheaper than zeros and an addition.

[Note: fp32 accumulation] While a step has a single backward, nothing is accumulated over time and 16-bit gradients stay
16-bit: the paper's 2Ψ bytes. From the second backward of a step on, sums are kept in fp32 (`accumulate_in_fp32`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from zeroshard.comm import Comm, Exchange, Purpose
from zeroshard.errors import PlanError
from zeroshard.ledger import Arena, Category, Ledger
from zeroshard.link import Task
from zeroshard.transport import same_place
from zeroshard.units import Flat, norm_of
from zeroshard.zero.mean import add_mean
from zeroshard.zero.residency import Residency
from zeroshard.zero.shown import ShownGradients


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


class Sink(Protocol):
    """Where the mean of a slice [S] adds up when it does not stay on the device.

    Attributes:
        dtype: of the sum.
    """

    dtype: torch.dtype

    def put(self, mean: torch.Tensor) -> Task:
        """Add `mean` [S], which stays as it is until the task's `wait` returns."""

    def settle(self) -> torch.Tensor:
        """The sum [S] since the last `consume`, zeros if there was none; readable by the host."""

    def norm(self) -> torch.Tensor:
        """Its 2-norm, a scalar on the device or the host."""

    def widen(self) -> None:
        """Keep the sum in fp32 from now on."""

    def changed(self) -> None:
        """The sum that `settle` returned was changed in place."""

    def consume(self) -> None:
        """The next mean begins a new sum."""


class GradientShards:
    """The gradients of a trainable flat under a residency.

    Args:
        replicas: the ranks of other groups that hold the same slice (hybrid sharding).
        sink: where the total is kept instead of on the device.

    Attributes:
        interval: first and one past the last element of the slice that this rank owns.
        alone: whether there is one rank and no sink, so that nothing ever leaves.
        shown: what `p.grad` of its parameters is.
        first_small: the number from which on autograd adds gradients up itself ([Note: small parameters]).
        arrived: per parameter, whether its gradient came in the backward under way.
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
        replicas: Comm | None = None,
        sink: Sink | None = None,
    ) -> None:
        self.flat = flat
        self.sink = sink
        self._leaving: tuple[Task, torch.Tensor | None] | None = None  # to the sink, and its scratch
        self._comm, self._ledger, self._arena, self._replicas = comm, ledger, arena, replicas
        self._wire_dtype = accumulation.wire_dtype
        self._ranks = comm.mesh.ranks
        self.interval = flat.index.interval(comm.mesh.rank)
        self.alone = self._ranks == 1 and sink is None
        # What goes below leaves nothing behind, so there one buffer per flat for all small ones would be too much.
        self.first_small = flat.first_small if sink is None else len(flat.parameters)
        self._reduces_often = accumulation.reduced and not self.alone
        self._keeps_landing = not residency.slice_gradients or self.alone
        self._gathers = not residency.slice_states and self._ranks > 1
        sums = torch.promote_types(flat.dtype, torch.float32)
        adds_locally = accumulation.local or (accumulation.reduced and self.alone)
        self._landing_dtype = sums if adds_locally else flat.dtype
        self._landing: torch.Tensor | None = None
        self._total: torch.Tensor | None = None
        self._exchange: tuple[Exchange, torch.Tensor] | None = None
        self._unread: tuple[Exchange, torch.Tensor] | None = None
        self._reduced = False
        self._wide: torch.Tensor | None = None
        self.shown = ShownGradients(flat, ledger, self.first_small)
        self.arrived = bytearray(len(flat.parameters))
        self.written = bytearray(len(flat.parameters))
        self.written_in_step = bytearray(len(flat.parameters))
        if self._keeps_landing:
            self._landing = self._persistent_landing()
        if sink is None and (not self._keeps_landing or (accumulation.reduced and self._ranks > 1)):
            self._total = self._new_total(sums if accumulation.reduced or accumulation.local else flat.dtype)

    @property
    def open_to_autograd(self) -> bool:
        """Whether autograd can add up gradients in `landing`: it is kept, of their dtype, and reduced when all came."""
        return self._keeps_landing and self._landing_dtype == self.flat.dtype and not self._reduces_often

    def open(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Let autograd add the gradients of these parameters, which stand for those of the flat, into `landing`.

        Nothing else is called then but `collect` before a reduction.
        """
        assert self.open_to_autograd and self._landing is not None
        if not self.shown.opened:  # else there may be gradients, which the update under way is about to use
            self._landing.zero_()
        self.shown.open(parameters, self._landing)

    def collect(self) -> None:
        """Take over what autograd has added up itself since the last call."""
        if not self.shown.fresh:
            return
        numbers, small = self.shown.collect(), self.shown.small
        if not numbers:
            return
        if small is not None:
            landing, index, first = self._ready_landing(), self.flat.index, self.first_small
            region = landing[index.entries[first].offset : index.numel]
            region.add_(small) if any(self.written[first:]) else region.copy_(small)
            small.zero_()
        if small is not None and len(numbers) == len(self.written) - self.first_small == len(set(numbers)):
            for flags in (self.arrived, self.written, self.written_in_step):
                flags[self.first_small :] = b"\1" * len(numbers)
            return
        for number in numbers:
            self.arrived[number] = self.written[number] = self.written_in_step[number] = 1

    def take_back(self, everything: bool = False) -> list[int]:
        """Discard the gradients that the user has taken away or zeroed; with `everything`, zero all.

        Returns:
            the numbers of their parameters.

        Raises:
            PlanError: `p.grad` is a tensor that the user has put there.
        """
        self.collect()
        gone, zeroed = self.shown.discarded(self.written_in_step, everything)
        found = [*gone, *zeroed]
        if found:
            self._zero(found)
        for number in gone:
            self.written[number] = self.written_in_step[number] = 0
        return found

    def _zero(self, numbers: Sequence[int]) -> None:
        """Let what these parameters got in this step be zeros, on this rank before reductions and after them."""
        self.finish_reduce()
        self.release()
        start, stop = self.interval
        for entry in (self.flat.index.entries[number] for number in numbers):
            low, high = max(start, entry.offset), min(stop, entry.stop)
            if self._landing is not None:
                self._landing[entry.offset : entry.stop].zero_()
            if low < high and self._reduced:
                self.total[low - start : high - start].zero_()
        if self.sink is not None:
            self.sink.changed()

    def change(self, edit: Callable[[torch.Tensor], object]) -> None:
        """Change the total of the step [S] in place; call it when nothing is left to reduce."""
        edit(self.settle())
        if self.sink is not None:
            self.sink.changed()

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
        view = self.flat.view(self._ready_landing(), number)
        if self.written[number] or self.shown.opened:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        self.arrived[number] = self.written[number] = self.written_in_step[number] = 1

    def accumulate_in_fp32(self) -> None:
        """Keep sums over several backwards in fp32 from now on ([Note: fp32 accumulation])."""
        if self.flat.dtype.itemsize >= 4:
            return
        if self.sink is not None:
            self.sink.widen()
        elif self._keeps_landing and self._total is None and self._reduced:
            self._separate_total()
        if self._total is not None and self._total.dtype.itemsize < 4:
            self._separate_total()
        if self._landing_dtype.itemsize < 4 and any(self.written):
            self._widen_landing()

    @property
    def layout(self) -> tuple[bool, bool]:
        """Whether 16-bit gradients have come to be summed in fp32: over reductions, and on this rank before one."""
        narrow = self.flat.dtype.itemsize < 4
        total = self.sink or self._total
        return (
            narrow and total is not None and total.dtype.itemsize >= 4,
            narrow and self._landing_dtype.itemsize >= 4,
        )

    def restore_layout(self, wide_total: bool, wide_landing: bool) -> None:
        """Take the buffers that an earlier run had come to need, so that sums round alike here."""
        if wide_total and not self.layout[0]:
            self._separate_total() if self.sink is None else self.sink.widen()
        if wide_landing and not self.layout[1]:
            if self._landing is None:
                self._landing_dtype = torch.float32
            else:
                self._widen_landing()

    @property
    def in_flight(self) -> bool:
        """Whether a reduction was started and not finished."""
        return self._exchange is not None

    def start_reduce(self) -> None:
        """Bring every slice of what was received to its owner; parameters without a gradient count as zeros."""
        if self.alone:
            return
        self.collect()
        if self._ranks == 1 and not any(self.written):
            return  # zeros that nobody waits for
        landing, index, arena = self._ready_landing(), self.flat.index, self._arena
        self._zero_unwritten(landing)
        if self._ranks == 1:
            self._send(landing, None)
            self.written = bytearray(len(self.written))
            return
        wire = landing
        if self._wire_dtype is not None and self._wire_dtype != wire.dtype:
            wire = arena.take(index.padded_numel, self._wire_dtype, f"wire {self.flat.label}")
            wire.copy_(landing)
        dtype = wire.dtype

        def scratch(numel: int) -> torch.Tensor:
            return arena.take(numel, dtype, f"reduce {self.flat.label}")

        self._exchange = (self._comm.exchange(wire, scratch, self.flat.label, index.padding), wire)
        self.written = bytearray(len(self.written))

    def try_finish_reduce(self, seconds: float) -> bool:
        """As `finish_reduce`, unless the other ranks take longer than `seconds`; whether it is finished.

        A rank that blocked here could wait for one that waits for this rank's next gather.
        """
        if self._exchange is not None and not self._exchange[0].arrives_within(seconds):
            return False
        self.finish_reduce()
        return True

    def finish_reduce(self) -> None:
        """Wait for the other ranks' copies of this rank's slice and add their mean to the total.

        Reductions of several flats must be finished in the order in which they were started.
        """
        if self._exchange is None:
            return
        exchange, wire = self._exchange
        self._exchange = None
        exchange.wait()
        if self.sink is None:
            # In place, unless the total lies where a copy does that is needed later.
            apart = self._total is not None or self._ranks == 2
            add_mean(self._comm, self.total, exchange.copies, self._arena, self._reduced, apart)
            self._reduced = True
        else:
            mean = self._arena.take(self.flat.index.slice_numel, self.sink.dtype, f"mean of {self.flat.label}")
            add_mean(self._comm, mean, exchange.copies, self._arena, add=False, apart=True)
        exchange.done()
        if exchange.scratch is not None:
            self._arena.give(exchange.scratch)
        self._unread = (exchange, wire)
        if self._comm.shared is None:
            self._release_read()
        if self.sink is not None:
            self._send(mean, mean)

    def _send(self, mean: torch.Tensor, scratch: torch.Tensor | None) -> None:
        """Begin to add a mean to the sink."""
        assert self.sink is not None
        if mean.dtype.itemsize > self.sink.dtype.itemsize:
            self.sink.widen()
        self._leaving, self._reduced = (self.sink.put(mean), scratch), True

    def release(self) -> None:
        """Hand back what the other ranks have read by now, or the sink has, waiting for them if need be."""
        self._release_read()
        if self._leaving is not None:
            (task, scratch), self._leaving = self._leaving, None
            task.wait()
            if scratch is not None:
                self._arena.give(scratch)
            else:
                self._drop_landing()

    def _release_read(self) -> None:
        if self._unread is None:
            return
        exchange, wire = self._unread
        self._unread = None
        exchange.wait_until_read()
        if wire is not self._landing:
            self._arena.give(wire)
        self._drop_landing()

    @property
    def total(self) -> torch.Tensor:
        """The reduced mean of this rank's slice [S]; it may lie inside `landing`, whose other slices are then spent."""
        if self.sink is not None:
            return self.sink.settle()
        if self._total is not None:
            return self._total
        assert self._landing is not None
        start, stop = self.interval
        return self._landing if stop - start == self._landing.numel() else self._landing[start:stop]

    def settle(self) -> torch.Tensor:
        """The total of the step [S], zero where nothing was written; call it when nothing is left to reduce."""
        self.finish_reduce()
        self.release()
        if self.alone and self._landing is not None:
            self._zero_unwritten(self._landing)
        elif not self._reduced and self.sink is None:
            self.total.zero_()
        return self.total

    def norm(self) -> torch.Tensor:
        """The 2-norm of the total, a scalar; in fp32 at least."""
        if self.sink is not None:
            self.finish_reduce()
            self.release()
            return self.sink.norm()
        return norm_of(self.settle())

    def average_replicas(self) -> None:
        """Let the total be the mean over all groups of ranks; a collective call, before the update."""
        total, comm, arena = self.settle(), self._replicas, self._arena
        if comm is None:
            return
        ranks, label = comm.mesh.ranks, f"replicas of {self.flat.label}"
        size = -(-total.numel() // ranks)
        padded = arena.take(size * ranks, total.dtype, label)
        padded[: total.numel()].copy_(total)
        padded[total.numel() :].zero_()
        purpose, padding = Purpose.AVERAGE_REPLICAS, padded.numel() - total.numel()
        scratch = partial(arena.take, dtype=total.dtype, label=label)
        exchange = comm.exchange(padded, scratch, label, padding, purpose)
        exchange.wait()
        own = padded[comm.mesh.rank * size : (comm.mesh.rank + 1) * size]
        add_mean(comm, own, exchange.copies, arena, add=False, apart=ranks == 2)
        exchange.done()
        comm.gather(padded, own, purpose, label, padding).wait()
        self.change(lambda total: total.copy_(padded[: total.numel()]))
        self._reduced = True
        if self._ranks == 1:
            self.written = bytearray(b"\1" * len(self.written))  # what another group wrote is here now
        for used in (padded, exchange.scratch):
            assert used is not None
            arena.give(used)

    def for_update(self) -> torch.Tensor:
        """The gradient over what this rank updates: its slice [S], or at stage 0 everything [N*S], gathered."""
        if not self._gathers:
            return self.total
        assert self._landing is not None
        total, index, whole = self.total, self.flat.index, self._landing
        if total.dtype != whole.dtype:
            whole = self._wide = self._arena.take(index.padded_numel, total.dtype, f"sums {self.flat.label}")
        own = whole[self.interval[0] : self.interval[1]]
        if not same_place(own, total):
            own.copy_(total)
        self._comm.gather(whole, own, Purpose.GATHER_GRADIENTS, self.flat.label, index.padding).wait()
        return whole

    def updated(self) -> None:
        """What `for_update` returned is not needed any more."""
        if self._wide is not None:
            self._arena.give(self._wide)
            self._wide = None

    def consume(self) -> None:
        """Forget the step's gradients: they were used, or the step was skipped."""
        self.release()
        self._drop_landing()
        if self.shown.opened and self._landing is not None:
            self._landing.zero_()
        self.shown.forget()
        self._reduced = False
        if self.sink is not None:
            self.sink.consume()
        self.written = bytearray(len(self.written))
        self.written_in_step = bytearray(len(self.written))

    def _ready_landing(self) -> torch.Tensor:
        """`landing`, free to be written."""
        self.finish_reduce()  # of several flats, whoever launches sees to the order
        self.release()
        if self._landing is None:
            label = f"gradients {self.flat.label}"
            self._landing = self._arena.take(self.flat.index.padded_numel, self._landing_dtype, label)
        if self._reduced and self._total is None and self.sink is None:
            self._separate_total()
        return self._landing

    def _drop_landing(self) -> None:
        if self._landing is not None and not self._keeps_landing:
            self._arena.give(self._landing)
            self._landing = None

    def _zero_unwritten(self, landing: torch.Tensor) -> None:
        if not all(self.written):
            first = self.first_small
            collected = self.shown.small is not None and any(self.written[first:])
            for number, entry in enumerate(self.flat.index.entries):
                if not self.written[number] and not (collected and number >= first):
                    landing[entry.offset : entry.stop].zero_()
        if self.flat.index.padding:
            landing[self.flat.index.numel :].zero_()

    def _persistent_landing(self) -> torch.Tensor:
        index, dtype = self.flat.index, self._landing_dtype
        nbytes, padding = (n * dtype.itemsize for n in (index.padded_numel, index.padding))
        self._ledger.take(Category.GRADIENTS, nbytes, f"gradients {self.flat.label}", padding)
        return self._comm.buffer(index.padded_numel, dtype)

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
