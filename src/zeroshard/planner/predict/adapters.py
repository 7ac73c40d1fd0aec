"""Adapters in rehearsals: linear layers are frozen, each beside two thin matrices that are trained (LoRA, 2106.09685).

The modules compute as those of peft do, and take the same memory. QLoRA (2305.14314, section 3) has the frozen weights
in 4 bits (NF4), with a scale of 8 bits for each 64 of them, and one of 32 bits for each 256 scales; stacked experts
keep their dtype here, so that peaks of mixtures under QLoRA are bounds.
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroshard.errors import ModelError
from zeroshard.moe.experts.families import find_experts
from zeroshard.planning.adapters import SCALE, Adapters
from zeroshard.units.token_layers import output_layer

BLOCK, SCALES = 64, 256  # weights of one scale, and scales of one of the second kind
TRANSPOSED = "Conv1D"  # of transformers, whose weight is [inputs, outputs]


def put_adapters(model: nn.Module, adapters: Adapters) -> nn.Module:
    """Freeze a model, and put adapters beside its linear layers, its output layer aside, in place.

    Beside stacked experts of a mixture, LoRA has the layers of peft, where that is installed.

    Raises:
        ModelError: it has no such layers.
    """
    stacked = any(found.stacked for found in find_experts(model))
    if stacked and adapters.name == "lora" and importlib.util.find_spec("peft") is not None:
        adapted: nn.Module = importlib.import_module("peft").get_peft_model(model, adapters.config())
        return adapted
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for path, layer in list(parent.named_children()):
            if _is_plain(layer) and layer is not output_layer(model):
                setattr(parent, path, AdaptedLinear(layer, adapters.rank, packs=adapters.name == "qlora"))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            f"{type(model).__name__} has no linear layers besides its output layer, and adapters lie beside those; "
            f"train its weights, without adapters."
        )
    return model


def _is_plain(layer: nn.Module) -> bool:
    return type(layer).forward is nn.Linear.forward or type(layer).__name__ == TRANSPOSED


class AdaptedLinear(nn.Module):
    """A frozen linear layer, with the product of two thin trained matrices added to its result.

    Args:
        packs: whether the frozen weight has 4 bits.
    """

    def __init__(self, layer: nn.Module, rank: int, packs: bool) -> None:
        super().__init__()
        weight = layer.weight
        assert isinstance(weight, Tensor)
        inputs, outputs = weight.shape if type(layer).__name__ == TRANSPOSED else reversed(weight.shape)
        self.layer = PackedLinear(layer, (outputs, inputs)) if packs else layer
        self.down = nn.Parameter(torch.zeros(rank, inputs, dtype=weight.dtype, device=weight.device))
        self.up = nn.Parameter(torch.zeros(outputs, rank, dtype=weight.dtype, device=weight.device))

    def reset_parameters(self) -> None:
        """Values for matrices on the meta device."""
        nn.init.normal_(self.down)
        nn.init.zeros_(self.up)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        result: Tensor = self.layer(x)
        return result + F.linear(F.linear(x, self.down), self.up) * SCALE


class PackedLinear(nn.Module):
    """A stand-in for a frozen linear layer of 4 bits: its bytes and operations, without values.

    Attributes:
        shape: [outputs, inputs] of the weight.
    """

    def __init__(self, layer: nn.Module, shape: tuple[int, int]) -> None:
        super().__init__()
        self.shape, device = shape, next(layer.parameters()).device
        packed, scales = -(-self.numel // 2), -(-self.numel // BLOCK)
        self.weight = nn.Parameter(torch.zeros(packed, 1, dtype=torch.uint8, device=device), requires_grad=False)
        scale_bytes = scales + 4 * -(-scales // SCALES)
        self.register_buffer("scales", torch.zeros(scale_bytes, dtype=torch.uint8, device=device))
        bias = layer.bias
        assert bias is None or isinstance(bias, nn.Parameter)
        self.bias = bias

    def reset_parameters(self) -> None:
        """Values for tensors on the meta device."""
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.detach().zero_()

    @property
    def numel(self) -> int:
        """Numbers that the packed weight stands for."""
        return self.shape[0] * self.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        result: Tensor = _PackedProduct.apply(x, self.weight, self.shape)  # type: ignore[no-untyped-call]
        return result if self.bias is None else result + self.bias


class _PackedProduct(torch.autograd.Function):
    """The product with a packed weight, which is unpacked for each use and keeps nothing else for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, shape: tuple[int, int]) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        ctx.save_for_backward(packed)
        ctx.shape = shape
        return F.linear(x, _unpacked(packed, shape, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of the input alone."""
        (packed,) = ctx.saved_tensors
        return gradient @ _unpacked(packed, ctx.shape, gradient.dtype), None, None


def _unpacked(packed: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return packed.expand(-1, 2).to(dtype).view(-1)[: shape[0] * shape[1]].view(shape)
