"""Averages of the fp32 master weights of a 16-bit plan, against a plain loop over the same weights."""

import copy
from functools import partial

import pytest
import torch
from pool import Pool
from selection import by_default
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zeroshard as zs
from zeroshard.interop import MasterWeights

Weights = dict[str, Tensor]


def build() -> nn.Module:
    """Two blocks with a statistic, and a frozen output layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    model[3].requires_grad_(False)
    return model


def averaged(mesh: zs.Mesh, zero: int) -> tuple[list[Weights], Weights, Weights, int]:
    """Master weights after each step, their average, those after it was written back, and the steps."""
    model = build()
    average = AveragedModel(copy.deepcopy(model), multi_avg_fn=get_ema_multi_avg_fn(0.999))
    plan = zs.Plan(zero=zero, precision="bf16", fp32_modules=("BatchNorm1d",))  # type: ignore[arg-type]
    engine = zs.Engine(model, partial(torch.optim.AdamW, lr=1e-3), plan, mesh=mesh)
    seen = []
    for step in range(6):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * step + mesh.rank))
        engine.backward(engine(x).float().square().mean())
        engine.step()
        average.update_parameters(MasterWeights(engine))
        seen.append(dict(engine.weights(dtype=torch.float32)))
    masters = MasterWeights(engine)
    with torch.no_grad():
        for own, other in zip(masters.parameters(), average.module.parameters(), strict=True):
            own.copy_(other)
    masters.write_back()
    after = dict(engine.weights(dtype=torch.float32))
    return seen, {n: p.detach() for n, p in average.module.named_parameters()}, after, engine.steps


@pytest.mark.parametrize("zero", by_default([0, 2, 3], 3))
def test_an_average_of_master_weights_is_not_rounded(pool: Pool, zero: int) -> None:
    for seen, average, after, steps in pool.run(averaged, 2, zero):
        wanted = seen[0]
        for weights in seen[1:]:
            wanted = {name: wanted[name].lerp(weights[name], 0.001) for name in average}
        assert steps == 6
        for name, value in average.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-6, atol=1e-8)
            assert torch.equal(after[name], value)
        assert not torch.equal(after["0.weight"], after["0.weight"].bfloat16().float())
