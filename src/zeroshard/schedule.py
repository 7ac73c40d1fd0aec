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
from dataclasses import dataclass
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
    """Check a rank's list: each forward has its backward with the same weights, each backward its reduction, and so on.

    Raises:
        PlanError: the first action that breaks a rule, and the rule.
    """
    versions: dict[tuple[int, int | None], int] = {}
    gathered: set[int] = set()
    unreduced: set[int] = set()
    for place, action in enumerate(schedule):
        key, here = (action.chunk, action.microbatch), f"Action {place}, {action},"
        match action.kind:
            case Kind.FORWARD:
                _require(key not in versions, f"{here} repeats a forward whose backward is still to come.")
                versions[key] = action.version
            case Kind.BACKWARD:
                _require(key in versions, f"{here} has no forward before it.")
                _require(
                    versions[key] == action.version, f"{here} uses other weights than its forward (@{versions[key]})."
                )
                del versions[key]
                unreduced.add(action.chunk)
            case Kind.GATHER:
                _require(action.chunk not in gathered, f"{here} gathers what is gathered.")
                gathered.add(action.chunk)
            case Kind.FREE:
                _require(action.chunk in gathered, f"{here} frees what is not gathered.")
                gathered.remove(action.chunk)
            case Kind.REDUCE:
                _require(action.chunk in unreduced, f"{here} has no backward before it.")
                unreduced.discard(action.chunk)
            case Kind.UPDATE:
                _require(action.chunk not in unreduced, f"{here} comes before the gradients are reduced.")
    _require(not versions, f"The forwards of (chunk, microbatch) {sorted(versions, key=str)} have no backward.")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise PlanError(message)
