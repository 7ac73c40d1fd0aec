"""Borrowed weights: weights that a stage uses and another stage owns, as tied embeddings at both ends of a model.

The owner updates the weights and lends each new version; the borrower sums its gradients and repays them before the
owner's update. So the tied weight has one optimizer state, counts once in the norm, and follows the update rule of the
owner's stage: gradients of both uses are at one version of it.
"""

from collections.abc import Sequence

import torch
from torch import nn

from zeroshard.memory.ledger import Arena, Category, Ledger
from zeroshard.pipeline.run.weight_stashing import Site
from zeroshard.units.hooks import GradientHooks


class Borrowed:
    """The weights that one chunk borrows from one owner, concatenated in flat buffers.

    Args:
        parameters: the present parameters, with values.
        sites: module and name of each in the model.

    Attributes:
        gradient: the sum since the last repayment [numel], fp32 or wider.
        latest: number of the newest version on this rank.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], sites: Sequence[Sequence[Site]], ledger: Ledger) -> None:
        self._shapes = [p.shape for p in parameters]
        self._sites, self._ledger, self._hooks = sites, ledger, GradientHooks(parameters)
        first = parameters[0]
        self.dtype, self.device = first.dtype, first.device
        self.numel = sum(shape.numel() for shape in self._shapes)
        dtype = torch.promote_types(self.dtype, torch.float32)
        self.gradient = ledger.empty(self.numel, dtype, self.device, Category.GRADIENTS, "gradients of lent weights")
        self._free: list[tuple[torch.Tensor, list[nn.Parameter]]] = []
        self._coming: list[tuple[torch.Tensor, list[nn.Parameter]]] = []
        self._current = self._new()
        self._train_as(parameters)
        for view, parameter in zip(self._views(self._current[0]), parameters, strict=True):
            view.copy_(parameter.detach())
        self._uses: dict[int, int] = {}
        self._slot_at: dict[object, tuple[torch.Tensor, list[nn.Parameter]]] = {}
        self.latest = 0
        self._install(self._current[1])

    def begin(self, key: object) -> None:
        """Use the current version for the forward `key`; it is kept until `end(key)`."""
        self._slot_at[key] = self._current
        self._uses[id(self._current[0])] = self._uses.get(id(self._current[0]), 0) + 1
        self._install(self._current[1])

    def again(self, key: object) -> None:
        """Reinstall the version of the forward `key`, for its recomputation."""
        self._install(self._slot_at[key][1])

    def end(self, key: object) -> None:
        """Release the version of `key` after its backward."""
        slot = self._slot_at.pop(key)
        self._uses[id(slot[0])] -= 1
        if slot is not self._current and not self._uses[id(slot[0])]:
            self._free.append(slot)

    def room(self, idle: bool) -> torch.Tensor:
        """A buffer [numel] for a coming version; `take` uses the buffers in the same order.

        Args:
            idle: no forward or backward runs before `take`; the buffer may then be the current one's.
        """
        slot = self._current if idle and not self._slot_at else self._free.pop() if self._free else self._new()
        self._coming.append(slot)
        return slot[0]

    def take(self) -> None:
        """Install the next version, which has arrived in its buffer."""
        before, self._current = self._current, self._coming.pop(0)
        if before is not self._current and not self._uses.get(id(before[0])):
            self._free.append(before)
        self._train_as(before[1])
        self.latest += 1
        self._install(self._current[1])

    def repay(self, arena: Arena) -> torch.Tensor:
        """The gradient since the last call, in a buffer of `arena`; starts the next sum."""
        sent = arena.take(self.numel, self.gradient.dtype, "gradients of lent weights")
        sent.copy_(self.gradient)
        self.gradient.zero_()
        return sent

    def _new(self) -> tuple[torch.Tensor, list[nn.Parameter]]:
        buffer = self._ledger.empty(self.numel, self.dtype, self.device, Category.PARAMETERS, "borrowed weights")
        views = [nn.Parameter(view) for view in self._views(buffer)]
        sums = self._views(self.gradient)
        self._hooks.put_on(views)
        for parameter, total in zip(views, sums, strict=True):
            parameter.register_post_accumulate_grad_hook(_AddTo(total))
        return buffer, views

    def _train_as(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let the present parameters require gradients where these do; frozen ones keep their hooks."""
        for parameter, like in zip(self._current[1], parameters, strict=True):
            parameter.requires_grad_(like.requires_grad)

    def _views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        parts = buffer.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _install(self, parameters: list[nn.Parameter]) -> None:
        for parameter, sites in zip(parameters, self._sites, strict=True):
            for module, name in sites:
                module._parameters[name] = parameter


class _AddTo:
    """A hook that moves a parameter's gradient into the sum."""

    def __init__(self, total: torch.Tensor) -> None:
        self.total = total

    def __call__(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.total.add_(parameter.grad)
        parameter.grad = None
