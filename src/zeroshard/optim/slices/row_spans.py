"""Steps over rows of a matrix whose others are on other ranks: each asks all, in one exchange for each round.

See `row_reductions` for what an update asks, and `owners` ([Note: cut matrices]) for what is cut.
"""

from collections.abc import Sequence

import torch

from zeroshard.optim.algorithms.row_reductions import Ask
from zeroshard.optim.algorithms.tensor_optimizer import Asking, Fused, TensorOptimizer
from zeroshard.optim.slices.collective_spans import CollectiveSpans
from zeroshard.optim.slices.spans import GradientOf, SliceSpan
from zeroshard.parts.planned import Wire, Work
from zeroshard.traffic import Purpose
from zeroshard.units import Index


class RowSpans(CollectiveSpans):
    """Steps over this rank's rows of a matrix, which is alone in its flat."""

    @property
    def matrices(self) -> None:
        """The rows have their states themselves."""
        return None

    def add(
        self, index: Index, groups: Sequence[int], owned: torch.Tensor, start: int, tier: str | None = "device"
    ) -> int:
        """As `SpanOptimizer.add`."""
        (entry,), (self._group,) = index.entries, groups
        self._shape, self._dtype = entry.shape, owned.dtype
        shares = [index.slice_numel(rank) / index.numel for rank in range(index.ranks)]
        self._shares = torch.tensor(shares, dtype=torch.float64, device=owned.device)
        return self._optimizer.add(index, groups, owned, start, tier)

    def spans(self, number: int) -> list[SliceSpan]:
        """The rows."""
        return self._optimizer.spans(number)

    def split(self, number: int, cuts: Sequence[int]) -> None:
        """Make the scratch of an update; there is one parameter, so that there is nothing to cut."""
        for scratch in self._scratch(max(self._asked, default=0)):
            self._arena.give(scratch)

    def rebind(self, number: int, owned: torch.Tensor, start: int) -> None:
        """Let the rows view `owned`, which begins at `start` and holds the same values."""
        self._optimizer.rebind(number, owned, start)

    def step(self, number: int, gradient_of: GradientOf, fused: Fused | None = None) -> None:
        """One optimizer step on the rows; a collective call."""
        optimizer = self.optimizer
        assert isinstance(optimizer, TensorOptimizer)
        optimizer.asking = Asking([span.tensor for span in self.spans(number)], self._answers)
        try:
            self._optimizer.step(number, gradient_of)
        finally:
            del optimizer.asking

    def wire(self, work: Work) -> Wire:
        """All that is asked goes to each other rank."""
        yield Purpose.ASK_FOR_ROWS, (self._comm.mesh.ranks - 1) * sum(self._asked) * work.updates

    @property
    def _asked(self) -> Sequence[int]:
        """The elements that a step asks for, by round."""
        optimizer = self.optimizer
        assert isinstance(optimizer, TensorOptimizer)
        return optimizer.asked(self._shape, optimizer.param_groups[self._group])

    def _answers(self, asks: Sequence[Ask]) -> list[torch.Tensor]:
        """What all ranks' parts make: everyone's go to everyone, and are put together in rank order."""
        ranks, sizes = self._comm.mesh.ranks, [ask.part.numel() for ask in asks]
        message, arrived = self._scratch(sum(sizes))
        message.view(ranks, -1).copy_(torch.cat([ask.part.reshape(-1) for ask in asks]))
        each = [sum(sizes)] * ranks
        self._comm.all_to_all(arrived, message, each, each, Purpose.ASK_FOR_ROWS, self._label).wait()
        columns = arrived.view(ranks, -1).to(asks[0].part.device).split(sizes, 1)
        found = [ask.answer(parts, self._shares) for ask, parts in zip(asks, columns, strict=True)]
        self._arena.give(arrived)
        self._arena.give(message)
        return found

    def _scratch(self, numel: int) -> list[torch.Tensor]:
        """For a message to all ranks of so many elements to each, and for theirs."""
        total = self._comm.mesh.ranks * numel
        return [self._arena.take(total, self._dtype, "answers about rows") for _ in range(2)]
