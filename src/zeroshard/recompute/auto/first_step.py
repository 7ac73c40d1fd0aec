"""The first step under a budget: whether it fits is known after its backwards, and until then nothing may change.

Weights and the optimizer's states change in the update alone, which comes after. Forwards draw random numbers and write
into buffers, such as running statistics; both are put back.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zeroshard.memory.ledger import Category, Ledger
from zeroshard.platform import accelerator
from zeroshard.replay.generators import PYTHON_AND_NUMPY, GeneratorStates


class FirstStep:
    """Random numbers and buffers as they were before the first forward in training.

    Args:
        model: whose buffers are kept, those of its state dict, on the host until the step is over.
        device: whose random numbers are kept, with those of the CPU.
        ledger: enters what is kept.
        reserve: makes the scratch of the update; gives the bytes of scalars that it will make.
        waits: whether no rank updates before all have agreed.

    Attributes:
        reserve, waits: as given.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, ledger: Ledger, reserve: Callable[[], int], waits: bool
    ) -> None:
        self.reserve, self.waits = reserve, waits
        self._model, self._device, self._ledger = model, device, ledger
        self._random: tuple[Tensor, Tensor | None] | None = None
        self._others = GeneratorStates(())
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        self._nbytes = 0

    def begin(self) -> None:
        """A forward in training begins; the first counts."""
        if self._random is not None:
            return
        self._random = torch.get_rng_state(), accelerator.random_state(self._device)
        self._others = GeneratorStates(PYTHON_AND_NUMPY)
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is None or buffer.is_meta or name in module._non_persistent_buffers_set:
                    continue
                self._buffers.append((module, name, buffer, buffer.detach().to("cpu", copy=True)))
        self._nbytes = sum(copy.nbytes for *_, copy in self._buffers)
        self._ledger.take(Category.BUFFERS, self._nbytes, "buffers before the first step", tier="host")

    @torch.no_grad()
    def undo(self) -> None:
        """Put everything back."""
        if self._random is None:
            return
        torch.set_rng_state(self._random[0])
        accelerator.set_random_state(self._device, self._random[1])
        self._others.put_back()
        for module, name, buffer, copy in self._buffers:
            module._buffers[name] = buffer.copy_(copy)
        self.end()

    def end(self) -> None:
        """The step is over."""
        self._ledger.give(Category.BUFFERS, self._nbytes, "buffers before the first step", tier="host")
        self._random, self._nbytes = None, 0
        self._buffers.clear()
