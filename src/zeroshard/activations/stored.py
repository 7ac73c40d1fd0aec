"""Blocks of which the plan's savers store what they save: on the host, or compressed without loss.

In the first forward what a block saves is stored and read once, to see what that takes: bytes that stay on the device,
seconds of the thread, and seconds of copies that run beside it. On a CPU copies run in the thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from zeroshard.activations.keep import Kept
from zeroshard.activations.savers import Savers
from zeroshard.errors import BudgetExceeded
from zeroshard.units.hooks import place_of

SPACINGS = (1, 2, 3, 4)  # of so many blocks one is stored, so that its copies have the time of all


@dataclass(frozen=True, slots=True)
class StoredCosts:
    """What it takes to store what a block saves, and to read it.

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
        """Seconds that the block takes longer, where the copies run beside `ahead` seconds of computation each way."""
        return self.own + max(0.0, self.down - ahead) + max(0.0, self.up - ahead)


@dataclass(frozen=True, slots=True)
class BySavers:
    """The choice of a block whose tensors savers store.

    Attributes:
        number: of the savers' choice, in `Savers.choices`.
        how: what they do, in words.
    """

    number: int
    how: str


@dataclass(frozen=True, slots=True)
class Clocks:
    """What storing is measured by.

    Attributes:
        now: seconds.
        ready: the same, once the device has done all.
        held: bytes of activations on the device.
    """

    now: Callable[[], float]
    ready: Callable[[], float]
    held: Callable[[], int]


def measured(savers: Savers, number: int, saved: Sequence[Tensor], by: Clocks) -> StoredCosts | None:
    """Have savers store what a block saves, and read it again.

    Args:
        savers: of the plan.
        number: of their choice, in `Savers.choices`.

    Returns:
        None if they store none of it, or have too little room.
    """
    handles: list[Any] = []
    stays: dict[int, int] = {}  # bytes of storages that no saver takes
    before, own, down = by.held(), 0.0, 0.0
    asked, savers.asked = savers.asked, savers.choices[number]
    try:
        for tensor in saved:
            start = by.ready()
            handle = savers.pack(tensor)
            packed = by.now()
            if isinstance(handle, Kept):
                stays[place_of(tensor)] = tensor.untyped_storage().nbytes()
                continue
            savers.settle()
            handles.append(handle)
            own, down = own + packed - start, down + by.ready() - packed
        if not handles:
            return None
        held, start = by.held() - before, by.ready()
        while handles:
            savers.unpack(handles.pop())
        read = by.now()
        return StoredCosts(held + sum(stays.values()), own + read - start, down, by.ready() - read)
    except BudgetExceeded:  # of the host
        return None
    finally:
        handles.clear()
        savers.settle()
        savers.asked = asked


def fastest(costs: StoredCosts | None, measured: Sequence[StoredCosts | None]) -> StoredCosts | None:
    """A block's costs with the least seconds that were measured for one of its kind."""
    known = [each for each in measured if each is not None]
    times = {name: min(getattr(each, name) for each in known) for name in ("own", "down", "up")} if known else {}
    return None if costs is None else replace(costs, **times)


def ahead_of(seconds: Sequence[float], number: int, spacing: int) -> float | None:
    """Seconds of the forwards beside which the copies of a block run, where one of `spacing` blocks is stored.

    Returns:
        None for the other blocks. As many as the copies need come after the last that is stored.
    """
    stored = (len(seconds) - 1 - number) % spacing == spacing - 1
    return sum(seconds[number + 1 : number + 1 + spacing]) if stored else None
