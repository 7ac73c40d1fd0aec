"""Owners: whole parameters dealt out to the ranks that slice them, for optimizers that need whole tensors.

Muon, Adafactor, Shampoo and others look at more than one element at a time. So the slices of a unit lie between borders
of its parameters (`Index.bounds`), and each parameter is updated by one rank, as in one process. Parameters of all
units are dealt out together, the most costly first, to the rank with the least so far: the most that a rank has is
above the mean by less than the most costly parameter (longest processing time first; Graham, 1969).

The ranks of a group are numbered by what they keep: rank 0 is the one with the most bytes, its largest parameter
counted twice for the temporaries of the update; the others follow with ever fewer. The planner relies on it.

Matrices that layers split among ranks are dealt out twice: to the ranks that slice, all parts of one to the same of
them, and then to one of the ranks that hold its parts (`zeroshard.optim.joined`). Costs are those of whole matrices, so
that ranks with uneven parts deal alike.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping

import torch
from torch import nn

from zeroshard.optim.probe import StateSizes
from zeroshard.parts.axes import Axes
from zeroshard.parts.place import Cuts, PlaceKind, Split

WIDTH = 4  # bytes of an element that is updated, in fp32
Kinds = Mapping[tuple[torch.dtype, bool, PlaceKind], Mapping[str, nn.Parameter]]  # of a unit


class Owners:
    """The owners of the parameters of all flats that are updated whole.

    Args:
        flats: the parameters of each, the group of ranks that slices it, and how many ranks that is.
        states: bytes of the optimizer states of a parameter.
        kept: bytes that its owner keeps for each element, and other ranks do not, beside those states.
        optimizer: its name.
        numel: elements of a parameter.

    Attributes:
        joined: the owners, among the ranks that hold parts of a matrix, of those matrices whose parts are in this
            rank's slices; None where no matrix is split.
    """

    joined: "Owners | None" = None

    def __init__(
        self,
        flats: Iterable[tuple[Iterable[nn.Parameter], Hashable, int]] = (),
        states: Callable[[nn.Parameter], int] = nn.Parameter.numel,
        kept: int = 0,
        optimizer: str = "The optimizer",
        numel: Callable[[nn.Parameter], int] = nn.Parameter.numel,
    ) -> None:
        self._states, self._kept, self._optimizer, self._numel = states, kept, optimizer, numel
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

    def rank_of(self, parameter: nn.Parameter) -> int | None:
        """The owner of a parameter; None if it was not dealt out."""
        return self._owners.get(parameter)

    @property
    def shares(self) -> list[list[int]]:
        """The elements that each rank owns, for each group of ranks."""
        return [[sum(map(self._numel, owned)) for owned in ranks] for ranks in self._groups.values()]

    @property
    def told(self) -> str:
        """What owners do and cost, in sentences; empty where there are none."""
        return " ".join(filter(None, (self._told_of_slices, self._told_of_joined)))

    @property
    def _told_of_joined(self) -> str:
        """Of matrices that layers split among ranks."""
        if self.joined is None or not self.joined._groups:
            return ""
        joined = self.joined
        return (
            f"Each of {len(joined._owners)} parameters that {joined._over} split is put together by one of them, which "
            f"updates it whole for {self._optimizer}. The fullest of these updates {joined._fullest:.2f} times the "
            f"mean of elements; gradients and values are sent there, and new values back."
        )

    @property
    def _told_of_slices(self) -> str:
        """Of parameters that ranks slice."""
        if not self._groups:
            return ""
        return (
            f"{self._optimizer} needs whole tensors: each of {len(self._owners)} parameters is updated by one owner "
            f"among {self._over}. The fullest rank owns {self._fullest:.2f} times the mean of elements; as many "
            f"elements go over the wire as with even slices."
        )

    @property
    def _over(self) -> str:
        """The numbers of ranks among which parameters were dealt out."""
        return " and ".join(dict.fromkeys(f"{len(of)} ranks" for of in self.shares))

    @property
    def _fullest(self) -> float:
        """The elements of the rank with the most, over the mean of its group."""
        return max(len(of) * max(of) / max(1, sum(of)) for of in self.shares)

    def _deal(self, parameters: list[nn.Parameter], ranks: int) -> list[list[nn.Parameter]]:
        """The parameters of each rank."""
        costs = {p: WIDTH * self._numel(p) + self._states(p) for p in parameters}
        owned: list[list[nn.Parameter]] = [[] for _ in range(ranks)]
        loads = [0] * ranks
        for parameter in sorted(parameters, key=lambda p: -costs[p]):
            rank = min(range(ranks), key=loads.__getitem__)
            owned[rank].append(parameter)
            loads[rank] += costs[parameter]
        kept = [sum(self._kept * self._numel(p) + self._states(p) for p in of) for of in owned]
        peaks = [nbytes + max((costs[p] for p in of), default=0) for nbytes, of in zip(kept, owned, strict=True)]
        first = max(range(ranks), key=peaks.__getitem__)
        others = sorted(set(range(ranks)) - {first}, key=lambda rank: -kept[rank])
        return [owned[rank] for rank in (first, *others)]


def deal_out(
    units: Iterable[Kinds],
    axes: Axes,
    groups: Mapping[nn.Parameter, int],
    optimizer: torch.optim.Optimizer,
    apart: int | None,
    cuts: Cuts,
) -> Owners:
    """Owners of all trained parameters of some units.

    Args:
        groups: the parameter group of each parameter.
        apart: bytes of an element that its owner keeps and other ranks do not, beside the optimizer's states; None if
            every rank updates everything, so that only parts of matrices have owners.
        cuts: the places of parameters that are parts of larger ones.
    """
    flats = [
        (list(members.values()), axes.place(kind).slices)
        for kinds in units
        for (_, trainable, kind), members in kinds.items()
        if trainable
    ]
    sizes, wholes = StateSizes(optimizer), {p: cut for p, cut in cuts.items() if isinstance(cut, Split) and cut.by_rank}

    def numel(p: nn.Parameter) -> int:
        return math.prod(wholes[p].shape) if p in wholes else p.numel()

    def states(p: nn.Parameter) -> int:
        return sizes.of_shape(groups[p], torch.Size(wholes[p].shape) if p in wholes else p.shape, p.dtype)

    def shared(cost: Callable[[nn.Parameter], int]) -> Callable[[nn.Parameter], int]:
        return lambda p: cost(p) // (len(wholes[p].by_rank) if p in wholes else 1)

    name = type(optimizer).__name__
    sliced = [(members, axis.comm, axis.size) for members, axis in flats] if apart is not None else []
    owners = Owners(sliced, shared(states), apart or 0, name, shared(numel))
    mine = [
        ([p], wholes[p].axis, len(wholes[p].by_rank))
        for members, axis in flats
        for p in members
        if p in wholes and owners.rank_of(p) in (None, axis.rank)
    ]
    owners.joined = Owners(mine, states, 0, name, numel) if wholes else None
    return owners
