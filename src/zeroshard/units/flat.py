"""A flat buffer and the user's parameters, which are views into it."""

import torch
from torch import nn

from zeroshard.units.find import Unit
from zeroshard.units.index import Index

SMALL = 2**14  # elements; below it, what Python does for a tensor takes longer than copying it


def is_small(parameter: torch.Tensor) -> bool:
    """Whether a parameter is like a bias: it costs less to handle many such at once."""
    return parameter.numel() <= SMALL


class Flat:
    """The parameters of one unit that share dtype and trainability, one behind the other in one buffer.

    The buffer itself belongs to whoever decides on residency (ZeRO, offload); here it is only the place that the
    parameters view. `detach` leaves each parameter with its true shape, reading NaN and refusing writes.

    Attributes:
        unit: where the parameters come from.
        index: the table of names, shapes and offsets.
        dtype: of the parameters as the model computes with them.
        trainable: whether they get gradients and an update.
        parameters: the user's `nn.Parameter` objects, in the order of the index.
        views: where each of them is in the buffer.
        first_small: the number from which on all parameters are small; at least one is not.
    """

    def __init__(
        self, unit: Unit, parameters: dict[str, nn.Parameter], dtype: torch.dtype, trainable: bool, ranks: int
    ) -> None:
        self.unit = unit
        self.index = Index.of([(name, parameter.shape) for name, parameter in parameters.items()], ranks)
        self.dtype = dtype
        self.trainable = trainable
        self.parameters = list(parameters.values())
        big = [number for number, parameter in enumerate(self.parameters) if not is_small(parameter)]
        self.first_small = max([0, *big]) + 1
        self.views: list[torch.Tensor] = []
        self._absent = torch.empty(())

    @property
    def label(self) -> str:
        """The name that people see; where a unit has several flats, their kinds tell them apart."""
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.unit.label}[{kind}{'' if self.trainable else ', frozen'}]"

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

    def attach(self) -> None:
        """Let every parameter view the buffer, which holds its values."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view

    def detach(self) -> None:
        """Take the buffer away from the parameters: one NaN, seen in every element of the true shape."""
        for parameter in self.parameters:
            parameter.data = self._absent.expand(parameter.shape)

    @property
    def edits(self) -> int:
        """How often somebody has written into the parameters in place, so far."""
        return sum(parameter._version for parameter in self.parameters)

    def written_while_absent(self) -> bool:
        """Whether somebody wrote into a parameter whose values were elsewhere (`fill_` cannot be refused)."""
        return self.dtype.is_floating_point and not bool(self._absent.isnan())
