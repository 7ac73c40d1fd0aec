"""The schedule: one training step as a list of actions (the second backbone).

A generator emits compute only; pure lowering passes add what memory and the wire need; the same list is verified,
printed and executed. The grammar of an action is `KIND chunk [. microbatch] @ version`:

    F0.2@0       forward of microbatch 2 through chunk 0 with weight version 0
    B0.2@0       its backward
    GATHER0@0    from here on, chunk 0's units are gathered as they are used (ZeRO 3)
    FREE0@0      they are sliced again
    REDUCE0.2@0  its gradients are reduced: for each unit, as soon as its backward is done
    UPDATE0@0    version 0 of the weights becomes version 1
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from zeroshard.errors import PlanError


class Kind(StrEnum):
    """What an action does."""

    FORWARD = "F"
    BACKWARD = "B"
    GATHER = "GATHER"
    FREE = "FREE"
    REDUCE = "REDUCE"
    UPDATE = "UPDATE"


@dataclass(frozen=True, slots=True)
class Action:
    """One action of one rank on one chunk of the model, with the weight version that it uses."""

    kind: Kind
    chunk: int = 0
    microbatch: int | None = None
    version: int = 0

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else f".{self.microbatch}"
        return f"{self.kind}{self.chunk}{microbatch}@{self.version}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The action that prints as `text`.

        Raises:
            PlanError: the text is no action.
        """
        match = re.fullmatch(r"([A-Z]+)(\d+)(?:\.(\d+))?@(\d+)", text.strip())
        if match is None or match[1] not in list(Kind):
            raise PlanError(
                f"{text!r} is no action; write a kind ({', '.join(Kind)}), chunk, .microbatch and @version: F0.2@0."
            )
        return cls(Kind(match[1]), int(match[2]), None if match[3] is None else int(match[3]), int(match[4]))


Schedule = list[Action]


def accumulation(microbatches: int) -> Schedule:
    """Gradient accumulation on one stage: forward and backward of each microbatch in turn."""
    return [Action(kind, 0, m) for m in range(microbatches) for kind in (Kind.FORWARD, Kind.BACKWARD)]


def with_gathers(schedule: Schedule) -> Schedule:
    """Lowering: gather a chunk for each forward and each backward, and free it afterwards (ZeRO 3)."""
    lowered: Schedule = []
    for action in schedule:
        if action.kind in (Kind.FORWARD, Kind.BACKWARD):
            around = (Action(kind, action.chunk, None, action.version) for kind in (Kind.GATHER, Kind.FREE))
            lowered += [next(around), action, next(around)]
        else:
            lowered.append(action)
    return lowered


def with_reductions(schedule: Schedule, each_microbatch: bool) -> Schedule:
    """Lowering: reduce the gradients of each backward, or of the last backward of each chunk only."""
    last = {action.chunk: n for n, action in enumerate(schedule) if action.kind is Kind.BACKWARD}
    lowered: Schedule = []
    for n, action in enumerate(schedule):
        lowered.append(action)
        if action.kind is Kind.BACKWARD and (each_microbatch or last[action.chunk] == n):
            lowered.append(Action(Kind.REDUCE, action.chunk, action.microbatch, action.version))
    return lowered


def with_update(schedule: Schedule) -> Schedule:
    """Lowering: update each chunk at the end."""
    versions = {action.chunk: action.version for action in schedule}
    return schedule + [Action(Kind.UPDATE, chunk, None, version) for chunk, version in versions.items()]


def verify(schedule: Sequence[Action]) -> None:
    """Check that a rank's list is a whole step: each forward has its backward with the same weights, and so on.

    Raises:
        PlanError: the first action that breaks a rule, and the rule.
    """
    gathering = {action.chunk for action in schedule if action.kind is Kind.GATHER}
    chunks: dict[int, _Chunk] = {}
    for place, action in enumerate(schedule):
        chunk = chunks.setdefault(action.chunk, _Chunk(action.chunk in gathering))
        complaint = chunk.follow(action)
        if complaint:
            raise PlanError(f"Action {place}, {action}, {complaint}.")
    for number, chunk in chunks.items():
        complaint = chunk.end()
        if complaint:
            raise PlanError(f"At the end of the step, chunk {number} {complaint}.")


@dataclass(slots=True)
class _Chunk:
    """What one chunk has gone through, as `verify` walks the list."""

    gathers: bool
    gathered: bool = False
    updated: bool = False
    forwards: dict[int | None, int] = field(default_factory=dict)
    done: set[int | None] = field(default_factory=set)
    unreduced: list[int | None] = field(default_factory=list)
    reductions: list[int] = field(default_factory=list)

    def follow(self, action: Action) -> str | None:
        """Take one action; the rule that it breaks, if it does."""
        if self.updated:
            return "comes after the update of its chunk"
        match action.kind:
            case Kind.FORWARD | Kind.BACKWARD:
                return self._compute(action)
            case Kind.GATHER:
                if self.gathered:
                    return "gathers what is gathered"
                self.gathered = True
            case Kind.FREE:
                if not self.gathered:
                    return "frees what is not gathered"
                self.gathered = False
            case Kind.REDUCE:
                return self._reduce(action)
            case Kind.UPDATE:
                self.updated = True
                if self.unreduced or not self.reductions:
                    return "comes before the gradients are reduced"
                if self.gathered:
                    return "changes weights that are gathered"
        return None

    def _compute(self, action: Action) -> str | None:
        if self.gathers and not self.gathered:
            return "uses a chunk that is not gathered"
        microbatch = action.microbatch
        if action.kind is Kind.FORWARD:
            if microbatch in self.forwards or microbatch in self.done:
                return "repeats a forward"
            self.forwards[microbatch] = action.version
            return None
        if microbatch not in self.forwards:
            return "has no forward before it"
        version = self.forwards.pop(microbatch)
        if version != action.version:
            return f"uses other weights than its forward (@{version})"
        self.done.add(microbatch)
        self.unreduced.append(microbatch)
        return None

    def _reduce(self, action: Action) -> str | None:
        if not self.unreduced:
            return "has no backward before it"
        if self.unreduced[-1] != action.microbatch:
            return f"follows the backward of microbatch {self.unreduced[-1]}"
        self.reductions.append(len(self.unreduced))
        self.unreduced.clear()
        if len(self.reductions) > 1 and max(self.reductions) > 1:
            return "leaves backwards that were not reduced one by one; reduce after every backward, or after the last"
        return None

    def end(self) -> str | None:
        """The rule that the whole breaks, if it does."""
        if self.forwards:
            return f"has forwards without a backward: microbatches {sorted(self.forwards, key=str)}"
        if self.gathered:
            return "is still gathered"
        if not self.updated:
            return "has not been updated"
        return None
