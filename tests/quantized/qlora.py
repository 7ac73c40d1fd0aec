"""A small model of blocks whose frozen weights are quantised, with adapters of low rank, as peft builds them."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, INNER, BLOCKS = 64, 96, 3
ROWS = 8


class Adapted(nn.Module):
    """A frozen linear layer beside two trained matrices."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(4, base.in_features) / 8)
        self.up = nn.Parameter(torch.randn(base.out_features, 4) / 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return y


class Block(nn.Module):
    """A residual network of two adapted layers."""

    def __init__(self, quantize: Callable[[nn.Linear], nn.Linear]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = Adapted(quantize(nn.Linear(WIDTH, INNER)))
        self.down = Adapted(quantize(nn.Linear(INNER, WIDTH, bias=False)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


def frozen(layer: nn.Linear) -> nn.Linear:
    """The layer as it is, frozen."""
    return layer.requires_grad_(False)


def four_bits(layer: nn.Linear, **options: Any) -> nn.Linear:
    """A 4-bit layer of bitsandbytes with the weights of `layer`."""
    from bitsandbytes.nn import Linear4bit

    options = {"quant_type": "nf4", "compute_dtype": torch.float32} | options
    made = Linear4bit(layer.in_features, layer.out_features, bias=layer.bias is not None, **options)
    made.load_state_dict(layer.state_dict())
    return frozen(made.to("cpu"))


def eight_bits(layer: nn.Linear) -> nn.Linear:
    """An 8-bit layer of bitsandbytes with the weights of `layer`."""
    from bitsandbytes.nn import Linear8bitLt

    made = Linear8bitLt(layer.in_features, layer.out_features, bias=layer.bias is not None, has_fp16_weights=False)
    made.load_state_dict(layer.state_dict())
    return frozen(made.to("cpu"))


def torchao_int8(layer: nn.Linear) -> nn.Linear:
    """The layer with an 8-bit weight of torchao."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(frozen(layer), Int8WeightOnlyConfig())
    return layer


KINDS: dict[str, Callable[[nn.Linear], nn.Linear]] = {
    "nf4": four_bits,
    "nf4 of one level": partial(four_bits, compress_statistics=False),
    "nf4 in bf16": partial(four_bits, compute_dtype=torch.bfloat16),
    "nf4 in fp16": partial(four_bits, compute_dtype=torch.float16),
    "nf4 stored as bf16": partial(four_bits, quant_storage=torch.bfloat16),
    "int8": eight_bits,
    "torchao": torchao_int8,
}


def model(kind: str) -> nn.Sequential:
    """The model with the same weights every time."""
    torch.manual_seed(7)
    made = nn.Sequential(nn.Linear(5, WIDTH), *(Block(KINDS[kind]) for _ in range(BLOCKS)), nn.Linear(WIDTH, 1))
    for end in (made[0], made[-1]):
        end.requires_grad_(False)
    return made


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Over the trained ones."""
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2)


def data(step: int) -> tuple[Tensor, Tensor]:
    """Inputs [ROWS, 5] and targets [ROWS, 1]."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 5, generator=generator), torch.randn(ROWS, 1, generator=generator)


def loss_of(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean squared error."""
    return nn.functional.mse_loss(output, batch[1])


def plain(kind: str, steps: int) -> list[float]:
    """Losses of a plain loop in one process."""
    made = model(kind)
    ours, losses = optimizer(made.parameters()), []
    for step in range(steps):
        loss = loss_of(made(data(step)[0]), data(step))
        loss.backward()  # type: ignore[no-untyped-call]
        ours.step()
        ours.zero_grad()
        losses.append(loss.item())
    return losses
