"""Process groups that are destroyed once no rank needs them.

[Note: leases] Torch keeps a process group, with about five descriptors and three threads, until it is destroyed. Ranks
lose a group's mesh at different times, as garbage is collected, and torch names some new groups by the number of groups
that exist (2.13) or were made (2.14). So a group ends at the next roll call of all ranks in which none of them has its
mesh any more, and both numbers are equal on these ranks then.
"""

import json
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

ABANDONED: list[tuple[str, dist.Work]] = []  # operations without a wait, with their leases' names
_COUNTS: Counter[str] = Counter()  # leases so far, by name without number
_GROUPS: dict[str, tuple[dist.ProcessGroup, ...]] = {}  # not destroyed yet, by their leases' names


class Lease:
    """A reference to process groups, held by every copy of a mesh; they may end when the last copy is gone.

    Attributes:
        name: the same on all ranks.
        broken: whether an operation in the groups has failed.
    """

    __slots__ = ("__weakref__", "broken", "name")

    def __init__(self, name: str) -> None:
        self.name, self.broken = name, False


_HELD: "weakref.WeakValueDictionary[str, Lease]" = weakref.WeakValueDictionary()


def lease(name: str, groups: tuple[dist.ProcessGroup, ...]) -> Lease:
    """The lease of new groups.

    Args:
        name: of the groups' use; a number, equal on all ranks, is added to it.
    """
    _COUNTS[name] += 1
    made = Lease(f"{name}#{_COUNTS[name]}")
    _HELD[made.name], _GROUPS[made.name] = made, groups
    return made


def roll_call(store: Store, rank: int, ranks: int, wait: Callable[[], None], within: str = "") -> None:
    """Wait for all ranks, and destroy the groups that no rank needs; a collective call.

    Args:
        wait: returns when all ranks have called it.
        within: prefix of the leases in question, all of which these ranks have.
    """
    _COUNTS[f"{within}/call"] += 1
    names = [f"leases/{within}/{_COUNTS[f'{within}/call']}/{each}" for each in range(ranks)]
    stuck = {name for name, work in ABANDONED if not work.is_completed()}  # destroying their groups would wait for them
    mine = [name for name in {*stuck, *_HELD} if name.startswith(within)]
    world = dist.distributed_c10d._world
    known: dict[Any, Any] = world.pg_names
    store.set(names[rank], json.dumps([mine, len(known), world.group_count]))
    wait()
    answers = [json.loads(store.get(each)) for each in names]
    needed = {name for held, _, _ in answers for name in held}
    for name in [name for name in _GROUPS if name.startswith(within) and name not in needed]:
        for group in filter(is_open, _GROUPS.pop(name)):
            dist.destroy_process_group(group)
    _, existing, made = zip(*answers, strict=True)
    while len(known) < max(existing):
        known[_PlaceholderGroup()] = f"placeholder {len(known)}"
    world.group_count = max(made)


def abort_all() -> None:
    """Abort all process groups of this process, so that their operations end on the device, with wrong results."""
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()


class _PlaceholderGroup:
    """An entry in torch's table of groups, by whose length torch names a group of some of the ranks.

    With placeholders the length is equal on all ranks and never repeats. Torch calls `shutdown` or `abort` of all
    entries.
    """

    def abort(self) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""


def is_open(group: dist.ProcessGroup | None) -> bool:
    """Whether torch still has a group: other code may have destroyed it, or all groups."""
    return group in dist.distributed_c10d._world.pg_map
