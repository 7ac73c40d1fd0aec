"""torch.autocast around the steps of a pipeline, whose activations it narrows at the borders of stages."""

from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs


class Narrowed(nn.Module):
    """Layers whose outputs are in 16 bits under autocast, at each border of a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def in_stages(mesh: zs.Mesh, settings: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    plan = zs.Plan(pipeline_parallel=2, microbatches=2).with_settings(settings)
    engine = zs.Engine(
        Narrowed(), lambda ps: torch.optim.SGD(ps, lr=0.5), plan, mesh=mesh, example={"x": torch.ones(2, 8)}
    )
    losses = []
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(engine.train_step({"x": batch(step)}).loss)
    return [float(loss) for loss in losses if loss is not None]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_steps_under_autocast_are_those_of_a_plain_loop(pool: Pool, schedule: str) -> None:
    torch.manual_seed(0)
    model, plain = Narrowed(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        parts = batch(step).chunk(2)
        for part in parts:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(part) / len(parts)
            loss.backward()
            plain.append(loss.item())
        optimizer.step()
    wanted = [first + second for first, second in zip(plain[::2], plain[1::2], strict=True)]
    seen = pool.run(in_stages, 2, {"pipeline_parallel.schedule": schedule})
    assert any(seen) and all(losses == pytest.approx(wanted, rel=1e-4) for losses in seen if losses)
