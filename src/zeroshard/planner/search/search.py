"""The search: all splits of a job over the machines, pruned by exact states, the rest rehearsed.

For each number of ranks in a layer and of stages, ZeRO stage and schedule, the rows of a microbatch are found by
bisection: memory rises with them. A plan whose states alone exceed a device is refused without a rehearsal. The search
is deterministic.

[Note: variants] Variants of a plan, such as other numbers of ranks that share out experts, send, update or keep less
for some messages more. They are looked at after the plan itself, each with microbatches of its own, as long as each is
faster than the one before, or none has fitted yet; where the plan fits, only if they could give the fastest plan by the
best gain so far. Estimates, which are of plans without them, are compared with those alone where any fits.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from zeroshard.doctor.cpu_load import busy_cpus
from zeroshard.doctor.hardware import Machines
from zeroshard.errors import PlanError, ZeroshardError
from zeroshard.offload import choice as offload
from zeroshard.pipeline import choice as pipeline
from zeroshard.pipeline.partition.profile import LayerCost
from zeroshard.plan import Plan
from zeroshard.planner.choices import choices_of
from zeroshard.planner.predict.cuts import Layers, layers_of
from zeroshard.planner.predict.estimate import Estimator
from zeroshard.planner.predict.predict import predict, predict_timed, way_of
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.planner.predict.result import MARGIN, Found, Prediction, Refusal
from zeroshard.planner.predict.states import sizes_of, states_of
from zeroshard.planner.search import ahead
from zeroshard.planner.search.adapted import trained_as, with_adapters, with_optimizer
from zeroshard.planner.search.exclusions import Exclusions
from zeroshard.planner.search.expectations import (
    Expectation,
    Shape,
    are_many,
    expectation_of,
    in_turn,
    is_hopeless,
    unsplit,
)
from zeroshard.planner.search.nearest import nearest_ways
from zeroshard.planner.search.order import answered, rank, with_whole_first
from zeroshard.planner.search.progress import MOST_DEEP, Looks, SearchProgress
from zeroshard.planner.search.text import lacking, short
from zeroshard.planning.adapters import NAMES, Adapters
from zeroshard.planning.offers import Divided, Offer, Refused, Site
from zeroshard.tensor import choice as tensor
from zeroshard.zero import choice as zero

OFFERS: tuple[Callable[[Site], Iterator[Offer | Refused]], ...] = (zero.offers, pipeline.offers)
LAST_RESORTS: tuple[Callable[[Site], Iterator[Offer]], ...] = (offload.offers,)
MOST_TIMED = 8  # plans that are timed on this machine, the best by the rates of its profile
ENOUGH = 2  # plans that fit, from which on no others are tried that are slower or change results
Say = Callable[[str], None]
Key = tuple[Plan, int]


def search(
    task: TrainingTask,
    machines: Machines,
    base: Plan | None = None,
    top: int = 5,
    plans: Iterable[tuple[Plan, int]] | None = None,
    say: Say = lambda text: None,
    last_resorts: bool = False,
    first: Callable[[Found], None] = lambda found: None,
) -> Found:
    """The plans that fit, the fastest first, and the refused ones, each with the way out.

    Where none fits, offload is tried in the order of its offers: of the optimizer's states, of few parameters first and
    then of more, then of the parameters too, then of activations, then to a disk, each with its variants after it;
    then plans with which training gets other numbers, and where none of these fits, adapters beside a frozen model.
    `ENOUGH` plans that fit end it, unless each spends most of its step waiting for a disk.

    Args:
        base: settings of all plans (precision, clipping and the like); ranks that split layers where it has several,
            otherwise every number of them is tried.
        top: number of plans to keep.
        plans: plans and rows per data rank to look at, instead of all.
        say: called with a line about each plan.
        last_resorts: whether to try them even where other plans fit.
        first: called with the first estimates, before any plan is rehearsed; not called without estimates. Called
            again with the first plan that fits, while others are tried.
    """
    began = time.perf_counter()
    run = _Search(task, machines, base or Plan(), say, first)
    if plans is None:
        shapes = list(run.shapes())
        found = run.estimates(shapes, last_resorts)
        if found:
            first(Found(tuple(found[:top]), (), len(found), time.perf_counter() - began))
        run.try_shapes(shapes)
        if last_resorts or not run.fitting:
            run.wanted = len(run.fitting) + ENOUGH
            run.try_last_resorts(exact=True)
            if not answered(run.fitting):
                run.wanted = len(run.fitting) + ENOUGH
            for name in task.others or ():
                run.try_other(with_optimizer(task, name))
            if task.others is not None:
                run.try_last_resorts(exact=False)
                run.try_adapters()
    else:
        for plan, rows in plans:
            run._keep(run._rehearse(plan, rows))
    order = sorted(run.fitting, key=rank)
    if machines.local:
        with busy_cpus(min(machines.count, os.cpu_count() or 1) - 1):
            timed = [run.timed(prediction) for prediction in order[:MOST_TIMED]]
        order = [*sorted(timed, key=lambda p: (p.time_mode == "roofline", p.seconds)), *order[MOST_TIMED:]]
    order = with_whole_first(order, run.whole)
    best, others = tuple(order[:top]), tuple(order[top:])
    whole = best and best[0].adapters == task.adapters
    ways = () if whole or plans is not None else run.ways()
    spent, left_out = time.perf_counter() - began, run.progress.left_out
    return Found(best, tuple(run.refused), run.looked_at, spent, ways, others, left_out=left_out)


@dataclass
class _Search:
    """One search under way."""

    task: TrainingTask
    machines: Machines
    base: Plan
    say: Say
    first: Callable[[Found], None] = lambda found: None
    fitting: list[Prediction] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    looked_at: int = 0
    wanted: int = ENOUGH  # plans that fit
    progress: SearchProgress = field(default_factory=SearchProgress)
    _seen: dict[Key, Prediction] = field(default_factory=dict)
    _layers: Layers | str | None = None
    _likely: dict[Plan, list[int]] = field(default_factory=dict)
    _expected: dict[Plan, Expectation] = field(default_factory=dict)
    _made: dict[int, Estimator | Refusal] = field(default_factory=dict)  # by the ranks that split layers
    _gain: float = 0.0  # least seconds of a variant relative to its plan; 0 before any is faster

    @property
    def _site(self) -> Site:
        return Site(self.machines.count, self.machines.per_node, self.task.rows, self._blocks)

    def shapes(self) -> Iterator[Shape]:
        """Every split of the job over the ranks; without split layers and without stages first."""
        for number, divided in enumerate(self._divisions):
            for offer in (offer for offers in OFFERS for offer in offers(divided.site)):
                if isinstance(offer, Offer):
                    yield self._shape(offer, divided)
                elif not number:  # else refused for the same reason
                    self._refuse(self.base.with_settings(offer.settings), 0, offer.why, offer.way_out)

    @property
    def _divisions(self) -> list[Divided]:
        """The ways to divide a node's ranks, one rank in a layer first; the one that is asked for.

        Raises:
            PlanError: the ranks that are asked for do not divide them.
        """
        asked, found = self.base.tensor.ranks, list(tensor.divisions(self._site))
        chosen = [divided for divided in found if divided.together == asked or asked == 1]
        if not chosen:
            raise PlanError(
                f"tensor_parallel is {asked}, and a layer is split among ranks of one node, of which there are "
                f"{min(self.machines.per_node, self.machines.count)}; set it to one of "
                f"{', '.join(str(divided.together) for divided in found)}."
            )
        return chosen

    def _shape(self, offer: Offer, divided: Divided) -> Shape:
        if self.task.loss_chunk is not None and self.base.loss_chunk is None:
            offer = replace(offer, leaner={**offer.leaner, "loss_chunk": self.task.loss_chunk})
        plan = self.base.with_settings({**offer.settings, **divided.settings})
        return Shape(plan, self.task.rows // offer.data_ranks, offer, divided.together)

    def try_shapes(self, shapes: Sequence[Shape]) -> None:
        """Look at all shapes but those that are left out ([Note: plans that are left out])."""

        def attempt(shape: Shape) -> float:
            self.progress.begin(shape.plan)
            return self.try_with_variants(shape, are_many(shapes))

        best = in_turn(shapes, self._expected, attempt, self.progress.drop, self.progress.doubt)
        if best is not None and are_many(shapes):
            self.progress.begin(None)
            self._try_faster(best)
        self.refused += [one for one in self._made.values() if isinstance(one, Refusal)]

    def try_with_variants(self, shape: Shape, many: bool = False) -> float:
        """Look at a shape and its variants ([Note: variants]); returns the seconds without them, if that fits."""
        plain = best = self._best_of(shape, many)
        if plain is not None and plain.seconds * self._gain > self._fastest:
            return plain.seconds
        for plan in self._variants(shape.plan):
            found = self._best_of(self._varied(shape, plan, plain), many)
            if best is not None and (found is None or found.seconds >= best.seconds):
                break
            best = found or best
            if best is not None and self._fastest >= best.seconds <= (ahead.busy(plain) if plain else math.inf):
                self.progress.drop(None)  # schedules are tried without variants
            if plain is not None and found is not None:
                self._gain = min(self._gain or 1.0, found.seconds / plain.seconds)
        chosen = plain or best
        return math.inf if chosen is None else chosen.seconds

    def _varied(self, shape: Shape, plan: Plan, plain: Prediction | None) -> Shape:
        """A variant of a shape, with the leaner settings and the microbatches of the plan that fits without it."""
        varied = replace(shape, plan=plan)
        if plain is not None:
            count = plain.plan.microbatches
            varied = varied.lean if unsplit(plain.plan) == self._with(shape.leaner, count) else varied
            self._likely[varied.plan] = [count]
        return varied

    def _best_of(self, shape: Shape, many: bool = False) -> Prediction | None:
        """Look at a shape; returns the fastest plan of it that fits."""
        before = len(self.fitting)
        self.try_shape(shape, many)
        return min(self.fitting[before:], key=lambda one: one.seconds, default=None)

    def _variants(self, plan: Plan) -> list[Plan]:
        """The plan's variants from its techniques."""
        ranks = self.machines.count
        try:
            states = states_of(self._excluding.sizes, plan, ranks)
        except ZeroshardError:  # no plan works, and the search reports why
            return []
        every = (each for choice in choices_of(plan).varied for each in choice.variants(states, ranks))
        return list(map(plan.with_settings, every))

    @property
    def _fastest(self) -> float:
        return min((prediction.seconds for prediction in self.fitting), default=math.inf)

    def try_last_resorts(self, exact: bool) -> None:
        """Try the last resorts in their order, each with its variants, until enough plans fit.

        Args:
            exact: try those that change no result, or only the others.
        """
        shapes = self._resorts(exact)
        looks = ahead.of_resorts(shapes, self._excluding, self._depth > MOST_DEEP)
        self.progress.also(looks)
        for shape in shapes:
            if (missing := self.wanted - len(self.fitting)) > 0:
                self.progress.doubt(looks.keys() - ahead.enough(looks, self._excluding, missing))
                self.progress.begin(shape.plan)
                looks.pop(shape.plan, None)
                self.try_with_variants(shape)

    def _resorts(self, exact: bool) -> list[Shape]:
        """The last resorts that change no result, or only the others."""
        divided = self._divisions[0]
        shapes = [self._shape(offer, divided) for offers in LAST_RESORTS for offer in offers(divided.site)]
        return [one for one in shapes if any(choice.changes for choice in choices_of(one.plan)) != exact]

    def try_other(self, task: TrainingTask, resorts: bool = False) -> None:
        """Try plans for a task with other results, without offload or with `resorts`, until enough plans fit."""
        first = (lambda found: None) if self.fitting else self.first
        run = _Search(task, self.machines, self.base, self.say, first, wanted=self.wanted - len(self.fitting))
        run.progress = self.progress
        divided = self._divisions[0]
        for offer in () if resorts else zero.offers(divided.site):
            if isinstance(offer, Offer) and len(run.fitting) < run.wanted:
                run.try_shape(run._shape(offer, divided))
        if resorts:
            run.try_last_resorts(exact=True)
        self.looked_at += run.looked_at
        self.fitting += run.fitting

    def try_adapters(self) -> None:
        """Where there is no answer, try to train adapters: beside the model, one in 4 bits, and one in host memory."""
        if answered(self.fitting):
            return
        tasks = [with_adapters(self.task, Adapters(name)) for name in NAMES]
        with suppress(ZeroshardError):  # for a model without layers that take them
            for task in tasks:
                self.try_other(task)
            if not answered(self.fitting):
                self.try_other(tasks[0], resorts=True)

    def estimates(self, shapes: Sequence[Shape], resorts: bool = False) -> list[Prediction]:
        """The first estimate of each shape that is expected to fit, the fastest first; the search starts from them.

        Args:
            resorts: whether last resorts are tried even where other plans fit.
        """
        chosen: list[Prediction] = []
        looks: dict[Plan | None, Looks] = {}
        room = (1 - MARGIN) * self.machines.device.capacity_bytes
        hopeful = [shape for shape in shapes if self._least_bytes(shape.plan) <= room]
        estimators = self._estimators(dict.fromkeys(shape.together for shape in hopeful))
        for shape in (shape for shape in shapes if shape.together in estimators):
            variants = self._variants(shape.plan)
            found = expectation_of(shape, variants, estimators[shape.together])
            chosen += found.near[:1]
            self._likely |= found.likely
            if shape.offer.counts:
                self._expected[shape.plan] = found
            varied = [one for one in variants if self._least_bytes(one) <= room]
            looks[shape.plan] = ahead.of_shape(shape, varied, found, shape in hopeful)
        planned, best = ahead.of_all(shapes, self._expected, looks, self._site)
        likely = best or any(ahead.is_likely(plan, self._excluding) for plan in planned if plan)
        if resorts or not likely:
            every = self._resorts(exact=True) + (self._resorts(exact=False) if self.task.others is not None else [])
            planned |= ahead.likely_resorts(every, self._excluding, ENOUGH, self._depth > MOST_DEEP)
        self.progress = SearchProgress(planned, self._depth, best=best, spent=self.progress.spent)
        return sorted(chosen, key=lambda one: (one.seconds, one.peak_bytes))

    def _estimators(self, sizes: Iterable[int]) -> dict[int, Estimator]:
        """Estimates for each number of ranks that split layers, but for those that the engine refuses."""
        found: dict[int, Estimator] = {}
        for together in sorted(sizes)[:1] + sorted(sizes)[:0:-1]:
            if len(found) > 1:
                least, most, *_ = found.values()
                found[together] = self._made[together] = least.between(most, together)
                continue
            self.say(f"{'one rank' if together == 1 else f'{together} ranks that split layers'}, for first estimates")
            try:
                like, began = next(iter(found.values()), None), self.progress.now()
                made = Estimator.of(self.task, self.base, self.machines, self._excluding.sizes, together, like)
                self.progress.took(made.one.plan, self.progress.now() - began, first=like is None)
                found[together] = self._made[together] = replace(made, layers=self._costs())
            except ZeroshardError as error:
                if together == 1:  # the search reports it, plan by plan
                    return {}
                self._made[together] = Refusal(
                    self.base.with_settings({"tensor_parallel": together}), 0, str(error), ""
                )
        return found

    def _least_bytes(self, plan: Plan) -> int:
        """The least bytes of its states on a device; 0 where they are not known, and the search reports why."""
        try:
            return self._excluding.least_bytes(plan)
        except ZeroshardError:
            return 0

    def try_shape(self, shape: Shape, many: bool = False) -> None:
        """Find the microbatches of a shape, then faster settings; where none fit, try the leaner ones of its offer.

        Args:
            many: whether shapes that are far too large are tried with leaner settings alone, and faster settings later.
        """
        offer, plan, lean = shape.offer, shape.plan, shape.lean
        if not offer.counts:
            self._refuse(plan, shape.rows, *offer.without_counts)
            return
        leaner, known = lean.plan, self._expected.get(plan)
        made, counts = self._made.get(shape.together), offer.counts
        with suppress(ZeroshardError):  # else no plan works, and the search reports why
            counts = self._excluding.possible(plan, counts)
        fewer = len(counts) < len(offer.counts)
        far = fewer and all(is_hopeless(made, self._with(plan, m), shape.rows) for m in counts)
        if leaner != plan and (far or (many and known is not None and known.far)):
            self.try_shape(lean, many)
            return
        likely = [m for m in self._likely.get(plan, []) if m in counts]

        def rehearsed(count: int) -> Prediction | None:
            wanted = self._with(plan, count)
            alone = count == 1 < len(counts)  # without a sum of gradients, and with far more besides
            return None if alone and is_hopeless(made, wanted, shape.rows) else self._rehearse(wanted, shape.rows)

        found = offer.order.find(rehearsed, counts, likely)
        if found is not None and not found.fits and leaner != plan:
            self.try_shape(lean, many)
        if self._keep(found) and not many:
            self._try_faster(shape)

    def _try_faster(self, shape: Shape) -> None:
        """Try faster settings, such as other schedules, for the fastest plan of a shape that fits."""
        kinds = shape.plan, shape.leaner
        own = (p for p in self.fitting if unsplit(p.plan) in [self._with(k, p.plan.microbatches) for k in kinds])
        found = min(own, key=lambda p: p.seconds, default=None)
        if found is None or ahead.busy(found) >= self._fastest:
            return
        m = found.plan.microbatches
        for other in shape.offer.faster(m, self._site):
            again = self._rehearse(unsplit(found.plan).with_settings({**other, "microbatches": m}), shape.rows)
            if again is not None and again.fits:
                self._keep(again)

    def _keep(self, found: Prediction | None) -> bool:
        """Keep a plan that fits, and refuse one that does not."""
        if found is not None and not found.fits:
            self._refuse(found.plan, found.batch, *lacking(found), found)
        elif found is not None:
            self.fitting.append(found)
            self.progress.best = min(self.fitting, key=rank).plan
            if len(self.fitting) == 1:
                self.first(Found((found,), (), self.looked_at, 0.0))
        return found is not None and found.fits

    def ways(self) -> tuple[str, ...]:
        """The nearest ways to train the job; none for a task that no plan can train."""
        try:
            sizes, seen = self._excluding.sizes, [*self._seen.values()]
            return tuple(nearest_ways(self.task, self.base, self.machines, sizes, seen, self.refused))
        except ZeroshardError:
            return ()

    def timed(self, prediction: Prediction) -> Prediction:
        """The prediction with a time measured on few blocks, if this machine can hold them."""
        self.say(f"timing {short(prediction.plan, self.machines.count)}")
        try:
            found = predict_timed(trained_as(self.task, prediction), prediction.plan, self.machines, prediction.batch)
        except ZeroshardError:
            return prediction
        return replace(prediction, causes=found.causes, time_mode=found.time_mode)

    def whole(self, prediction: Prediction) -> Prediction:
        """The prediction from a rehearsal of every stage, and of every block unless too many; refused if too large."""
        plan, is_whole = prediction.plan, prediction.events and not prediction.spans  # of stages, of which some are
        if is_whole or way_of(plan).whole(plan, self._depth) > MOST_DEEP:
            return prediction
        self.say("the best once more, whole")
        found = predict(trained_as(self.task, prediction), plan, self.machines, prediction.batch, deep=True)
        if not found.fits:
            self._keep(found)
        if prediction.time_mode == found.time_mode:
            return found
        return replace(found, causes=prediction.causes, time_mode=prediction.time_mode)

    def _with(self, plan: Plan, count: int) -> Plan:
        return replace(plan, microbatches=count)

    def _rehearse(self, plan: Plan, rows: int) -> Prediction | None:
        """Rehearse a plan, unless its states alone are too much or the engine refuses it."""
        key = (plan, rows)
        if key in self._seen:
            return self._seen[key]
        self.looked_at += 1
        try:
            if (excluded := self._excluding.why(plan)) is not None:
                self._refuse(plan, rows, *excluded)
                return None
            if (known := self._without_room(plan, rows)) is not None:
                return self._seen.setdefault(key, known)
            each = max(1, rows // plan.microbatches)
            for choice in choices_of(plan):
                plan = plan.with_settings(choice.filled(lambda chunks: self._layers_of(each).split(chunks)))
            self.say(f"{self.progress.look(plan)}{short(plan, self.machines.count)}, {rows} rows per data rank")
            self._seen[key] = predict(self.task, plan, self.machines, rows)
            self.progress.spare(lambda other: self._excluding.crowded(other, rows, self._seen) is not None)
        except ZeroshardError as error:
            self._refuse(plan, rows, str(error), "")
            return None
        return self._seen[key]

    @cached_property
    def _excluding(self) -> Exclusions:
        return Exclusions(sizes_of(self.task, self.base.ignored), self.machines, self.base)

    def _without_room(self, plan: Plan, rows: int) -> Prediction | None:
        """The least that a plan needs, if that exceeds a device by `Exclusions`' notes."""
        crowded = self._excluding.crowded(plan, rows, self._seen)
        leaner = {name: value for choice in choices_of(plan) for name, value in choice.leaner_first.items()}
        first = leaner and self._depth > MOST_DEEP and not crowded
        known = self._rehearse(plan.with_settings(leaner), rows) if first else None
        bound = crowded if known is None else self._excluding.at_least(plan, known)
        return bound if bound is not None and "device" in bound.full else None

    def _refuse(self, plan: Plan, rows: int, why: str, way_out: str, prediction: Prediction | None = None) -> None:
        self.refused.append(Refusal(plan, rows, why, way_out, prediction))

    def _blocks(self) -> int:
        """Blocks of the model.

        Raises:
            PlanError: the model is no chain.
        """
        return len(self._layers_of(1).names)

    @property
    def _depth(self) -> int:
        return sum(stack.depth for stack in self.task.facts.stacks)

    def _costs(self) -> Sequence[LayerCost] | None:
        """The costs of the model's layers, on several devices; None for a model that is no chain."""
        with suppress(PlanError):
            return self._layers_of(1).costs if self.machines.count > 1 else None
        return None

    def _layers_of(self, rows: int) -> Layers:
        """The layers of the model, rehearsed once; relative times hardly depend on the rows."""
        if self._layers is None:
            try:
                self._layers = layers_of(self.task, self.machines, rows)
            except ZeroshardError as error:
                self._layers = str(error)
        if isinstance(self._layers, str):
            raise PlanError(self._layers)
        return self._layers
