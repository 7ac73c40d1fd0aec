"""Chunks: actions on the weights and gradients of a rank's chunks, besides forwards and backwards."""

from collections.abc import Mapping

from zeroshard.parts.part import Part, Parts
from zeroshard.pipeline.run.early_reductions import EarlyReductions
from zeroshard.pipeline.run.tied_weights import TiedWeights
from zeroshard.pipeline.stage import Stage
from zeroshard.schedule import Action, Kind, Schedule
from zeroshard.schedule.run import Handler
from zeroshard.step.sequence import StepSequence


class Chunks:
    """Gathers, frees, reduces, updates and lends the chunks of one rank.

    Attributes:
        handlers: of its actions except UPDATE.
        early: reductions that start before their action.
        trains: whether the current list is of a step, not of an evaluation.
    """

    def __init__(self, stage: Stage, parts: Parts, sequence: StepSequence, tied: TiedWeights) -> None:
        self._sequence, self._tied, reductions = sequence, tied, sequence.backward.reductions
        self._gatherer, self._streams = parts.gatherer, stage.pipeline.streams
        self._units: dict[int, list[int]] = {c: [] for c in stage.pipeline.layout.chunks_of(stage.number)}
        self._parts: dict[int, list[Part]] = {c: [] for c in self._units}  # the trained ones
        for number, (chunk, of_unit) in enumerate(zip(stage.chunk_of, parts.of_units, strict=True)):
            self._units[chunk].append(number)
            self._parts[chunk] += [part for part in of_unit if part.gradients is not None]
        self.early = EarlyReductions(stage, parts, sequence.backward, self._units, tied.lent_units)
        self.trains, self._updates_left, self._steps = True, 0, 0
        self.handlers: Mapping[Kind, Handler] = {
            Kind.GATHER: lambda action: self._gatherer.gather(self._units[action.chunk], trains=self.trains),
            Kind.FREE: lambda action: self._gatherer.free(self._units[action.chunk]),
            Kind.REDUCE: lambda action: reductions.launch_rest(self._units[action.chunk]),
            Kind.DROP: self._drop,
            Kind.REPAY: tied.repay,
            Kind.COLLECT: tied.collect,
            Kind.LEND: self._lend,
            Kind.BORROW: tied.borrow,
        }

    def begin(self, actions: Schedule) -> None:
        """Begin a list."""
        self._updates_left = sum(action.kind is Kind.UPDATE for action in actions)
        self._sequence.begin()
        self.early.plan(actions)

    def use(self, action: Action) -> None:
        """Install an action's version of the weights in the modules."""
        for part in self._parts[action.chunk]:
            part.versions.use(action.version)

    def backward(self, action: Action) -> None:
        """Begin a backward of a chunk, or its second part; 16-bit gradients are added to wider sums one by one.

        Reductions in shared memory end before it: inside of a backward, the order of gradients may depend on a rank's
        data, and two ranks could wait for each other.
        """
        for gradients in (part.gradients for part in self._parts[action.chunk]):
            if gradients is not None:
                gradients.reduction.meet()
                if gradients.flat.dtype.itemsize < 4:
                    gradients.collect()
        self.early.begin(action)

    def restart(self) -> None:
        """Restart the numbers of versions; nothing is in flight."""
        self._tied.settle()
        for part in (part for parts in self._parts.values() for part in parts):
            part.versions.restart()

    def decide(self) -> None:
        """Decide on the step, before the first update of a chunk in it."""
        self._sequence.decide(self._steps)

    def update(self, action: Action) -> None:
        """Update a chunk by the decision."""
        self._updates_left -= 1
        last = self._streams or not self._updates_left
        self._sequence.update(self._parts[action.chunk], last)
        self._steps += last

    def _lend(self, action: Action) -> None:
        self._sequence.finish()
        self._tied.lend(action)

    def _drop(self, action: Action) -> None:
        for part in self._parts[action.chunk]:
            part.versions.drop(action.version)
