"""Adam with moments in 8 bits (Dettmers et al., 2110.02861), for weights in any dtype.

A tensor of 4,096 elements or more keeps two codes per element and two scales per block of 256, which run over the
flattened tensor from its begin; a smaller one keeps moments in fp32. Of a stack of matrices each has a size and blocks
of its own. Moments are decoded, changed and encoded again by the step, in pieces of a fixed number of blocks, and the
weights change by the moments before they are encoded.
"""

import math
from collections.abc import Callable, Iterable
from functools import cache, cached_property
from typing import Any, ClassVar

import torch

from zeroshard.optim.adam_math import adam_update, moments
from zeroshard.optim.dynamic_map import DynamicCode, dynamic_values
from zeroshard.optim.tensor_optimizer import (
    Options,
    State,
    TensorOptimizer,
    check_range,
    leading_shape,
    matrix_shape,
    opened,
    put_back,
)

PIECE = 2**18  # elements that are decoded at a time
CodeOf = Callable[[bool, torch.Tensor], DynamicCode]
_meta_code = cache(DynamicCode)  # of probes, which step once for every shape


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
        check_range("lr", lr, lr >= 0.0, "at least 0")
        check_range("betas", betas, len(betas) == 2 and all(0.0 <= b < 1.0 for b in betas), "two numbers in [0, 1)")
        check_range("eps", eps, eps >= 0.0, "at least 0")
        check_range("weight_decay", weight_decay, weight_decay >= 0.0, "at least 0")
        check_range("block_size", block_size, block_size > 0 and PIECE % block_size == 0, "a power of 2 up to 2^18")
        defaults: Options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"block_size": block_size, "min_8bit_size": min_8bit_size, "batch_dims": None}
        super().__init__(params, defaults)

    def _start(self, parameter: torch.Tensor, group: Options) -> State:
        shape, batch_dims = parameter.shape, group["batch_dims"]
        numel = math.prod(matrix_shape(shape, batch_dims)[1:])
        if numel < group["min_8bit_size"]:
            return moments(parameter)
        state: State = {}
        device, blocks = parameter.device, (*leading_shape(shape, batch_dims), -(-numel // group["block_size"]))
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            zero = dynamic_values(signed).index(0.0)
            state[f"{key}_codes"] = torch.full(shape, zero, dtype=torch.uint8, device=device)
            state[f"{key}_scales"] = torch.zeros(blocks, dtype=torch.float32, device=device)
        return state

    def _change(self, parameter: torch.Tensor, state: State, group: Options) -> None:
        opened_weights, opened_gradient = opened(parameter, group["batch_dims"])
        weights, gradient = opened_weights.flatten(1), opened_gradient.flatten(1)
        for number in range(len(weights)):
            for start in range(0, weights.shape[1], PIECE):
                piece = slice(start, start + PIECE)
                kept = _Moments(state, len(weights), number, piece, group["block_size"], self._code)
                self._change_piece(weights[number, piece], gradient[number, piece], kept, group)
        put_back(parameter, weights)

    @cached_property
    def _codes(self) -> dict[tuple[bool, torch.device], DynamicCode]:
        return {}

    def _code(self, signed: bool, like: torch.Tensor) -> DynamicCode:
        """The code of first (signed) or second moments on the device of a tensor.

        Each optimizer keeps its own, so that a rehearsal of its steps sees the same tables made as the steps do.
        """
        key = (signed, like.device)
        if like.device.type == "meta":
            return _meta_code(*key)
        if key not in self._codes:
            self._codes[key] = DynamicCode(*key)
        return self._codes[key]

    def _change_piece(self, weights: torch.Tensor, gradient: torch.Tensor, kept: "_Moments", group: Options) -> None:
        if group["weight_decay"] and not self.decoupled:
            gradient = gradient.add(weights, alpha=group["weight_decay"])
        first, second = kept.decoded(weights.dtype)
        update = adam_update(gradient, first, second, group["betas"], kept.step, group["eps"])
        if group["weight_decay"] and self.decoupled:
            weights.mul_(1.0 - group["lr"] * group["weight_decay"])
        weights.sub_(update.mul_(group["lr"]))
        kept.encode(first, second)


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


class _Moments:
    """Both moments of a piece of one flattened matrix or vector of a stack, in 8 bits or in fp32."""

    def __init__(self, state: State, stack: int, number: int, piece: slice, block: int, code: CodeOf) -> None:
        self._state, self._stack, self._number, self._code = state, stack, number, code
        self._piece, self._block = piece, block
        self._blocks = slice(piece.start // block, piece.stop // block)
        self.step: float = state["step"].item()

    def decoded(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The first and the second moment [n]; those in fp32 are the states themselves."""
        if "exp_avg" in self._state:
            return self._part("exp_avg"), self._part("exp_avg_sq")
        first, second = (
            self._decode(key, signed).to(dtype) for key, signed in (("exp_avg", True), ("exp_avg_sq", False))
        )
        return first, second

    def encode(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Keep both moments."""
        if "exp_avg" in self._state:
            return
        for key, signed, values in (("exp_avg", True, first), ("exp_avg_sq", False, second)):
            codes, scales = self._code(signed, values).encode(values.float(), self._block)
            self._part(f"{key}_codes").copy_(codes)
            self._scales(key).copy_(scales)

    def _part(self, key: str) -> torch.Tensor:
        part: torch.Tensor = self._state[key].view(self._stack, -1)[self._number, self._piece]
        return part

    def _scales(self, key: str) -> torch.Tensor:
        scales: torch.Tensor = self._state[f"{key}_scales"].view(self._stack, -1)[self._number, self._blocks]
        return scales

    def _decode(self, key: str, signed: bool) -> torch.Tensor:
        codes = self._part(f"{key}_codes")
        return self._code(signed, codes).decode(codes, self._scales(key), self._block)
