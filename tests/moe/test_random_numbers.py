"""Draws of routers under exact random numbers: those of one process, however many ranks there are."""

from functools import partial
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.moe.routing.presets import router_of
from zeroshard.moe.routing.record import Routing

ROWS, SEQUENCE, WIDTH, EXPERTS = 8, 6, 5, 4
DRAWING = {  # presets with each kind of draw: [T, E] normal, [T, width] uniform, [T] uniform, [T, E] exponential
    "shazeer2017": {"k": 2},
    "hierarchical": {},
    "switch": {"group": SEQUENCE},
    "gshard": {"group": SEQUENCE},
    "deepspeed_top2": {"group": SEQUENCE},
    "deepspeed_top1": {"group": SEQUENCE},
}


class Routed(nn.Module):
    """Tokens times the sums of their gates; keeps the record of the last forward."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = router_of(name, WIDTH, EXPERTS, **DRAWING[name])  # type: ignore[arg-type]
        with torch.no_grad():
            for parameter in self.router.parameters():
                parameter.normal_()
        self.record: Routing | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.record = self.router(x.flatten(0, 1), group=x.shape[1])
        return (x.flatten(0, 1) * self.record.gates.sum(-1, keepdim=True)).view_as(x)


def records(mesh: zs.Mesh | None, name: str, microbatches: int) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Experts, gates and places of this rank's microbatches."""
    torch.manual_seed(1)
    x = torch.randn(ROWS, SEQUENCE, WIDTH)
    model, found = Routed(name), []

    def loss(output: Tensor, _: Any) -> Tensor:
        record = model.record
        assert record is not None
        found.append((record.experts, record.gates.detach(), record.kept))
        return output.sum()

    plan = zs.Plan(zero=0, rng="exact", microbatches=microbatches)
    engine = zs.Engine(model, partial(torch.optim.SGD, lr=0.0), plan, mesh=mesh, loss=loss)
    engine.train_step(x.chunk(engine.ranks)[engine.rank])
    return found


@pytest.mark.parametrize("name", DRAWING)
def test_routing_is_that_of_one_process(pool: Pool, name: str) -> None:
    """With capacities by sequence, so that who is dropped does not follow the layout either."""
    whole = records(None, name, 1)[0]
    answers = pool.run(records, 2, name, 2)
    parts = [part for answer in answers for part in answer]
    assert len(parts) == 4
    for n, expected in enumerate(whole):
        if expected is None:
            assert all(part[n] is None for part in parts)
        else:
            torch.testing.assert_close(torch.cat([part[n] for part in parts]), expected)
    again = records(None, name, 1)[0]
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(again, whole, strict=True))
