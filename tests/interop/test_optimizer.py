"""The engine as an optimizer for trainers of other packages."""

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.errors import OptimizerError
from zeroshard.interop import EngineOptimizer


def test_schedules_find_groups_and_defaults() -> None:
    """Some of transformers read `defaults`, such as the polynomial one."""
    engine = zs.Engine(nn.Linear(2, 1), lambda ps: torch.optim.AdamW(ps, lr=0.5), zs.Plan(zero=2))
    optimizer = EngineOptimizer(engine)
    assert optimizer.defaults == engine.optimizer.defaults and optimizer.defaults["lr"] == 0.5
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1)
    assert engine.optimizer.param_groups[0]["lr"] == 0.05
    with pytest.raises(OptimizerError, match="states are in slices"):
        optimizer.state_dict()
