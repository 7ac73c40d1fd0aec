"""Updated parameters that come from the other ranks beside the next forward (stages 1 and 2).

[Note: arriving weights] `step` may return while the gathers of the updated slices run on, root first and then in the
order of the forward, which waits for each unit's own. Until then a parameter is an absent one ([Note: absent values])
over NaN: reading it waits. Not every reader can be made to wait: torch.tensor(p), torch.func over parameters, traced
modules and extensions in C++ never ask, and read NaN. So this is done where the plan asks for it, and not by default.
A tensor that shares the parameters' memory, as `p.detach()` of an earlier step does, cannot become NaN; a flat of which
the user holds one is waited for at the end of the step.
"""

import contextlib
import sys
from collections.abc import Iterable

import torch

from zeroshard.comm.collectives import Comm
from zeroshard.errors import CommError
from zeroshard.memory.ledger import Ledger
from zeroshard.parts.late_updates import LateUpdates
from zeroshard.parts.weights import Residence
from zeroshard.units import Flat
from zeroshard.zero.weights import Whole


class Arriving(Whole):
    """Whole parameters whose updated slices arrive beside the next forward ([Note: arriving weights]).

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
        waits = spans is None or self.flat.kinds is None or self._seen_elsewhere(spans)
        super().publish()
        if self._pending is not None and not waits:
            self.residence = Residence.ARRIVING
            self.flat.detach()

    def published(self) -> None:
        """Wait for slices whose parameters are not absent; `finish_gather` waits for the others."""
        if self.residence is Residence.GATHERED:
            super().published()

    def finish_gather(self) -> None:
        """Wait for the slices of all ranks, and let the parameters view them."""
        if self.residence is Residence.ARRIVING:
            super().published()
            self.residence = Residence.GATHERED
            self.flat.attach()

    def _seen_elsewhere(self, spans: int) -> bool:
        """Whether anything shares the buffer but its parameters, their views, the optimizer's and those of `p.data`."""
        storage = self.full.untyped_storage()
        users: int = torch._C._storage_Use_Count(storage._cdata)
        known = len(self.flat.parameters) + len(self.flat.views) + self.flat.aliases + spans
        return users > known + 3  # `full`, `own` and `storage`

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
