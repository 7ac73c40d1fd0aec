"""The plain loop: the same training run in one process, as its definition says it.

Nothing of the engine is used, but for its Adam on CPUs, so that updates differ by gradients alone. A step is a forward
and a backward of each microbatch of each data rank, one after the other; their losses are averaged by rows, or added
and divided by the counts where the loss is (sum, count).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from zeroshard.errors import BatchError, ModelError
from zeroshard.optim import fast_on_cpus
from zeroshard.verification.job import VerificationJob, called_with
from zeroshard.verification.watch import ModuleCall, Place, Watch

Tensors = dict[str, Tensor]


@dataclass(slots=True)
class PlainStep:
    """The results of one step of the plain loop.

    Attributes:
        loss: of the whole step.
        losses: of each part, a mean over its rows, or sum and count.
        gradients: by parameter; None where no part reached it.
        norm: of all gradients.
        calls: of modules, by part.
    """

    loss: float
    losses: list[tuple[float, float]]
    gradients: dict[str, Tensor | None]
    norm: float
    calls: dict[int, dict[Place, ModuleCall]] = field(default_factory=dict)


class Plain:
    """The model of the plain loop, its optimizer, and for each data rank its own buffers.

    Args:
        start: the initial values of a model that was made on the meta device.
    """

    def __init__(self, job: VerificationJob, start: Mapping[str, Tensor] | None = None) -> None:
        self.job, model = job, job.model(0)
        if any(p.is_meta for p in model.parameters()):
            if start is None:
                raise ModelError("The model is on the meta device and its initial values are not known yet.")
            model = model.to_empty(device="cpu")
            model.load_state_dict(start)
        self.model = model.train()
        self.optimizer = fast_on_cpus(job.optimizer(list(self.model.parameters())))
        taken = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for parameter in self.model.parameters():
            parameter.requires_grad_(parameter.requires_grad and id(parameter) in taken)
        self.watch = Watch(self.model, lambda arguments: self._part)
        self._part: int | None = None
        self._buffers = [_copies(dict(self.model.named_buffers())) for _ in range(job.data_ranks)]

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that train, each by its first name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def weights(self) -> Tensors:
        """Copies of all parameters, tied ones under each of their names."""
        return _copies(dict(self.model.named_parameters(remove_duplicate=False)))

    def buffers(self, data_rank: int = 0) -> Tensors:
        """The buffers of a data rank, by name."""
        return self._buffers[data_rank]

    def step(self, number: int) -> PlainStep:
        """Forwards and backwards of a step; the weights stay as they are."""
        self.model.zero_grad(set_to_none=True)
        losses: list[tuple[float, float]] = []
        shares: list[float] = []
        total, count = 0.0, self._count(number)
        with self.watch.step() as calls:
            for part, batch, share in self._parts(number):
                loss, items = self._loss(part, batch)
                weight = share if count is None else 1.0 / max(count, 1.0)
                (loss * weight).backward()
                losses.append((loss.item(), items))
                shares.append(weight)
                total += loss.item() * weight
        gradients = {name: None if p.grad is None else p.grad.detach().clone() for name, p in self.trained.items()}
        squares = sum(float(g.double().square().sum()) for g in gradients.values() if g is not None)
        self._part = None
        return PlainStep(total, losses, gradients, squares**0.5, calls)

    def update(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Clip these gradients as the plan says, and let the optimizer take a step with them."""
        for name, parameter in self.trained.items():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else gradient.clone().to(parameter.dtype)
        if self.job.plan.clip_norm is not None:
            nn.utils.clip_grad_norm_(list(self.trained.values()), self.job.plan.clip_norm)
        self.optimizer.step()

    def contributions(self, number: int, name: str) -> list[Tensor]:
        """The contribution of each part to the gradient of a parameter in a step, weighted as in `step`."""
        kept, count, found = [_copies(each) for each in self._buffers], self._count(number), []
        parameter = self.trained[name]
        for part, batch, share in self._parts(number):
            loss, _ = self._loss(part, batch)
            weight = share if count is None else 1.0 / max(count, 1.0)
            (gradient,) = torch.autograd.grad(loss * weight, [parameter], allow_unused=True)
            found.append(torch.zeros_like(parameter) if gradient is None else gradient.detach())
        self._buffers, self._part = kept, None
        return found

    def by_use(self, number: int, name: str) -> Tensors:
        """The gradient of a tied parameter in a step, by each of the names under which modules use it."""
        parameter = self.trained[name]
        sites = [
            (path, module, attribute)
            for path, module in self.model.named_modules()
            for attribute, value in module._parameters.items()
            if value is parameter
        ]
        found, kept, count = {}, [_copies(each) for each in self._buffers], self._count(number)
        for path, module, attribute in sites if len(sites) > 1 else []:
            own = module._parameters[attribute] = nn.Parameter(parameter.detach().clone())
            total = torch.zeros_like(own)
            for part, batch, share in self._parts(number):
                loss, _ = self._loss(part, batch)
                weight = share if count is None else 1.0 / max(count, 1.0)
                (gradient,) = torch.autograd.grad(loss * weight, [own], allow_unused=True)
                total += 0.0 if gradient is None else gradient
            module._parameters[attribute] = parameter
            found[f"{path}.{attribute}"] = total.detach()
        self._buffers, self._part = kept, None
        return found

    def whole_loss(self, number: int) -> float | None:
        """The loss of a step's whole batch in one forward, of which buffers learn nothing; None if it cannot be run."""
        whole, kept = [self.job.rank_batch(number, d) for d in range(self.job.data_ranks)], _copies(self._buffers[0])
        leaves, spec = [tree_flatten(each)[0] for each in whole], tree_flatten(whole[0])[1]
        joined = [torch.cat(same) if isinstance(same[0], Tensor) else same[0] for same in zip(*leaves, strict=True)]
        batch = tree_unflatten(joined, spec)
        self._part = None
        try:
            with torch.no_grad():
                loss, count = self._value(called_with(self.model, batch), batch)
        except RuntimeError:
            return None  # a model for one size of batches
        finally:
            self._restore(kept)
        return float(loss) / count

    def is_random(self) -> bool:
        """Whether a forward draws random numbers: two of the same microbatch differ."""
        kept, found = _copies(self._buffers[0]), []
        self._part = None
        batch = self.job.microbatches(0, 0)[0][0]
        for seed in (1, 2):
            torch.manual_seed(seed)
            self._restore(kept)
            with torch.no_grad():
                found.append(float(self._value(called_with(self.model, batch), batch)[0]))
        self._restore(kept)
        return found[0] != found[1]

    def _parts(self, number: int) -> Iterator[tuple[int, Any, float]]:
        """(number, microbatch, share of the rows) of each part, with its data rank's buffers in the model."""
        part = 0
        for data_rank in range(self.job.data_ranks):
            self._restore(self._buffers[data_rank])
            for batch, share in self.job.microbatches(number, data_rank):
                yield part, batch, share
                part += 1
            self._buffers[data_rank] = _copies(dict(self.model.named_buffers()))

    def _count(self, number: int) -> float | None:
        """The count of a step, where the loss is given by (sum, count)."""
        if self.job.loss is None:
            return None
        kept, total = [_copies(each) for each in self._buffers], 0.0
        for _, batch, _ in self._parts(number):
            self._part = None
            with torch.no_grad():
                output = self.job.loss(called_with(self.model, batch), batch)
            if not isinstance(output, (tuple, list)):
                total = -1.0
                break
            total += float(output[1])
        self._buffers = kept
        return None if total < 0 else total

    def _loss(self, part: int, batch: Any) -> tuple[Tensor, float]:
        self._part = part
        return self._value(called_with(self.model, batch), batch)

    def _value(self, output: Any, batch: Any) -> tuple[Tensor, float]:
        """A loss and its count; 1 where it is a mean."""
        if self.job.loss is not None:
            loss = self.job.loss(output, batch)
            return (loss[0], float(loss[1])) if isinstance(loss, (tuple, list)) else (loss, 1.0)
        entry = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
        if not isinstance(entry, Tensor) or entry.numel() != 1:
            raise BatchError(
                f"The model returned a {type(output).__name__} without a scalar loss. Return the loss, an object with "
                f".loss, or give loss=function of (output, batch)."
            )
        return entry.reshape(()), 1.0

    def _restore(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(values[name])


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread of CPU kernels inside, as each rank has, so that sums are made in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _copies(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
