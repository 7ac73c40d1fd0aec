"""Owners: whole parameters dealt out to the ranks that slice a unit, for optimizers that need whole tensors.

Muon, Adafactor, Shampoo and others look at more than one element at a time. So the slices of a unit lie between borders
of its parameters (`Index.bounds`), and each parameter is updated by one rank, as in one process. Parameters are dealt
out over all units, the largest of each unit first, to the rank that owns the fewest elements so far: the most that a
rank owns is above the mean by less than the largest parameter (longest processing time first; Graham, 1969).
"""

from collections.abc import Hashable, Mapping

from torch import nn


class Owners:
    """Deals out parameters, unit by unit.

    Args:
        deals: whether parameters have owners at all; otherwise slices are even.
    """

    def __init__(self, deals: bool) -> None:
        self._deals = deals
        self._owned: dict[Hashable, list[int]] = {}  # elements, by rank

    def deal(
        self, members: Mapping[str, nn.Parameter], among: Hashable, ranks: int
    ) -> tuple[dict[str, nn.Parameter], list[int] | None]:
        """The parameters of a flat in the order of their owners, and those; None for even slices.

        Args:
            among: the group of ranks, for the balance over all units.
            ranks: in it.
        """
        if not self._deals or ranks == 1:
            return dict(members), None
        owned = self._owned.setdefault(among, [0] * ranks)
        owners: dict[str, int] = {}
        for name, parameter in sorted(members.items(), key=lambda item: -item[1].numel()):
            owners[name] = min(range(ranks), key=owned.__getitem__)
            owned[owners[name]] += parameter.numel()
        ordered = sorted(members, key=owners.__getitem__)  # as before, among those of one rank
        return {name: members[name] for name in ordered}, [owners[name] for name in ordered]

    @property
    def shares(self) -> list[list[int]]:
        """The elements that each rank owns, for each group of ranks."""
        return list(self._owned.values())
