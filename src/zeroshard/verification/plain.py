"""The plain loop: the same training run in one process, by its definition.

Nothing of the engine is used, but for its Adam on CPUs, so that updates differ by gradients alone, and its reading of a
loss. A step is a forward and a backward of each microbatch of each data rank, one after the other; their losses are
averaged by rows, or added and divided by the counts where the loss is (sum, count).
"""

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from zeroshard.errors import ModelError
from zeroshard.optim import fast_on_cpus
from zeroshard.step.batch import loss_of
from zeroshard.step.losses import Loss
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
    """The model of the plain loop, its optimizer, and for each data rank its own buffers and counters.

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
        self._states = [ModelState.of(self.model) for _ in range(job.data_ranks)]

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that train, each by its first name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def weights(self) -> Tensors:
        """Copies of all parameters; tied ones under each of their names."""
        named = self.model.named_parameters(remove_duplicate=False)
        return {name: tensor.detach().clone() for name, tensor in named}

    def buffers(self, data_rank: int = 0) -> Mapping[str, Tensor]:
        """The buffers of a data rank, by name."""
        return self._states[data_rank].buffers

    def step(self, number: int) -> PlainStep:
        """Forwards and backwards of a step; the weights stay as they are."""
        self.model.zero_grad(set_to_none=True)
        losses: list[tuple[float, float]] = []
        total = 0.0
        with self.watch.step() as calls:
            for loss, weight in self._losses(number):
                (loss.value * weight).backward()
                losses.append((loss.value.item(), 1.0 if loss.items is None else float(loss.items)))
                total += loss.value.item() * weight
        gradients = {name: None if p.grad is None else p.grad.detach().clone() for name, p in self.trained.items()}
        squares = sum(float(g.double().square().sum()) for g in gradients.values() if g is not None)
        self._part = None
        return PlainStep(total, losses, gradients, squares**0.5, calls)

    def update(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Clip these gradients as the plan says, and take the optimizer's step with them."""
        for name, parameter in self.trained.items():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else gradient.clone().to(parameter.dtype)
        if self.job.plan.clip_norm is not None:
            nn.utils.clip_grad_norm_(list(self.trained.values()), self.job.plan.clip_norm)
        self.optimizer.step()

    def contributions(self, number: int, name: str) -> list[Tensor]:
        """The contribution of each part to the gradient of a parameter in a step, weighted as in `step`."""
        return self._gradients(number, self.trained[name])

    def by_use(self, number: int, name: str) -> Tensors:
        """The gradient of a tied parameter in a step, by each of the names under which modules use it."""
        parameter = self.trained[name]
        sites = [
            (path, module, attribute)
            for path, module in self.model.named_modules()
            for attribute, value in module._parameters.items()
            if value is parameter
        ]
        found = {}
        for path, module, attribute in sites if len(sites) > 1 else []:
            own = module._parameters[attribute] = nn.Parameter(parameter.detach().clone())
            first, *others = self._gradients(number, own)
            module._parameters[attribute] = parameter
            found[f"{path}.{attribute}"] = sum(others, first)
        return found

    def whole(self, number: int) -> Any:
        """The whole batch of a step, of all data ranks."""
        whole = [self.job.rank_batch(number, d) for d in range(self.job.data_ranks)]
        leaves, spec = [tree_flatten(each)[0] for each in whole], tree_flatten(whole[0])[1]
        joined = [torch.cat(same) if isinstance(same[0], Tensor) else same[0] for same in zip(*leaves, strict=True)]
        return tree_unflatten(joined, spec)

    def alone(self, batch: Any) -> Loss:
        """The loss of a batch from the buffers and counters of data rank 0, which do not change."""
        self._part = None
        self._states[0].restore(self.model)
        try:
            return self._value(called_with(self.model, batch), batch)
        finally:
            self._states[0].restore(self.model)

    def refuse_unlike_calls(self) -> None:
        """Refuse a model whose two forwards of the same rows differ, so that no two runs can be compared.

        Raises:
            ModelError: it draws random numbers, or its calls change state that this loop cannot restore.
        """
        batch, found = self.job.microbatches(0, 0)[0][0], []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            with torch.no_grad():
                found.append(float(self.alone(batch).value))
        if found[0] != found[1]:
            raise ModelError(
                "Two forwards of the same rows with the same random numbers differ: the model's calls change something "
                "that is neither a buffer nor a number, text or tensor in an attribute of its modules (a global "
                "variable, an object of another class, a generator of its own), which no other process can begin with. "
                "Make it a buffer, or leave it out for the verification."
            )
        if found[1] != found[2]:
            raise ModelError(
                "The model draws random numbers in training (dropout, noise): two forwards of the same rows differ, so "
                "no two runs can be compared. Set its dropout to 0 for the verification."
            )

    def _parts(self, number: int) -> Iterator[tuple[int, Any, float]]:
        """(number, microbatch, share of the rows) of each part, with its data rank's state in the model."""
        part = 0
        for data_rank in range(self.job.data_ranks):
            self._states[data_rank].restore(self.model)
            for batch, share in self.job.microbatches(number, data_rank):
                yield part, batch, share
                part += 1
            self._states[data_rank] = ModelState.of(self.model)

    def _count(self, number: int) -> float | None:
        """The count of a step, where the loss is given by (sum, count)."""
        kept, total = list(self._states), 0.0
        for _, batch, _ in self._parts(number):
            self._part = None
            with torch.no_grad():
                loss = self._value(called_with(self.model, batch), batch)
            if loss.items is None:
                total = -1.0
                break
            total += float(loss.items)
        self._states = kept
        return None if total < 0 else total

    def _losses(self, number: int) -> Iterator[tuple[Loss, float]]:
        """The loss of each part, and its weight in the loss of the step."""
        count = self._count(number)
        for part, batch, share in self._parts(number):
            self._part = part
            yield self._value(called_with(self.model, batch), batch), share if count is None else 1.0 / max(count, 1.0)

    def _gradients(self, number: int, parameter: nn.Parameter) -> list[Tensor]:
        """The gradient of each part's weighted loss by a parameter; buffers and counters stay as they are."""
        kept, found = list(self._states), []
        for loss, weight in self._losses(number):
            (gradient,) = torch.autograd.grad(loss.value * weight, [parameter], allow_unused=True)
            found.append(torch.zeros_like(parameter) if gradient is None else gradient.detach())
        self._states, self._part = kept, None
        return found

    def _value(self, output: Any, batch: Any) -> Loss:
        """A mean, or a sum and its count."""
        if self.job.loss is not None:
            return Loss.of(self.job.loss(output, batch))
        return loss_of(self.model, output, batch)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run CPU kernels in one thread, as each rank does, so that sums have the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


CONSTANT = (bool, int, float, complex, str, bytes, type(None))
CONTAINERS = (list, tuple, set, frozenset, deque)
OF_MODULES = frozenset(vars(nn.Module()))  # attributes that every module has
DEEPEST = 4  # most levels of nested containers to search


@dataclass(frozen=True, slots=True)
class ModelState:
    """Copies of the state that forwards may change.

    Attributes:
        buffers: by name.
        attributes: numbers, texts, tensors without a graph, and containers of them, by module and attribute.
    """

    buffers: Mapping[str, Tensor]
    attributes: Mapping[tuple[str, str], Any]

    @classmethod
    def of(cls, model: nn.Module) -> "ModelState":
        """The present state of a model."""
        buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        found = {
            (path, name): value
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if name not in OF_MODULES and _is_plain(value)
        }
        return cls(buffers, copy.deepcopy(found))  # in one copy, for values that modules share

    def restore(self, model: nn.Module) -> None:
        """Restore this state in a model."""
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(self.buffers[name])
        modules = dict(model.named_modules())
        for (path, name), value in copy.deepcopy(dict(self.attributes)).items():
            modules[path].__dict__[name] = value


def _is_plain(value: Any, depth: int = 0) -> bool:
    if type(value) in CONSTANT:
        return True
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.grad_fn is None and not value.is_meta
    if depth == DEEPEST:
        return False
    if isinstance(value, dict):
        return all(_is_plain(each, depth + 1) for pair in value.items() for each in pair)
    return isinstance(value, CONTAINERS) and all(_is_plain(each, depth + 1) for each in value)
