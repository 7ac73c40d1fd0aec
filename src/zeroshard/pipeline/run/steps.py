"""Steps and evaluations of a model that is cut into stages."""

import math
import struct
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from zeroshard.comm.collectives import Purpose
from zeroshard.errors import BatchError, NonFiniteError, PlanError
from zeroshard.parts.part import Parts
from zeroshard.pipeline.cut.bypass import NUMBERS, SentValues
from zeroshard.pipeline.cut.origins import ReturnedValue
from zeroshard.pipeline.run.executor import Executor, Microbatch
from zeroshard.pipeline.run.messages import Entering
from zeroshard.pipeline.run.weight_stashing import StashedVersions
from zeroshard.pipeline.stage import Stage
from zeroshard.schedule import Kind
from zeroshard.step.batch import uneven_microbatches
from zeroshard.step.losses import REPORT, LossReport, SameBatches, means_alone
from zeroshard.step.sequence import Backwards, Decides, Run, Updates

LOANS = {Kind.LEND: Purpose.LEND_WEIGHTS, Kind.REPAY: Purpose.REPAY_GRADIENTS}
LEAVING = (Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD)  # messages of the activation that leaves a chunk
WORD = struct.Struct("<dd?I")  # of a rank: squared norm, share of the loss, whether its losses are finite, its batch


class PipelineOrder:
    """One rank's part in steps over all stages.

    Attributes:
        executor: carries out the actions.
        actions: this rank's list of the first step.
        fed: steps since the start or the last flush of a schedule that never flushes by itself.
    """

    def __init__(
        self,
        stage: Stage,
        parts: Parts,
        backward: Backwards,
        update: Updates,
        decision: Decides,
        recomputes: bool,
        model: nn.Module,
        run: Run,
    ) -> None:
        self.stage, self._decision, self._update, self._model = stage, decision, update, model
        self._step_losses = backward.losses
        pipeline = stage.pipeline
        if pipeline.streams:
            _stash(stage, parts, backward)
            run = means_alone(run, pipeline.name)
        scale: Callable[[], float] = lambda: decision.scale  # noqa: E731
        decide = self._decide_alone if pipeline.streams else self._decide_together
        self.executor = Executor(stage, parts, backward, update, run, scale, decide, recomputes)
        self.interpreter = self.executor.interpreter
        self.fed = 0
        self.actions = pipeline.step(stage.rank)
        self._gathers = Counter(action.chunk for action in self.actions if action.kind is Kind.GATHER)
        self._updates = 0
        self._loss: Tensor | None = None
        self._batches = SameBatches(_on_same_data(stage))
        self._shapes: list[dict[int, Entering]] = []  # of each microbatch of the last step

    def step(self, batch: Any) -> Tensor | None:
        """One step on this data rank's batch; the mean loss, where it is known."""
        stage, executor = self.stage, self.executor
        pipeline, rank = stage.pipeline, stage.rank
        parts = uneven_microbatches(batch, pipeline.microbatches)
        base = self.fed * pipeline.microbatches if pipeline.streams else 0
        own = stage.number  # the first of this rank's chunks
        rows = executor.random_numbers.number([part for part, _ in parts])
        each_part = enumerate(zip(parts, rows, strict=True))
        numbered = {stage.data_rank + stage.data_ranks * (base + k): part for k, part in each_part}
        each = pipeline.update_every == 1 and pipeline.streams
        executor.feed(
            {
                j: Microbatch(part, 1.0 if each else weight, rows_of_part)
                for j, ((part, weight), rows_of_part) in numbered.items()
                if pipeline.layout.rank_of(own, j, stage.place) == rank
            }
        )
        self._loss = None
        self._batches.add(batch)
        if pipeline.streams and not self.fed:
            self._compare_batches()  # the others of a schedule that never flushes are compared at its end
        self._shapes = [executor.shapes(part) for part, _ in parts]
        executor.run(pipeline.step(rank, self.fed))
        if pipeline.streams:
            self.fed += 1
            self._loss = self._losses() if stage.is_last else None
            if self._loss is not None and each:
                self._loss = self._loss / (pipeline.microbatches // stage.ranks_per_data_rank)
        return self._loss

    def flush(self) -> None:
        """Finish the microbatches in flight; all stages then have weights that saw the same microbatches."""
        rest = self.stage.pipeline.rest(self.stage.rank, self.fed)
        self.executor.run(rest)
        self.executor.restart()
        self.executor.messages.finish()
        if self.fed:
            self._compare_batches()  # not before: a rank may wait for what another receives in its rest
        self.fed = 0

    def reloaded(self) -> None:
        """The weights were replaced: lend them anew; a collective call."""
        self.executor.tied.lend_again()

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of the whole model for this data rank's arguments, on each of its ranks; with gradients off.

        Raises:
            PlanError: gradients are on.
        """
        stage = self.stage
        if torch.is_grad_enabled():
            raise PlanError(
                f"A model in {stage.pipeline.layout.stages} stages is trained by engine.train_step(batch), which runs "
                f"forwards and backwards in the order of the schedule; to evaluate it, call it inside torch.no_grad()."
            )
        self.flush()
        call: Run = lambda batch: self._model(*batch[0], **batch[1])  # noqa: E731
        batch = (args, kwargs)
        actions = stage.pipeline.evaluation(stage.rank, stage.data_rank)
        result = self.executor.evaluate(actions, batch, call) if actions else None
        last = stage.pipeline.layout.rank_of(stage.pipeline.layout.all_chunks - 1, stage.data_rank, stage.place)
        if stage.rank != last:
            past = len(stage.chain.layers)
            # No layer runs on this rank; the placeholder for the output has the right shapes.
            result = stage.chain.run_standing_in(past, past + 1, partial(call, batch))
        return self._broadcast_output(result, last)

    def _broadcast_output(self, result: Any, source: int) -> Any:
        stage, messages = self.stage, self.executor.messages
        leaves, spec = tree_flatten(result)
        layout = stage.pipeline.layout
        replica = [layout.rank_of(number, stage.data_rank, stage.place) for number in range(layout.stages)]
        ranks = range(stage.place, layout.ranks, layout.ranks_per_replica) if layout.uneven else replica
        every = {ReturnedValue("output", 0, n): leaf for n, leaf in enumerate(leaves) if type(leaf) in NUMBERS}
        numbers = SentValues.of([(number,) for number in every], every)
        if numbers:
            leaves.append(numbers.pack(every, stage.mesh.device))
        for n, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            name = f"output {n}"
            if stage.rank == source:
                for peer in ranks:
                    if peer != source:
                        messages.send(name, leaf, peer, Purpose.SEND_TO_EVALUATE)
            else:
                leaves[n] = buffer = torch.empty(leaf.shape, dtype=leaf.dtype, device=stage.mesh.device)
                messages.post_into(name, buffer, leaf.shape, source, Purpose.SEND_TO_EVALUATE)
                messages.take(name)
        messages.finish()
        if numbers:
            for number, value in numbers.unpack(leaves.pop()).items():
                leaves[number.leaf] = value
        return tree_unflatten(leaves, spec)

    def gathers(self, unit: int) -> int:
        """How often the list of a step gathers the chunk of a unit, or lends something of the unit."""
        tied = self.executor.tied
        lends = sum(action.kind is Kind.LEND and tied.gathers(action, unit) for action in self.actions)
        return lends + self._gathers[self.stage.chunk_of[unit]]

    def planned_messages(self) -> dict[Purpose, int]:
        """Elements that this rank sends in a step of a full pipeline, by the list and the last step's shapes."""
        stage, tied = self.stage, self.executor.tied
        planned: dict[Purpose, int] = {}
        for action in stage.pipeline.step(stage.rank, stage.pipeline.layout.stages if stage.pipeline.streams else 0):
            if action.kind in LOANS:
                message = LOANS[action.kind], tied.elements(action)
            else:
                layer = stage.firsts[action.chunk + (action.kind in LEAVING)]
                number = (action.microbatch or 0) // stage.data_ranks % stage.pipeline.microbatches
                shapes = self._shapes[number] if self._shapes else {}
                found = self.executor.messages.planned(action, layer, shapes.get(layer))
                if found is None:
                    continue
                message = found
            purpose, elements = message
            planned[purpose] = planned.get(purpose, 0) + elements
        return planned

    def _losses(self) -> Tensor:
        """The sum of the weighted losses on this rank since the last call."""
        losses = list(self.executor.losses.values())
        self.executor.losses.clear()
        total = torch.zeros((), device=self.stage.mesh.device)
        for loss in losses:
            total += loss
        return total

    def _decide_together(self) -> float | None:
        """One verdict of all stages on the step."""
        stage, layout = self.stage, self.stage.pipeline.layout
        # Where stages have unlike numbers of replicas, a replica's mean is over its own part of the microbatches.
        gain = stage.ranks_per_data_rank
        settled = self._update.settle(self._updates)
        loss, report = float(self._losses()) if stage.is_last else 0.0, self._step_losses.report
        if stage.place:  # the first rank that works on a batch tells its losses
            loss, report = 0.0, LossReport()
        comm = self.executor.messages.comm
        word = WORD.pack((settled.norm * gain) ** 2, loss, settled.sound, *self._batches.read()) + REPORT.pack(*report)
        frames = comm.agree(word, f"agreement of all stages, {self._updates}")
        answers = [WORD.unpack_from(frame) for frame in frames]
        losses = [LossReport(*REPORT.unpack_from(frame, WORD.size)) for frame in frames]
        squares = sum(answers[layout.members(s)[0]][0] for s in range(layout.stages))
        self._loss = torch.tensor(sum(loss for _, loss, *_ in answers) / stage.data_ranks)
        try:
            self._batches.check([batches for *_, batches in answers], self._updates)
            whole = self._step_losses.close(losses, stage.data_ranks)
        except (BatchError, NonFiniteError):
            self._update.consume()
            raise
        finally:
            self._batches.clear()
        return self._conclude(math.sqrt(squares) * whole, gain * whole, all(sound for _, _, sound, _ in answers))

    def _compare_batches(self) -> None:
        comm = self.executor.messages.comm
        word = struct.pack("<I", *self._batches.read())
        frames = comm.agree(word, f"batches, {self.fed} steps after a flush")
        self._batches.clear()
        self._batches.check([number for frame in frames for number in struct.unpack("<I", frame)], self.fed)

    def _decide_alone(self) -> float | None:
        """This stage's verdict on one update: it waits for no ranks but its replicas."""
        settled = self._update.settle(self._updates)
        return self._conclude(settled.norm, 1, settled.sound)

    def _conclude(self, norm: float, gain: float, sound: bool) -> float | None:
        comm = None if self.stage.pipeline.streams else self.executor.messages.comm
        self._updates += 1
        try:
            verdict = self._decision.decide(norm, lambda found: self._update.refuse_nonfinite(found, comm), sound)
        except Exception:
            self._update.consume()
            raise
        return None if verdict.skip else verdict.factor * gain


def _on_same_data(stage: Stage) -> list[list[int]]:
    """The ranks of all stages that are given the same batch, by data rank."""
    layout = stage.pipeline.layout
    data_rank = [layout.replica_of(rank) if stage.data_ranks > 1 else 0 for rank in range(layout.ranks)]
    return [[rank for rank, of in enumerate(data_rank) if of == number] for number in range(stage.data_ranks)]


def _stash(stage: Stage, parts: Parts, backward: Backwards) -> None:
    """Let each flat have more than one version of its weights."""
    for part, gradients in parts.trained:
        sites = [list(stage.chain.sites(parameter)) for parameter in part.flat.parameters]
        listen, ledger = partial(backward.listen, gradients), parts.arena.ledger
        part.versions = StashedVersions(part.flat, part.weights.full, sites, ledger, listen, stage.versions - 1)
