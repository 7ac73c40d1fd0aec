"""Causes of a difference: the contribution, slice, version or dtype that explains it, and the collective responsible.

A gradient is a sum of contributions, one of each microbatch of each data rank. The coefficients with which the engine
has added them are found by least squares: 0 for one that is missing, another number than 1 for a wrong divisor.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.checkpoint.boxes import Box
from zeroshard.traffic import Purpose
from zeroshard.verification.compare import SUMMED, Side, relative
from zeroshard.verification.job import VerificationJob, name_parts
from zeroshard.verification.observe import SeenShare
from zeroshard.verification.plain import Plain
from zeroshard.verification.sketch import Sketch, distance

CLOSE = 0.02  # tolerance of a coefficient
EXPLAINED = 0.02  # largest unexplained share of a gradient's norm


@dataclass(frozen=True, slots=True)
class Cause:
    """An explanation in one sentence, the collective that is responsible, and the module where that is another."""

    text: str
    collective: str | None = None
    module: str | None = None


def of_gradient(side: Side, plain: Plain, step: int, name: str) -> Cause | None:
    """The cause of a gradient's difference; None if neither contributions, slices nor a dtype explain it."""
    job, wanted = side.job, plain.trained[name]
    found = side.gradients(step, plain.trained)[name]
    shares = [(rank, share) for rank, share in side.shares(step) if share.name == name]
    reduction = f"{Purpose.REDUCE_GRADIENTS} of {shares[0][1].flat}" if shares and job.data_ranks > 1 else None
    if not shares or bool(found.isnan().any() and not wanted.isnan().any()):
        return Cause("parts of the gradient are on no rank", reduction)
    pieces = plain.contributions(step, name)
    coefficients, rest = fitted(found, pieces)
    if coefficients is not None and rest <= EXPLAINED:
        cause = _of_coefficients(job, coefficients, reduction)
        if cause is not None:
            return cause
    whole = sum(pieces[1:], pieces[0])
    return (
        of_parts(shares, whole, job, reduction)
        or _of_uses(side, plain.by_use(step, name), found)
        or of_dtype(found, whole, _by_rank(job, pieces), reduction)
        or of_slices(shares, whole, job, reduction)
    )


def fitted(found: Tensor, pieces: Sequence[Tensor]) -> tuple[list[float] | None, float]:
    """The coefficients of `pieces` whose sum is nearest to `found`, and the remaining relative error.

    None if the pieces do not determine the coefficients.
    """
    matrix = torch.stack([piece.double().reshape(-1) for piece in pieces], 1)
    wanted = found.double().reshape(-1)
    sizes = matrix.norm(dim=0)
    if not bool(torch.isfinite(wanted).all()) or not bool((sizes > 0).all()):
        return None, math.inf
    scaled = matrix / sizes
    if float(torch.linalg.svdvals(scaled)[-1]) < 1e-4:
        return None, math.inf
    solution = torch.linalg.lstsq(scaled, wanted.unsqueeze(1), driver="gelsd").solution[:, 0]
    rest = float((scaled @ solution - wanted).norm() / max(float(wanted.norm()), 1e-30))
    return (solution / sizes).tolist(), rest


def _of_coefficients(job: VerificationJob, found: Sequence[float], reduction: str | None) -> Cause | None:
    m = job.plan.microbatches
    missing = [part for part, value in enumerate(found) if abs(value) <= CLOSE]
    rest = [value for part, value in enumerate(found) if part not in missing]
    even = bool(rest) and max(rest) - min(rest) <= CLOSE * max(1.0, abs(max(rest)))
    if missing and even:
        whole_ranks = {part // m for part in missing}
        by_rank = len(missing) == len(whole_ranks) * m and job.data_ranks > 1
        if reduction is not None and _are_copies(job, whole_ranks):
            reduction = reduction.replace(Purpose.REDUCE_GRADIENTS, Purpose.AVERAGE_REPLICAS)
        times = "" if abs(rest[0] - 1) <= CLOSE else f", and the others count {rest[0]:.3g} times"
        text = f"the contribution of {name_parts(missing, m)} is missing{times}"
        return Cause(text, reduction if by_rank else None)
    if even and abs(rest[0] - 1) > CLOSE:
        return Cause(f"it is {rest[0]:.4g} times the mean: the sum is divided by a wrong number of ranks", reduction)
    if max(abs(value - 1) for value in found) > CLOSE:
        shown = ", ".join(f"{value:.3g}" for value in found[:8]) + (", ..." if len(found) > 8 else "")
        by_rank = all(abs(found[p] - found[p // m * m]) <= CLOSE for p in range(len(found)))
        text = f"the parts have the weights {shown} in the mean, relative to those that they should have"
        return Cause(text, reduction if by_rank and job.data_ranks > 1 else None)
    return None


def _of_uses(side: Side, uses: Mapping[str, Tensor], found: Tensor) -> Cause | None:
    """The cause if a tied parameter lacks the gradient of one of its uses."""
    if len(uses) < 2:
        return None
    coefficients, rest = fitted(found, list(uses.values()))
    if coefficients is None or rest > EXPLAINED:
        return None
    missing = [name for name, value in zip(uses, coefficients, strict=True) if abs(value) <= CLOSE]
    if not missing:
        return None
    collective = f"{Purpose.REPAY_GRADIENTS} of {missing[0]}" if used_apart(side, *uses) else None
    text = f"it is tied ({', '.join(uses)}) and the gradient of its use as {', '.join(missing)} is missing"
    return Cause(text, collective, missing[0].rpartition(".")[0])


def of_dtype(found: Tensor, wanted: Tensor, by_rank: Sequence[Tensor], collective: str | None) -> Cause | None:
    """The cause if the ranks' contributions, or their sum, were rounded to 16 bits."""
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        error, eps = relative(found, wanted), torch.finfo(dtype).eps
        rounded = sum((each.to(dtype).to(each.dtype) for each in by_rank[1:]), by_rank[0].to(dtype).to(found.dtype))
        if relative(found, rounded) <= error / 16:
            return Cause(f"each rank's contribution was rounded to {name} on its way", collective)
        if (
            relative(wanted.to(dtype), wanted) > 0
            and error <= eps
            and torch.equal(found.to(dtype).to(found.dtype), found)
        ):
            return Cause(f"it was rounded to {name} on its way", collective)
    return None


def _by_rank(job: VerificationJob, pieces: Sequence[Tensor]) -> list[Tensor]:
    """The contribution of each data rank."""
    m = job.plan.microbatches
    return [sum(pieces[first + 1 : first + m], pieces[first]) for first in range(0, len(pieces), m)]


def of_parts(
    shares: Sequence[tuple[int, SeenShare]], wanted: Tensor, job: VerificationJob, collective: str | None
) -> Cause | None:
    """The cause if gradients of ranks on the same data were not added up."""
    groups: dict[tuple[int, tuple[Box, ...]], list[SeenShare]] = {}
    for rank, share in shares:
        groups.setdefault((rank // job.together, share.boxes), []).append(share)
    if job.together == 1 or any(len(group) != job.together for group in groups.values()):
        return None
    for group in groups.values():
        total = torch.from_numpy(sum(share.values for share in group[1:]) + group[0].values)
        if relative(total, group[0].same_of(wanted)) > SUMMED:
            return None
    return Cause("each rank that splits layers has a part of it, and the sum over them is missing", collective)


def of_slices(
    shares: Sequence[tuple[int, SeenShare]], wanted: Tensor, job: VerificationJob, collective: str | None
) -> Cause | None:
    """The cause if only some ranks' slices are wrong, or two slices are exchanged."""
    wrong = []
    for rank, share in shares:
        if relative(torch.from_numpy(share.values), share.same_of(wanted)) > job.gradient_tolerance * 8:
            wrong.append((rank, share))
    if not wrong or len(wrong) == len(shares):
        exchanged = _exchanged(shares, wanted, job)
        return Cause(exchanged, collective) if exchanged else None
    ranks = sorted({rank for rank, _ in wrong})
    text = f"the slice of rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} alone is wrong"
    return Cause(_exchanged(shares, wanted, job) or text, collective)


def _exchanged(shares: Sequence[tuple[int, SeenShare]], wanted: Tensor, job: VerificationJob) -> str | None:
    for (rank, share), (other, theirs) in itertools.permutations(shares, 2):
        values = torch.from_numpy(share.values)
        there = theirs.same_of(wanted)[: values.numel()]
        alike = share.boxes != theirs.boxes and there.numel() == values.numel()
        if alike and relative(values, there) <= job.gradient_tolerance * 8:
            return f"the slices of ranks {rank} and {other} are exchanged"
    return None


def of_weight(found: Tensor, wanted: Tensor, older: Sequence[tuple[int, Tensor]], job: VerificationJob) -> Cause | None:
    """The cause if a weight, or its differing elements, are those of an earlier step."""
    for step, values in older:
        if relative(found, values) <= job.tolerance < relative(wanted, values):
            return Cause(f"it is still that of {'the start' if step < 0 else f'step {step}'}")
    wrong = ((found - wanted).abs() > job.tolerance * wanted.abs().max()).reshape(-1).nonzero().reshape(-1)
    if not len(wrong) or len(wrong) == wanted.numel():
        return None
    where = f"elements {int(wrong[0]):,} to {int(wrong[-1]) + 1:,} of {wanted.numel():,} are wrong"
    for step, values in older:
        if torch.equal(found.reshape(-1)[wrong], values.reshape(-1)[wrong]):
            return Cause(f"{where}: they are still those of {'the start' if step < 0 else f'step {step}'}")
    return Cause(where)


def of_flat(side: Side, name: str, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Cause | None:
    """The cause if a slice of a parameter's flat buffer is in the place of another."""
    shares = [(rank, share) for rank, share in side.shares(0)]
    label = next((share.flat for _, share in shares if share.name == name), None)
    order = list(dict.fromkeys(share.name for _, share in shares if share.flat == label))
    ranks = sorted({rank for rank, share in shares if share.flat == label and share.counted})
    if len(ranks) < 2:
        return None
    mine, theirs = (torch.cat([values[each].reshape(-1) for each in order]) for values in (found, wanted))
    size = -(-mine.numel() // len(ranks))
    pairs = list(zip(mine.split(size), theirs.split(size), strict=True))
    for a, b in itertools.permutations(range(len(pairs)), 2):
        (one, _), (_, other) = pairs[a], pairs[b]
        both = min(one.numel(), other.numel())  # the last may be shorter
        if both and relative(one[:both], other[:both]) <= side.job.tolerance < relative(*pairs[a]):
            return Cause(f"the slice of rank {ranks[b]} of {label} is where that of rank {ranks[a]} should be")
    return None


def of_norm(side: Side, step: int, norm: float) -> tuple[Cause, str]:
    """The cause of a difference of the norm alone, and the parameter responsible."""
    squares: dict[tuple[int, str], float] = {}
    names: dict[tuple[int, str], str] = {}
    for rank, share in side.shares(step):
        if share.counted:
            key = (rank, share.flat)
            squares[key] = squares.get(key, 0.0) + float((torch.from_numpy(share.values).double() ** 2).sum())
            names.setdefault(key, share.name)
    total = sum(squares.values())
    lacking = total - norm * norm
    tolerance = 8 * side.job.tolerance * total
    for count in range(1, 5):
        for keys in itertools.combinations(squares, count):
            if abs(sum(squares[key] for key in keys) - lacking) <= tolerance and len(squares) ** count < 10**6:
                shown = " and ".join(f"rank {rank}'s slice of {flat}" for rank, flat in keys)
                return Cause(f"the squares of {shown} are missing", f"{Purpose.CONTROL} on the step"), names[keys[0]]
    for rank in {rank for rank, _ in squares}:
        if abs(sum(value for (owner, _), value in squares.items() if owner == rank) - lacking) <= tolerance:
            first = next(key for key in squares if key[0] == rank)
            return Cause(f"the squares of rank {rank} are missing", f"{Purpose.CONTROL} on the step"), names[first]
    ratio = norm / math.sqrt(total) if total else math.nan
    return Cause(f"it is {ratio:.4g} times the norm of the gradients", f"{Purpose.CONTROL} on the step"), ""


def used_apart(side: Side, *names: str) -> bool:
    """Whether the modules that use a tied parameter run on different ranks."""
    ranks = [side.ranks_of(name.rpartition(".")[0]) for name in names]
    return any(one.isdisjoint(other) for one, other in itertools.combinations(ranks, 2))


def weight_collective(job: VerificationJob, unit: str) -> str | None:
    """The collective that provides the weights of a unit for a forward."""
    return f"{Purpose.GATHER_PARAMETERS} of {unit}" if job.plan.zero else None


def same_as_before(found: Sketch, history: Sequence[tuple[int, Sketch]], tolerance: float) -> int | None:
    """The latest earlier step with the weights that a module still had; None if none matches."""
    return next((step for step, values in reversed(history) if distance(found, values) <= tolerance), None)


def _are_copies(job: VerificationJob, data_ranks: set[int]) -> bool:
    """Whether data ranks are all those of some shard groups."""
    group = job.plan.shard_group
    return group is not None and len(data_ranks) == group * len({rank // group for rank in data_ranks})
