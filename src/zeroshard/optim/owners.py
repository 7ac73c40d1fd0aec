"""Owners: whole parameters dealt out to the ranks that slice them, for optimizers that need whole tensors.

Muon, Adafactor, Shampoo and others look at more than one element at a time. So the slices of a unit lie between borders
of its parameters (`Index.bounds`), and each parameter is updated by one rank, as in one process. Parameters of all
units are dealt out together, the most costly first, to the rank with the least so far: the most that a rank has is
above the mean by less than the most costly parameter (longest processing time first; Graham, 1969).

The ranks of a group are numbered by what they keep: rank 0 is the one with the most bytes, its largest parameter
counted twice for the temporaries of the update; the others follow with ever fewer. The planner relies on it.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping

import torch
from torch import nn

from zeroshard.optim.probe import StateSizes
from zeroshard.parts.place import Place, PlaceKind

WIDTH = 4  # bytes of an element that is updated, in fp32
Kinds = Mapping[tuple[torch.dtype, bool, PlaceKind], Mapping[str, nn.Parameter]]  # of a unit


class Owners:
    """The owners of the parameters of all flats that are updated whole.

    Args:
        flats: the parameters of each, the group of ranks that slices it, and how many ranks that is.
        states: bytes of the optimizer states of a parameter.
        kept: bytes that its owner keeps for each element, and other ranks do not, beside those states.
        optimizer: its name.
    """

    def __init__(
        self,
        flats: Iterable[tuple[Iterable[nn.Parameter], Hashable, int]] = (),
        states: Callable[[nn.Parameter], int] = nn.Parameter.numel,
        kept: int = 0,
        optimizer: str = "The optimizer",
    ) -> None:
        self._states, self._kept, self._optimizer = states, kept, optimizer
        self._owners: dict[nn.Parameter, int] = {}
        self._groups: dict[Hashable, list[list[nn.Parameter]]] = {}  # by rank
        members: dict[tuple[Hashable, int], list[nn.Parameter]] = {}
        for parameters, among, ranks in flats:
            members.setdefault((among, ranks), []).extend(parameters)
        for (among, ranks), parameters in members.items():
            if ranks > 1:
                self._groups[among] = self._deal(parameters, ranks)
                self._owners |= {p: rank for rank, owned in enumerate(self._groups[among]) for p in owned}

    def order(self, members: Mapping[str, nn.Parameter]) -> tuple[dict[str, nn.Parameter], list[int] | None]:
        """The parameters of a flat in the order of their owners, and those; None for even slices."""
        if any(parameter not in self._owners for parameter in members.values()):
            return dict(members), None
        ordered = sorted(members, key=lambda name: self._owners[members[name]])  # as before, among those of one rank
        return {name: members[name] for name in ordered}, [self._owners[members[name]] for name in ordered]

    @property
    def shares(self) -> list[list[int]]:
        """The elements that each rank owns, for each group of ranks."""
        return [[sum(p.numel() for p in owned) for owned in ranks] for ranks in self._groups.values()]

    @property
    def told(self) -> str:
        """What owners do and cost, in sentences; empty where there are none."""
        if not self._groups:
            return ""
        shares = self.shares
        fullest = max(ranks * max(of) / max(1, sum(of)) for of in shares for ranks in [len(of)])
        over = " and ".join(dict.fromkeys(f"{len(of)} ranks" for of in shares))
        return (
            f"{self._optimizer} needs whole tensors: each of {len(self._owners)} parameters is updated by one owner "
            f"among {over}. The fullest rank owns {fullest:.2f} times the mean of elements; as many elements go over "
            f"the wire as with even slices."
        )

    def _deal(self, parameters: list[nn.Parameter], ranks: int) -> list[list[nn.Parameter]]:
        """The parameters of each rank."""
        costs = {p: WIDTH * p.numel() + self._states(p) for p in parameters}
        owned: list[list[nn.Parameter]] = [[] for _ in range(ranks)]
        loads = [0] * ranks
        for parameter in sorted(parameters, key=lambda p: -costs[p]):
            rank = min(range(ranks), key=loads.__getitem__)
            owned[rank].append(parameter)
            loads[rank] += costs[parameter]
        kept = [sum(self._kept * p.numel() + self._states(p) for p in of) for of in owned]
        peaks = [nbytes + max((costs[p] for p in of), default=0) for nbytes, of in zip(kept, owned, strict=True)]
        first = max(range(ranks), key=peaks.__getitem__)
        others = sorted(set(range(ranks)) - {first}, key=lambda rank: -kept[rank])
        return [owned[rank] for rank in (first, *others)]


def deal_out(
    units: Iterable[Kinds],
    place_of: Callable[[PlaceKind], Place],
    groups: Mapping[nn.Parameter, int],
    optimizer: torch.optim.Optimizer,
    apart: int,
) -> Owners:
    """Owners of all trained parameters of some units.

    Args:
        groups: the parameter group of each parameter.
        apart: bytes of an element that its owner keeps and other ranks do not, beside the optimizer's states.
    """
    sizes = StateSizes(optimizer)
    flats = [
        (members.values(), (axis := place_of(kind).slices).comm, axis.size)
        for kinds in units
        for (_, trainable, kind), members in kinds.items()
        if trainable
    ]
    return Owners(flats, lambda p: sizes.of(groups[p], p), apart, type(optimizer).__name__)
