"""Randomly drawn cases carried out on the ranks of a mesh, and beside them a plain loop on the global batch."""

import gc
import math
import warnings
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from engine.models import batch, build
from engine.random_plans import Case, Step, message_of, plan_of
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.errors import BudgetExceeded, ModelError, NonFiniteError, OptimizerError, PlanError
from zeroshard.moe import Losses, Router
from zeroshard.saved.compression import CompressedStore
from zeroshard.step.context import Within

Log = list[tuple[str, Any]]
DECAY = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step))
# Known: where a model recomputes a block re-entrantly and uses it twice, its gradients come in two rounds. Each of them
# is reduced and, at stage 3, gathers the block once more than the formulas say ([Note: order of reductions]), and the
# sum of the first is kept beside the gradients of the second.
SECOND_ROUND = {"CheckpointedReentrant"}
STREAMED = "gather parameters", "parameters up"
MEETING = (PlanError, ModelError, OptimizerError, BudgetExceeded)  # what may come when a plan meets model and ranks


def fresh(case: Case) -> nn.Module:
    """The case's model."""
    if case.meta:
        with torch.device("meta"):
            return build(case.model)
    return build(case.model)


def comparable(case: Case) -> bool:
    """Whether a plain loop can follow the case's own plan to its end."""
    return case.model != "Dropped" and follows_plainly(plan_of(case.plan, "."))


def follows_plainly(plan: zs.Plan) -> bool:
    """Whether all weights of a forward are equally old: nothing is in flight, and no part of the updates is late."""
    return not plan.streams and not (plan.offloading.delayed_update and plan.offloading.fraction < 1)


def perform(mesh: zs.Mesh, cases: Sequence[Case], folder: str) -> list[dict[str, Any]]:
    """What one rank saw of each case."""
    answers = []
    for case in cases:
        try:
            answers.append(Run(mesh, case, str(Path(folder) / f"{case.seed}")).answer())
            if "log" in answers[-1] and not comparable(case):
                answers[-1]["again"] = Run(mesh, case, str(Path(folder) / f"{case.seed}-again")).answer()
        except BaseException as error:
            error.add_note(f"In {case}")
            raise
        gc.collect()  # the shared memory of engines that nobody holds
    return answers


SMALLEST = 64  # bytes of tensors that are compressed, of models far smaller than those that it is for


class Run:
    """One rank's part in a case.

    Attributes:
        log: losses, norms, weights and what else can be compared, in the order in which it came.
        wrong: formulas that were not met.
    """

    def __init__(self, mesh: zs.Mesh, case: Case, folder: str) -> None:
        self.mesh, self.case, self.folder = mesh, case, folder
        self.log: Log = []
        self.wrong: list[str] = []
        self.regular = True  # whether all steps so far were those that the formulas are about
        self.fed = 0  # steps since a pipeline was last empty
        self.splits: list[tuple[str, ...]] = []  # of each engine
        self.streamed = False  # whether the plan of any engine so far
        self.saved = 0

    def answer(self) -> dict[str, Any]:
        """Carry the case out."""
        torch.manual_seed(self.case.seed + self.mesh.rank)
        try:
            self.start(self.case.plan, self.mesh.rank)
        except MEETING as error:
            return {"refused": type(error).__name__, "message": str(error)}
        self.weights("weights at the start")
        try:
            for number, step in enumerate(self.case.steps):
                self.step(number, step)
                for event in step.after:
                    self.between(event, number + 1)
            self.weights("weights")
        except NonFiniteError as error:
            self.log.append(("not finite", str(error)))
        return {"log": self.log, "wrong": self.wrong, "splits": self.splits}

    def start(self, settings: dict[str, Any], seed: int) -> None:
        """Make the engine; other ranks have other weights, so rank 0's must win."""
        case, plan = self.case, plan_of(settings, self.folder)
        model = fresh(case) if case.meta else build(case.model, seed)
        optimizer = case.optimizer_of(model.parameters()) if case.made else case.optimizer_of
        example = (batch(0, 0, 1, 2), 0)
        loss = by_tokens if case.counted else None
        with patch.object(CompressedStore.__init__, "__defaults__", (SMALLEST,)):
            self.engine = zs.Engine(model, optimizer, plan, mesh=self.mesh, example=example, loss=loss)
        self.splits.append(self.engine.split)
        self.streamed |= plan.streams
        self.taken = 0  # steps of this engine
        self.scheduler = DECAY(self.engine.optimizer) if case.scheduled else None

    def step(self, number: int, step: Step) -> None:
        """One step, with what the formulas say of it."""
        engine, tokens = self.engine, self.part(number, step.count)
        if step.form == "train_step" or engine.plan.pipelined:
            result = engine.train_step((tokens, number))
        else:
            self.regular = False
            result = by_hand(engine, tokens, number, step, self.case.counted)
        tick(self.scheduler)
        self.fed += 1
        self.taken += 1
        self.log.append(("loss", (engine.data_rank, None if result.loss is None else result.loss.item())))
        self.log.append(("norm", result.grad_norm))
        self.log.append(("skipped", result.skipped))
        self.log.append(("scale", result.loss_scale))
        if self.regular:
            self.look(number)

    def look(self, number: int) -> None:
        """Compare the formulas with what was measured."""
        engine = self.engine
        if engine.plan.streams and self.fed <= engine.plan.pipeline.stages:
            return  # versions, states and messages are those of a full pipeline
        for row in engine.memory():
            # Torch makes states in the first update. A stage of a stream skips alone, perhaps all that it was fed.
            unmade = self.case.model == "Spiked" and self.streamed and not row.measured_bytes
            if row.category == "optimizer states" and (unmade or engine.skipped == engine.steps):
                continue
            if row.category == "gradients" and self.case.model in SECOND_ROUND:
                continue
            if row.planned_bytes is not None and row.planned_bytes + row.padding_bytes != row.measured_bytes:
                self.wrong.append(f"{row.category} on the {row.tier} after step {number}: planned {row.planned_bytes} "
                                  f"+ {row.padding_bytes}, measured {row.measured_bytes}")  # fmt: skip
        for moved in engine.traffic():
            if self.exempt(moved.purpose, number):
                continue
            if moved.planned_elements is not None and moved.planned_elements != moved.measured_elements:
                self.wrong.append(f"{moved.purpose} in step {number}: planned {moved.planned_elements}, measured "
                                  f"{moved.measured_elements}")  # fmt: skip

    def exempt(self, purpose: str, number: int) -> bool:
        """Whether the formula of a whole step is not about this step."""
        plan, late = self.engine.plan, self.engine.plan.offloading.optimizer
        if self.case.model == "Sometimes" and number % 3 == 2:
            return True  # a block is left out
        uneven = self.case.counted or self.case.rows // self.engine.data_ranks % plan.microbatches
        if purpose.startswith("send") and uneven:
            return True  # messages are planned for microbatches of one size
        if self.case.model == "Twice" and plan.zero == 3 and purpose in STREAMED:
            return True  # known: its first block has left when it is used again, so it is gathered once more
        if purpose not in (*STREAMED, "gather gradients", "join matrices", "ask for rows"):
            return self.case.model in SECOND_ROUND
        skipped = any(value for word, value in self.log[-4 * (1 + late) :] if word == "skipped")
        # an update more or less is under way
        turns = plan.offloading.delayed_update and number >= plan.offloading.delayed_warmup
        return skipped or (late and (self.taken < 2 or turns)) or self.case.model in SECOND_ROUND

    def between(self, event: str, number: int) -> None:
        """What a user does between two steps."""
        engine = self.engine
        if event == "evaluate":
            with torch.no_grad():
                self.log.append(("evaluation", (engine.data_rank, engine(self.batch(number), number).item())))
        elif event in ("gathered", "write"):
            if engine.plan.pipelined:
                return
            with engine.gathered(), torch.no_grad():
                if event == "write":
                    next(iter(engine.model.parameters())).mul_(0.5)
                values = {name: p.detach().clone() for name, p in engine.model.named_parameters(remove_duplicate=False)}
            if engine.plan.tensor.splits or engine.plan.experts.divides:
                values = engine.state_dict()  # parameters are parts
            self.log.append(("weights", values))
        elif event == "state_dict":
            self.weights("weights")
        elif event == "flush":
            engine.flush()
        elif event == "check_replicas":
            engine.check_replicas()
        else:
            self.resume(event == "resume elsewhere")
        if event not in ("gathered", "write"):
            self.fed = 0

    def resume(self, elsewhere: bool) -> None:
        """Save, and go on with a new engine, of another plan if it can be made here."""
        place, self.saved = f"{self.folder}-checkpoint-{self.saved}", self.saved + 1
        extra = {"scheduler": self.scheduler.state_dict()} if self.scheduler else {}
        extra.get("scheduler", {}).pop("lr_lambdas", None)
        settings, which = self.engine.plan.as_dict(), "same"
        self.engine.save(place, extra, wait=True)
        if elsewhere and message_of(self.case.other) is None:
            with suppress(*MEETING):
                self.start(self.case.other, 1)
                which = "other"
        if which == "same":
            self.start(settings, 1)
        self.log.append(("plan", which))
        extra = self.engine.load(place)
        if self.scheduler is not None:
            self.scheduler.load_state_dict({**extra["scheduler"], "lr_lambdas": [None] * (1 + self.case.groups)})
        self.weights("weights")

    def batch(self, number: int) -> Tensor:
        """This lane's part."""
        return batch(number, self.engine.data_rank, self.engine.data_ranks, self.case.rows)

    def part(self, number: int, backwards: int) -> Tensor:
        """What this lane trains on: with counts, the first has fewer rows than the last, but one for each backward."""
        ranks, rows = self.engine.data_ranks, self.case.rows
        if not self.case.counted or ranks == 1:
            return self.batch(number)
        sizes = [rows // ranks] * ranks
        moved = min(sizes[0] // 2, sizes[0] - max(self.engine.plan.microbatches, backwards))
        sizes[0], sizes[-1] = sizes[0] - moved, rows - sum(sizes[:-1]) + moved
        return batch(number, 0, 1, rows).split(sizes)[self.engine.data_rank]

    def weights(self, word: str) -> None:
        """Enter the whole weights."""
        self.log.append((word, self.engine.state_dict()))


def by_tokens(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """The sum over the tokens that are predicted, and their number."""
    count = 5 * len(batch[0])
    return output.float() * count, count


def by_hand(engine: zs.Engine, tokens: Tensor, number: int, step: Step, counted: bool) -> Any:
    """A loop of the user's own, with something special in it."""
    losses: list[Tensor] = []
    counts: list[int | None] = []
    parts = tokens.tensor_split(step.count)
    divide_penalties(engine.model, 1 if counted else step.count)
    if step.form == "zero_grad":
        engine.backward(engine(parts[0], number), 3 if counted else None)
        [engine.zero_grad, engine.optimizer.zero_grad, engine.model.zero_grad][number % 3]()
    for k, part in enumerate(parts):
        local = step.form == "all no_sync" or (step.form == "no_sync" and k < step.count - 1)
        with engine.no_sync() if local else nullcontext():
            output = engine(part, number)
            loss, count = by_tokens(output, (part,)) if counted else (output / step.count, None)
            losses.append(loss)
            counts.append(count)
            if step.form == "plain backward" and not (engine.plan.scales_loss or counted):
                losses[-1].backward()  # type: ignore[no-untyped-call]
            elif step.form != "forwards first":
                engine.backward(loss, count)
    if step.form == "forwards first":
        for loss, count in zip(losses, counts, strict=True):
            engine.backward(loss, count)
    if step.form == "clip":
        engine.clip_grad_norm(step.limit, step.kind)
    elif step.form == "clip value":
        engine.clip_grad_value(step.limit)
    result = engine.step()
    divide_penalties(engine.model, 1)
    return result if counted else replace(result, loss=torch.stack([loss.detach() for loss in losses]).sum())


def divide_penalties(model: nn.Module, count: int) -> None:
    """Divide the penalties of routers by a number of losses, as a user does who divides those."""
    for module in model.modules():
        if isinstance(module, Router):
            module.gating = replace(module.gating, losses=Losses(z=0.1 / count))


def tick(scheduler: Any) -> None:
    """Step a scheduler, also after a first step that was skipped."""
    if scheduler is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            scheduler.step()


class Plain:
    """The same case in plain PyTorch, on the global batch.

    Args:
        found: the log of a rank, which says what a plain loop cannot know: whether fp16 overflowed, and which plan went
            on.
        start: the weights at the start.
        parts: how many parts of a batch are taken one after the other, which only rounds otherwise.
    """

    def __init__(self, case: Case, found: Log, start: dict[str, Tensor], parts: int = 1) -> None:
        self.case, self.parts = case, parts
        self.model = build(case.model)
        self.model.load_state_dict(start)
        self.optimizer = case.optimizer_of(self.model.parameters())
        self.scheduler = DECAY(self.optimizer) if case.scheduled else None
        self.plan = plan_of(case.plan, ".")
        self.seen = self.copy()  # the weights that a delayed update leaves to a forward
        self.pending = False
        self.told = [value for word, value in found if word in ("skipped", "plan")]
        self.log: Log = [("weights at the start", start)]

    def play(self) -> Log:
        """Carry the case out."""
        for number, step in enumerate(self.case.steps):
            if not self.step(number, step):
                return self.log
            for event in step.after:
                self.between(event, number + 1)
        self.weights()
        return self.log

    def step(self, number: int, step: Step) -> bool:
        """One step; whether the run goes on."""
        plan, parameters = self.plan, [p for p in self.model.parameters() if p.requires_grad]
        latest = self.copy()
        self.model.load_state_dict(self.seen)
        self.optimizer.zero_grad()
        loss = torch.zeros(())
        for part in batch(number, 0, 1, self.case.rows).chunk(self.parts):
            share = self.model(part, number) / self.parts
            with Within(penalty_weight=1 / self.parts):
                share.backward()
            loss += share.detach()
        self.model.load_state_dict(latest)
        if self.pending:
            self.seen = latest
        if step.form == "clip value" and not plan.pipelined:
            nn.utils.clip_grad_value_(parameters, step.limit)
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).item()
        sound = math.isfinite(norm)
        scaled = plan.scales_loss
        if not sound and not scaled and plan.nonfinite == "raise":
            self.log.append(("not finite", ""))
            return False
        skip = not sound and (scaled or plan.nonfinite == "skip")
        told = self.told.pop(0) if self.told else skip
        skip = told if scaled and sound else skip
        if step.form == "clip" and not plan.pipelined:
            nn.utils.clip_grad_norm_(parameters, step.limit, step.kind)
        elif plan.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, plan.clip_norm)
        if not skip:
            self.optimizer.step()
        self.pending = plan.offloading.delayed_update and not skip and number >= plan.offloading.delayed_warmup
        if not self.pending:
            self.seen = self.copy()
        tick(self.scheduler)
        shown = math.inf if skip and sound else norm  # of an overflow in fp16, which the run has told
        self.log += [("loss", loss.item()), ("norm", shown), ("skipped", skip), ("scale", None)]
        return True

    def between(self, event: str, number: int) -> None:
        """What a user does between two steps."""
        self.pending, self.seen = False, self.copy()  # all of these wait for what is in flight
        if event == "evaluate":
            with torch.no_grad():
                self.log.append(("evaluation", self.model(batch(number, 0, 1, self.case.rows), number).item()))
        elif event in ("gathered", "write"):
            if self.plan.pipelined:
                return
            with torch.no_grad():
                if event == "write":
                    next(iter(self.model.parameters())).mul_(0.5)
            self.weights()
            self.seen = self.copy()
        elif event == "state_dict":
            self.weights()
        elif event.startswith("resume"):
            if self.told.pop(0) == "other":
                self.plan = plan_of(self.case.other, ".")
            self.log.append(("plan", None))
            self.weights()

    def copy(self) -> dict[str, Tensor]:
        """The latest weights."""
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def weights(self) -> None:
        """Enter the whole weights."""
        self.log.append(("weights", self.copy()))
