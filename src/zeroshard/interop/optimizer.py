"""The engine as an optimizer, for trainers of other packages that call `step` on one."""

from collections.abc import Callable
from typing import Any

import torch

from zeroshard.engine import Engine, StepResult
from zeroshard.errors import OptimizerError


class EngineOptimizer(torch.optim.Optimizer):
    """An optimizer whose `step` is the engine's.

    Its parameter groups are those of `engine.optimizer`, so schedulers may hold either.

    Attributes:
        result: of the last step; None before the first.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.optimizer.param_groups, engine.optimizer.defaults)
        self.param_groups = engine.optimizer.param_groups  # the list too, which may get new groups
        self.engine = engine
        self.result: StepResult | None = None

    def __getattr__(self, name: str) -> Any:
        """Further methods of the user's optimizer, such as `train` and `eval`."""
        if name.startswith("_") or "engine" not in vars(self):
            raise AttributeError(name)
        return getattr(self.engine.optimizer, name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; once an engine exists, of parameters that it has frozen.

        Raises:
            OptimizerError: with the way out.
        """
        if "engine" not in vars(self):
            super().add_param_group(param_group)
        else:
            self.engine.optimizer.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, which runs forwards and backwards, then update the weights; returns the closure's result."""
        loss = closure() if closure is not None else None
        self.result = self.engine.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients summed since the last step; a step consumes them by itself."""
        self.engine.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Refused.

        Raises:
            OptimizerError: always; a rank has only its slices of the states.
        """
        raise OptimizerError(
            "The optimizer's states are in slices, one per rank. Save them with engine.save(folder), and switch off "
            "the trainer's own saving of it (in transformers, save_only_model=True)."
        )
