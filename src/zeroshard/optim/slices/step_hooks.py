"""Hooks of the user's around an optimizer's step, which see the slices of one flat at a time.

Such a hook may treat each element alone or, if the optimizer has whole parameters, each parameter alone. A norm over
all its tensors would cover only some slices of this rank. So in its first calls a hook gets copies, whose data flow is
tracked ([Note: data flow]).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zeroshard.errors import OptimizerError
from zeroshard.optim.trial.data_flow import DataFlow

CALLS = 3  # watched
OWN = "zeroshard."  # hooks of this package see no tensors
Hook = Callable[..., Any]


def watch_hooks(optimizer: torch.optim.Optimizer, whole: bool) -> None:
    """Watch the first calls of hooks registered since the last call of this function.

    Args:
        whole: whether the optimizer has whole parameters, each on one rank; else slices.
    """
    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        for key, hook in hooks.items():
            if not isinstance(hook, WatchedHook) and not getattr(hook, "__module__", "").startswith(OWN):
                hooks[key] = WatchedHook(hook, whole)


class WatchedHook:
    """A hook of the user's, which gets copies in its first calls.

    Attributes:
        hook: as given.
    """

    def __init__(self, hook: Hook, whole: bool) -> None:
        self.hook, self._whole, self._left = hook, whole, CALLS

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Call the hook.

        Raises:
            OptimizerError: it mixes data of several slices, reads values, or runs after they were used.
        """
        if not self._left:
            return self.hook(optimizer, args, kwargs)
        self._left -= 1
        groups, flow = optimizer.param_groups, DataFlow()
        members = [group["params"] for group in groups]
        given = [parameter for of_group in members for parameter in of_group]
        copies = {parameter: _copy_of(parameter) for parameter in given}
        late = Parameter(torch.zeros(2, 2))  # in place of tensors that were updated on the host
        late.grad = torch.ones(2, 2)
        for number, copy in enumerate([*copies.values(), late]):
            flow.give(copy, number)
            if copy.grad is not None:
                flow.give(copy.grad, number)
        states = optimizer.state
        try:
            for group, of_group in zip(groups, members, strict=True):
                group["params"] = [copies[parameter] for parameter in of_group] if given else [late]
            states.update({copy: states[parameter] for parameter, copy in copies.items() if parameter in states})
            with flow:
                result = self.hook(optimizer, args, kwargs)
        finally:
            for group, of_group in zip(groups, members, strict=True):
                group["params"] = of_group
            for copy in (*copies.values(), late):
                states.pop(copy, None)
        self._check(optimizer, flow, given, list(copies.values()))
        with torch.no_grad():
            for parameter, copy in copies.items():
                parameter.data.copy_(copy)
                if parameter.grad is not None and copy.grad is not None:
                    parameter.grad.copy_(copy.grad)
        return result

    def _check(
        self, optimizer: torch.optim.Optimizer, flow: DataFlow, given: list[Parameter], copies: list[Parameter]
    ) -> None:
        why = "it reads values by Python" if flow.read else None
        if not given and flow.used:
            why = "the update on the host has used gradients and states before"
        for number, copy in enumerate(copies):
            for tensor in (copy,) if copy.grad is None else (copy, copy.grad):
                origin = flow.origin(tensor)
                if origin.parameters - {number} or (origin.mixed and not self._whole):
                    why = "it mixes elements, of which each rank has slices"
        if why is not None:
            raise OptimizerError(
                f"A hook around the step of {type(optimizer).__name__} cannot run under the engine, where the step is "
                f"taken flat by flat over slices: {why}. Clip with engine.clip_grad_norm, engine.clip_grad_value or "
                f"Plan(clip_norm=...); the norm is engine.step().grad_norm."
            )


def _copy_of(parameter: Tensor) -> Parameter:
    copy = Parameter(parameter.detach().clone())
    copy.grad = None if parameter.grad is None else parameter.grad.detach().clone()
    return copy
