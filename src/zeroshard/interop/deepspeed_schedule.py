"""DeepSpeed's warm-up schedules of the learning rate (its `runtime/lr_schedules.py`), step for step, for torch.

As in DeepSpeed, whose schedule counts from -1, the first two updates have the lowest rate.
"""

import math
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler


class DeepSpeedSchedule(LRScheduler):
    """Warm up from a low rate to a high one over `warmup_num_steps` updates, then stay there or decay.

    Call `step()` after each `engine.step()` that was not skipped.

    Args:
        optimizer: the engine's `optimizer`.
        kind: "WarmupLR" stays; "WarmupDecayLR" falls linearly to 0 at `total_num_steps`; "WarmupCosineLR" follows half
            a cosine to `cos_min_ratio`, and takes shares of the optimizer's own rate in place of rates.
        options: DeepSpeed's parameters of that schedule, with its defaults.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kind: Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"],
        **options: Any,
    ) -> None:
        self.kind = kind
        self.options = {name: value for name, value in options.items() if value is not None}
        self.warmup = max(2, self.options.get("warmup_num_steps", 1000))
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """The rate of each parameter group for the next update."""
        rate = self._cosine_rate if self.kind == "WarmupCosineLR" else self._rate
        return [rate(base, max(self.last_epoch - 1, 0)) for base in self.base_lrs]

    def _rate(self, base: float | torch.Tensor, at: int) -> float | torch.Tensor:
        low = self.options.get("warmup_min_lr", 0.0)
        high = self.options.get("warmup_max_lr", 0.001 if self.kind == "WarmupDecayLR" else base)
        share = self._rising(at) if at < self.warmup else 1.0
        if at >= self.warmup and self.kind == "WarmupDecayLR":
            total = self.options["total_num_steps"]
            share = max(0.0, (total - at) / max(1, total - self.warmup))
        rate: float | torch.Tensor = low + (high - low) * share
        return rate

    def _cosine_rate(self, base: float | torch.Tensor, at: int) -> float | torch.Tensor:
        if at < self.warmup:
            low = self.options.get("warmup_min_ratio", 0.0)
            share = low + (1 - low) * self._rising(at) if self.last_epoch > 0 else 0.0
        else:
            low = self.options.get("cos_min_ratio", 0.0001)
            done = min(1.0, (at - self.warmup + 1) / max(1, self.options["total_num_steps"] - self.warmup))
            share = low + (1 - low) * (1 + math.cos(math.pi * done)) / 2
        rate: float | torch.Tensor = base * share
        return rate

    def _rising(self, at: int) -> float:
        linear = self.options.get("warmup_type") == "linear"
        return float(at / self.warmup if linear else math.log(at + 1) / math.log(self.warmup))
