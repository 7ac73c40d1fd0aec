"""The base of optimizers over whole tensors, and their view of parameters as matrices.

A parameter is one vector, one matrix or a stack of matrices, by one rule (`as_matrices`): a tensor of three dimensions
[E, n, m] is a stack of E matrices, such as the weights of E experts; of four or more, such as a convolution
[O, I, h, w], one matrix [O, I*h*w]; of two a matrix, of fewer a vector. `batch_dims` of a parameter group sets the
number of a stack's leading dimensions, such as 0 for a convolution over one dimension.
Statistics and updates are computed in fp32 (in fp64 for weights in fp64), whatever the dtype of weights and gradients.
"""

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from zeroshard.optim.algorithms.row_reductions import Reduce, Rounds, in_rounds, local_parts

Options = dict[str, Any]
State = dict[str, Any]


def state_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of statistics and updates of a parameter: fp64 for fp64, else fp32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def matrix_shape(shape: torch.Size, batch_dims: int | None) -> tuple[int, ...]:
    """The shape of a parameter as a stack of matrices (B, n, m), or of vectors (B, n).

    Args:
        batch_dims: number of the stack's leading dimensions; None for 1 of three dimensions, 0 of others.

    Raises:
        ValueError: the tensor has fewer dimensions.
    """
    if batch_dims is not None and not 0 <= batch_dims <= len(shape):
        raise ValueError(
            f"batch_dims is {batch_dims} and a parameter of the group has the shape {tuple(shape)}; batch_dims must be "
            f"from 0 to its number of dimensions. Give it only to the parameter group that needs it."
        )
    leading = leading_shape(shape, batch_dims)
    stack, own = math.prod(leading), shape[len(leading) :]
    return (stack, *own[:1], math.prod(own[1:])) if len(own) > 1 else (stack, math.prod(own))


def leading_shape(shape: torch.Size, batch_dims: int | None) -> tuple[int, ...]:
    """The leading dimensions of a parameter's stack of matrices or vectors; () for a single one."""
    return tuple(shape[: (1 if len(shape) == 3 else 0) if batch_dims is None else batch_dims])


def as_matrices(tensor: torch.Tensor, batch_dims: int | None) -> torch.Tensor:
    """A parameter or its gradient as a stack [B, n, m], or vectors [B, n]; a view where its layout allows it."""
    return tensor.reshape(matrix_shape(tensor.shape, batch_dims))


def opened(parameter: torch.Tensor, batch_dims: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """A parameter and its gradient by `as_matrices`, in the dtype of statistics; views where that is possible."""
    assert parameter.grad is not None
    dtype = state_dtype(parameter)
    return (
        as_matrices(parameter.detach(), batch_dims).to(dtype),
        as_matrices(parameter.grad, batch_dims).to(dtype),
    )


def aligned(stack: torch.Tensor) -> torch.Tensor:
    """An aligned copy: products of matrices may round differently at another alignment."""
    return stack.clone(memory_format=torch.contiguous_format)


def put_back(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Write the values of `opened` back to a parameter, unless they are views of it.

    Weights in 16 bits are rounded to nearest, so a change of less than half of their last place is lost.
    """
    if parameter.dtype != values.dtype or not parameter.is_contiguous():
        parameter.copy_(values.reshape(parameter.shape))


def root_mean_square(stack: torch.Tensor) -> torch.Tensor:
    """The root of the mean square of each matrix [B, 1, 1] or vector [B, 1] of a stack."""
    dims = tuple(range(1, stack.dim()))
    norm: torch.Tensor = torch.linalg.vector_norm(stack, dim=dims, keepdim=True)
    return norm / math.sqrt(max(1, math.prod(stack.shape[1:])))


def take_step(parameter: torch.Tensor, weights: torch.Tensor, update: torch.Tensor, group: Options) -> None:
    """Decay the weights of a parameter, by `opened`, subtract the learning rate times the update, and put them back.

    Args:
        update: not used afterwards.
    """
    if group["weight_decay"]:
        weights.mul_(1.0 - group["lr"] * group["weight_decay"])
    weights.sub_(update.mul_(group["lr"]))
    put_back(parameter, weights)


RANGES: Mapping[str, tuple[Callable[[Any], bool], str]] = {  # of options that several optimizers have
    "lr": (lambda lr: bool(lr >= 0.0), "at least 0"),
    "betas": (lambda betas: len(betas) == 2 and all(0.0 <= beta < 1.0 for beta in betas), "two numbers in [0, 1)"),
    "eps": (lambda eps: eps >= 0.0, "at least 0"),
    "weight_decay": (lambda decay: decay >= 0.0, "at least 0"),
    "momentum": (lambda momentum: 0.0 <= momentum < 1.0, "at least 0 and less than 1"),
    "interval": (lambda interval: interval >= 1, "at least 1"),
    "max_side": (lambda side: side >= 1, "at least 1"),
}


def check_range(name: str, value: Any, allowed: Any, needed: str) -> None:
    """Raise a ValueError that names an option, its value and its range, unless it is allowed."""
    if not allowed:
        raise ValueError(f"{name} is {value!r} and must be {needed}.")


def checked(**options: Any) -> Options:
    """The defaults of an optimizer; those named in RANGES are checked.

    Raises:
        ValueError: an option is out of its range.
    """
    for name, value in options.items():
        if name in RANGES:
            allowed, needed = RANGES[name]
            check_range(name, value, allowed(value), needed)
    return {**options, "batch_dims": None}


@dataclass(frozen=True, slots=True)
class Fused:
    """Work fused into the passes of an update.

    Attributes:
        factor: factor on the gradients, in the dtype of statistics.
        out: vectors [numel] for the new weights, rounded to their dtype, by parameter.
    """

    factor: float = 1.0
    out: Mapping[torch.Tensor, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PartialMatrices:
    """Matrices with some rows on this rank and the rest on others ([Note: row reductions]).

    Attributes:
        parameters: this rank's rows of each.
        reduce: reduces over the rows of all ranks; a collective call.
    """

    parameters: Sequence[torch.Tensor] = ()
    reduce: Reduce = local_parts


class TensorOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` whose subclasses define the update of one parameter.

    A parameter without a gradient, or without elements, is left as it is. Loaded states keep their own dtypes;
    torch.optim would cast them to the dtype of the weights.

    Attributes:
        whole_tensors: true: steps over slices of a parameter may differ from one over the whole.
        fuses: whether a step applies `fused`, and takes gradients in fewer bits than its weights.
        fused: fused work of the next step.
        row_states: of an optimizer that can update some rows of a matrix with row reductions: the names of its states
            with an entry for each row; its other states of another shape than the matrix have entries for columns.
        partial: matrices of the next step with rows on other ranks.
    """

    whole_tensors: ClassVar[bool] = True
    fuses: ClassVar[bool] = False
    fused: Fused = Fused()
    row_states: ClassVar[tuple[str, ...] | None] = None
    partial: PartialMatrices = PartialMatrices()

    def reduced_numels(self, shape: torch.Size, group: Options) -> Sequence[int]:
        """Elements of the row reductions in each round of an update ([Note: row reductions]).

        Args:
            shape: of the matrix.
        """
        return ()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; returns the loss of the closure, if there is one.

        Raises:
            RuntimeError: a gradient is sparse, or a parameter complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        partial, updates = set(self.partial.parameters), []
        for group in self.param_groups:
            ready = [p for p in group["params"] if p.grad is not None and p.numel()]
            for parameter in ready:
                self._check(parameter)
            self._step_group(group, [p for p in ready if p not in partial])
            updates += [self._rounds(p, self._state(p, group), group) for p in ready if p in partial]
        in_rounds(updates, self.partial.reduce)
        return loss

    def load_state_dict(self, state_dict: State) -> None:
        """As `torch.optim.Optimizer.load_state_dict`, with states in their saved dtypes."""
        seen: State = {}
        handle = self.register_load_state_dict_pre_hook(lambda _, given: seen.update(given))  # after the user's hooks
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        numbers = itertools.chain.from_iterable(group["params"] for group in seen["param_groups"])
        parameters = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            for key, value in seen["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor):
                    device = value.device if key == "step" else parameter.device
                    self.state[parameter][key] = value.detach().to(device, copy=True)
                elif key == "step":  # a plain number, as some optimizers keep it
                    self.state[parameter][key] = torch.tensor(float(value), dtype=torch.float32)

    def _step_group(self, group: Options, parameters: Sequence[torch.Tensor]) -> None:
        """Change the parameters of a group that have gradients."""
        for parameter in parameters:
            self._change(parameter, self._state(parameter, group), group)

    def _state(self, parameter: torch.Tensor, group: Options) -> State:
        """The states of a parameter, made before its first step; `step` includes this one."""
        state: State = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state.update(self._start(parameter, group))
        state["step"] += 1
        return state

    @abstractmethod
    def _start(self, parameter: torch.Tensor, group: Options) -> State:
        """The states of a parameter before its first step."""

    def _change(self, parameter: torch.Tensor, state: State, group: Options) -> None:
        """Update one parameter and its states by its gradient."""
        in_rounds([self._rounds(parameter, state, group)])

    def _rounds(self, parameter: torch.Tensor, state: State, group: Options) -> Rounds:
        """The update of a parameter with all rows, or some, on this rank; a subclass defines this or `_change`."""
        raise NotImplementedError(f"{type(self).__name__} does not say how one parameter changes.")

    def _check(self, parameter: torch.Tensor) -> None:
        name = type(self).__name__
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise RuntimeError(f"{name} does not support sparse gradients. Make the embedding with sparse=False.")
        if parameter.is_complex():
            raise RuntimeError(f"{name} does not support complex parameters. Give it torch.view_as_real of them.")
