"""The worker's side: after each backward, gradients to the parameter server and its latest weights back.

[Note: the model is the user's own] Parameters, their storage and their gradients stay what torch made them; `step`
copies gradients out and weights in. The server is on rank 0, which works too and keeps one more copy of the weights.
"""

import atexit
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

import torch
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore

from zeroshard.comm.collectives import Comm, Count, Purpose
from zeroshard.comm.mesh import Mesh, announce_failure, init_mesh
from zeroshard.errors import CommError, NonFiniteError, PlanError
from zeroshard.memory.ledger import Category, Ledger
from zeroshard.parameter_server import messages
from zeroshard.parameter_server.server import OptimizerFactory, Reply, Server, Wire
from zeroshard.traffic import merged

Exchange = Callable[[Wire, Sequence[bool] | None], Reply]  # of gradients for weights


@dataclass(frozen=True, slots=True)
class AsynchronousStep:
    """The result of one step of one worker.

    Attributes:
        step: updates of this worker so far, this one included.
        version: updates of all workers that its weights now hold.
        staleness: updates of other workers between the weights that its gradient was taken at and its own update.
        lead: steps that it is ahead of the slowest worker that still trains; at most the bound.
        waited: seconds that it was blocked for slower workers.
        grad_norm: 2-norm of its gradient.
    """

    step: int
    version: int
    staleness: int
    lead: int
    waited: float
    grad_norm: float


@dataclass(frozen=True, slots=True)
class Staleness:
    """How stale the gradients of a run were.

    Attributes:
        by_worker: for each worker, how many of its updates had which staleness.
    """

    by_worker: tuple[Counter[int], ...]

    @property
    def histogram(self) -> Counter[int]:
        """Number of updates by staleness, of all workers."""
        return sum(self.by_worker, Counter())

    @property
    def mean(self) -> float:
        """The mean staleness of all updates."""
        return sum(value * count for value, count in self.histogram.items()) / max(1, self.histogram.total())

    def __str__(self) -> str:
        """A table: a column for each worker, and a row for each doubling of the staleness."""
        lines = ["staleness  " + "".join(f"worker {worker:<5}" for worker in range(len(self.by_worker))).rstrip()]
        for bits in sorted({value.bit_length() for value in self.histogram}):
            low, high = 1 << bits >> 1, (1 << bits) - 1
            label = f"{low}" if low == high else f"{low} to {high}"
            counts = [sum(n for value, n in c.items() if low <= value <= high) for c in self.by_worker]
            lines.append(f"{label:<11}" + "".join(f"{count:<12}" for count in counts).rstrip())
        return "\n".join([*lines, f"mean {self.mean:.2f} over {self.histogram.total()} updates"])


class AsynchronousTrainer:
    """Trains `model` with workers that do not wait for each other; every rank is one, and runs the same program::

        for x, y in loader:
            loss_function(model(x), y).backward()
            result = trainer.step()
        print(trainer.finish())

    Ranks may take different numbers of steps. Each step is one update by the gradient of one worker's batch.

    Args:
        model: any `nn.Module` with values, alike on all ranks; rank 0's values are taken.
        optimizer: a function of the parameters that makes the optimizer, such as `partial(torch.optim.SGD, lr=0.1)`. It
            is called on rank 0 with the server's whole parameters, in the order of the model's trainable ones, so any
            `torch.optim` optimizer will do; a scheduler or clipping go into its step hooks.
        staleness: steps that a worker may be ahead of the slowest, at least 0 (SSP); None for no bound (ASP).
        mesh: of all workers; by default from torchrun's environment. Its timeout is the longest that a worker
            may take from one step to the next.

    Attributes:
        ledger: bytes of this rank: its parameters, and on the host its buffers and the server's weights and states.
        server: on rank 0 the server, else None.
        counts: of this worker's steps, by staleness.

    Raises:
        PlanError: arguments or models that do not fit together, on this rank or between ranks.
    """

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory, *, staleness: int | None = None, mesh: Mesh | None = None
    ) -> None:
        self.mesh = mesh or init_mesh()
        self.ledger = Ledger()
        self.counts: Counter[int] = Counter()
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._staleness: Staleness | None = None
        self._check(optimizer, staleness)
        self._comms: list[Comm] = []  # this worker's first; one for each thread
        self._comm = self._make_comm()
        self._agree_on_the_model(model, staleness)
        self.ledger.take(Category.PARAMETERS, sum(p.nbytes for p in model.parameters()), "the model")
        self._wire = Wire(self._values, self.ledger, "wire")
        self._exchange: Exchange = partial(messages.exchange, self._comm)
        self._agents: list[threading.Thread] = []
        self.server: Server | None = None
        if self.mesh.rank == messages.SERVER:
            self.server = Server(self._values, optimizer, self.mesh.ranks, staleness, self.ledger)
            self._exchange = partial(self.server.exchange, messages.SERVER)
            self._agents = [self._start_agent(self.server, worker) for worker in range(1, self.mesh.ranks)]
        if self.mesh.ranks > 1:
            atexit.register(self._abandon)

    def step(self) -> AsynchronousStep:
        """Send the gradients to the server and take its latest weights; the gradients are None afterwards.

        Waits for the server alone, and with a bound on staleness for workers that are too far behind.

        Raises:
            PlanError: there is no gradient, a gradient is sparse, or the training was finished.
            NonFiniteError: a gradient is NaN or infinite; it is dropped, and the weights stay as they are.
            CommError: another worker has failed, or is gone.
        """
        if self._staleness is not None:
            raise PlanError("This training was finished by finish(); make a new AsynchronousTrainer to go on.")
        norm = self._refuse_unusable_gradients()
        present = self._wire.pack([value.grad for value in self._values])
        self._drop_gradients()
        reply = self._exchange(self._wire, present)
        self._wire.unpack(self._values)
        self.counts[reply.staleness] += 1
        return AsynchronousStep(
            self.counts.total(), reply.version, reply.staleness, reply.lead, reply.waited, grad_norm=norm
        )

    def finish(self) -> Staleness:
        """End this worker's training: no worker waits for it any more, and it waits until all have finished.

        Every rank must call it. Afterwards all models hold the same final weights.

        Raises:
            CommError: another worker has failed, or is gone.
        """
        if self._staleness is None:
            self._exchange(self._wire, None)
            self._wire.unpack(self._values)
            for agent in self._agents:
                agent.join()
            atexit.unregister(self._abandon)
            everyone = self._comm.agree_on(list(self.counts.items()), "staleness of the run")
            self._staleness = Staleness(tuple(Counter(dict(items)) for items in everyone))
        return self._staleness

    @property
    def traffic(self) -> dict[Purpose, Count]:
        """Traffic of this rank so far, on rank 0 the server's too: Ψ elements of gradients or weights for each step."""
        return merged(comm.counts for comm in self._comms)

    @property
    def _values(self) -> list[nn.Parameter]:
        return list(self._parameters.values())

    def _check(self, optimizer: OptimizerFactory, staleness: int | None) -> None:
        if staleness is not None and (not isinstance(staleness, int) or staleness < 0):
            raise PlanError(f"staleness is {staleness!r}; it must be 0 or more steps, or None for no bound.")
        if isinstance(optimizer, torch.optim.Optimizer):
            raise PlanError(
                f"The optimizer is a ready {type(optimizer).__name__}, but the weights that it would update are the "
                f"server's; pass a function of the parameters, such as partial(torch.optim.AdamW, lr=3e-4)."
            )
        if not self._parameters:
            raise PlanError("The model has no trainable parameter; set requires_grad on what is to be trained.")

    def _make_comm(self) -> Comm:
        """A `Comm` over the control group alone, which is gloo's everywhere: the buffers are in host memory."""
        group, store = self.mesh.control, self.mesh.store
        store = None if store is None else PrefixStore("asynchronous", store)
        mesh = replace(self.mesh, device=torch.device("cpu"), gathers=group, reductions=group, store=store)
        self._comms.append(Comm(mesh))
        return self._comms[-1]

    def _agree_on_the_model(self, model: nn.Module, staleness: int | None) -> None:
        """Compare models between ranks and take rank 0's values."""
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        for name, tensor in tensors.items():
            if tensor.is_meta:
                raise PlanError(f"{name} is on the meta device; give the model its values first, on the CPU or a GPU.")
        facts: list[list[object]] = [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in tensors.items()]
        facts += [["trainable parameters", list(self._parameters), ""], ["staleness", staleness, ""]]
        for rank, theirs in enumerate(self._comm.agree_on(facts, "model of an asynchronous training")):
            if theirs != facts:
                ours, other = next((a, b) for a, b in zip_longest(facts, theirs, fillvalue=["nothing"]) if a != b)
                raise PlanError(
                    f"Rank {self.mesh.rank} has {ours} where rank {rank} has {other}; build the same model and "
                    f"pass the same staleness on every rank."
                )
        with torch.no_grad():
            for name, tensor in tensors.items():
                values = tensor.detach().cpu().contiguous()
                self._comm.broadcast(values, name)
                tensor.copy_(values)

    def _start_agent(self, server: Server, worker: int) -> threading.Thread:
        wire = Wire(self._values, self.ledger, f"wire to worker {worker}")
        agent = threading.Thread(
            target=messages.attend,
            args=(server, self._make_comm(), worker, wire),
            name=f"zeroshard server for worker {worker}",
            daemon=True,
        )
        agent.start()
        return agent

    def _abandon(self) -> None:
        """End all waits if the process ends before `finish`: a thread waiting in gloo would abort the interpreter."""
        error = getattr(sys, "last_value", None) or CommError("the process ended before its finish()")
        announce_failure(self.mesh, error)
        if self.server is not None and self._agents:
            self.server.fail(error)
            self._comm.break_messages(None)
            for agent in self._agents:
                agent.join(1.0)

    def _refuse_unusable_gradients(self) -> float:
        """Refuse missing, sparse and non-finite gradients; returns their 2-norm."""
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        if not gradients:
            raise PlanError("No parameter has a gradient; call loss.backward() before step().")
        sparse = [name for name, gradient in gradients.items() if gradient.is_sparse]
        if sparse:
            raise PlanError(f"The gradient of {sparse[0]} is sparse; use a layer with dense gradients (sparse=False).")
        norm = float(torch.nn.utils.get_total_norm(gradients.values()))
        if not math.isfinite(norm):
            self._drop_gradients()
            bad = next((name for name, g in gradients.items() if not g.isfinite().all()), "all parameters together")
            raise NonFiniteError(
                f"The gradient of {bad} is not finite (norm {norm}); it was dropped, and the server has not seen it. "
                f"Go on with the next batch, or look at this one."
            )
        return norm

    def _drop_gradients(self) -> None:
        for value in self._values:
            value.grad = None
