"""Gatherers of units: none where all units stay on the rank, or by the list of a pipeline's actions.

`zero.gather_order` has the third: units that are gathered and freed inside of passes, as modules use them.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum

from zeroshard.comm.collectives import Purpose
from zeroshard.errors import PlanError
from zeroshard.parts.weights import Residence, Weights
from zeroshard.schedule import Schedule
from zeroshard.units import Unit


class PassKind(StrEnum):
    """A walk over the model; each kind has an order of its own."""

    FORWARD = "forward"
    EVALUATION = "evaluation"
    BACKWARD = "backward"


class Gatherer:
    """Gathers units on this rank and frees them; in this class, all units are always present.

    Attributes:
        gathers: whether units are gathered for use and freed after it.
        passes: whether they do so inside of passes, as modules use them.
    """

    gathers = passes = False

    @property
    def orders(self) -> dict[str, list[str]]:
        """The recorded order of each kind of pass, as unit names."""
        return {}

    def inside(self, kind: PassKind) -> bool:
        """Whether a pass of this kind is under way."""
        return False

    def begin(self, kind: PassKind) -> None:
        """Begin a pass; all ranks must begin the same one."""

    def end(self) -> None:
        """End the innermost pass."""

    def abandon(self) -> None:
        """Leave all passes after an error, freeing what they hold."""

    def need(self, number: int, enters: bool = False) -> None:
        """Gather unit `number` before this returns.

        Args:
            enters: the backward of a call of the unit begins.
        """

    def done(self, number: int | None = None, computed_again: bool = False) -> None:
        """Free unit `number`: nothing in this pass uses it again; by default, the units that a backward has passed.

        See [Note: numbers of nodes] for those.

        Args:
            computed_again: its recomputed forward has ended, and its backward may read it later, so that it is freed
                only where others need the room.
        """

    def free_all(self) -> None:
        """Free every unit, unless they are pinned."""

    @property
    def all_gathered(self) -> bool:
        """Whether all units of this rank are present."""
        return True

    def pinned(self) -> AbstractContextManager[None]:
        """Keep every unit gathered inside; a collective call."""
        return nullcontext()

    def visit(self, number: int) -> AbstractContextManager[None]:
        """Keep one unit gathered inside, outside of any pass; a collective call."""
        return nullcontext()

    def lower(self, actions: Schedule) -> Schedule:
        """A list of compute with the gathers and frees that surround it."""
        return actions

    def gather(self, numbers: Sequence[int], trains: bool = True) -> None:
        """Gather these units for a chunk of the model; a collective call."""

    def free(self, numbers: Sequence[int]) -> None:
        """A chunk of the model is done with these units."""


class ByChunk(Gatherer):
    """Units that come and go with the chunk of a pipeline that they are in, where its list of actions says so.

    Args:
        units: of this rank.
        weights: of each unit.
    """

    gathers = True

    def __init__(self, units: Sequence[Unit], weights: Sequence[Sequence[Weights]]) -> None:
        self._units, self._weights = units, weights
        self._pins = 0

    @property
    def all_gathered(self) -> bool:
        """Whether all units of this rank are gathered."""
        return all(each.residence is Residence.GATHERED for weights in self._weights for each in weights)

    def need(self, number: int, enters: bool = False) -> None:
        """Check that a unit is gathered.

        Raises:
            PlanError: it is of a chunk that does not run now.
        """
        if any(each.residence is not Residence.GATHERED for each in self._weights[number]):
            raise PlanError(
                f"A parameter of unit '{self._units[number].label}' is read while another chunk of the model runs, and "
                f"is not gathered (zero=3). Read it in the module that holds it, or use zero=2."
            )

    def gather(self, numbers: Sequence[int], trains: bool = True) -> None:
        """Gather these units; a collective call."""
        if not self._pins:
            self._bring([each for number in numbers for each in self._weights[number]], trains)

    def free(self, numbers: Sequence[int]) -> None:
        """Keep only slices of these units."""
        if not self._pins:
            for each in (each for number in numbers for each in self._weights[number]):
                each.free()

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Keep every unit of this rank gathered inside; a collective call."""
        every = [each for weights in self._weights for each in weights]
        with self._lent(every if not self._pins else []):
            self._pins += 1
            try:
                yield
            finally:
                self._pins -= 1

    def visit(self, number: int) -> AbstractContextManager[None]:
        """Keep one unit gathered inside; a collective call."""
        return self._lent(list(self._weights[number]))

    @contextmanager
    def _lent(self, several: Sequence[Weights]) -> Iterator[None]:
        for each in several:
            each.lend()
        self._bring(several, trains=False)
        try:
            yield
        finally:
            for each in several:
                each.free()

    def _bring(self, several: Sequence[Weights], trains: bool) -> None:
        for each in several:
            each.start_gather(Purpose.GATHER_PARAMETERS if trains else Purpose.GATHER_TO_EVALUATE)
        for each in several:
            each.finish_gather()
