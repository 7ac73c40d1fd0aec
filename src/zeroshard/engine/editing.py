"""Whole parameters on every rank, for the user to read and write (`engine.gathered()`)."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from zeroshard.engine.assembly import Assembly, Shard
from zeroshard.engine.groups import Groups
from zeroshard.engine.offloading import Offloaded
from zeroshard.engine.replicas import digest_of
from zeroshard.engine.writes import Writes
from zeroshard.errors import PlanError
from zeroshard.zero import Gatherer


class Editing:
    """Gathers all parameters of one engine, and takes over what is written into them."""

    def __init__(
        self,
        assembly: Assembly,
        gatherer: Gatherer | None,
        groups: Groups,
        writes: Writes,
        offloaded: Offloaded | None,
    ) -> None:
        self._assembly, self._gatherer, self._writes, self._offloaded = assembly, gatherer, writes, offloaded
        self._world = groups.world

    def whole(self) -> AbstractContextManager[None]:
        """Whole parameters on every rank inside; a collective call."""
        return nullcontext() if self._gatherer is None else self._gatherer.pinned()

    @contextmanager
    def gathered(self, writer: int | None) -> Iterator[None]:
        """Whole parameters inside; what is written there is taken over at the end; a collective call.

        Args:
            writer: the rank whose values all take; by default all must write alike.

        Raises:
            PlanError: ranks wrote different values, or there is no such rank.
        """
        ranks = self._world.mesh.ranks
        if writer is not None and not 0 <= writer < ranks:
            raise PlanError(f"gathered(writer={writer}) names none of the ranks 0 to {ranks - 1}.")
        shards = self._assembly.all_shards
        with self.whole():
            for shard in shards:
                shard.parameters.begin_edit()
                shard.edits = shard.flat.edits
            self._world.agree(b"", "weights are copied")  # before anybody writes
            self._writes.allowed = True
            keep = True
            try:
                yield
                keep = False
                self._make_alike(writer)
                keep = True
            finally:  # what was written before an exception of the user's own is kept too
                self._writes.allowed = False
                for shard in shards:
                    shard.keep_what_was_written() if keep else shard.parameters.end_edit(keep=False)
        self._world.agree(b"", "edited weights are in place")

    def _make_alike(self, writer: int | None) -> None:
        """Have the same values on all ranks wherever one of them wrote."""
        with torch.no_grad():
            for shard in self._assembly.all_shards:
                for number in shard.flat.moved() if shard.flat.kinds is not None else ():
                    shard.flat.take_over(number)
        mine = [n for n, shard in enumerate(self._assembly.all_shards) if shard.flat.edits != shard.edits]
        everyone = self._world.agree_on(mine, "which weights were written")
        written = sorted({n for numbers in everyone for n in numbers})
        if written and self._offloaded is not None:
            self._offloaded.forget()  # updates that began from the weights as they were
        for number in written:
            shard = self._assembly.all_shards[number]
            if writer is not None:
                self._world.broadcast(shard.parameters.visible, f"edited weights {shard.flat.label}", writer)
            elif self._world.mesh.ranks > 1:
                self._compare(shard)

    def _compare(self, shard: Shard) -> None:
        flat = shard.flat
        buffer = shard.parameters.visible
        mine = [digest_of([buffer[entry.offset : entry.stop]]) for entry in flat.index.entries]
        everyone = self._world.agree_on(mine, f"digests of edited weights {flat.label}")
        for entry, found in zip(flat.index.entries, zip(*everyone, strict=True), strict=True):
            if len(set(found)) > 1:
                other = next(rank for rank, digest in enumerate(found) if digest != found[0])
                raise PlanError(
                    f"Ranks 0 and {other} wrote different values into '{entry.name}' inside engine.gathered(). Write "
                    f"alike on every rank (the same values, seeds included), or let one rank write: "
                    f"engine.gathered(writer=0). Weights of this rank may differ from the others' now; go on from a "
                    f"checkpoint."
                )
