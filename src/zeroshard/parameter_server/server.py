"""The parameter server: the weights, their optimizer, and the clock of each worker.

A monitor without a thread of its own: the thread that brings a gradient applies it, under one lock, so that

    w(t+1) = w(t) - update(gradient at w(t - staleness)).
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from zeroshard.errors import CommError
from zeroshard.memory.ledger import Category, Ledger


class Wire:
    """Flat host buffers of a worker's messages, one per dtype, with a view for each tensor.

    Attributes:
        buffers: 1-D, each one message.
        views: in the order and the shapes of the tensors.
    """

    def __init__(self, like: Sequence[torch.Tensor], ledger: Ledger, label: str) -> None:
        views: dict[int, torch.Tensor] = {}
        self.buffers: list[torch.Tensor] = []
        for dtype in dict.fromkeys(tensor.dtype for tensor in like):
            numbers = [number for number, tensor in enumerate(like) if tensor.dtype == dtype]
            numels = [like[number].numel() for number in numbers]
            ledger.take(Category.BUFFERS, sum(numels) * dtype.itemsize, label, tier="host")
            buffer = torch.zeros(sum(numels), dtype=dtype)
            for number, part in zip(numbers, buffer.split(numels), strict=True):
                views[number] = part.view(like[number].shape)
            self.buffers.append(buffer)
        self.views = [views[number] for number in range(len(like))]

    @torch.no_grad()
    def pack(self, tensors: Sequence[torch.Tensor | None]) -> list[bool]:
        """Copy tensors into their views; returns which of them exist."""
        for view, tensor in zip(self.views, tensors, strict=True):
            if tensor is not None:
                view.copy_(tensor)
        return [tensor is not None for tensor in tensors]

    @torch.no_grad()
    def unpack(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite the tensors with their views."""
        for view, tensor in zip(self.views, tensors, strict=True):
            tensor.copy_(view)


TICK = 1.0  # seconds between messages to a blocked worker, before it looks for a hang
OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Reply:
    """The server's reply, beside the weights.

    Attributes:
        version: number of updates in the weights, by all workers.
        lead: steps that this worker is ahead of the slowest one that still trains.
        staleness: updates of other workers between the weights that its gradient was taken at and its own update.
        waited: seconds that it was blocked for slower workers.
    """

    version: int
    lead: int
    staleness: int = 0
    waited: float = 0.0


class Server:
    """The weights, on the host, and the clocks of the workers.

    Args:
        parameters: the initial weights, which are copied.
        optimizer: makes the optimizer over the copies.
        workers: number of workers.
        bound: steps that a worker may be ahead of the slowest (the SSP paper's s); None for no bound.

    Attributes:
        weights: after the latest update.
        clocks: number of updates by each worker.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        optimizer: OptimizerFactory,
        workers: int,
        bound: int | None,
        ledger: Ledger,
    ) -> None:
        ledger.take(Category.MASTER_WEIGHTS, sum(p.nbytes for p in parameters), "the server's weights", tier="host")
        self.weights = [nn.Parameter(p.detach().cpu().clone()) for p in parameters]
        self.optimizer = optimizer(self.weights)
        self.clocks = [0] * workers
        self._bound = bound
        self._ledger = ledger
        self._seen = [0] * workers  # the version of the weights at each worker
        self._finished: set[int] = set()
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    @property
    def version(self) -> int:
        """Updates of the weights so far."""
        return sum(self.clocks)

    @property
    def failure_text(self) -> str:
        """Why the run has failed."""
        return f"The parameter server has stopped: {type(self._failure).__name__}: {self._failure}"

    def exchange(
        self,
        worker: int,
        wire: Wire,
        present: Sequence[bool] | None,
        still_waiting: Callable[[], None] = lambda: None,
    ) -> Reply:
        """Apply a worker's gradients, or its leave, and fill its wire with the weights once it may go on.

        Args:
            present: which parameters have a gradient; None when the worker has finished.
            still_waiting: called about every second while the worker is blocked.

        Raises:
            CommError: the run has failed, here or at another worker.
        """
        staleness = 0
        try:
            if present is None:
                self.leave(worker)
            else:
                gradients = [view if exists else None for view, exists in zip(wire.views, present, strict=True)]
                staleness = self.push(worker, gradients)
            start = time.perf_counter()
            while (reply := self.pull(worker, wire, TICK)) is None:
                still_waiting()
        except BaseException as error:
            self.fail(error)
            raise
        return replace(reply, staleness=staleness, waited=time.perf_counter() - start)

    def push(self, worker: int, gradients: Sequence[torch.Tensor | None]) -> int:
        """Update the weights with a worker's gradients; returns their staleness."""
        with self._changed:
            self._refuse_failed()
            staleness = self.version - self._seen[worker]
            for weight, gradient in zip(self.weights, gradients, strict=True):
                weight.grad = gradient
            held = len(self.optimizer.state)
            self.optimizer.step()
            if len(self.optimizer.state) > held:
                self._account_for_states()
            for weight in self.weights:
                weight.grad = None
            self.clocks[worker] += 1
            self._changed.notify_all()
        return staleness

    def pull(self, worker: int, into: Wire, patience: float) -> Reply | None:
        """Copy the weights to a worker's wire; None if it is still blocked after `patience` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._failure is not None or self._may_go_on(worker), patience):
                return None
            self._refuse_failed()
            into.pack(self.weights)
            self._seen[worker] = self.version
            lead = 0 if worker in self._finished else self.clocks[worker] - self._slowest()
            return Reply(self.version, lead)

    def leave(self, worker: int) -> None:
        """Enter that a worker has finished: the bound ignores it, and its last `pull` waits for all workers."""
        with self._changed:
            self._refuse_failed()
            self._finished.add(worker)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Enter that the run has failed: every blocked and every later call raises the first error."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _may_go_on(self, worker: int) -> bool:
        if worker in self._finished:
            return len(self._finished) == len(self.clocks)
        return self._bound is None or self.clocks[worker] - self._slowest() <= self._bound

    def _slowest(self) -> int:
        return min(clock for worker, clock in enumerate(self.clocks) if worker not in self._finished)

    def _refuse_failed(self) -> None:
        if self._failure is not None:
            raise CommError(self.failure_text) from self._failure

    def _account_for_states(self) -> None:
        states = (value for state in self.optimizer.state.values() for value in state.values())
        nbytes = sum(value.nbytes for value in states if isinstance(value, torch.Tensor))
        held = self._ledger.account(Category.OPTIMIZER_STATES, "host").current
        self._ledger.take(Category.OPTIMIZER_STATES, nbytes - held, "the server's optimizer", tier="host")
