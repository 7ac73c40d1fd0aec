"""Chunks: the actions of a list on the weights and gradients of a rank's chunks, beside forwards and backwards."""

from collections.abc import Callable, Mapping

from zeroshard.parts.part import Part, Parts
from zeroshard.pipeline.run.early_reductions import EarlyReductions
from zeroshard.pipeline.run.tied_weights import TiedWeights
from zeroshard.pipeline.stage import Stage
from zeroshard.schedule import Action, Kind, Schedule
from zeroshard.schedule.run import Handler
from zeroshard.step.sequence import Backwards, Updates


class Chunks:
    """Gathers, frees, reduces, updates and lends the chunks of one rank.

    Args:
        verdict: called before the first update of a step; the factor on the gradients, or None to skip.

    Attributes:
        handlers: of its actions but UPDATE.
        early: reductions that start before their action.
        trains: whether the list under way is of a step, and not of an evaluation.
    """

    def __init__(
        self,
        stage: Stage,
        parts: Parts,
        backward: Backwards,
        update: Updates,
        tied: TiedWeights,
        verdict: Callable[[], float | None],
    ) -> None:
        self._backward, self._update, self._tied, self._verdict = backward, update, tied, verdict
        self._gatherer, self._streams = parts.gatherer, stage.pipeline.streams
        self._units: dict[int, list[int]] = {c: [] for c in stage.pipeline.layout.chunks_of(stage.number)}
        self._parts: dict[int, list[Part]] = {c: [] for c in self._units}  # the trained ones
        for number, (chunk, of_unit) in enumerate(zip(stage.chunk_of, parts.of_units, strict=True)):
            self._units[chunk].append(number)
            self._parts[chunk] += [part for part in of_unit if part.gradients is not None]
        self.early = EarlyReductions(stage, parts, backward, self._units, tied.lent_units)
        self.trains, self._updates_left, self._decided = True, 0, False
        self._factor: float | None = None
        self.handlers: Mapping[Kind, Handler] = {
            Kind.GATHER: lambda action: self._gatherer.gather(self._units[action.chunk], trains=self.trains),
            Kind.FREE: lambda action: self._gatherer.free(self._units[action.chunk]),
            Kind.REDUCE: lambda action: self._backward.reductions.start_units(self._units[action.chunk]),
            Kind.DROP: self._drop,
            Kind.REPAY: tied.repay,
            Kind.COLLECT: tied.collect,
            Kind.LEND: self._lend,
            Kind.BORROW: tied.borrow,
        }

    def begin(self, actions: Schedule) -> None:
        """A list begins."""
        self._updates_left = sum(action.kind is Kind.UPDATE for action in actions)
        self._factor, self._decided = None, False
        self.early.plan(actions)

    def use(self, action: Action) -> None:
        """Put the version of the weights that an action uses into the modules."""
        for part in self._parts[action.chunk]:
            part.versions.use(action.version)

    def backward(self, action: Action) -> None:
        """A backward of a chunk begins, or its second part; gradients of 16 bits go into wider sums one by one.

        Reductions in shared memory end here: inside of a backward, which gradient comes first may depend on a rank's
        data, and this rank would wait for one that waits for it in a layer.
        """
        for gradients in (part.gradients for part in self._parts[action.chunk]):
            if gradients is not None:
                gradients.reduction.meet()
                if gradients.flat.dtype.itemsize < 4:
                    gradients.collect()
        self.early.begin(action)

    def restart(self) -> None:
        """Count versions anew; nothing is in flight."""
        self._tied.settle()
        for part in (part for parts in self._parts.values() for part in parts):
            part.versions.restart()

    def decide(self) -> None:
        """Take the verdict on the step, before an update of a chunk."""
        if not self._decided:
            self._factor, self._decided = self._verdict(), True

    def update(self, action: Action) -> None:
        """Update a chunk, as decided."""
        parts = self._parts[action.chunk]
        if self._factor is None:
            self._update.skip(parts)
        else:
            self._update.apply(self._factor, parts)
        self._updates_left -= 1
        if self._streams or not self._updates_left:
            self._backward.expected.learn()
            self._update.consume()
            self._decided = False

    def _lend(self, action: Action) -> None:
        self._update.finish()
        self._tied.lend(action)

    def _drop(self, action: Action) -> None:
        for part in self._parts[action.chunk]:
            part.versions.drop(action.version)
