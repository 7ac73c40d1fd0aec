"""The backward: gradients arrive in flat buffers, and each unit is reduced as soon as its own are complete.

A gradient that comes after its unit was started (re-entrant recomputation) waits for the next reduction or the update.

[Note: order of reductions] All ranks start one reduction per unit and backward, in one fixed order (the units in
reverse, the root last), so a rank whose data made it skip a unit sends zeros in its turn. A unit is started early when
every parameter that ever got a gradient has one; the rest when the backward ends. The units of a pipeline's chunk have
no root: they are in reverse, all of them.
"""

import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch

from zeroshard.autograd.gradient_slot import Lent, RowGradient, goes_straight, offer_slot
from zeroshard.comm.collectives import Comm
from zeroshard.errors import PlanError
from zeroshard.parts.gradients import Gradients
from zeroshard.parts.part import LateUpdates, Parts
from zeroshard.parts.weights import Gatherer, PassKind
from zeroshard.step.context import Within
from zeroshard.step.losses import BY_MEAN, StepLosses
from zeroshard.zero.grad_attribute import unreadable
from zeroshard.zero.gradients import BufferedGradients, zero_all

GRACE = 0.2  # longest wait for a reduction under ZeRO 3: waiting longer could block a gather of others
IN_FLIGHT = 1  # reductions in flight before the oldest is waited for


class Reductions:
    """Starts the reductions of a backward unit by unit: `begin`, `launch` as gradients come, `launch_rest`.

    `end` finishes them; under an order of actions, the sum of each flat does when it is settled.

    Args:
        gradients: of each unit; the last is the root.
        grace: longest wait in seconds for the oldest reduction, so that this rank does not block a gather that other
            ranks need; None for no limit.
        listed: an order of actions names the units of each backward, of which none is the root.
    """

    def __init__(
        self, gradients: Sequence[Sequence[BufferedGradients]], grace: float | None, listed: bool = False
    ) -> None:
        self._gradients, self._grace, self._listed = gradients, grace, listed
        root = len(gradients) - (not listed)
        self._order = [*reversed(range(root)), *range(root, len(gradients))]
        self._turns: list[int] | None = None  # units of the current backward that were not started, the next one last
        self._in_flight: list[int] = []  # units whose reductions were started and not finished
        self._unread: list[int] = []  # finished units that other ranks may still read
        self._past: list[list[bytes]] | None = None  # which parameters got gradients so far; None before the first step
        self._all = self._expected = [[b"\1" * len(g.arrived) for g in of_unit] for of_unit in gradients]

    def begin(self, units: Sequence[int] | None = None) -> None:
        """Begin a backward that completes the gradients of these units, by default of all."""
        self._turns = self._in_turn(units)
        for unit in self._turns:
            for gradients in self._gradients[unit]:
                gradients.arrived = bytearray(len(gradients.arrived))
                gradients.shown.begin()

    def launch(self, complete: Callable[[int], bool], first: int = 0) -> None:
        """Start complete units, from number `first` on, in the fixed order."""
        turns, self._turns = self._turns, None  # none are left after an error here
        while turns and turns[-1] >= first and complete(turns[-1]):
            self._start(turns.pop())
        self._turns = turns

    def launch_rest(self, units: Sequence[int] | None = None) -> None:
        """Start the rest of these units, by default of all: their gradients are complete.

        Raises:
            PlanError: a gradient came to a unit of an order of actions after its start.
        """
        if self._turns is None:
            self._turns = self._in_turn(units)
        elif units is not None:
            for gradients in (g for unit in units if unit not in self._turns for g in self._gradients[unit]):
                gradients.shown.refuse_late()
        self.launch(lambda unit: True)
        self._turns = None

    def finish(self) -> None:
        """Finish all reductions under way."""
        self._finish(len(self._in_flight))

    def end(self) -> None:
        """End the backward: finish all reductions, and free their buffers once all ranks have read them."""
        if self._turns and len(self._turns) < len(self._order) and not self._listed:
            for gradients in (each for of_unit in self._gradients for each in of_unit):
                gradients.buffer.begin()
            self.launch_rest()  # of a backward that ended in an error, for which other ranks wait
        self.finish()
        self._release(len(self._unread))

    def reduce(self, units: Sequence[int]) -> None:
        """Reduce these units now, in the fixed order; a collective call."""
        for gradients in (g for unit in reversed(self._in_turn(units)) for g in self._gradients[unit]):
            gradients.start_reduce()
            gradients.reduction.finish()

    def unreduced(self) -> list[int]:
        """The units that hold gradients of this rank which were not reduced yet."""
        units: list[int] = []
        for unit, of_unit in enumerate(self._gradients):
            for gradients in of_unit:
                gradients.collect()
                if gradients.reduction.needed and gradients.holds and unit not in units[-1:]:
                    units.append(unit)
        return units

    def learn(self) -> None:
        """End a step: expect in the next each parameter reached in any step so far, even without a gradient."""
        if self._past == self._all:
            return
        written = [[either(g.written_in_step, bytes(g.arrived)) for g in of_unit] for of_unit in self._gradients]
        if self._past is not None and written != self._past:
            units = zip(self._past, written, strict=True)
            written = [[either(a, b) for a, b in zip(before, now, strict=True)] for before, now in units]
        self._past = self._expected = written

    @property
    def never_written(self) -> list[str] | None:
        """Names of the parameters that no backward reached in any step so far; None before the first step."""
        if self._past is None:
            return None
        pairs = (pair for both in zip(self._gradients, self._past, strict=True) for pair in zip(*both, strict=True))
        return [e.name for g, flags in pairs for e, f in zip(g.flat.index.entries, flags, strict=True) if not f]

    @never_written.setter
    def never_written(self, names: list[str] | None) -> None:
        """Expect all parameters but these, as an earlier run did."""
        if names is not None:
            never = set(names)
            self._past = self._expected = [
                [bytes(entry.name not in never for entry in g.flat.index.entries) for g in gradients]
                for gradients in self._gradients
            ]

    def everything_came(self, unit: int) -> bool:
        """Whether every gradient of a unit has arrived in this backward."""
        return self._came(unit, self._all[unit])

    def complete(self, unit: int) -> bool:
        """Whether every expected gradient of a unit has arrived."""
        return self._came(unit, self._expected[unit])

    def _in_turn(self, units: Sequence[int] | None) -> list[int]:
        """These units, by default all, in reverse order of their start."""
        return [unit for unit in reversed(self._order) if units is None or unit in units]

    def _start(self, unit: int) -> None:
        if len(self._in_flight) >= IN_FLIGHT:  # this one takes the scratch of the oldest
            self._finish(len(self._in_flight) + 1 - IN_FLIGHT, self._grace)
        for gradients in self._gradients[unit]:
            gradients.start_reduce()
        if not self._listed:
            self._in_flight.append(unit)

    def _finish(self, count: int, patience: float | None = None) -> None:
        """Finish the oldest reductions; with `patience` in seconds, only if the other ranks do not take longer."""
        for unit in self._in_flight[:count]:
            for gradients in self._gradients[unit]:
                if not gradients.reduction.finish(patience):
                    return
            self._in_flight.remove(unit)
            self._unread.append(unit)
        while len(self._unread) > IN_FLIGHT:
            self._release(1)

    def _release(self, count: int) -> None:
        for unit in self._unread[:count]:
            for gradients in self._gradients[unit]:
                gradients.reduction.release()
        del self._unread[:count]

    def _came(self, unit: int, wanted: Sequence[bytes]) -> bool:
        for gradients, flags in zip(self._gradients[unit], wanted, strict=True):
            big, arrived = gradients.first_small, gradients.arrived
            if big and not _covers(arrived[:big], flags[:big]):
                return False
            if len(gradients.shown.fresh) < flags.count(1, big) - arrived.count(1, big):
                return False  # small ones are collected at once
        for gradients, flags in zip(self._gradients[unit], wanted, strict=True):
            gradients.collect()
            if not _covers(gradients.arrived, flags):
                return False
        return True


class Backward:
    """Receives the gradients of one model from autograd, and reduces each unit when its gradients are complete.

    Attributes:
        reductions: of its units, with the gradients that each expects.
        reduces: whether a backward reduces its gradients; `no_sync` turns it off.
        under_scale: whether the engine multiplied the loss of the backward under way.
        losses: of those backwards.
        gradients: of all units, in their fixed order.
        discards: of this rank since the ranks last agreed.
        weighs: whether losses are weighed by their counts alone, in `join`.
    """

    _listed = False

    def __init__(
        self,
        parts: Parts,
        gatherer: Gatherer,
        late: LateUpdates,
        comm: Comm,
        losses: StepLosses,
        needs_scale: bool,
    ) -> None:
        self._gatherer, self._late, self._comm, self._needs_scale = gatherer, late, comm, needs_scale
        self._began: float | None = None  # when the backward under way began
        self.reduces, self._count = True, 0
        self.under_scale = self.weighs = False
        self.losses = losses
        self.discards: list[str] = []
        self._gradients: list[list[BufferedGradients]] = []
        self.gradients: list[BufferedGradients] = []
        self._only_trainable: list[bool] = []
        self._unit_of: dict[int, int] = {}
        self.reductions = Reductions([], None, listed=True)  # until the gradients are known
        receive_from(self, parts)

    @property
    def count(self) -> int:
        """Backwards since the last update."""
        return self._count

    def add_one(self) -> None:
        """Count a backward of an order of actions, which may have reached no parameter."""
        self._count += 1

    def restart(self) -> None:
        """Count from 0 again, since the gradients were used or dropped."""
        self._count = 0
        self.losses.clear()

    @contextmanager
    def local(self) -> Iterator[None]:
        """Backwards inside add up on this rank and are not reduced."""
        before, self.reduces = self.reduces, False
        try:
            yield
        finally:
            self.reduces = before

    @contextmanager
    def scaled(self, weight: float | torch.Tensor = 1.0) -> Iterator[None]:
        """A backward inside runs on a loss under the loss scale; `weight` is that of penalties in it."""
        self.forget_interrupted()
        self.under_scale = True
        try:
            with Within(penalty_weight=weight), self.losses.passes.remembering():
                yield
        finally:
            self.under_scale = False
            self.forget_interrupted()

    def on_output_gradient(self, updates: int, number: int, gradient: torch.Tensor) -> None:
        """Begin a backward at the gradient of an output of forward `number`; `updates` is their number then.

        Raises:
            PlanError: the weights were updated since.
        """
        if updates != self.losses.updates:
            raise PlanError(
                f"A backward came through a forward that was made {self.losses.updates - updates} update(s) of the "
                f"weights ago, so its gradients would mix old activations with new weights. Call the backward before "
                f"engine.step(), or the model again after it."
            )
        self.begin()
        self.losses.passes.reach(number)
        self._gatherer.need(len(self._gradients) - 1)

    def begin(self) -> None:
        """Begin a backward, unless one runs already.

        Raises:
            PlanError: a loss scale is in use and the loss was not multiplied by it.
        """
        if self._began is not None:
            return
        if (self._needs_scale or self.weighs) and not self.under_scale:
            raise PlanError(
                f"{'engine.join()' if self.weighs else 'Loss scaling'} is on, so the loss must be scaled: call "
                f"engine.backward(loss) instead of loss.backward()."
            )
        self._began = 0.0
        self._late.finish()  # of a step since this backward's forward
        self._began = self._late.background.now()
        for gradients in self.gradients:
            gradients.collect()
        if self._count:
            self.take_back()
        if not self.under_scale:
            self.losses.kinds |= BY_MEAN  # loss.backward() of the user's own
        self._expect()
        for gradients in self.gradients:
            gradients.buffer.begin()
        self._count += 1
        torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._gatherer.begin(PassKind.BACKWARD)

    def take_back(self, everything: bool = False) -> bool:
        """Discard gradients that the user has taken away (`p.grad = None`) or zeroed since they came.

        Args:
            everything: zero all of them.

        Returns:
            whether there were any.

        Raises:
            PlanError: the user has put a gradient of another origin there.
        """
        self.reductions.end()
        found = [gradients.take_back(everything) for gradients in self.gradients]
        if not any(found):
            return False
        pairs = zip(self.gradients, found, strict=True)
        left = any(written and n not in gone for g, gone in pairs for n, written in enumerate(g.written_in_step))
        if not left:
            self.losses.clear()
            for gradients in self.gradients:
                zero_all(gradients)
        names = [g.flat.index.entries[n].name for g, gone in zip(self.gradients, found, strict=True) for n in gone]
        note_discard(self, ", ".join(names) if left else "all gradients")
        return True

    def enter(self, unit: int) -> None:
        """Gather a unit before the backward of a call of it; reduce the units that are complete."""
        self.begin()
        self._gatherer.need(unit, enters=True)
        self._launch()

    def leave(self) -> None:
        """Free and reduce the units that this backward has passed."""
        if self._began is not None:
            self._gatherer.done()
            self._launch()

    def forget_interrupted(self) -> None:
        """Clean up after a backward that ended in an exception."""
        if self._began is not None and torch._C._current_graph_task_id() == -1:
            self._began = None
            self.losses.passes.interrupt()
            self._gatherer.abandon()

    def listen(self, gradients: Gradients, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Receive the gradients of `parameters`, which replace those of the flat."""
        buffered = cast(BufferedGradients, gradients)
        singly = buffered.listen(parameters)
        for number, parameter in enumerate(parameters[:singly]):
            slot = _Slot(self, buffered, number, parameter)
            parameter.register_hook(slot.clear)
            parameter.register_post_accumulate_grad_hook(slot.receive)
            offer_slot(parameter, slot)

    def lend(self, gradients: BufferedGradients, number: int) -> Lent | None:
        """The slot of one parameter's gradient; see `autograd.gradient_slot`."""
        self.begin()
        if gradients.reduction.in_flight:
            self.reductions.finish()
        return gradients.lend(number)

    def _receive(self, gradients: BufferedGradients, number: int, gradient: torch.Tensor | None) -> None:
        """Copy a parameter's gradient, if it has one, to its flat buffer; reduce the unit if it is complete."""
        unit = self._unit_of[id(gradients)]
        if gradients.arrived[number]:  # a second round: re-entrant recomputation used the unit once more
            for each in self._gradients[unit]:
                each.arrived = bytearray(len(each.arrived))
        if gradients.reduction.in_flight:
            self.reductions.finish()
        gradients.receive(number, gradient)
        everything = self.reductions.everything_came(unit)  # in any case, so that sums round alike over all transports
        if everything and self._only_trainable[unit]:
            self._gatherer.done(unit)
        self._launch()

    def _expect(self) -> None:
        """Expect the gradients of a backward, added to those of earlier ones in fp32."""
        self.reductions.begin()
        if self._count:
            for gradients in self.gradients:
                gradients.widen()

    def _launch(self) -> None:
        """Reduce the complete units, in the fixed order."""
        if self.reduces:
            self.reductions.launch(self.reductions.complete)

    def _end(self) -> None:
        """End the backward: reduce the remaining units, free the gathered ones."""
        self._gatherer.free_all()
        for gradients in (g for g in self.gradients if g.first_small):  # others lie in the buffer already
            gradients.collect()
        if self.reduces:
            self.reductions.launch_rest()
        self._gatherer.end()
        self.reductions.end()
        self.losses.passes.end()
        self._late.background.note("backward", self._began or 0.0)
        self._began = None


def receive_from(backward: Backward, parts: Parts) -> None:
    """Make a backward receive the gradients of all parts, of which some may be new."""
    known = backward._unit_of
    backward._gradients = [
        [cast(BufferedGradients, part.gradients) for part in of_unit if part.gradients is not None]
        for of_unit in parts.of_units
    ]
    backward.gradients = [g for of_unit in backward._gradients for g in of_unit]
    grace = GRACE if backward._gatherer.passes else None
    backward.reductions = Reductions(backward._gradients, grace, backward._listed)
    backward._only_trainable = [all(part.flat.trainable for part in of_unit) for of_unit in parts.of_units]
    backward._unit_of = {id(g): unit for unit, gradients in enumerate(backward._gradients) for g in gradients}
    for part, gradients in parts.trained:
        if id(gradients) not in known:
            backward.listen(gradients, part.flat.parameters)


class ListedBackward(Backward):
    """The backwards of an order of actions, which counts the backwards to be added up and starts their reductions."""

    _listed = True

    def take_back(self, everything: bool = False) -> bool:
        """Discard nothing: the engine owns the gradients of microbatches."""
        return False

    def _expect(self) -> None:
        """Expect nothing: the order of actions begins the reductions."""
        for gradients in self.gradients:
            gradients.shown.begin()


def note_discard(backward: Backward, label: str) -> None:
    """Record a discard of gradients, and in the checksum that the ranks compare before an update."""
    backward.discards.append(label)
    backward._comm.digests["reduce"] = zlib.crc32(label.encode(), backward._comm.digests["reduce"])


class _Slot:
    """The slot of one parameter's gradient, for its hooks and for functions that make the gradient in place."""

    __slots__ = ("backward", "empty", "gradients", "number", "parameter")

    def __init__(self, backward: Backward, gradients: BufferedGradients, number: int, parameter: torch.Tensor) -> None:
        # weak, because Python cannot see a cycle through autograd's references, and would never free the engine
        self.backward, self.gradients, self.number = weakref.ref(backward), weakref.ref(gradients), number
        self.parameter, self.empty = weakref.ref(parameter), False

    def lend(self, parameter: torch.Tensor) -> Lent | None:
        """The memory of the slot; None where the gradient goes elsewhere, or where a hook of the user reads it."""
        backward, gradients = self.backward(), self.gradients()
        if backward is None or gradients is None or not goes_straight(parameter):
            return None
        return backward.lend(gradients, self.number)

    def leave(self, parameter: torch.Tensor, rows: RowGradient) -> bool:
        """Add rows to the gradient that is being made in the slot."""
        gradients = self.gradients()
        return gradients is not None and gradients.buffer.leave(self.number, rows)

    def clear(self, gradient: torch.Tensor | None) -> None:
        """Before autograd accumulates: clear the placeholder, so that autograd makes a new tensor."""
        backward, parameter = self.backward(), self.parameter()
        if backward is not None and parameter is not None:
            backward.begin()
            parameter.grad, self.empty = None, gradient is None

    def receive(self, parameter: torch.Tensor) -> None:
        """After autograd has accumulated, or has come without a gradient: move the gradient to the flat buffer."""
        backward, gradients = self.backward(), self.gradients()
        if backward is not None and gradients is not None:
            gradient = parameter.grad
            if gradient is not None or gradients.written_in_step[self.number]:
                gradients.shown.hide(parameter, self.number)
            if gradient is not None or self.empty:
                backward._receive(gradients, self.number, None if gradient is None else gradient.detach())
            elif parameter.requires_grad:  # else it was frozen after the forward, and autograd passes it over
                raise unreadable(gradients.flat.index.entries[self.number].name)


def either(a: bytes, b: bytes) -> bytes:
    """`a | b`, bit by bit; both are of one length."""
    return (int.from_bytes(a) | int.from_bytes(b)).to_bytes(len(a))


def _covers(arrived: bytearray, expected: bytes) -> bool:
    return arrived == expected or not int.from_bytes(expected) & ~int.from_bytes(arrived)
