"""A UNet of diffusers in stages: its skips pass over several blocks, and its middle stands apart from its lists."""

from functools import partial
from typing import Any

import pytest
import torch
from plain_loop import PlainRun, follows_plain_loop, plain_loop
from pool import Pool
from torch import Tensor, nn
from torch.nn import functional as F

import zeroshard as zs

SGD, STEPS = partial(torch.optim.SGD, lr=0.02), 2
UNet = Any


def unet() -> UNet:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        attention_head_dim=4,
        cross_attention_dim=12,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )


def noisy(step: int, rows: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Images with noise, times, and the states of a text."""
    torch.manual_seed(step)
    return torch.randn(rows, 3, 16, 16), torch.randint(0, 100, (rows,)), torch.randn(rows, 5, 12)


def predicted(output: Any, batch: Any) -> Tensor:
    return F.mse_loss(output.sample, batch[0])


def imports(mesh: zs.Mesh) -> None:
    """Import diffusers, which may take a rank longer than another waits for it to make an engine."""
    import diffusers  # noqa: F401


def train(mesh: zs.Mesh, schedule: str) -> tuple[list[float], dict[str, Any]]:
    pipeline = zs.Pipeline(mesh.ranks, schedule=schedule, balance="parameters")  # type: ignore[arg-type]
    plan = zs.Plan(pipeline_parallel=pipeline, microbatches=2)
    engine = zs.Engine(unet(), SGD, plan, mesh=mesh, loss=predicted, example=noisy(9, 2))
    losses = [float(engine.train_step(noisy(step)).loss) for step in range(STEPS)]  # type: ignore[arg-type]
    return losses, engine.state_dict()


def plain() -> PlainRun:
    def loss(model: nn.Module, part: Any) -> Tensor:
        return predicted(model(*part), part)

    steps = [list(zip(*(each.chunk(2) for each in noisy(step)), strict=True)) for step in range(STEPS)]
    return plain_loop(unet(), SGD, steps, loss)


@pytest.mark.whole
@pytest.mark.parametrize("ranks, schedule", [(2, "1f1b"), (3, "zb-h1")])
def test_a_unet_trains_in_stages_as_in_one_process(pool: Pool, ranks: int, schedule: str) -> None:
    pytest.importorskip("diffusers")
    pool.run(imports, ranks)
    follows_plain_loop(pool.run(train, ranks, schedule), plain())
