"""A mixture inside of a compiled module computes as it does outside."""

import copy

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.step.context import Within


class Block(nn.Module):
    """A norm and a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(6), zs.moe.MoE(6, 7, 5, router="mixtral")

    def forward(self, x: Tensor) -> Tensor:
        """[T, D]."""
        return x + self.mixture(self.norm(x))


def gradients(model: nn.Module, weight: float) -> list[Tensor]:
    """Of a batch whose penalties have that weight."""
    model.zero_grad()
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    with Within(penalty_weight=weight):
        model(x).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.filterwarnings("ignore:.* should not be instantiated")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own reading
def test_the_balance_loss_reaches_the_router_of_a_compiled_block_by_its_weight() -> None:
    plain = Block()
    compiled = copy.deepcopy(plain)
    compiled.compile(backend="aot_eager")
    seen = {weight: gradients(compiled, weight) for weight in (1.0, 0.25)}
    for weight, found in seen.items():
        torch.testing.assert_close(found, gradients(plain, weight), msg=lambda m, w=weight: f"weight {w}: {m}")
    assert not torch.equal(*(seen[weight][2] for weight in seen))  # of the router
    statistics = compiled.mixture.experts.statistics
    assert (int(statistics.forwards), int(statistics.load.sum())) == (2, 2 * 8 * 2)
