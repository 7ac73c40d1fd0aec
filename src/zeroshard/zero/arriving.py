"""Updated parameters that come from the other ranks beside the next forward (stages 1 and 2).

`step` returns while the gathers of the updated slices run on, root first and then in the order of the forward
([Note: arriving]).
"""

import contextlib
import sys
from collections.abc import Iterable

from zeroshard.comm.collectives import Comm
from zeroshard.errors import CommError
from zeroshard.memory.ledger import Ledger
from zeroshard.parts.part import LateUpdates
from zeroshard.parts.weights import Residence, arrived, withhold
from zeroshard.units import Flat
from zeroshard.zero.weights import Whole


class Arriving(Whole):
    """Whole parameters whose updated slices arrive beside the next forward ([Note: arriving]).

    Args:
        arrivals: all of them, which forwards wait for.

    Attributes:
        residence: ARRIVING from an update until `finish_gather`.
    """

    def __init__(self, flat: Flat, comm: Comm, ledger: Ledger, publishes: bool, arrivals: "Arrivals") -> None:
        super().__init__(flat, comm, ledger, publishes)
        if self._publishes:
            arrivals.add(self)

    def publish(self, spans: int | None = None) -> None:
        """Start to bring the other ranks' slices; where they may arrive later, the parameters are absent until then.

        Args:
            spans: as in `Weights.publish`.
        """
        if self._publishes and spans is not None:
            withhold(self, super().published, spans)
        super().publish()

    def published(self) -> None:
        """Wait for slices whose parameters are not absent; `finish_gather` waits for the others."""
        if self.residence is Residence.GATHERED:
            super().published()

    def finish_gather(self) -> None:
        """Wait for the slices of all ranks, and let the parameters view them."""
        super().finish_gather()
        arrived(self)

    def __del__(self) -> None:
        """Parameters that outlive the engine get their values, unless a rank has failed."""
        if not sys.is_finalizing():
            with contextlib.suppress(CommError):
                self.finish_gather()


class Arrivals(LateUpdates):
    """The weights of all units that arrive after their update."""

    def __init__(self) -> None:
        super().__init__()
        self._of_units: dict[int, list[Arriving]] = {}

    def add(self, weights: Arriving) -> None:
        """Wait for these weights before the forwards of their unit."""
        self._of_units.setdefault(weights.flat.unit.number, []).append(weights)

    def flush(self) -> None:
        """Wait for all new weights."""
        self.finish()

    def finish(self) -> None:
        """Wait for all new weights."""
        for unit in self._of_units:
            self.need(unit)

    def entering(self, root: int, trains: bool) -> None:
        """A forward begins; wait for the new weights of the root unit."""
        self.need(root)

    def need(self, unit: int) -> None:
        """Wait for the new weights of a unit."""
        for weights in self._of_units.get(unit, ()):
            weights.finish_gather()

    def awaited(self, units: Iterable[int]) -> Iterable[int]:
        """The units whose weights arrive after the step, of those given."""
        return [unit for unit in units if unit in self._of_units]
