"""A flat buffer and the user's parameters, which are views into it."""

import weakref
from collections.abc import Iterable

import torch
from torch import nn

from zeroshard.units.find import Unit
from zeroshard.units.index import Index
from zeroshard.units.watched_parameters import WatchedParameter, set_values, values_of

SMALL = 2**14  # elements; below it, what Python does for a tensor takes longer than copying it


def is_small(parameter: torch.Tensor) -> bool:
    """Whether a parameter is like a bias: it costs less to handle many such at once."""
    return parameter.numel() <= SMALL


class Flat:
    """The parameters of one unit that share dtype and trainability, one behind the other in one buffer.

    The technique that decides on residency (ZeRO, offload) owns the buffer; a flat only lets the parameters view
    it. `detach` leaves each parameter with its true shape, reading NaN and refusing writes.

    Attributes:
        unit: where the parameters come from.
        index: the table of names, shapes and offsets.
        dtype: of the parameters as the model computes with them.
        trainable: whether they get gradients and an update.
        parameters: the user's `nn.Parameter` objects, in the order of the index.
        views: of the buffer, one for each parameter.
        kinds: the classes of watched parameters, while their values are present and while they are absent.
        replaced: the numbers of parameters whose memory the user replaced (`p.data = values`).
        first_small: the number from which on all parameters are small; at least one is not.
    """

    def __init__(
        self,
        unit: Unit,
        parameters: dict[str, nn.Parameter],
        dtype: torch.dtype,
        trainable: bool,
        ranks: int,
        split: str | None = None,
    ) -> None:
        self.unit, self._split = unit, split
        self.index = Index.of([(name, parameter.shape) for name, parameter in parameters.items()], ranks)
        self.dtype = dtype
        self.trainable = trainable
        self.parameters = list(parameters.values())
        big = [number for number, parameter in enumerate(self.parameters) if not is_small(parameter)]
        self.first_small = max([0, *big]) + 1
        self.views: list[torch.Tensor] = []
        self.kinds: tuple[type[nn.Parameter], type[nn.Parameter]] | None = None
        self.replaced: set[int] = set()
        self._absent = torch.empty(())
        self._nowhere: list[torch.Tensor] = []  # it, in the shapes of the parameters
        self._aliases: dict[int, torch.Tensor] = {}  # of what `p.data` returned, by number
        self._lent: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        self._past_edits = 0
        self._addresses: list[int] = []  # of the views, when they were last looked at

    @property
    def label(self) -> str:
        """The name in messages and tables; where a unit has several flats, their kinds tell them apart."""
        kinds = [str(self.dtype).removeprefix("torch."), "" if self.trainable else "frozen", self._split or ""]
        return f"{self.unit.label}[{', '.join(filter(None, kinds))}]"

    def view(self, buffer: torch.Tensor, number: int) -> torch.Tensor:
        """The part of `buffer` [padded] that is parameter `number`, in its true shape."""
        entry = self.index.entries[number]
        return buffer[entry.offset : entry.stop].view(entry.shape)

    def bind(self, buffer: torch.Tensor) -> None:
        """Make `buffer` [padded] the place of the parameters."""
        self.views = [self.view(buffer, number) for number in range(len(self.parameters))]
        self._absent = torch.full((), float("nan") if self.dtype.is_floating_point else 0, device=buffer.device).to(
            self.dtype
        )
        self._nowhere = []

    def watch(self, kinds: tuple[type[nn.Parameter], type[nn.Parameter]], present: bool) -> None:
        """Make the parameters watched ones ([Note: watched parameters]); those of other classes stay as they are.

        Args:
            present: whether their values are on this rank now.
        """
        if all(
            type(parameter) is nn.Parameter or isinstance(parameter, WatchedParameter) for parameter in self.parameters
        ):
            self.kinds = kinds
            self._show(present)

    def attach(self) -> None:
        """Let every parameter view the buffer, which holds its values."""
        self._show(present=True)
        self._put(self.views)
        self.replaced.clear()

    def detach(self) -> None:
        """Take the buffer away from the parameters: one NaN, seen in every element of the true shape."""
        if not self._nowhere:
            self._nowhere = [self._absent.expand(entry.shape) for entry in self.index.entries]
        self._put(self._nowhere)
        self._show(present=False)

    def _put(self, values: Iterable[torch.Tensor]) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # asking each parameter takes half the time so
            for parameter, tensor in zip(self.parameters, values, strict=True):
                set_values(parameter, tensor)

    def _show(self, present: bool) -> None:
        if self.kinds is not None:
            kind = self.kinds[0 if present else 1]
            for parameter in self.parameters:
                parameter.__class__ = kind

    def alias(self, number: int) -> torch.Tensor:
        """What `p.data` returns: a detached tensor over the same memory, whose writes count as edits."""
        values = values_of(self.parameters[number])
        known = self._aliases.get(number)
        if known is None or not known.is_set_to(values):
            self._past_edits += known._version if known is not None else 0
            known = self._aliases[number] = values
        lent = known.detach()
        others = [other for other in self._lent.get(number, ()) if other() is not None]
        self._lent[number] = [*others, weakref.ref(lent)]
        return lent

    def take_over(self, number: int) -> None:
        """Copy the values of a parameter whose memory was replaced into the buffer, and let it view that again.

        Tensors that `p.data` returned before keep the values that they have: they get memory of their own.
        """
        parameter, view = self.parameters[number], self.views[number]
        values = values_of(parameter)
        lent = [tensor for ref in self._lent.pop(number, ()) if (tensor := ref()) is not None]
        kept = None
        for tensor in lent:
            if tensor.is_set_to(view):
                kept = view.clone() if kept is None else kept
                set_values(tensor, kept)
        view.copy_(values)
        self.restore(number)
        self._past_edits += 1

    def restore(self, number: int) -> None:
        """Let a parameter view the buffer again, with the values there."""
        set_values(self.parameters[number], self.views[number])
        self.replaced.discard(number)

    def moved(self) -> list[int]:
        """The numbers of the parameters that do not view the buffer, whatever replaced their memory."""
        if list(map(torch.Tensor.data_ptr, self.parameters)) == self._addresses:
            return []
        self._addresses = list(map(torch.Tensor.data_ptr, self.views))
        pairs = zip(self.parameters, self.views, strict=True)
        return [number for number, (parameter, view) in enumerate(pairs) if parameter.data_ptr() != view.data_ptr()]

    @property
    def aliases(self) -> int:
        """How many tensors over the buffer are kept here of those that `p.data` returned."""
        return sum(alias.is_set_to(self.views[number]) for number, alias in self._aliases.items())

    @property
    def edits(self) -> int:
        """How often the parameters were written in place, so far, through `p.data` too."""
        versions = sum(parameter._version for parameter in self.parameters)
        if self._aliases:
            versions += sum(alias._version for alias in self._aliases.values())
        return versions + self._past_edits

    def written_while_absent(self) -> bool:
        """Whether a parameter was written while its values were absent (`fill_` cannot be refused)."""
        return self.dtype.is_floating_point and not bool(self._absent.isnan())
