"""Reductions of the units' gradients in one fixed order, and which gradients are to be waited for.

[Note: order of reductions] All ranks launch one reduction per unit and backward, in one fixed order (the units in
reverse, the root last), so a rank whose data made it skip a unit sends zeros in its turn. A unit is launched early when
every parameter that ever got a gradient has one; what is left is launched when the backward ends. The units of a
pipeline's chunk have no root: they are in reverse, all of them.
"""

from collections.abc import Callable, Sequence

from zeroshard.parts.gradients import Gradients

IN_FLIGHT = 1  # reductions under way before the oldest is waited for


class Reductions:
    """Starts, finishes and releases the reductions of one backward, unit by unit.

    Args:
        gradients: of each unit; the last is the root.
        grace: seconds that the oldest reduction is waited for, where this rank's next gather may be what the others
            wait for; None for any time.
        rooted: the last unit is the root.
    """

    def __init__(self, gradients: Sequence[Sequence[Gradients]], grace: float | None, rooted: bool = True) -> None:
        self._gradients, self._grace = gradients, grace
        root = len(gradients) - rooted
        self._order = [*reversed(range(root)), *range(root, len(gradients))]
        self._turns: list[int] | None = None  # units of `begin_units` that were not started, the next one last
        self._launched = 0
        self._in_flight: list[int] = []  # units whose reductions were started and not finished
        self._unread: list[int] = []  # and those finished here, that other ranks may still read

    def begin(self) -> None:
        """A backward begins; what one that ended in an exception has started is finished with its own."""
        self._launched = 0

    def launch(self, complete: Callable[[int], bool]) -> None:
        """Launch the units whose turn it is, as long as they are complete."""
        while self._launched < len(self._order) and complete(self._order[self._launched]):
            if len(self._in_flight) >= IN_FLIGHT:  # the next takes the scratch of the oldest
                self._finish(len(self._in_flight) + 1 - IN_FLIGHT, self._grace)
            unit = self._order[self._launched]
            self._start(unit)
            self._launched += 1
            self._in_flight.append(unit)

    def finish(self) -> None:
        """Finish all reductions under way."""
        self._finish(len(self._in_flight))

    def end(self) -> None:
        """The backward is over: finish all, and hand back their buffers, once all ranks have read them."""
        self.finish()
        self._release(len(self._unread))

    def begin_units(self, units: Sequence[int]) -> None:
        """A backward begins that makes these units' gradients complete; `start_units` ends it."""
        self._turns = [u for u in reversed(self._order) if u in units]
        for gradients in (g for unit in units for g in self._gradients[unit]):
            gradients.arrived = bytearray(len(gradients.arrived))
            gradients.shown.begin()

    def start_complete(self, first: int, complete: Callable[[int], bool]) -> None:
        """Start those from `first` on whose turn it is, as long as they are complete."""
        while self._turns and self._turns[-1] >= first and complete(self._turns[-1]):
            self._start(self._turns.pop())

    def start_units(self, units: Sequence[int]) -> None:
        """Start to reduce these units' gradients, in the fixed order; `settle` of each waits for the result.

        Raises:
            PlanError: a gradient came to a unit that `start_complete` has started.
        """
        turns, self._turns = self._turns, None
        left = [u for u in self._order if u in units] if turns is None else turns[::-1]
        for gradients in (g for unit in units if unit not in left for g in self._gradients[unit]):
            gradients.shown.refuse_late()
        for unit in left:
            self._start(unit)

    def reduce_units(self, units: Sequence[int]) -> None:
        """Reduce these units' gradients now, in the fixed order; a collective call."""
        for unit in (u for u in self._order if u in units):
            for gradients in self._gradients[unit]:
                gradients.start_reduce()
                gradients.reduction.finish()

    def _start(self, unit: int) -> None:
        for gradients in self._gradients[unit]:
            gradients.start_reduce()

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


class Expected:
    """Which parameters get gradients, as the steps so far have shown; a unit that has them all need not wait."""

    def __init__(self, gradients: Sequence[Sequence[Gradients]]) -> None:
        self._gradients = gradients
        self._all = [[b"\1" * len(g.arrived) for g in of_unit] for of_unit in gradients]
        self._flags = self._all
        self._past: list[list[bytes]] | None = None

    def learn(self) -> None:
        """A step is over: expect from the next every parameter that came in any step so far, if without a gradient."""
        written = [[either(g.written_in_step, bytes(g.arrived)) for g in of_unit] for of_unit in self._gradients]
        if self._past is not None and written != self._past:
            units = zip(self._past, written, strict=True)
            written = [[either(a, b) for a, b in zip(before, now, strict=True)] for before, now in units]
        self._past = self._flags = written

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
            self._past = self._flags = [
                [bytes(entry.name not in never for entry in g.flat.index.entries) for g in gradients]
                for gradients in self._gradients
            ]

    def everything_came(self, unit: int) -> bool:
        """Whether every gradient of a unit has come in this backward."""
        return self._came(unit, self._all[unit])

    def complete(self, unit: int) -> bool:
        """Whether every gradient of a unit that ever came has come."""
        return self._came(unit, self._flags[unit])

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
