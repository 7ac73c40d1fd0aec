"""The tensors that a user's optimizer holds: slices in its steps, and what it shows between them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Parameter

from zeroshard.errors import OptimizerError

Table = dict[Any, Any]


class HeldTensors:
    """Swaps the tensors of an optimizer's groups, and their states.

    Attributes:
        tensors: of each group, over which it steps.
        states: of each of them.
        stepping: whether the optimizer has them now, because it steps or another method of it runs over them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._shown = optimizer, False
        self.tensors: list[list[Parameter]] = []
        self.states: Table = optimizer.state
        self.stepping = False
        optimizer.register_step_pre_hook(self._refuse_user_step)

    def fill(self, tensors: list[list[Parameter]]) -> None:
        """Let these be the tensors of each group, which the optimizer holds always, unless it shows others."""
        self.tensors = tensors
        for group, members in zip(self._optimizer.param_groups, tensors, strict=True):
            group.pop("param_names", None)
            if not self._shown:
                group["params"] = members

    def show(self, parameters: Sequence[list[Parameter]], states: Table) -> None:
        """Let the optimizer have these parameters, of each group, and states between its steps."""
        self._shown = True
        for group, members in zip(self._optimizer.param_groups, parameters, strict=True):
            group["params"] = members
        self._optimizer.state = states  # type: ignore[assignment]

    @contextmanager
    def inside(
        self, members: Sequence[Sequence[Parameter]] | None = None, states: Table | None = None
    ) -> Iterator[None]:
        """Let the optimizer have other tensors of each group inside.

        Args:
            members: some of the tensors, or whole parameters; all tensors by default.
            states: of each of the members; those of the tensors by default.
        """
        optimizer = self._optimizer
        groups, shown = optimizer.param_groups, optimizer.state
        before = [group["params"] for group in groups]
        for group, tensors in zip(groups, self.tensors if members is None else members, strict=True):
            group["params"] = tensors
        optimizer.state, self.stepping = self.states if states is None else states, True  # type: ignore[assignment]
        try:
            yield
        finally:
            if states is None:  # the step may have made another table
                self.states = optimizer.state
            optimizer.state, optimizer.param_groups, self.stepping = shown, groups, False
            for group, kept in zip(groups, before, strict=True):
                group["params"] = kept

    def _refuse_user_step(self, *_: Any) -> None:
        if not self.stepping:
            raise OptimizerError(
                "The optimizer runs on slices whose gradients the engine holds, so its own step would do nothing. "
                "Call engine.step()."
            )
