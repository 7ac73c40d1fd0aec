"""What ranks agree on before they decide what is done with blocks: the largest bytes of all, and the seconds of one."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from zeroshard.comm.collectives import Comm
from zeroshard.recompute.auto.budget import ActivationBudget
from zeroshard.recompute.auto.meter import BlockMeasures, OperationCosts, PassKey, PassMeasures, SavedTail
from zeroshard.recompute.auto.remade import Recipe, RemadeCosts
from zeroshard.recompute.auto.stored import StoredCosts


class Deciding(Protocol):
    """Measures forwards and decides what is done in later ones.

    Attributes:
        measured: what was measured and is not decided yet, by kind of forward.
    """

    measured: dict[PassKey, PassMeasures]

    @property
    def known(self) -> dict[PassKey, PassMeasures]:
        """What decisions were made from."""

    def needed(self, measured: Mapping[PassKey, PassMeasures]) -> int:
        """The fewest bytes of activations."""

    def apply(self, measured: Mapping[PassKey, PassMeasures], room: int) -> None:
        """Decide."""


class AutoStepEnd:
    """Has the ranks agree on what was measured, and decide.

    Args:
        comm: of the ranks that have the same blocks.
        world: of all.
    """

    reads = False

    def __init__(self, recomputation: Deciding, budget: ActivationBudget, comm: Comm, world: Comm) -> None:
        self._recomputation, self._budget, self._comm = recomputation, budget, comm
        self._everyone = world if budget.first.waits else comm
        self._room: int | None = None
        self._sharing = 0  # forwards for which decisions were made

    @property
    def readings(self) -> Mapping[str, Mapping[str, Any]]:
        """None of layers."""
        return {}

    def before_update(self) -> None:
        """Refuse a budget that is too small before the first update, on all ranks alike, and as if nothing had run.

        Raises:
            BudgetExceeded: with the least `device_memory`.
        """
        recomputation, budget = self._recomputation, self._budget
        if self._room is not None:
            return
        budget.foresee()
        room, measured = self._agreed(budget.room, dict(recomputation.measured))
        found = [recomputation.needed(measured) - room, room]
        short, room = max(self._everyone.agree_on(found, "room for activations"))
        if short > 0:
            budget.first.undo()
            recomputation.measured.clear()
            raise budget.too_small(short + room, room)

    def end_step(self, skipped: bool) -> None:
        """Decide what was not decided yet; in the first step together, and so always where blocks hold collectives."""
        recomputation, budget = self._recomputation, self._budget
        measured, room = dict(recomputation.measured), budget.room
        if self._room is None or budget.together:
            room, measured = self._agreed(room, measured)
        budget.end_step()
        budget.first.end()
        if self._room is None or room < self._room:  # later steps may hold more beside activations
            measured, self._room = {**recomputation.known, **measured}, room
        elif budget.sharing != self._sharing:
            measured = {**recomputation.known, **measured}
        self._sharing = budget.sharing
        recomputation.apply(measured, self._room)

    def _agreed(self, room: int, measured: Mapping[PassKey, PassMeasures]) -> tuple[int, dict[PassKey, PassMeasures]]:
        """The least room and the largest measurements of the ranks; a collective call."""
        budget = self._budget
        mine = [room, budget.forwards, budget.seen, [[key, asdict(each)] for key, each in measured.items()]]
        answers = self._comm.agree_on(mine, "activations of the step")
        budget.forwards, budget.seen = (max(each[n] for each in answers) for n in (1, 2))
        return min(each[0] for each in answers), _merged(pair for answer in answers for pair in answer[3])


def _merged(pairs: Iterable[tuple[Any, Any]]) -> dict[PassKey, PassMeasures]:
    """Measurements of all ranks, as JSON values, in one mapping."""
    found: dict[PassKey, PassMeasures] = {}
    for key, values in pairs:
        blocks = []
        for block in values["blocks"]:
            operations = tuple(OperationCosts(**each) for each in block["operations"])
            tails = tuple(SavedTail(**each) for each in block["tails"])
            stored = tuple(None if each is None else StoredCosts(**each) for each in block["stored"])
            remade = tuple(_remade(each) for each in block["remade"])
            parts = {"operations": operations, "tails": tails, "stored": stored, "remade": remade}
            blocks.append(BlockMeasures(**{**block, **parts}))
        measures, kind = PassMeasures(blocks, values["before"], values["after"]), _frozen(key)
        found[kind] = found[kind].highest(measures) if kind in found else measures
    return found


def _remade(values: Mapping[str, Any]) -> RemadeCosts:
    return RemadeCosts(**{**values, "recipes": tuple(Recipe(**each) for each in values["recipes"])})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
