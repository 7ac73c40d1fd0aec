"""CutStates of the partitioner: the sets of layers that can stand before a cut, for chains and for graphs.

A set that has all that its layers read is named by its antichain, those of its layers that no other of the set reads
(`Graph.antichain_dag` of the authors' program); a chain has one for each layer. Layers side by side multiply their
number, so two steps make fewer of more than a few:

- layers that cost nothing and send nothing stand in the first set that can have them, and in no stage of their own,
  where they would keep a device idle;
- then each branch is one layer, which is no longer exact.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from zeroshard.errors import PlanError
from zeroshard.pipeline.partition.graph import LayerGraph
from zeroshard.pipeline.partition.profile import LayerCost

FEW_STATES, MOST_STATES = (
    300,
    1500,
)  # the dynamic program takes time with their square on one level, with their cube on more


@dataclass(frozen=True)
class CutStates:
    """CutStates in an order in which each comes after those that it includes; the last has all layers.

    A range (i, j) has the layers of the state j without those of the state i - 1, which j includes; i = 0 leaves out
    none.

    Attributes:
        layers: as given.
        places: layers that can be told apart by a cut.
        seconds: of the layers of each state, forward and backward, after a 0 for the state without layers; so are
            `parameters` and `saved`, in bytes.
        sent: bytes that cross a cut behind each state.
        inside: the states that each includes, itself not.
        merged: whether branches were taken as one layer each, as there were too many states.
        orders: the layers of each state as positions; empty for a chain, and so is `graph`.
    """

    layers: Sequence[LayerCost]
    places: int
    seconds: Sequence[float]
    parameters: Sequence[int]
    saved: Sequence[int]
    sent: Sequence[int]
    inside: Sequence[Sequence[int]]
    merged: bool = False
    orders: Sequence[Sequence[int]] = ()
    graph: LayerGraph | None = None

    def __len__(self) -> int:
        return len(self.sent)

    def within(self, i: int, j: int) -> Sequence[int]:
        """CutStates inside j from i on, among them all between which a range (i, j) can be cut."""
        return self.inside[j][bisect_left(self.inside[j], i) :]

    def starts(self, j: int) -> list[int]:
        """CutStates i of all ranges (i, j)."""
        return [0, *(s + 1 for s in self.inside[j])]

    def ends(self, i: int) -> Sequence[int]:
        """CutStates j of all ranges (i, j)."""
        if i == 0 or self.graph is None:
            return range(i, len(self))
        return [j for j in range(i, len(self)) if _has(self.inside[j], i - 1)]

    def chain(self, cuts: Sequence[int]) -> tuple[tuple[LayerCost, ...], list[int]]:
        """An order of the layers in which a cut stands behind each of these states, the last of all among them; and the
        number of layers up to each cut."""
        if self.graph is None:
            return tuple(self.layers), [cut + 1 for cut in cuts]
        found: list[int] = []
        counts = []
        for cut in cuts:
            known = set(found)
            found += [layer for layer in self.orders[cut] if layer not in known]
            counts.append(len(found))
        return self.graph.chain(found), counts


def states_of(model: Sequence[LayerCost] | LayerGraph) -> CutStates:
    """The states of a chain of layers, or of a graph.

    Raises:
        PlanError: a graph with too many of them, even with its branches taken as one layer each.
    """
    return _of_graph(model) if isinstance(model, LayerGraph) else _of_chain(model)


def _of_chain(layers: Sequence[LayerCost]) -> CutStates:
    return CutStates(
        layers,
        len(layers),
        [*accumulate((y.forward_seconds + y.backward_seconds for y in layers), initial=0.0)],
        [*accumulate((y.parameter_bytes for y in layers), initial=0)],
        [*accumulate((y.saved_bytes for y in layers), initial=0)],
        [y.activation_bytes for y in layers],
        [range(j) for j in range(len(layers))],
    )


def _has(numbers: Sequence[int], number: int) -> bool:
    place = bisect_left(numbers, number)
    return place < len(numbers) and numbers[place] == number


def _of_graph(graph: LayerGraph) -> CutStates:
    order = graph.order()
    singles = [[layer] for layer in order]
    for groups, free_first, most in (
        (singles, False, FEW_STATES),
        (singles, True, MOST_STATES),
        (_branches(graph, order), True, MOST_STATES),
    ):
        grouped = _Groups(graph, groups, free_first)
        if (sets := grouped.sets(most)) is not None:
            return grouped.states(sets, merged=groups is not singles)
    raise PlanError(
        f"The graph of {len(graph.layers)} layers has more than {MOST_STATES} places for a cut, even with each branch "
        f"taken as one layer; merge layers of branches that lie side by side in the profile."
    )


def _branches(graph: LayerGraph, order: Sequence[int]) -> list[list[int]]:
    """Runs of layers of which each is the only reader of the one before it and reads nothing else."""
    readers = graph.readers()
    read: list[set[int]] = [set() for _ in graph.layers]
    for source, reader in graph.edges:
        read[reader].add(source)
    runs: dict[int, list[int]] = {}  # by the last layer
    for layer in order:
        before = next(iter(read[layer])) if len(read[layer]) == 1 else None
        joined = before is not None and len(readers[before]) == 1
        runs[layer] = [*(runs.pop(before) if joined and before is not None else []), layer]
    return sorted(runs.values(), key=lambda run: order.index(run[0]))


class _Groups:
    """Groups of layers that no cut divides, in an order in which each follows all that it reads."""

    def __init__(self, graph: LayerGraph, groups: Sequence[Sequence[int]], free_first: bool) -> None:
        self.graph, self.groups = graph, groups
        of = {layer: n for n, group in enumerate(groups) for layer in group}
        self.needs = [0] * len(groups)  # as bits: the groups that each reads
        self.readers = [0] * len(groups)
        for source, reader in graph.edges:
            a, b = of[source], of[reader]
            if a != b:
                self.needs[b] |= 1 << a
                self.readers[a] |= 1 << b
        costs = [[graph.layers[layer] for layer in group] for group in groups]
        self.seconds = [sum(y.forward_seconds + y.backward_seconds for y in part) for part in costs]
        self.parameters = [sum(y.parameter_bytes for y in part) for part in costs]
        self.saved = [sum(y.saved_bytes for y in part) for part in costs]
        self.sent = [part[-1].activation_bytes for part in costs]
        costs_of = zip(self.seconds, self.parameters, self.saved, self.sent, strict=True)
        self.free = [n for n, each in enumerate(costs_of) if free_first and not any(each)]

    def sets(self, most: int) -> dict[int, tuple[int, int]] | None:
        """Each set, as bits, with the set it was made from and the group that was added; None where they are too many.

        The first is the set before any cut.
        """
        found = {self._with_free(0): (0, -1)}
        queue = list(found)
        for members in queue:
            for group, needs in enumerate(self.needs):
                if not members >> group & 1 and needs & members == needs:
                    more = self._with_free(members | 1 << group)
                    if more not in found:
                        found[more] = (members, group)
                        queue.append(more)
            if len(queue) > most:
                return None
        return found

    def _with_free(self, members: int) -> int:
        for group in self.free:  # each follows all that it reads, so once is enough
            if self.needs[group] & members == self.needs[group]:
                members |= 1 << group
        return members

    def states(self, found: dict[int, tuple[int, int]], merged: bool) -> CutStates:
        first, *sets = found  # by their number of groups that are not free, as `sets` finds them one group at a time
        sets = sets or [first]
        seconds, parameters, saved = {first: 0.0}, {first: 0}, {first: 0}
        for members in sets:
            before, group = found[members]
            if group >= 0:  # the only set there is has no group that was added
                seconds[members] = seconds[before] + self.seconds[group]
                parameters[members] = parameters[before] + self.parameters[group]
                saved[members] = saved[before] + self.saved[group]
        inside = [[s for s in range(j) if not sets[s] & ~sets[j]] for j in range(len(sets))]
        orders = [self._layers(members) for members in sets]
        places = len(self.groups) - len(self.free)
        sent = [self._crossing(members) for members in sets]
        return CutStates(
            self.graph.layers,
            places,
            [0.0, *(seconds[members] for members in sets)],
            [0, *(parameters[members] for members in sets)],
            [0, *(saved[members] for members in sets)],
            sent,
            inside,
            merged=merged,
            orders=orders,
            graph=self.graph,
        )

    def _crossing(self, members: int) -> int:
        """Bytes of the outputs of these groups that others read."""
        return sum(
            nbytes for group, nbytes in enumerate(self.sent) if members >> group & 1 and self.readers[group] & ~members
        )

    def _layers(self, members: int) -> list[int]:
        return [layer for group, part in enumerate(self.groups) if members >> group & 1 for layer in part]
