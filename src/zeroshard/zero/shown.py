"""What `p.grad` shows, and where autograd adds up gradients by itself.

[Note: p.grad] Between a backward and the step the gradients are in flat buffers, and `p.grad` is a stand-in that has
their shape and refuses to be read. Whoever sets it to None, or zeroes it, discards the gradient. In a backward autograd
needs a place: big parameters have None there, so that it hands over a tensor of its own, and small ones a view.
"""

from collections.abc import Callable, Sequence
from operator import is_

import torch
from torch import Tensor, nn

from zeroshard.errors import PlanError
from zeroshard.ledger import Category, Ledger
from zeroshard.units import Flat, HeldGradient

Refuse = Callable[[str], Exception]


class ShownGradients:
    """The `.grad` of the parameters of one flat.

    Args:
        first_small: the number from which on autograd adds gradients up itself ([Note: small parameters]).

    Attributes:
        small: where it does so, once `open_small` was called and there are such.
        opened: whether it does so for all parameters, in a buffer that `open` was given.
        fresh: parameters for which it did so since the last `collect`.
    """

    def __init__(self, flat: Flat, ledger: Ledger, first_small: int) -> None:
        self._flat, self._ledger, self._first_small = flat, ledger, first_small
        self.small: Tensor | None = None
        self.opened = False
        self.fresh: list[nn.Parameter] = []
        self._direct: dict[int, tuple[int, Tensor]] = {}  # by id of parameter, since hashing one is slow
        self._held: list[HeldGradient] = []
        self._zeroed: set[str] = set()  # names of parameters whose gradients the user has zeroed

    def open(self, parameters: Sequence[nn.Parameter], landing: Tensor) -> None:
        """Let autograd add the gradients of these parameters, which stand for those of the flat, into `landing`."""
        self.opened = True
        for number, parameter in enumerate(parameters):
            self._let_in(parameter, number, self._flat.view(landing, number))

    def open_small(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        """Let autograd add up the gradients of the small ones among these parameters ([Note: small parameters])."""
        index, first = self._flat.index, self._first_small
        if first == len(parameters):
            return
        offset = index.entries[first].offset
        if self.small is None:
            label = f"small gradients {self._flat.label}"
            self.small = self._ledger.empty(index.numel - offset, self._flat.dtype, device, Category.BUFFERS, label)
        for number in range(first, len(parameters)):
            entry = index.entries[number]
            view = self.small[entry.offset - offset : entry.stop - offset].view(entry.shape)
            self._let_in(parameters[number], number, view)

    def _let_in(self, parameter: nn.Parameter, number: int, view: Tensor) -> None:
        parameter.grad = view
        self._direct[id(parameter)] = (number, view)
        parameter.register_post_accumulate_grad_hook(self.fresh.append)

    def hold(self, parameters: Sequence[nn.Parameter], refuse: Refuse) -> None:
        """Have something for `p.grad` to show while the gradients are in the flat buffer.

        Args:
            refuse: makes the error of those who read it, from the parameter's name.
        """
        for parameter in parameters:
            parameter.grad = None
        if all(type(parameter.detach()) is Tensor for parameter in parameters):  # none without values, in a rehearsal
            pairs = zip(parameters, self._flat.index.entries, strict=True)
            self._held = [HeldGradient.of(parameter, entry.name, refuse) for parameter, entry in pairs]
            for held in self._held:
                held.zeroed = self._zeroed

    def collect(self) -> list[int]:
        """The numbers of the parameters whose gradients autograd has added up itself since the last call."""
        numbers = []
        for parameter in self.fresh:
            if not parameter.requires_grad:
                continue  # it was frozen after the forward, and autograd passed it over
            number, view = self._direct[id(parameter)]
            if parameter.grad is not view:  # autograd has put one of its own there, or the user has taken it away
                if parameter.grad is not None:
                    view.add_(parameter.grad.detach())
                self.hide(parameter, number)
                parameter.grad = view
            numbers.append(number)
        self.fresh.clear()
        return numbers

    def begin(self) -> None:
        """A backward begins: give autograd the place for gradients of small parameters."""
        if self.small is None:
            return
        small = self._flat.parameters[self._first_small :]
        views = [self._direct[id(parameter)][1] for parameter in small]
        try:
            for parameter, view in zip(small, views, strict=True):
                parameter.grad = view
        except (RuntimeError, TypeError):  # its module has cast one: autograd's own gradient is added to the view
            for parameter, view in zip(small, views, strict=True):
                parameter.grad = view if parameter.dtype is view.dtype else None

    def end(self, written: Sequence[int]) -> None:
        """A backward is over: let `p.grad` of small parameters say which gradients are here, by number."""
        if self.small is None:
            return
        first = self._first_small
        try:
            if self._held and all(written[first:]):
                for parameter, held in zip(self._flat.parameters[first:], self._held[first:], strict=True):
                    parameter.grad = held
                return
        except (RuntimeError, TypeError):  # as above
            pass
        for number in range(first, len(self._flat.parameters)):
            if written[number]:
                self.hide(self._flat.parameters[number], number)
            else:
                self._flat.parameters[number].grad = None

    def hide(self, parameter: Tensor, number: int) -> None:
        """Let `p.grad` of parameter `number` say that the gradient is here."""
        if parameter.dtype is not self._flat.dtype:
            self._flat.restore(number)  # its module has cast it, for the forward and backward that are over
        parameter.grad = self._held[number] if self._held else None

    def consumed(self, small: bool) -> None:
        """Let `p.grad` be None, of small parameters too if `small` says so."""
        if not self.opened:
            with torch._C.DisableTorchFunctionSubclass():  # absent parameters would ask about each
                for parameter in self._flat.parameters if small else self._flat.parameters[: self._first_small]:
                    parameter.grad = None

    def forget(self) -> None:
        """Drop what autograd has added up and nobody collected."""
        if self.small is not None and self.fresh:
            self.small.zero_()
        self.fresh.clear()

    def discarded(self, written: Sequence[int], everything: bool = False) -> tuple[list[int], list[int]]:
        """Which gradients the user has discarded since they came, and which he zeroed (all of them with `everything`).

        Raises:
            PlanError: `p.grad` is a tensor that the user has put there.
        """
        gone: list[int] = []
        zeroed: list[int] = []
        if self.opened or not self._held:
            return gone, zeroed
        with torch._C.DisableTorchFunctionSubclass():
            gradients = [parameter.grad for parameter in self._flat.parameters]
            if not (self._zeroed or everything) and all(map(is_, gradients, self._held)):
                return gone, zeroed
            for number, (gradient, held) in enumerate(zip(gradients, self._held, strict=True)):
                if gradient is held:
                    if held.parameter in self._zeroed or everything:
                        zeroed.append(number)
                elif gradient is None:
                    if written[number]:
                        gone.append(number)
                elif number < self._first_small or gradient is not self._direct[id(self._flat.parameters[number])][1]:
                    raise PlanError(
                        f"p.grad of '{self._flat.index.entries[number].name}' was set by hand; gradients of the engine "
                        f"come from backwards alone. Give this one to a backward, engine.backward((p * "
                        f"gradient).sum()), or change gradients in a hook (p.register_hook)."
                    )
        self._zeroed.clear()
        return gone, zeroed
