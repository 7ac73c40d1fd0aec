"""Steps and evaluations of a model in stages."""

import inspect
import math
import struct
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from zeroshard.comm.collectives import Comm, Purpose
from zeroshard.comm.disagreement import went_on
from zeroshard.comm.left_passes import LeftCalls
from zeroshard.errors import CommError, ModelError, PlanError
from zeroshard.parts.part import Parts
from zeroshard.pipeline.cut.bypass import NUMBERS, SentValues
from zeroshard.pipeline.cut.origins import ReturnedValue
from zeroshard.pipeline.run.executor import Executor, Microbatch
from zeroshard.pipeline.run.messages import Boundary
from zeroshard.pipeline.run.weight_stashing import StashedVersions
from zeroshard.pipeline.stage import Stage, means_alone, refuse_last_hook
from zeroshard.recompute.chunks import ChunkInputs
from zeroshard.schedule import Kind
from zeroshard.step.backward import Backward
from zeroshard.step.batch import uneven_microbatches
from zeroshard.step.decision import Agreed
from zeroshard.step.losses import DOUBLE, REPORT, LossReport, SameBatches, StepLosses
from zeroshard.step.sequence import Run, StepOrder, StepSequence

LOANS = {Kind.LEND: Purpose.LEND_WEIGHTS, Kind.REPAY: Purpose.REPAY_GRADIENTS}
STEPS = "steps"  # and flushes: the calls that all ranks make together
LEAVING = (Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD)  # messages of the activation that leaves a chunk
# Of a rank: squared norm, share of the loss, whether its losses are finite, the number of its call, its batch.
WORD = struct.Struct("<dd?II")


class ThisStage:
    """The ranks of one stage, which decides on its updates alone under a schedule that never flushes.

    Attributes:
        comm, whole: of a `step.sequence.Scope`.
        losses: of microbatches at the end of the model, means times their weights, since the last `total`.
        batches: since the last comparison of ranks that work on the same data.
        mean: the mean loss of the last step, where it is known.
        calls: of the engine, on this rank.
    """

    whole = False

    def __init__(self, stage: Stage, comm: Comm, losses: StepLosses) -> None:
        self._stage, self.comm, self._reported = stage, comm, losses
        self.losses: dict[int, Tensor] = {}
        self.batches = SameBatches(_on_same_data(stage))
        place, key = f"rank {stage.rank} of stage {stage.number}", f"left/{stage.world.session}"
        self.calls = LeftCalls(stage.world.mesh, key, place, (STEPS, _evaluations(stage)))
        self.mean: Tensor | None = None

    def widen(self, agreed: Agreed, reports: Sequence[LossReport], step: int) -> Agreed:
        """The stage's own agreement: it decides alone."""
        return agreed

    def total(self) -> Tensor:
        """The sum of `losses`, which are cleared."""
        total = torch.zeros((), device=self._stage.mesh.device)
        for loss in self.losses.values():
            total = total + loss  # which may be wider
        self.losses.clear()
        return total

    def compare_batches(self, fed: int) -> None:
        """Compare the batches of all ranks on the same data, `fed` steps after a flush; a collective call."""
        frames = self._stage.world.agree(struct.pack("<I", *self.batches.read()), f"batches, {fed} steps after a flush")
        self.batches.clear()
        self.batches.check([number for frame in frames for number in struct.unpack("<I", frame)], fed)


class AllStages(ThisStage):
    """The ranks of all stages, which decide on a step together; attributes as of `ThisStage`."""

    def widen(self, agreed: Agreed, reports: Sequence[LossReport], step: int) -> Agreed:
        """Add up the norms of all stages, and divide the losses of the last one by their counts."""
        stage, layout = self._stage, self._stage.pipeline.layout
        # Where stages have unlike numbers of replicas, a replica's mean is over its own part of the microbatches.
        gain = stage.ranks_per_data_rank
        loss, report = float(self.total()) if stage.is_last else 0.0, self._reported.report
        if stage.place:  # the first rank that works on a batch reports its losses
            loss, report = 0.0, LossReport()
        word = WORD.pack(
            (agreed.norm * gain) ** 2, loss, agreed.finite, self.calls.numbers[STEPS], *self.batches.read()
        )
        word += REPORT.pack(*report)
        frames = self.comm.agree(word, f"agreement of all stages, {step}")
        answers = [WORD.unpack_from(frame) for frame in frames]
        self._refuse_unlike([number for *_, number, _ in answers])
        squares = sum(answers[layout.members(s)[0]][0] for s in range(layout.stages))
        every = [LossReport(*REPORT.unpack_from(frame, WORD.size)) for frame in frames]
        dtype = torch.float64 if any(each.kinds & DOUBLE for each in every) else None
        self.mean = torch.tensor(sum(loss for _, loss, *_ in answers) / stage.data_ranks, dtype=dtype)
        try:
            self.batches.check([batches for *_, batches in answers], step)
            whole = self._reported.close(every, stage.data_ranks)
        finally:
            self.batches.clear()
        finite = all(finite for _, _, finite, *_ in answers)
        return Agreed(math.sqrt(squares) * whole, agreed.written, finite, gain * whole)

    def _refuse_unlike(self, numbers: Sequence[int]) -> None:
        """Refuse ranks of which some have begun more calls: they went on after an error before their first message."""
        most, least = max(numbers), min(numbers)
        if most > least:
            ahead, behind = numbers.index(most), numbers.index(least)
            errors = self.comm.agree_on(self.calls.caught, "errors of calls")
            error = CommError(
                f"The ranks are at unlike batches: rank {ahead} is in call {most} of engine.train_step() and flush(), "
                f"and rank {behind} in call {least}.{went_on(ahead, errors[ahead])} The step was not taken. Let errors "
                f"end the job, and check batches on all ranks before the step."
            )
            self.calls.break_off(error)
            raise error


def scope_of(stage: Stage, comm: Comm, losses: StepLosses) -> ThisStage:
    """The ranks that decide on an update together; `comm` has those of this rank's stage."""
    return ThisStage(stage, comm, losses) if stage.pipeline.streams else AllStages(stage, stage.world, losses)


class PipelineOrder(StepOrder):
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
        sequence: StepSequence,
        scope: ThisStage,
        inputs: ChunkInputs,
        model: nn.Module,
        run: Run,
    ) -> None:
        self.stage, self._scope, self._model = stage, scope, model
        pipeline = stage.pipeline
        if pipeline.streams:
            _stash(stage, parts, sequence.backward)
            run = means_alone(run, pipeline.name)
        self.executor = Executor(stage, parts, sequence, run, scope.losses, inputs)
        self.interpreter = self.executor.interpreter
        self.fed = 0
        self.actions = pipeline.step(stage.rank)
        self._gathers = Counter(action.chunk for action in self.actions if action.kind is Kind.GATHER)
        self._shapes: list[dict[int, Boundary]] = []  # of each microbatch of the last step

    def step(self, batch: Any) -> Tensor | None:
        """One step on this data rank's batch; returns the mean loss on ranks that have it, else None."""
        with self._scope.calls.call(STEPS, "engine.train_step()", self.executor.under_way):
            return self._step(batch)

    def _step(self, batch: Any) -> Tensor | None:
        stage, executor, scope = self.stage, self.executor, self._scope
        pipeline, rank = stage.pipeline, stage.rank
        refuse_last_hook(stage.chain.layers, stage.firsts)
        parts = uneven_microbatches(batch, pipeline.microbatches)
        base = self.fed * pipeline.microbatches if pipeline.streams else 0
        own = stage.number  # the first of this rank's chunks
        rows = executor.random_numbers.number([part for part, _ in parts])
        scope.mean = None
        scope.batches.add(batch)
        if pipeline.streams and not self.fed:
            scope.compare_batches(0)  # the others of a schedule that never flushes are compared at its end
        self._shapes = [executor.shapes(part) for part, _ in parts]
        each_part = enumerate(zip(parts, rows, self._shapes, strict=True))
        numbered = {stage.data_rank + stage.data_ranks * (base + k): part for k, part in each_part}
        each = pipeline.update_every == 1 and pipeline.streams
        executor.feed(
            {
                j: Microbatch(part, 1.0 if each else weight, rows_of_part, shapes)
                for j, ((part, weight), rows_of_part, shapes) in numbered.items()
                if pipeline.layout.rank_of(own, j, stage.place) == rank
            }
        )
        executor.run(pipeline.step(rank, self.fed) if pipeline.streams else self.actions)
        if pipeline.streams:
            self.fed += 1
            scope.mean = scope.total() if stage.is_last else None
            if scope.mean is not None and each:
                scope.mean = scope.mean / (pipeline.microbatches // stage.ranks_per_data_rank)
        return scope.mean

    def flush(self) -> None:
        """Finish the microbatches in flight; all stages then have weights that saw the same microbatches."""
        with self._scope.calls.call(STEPS, "engine.flush()", self.executor.under_way):
            self._flush()

    def _flush(self) -> None:
        rest = self.stage.pipeline.rest(self.stage.rank, self.fed)
        self.executor.run(rest)
        self.executor.restart()
        self.executor.messages.finish()
        if self.fed:
            self._scope.compare_batches(self.fed)  # not before: a rank may wait for what another receives in its rest
        self.fed = 0

    def reloaded(self) -> None:
        """Lend replaced weights again; a collective call."""
        self.executor.tied.lend_again()

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
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
        with self._scope.calls.call(_evaluations(self.stage), "engine(...)", self.executor.under_way):
            self.flush() if stage.pipeline.streams else self._flush()  # data ranks evaluate apart where steps flush
            try:
                return self._evaluate(args, kwargs)
            except ModelError as error:
                if isinstance(error.__cause__, TypeError):  # perhaps of arguments that the forward does not take
                    inspect.signature(type(self._model).forward).bind(self._model, *args, **kwargs)
                raise

    def _evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stage = self.stage
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
        """The number of gathers of a unit in a step: for its chunk, and for loans of its weights."""
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


def _evaluations(stage: Stage) -> str:
    """The calls that the ranks of one data rank make together."""
    return f"evaluations of data rank {stage.data_rank}"


def _on_same_data(stage: Stage) -> list[list[int]]:
    """The ranks of all stages with the same batch, by data rank."""
    layout = stage.pipeline.layout
    data_rank = [layout.replica_of(rank) if stage.data_ranks > 1 else 0 for rank in range(layout.ranks)]
    return [[rank for rank, of in enumerate(data_rank) if of == number] for number in range(stage.data_ranks)]


def _stash(stage: Stage, parts: Parts, backward: Backward) -> None:
    """Give each flat several versions of its weights."""
    for part, gradients in parts.trained:
        sites = [list(stage.chain.sites(parameter)) for parameter in part.flat.parameters]
        listen, ledger = partial(backward.listen, gradients), parts.arena.ledger
        part.versions = StashedVersions(part.flat, part.weights.full, sites, ledger, listen, stage.versions - 1)
