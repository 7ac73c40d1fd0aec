"""The comparison of the ranks' records with the plain loop, step by step, up to the first difference.

Each step begins from weights that were compared before. Its forward, loss, gradients and norm are compared with those
of the plain loop; then the plain loop's optimizer takes its step with the gradients that the engine had, so that the
update is compared from equal gradients: Adam divides a gradient by its own size, and would make a whole step of
rounding where a gradient is nothing else.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zeroshard.checkpoint.boxes import Box, one_by_one
from zeroshard.verification.job import FLOOR, VerificationJob
from zeroshard.verification.observe import RankRecord, SeenShare
from zeroshard.verification.plain import Plain, PlainStep
from zeroshard.verification.result import Compared
from zeroshard.verification.sketch import Sketch, distance
from zeroshard.verification.watch import ModuleCall, Place

Worst = tuple[float, str]  # relative error, and the name of its tensor
SUMMED = 1e-3  # tolerance of a sum of tensors
NAMES = (
    *("whole batch", "initial weights", "module outputs", "losses", "gradients", "gradient norm", "updates"),
    *("buffers", "copies"),
)


class ErrorTable:
    """The largest relative error of each kind of comparison.

    Attributes:
        tolerance: the relative error up to which values count as equal.
        others: different tolerances of some kinds.
    """

    def __init__(self, tolerance: float, others: dict[str, float]) -> None:
        self.tolerance, self.others = tolerance, others
        self._rows: dict[str, tuple[int, Worst]] = {}

    def enter(self, what: str, where: str, error: float) -> bool:
        """Record a comparison; returns whether the values count as equal."""
        count, worst = self._rows.get(what, (0, (0.0, "")))
        self._rows[what] = count + 1, max(worst, (error, where))
        return error <= self.of(what)

    def of(self, what: str) -> float:
        """The tolerance of a kind."""
        return self.others.get(what, self.tolerance)

    def rows(self) -> tuple[Compared, ...]:
        """The lines, in the order of a step."""
        found = sorted(self._rows.items(), key=lambda item: NAMES.index(item[0]))
        return tuple(Compared(what, count, *worst, self.of(what)) for what, (count, worst) in found)


@dataclass(frozen=True, slots=True)
class SeenCalls:
    """One call of a module on the ranks with the same data.

    Attributes:
        rank: the first of them.
        calls: of each; only of the first if every rank computes the whole output.
    """

    rank: int
    calls: list[ModuleCall]

    def error(self, of: Callable[[ModuleCall], Sketch | None], wanted: Sketch, factor: float = 1.0) -> float:
        """The largest relative error of a tensor of the call, whose sketch `of` takes out; infinite for another size.

        Shards on the ranks are compared by their joint norm. A tensor on more ranks than it has shards, such as
        keys of few heads, is not compared.
        """
        sketches = [found for call in self.calls if (found := of(call)) is not None]
        whole = [found for found in sketches if found[0] == wanted[0]]
        if len(self.calls) == 1 or len(whole) == len(sketches):
            return max((distance(found, wanted, factor) for found in sketches), default=0.0)
        if whole or sum(found[0] for found in sketches) != wanted[0]:
            return 0.0
        size, norm = abs(factor) * wanted[1], math.hypot(*(found[1] for found in sketches))
        if math.isnan(norm):
            return 0.0 if math.isnan(size) else math.inf
        return abs(norm - size) / size if size else (math.inf if norm else 0.0)

    def sums_to(self, of: Callable[[ModuleCall], Sketch | None], wanted: Sketch, factor: float = 1.0) -> bool:
        """Whether the tensors of the ranks, each as large as the expected one, add up to it."""
        sketches = [found for call in self.calls if (found := of(call)) is not None]
        if len(sketches) < 2 or any(found[0] != wanted[0] for found in sketches):
            return False
        total = (*wanted[:2], *map(sum, zip(*(found[2:] for found in sketches), strict=True)))
        return distance(total, wanted, factor) <= SUMMED


class Side:
    """The records of all ranks, as one run."""

    def __init__(self, job: VerificationJob, records: Sequence[RankRecord]) -> None:
        self.job, self.records = job, records

    def loss(self, step: int) -> float:
        """The mean over the data ranks."""
        known = {r.data_rank: loss for r in self.records if (loss := r.steps[step].loss) is not None}
        return sum(known.values()) / len(known) if known else math.nan

    def losses(self, step: int) -> dict[int, float]:
        """By part."""
        return {part: value for record in self.records for part, value in record.steps[step].losses.items()}

    def calls(self, step: int) -> dict[int, dict[Place, SeenCalls]]:
        """The calls of all stages by part: of the first rank that ran a module, or of each rank with a shard of it."""
        found: dict[int, dict[Place, SeenCalls]] = {}
        for record in self.records:
            for part, calls in record.steps[step].calls.items():
                for place, call in calls.items():
                    same = found.setdefault(part, {}).setdefault(place, SeenCalls(record.rank, []))
                    if not same.calls or self.job.together > 1:
                        same.calls.append(call)
        return found

    def ranks_of(self, path: str) -> set[int]:
        """The ranks that ran a module in the first step."""
        return {
            record.rank
            for record in self.records
            if any(place[0] == path for calls in record.steps[0].calls.values() for place in calls)
        }

    def shares(self, step: int) -> Iterator[tuple[int, SeenShare]]:
        """Every rank's shares of the gradients."""
        for record in self.records:
            yield from ((record.rank, share) for share in record.steps[step].shares)

    def gradients(self, step: int, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole gradients, from the counted shares; NaN for elements of no rank."""
        found = {name: torch.full(tuple(p.shape), math.nan, dtype=p.dtype) for name, p in like.items()}
        for _, share in self.shares(step):
            if share.counted and share.name in found:
                whole = found[share.name]
                for box, values in one_by_one(share.boxes, torch.from_numpy(share.values)):
                    whole[box.slices(Box.whole(tuple(whole.shape)))] = values.to(whole.dtype)
        return found

    def weights(self, step: int) -> dict[str, Tensor]:
        """Weights after a step; before the first with -1."""
        record = self.records[0]
        return tensors(record.start if step < 0 else record.steps[step].weights)

    def sketches(self, step: int) -> list[dict[str, Sketch]]:
        """Of the weights after a step on each rank."""
        return [r.start_sketches if step < 0 else r.steps[step].sketches for r in self.records]


def tensors(arrays: Mapping[str, "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"]) -> dict[str, Tensor]:
    """Tensors over the memory of arrays."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def relative(found: Tensor, wanted: Tensor, least: float = 0.0) -> float:
    """The norm of the difference, relative to the expected tensor's norm or to `least`, the larger one."""
    apart, size = float((found.double() - wanted.double()).norm()), float(wanted.double().norm())
    if math.isnan(apart):
        return 0.0 if torch.equal(found.isnan(), wanted.isnan()) else math.inf
    size = max(size, least)
    return apart / size if size else (math.inf if apart else 0.0)


def compare_forward(table: ErrorTable, side: Side, wanted: PlainStep, step: int) -> list[tuple[int, Place, float]]:
    """(part, call, error) of the calls whose outputs differ, in the order in which calls end in the plain loop."""
    found, seen = [], side.calls(step)
    for part, calls in wanted.calls.items():
        for place, call in calls.items():
            mine = seen.get(part, {}).get(place)
            # a container returns fewer tensors on a stage that has some of its modules, such as keys and values
            if mine is not None and len(mine.calls[0].outputs) == len(call.outputs):
                errors = (mine.error(nth("outputs", n), theirs) for n, theirs in enumerate(call.outputs))
                error = max(errors, default=0.0)
                if not table.enter("module outputs", place[0] or "the model", error):
                    found.append((part, place, error))
    return found


def nth(kind: str, number: int) -> Callable[[ModuleCall], Sketch | None]:
    """A getter of the sketch of a call's input or output; it returns None if there are fewer."""
    return lambda call: next(iter(getattr(call, kind)[number : number + 1]), None)


def gradient_of(number: int) -> Callable[[ModuleCall], Sketch | None]:
    """A getter of the sketch of the gradient of a call's output."""
    return lambda call: call.gradients.get(number)


def compare_losses(
    table: ErrorTable, side: Side, wanted: PlainStep, step: int
) -> tuple[list[tuple[int, float]], float]:
    """(part, error) of the parts whose losses differ; and the error of the whole loss, 0 if it is close."""
    parts = []
    for part, loss in sorted(side.losses(step).items()):
        theirs = wanted.losses[part][0]
        error = abs(loss - theirs) / max(abs(theirs), 1e-12)
        if not table.enter("losses", f"part {part}", error):
            parts.append((part, error))
    error = abs(side.loss(step) - wanted.loss) / max(abs(wanted.loss), 1e-12)
    error = math.inf if math.isnan(error) != math.isnan(wanted.loss) else error
    return parts, 0.0 if table.enter("losses", "whole", error) else error


def compare_gradients(table: ErrorTable, side: Side, wanted: PlainStep, step: int) -> dict[str, float]:
    """The errors of the parameters whose gradients differ, on any rank that has a share."""
    everything = math.sqrt(sum(g.numel() for g in wanted.gradients.values() if g is not None)) or 1.0
    typical = FLOOR * wanted.norm / everything  # root mean square of all elements, times the floor
    found: dict[str, float] = {}
    covered: dict[str, int] = {}
    for _, share in side.shares(step):
        gradient, values = wanted.gradients.get(share.name), torch.from_numpy(share.values)
        if share.name not in wanted.gradients:
            continue
        whole = torch.zeros(1) if gradient is None else gradient
        theirs = torch.zeros(values.numel()) if gradient is None else share.same_of(gradient)
        usual = float(whole.double().norm()) / math.sqrt(max(1, whole.numel()))  # of an element
        size = max(typical, usual) * math.sqrt(values.numel())
        error = relative(values, theirs, size)
        covered[share.name] = covered.get(share.name, 0) + values.numel() * share.counted
        if not table.enter("gradients", share.name, error):
            found[share.name] = max(found.get(share.name, 0.0), error)
    for name, gradient in wanted.gradients.items():
        if gradient is not None and covered.get(name, 0) != gradient.numel():
            table.enter("gradients", name, math.inf)
            found[name] = math.inf
    return found


def compare_updates(
    table: ErrorTable, side: Side, plain: Plain, before: Mapping[str, Tensor], step: int
) -> tuple[dict[str, float], dict[str, float]]:
    """The errors of the parameters whose updates differ, and of the buffers that do.

    Args:
        before: the plain loop's weights before the step.
    """
    state, after = side.weights(step), plain.weights()
    updates, buffers = {}, {}
    for name, values in after.items():
        change = values - before[name]
        least = side.job.eps * float(values.double().norm()) / side.job.tolerance  # rounding of sums
        error = relative(state[name].view(values.shape) - before[name], change, 4 * least)
        if not table.enter("updates", name, error):
            updates[name] = error
    for name, values in plain.buffers(side.records[0].data_rank).items():
        if name in state and values.is_floating_point():
            error = relative(state[name].view(values.shape), values)
            if not table.enter("buffers", name, error):
                buffers[name] = error
    return updates, buffers


def compare_copies(table: ErrorTable, side: Side, plain: Plain, step: int) -> list[tuple[int, str, float]]:
    """(rank, parameter, error) of the ranks whose weights are not those of rank 0."""
    everyone, found = side.sketches(step), []
    for name in plain.weights():
        for record, sketches in zip(side.records, everyone, strict=True):
            error = distance(sketches[name], everyone[0][name])
            if not table.enter("copies", f"{name} on rank {record.rank}", error):
                found.append((record.rank, name, error))
    return found
