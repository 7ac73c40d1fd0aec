"""Steps of an optimizer over one flat that several ranks take together, by messages before, after or in the step."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from zeroshard.comm.collectives import Comm
from zeroshard.memory.ledger import Arena
from zeroshard.optim.algorithms.tensor_optimizer import Fused
from zeroshard.optim.slices.held_tensors import HeldTensors
from zeroshard.optim.slices.spans import GradientOf, SpanOptimizer
from zeroshard.optim.trial.probe import StateLayout


class CollectiveSpans(ABC):
    """In the place of a `SpanOptimizer`, for a flat whose steps are collective calls.

    Args:
        comm: of the ranks that step together.
        label: of the flat.
        arena: for what is sent.
    """

    def __init__(self, optimizer: SpanOptimizer, comm: Comm, label: str, arena: Arena) -> None:
        self._optimizer, self._comm, self._label, self._arena = optimizer, comm, label, arena

    @property
    def reads_alone(self) -> bool:
        """Whether a step leaves gradients as they are: what is sent may be made of them in place."""
        return False

    @property
    def fuses(self) -> bool:
        """Whether a step takes work around it: messages are between that and the step."""
        return False

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's."""
        return self._optimizer.optimizer

    @property
    def held(self) -> HeldTensors:
        """What the optimizer holds."""
        return self._optimizer.held

    @property
    def layout(self) -> StateLayout:
        """Of its states."""
        return self._optimizer.layout

    def state_bytes(self, number: int) -> int:
        """Bytes of the states of what this rank updates."""
        return self._optimizer.state_bytes(number)

    def join(self, number: int, gradient_of: GradientOf, then: Callable[[], None]) -> None:
        """As `step`, which has its flat to itself, and then `then`."""
        self.step(number, gradient_of)
        then()

    @abstractmethod
    def step(self, number: int, gradient_of: GradientOf, fused: Fused | None = None) -> None:
        """One optimizer step on the flat; a collective call."""
