"""The decision on a step: the message by which ranks agree, the verdict, and clipping by `clip_grad_norm`.

[Note: agreement] Once per step, every rank sends one small message: the step's number, checksums of the collectives so
far, which units it has not reduced, which parameters got a gradient, and its share of the squared norm. Everything that
could differ between ranks (an unused parameter, an overflow, a lost step) is decided by all from the same messages.
"""

import hashlib
import json
import math
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from zeroshard.checkpoint.facts import plain, setting
from zeroshard.comm.collectives import Comm
from zeroshard.errors import CommError, PlanError
from zeroshard.parts.gradients import Gradients
from zeroshard.parts.technique import StepEnd
from zeroshard.precision.loss_scaling import LossScaler
from zeroshard.step.losses import REPORT, LossReport

HEAD = struct.Struct("<qId?")
NUMEL = attrgetter("numel")
SHOWN = 4  # differences of one rank in an error
MOST = 3  # ranks in an error
CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_

Groups = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Agreed:
    """The agreement on a step before its update.

    Attributes:
        norm: of the scaled mean gradient, with `gain`.
        written: one byte for each parameter of this rank's stage, 1 for one that got a gradient on any rank.
        finite: whether the losses of all ranks are finite, as far as they are known.
        gain: the factor on the reduced gradients that makes them those of the mean.
    """

    norm: float
    written: bytes
    finite: bool
    gain: float = 1.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The norm of the mean gradient before clipping, the loss scale, and the factor on gradients if not skipped."""

    norm: float
    scale: float
    skip: bool
    factor: float


@dataclass(frozen=True, slots=True)
class StepRules:
    """The settings of a plan for decisions on steps.

    Attributes:
        nonfinite: "skip", "raise" or "ignore", of gradients without a loss scale.
        clip_norm: limit of the norm.
        streams: whether stages decide without each other; each of `stages` clips alone, and all keep the limit.
    """

    nonfinite: str
    clip_norm: float | None
    streams: bool
    stages: int


class Decision:
    """Decides on a step from numbers equal on all ranks: clip it, skip it because of an overflow, or refuse it.

    Args:
        step_ends: called before each verdict.

    Attributes:
        clip: factors of `clip_grad_norm` calls for the next step, in place of the plan's.
        last: the verdict on the last update; None before the first.
        watcher: called before each verdict, when all gradients are reduced.
        before_update: called with the agreement on reduced gradients, which it may change.
    """

    def __init__(self, rules: StepRules, scaler: LossScaler | None, step_ends: Sequence[StepEnd]) -> None:
        self._rules, self.scaler, self._step_ends = rules, scaler, step_ends
        self.watcher: Callable[[], None] | None = None
        self.before_update: Callable[[Agreed], None] | None = None
        self.clip = Clipping()
        self.last: Verdict | None = None

    @property
    def scale(self) -> float:
        """The factor on the loss."""
        return self.scaler.scale if self.scaler else 1.0

    def state(self) -> list[Any] | None:
        """The last update, for a checkpoint: its norm, and whether it was skipped and is not counted yet."""
        return None if self.last is None else [plain(self.last.norm), self.last.skip and self._rules.streams]

    def load(self, state: list[Any] | None) -> None:
        """Continue from `state()`: a stage without an update in a step reports its last one."""
        self.last = None if state is None else Verdict(setting(state[0]), 1.0, state[1] and self._rules.streams, 1.0)

    def decide(self, agreed: Agreed, refuse: Callable[[float], None]) -> Verdict:
        """The verdict on reduced gradients.

        Args:
            refuse: raises for a norm that is not finite, where the plan says so.
        """
        for each in self._step_ends:
            each.before_update()
        if self.watcher is not None:
            self.watcher()
        scale, rules = self.scale, self._rules
        norm = agreed.norm / scale
        finite = math.isfinite(norm) and agreed.finite
        if not finite and not self.scaler and rules.nonfinite == "raise":
            refuse(norm)
        skip = not finite and (self.scaler is not None or rules.nonfinite == "skip")
        limit, factor = rules.clip_norm, self.clip.factor
        if factor is None:
            shares = rules.stages if rules.streams else 1
            factor = 1.0 if limit is None else clipping_factor(limit / math.sqrt(shares), norm)
        if self.scaler:
            self.scaler.update(overflow=not finite)
        self.last = Verdict(norm, scale, skip, factor / scale)
        return self.last


def clipping_factor(limit: float, norm: float) -> float:
    """The factor that scales gradients of this norm down to the limit."""
    return min(1.0, float(limit) / (norm + CLIP_EPSILON))


class Clipping:
    """Clipping by `clip_grad_norm` in this step: each call clips the result of earlier calls.

    Attributes:
        factor: on all gradients at the step; None without a call.
    """

    def __init__(self) -> None:
        self.factor: float | None = None
        self._backwards = 0

    def of(self, backwards: int) -> float:
        """The factor on the gradients of so many backwards.

        Raises:
            PlanError: backwards ran after the clipping.
        """
        if self.factor is None:
            return 1.0
        if backwards != self._backwards:
            raise PlanError(
                f"{backwards - self._backwards} of {backwards} backwards of this step came after "
                f"engine.clip_grad_norm(), which clips at the step. Call it after the last backward; "
                f"engine.clip_grad_norm(float('inf')) measures the norm alone, after any of them."
            )
        return self.factor

    def limit(self, largest: float, norm: float, backwards: int) -> float:
        """Clip the gradients of so many backwards, whose norm is `norm`; returns the norm before this call.

        Args:
            largest: limit of the norm; infinity leaves the gradients alone.

        Raises:
            PlanError: as `of`.
        """
        if not math.isfinite(largest):
            return norm * (1.0 if self.factor is None else self.factor)
        before = self.of(backwards)
        self.factor, self._backwards = before * clipping_factor(largest, norm * before), backwards
        return norm * before

    def forget(self) -> None:
        """Reset, since the gradients are gone."""
        self.factor = None


class Answer(NamedTuple):
    """One rank's message in the agreement on a step.

    Attributes:
        step: the steps that it has taken.
        digests: checksums of its gathers and of its reductions so far, and of those inside of each further axis.
        settings: a checksum of the optimizer's settings; 0 where there is one rank.
        squares: its share of the squared norm of the gradients.
        finite: whether its losses are finite.
        losses: its losses and counts.
        unreduced: the units with gradients that it has not reduced.
        written: by parameter, whether it got a gradient.
    """

    step: int
    digests: tuple[int, ...]
    settings: int
    squares: float
    finite: bool
    losses: LossReport
    unreduced: Sequence[int]
    written: bytes

    def pack(self, units: int) -> bytes:
        """The bytes of the message, of equal length on all ranks, for a model of `units` units."""
        head = HEAD.pack(self.step, self.settings, self.squares, self.finite)
        head += struct.pack(f"<{len(self.digests)}I", *self.digests)
        return head + REPORT.pack(*self.losses) + bytes(u in self.unreduced for u in range(units)) + self.written

    @classmethod
    def unpack(cls, frame: bytes, units: int, digests: int) -> "Answer":
        """The message in these bytes, with `digests` checksums."""
        step, settings, squares, finite = HEAD.unpack_from(frame)
        seen, start = struct.unpack_from(f"<{digests}I", frame, HEAD.size), HEAD.size + 4 * digests
        losses, flags = LossReport(*REPORT.unpack_from(frame, start)), frame[start + REPORT.size :]
        unreduced = [u for u in range(units) if flags[u]]
        return cls(step, seen, settings, squares, finite, losses, unreduced, flags[units:])


def written_flags(gradients: Gradients) -> bytes:
    """Per parameter of a flat, 1 where it got a gradient; parameters without elements here are left to other ranks."""
    entries, written = gradients.flat.index.entries, gradients.written_in_step
    if all(map(NUMEL, entries)):
        return written
    return bytes(flag and entry.numel > 0 for entry, flag in zip(entries, written, strict=True))


def check_same_step(
    answers: Sequence[Answer],
    groups: Sequence[Sequence[Sequence[int]]] = (),
    comm: Comm | None = None,
    discards: list[str] | None = None,
) -> None:
    """Check that all ranks are at the same step, after the same collectives.

    Args:
        groups: of each further axis, in the order of the answers' digests: the ranks that called layers together.
        comm: of the ranks, which tell each other their discards where the checksums differ.
        discards: this rank's discards of gradients since the last such check; they are cleared.

    Raises:
        CommError: they are not.
    """
    every = range(len(answers))
    pairs = [(0, rank, slice(2)) for rank in every]
    for number, of_axis in enumerate(groups, start=2):
        pairs += [(members[0], rank, slice(number, number + 1)) for members in of_axis for rank in members]
    for first, rank, compared in pairs:
        one, other = answers[first], answers[rank]
        if (one.step, one.digests[compared]) != (other.step, other.digests[compared]):
            told = comm.agree_on(discards, "discards") if comm else []
            each = "; ".join(f"rank {number}: {', then '.join(own) or 'none'}" for number, own in enumerate(told))
            unlike = f" They discarded other gradients ({each}): do so on every rank alike."
            raise CommError(
                f"The ranks disagree: rank {first} is at step {one.step} and rank {rank} at step {other.step}, "
                "or they gathered and reduced different units on the way. Every rank must call forward, backward "
                f"and step equally often.{unlike if any(own != told[0] for own in told) else ''}"
            )
    if discards:
        discards.clear()


def check_settings(comm: Comm, groups: Groups) -> None:
    """Compare the settings of the optimizer's groups over all ranks: a collective call.

    Raises:
        CommError: they differ, with the fields, on all ranks.
    """
    if comm.mesh.ranks > 1:
        compare(comm, dict(settings_of(groups)), "the optimizer's settings")


class OptimizerSettings:
    """A checksum of an optimizer's settings, cheap to recompute in each step."""

    def __init__(self) -> None:
        self._seen: list[Any] | None = None
        self._checksum = 0

    def checksum(self, groups: Groups) -> int:
        """The checksum of all settings but the parameters; tensors count only if they are on the CPU."""
        values: list[Any] = []
        for group in groups:
            values += [
                value if not isinstance(value, torch.Tensor) else _plain(value)
                for key, value in group.items()
                if key != "params"
            ]
        if values != self._seen:
            self._seen = values
            self._checksum = zlib.crc32(json.dumps(dict(settings_of(groups))).encode())
        return self._checksum


def compare(comm: Comm, facts: dict[str, str], subject: str) -> None:
    """Compare facts over all ranks: a collective call.

    Raises:
        CommError: they differ, with the fields, on all ranks.
    """
    digest = hashlib.sha256(json.dumps(facts).encode()).digest()
    if len(set(comm.agree(digest, f"comparison of {subject}"))) == 1:
        return
    by_rank = comm.agree_on(facts, f"differences in {subject}")
    differing = [rank for rank, theirs in enumerate(by_rank) if theirs != by_rank[0]]
    differences = [_difference(rank, by_rank[rank], by_rank[0]) for rank in differing[:MOST]]
    if len(differing) > MOST:
        differences.append(f"ranks {', '.join(map(str, differing[MOST:]))} differ too")
    raise CommError(
        f"The ranks differ in {subject}: {'. '.join(differences)}. Every rank must run the same script with the same "
        f"packages, and may choose nothing by its rank or machine but its data."
    )


def _difference(rank: int, theirs: Mapping[str, str], first: Mapping[str, str]) -> str:
    names = [name for name in {**first, **theirs} if first.get(name) != theirs.get(name)]
    differences = [f"{name} is {theirs.get(name, 'missing')}, on rank 0 {first.get(name, 'missing')}" for name in names]
    more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    return f"on rank {rank} " + "; ".join(differences[:SHOWN]) + more


def settings_of(groups: Groups) -> Iterator[tuple[str, str]]:
    """Names and values of an optimizer's settings, by group."""
    for number, group in enumerate(groups):
        for key, value in group.items():
            if key not in ("params", "param_names"):
                yield f"optimizer group {number}: {key}", json.dumps(_plain(value))


def _plain(value: Any) -> Any:
    """A value as plain JSON, comparable between processes; an object without such a form counts as its class."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return type(value).__qualname__
