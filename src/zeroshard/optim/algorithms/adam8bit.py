"""Adam with moments in 8 bits (Dettmers et al., 2110.02861), for weights in any dtype.

A tensor of 4,096 elements or more keeps two codes per element and two scales per block of 256, which run over the
flattened tensor from its begin; a smaller one keeps moments in fp32. Each matrix of a stack has a size and blocks of
its own. A step decodes moments, changes them and encodes them again: on CPUs by the kernel of the host Adam, in one
pass over memory; elsewhere, and for other blocks, in the same order by torch's operations. Weights change by moments
that are not encoded yet.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from zeroshard.optim.algorithms.adam_math import moments
from zeroshard.optim.algorithms.tensor_optimizer import (
    Options,
    State,
    TensorOptimizer,
    as_matrices,
    check_range,
    checked,
    leading_shape,
    matrix_shape,
    put_back,
    state_dtype,
)
from zeroshard.optim.host import tiled
from zeroshard.optim.host.adam import adam_update, is_hollow, on_kernel
from zeroshard.optim.host.states import BLOCK, Blockwise, HostStates, Moment, Scalars, code_values


class AdamW8bit(TensorOptimizer):
    """AdamW (1711.05101) whose moments are kept in 8 bits.

    Args:
        block_size: the number of elements that share a scale.
        min_8bit_size: tensors of fewer elements keep moments in fp32; so does a parameter group that sets it to a
            number above its tensors', as the paper advises for embeddings (section 2.3).

    Raises:
        ValueError: an option is out of its range.
    """

    decoupled: ClassVar[bool] = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        block_size: int = 256,
        min_8bit_size: int = 4096,
    ) -> None:
        check_range(
            "block_size", block_size, block_size > 0 and tiled.TILE % block_size == 0, "a power of 2 up to 2^16"
        )
        settings = {"block_size": block_size, "min_8bit_size": min_8bit_size}
        super().__init__(params, checked(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **settings))

    def _start(self, parameter: torch.Tensor, group: Options) -> State:
        shape, batch_dims = parameter.shape, group["batch_dims"]
        numel = math.prod(matrix_shape(shape, batch_dims)[1:])
        if numel < group["min_8bit_size"]:
            return moments(parameter)
        state: State = {}
        device, blocks = parameter.device, (*leading_shape(shape, batch_dims), -(-numel // group["block_size"]))
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            zero = code_values(signed).index(0.0)
            state[f"{key}_codes"] = torch.full(shape, zero, dtype=torch.uint8, device=device)
            state[f"{key}_scales"] = torch.zeros(blocks, dtype=torch.float32, device=device)
        return state

    def _change(self, parameter: Tensor, state: State, group: Options) -> None:
        assert parameter.grad is not None
        weights = (
            as_matrices(parameter.detach(), group["batch_dims"]).to(state_dtype(parameter)).flatten(1).contiguous()
        )
        gradients = as_matrices(parameter.grad, group["batch_dims"]).flatten(1).contiguous()
        scalars = Scalars.of(group, int(state["step"].item()), self.decoupled)
        for gradient, states in _vectors(weights, gradients, state, group["block_size"]):
            _update(gradient, scalars, states, group["block_size"])
        put_back(parameter, weights)
        torch.autograd.graph.increment_version(parameter)  # a backward over old values is refused, as after torch's


class Adam8bit(AdamW8bit):
    """As `AdamW8bit`, with the weight decay added to the gradient (Adam, 1412.6980), by default none."""

    decoupled: ClassVar[bool] = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        block_size: int = 256,
        min_8bit_size: int = 4096,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, block_size, min_8bit_size)


def _vectors(weights: Tensor, gradients: Tensor, state: State, block: int) -> Iterator[tuple[Tensor, HostStates]]:
    """Gradient and states of each vector to update, from weights [B, n] and gradients.

    A stack is one vector [B n] unless a block would lie in two matrices.
    """
    stack, n = weights.shape
    coded = "exp_avg" not in state
    count = stack if coded and n % block else 1

    def rows(tensor: Tensor) -> Tensor:
        return tensor.view(count, -1)

    def moment(key: str, number: int, signed: bool) -> Moment:
        if not coded:
            return rows(state[key])[number]
        return Blockwise(rows(state[f"{key}_codes"])[number], rows(state[f"{key}_scales"])[number], signed, block)

    for number in range(count):
        first, second = moment("exp_avg", number, True), moment("exp_avg_sq", number, False)
        yield rows(gradients)[number], HostStates(rows(weights)[number], first, second)


def _update(gradient: Tensor, scalars: Scalars, states: HostStates, block: int) -> None:
    """One step in place, by the kernel or, for other tensors, by the same operations of torch."""
    kept = [m.codes if isinstance(m, Blockwise) else m for m in (states.exp_avg, states.exp_avg_sq)]
    master = states.master
    assert isinstance(master, Tensor)
    if master.is_meta:  # a trial of the sizes of states
        return
    if master.dtype != torch.float32 or block != BLOCK or not on_kernel(gradient, master, *kept):
        tiled.update(gradient, 1.0, scalars, states, states)
    elif is_hollow(master):  # the same traffic without further memory
        master.add_(gradient)
        for moment in kept:
            moment.mul_(1)
    else:
        adam_update(gradient, 1.0, scalars, states, states)
