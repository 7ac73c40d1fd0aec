"""Owners: whole parameters dealt out to the ranks that slice them, for optimizers that need whole tensors.

Muon, Adafactor, Shampoo and others are not elementwise. So the slices of a unit begin and end at borders of its
parameters (`Index.bounds`), and each parameter is updated by one rank, as in one process. Parameters of all units are
dealt out in one pass, the most costly first, to the rank with the lowest load: the largest load exceeds the mean by
less than the most costly parameter (longest processing time first; Graham, 1969).

[Note: cut matrices] An optimizer may update some rows of a matrix, if ranks exchange its reductions over all rows
(`row_reductions`). So a matrix that alone would overload a rank is cut: its rows are dealt out evenly to all ranks, and
it has a flat of its own, with slices between rows. While the fullest rank is overloaded, its largest matrix that can be
cut is, and the rest are dealt out again.

The ranks of a group are numbered by decreasing bytes of states: rank 0 has the most, with its largest parameter counted
twice for the temporaries of the update. The planner relies on it.

Split matrices are dealt out twice: to the ranks that slice, all parts of one to the same rank, and then to one of the
ranks that hold its parts (`optim.slices.collective_spans`). Costs are of whole matrices, so that ranks with uneven
parts get equal results.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from zeroshard.optim.algorithms.tensor_optimizer import TensorOptimizer, leading_shape
from zeroshard.optim.trial.probe_optimizers import StateSizes
from zeroshard.parts.axes import Axes
from zeroshard.parts.place import Cuts, PlaceKind, Split

WIDTH = 4  # bytes of an element that is updated, in fp32
UNEVEN = 1.05  # overload: this factor times the mean cost
LEAST = 2**20  # elements, below which a cut evens out less than 4 MiB, for an exchange or two in each step
LEAST_ROWS = 8  # of each rank: the exchange over columns is then at most an eighth of the matrix
Kinds = Mapping[tuple[torch.dtype, bool, PlaceKind], Mapping[str, nn.Parameter]]  # of a unit


class OwnedFlat(NamedTuple):
    """The parameters of one flat.

    Attributes:
        bounds: borders of the slices; None for even ones.
        label: name among the flats of the same place; empty for the flat of parameters that are not cut.
    """

    members: dict[str, nn.Parameter]
    bounds: tuple[int, ...] | None
    label: str = ""


class Owners:
    """The owners of the parameters of all flats that are updated whole.

    Args:
        flats: the parameters of each, the group of ranks that slices it, and the number of ranks.
        states: bytes of the optimizer states of a parameter.
        kept: bytes per element on the owner only, besides those states.
        optimizer: name of its class.
        numel: elements of a parameter.
        rows: number of rows of a parameter that can be cut between them; else 0.

    Attributes:
        joined: owners of the split matrices with parts in this rank's slices, among the ranks with their parts; None if
            no matrix is split.
    """

    joined: "Owners | None" = None

    def __init__(
        self,
        flats: Iterable[tuple[Iterable[nn.Parameter], Hashable, int]] = (),
        states: Callable[[nn.Parameter], int] = nn.Parameter.numel,
        kept: int = 0,
        optimizer: str = "The optimizer",
        numel: Callable[[nn.Parameter], int] = nn.Parameter.numel,
        rows: Callable[[nn.Parameter], int] = lambda _: 0,
    ) -> None:
        self._states, self._kept, self._optimizer, self._numel, self._rows = states, kept, optimizer, numel, rows
        self._owners: dict[nn.Parameter, int] = {}
        self._cut: dict[nn.Parameter, tuple[int, ...]] = {}  # at these elements
        self._groups: dict[Hashable, list[list[nn.Parameter]]] = {}  # by rank
        members: dict[tuple[Hashable, int], list[nn.Parameter]] = {}
        for parameters, among, ranks in flats:
            members.setdefault((among, ranks), []).extend(parameters)
        for (among, ranks), parameters in members.items():
            if ranks > 1:
                cut, owned = self._deal(parameters, ranks)
                self._owners |= {p: rank for rank, of_rank in enumerate(owned) for p in of_rank}
                self._cut |= {p: row_bounds(rows(p), numel(p), ranks) for p in cut}
                self._groups[among] = [[*of_rank, *cut] for of_rank in owned]

    def flats(self, members: Mapping[str, nn.Parameter], ranks: int) -> Iterator[OwnedFlat]:
        """The flats of parameters over `ranks`: one of owned parameters, ordered by owner, and one per cut matrix."""
        whole = {name: parameter for name, parameter in members.items() if parameter not in self._cut}
        if whole:
            ordered, owned = self.order(whole)
            offsets = [0, *itertools.accumulate(parameter.numel() for parameter in ordered.values())]
            firsts = [] if owned is None else [bisect.bisect_left(owned, rank) for rank in range(ranks + 1)]
            yield OwnedFlat(ordered, tuple(offsets[first] for first in firsts) or None)
        for name, parameter in members.items():
            if parameter in self._cut:
                yield OwnedFlat({name: parameter}, self._cut[parameter], f"rows of {name}")

    def order(self, members: Mapping[str, nn.Parameter]) -> tuple[dict[str, nn.Parameter], list[int] | None]:
        """The parameters of a flat in the order of their owners, and the owners; None for even slices."""
        if any(parameter not in self._owners for parameter in members.values()):
            return dict(members), None
        ordered = sorted(members, key=lambda name: self._owners[members[name]])  # as before, among those of one rank
        return {name: members[name] for name in ordered}, [self._owners[members[name]] for name in ordered]

    def rank_of(self, parameter: nn.Parameter) -> int | None:
        """The owner of a parameter; None if it was not dealt out."""
        return self._owners.get(parameter)

    def cuts(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is cut at rows."""
        return parameter in self._cut

    @property
    def shares(self) -> list[list[int]]:
        """The elements that each rank owns, for each group of ranks."""
        return [
            [sum(self._numel_on(rank, p) for p in owned) for rank, owned in enumerate(ranks)]
            for ranks in self._groups.values()
        ]

    @property
    def summary(self) -> str:
        """The owners and their cost, in sentences for `engine.owners`; empty without owners."""
        return " ".join(filter(None, (self._slices_summary, self._joined_summary)))

    @property
    def _joined_summary(self) -> str:
        """The summary of split matrices."""
        if self.joined is None or not self.joined._groups:
            return ""
        joined = self.joined
        return (
            f"Each of {len(joined._owners)} parameters that {joined._over} split is put together by one of them, which "
            f"updates it whole for {self._optimizer}. The fullest of these updates {joined._imbalance:.2f} times the "
            f"mean of elements; gradients and values are sent there, and new values back."
        )

    @property
    def _slices_summary(self) -> str:
        """The summary of sliced parameters."""
        if not self._groups:
            return ""
        cut = len(self._cut)
        rows = (
            f" The rows of {cut} larger matrices are dealt out to all of them, who exchange what an update asks of all "
            f"rows."
        )
        return (
            f"{self._optimizer} needs whole tensors: each of {len(self._owners)} parameters is updated by one owner "
            f"among {self._over}.{rows if cut else ''} The fullest rank owns {self._imbalance:.2f} times the mean of "
            f"elements; as many elements go over the wire as with even slices{', and what is asked' if cut else ''}."
        )

    @property
    def _over(self) -> str:
        """The numbers of ranks among which parameters were dealt out."""
        return " and ".join(dict.fromkeys(f"{len(of)} ranks" for of in self.shares))

    @property
    def _imbalance(self) -> float:
        """The elements of the rank with the most, over the mean of its group."""
        return max(len(of) * max(of) / max(1, sum(of)) for of in self.shares)

    def _numel_on(self, rank: int, parameter: nn.Parameter) -> int:
        """Elements of one of its parameters that a rank owns."""
        bounds = self._cut.get(parameter)
        return self._numel(parameter) if bounds is None else bounds[rank + 1] - bounds[rank]

    def _deal(self, parameters: list[nn.Parameter], ranks: int) -> tuple[list[nn.Parameter], list[list[nn.Parameter]]]:
        """The parameters to cut, and the other parameters of each rank."""
        costs = {p: WIDTH * self._numel(p) + self._states(p) for p in parameters}
        cut: dict[nn.Parameter, int] = {}
        while True:
            owned = _dealt({p: cost for p, cost in costs.items() if p not in cut}, ranks)
            fullest = max(owned, key=lambda of: sum(map(costs.__getitem__, of)))
            able = [p for p in fullest if self._numel(p) >= LEAST and self._rows(p) >= LEAST_ROWS * ranks]
            load = sum(map(costs.__getitem__, fullest)) + sum(cut.values())
            if not able or ranks * load <= UNEVEN * sum(costs.values()):
                break
            largest = max(able, key=costs.__getitem__)
            cut[largest] = costs[largest] // ranks
        kept = [sum(self._kept * self._numel(p) + self._states(p) for p in of) for of in owned]
        temporary = max(cut.values(), default=0)
        peaks = [n + max((temporary, *map(costs.__getitem__, of))) for n, of in zip(kept, owned, strict=True)]
        first = max(range(ranks), key=peaks.__getitem__)
        others = sorted(set(range(ranks)) - {first}, key=lambda rank: -kept[rank])
        return [*cut], [owned[rank] for rank in (first, *others)]


def _dealt(costs: Mapping[nn.Parameter, int], ranks: int) -> list[list[nn.Parameter]]:
    """The parameters of each rank: the most costly first, each to the rank with the lowest load."""
    owned: list[list[nn.Parameter]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for parameter in sorted(costs, key=lambda p: -costs[p]):
        rank = min(range(ranks), key=loads.__getitem__)
        owned[rank].append(parameter)
        loads[rank] += costs[parameter]
    return owned


def row_bounds(rows: int, numel: int, ranks: int) -> tuple[int, ...]:
    """The elements at which the rows of a matrix are cut evenly; the first ranks get one more row."""
    each, more = divmod(rows, ranks)
    return tuple((rank * each + min(rank, more)) * (numel // rows) for rank in range(ranks + 1))


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
        apart: bytes per element on the owner only, besides the optimizer's states; None if every rank updates
            everything, so that only split matrices have owners.
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

    def rows(p: nn.Parameter) -> int:
        return 0 if p in cuts else rows_of(optimizer, optimizer.param_groups[groups[p]], p.shape)

    name = type(optimizer).__name__
    sliced = [(members, axis.comm, axis.size) for members, axis in flats] if apart is not None else []
    owners = Owners(sliced, shared(states), apart or 0, name, shared(numel), rows)
    mine = [
        ([p], wholes[p].axis, len(wholes[p].by_rank))
        for members, axis in flats
        for p in members
        if p in wholes and owners.rank_of(p) in (None, axis.rank)
    ]
    owners.joined = Owners(mine, states, 0, name, numel) if wholes else None
    return owners


def rows_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], shape: torch.Size) -> int:
    """The number of rows of a parameter that can be cut: one matrix, of an optimizer with row reductions; else 0."""
    own = vars(type(optimizer)).get("row_states")  # a subclass may step in another way
    cuts = isinstance(optimizer, TensorOptimizer) and own is not None
    return shape[0] if cuts and len(shape) > 1 and not leading_shape(shape, group["batch_dims"]) else 0
