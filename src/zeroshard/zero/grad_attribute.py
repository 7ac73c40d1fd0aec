"""The values of `p.grad`, and the buffers into which autograd accumulates gradients by itself.

[Note: p.grad] The gradients are in flat buffers, and `p.grad` is a placeholder that has their shape and refuses to be
read. Setting it to None, or zeroing it, discards the gradient. It is None until the gradient came, so that autograd
makes a new tensor. A gradient may come once more while the placeholder of a small parameter is there; that one is
sparse and empty, since autograd adds to a sparse gradient in a new tensor.

[Note: came without a gradient] A function's backward may give None to a parameter (an expert without rows). Autograd
then calls the parameter's hooks and leaves `p.grad` as it was. Such a parameter counts as arrived, so that its unit is
complete, and not as written, so that an optimizer leaves it as it is.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from operator import attrgetter, is_

import torch
from torch import Tensor, nn

from zeroshard.errors import PlanError
from zeroshard.units import Flat, HeldGradient

REQUIRES = attrgetter("requires_grad")
SHOWN = attrgetter("grad")
DTYPE = attrgetter("dtype")


class ShownGradients:
    """The `.grad` of the parameters of one flat.

    Args:
        first_small: the number from which on autograd accumulates gradients itself ([Note: small parameters]).

    Attributes:
        opened: whether autograd accumulates all gradients, in the buffer given to `open`.
        fresh: parameters whose gradients autograd accumulated since the last `collect`.
        earlier: how many of these came before the current backward.
        empty: numbers of parameters without a gradient in an opened buffer, where that cannot be seen.
    """

    def __init__(self, flat: Flat, first_small: int) -> None:
        self._flat, self._first_small = flat, first_small
        self.opened = False
        self.fresh: list[nn.Parameter] = []
        self.earlier = 0
        self.empty: list[int] = []
        self._direct: dict[int, tuple[int, Tensor | None]] = {}  # by id of parameter, since hashing one is slow
        self._views: list[Tensor] = []  # of the buffer that was opened
        self._collected: tuple[list[nn.Parameter], list[int], list[Tensor | None]] = [], [], []
        self._held: list[Tensor | None] = []  # of the parameters last listened to
        self._zeroed: set[str] = set()  # names of parameters whose gradients the user has zeroed

    def open(self, parameters: Sequence[nn.Parameter], buffer: Tensor) -> None:
        """Make autograd accumulate the gradients of these parameters, which replace the flat's, in `buffer`."""
        self.opened = True
        self._views = [self._flat.view(buffer, number) for number in range(len(parameters))]
        for number, (parameter, view) in enumerate(zip(parameters, self._views, strict=True)):
            name, real = self._flat.index.entries[number].name, type(view) is Tensor
            parameter.grad = self._zeroable(HeldGradient.over(view, name, unreadable)) if real else view
            self._let_in(parameter, number, parameter.grad)
            parameter.register_hook(partial(_note_empty, self.empty, number))

    def listen(self, parameters: Sequence[nn.Parameter]) -> None:
        """Set the placeholders of these parameters, which replace the flat's.

        From now on autograd accumulates the gradients of the small ones itself ([Note: small parameters]).
        """
        self._held = []
        for number, (parameter, entry) in enumerate(zip(parameters, self._flat.index.entries, strict=True)):
            parameter.grad, held = None, None
            small = number >= self._first_small
            if type(parameter.detach()) is Tensor:  # with values, unlike those of a rehearsal
                made = HeldGradient.empty if small else HeldGradient.of
                held = self._zeroable(made(parameter, entry.name, unreadable))
            self._held.append(held)
            if small:
                self._let_in(parameter, number, held)

    def _let_in(self, parameter: nn.Parameter, number: int, held: Tensor | None) -> None:
        self._direct[id(parameter)] = number, held
        parameter.register_post_accumulate_grad_hook(self.fresh.append)

    def _zeroable(self, held: HeldGradient) -> HeldGradient:
        held.zeroed = self._zeroed
        return held

    def collect(self) -> tuple[list[int], Collection[int], dict[int, Tensor]]:
        """Collect the gradients that autograd has accumulated itself since the last call.

        Returns:
            the numbers of the parameters that came, in order; those of them with a gradient; and the gradients by
            number, if they are in no buffer.
        """
        with torch._C.DisableTorchFunctionSubclass():  # asking each parameter takes half the time so
            # Without those that were frozen after the forward, which autograd passed over.
            fresh = list(self.fresh) if all(map(REQUIRES, self.fresh)) else [p for p in self.fresh if p.requires_grad]
            self.fresh.clear()
            again, numbers, held = self._collected
            if len(fresh) != len(again) or not all(map(is_, fresh, again)):  # most times it is the same order
                numbers, held = [self._direct[id(p)][0] for p in fresh], [self._direct[id(p)][1] for p in fresh]
                self._collected = fresh, numbers, held
            gradients = list(map(SHOWN, fresh))
            if not self.opened:
                found = {}
                for parameter, number, each, shown in zip(fresh, numbers, gradients, held, strict=True):
                    # None came, or the user removed it since; a gradient that came twice is one sum
                    if each is not None and each is not shown:
                        found[number] = each
                        self._show(parameter, number, shown)
                return numbers, found.keys(), found
            if not all(map(is_, gradients, held)):
                for parameter, number, each, shown in zip(fresh, numbers, gradients, held, strict=True):
                    # Autograd has put its own there; or it is None, taken away by the user: `discarded` is to find it.
                    # One that came twice is one sum, and its placeholder is there again.
                    if parameter.grad is each and each is not shown and each is not None:
                        self._views[number].add_(each.detach())
                        self._show(parameter, number, shown)
        return numbers, self._filled(numbers), {}

    def _filled(self, numbers: Sequence[int]) -> Collection[int]:
        """The numbers among these whose parameters got a gradient at least once."""
        if not self.empty:
            return numbers
        filled = Counter(numbers) - Counter(self.empty)
        self.empty.clear()
        return filled.keys()

    def begin(self) -> None:
        """Begin a backward; zeroed placeholders are reset, since `take_back` has handled them."""
        self._zeroed.clear()
        self.earlier = len(self.fresh)

    def hide(self, parameter: Tensor, number: int) -> None:
        """Set `p.grad` of parameter `number`, whose gradient is in the buffer or of other ranks, to the placeholder."""
        self._show(parameter, number, self._held[number])

    def _show(self, parameter: Tensor, number: int, gradient: Tensor | None) -> None:
        if parameter.dtype is not self._flat.dtype:
            self._flat.restore(number)  # its module has cast it, for the forward and backward that are over
        parameter.grad = gradient

    def consumed(self) -> None:
        """Set `p.grad` to None."""
        if not self.opened:
            with torch._C.DisableTorchFunctionSubclass():  # absent parameters would call the engine for each
                for parameter in self._flat.parameters:
                    parameter.grad = None

    def forget(self) -> None:
        """Drop gradients that autograd accumulated and that were not collected."""
        self.fresh.clear()
        self.empty.clear()

    def refuse_late(self) -> None:
        """Refuse a gradient that autograd adds to gradients in flight to other ranks.

        Raises:
            PlanError: with the name of a parameter.
        """
        if self.opened and len(self.fresh) > len(self.empty):
            numbers = [self._direct[id(parameter)][0] for parameter in self.fresh]
            name = self._flat.index.entries[min(self._filled(numbers))].name
            raise PlanError(
                f"Autograd added to the gradient of '{name}' once more after the backward of its block, when all "
                f"gradients of the block had come and were on their way to the other replicas. The backward of an "
                f"earlier block must have run one of its own: use torch.utils.checkpoint with use_reentrant=False "
                f"there, or call no backward inside of a backward."
            )

    def discarded(self, written: Sequence[int], everything: bool = False) -> tuple[list[int], list[int]]:
        """The gradients that the user discarded since they came, and those zeroed (all of them with `everything`).

        Raises:
            PlanError: `p.grad` is a tensor that the user has set.
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
                    f"p.grad of '{name}' was set by hand; gradients of the engine come from backwards. Replace the "
                    f"whole one with engine.set_gradient(name, values), give this one to a backward, "
                    f"engine.backward((p * gradient).sum()), or change gradients in a hook (p.register_hook)."
                )
        self._zeroed.clear()
        return gone, zeroed


def _note_empty(empty: list[int], number: int, gradient: Tensor | None) -> None:
    if gradient is None:
        empty.append(number)


def unreadable(name: str) -> PlanError:
    """The error for a read of the gradient of the parameter with this name."""
    return PlanError(
        f"The gradient of '{name}' was read or changed through p.grad, and is in the engine's flat buffers, reduced "
        f"over the ranks or still to be. Read it whole with engine.gradient(name) or engine.gradients(), change it "
        f"with engine.set_gradient(name, values) or in a hook (p.register_hook), measure with engine.grad_norms(), "
        f"clip with engine.clip_grad_norm(max_norm, norm_type) or engine.clip_grad_value(value), and discard with "
        f"engine.zero_grad() or p.grad = None."
    )
