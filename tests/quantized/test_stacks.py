"""Stacked experts in 4 and 8 bits compute as experts with the weights that their codes stand for."""

import pytest
import torch
from torch import Tensor, nn

from zeroshard.quantized.stacks import MatrixFormat, QuantizedStack, quantised_rows, stack_on_meta
from zeroshard.quantized.weights import take_apart

pytest.importorskip("bitsandbytes")
E, D, H = 3, 64, 96


class Stacks(nn.Module):
    """Experts as those of transformers: one matrix at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(E, H, D) / 8)
        self.down = nn.Parameter(torch.randn(E, D, H) / 8)

    def forward(self, rows: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for expert in torch.arange(E):
            inner = torch.tanh(nn.functional.linear(rows, self.up[expert]))
            out = out + nn.functional.linear(inner, self.down[expert])
        return out


def stacks(kind: str, double: bool) -> tuple[Stacks, Stacks]:
    """Quantised experts, and those whose weights are what the codes stand for."""
    torch.manual_seed(1)
    plain = Stacks().requires_grad_(False)
    with torch.device("meta"):
        packed = Stacks()
    for name, weight in plain.named_parameters():
        stack_on_meta(packed, name, MatrixFormat(kind, 64, double, weight.shape[1:], torch.float32))
    packed.to_empty(device="cpu")
    for name, weight in plain.named_parameters():
        stack = vars(packed)[name]
        for end, values in quantised_rows(stack.kind, E, weight.__getitem__).items():
            packed.get_parameter(f"{name}_{end}").data = values
    take_apart(packed)
    for name, weight in plain.named_parameters():
        stack = vars(packed)[name]
        assert isinstance(stack, QuantizedStack) and stack.shape == weight.shape
        rows = [{end: values[number] for end, values in stack.parameters.items()} for number in range(E)]
        weight.copy_(torch.stack([stack.kind.whole(row) for row in rows]))
    return packed, plain


@pytest.mark.parametrize("kind, double", [("nf4", True), ("nf4", False), ("fp4", False), ("int8", False)])
def test_products_and_gradients_are_those_of_the_weights_behind_the_codes(kind: str, double: bool) -> None:
    outputs = []
    for module in stacks(kind, double):
        rows = torch.randn(5, D, generator=torch.Generator().manual_seed(2)).requires_grad_()
        made = module(rows)
        made.square().sum().backward()
        outputs.append((made.detach(), rows.grad))
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_other_functions_of_a_matrix_are_refused() -> None:
    packed, _ = stacks("nf4", double=False)
    with pytest.raises(TypeError, match=r"matmul is called with a quantised matrix .*Leave the module"):
        torch.matmul(torch.ones(1, H), packed.up[0])
