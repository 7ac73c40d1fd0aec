"""Gradient accumulation: steps of a model in one stage, as lists of actions."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from zeroshard.comm.mesh import Mesh
from zeroshard.parts.part import MicrobatchRows, Parts
from zeroshard.parts.weights import Gatherer
from zeroshard.schedule import Action, Kind, PipelineSchedule, Schedule, verify
from zeroshard.schedule.run import Interpreter, key_of
from zeroshard.step.batch import even_share, uneven_microbatches
from zeroshard.step.losses import Loss
from zeroshard.step.sequence import Run, StepOrder, StepSequence


class OneStage(StepOrder):
    """Steps over all microbatches of a rank.

    Args:
        gatherer: of `parts`.
        pipeline: the lists of one stage.
        run: a forward, to its loss.
        steps: the number of steps before.

    Attributes:
        actions: this rank's list.
        interpreter: of the actions.
        evaluate: the model's own forward.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        parts: Parts,
        gatherer: Gatherer,
        pipeline: PipelineSchedule,
        sequence: StepSequence,
        run: Run,
        steps: Callable[[], int],
    ) -> None:
        self.evaluate: Callable[..., Any] = model
        self._mesh, self._all, self._run = mesh, parts, run
        self._backward, self._sequence, self._steps = sequence.backward, sequence, steps
        self.actions: Schedule = gatherer.lower(pipeline.step(0))
        verify([self.actions])
        self._reduced = {action.microbatch for action in self.actions if action.kind is Kind.REDUCE}
        self._count, self._batch = pipeline.microbatches, None
        self._parts: list[tuple[Any, float, MicrobatchRows | None]] = []
        self._losses: dict[int, Loss] = {}
        self._mean = torch.zeros(())
        handlers = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backwards,
            Kind.GATHER: self._gather,
            Kind.FREE: self._free,
            Kind.REDUCE: self._reduce,
            Kind.UPDATE: self._update_all,
        }
        self.interpreter = Interpreter(handlers, mesh.now)

    def step(self, batch: Any) -> torch.Tensor:
        """One step on this rank's batch; the mean loss of its microbatches."""
        cuts = uneven_microbatches(batch, self._count)
        rows = self._all.random_numbers.number([part for part, _ in cuts])
        self._batch, self._parts = batch, [(*cut, of_cut) for cut, of_cut in zip(cuts, rows, strict=True)]
        self._mean = torch.zeros((), device=self._mesh.device)
        self._losses.clear()
        self._backward.losses.batches.add(batch)
        try:
            self.interpreter.run(self.actions)
        finally:
            self._batch, self._parts = None, []
        return self._mean

    def gathers(self, unit: int) -> int:
        """One for each forward and each backward."""
        return 2 * self._count

    def _forward(self, action: Action) -> None:
        start, (_, number) = self.interpreter.now(), key_of(action)
        part, share, rows = self._parts[number]
        with self._all.random_numbers.microbatch(rows):
            self._losses[number] = even_share(self._run(part), share, self._batch, self._count)
        self.interpreter.note(action, start)

    def _backwards(self, action: Action) -> None:
        start, (_, number) = self.interpreter.now(), key_of(action)
        loss = self._losses.pop(number)
        self._mean = self._mean + loss.value.detach().to(self._mean.device)  # in fp64 where the loss is
        with nullcontext() if number in self._reduced else self._backward.local():
            self._sequence.add(loss)
        self.interpreter.note(action, start)

    def _gather(self, action: Action) -> None:
        self._all.gatherer.gather(range(len(self._all.units)))

    def _free(self, action: Action) -> None:
        self._all.gatherer.free(range(len(self._all.units)))

    def _reduce(self, action: Action) -> None:
        """The backward has reduced each unit as soon as its gradients were complete."""

    def _update_all(self, action: Action) -> None:
        start = self.interpreter.now()
        self._sequence.take(self._steps())
        self.interpreter.note(action, start)
