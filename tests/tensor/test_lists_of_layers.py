"""Linear layers in an nn.ModuleList, behind convolutions and of odd widths: what is split, and the way out."""

import copy
from itertools import pairwise

import pytest
import torch
from pool import Pool
from split_models.small_models import Stack
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.comm.mesh import Mesh
from zeroshard.errors import PlanError
from zeroshard.tensor.find.layers import find
from zeroshard.tensor.policy import TensorParallel

WIDTH = 16


class Chain(nn.Module):
    """Linear layers of given sizes in an nn.ModuleList, perhaps behind a convolution."""

    def __init__(self, *sizes: int, images: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3) if images else nn.Identity()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x.flatten(1) if x.dim() == 4 else x
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)  # type: ignore[no-any-return]


CHAINS = [  # layers, styles, whether they stand behind a convolution, and the shape of the input
    ((3, 8, 2), ["column", "row"], False, (4, 3)),
    ((3, 8, 8, 2), ["column", "row", "whole"], False, (4, 3)),
    ((3, 7, 8, 2), ["whole", "column", "row"], False, (4, 3)),
    ((16, 8, 3), ["column", "row"], True, (4, 1, 4, 4)),
]


@pytest.mark.parametrize("sizes, styles, images, shape", CHAINS)
def test_linear_layers_of_a_list_are_split_by_pairs(
    sizes: tuple[int, ...], styles: list[str], images: bool, shape: tuple[int, ...]
) -> None:
    found = find(Chain(*sizes, images=images), 2, TensorParallel(2))
    assert [layer.style.value for layer in found.layers if layer.name.startswith("layers")] == styles


def chain_losses(mesh: Mesh) -> list[tuple[float, float]]:
    pairs = []
    for sizes, _, images, shape in CHAINS:
        torch.manual_seed(0)
        model = Chain(*sizes, images=images).double()
        plain, x = copy.deepcopy(model), torch.randn(shape).double()
        optimizer = torch.optim.Adam(plain.parameters(), lr=0.05)
        engine = zs.Engine(model, torch.optim.Adam(model.parameters(), lr=0.05), zs.Plan(tensor_parallel=2), mesh=mesh)
        for _ in range(2):
            engine.backward(engine(x).square().mean())
            engine.step()
            optimizer.zero_grad()
            plain(x).square().mean().backward()
            optimizer.step()
        pairs.append((engine(x).square().mean().item(), plain(x).square().mean().item()))
    return pairs


def test_pairs_of_a_list_train_as_in_one_process(pool: Pool) -> None:
    for split, plain in (pair for pairs in pool.run(chain_losses, 2) for pair in pairs):
        assert split == pytest.approx(plain, rel=1e-12)


@pytest.mark.parametrize(
    "model, layers, message",
    [
        (nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 2)), {"0": "column", "2": "row"},
         r"Sequential has 7 inner features.*Set tensor_parallel to 7\. Leave '0', '2' out\."),
        (Stack(lambda: nn.Sequential(nn.Linear(WIDTH, 7), nn.ReLU(), nn.Linear(7, WIDTH))), None,
         r"7 inner features.*Set tensor_parallel to 7, or leave it out, as no other layer can be split\."),
    ],
)  # fmt: skip
def test_the_way_out_of_odd_features_does_not_name_what_cannot_be_left_whole(
    model: nn.Module, layers: dict[str, str] | None, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        find(model, 2, TensorParallel(2, layers=layers))
