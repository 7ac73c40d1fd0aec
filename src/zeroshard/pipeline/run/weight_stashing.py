"""Weight stashing: several versions of the weights of one flat buffer (PipeDream, SOSP 2019, section 3.3).

A version is a buffer with its own `nn.Parameter` objects, which are installed in the modules before each forward and
each backward. The graphs hold the objects of older versions, so a backward finds the weights of its forward after later
updates too. The values of an object are never swapped.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from zeroshard.memory.ledger import Category, Ledger
from zeroshard.units import Flat
from zeroshard.units.hooks import GradientHooks

Site = tuple[nn.Module, str]  # a module and the name of a parameter in it


class StashedVersions:
    """The versions of one flat's weights.

    Args:
        buffer: version 0 [padded], in which the flat's parameters live.
        sites: module and name of each of the flat's parameters in the model.
        made: called with the `nn.Parameter` objects of every new buffer.
        older: versions besides the latest that are kept once the pipeline is full.

    Attributes:
        older: as given.
        single: as `parts.part.Versions.single`.
        latest: number of the newest version.
    """

    single = False

    def __init__(
        self,
        flat: Flat,
        buffer: torch.Tensor,
        sites: Sequence[Sequence[Site]],
        ledger: Ledger,
        made: Callable[[Sequence[nn.Parameter]], None],
        older: int = 1,
    ) -> None:
        self.older = older
        self._flat, self._sites, self._ledger, self._made = flat, sites, ledger, made
        self._slots = [(buffer, list(flat.parameters))]
        self._hooks = GradientHooks(flat.parameters)
        self._slot_of = {0: 0}
        self._expendable = False
        self.latest = 0

    @property
    def live(self) -> list[int]:
        """The versions that are kept."""
        return sorted(self._slot_of)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The buffers of all versions, in use or free."""
        return [buffer for buffer, _ in self._slots]

    def use(self, version: int) -> None:
        """Install a version's parameters in the modules."""
        for parameter, sites in zip(self._slots[self._slot_of[version]][1], self._sites, strict=True):
            for module, name in sites:
                module._parameters[name] = parameter

    def drop(self, version: int) -> None:
        """Free a version after its last use; the latest one stays until the next replaces it."""
        if version == self.latest:
            self._expendable = True
        else:
            del self._slot_of[version]

    def advance(self) -> torch.Tensor:
        """Begin version `latest + 1` as a copy of the latest, in its place if no graph needs it; returns its buffer."""
        before = self._slot_of[self.latest]
        slot = before if self._expendable else self._free_slot()
        if self._expendable:
            del self._slot_of[self.latest]
        else:
            self._slots[slot][0].copy_(self._slots[before][0])
        self._expendable = False
        self.latest += 1
        self._slot_of[self.latest] = slot
        buffer, parameters = self._slots[slot]
        self._flat.parameters = parameters
        self._flat.bind(buffer)
        return buffer

    def restart(self) -> None:
        """Renumber the latest version as 0, and install it; nothing may be in flight."""
        self._slot_of = {0: self._slot_of[self.latest]}
        self.latest = 0
        self._expendable = False
        self.use(0)

    def _free_slot(self) -> int:
        taken = set(self._slot_of.values())
        for slot in range(len(self._slots)):
            if slot not in taken:
                return slot
        first, parameters = self._slots[0]
        index = self._flat.index
        label = f"weight version {len(self._slots)} of {self._flat.label}"
        category = Category.PARAMETERS
        buffer = self._ledger.empty(first.numel(), first.dtype, first.device, category, label, index.padding)
        views = [nn.Parameter(self._flat.view(buffer, n), requires_grad=True) for n in range(len(parameters))]
        self._hooks.put_on(views)
        self._made(views)
        self._slots.append((buffer, views))
        return len(self._slots) - 1
