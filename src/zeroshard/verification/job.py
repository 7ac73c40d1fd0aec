"""A job of verification: a model, its batch and its optimizer under a plan, in a form that goes to other processes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from zeroshard.engine.techniques import data_ranks_of, together_of
from zeroshard.errors import BatchError, ModelError
from zeroshard.plan import Plan
from zeroshard.recompute.policy import LOSSY

OptimizerOf = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
LossOf = Callable[[Any, Any], Any]
TOLERANCES = {"fp32": 2.0**-15, "fp16": 2.0**-5, "bf16": 2.0**-3}  # relative to the norm of the compared tensors
CODES = {  # the same for gradients, by the code of saved tensors: blocks rounded to 2 to 16 bits
    **{"fp16": 2.0**-7, "fp10": 2.0**-2, "fp8": 2.0**-1, "e4m3": 2.0**-2, "int8": 2.0**-4, "int4": 1.0, "int2": 4.0},
}
FLOOR = 2.0**-5  # of the root mean square of all gradients: smaller values are rounding of larger summands


@dataclass(frozen=True)
class VerificationJob:
    """A training run of a few steps, to run under its plan and in one process.

    Attributes:
        factory: makes the model; random numbers are seeded before.
        plan: as it runs.
        batch: the whole batch of every step, tensors [B, ...], whose rows are rotated from step to step; or a function
            of the step's number.
        optimizer: of the parameters.
        loss: of (output, microbatch): a mean over its rows, or (sum, count); None for the output or its loss.
        ranks: processes under the plan.
        cast: compute in fp32 whatever dtypes the model has.
    """

    factory: Callable[[], nn.Module]
    plan: Plan
    batch: Any
    optimizer: OptimizerOf
    loss: LossOf | None = None
    ranks: int = 2
    steps: int = 3
    cast: bool = True

    @property
    def data_ranks(self) -> int:
        """Batches of a step: one per group of ranks that work on the same data."""
        return data_ranks_of(self.plan, self.ranks)

    @property
    def together(self) -> int:
        """Ranks that work on the same data, each of which may compute a shard of a module's output."""
        return together_of(self.plan, self.ranks)

    @property
    def parts(self) -> int:
        """Microbatches of a step over all data ranks; part p is microbatch p % m of data rank p // m."""
        return self.data_ranks * self.plan.microbatches

    @property
    def tolerance(self) -> float:
        """The relative error up to which two tensors count as equal."""
        moments = {"8bit": "bf16"}.get(self.plan.offloading.moments, self.plan.offloading.moments)
        return max(TOLERANCES[name] for name in (self.plan.precision, self.plan.reduce_dtype or "fp32", moments))

    @property
    def eps(self) -> float:
        """The distance from 1 to the next number in the dtype of the model's weights."""
        return {"fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7}[self.plan.precision]

    def model(self, seed: int) -> nn.Module:
        """The model.

        Raises:
            ModelError: the factory makes something else.
        """
        torch.manual_seed(seed)
        model = self.factory()
        if not isinstance(model, nn.Module):
            raise ModelError(
                f"The model's factory returned {type(model).__name__}; it must return an nn.Module when it is called "
                f"without arguments."
            )
        return _single(model) if self.cast else model

    def rank_batch(self, step: int, data_rank: int) -> Any:
        """The rows of a data rank in a step.

        Raises:
            BatchError: the rows do not divide.
        """
        whole = self.batch(step) if callable(self.batch) else _rotated(self.batch, step)
        rows = rows_of(whole)
        if rows % self.data_ranks or rows // self.data_ranks < self.plan.microbatches:
            raise BatchError(
                f"A batch of {rows} rows does not make {self.plan.microbatches} microbatches on each of "
                f"{self.data_ranks} data ranks; give a multiple of {self.parts} rows."
            )
        size = rows // self.data_ranks
        return rows_between(whole, size * data_rank, size * (data_rank + 1))

    def microbatches(self, step: int, data_rank: int) -> list[tuple[Any, float]]:
        """The microbatches of a data rank in a step, each with its share of the rows of the step."""
        own, m = self.rank_batch(step, data_rank), self.plan.microbatches
        rows = rows_of(own)
        ends = [rows * k // m for k in range(m + 1)]
        return [(rows_between(own, a, b), (b - a) / rows / self.data_ranks) for a, b in pairwise(ends)]

    @property
    def gradient_tolerance(self) -> float:
        """The tolerance of gradients, which codes of saved tensors round, unlike a forward."""
        return max([self.tolerance, *(CODES[code] for code in self.plan.saving.compress if code in CODES)])

    def exact(self) -> "VerificationJob":
        """The same job in fp32 throughout: computation, wire, optimizer states and saved tensors."""
        kept = tuple(code for code in self.plan.saving.compress if code not in LOSSY)
        settings = {"precision": "fp32", "reduce_dtype": None, "offload.moments": "fp32", "activations.compress": kept}
        return replace(self, plan=self.plan.with_settings(settings))


def rows_of(batch: Any) -> int:
    """The common first dimension of the tensors of a batch.

    Raises:
        BatchError: there is none.
    """
    sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)}
    if len(sizes) != 1:
        raise BatchError(
            f"The batch's tensors have the first dimensions {sorted(sizes)}; give tensors [B, ...] of one B."
        )
    return int(sizes.pop())


def rows_between(batch: Any, first: int, last: int) -> Any:
    """Rows [first, last) of every tensor of a batch."""
    leaves, spec = tree_flatten(batch)
    return tree_unflatten([leaf[first:last] if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def called_with(model: nn.Module, batch: Any) -> Any:
    """The model's output: a mapping is passed as keywords, a tuple or list as arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def default_ranks(plan: Plan) -> int:
    """The fewest ranks under which each axis of a plan has two ranks or more."""
    given, group, together = plan.pipeline.replicas, plan.shard_group, plan.tensor.ranks
    if given is not None:
        return sum(given) * together
    return plan.pipeline.stages * (2 if group is None else 2 * group) * together


def name_parts(parts: Sequence[int], microbatches: int) -> str:
    """Names of parts in a report."""
    ranks = sorted({part // microbatches for part in parts})
    if len(parts) == len(ranks) * microbatches:
        return f"data rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    numbers = sorted({part % microbatches for part in parts})
    text = f"microbatch{'es' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
    return text + (f" of data rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else "")


def _rotated(batch: Any, step: int) -> Any:
    leaves, spec = tree_flatten(batch)
    return tree_unflatten([leaf.roll(-step, 0) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def _single(model: nn.Module) -> nn.Module:
    """The model with its 16-bit parameters and buffers in fp32."""
    narrow = (torch.float16, torch.bfloat16)
    if any(tensor.dtype in narrow for tensor in (*model.parameters(), *model.buffers())):
        return model.float()
    return model
