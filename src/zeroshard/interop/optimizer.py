"""The engine in the place of an optimizer, for trainers of other packages that call `step` on one."""

from collections.abc import Callable
from typing import Any

import torch

from zeroshard.engine import Engine, StepResult
from zeroshard.errors import OptimizerError


class EngineOptimizer(torch.optim.Optimizer):
    """Its `step` is the engine's. The parameter groups are those of `engine.optimizer`, so schedulers may hold either.

    Attributes:
        result: what the last step did; None before the first.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.optimizer.param_groups, {})
        self.engine = engine
        self.result: StepResult | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, which runs forwards and backwards, then update the weights; returns what it returned."""
        loss = closure() if closure is not None else None
        self.result = self.engine.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard what the backwards since the last step added up; a step consumes it by itself."""
        self.engine.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Refused.

        Raises:
            OptimizerError: always; a rank has only its slices of the states.
        """
        raise OptimizerError(
            "The optimizer's states are in slices, one per rank. Save them with engine.save(folder), and switch off "
            "what saves the optimizer besides (in transformers, save_only_model=True)."
        )
