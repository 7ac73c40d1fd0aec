"""The values of `p.grad`, and the buffers into which autograd accumulates gradients by itself.

[Note: p.grad] The gradients are in flat buffers, and `p.grad` is a placeholder that has their shape and refuses to be
read. Setting it to None, or zeroing it, discards the gradient. Autograd needs a place: big parameters have None
there until their gradient came, so that it hands over a tensor of its own; the placeholder of a small parameter is a
view of the buffer in which autograd adds up, which sees no difference.
"""

from collections.abc import Sequence
from operator import attrgetter, is_

import torch
from torch import Tensor, nn

from zeroshard.errors import PlanError
from zeroshard.memory.ledger import Category, Ledger
from zeroshard.units import Flat, HeldGradient

REQUIRES = attrgetter("requires_grad")
SHOWN = attrgetter("grad")


class ShownGradients:
    """The `.grad` of the parameters of one flat.

    Args:
        first_small: the number from which on autograd adds gradients up itself ([Note: small parameters]).

    Attributes:
        small: where it does so, once `open_small` was called and there are such.
        opened: whether it does so for all parameters, in a buffer that `open` was given.
        fresh: parameters for which it did so since the last `collect`.
        earlier: how many of these before the backward under way.
    """

    def __init__(self, flat: Flat, ledger: Ledger, first_small: int) -> None:
        self._flat, self._ledger, self._first_small = flat, ledger, first_small
        self.small: Tensor | None = None
        self.opened = False
        self.fresh: list[nn.Parameter] = []
        self.earlier = 0
        self._direct: dict[int, tuple[int, Tensor, Tensor]] = {}  # by id of parameter, since hashing one is slow
        self._collected: tuple[list[nn.Parameter], list[Tensor], list[int]] = [], [], []
        self._held: list[Tensor | None] = []  # of the parameters last listened to
        self._zeroed: set[str] = set()  # names of parameters whose gradients the user has zeroed

    def open(self, parameters: Sequence[nn.Parameter], buffer: Tensor) -> None:
        """Let autograd add the gradients of these parameters, which stand for those of the flat, into `buffer`."""
        self.opened = True
        for number, parameter in enumerate(parameters):
            self._let_in(parameter, number, self._flat.view(buffer, number))

    def listen(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        """Show the gradients of these parameters, which stand for those of the flat.

        Autograd adds those of the small ones up by itself from now on ([Note: small parameters]).
        """
        index, first = self._flat.index, self._first_small
        self._held = []
        for parameter, entry in zip(parameters[:first], index.entries, strict=False):
            parameter.grad = None
            real = type(parameter.detach()) is Tensor  # with values, unlike those of a rehearsal
            self._held.append(self._zeroable(HeldGradient.of(parameter, entry.name, unreadable)) if real else None)
        if first == len(parameters):
            return
        offset = index.entries[first].offset
        if self.small is None:
            label = f"small gradients {self._flat.label}"
            self.small = self._ledger.empty(index.numel - offset, self._flat.dtype, device, Category.BUFFERS, label)
        for number in range(first, len(parameters)):
            entry = index.entries[number]
            view = self.small[entry.offset - offset : entry.stop - offset].view(entry.shape)
            self._held.append(self._let_in(parameters[number], number, view))

    def _let_in(self, parameter: nn.Parameter, number: int, view: Tensor) -> Tensor:
        name = self._flat.index.entries[number].name
        real = type(view) is Tensor
        parameter.grad = shown = self._zeroable(HeldGradient.over(view, name, unreadable)) if real else view
        self._direct[id(parameter)] = (number, view, shown)
        parameter.register_post_accumulate_grad_hook(self.fresh.append)
        return shown

    def _zeroable(self, held: HeldGradient) -> HeldGradient:
        held.zeroed = self._zeroed
        return held

    def collect(self) -> list[int]:
        """The numbers of the parameters whose gradients autograd has added up itself since the last call."""
        with torch._C.DisableTorchFunctionSubclass():  # asking each parameter takes half the time so
            fresh = self.fresh if all(map(REQUIRES, self.fresh)) else [p for p in self.fresh if p.requires_grad]
            again, shown, numbers = self._collected
            if len(fresh) == len(again) and all(map(is_, fresh, again)) and all(map(is_, map(SHOWN, fresh), shown)):
                self.fresh.clear()
                return numbers  # as most times: all is as it was, in the same order
            numbers, shown = [], []
            for parameter in fresh:  # without those that were frozen after the forward, which autograd passed over
                number, view, gradient = self._direct[id(parameter)]
                # Autograd has put its own there; or it is None, taken away by the user, which `discarded` is to find.
                if parameter.grad is not gradient and parameter.grad is not None:
                    view.add_(parameter.grad.detach())
                    self._show(parameter, number, gradient)
                numbers.append(number)
                shown.append(gradient)
        self._collected = list(fresh), shown, numbers
        self.fresh.clear()
        return numbers

    def begin(self) -> None:
        """A backward begins: what was zeroed before the first of a step was of no gradient."""
        self._zeroed.clear()
        self.earlier = len(self.fresh)

    def hide(self, parameter: Tensor, number: int) -> None:
        """Let `p.grad` of the big parameter `number` say that the gradient is here."""
        self._show(parameter, number, self._held[number])

    def _show(self, parameter: Tensor, number: int, gradient: Tensor | None) -> None:
        if parameter.dtype is not self._flat.dtype:
            self._flat.restore(number)  # its module has cast it, for the forward and backward that are over
        parameter.grad = gradient

    def consumed(self) -> None:
        """Let `p.grad` of big parameters be None."""
        if not self.opened:
            with torch._C.DisableTorchFunctionSubclass():  # absent parameters would ask about each
                for parameter in self._flat.parameters[: self._first_small]:
                    parameter.grad = None

    def forget(self) -> None:
        """Drop the gradients that autograd accumulated and no `collect` took over."""
        if self.small is not None and self.fresh:
            self.small.zero_()
        self.fresh.clear()

    def refuse_late(self) -> None:
        """Refuse what autograd has added to gradients that are on their way to other ranks.

        Raises:
            PlanError: with the name of a parameter.
        """
        if self.opened and self.fresh:
            name = self._flat.index.entries[self._direct[id(self.fresh[0])][0]].name
            raise PlanError(
                f"Autograd added to the gradient of '{name}' once more after the backward of its block, when all "
                f"gradients of the block had come and were on their way to the other replicas. The backward of an "
                f"earlier block must have run one of its own: use torch.utils.checkpoint with use_reentrant=False "
                f"there, or call no backward inside of a backward."
            )

    def discarded(self, written: Sequence[int], everything: bool = False) -> tuple[list[int], list[int]]:
        """The gradients that the user discarded since they came, and those zeroed (all of them with `everything`).

        Raises:
            PlanError: `p.grad` is a tensor that the user has put there.
        """
        gone: list[int] = []
        zeroed: list[int] = []
        if self.opened:
            return gone, zeroed
        with torch._C.DisableTorchFunctionSubclass():
            gradients = list(map(SHOWN, self._flat.parameters))
        if not (self._zeroed or everything) and all(map(is_, gradients, self._held)):
            return gone, zeroed
        for number, (gradient, held) in enumerate(zip(gradients, self._held, strict=True)):
            name = self._flat.index.entries[number].name
            if gradient is held:
                if written[number] and (everything or name in self._zeroed):
                    zeroed.append(number)
            elif gradient is None:
                if written[number]:
                    gone.append(number)
            else:
                raise PlanError(
                    f"p.grad of '{name}' was set by hand; gradients of the engine come from backwards alone. Give this "
                    f"one to a backward, engine.backward((p * gradient).sum()), or change gradients in a hook "
                    f"(p.register_hook)."
                )
        self._zeroed.clear()
        return gone, zeroed


def unreadable(name: str) -> PlanError:
    """The error for a read of the gradient of the parameter with this name."""
    return PlanError(
        f"The gradient of '{name}' was read or changed through p.grad, and is in the engine's flat buffers, reduced "
        f"over the ranks or still to be. Clip with engine.clip_grad_norm(max_norm, norm_type) or "
        f"engine.clip_grad_value(value), discard with engine.zero_grad() or p.grad = None, and change single gradients "
        f"in a hook (p.register_hook)."
    )
