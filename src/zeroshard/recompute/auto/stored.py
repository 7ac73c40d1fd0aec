"""Blocks whose saved tensors the plan's savers store: on the host, or compressed without loss.

In the first forward a block's saved tensors are stored and read once, to measure the costs: bytes that stay on the
device, seconds of the thread, and seconds of concurrent copies. On a CPU copies run in the thread.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from torch import Tensor

from zeroshard.errors import BudgetExceeded
from zeroshard.saved.kept import Kept
from zeroshard.saved.savers import Savers
from zeroshard.units.hooks import place_of

DROPPABLE = 2.5e-4  # seconds that a block takes longer because it can be computed again if room is short
SPACINGS = (1, 2, 3, 4)  # of so many blocks one is stored, so that its copies have the time of all


@dataclass(frozen=True, slots=True)
class StoredCosts:
    """Costs of storing the saved tensors of a block, and of reading them.

    Attributes:
        held: bytes that are on the device between forward and backward.
        own: seconds of the thread.
        down: seconds that copies to the host take beside the computation.
        up: seconds of copies to the device.
    """

    held: int
    own: float
    down: float
    up: float

    def seconds(self, ahead: float) -> float:
        """Seconds that the block takes longer, where copies run beside the computation if they fit in `ahead` seconds.

        Others delay those of later blocks too, so they are counted as if nothing ran beside them.
        """
        return DROPPABLE + self.own + (0.0 if max(self.down, self.up) <= ahead else self.down + self.up)


@dataclass(frozen=True, slots=True)
class BySavers:
    """A choice of savers for a block's saved tensors.

    Attributes:
        number: of the savers' choice, in `Savers.choices`.
        how: what they do, in words.
        varies: whether bytes on the device depend on values, so that it may have to be dropped.
    """

    number: int
    how: str
    varies: bool = False


def choices_of(savers: Savers) -> tuple[BySavers, ...]:
    """The savers of a plan that may store a block, each alone or all, in the order of `Savers.choices`."""
    return tuple(
        BySavers(number, " or ".join(saver.how for saver in each), any(saver.varies for saver in each))
        for number, each in enumerate(savers.choices)
    )


@dataclass(frozen=True, slots=True)
class Clocks:
    """Clocks and counters for measuring storage.

    Attributes:
        now: seconds.
        ready: the same, once the device has done all.
        held: bytes of activations on the device.
        known: storages that are there anyway.
    """

    now: Callable[[], float]
    ready: Callable[[], float]
    held: Callable[[], int]
    known: Collection[int] = ()


def measured(savers: Savers, number: int, saved: Sequence[Tensor], by: Clocks) -> StoredCosts | None:
    """Costs of storing and reading a block's saved tensors, measured for one storage at a time.

    Args:
        savers: of the plan.
        number: of their choice, in `Savers.choices`.
        saved: all that the block saves, but for weights.

    Returns:
        None if they store none of it, or have too little room.
    """
    storages: dict[int, list[Tensor]] = {}
    for tensor in saved:
        storages.setdefault(place_of(tensor), []).append(tensor)
    asked, savers.asked = savers.asked, savers.choices[number]
    savers.settle()  # what others have under way would free its bytes meanwhile
    try:
        found = [_storage_costs(savers, tensors, by) for tensors in storages.values()]
    except BudgetExceeded:  # of the host
        return None
    finally:
        savers.settle()
        savers.asked = asked
    if not any(taken for _, taken in found):
        return None
    return StoredCosts(*map(sum, zip(*(astuple(costs) for costs, _ in found), strict=True)))


def _storage_costs(savers: Savers, tensors: Sequence[Tensor], by: Clocks) -> tuple[StoredCosts, bool]:
    """Costs of tensors that lie in one storage, and whether a saver takes any."""
    handles: list[Any] = []
    before, own, down, stays = by.held(), 0.0, 0.0, 0
    for tensor in tensors:
        start = by.ready()
        handle = savers.pack(tensor)
        packed = by.now()
        if isinstance(handle, Kept):
            stays = 0 if place_of(tensor) in by.known else tensor.untyped_storage().nbytes()
            continue
        savers.settle()
        handles.append(handle)
        own, down = own + packed - start, down + by.ready() - packed
    held, start = max(0, by.held() - before) + stays, by.ready()
    if not handles:
        return StoredCosts(held, 0.0, 0.0, 0.0), False
    while handles:
        savers.unpack(handles.pop())
    read, ready = by.now(), by.ready()
    savers.settle()
    if down > own:  # reading is a copy that runs beside the computation, whoever waits for it here
        return StoredCosts(held, own, down, ready - start), True
    return StoredCosts(held, own + read - start, down, ready - read), True


def of_both(ours: StoredCosts | None, theirs: StoredCosts | None) -> StoredCosts | None:
    """The costs of one rank with the larger bytes of two; None where one of them stores nothing."""
    return None if ours is None or theirs is None else replace(ours, held=max(ours.held, theirs.held))


def fastest(costs: StoredCosts | None, measured: Sequence[StoredCosts | None]) -> StoredCosts | None:
    """A block's costs with the least seconds that were measured for one of its kind."""
    known = [each for each in measured if each is not None]
    times = {name: min(getattr(each, name) for each in known) for name in ("own", "down", "up")} if known else {}
    return None if costs is None else replace(costs, **times)


def ahead_of(seconds: Sequence[float], number: int, spacing: int) -> float | None:
    """Seconds of the forwards beside which the copies of a block run, where one of `spacing` blocks is stored.

    Returns:
        None for the other blocks. After the last that is stored come as many; where any may be, none need come.
    """
    later = len(seconds) - 1 - number
    stored = spacing == 1 or (later > 0 and later % spacing == 0)
    return sum(seconds[number + 1 : number + 1 + spacing]) if stored else None
