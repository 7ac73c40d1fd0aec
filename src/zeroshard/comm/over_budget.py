"""A rank that is over its budget alone: the others, which wait for it, raise the same error within seconds.

The store has one entry per event. Events are numbered from each engine on, and each rank counts those that it has
raised, so an error which a script catches ends neither the next step nor the next engine.
"""

from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from zeroshard.comm.mesh import Mesh
from zeroshard.comm.rendezvous import give_up
from zeroshard.errors import BudgetExceeded, BudgetExceededElsewhere

_raised: WeakKeyDictionary[Store, tuple[int, int]] = WeakKeyDictionary()  # engines so far, events of the last one


def begin_engine(mesh: Mesh) -> None:
    """Begin an engine on all ranks: events of the one before are over."""
    if mesh.failures is not None:
        _raised[mesh.failures] = _raised.get(mesh.failures, (0, 0))[0] + 1, 0


def announce_over_budget(mesh: Mesh, error: BudgetExceeded) -> None:
    """Announce to the other ranks an error that this rank is about to raise; once per error."""
    if mesh.failures is None or error.shared:
        return
    error.shared = True
    try:
        mesh.failures.compare_set(_next(mesh.failures), "", f"Rank {mesh.rank} is over its budget: {error}")
    except dist.DistError:
        give_up(mesh.failures)
    _count(mesh.failures)


def over_budget_elsewhere(mesh: Mesh) -> BudgetExceededElsewhere | None:
    """The error of another rank that was over its budget, if this rank has not raised it yet.

    Raises:
        DistError: the store is gone.
    """
    if mesh.failures is None or not mesh.failures.check([_next(mesh.failures)]):
        return None
    text = mesh.failures.get(_next(mesh.failures)).decode()
    _count(mesh.failures)
    return BudgetExceededElsewhere(text)


def _next(store: Store) -> str:
    engine, events = _raised.get(store, (0, 0))
    return f"over budget/{engine}/{events}"


def _count(store: Store) -> None:
    engine, events = _raised.get(store, (0, 0))
    _raised[store] = engine, events + 1
