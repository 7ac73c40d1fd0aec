"""Reductions of the units' gradients in one fixed order, and which gradients are waited for.

[Note: order of reductions] All ranks start one reduction per unit and backward, in one fixed order (the units in
reverse, the root last), so a rank whose data made it skip a unit sends zeros in its turn. A unit is started early when
every parameter that ever got a gradient has one; the rest when the backward ends. The units of a pipeline's chunk have
no root: they are in reverse, all of them.
"""

from collections.abc import Callable, Sequence

from zeroshard.parts.gradients import Gradients

IN_FLIGHT = 1  # reductions under way before the oldest is waited for


class Reductions:
    """Starts the reductions of a backward unit by unit: `begin`, `launch` as gradients come, `launch_rest`.

    `end` finishes them; under an order of actions, the sum of each flat does when it is settled.

    Args:
        gradients: of each unit; the last is the root.
        grace: seconds that the oldest reduction is waited for, where this rank's next gather may be what the others
            wait for; None for any time.
        listed: an order of actions names the units of each backward, of which none is the root.
    """

    def __init__(self, gradients: Sequence[Sequence[Gradients]], grace: float | None, listed: bool = False) -> None:
        self._gradients, self._grace, self._listed = gradients, grace, listed
        root = len(gradients) - (not listed)
        self._order = [*reversed(range(root)), *range(root, len(gradients))]
        self._turns: list[int] | None = None  # units of the backward under way that were not started, the next one last
        self._in_flight: list[int] = []  # units whose reductions were started and not finished
        self._unread: list[int] = []  # and those finished here, that other ranks may still read
        # Which parameters get gradients, as the steps so far have shown; None before the first.
        self._past: list[list[bytes]] | None = None
        self._all = self._expected = [[b"\1" * len(g.arrived) for g in of_unit] for of_unit in gradients]

    def begin(self, units: Sequence[int] | None = None) -> None:
        """A backward begins that completes the gradients of these units, by default of all."""
        self._turns = self._in_turn(units)
        for gradients in (g for unit in self._turns for g in self._gradients[unit]):
            gradients.arrived = bytearray(len(gradients.arrived))
            gradients.shown.begin()

    def launch(self, complete: Callable[[int], bool], first: int = 0) -> None:
        """Start the units from `first` on whose turn it is, as long as they are complete."""
        while self._turns and self._turns[-1] >= first and complete(self._turns[-1]):
            self._start(self._turns[-1])
            self._turns.pop()

    def launch_rest(self, units: Sequence[int] | None = None) -> None:
        """Start those of these units, by default of all, that were not started: their gradients are there.

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
        """The backward is over: finish all, and hand back their buffers, once all ranks have read them."""
        self.finish()
        self._release(len(self._unread))

    def reduce(self, units: Sequence[int]) -> None:
        """Reduce these units now, in the fixed order; a collective call."""
        for gradients in (g for unit in reversed(self._in_turn(units)) for g in self._gradients[unit]):
            gradients.start_reduce()
            gradients.reduction.finish()

    def learn(self) -> None:
        """A step is over: expect of the next every parameter that came in any step so far, if without a gradient."""
        written = [[either(g.written_in_step, bytes(g.arrived)) for g in of_unit] for of_unit in self._gradients]
        if self._past is not None and written != self._past:
            units = zip(self._past, written, strict=True)
            written = [[either(a, b) for a, b in zip(before, now, strict=True)] for before, now in units]
        self._past = self._expected = written

    @property
    def never_written(self) -> list[str] | None:
        """Names of the parameters to which no backward came in any step so far; None before the first step."""
        if self._past is None:
            return None
        every = [g for gradients in self._gradients for g in gradients]
        pairs = zip(every, (flags for unit in self._past for flags in unit), strict=True)
        return [e.name for g, flags in pairs for e, f in zip(g.flat.index.entries, flags, strict=True) if not f]

    @never_written.setter
    def never_written(self, names: list[str] | None) -> None:
        """Expect of the next steps what an earlier run came to expect."""
        if names is not None:
            never = set(names)
            self._past = self._expected = [
                [bytes(entry.name not in never for entry in g.flat.index.entries) for g in gradients]
                for gradients in self._gradients
            ]

    def everything_came(self, unit: int) -> bool:
        """Whether every gradient of a unit has come in this backward."""
        return self._came(unit, self._all[unit])

    def complete(self, unit: int) -> bool:
        """Whether every gradient of a unit that ever came has come."""
        return self._came(unit, self._expected[unit])

    def _in_turn(self, units: Sequence[int] | None) -> list[int]:
        """These units, by default all, the next one last."""
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
        of_unit = self._gradients[unit]
        for gradients, flags in zip(of_unit, wanted, strict=True):
            big, arrived = gradients.first_small, gradients.arrived
            if big and not _covers(arrived[:big], flags[:big]):
                return False
            if len(gradients.shown.fresh) < sum(flags[big:]) - sum(arrived[big:]):
                return False  # small ones are collected at once
        for gradients in of_unit:
            gradients.collect()
        return all(_covers(gradients.arrived, flags) for gradients, flags in zip(of_unit, wanted, strict=True))


def either(a: bytes, b: bytes) -> bytes:
    """`a | b`, bit by bit; both are of one length."""
    return (int.from_bytes(a) | int.from_bytes(b)).to_bytes(len(a))


def _covers(arrived: bytearray, expected: bytes) -> bool:
    return arrived == expected or not int.from_bytes(expected) & ~int.from_bytes(arrived)
