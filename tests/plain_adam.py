"""Plain loops of the tests, in which Adam on CPUs is the engine's, so that runs are compared with them bit for bit.

The update itself is held against its equations and against torch's own loop in tests/optim/host/test_adam.py, and that
an engine's optimizer has it in tests/optim/host/test_in_memory.py. `foreach=False` asks for torch's own loop in both.
"""

from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


def adam_as_in_engines() -> None:
    """From now on, let every torch.optim.Adam and AdamW of this process update by the kernel on CPUs."""
    from zeroshard.optim import fast_on_cpus

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        fast_on_cpus(optimizer)

    register_optimizer_step_pre_hook(hook)
