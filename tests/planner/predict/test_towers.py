"""Stages of models that are no chains (T5, CLIP, a UNet): messages and peaks against runs; and cuts of odd models."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pipeline.cut.odd_models import OddModel
from pipeline.cut.odd_models import batch as odd_batch
from planner.rehearsed import peak_of, wire_of
from pool import Pool
from selection import by_default
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import zeroshard as zs
from zeroshard.errors import ModelError
from zeroshard.pipeline.cut.chain import Chain
from zeroshard.planner.predict.memory_tracker import Tracker
from zeroshard.planner.predict.rehearse import TrainingTask, rehearse
from zeroshard.planner.predict.torch_internals import Results, fakes

ROWS = 8
ADAM = partial(torch.optim.AdamW, lr=1e-3)
SIGHT: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}


def t5() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4}
    model: nn.Module = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    )
    return model


def clip() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    text = {**SIGHT, "vocab_size": 256, "max_position_embeddings": 32, "eos_token_id": 255}
    config = transformers.CLIPConfig(
        text_config=text, vision_config={**SIGHT, "image_size": 32, "patch_size": 8}, projection_dim=32
    )
    model: nn.Module = transformers.CLIPModel(config)
    return model


class Denoiser(nn.Module):
    """A UNet that predicts the noise of images at random times."""

    def __init__(self) -> None:
        super().__init__()
        kinds = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
        self.unet = pytest.importorskip("diffusers").UNet2DModel(
            sample_size=16, down_block_types=kinds[0], up_block_types=kinds[1], block_out_channels=(32, 64),
            layers_per_block=1, norm_num_groups=8, attention_head_dim=16,
        )  # fmt: skip

    def forward(self, images: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """The mean squared error."""
        found = self.unet(images + noise * times.view(-1, 1, 1, 1) / 100, times).sample
        return nn.functional.mse_loss(found, noise)


def texts(rows: int) -> dict[str, Tensor]:
    drawn = torch.randint(1, 255, (rows, 24))
    return {"input_ids": drawn, "labels": drawn}


def pairs(rows: int) -> dict[str, Any]:
    return {"input_ids": texts(rows)["input_ids"], "pixel_values": torch.randn(rows, 3, 32, 32), "return_loss": True}


def noisy(rows: int) -> dict[str, Tensor]:
    images = torch.randn(2, rows, 3, 16, 16)
    return {"images": images[0], "noise": images[1], "times": torch.randint(0, 100, (rows,))}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "t5": (t5, texts), "clip": (clip, pairs), "unet": (Denoiser, noisy)
}  # fmt: skip


def run(mesh: zs.Mesh, name: str, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], int]:
    """The ledger's bytes, the traffic and the peak of torch's allocations of one rank over six steps."""
    build, batch = MODELS[name]
    torch.manual_seed(0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        plan, given = zs.Plan.from_dict(settings), batch(ROWS)
        engine = zs.Engine(build(), ADAM, plan, mesh=mesh, example=batch(ROWS // plan.microbatches))
        for _ in range(6):
            engine.train_step(given)
        states, wire = engine.ledger.snapshot(), wire_of(engine)
        engine.flush()
    return {**states, "activations": 0}, wire, peak_of(watched)


CASES = [(name, schedule, off) for schedule in ("1f1b", "gpipe") for off in ("off", "blocks") for name in MODELS]


@pytest.mark.whole
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_peaks_of_both_stages_are_those_of_a_run(pool: Pool, case: tuple[str, str, str]) -> None:
    name, schedule, recompute = case
    plan = {"pipeline_parallel": 2, "pipeline_parallel.balance": "parameters", "zero": 0, "microbatches": 4}
    plan |= {"pipeline_parallel.schedule": schedule, "recompute": recompute}
    real = pool.run(run, 2, name, plan)
    build, batch = MODELS[name]
    for rank, (states, wire, peak) in enumerate(real):
        found = rehearse(TrainingTask(build, batch, ADAM, ROWS), zs.Plan.from_dict(plan), rank, 2, ROWS)
        assert {**found.states, "activations": 0} == states
        told, sent = ({p: w for p, w in each.items() if any(w) and p != "agreement"} for each in (found.wire, wire))
        assert told == sent
        assert found.peak_bytes == pytest.approx(peak, rel=0.01)


def crossings(seed: int) -> list[Any]:
    """All that would cross each boundary of an odd model."""
    model, example = OddModel(seed), odd_batch(1, 2)
    chain = Chain(model, lambda: model(*example), model.units)
    carried = chain.carried.reach if chain.carried.needed else {}
    beside = [group for group in chain.crossing.groups if not any(source in carried for source, *_ in group)]
    return [chain.carried.plain(), [sorted(chain.carried.at(n)) for n in range(len(chain.layers))], beside]


@pytest.mark.parametrize("seed", by_default(range(40), *range(12)))
def test_a_cut_without_values_is_that_of_a_run(seed: int) -> None:
    """Questions about the device of a tensor without values are no reads."""
    try:
        expected = crossings(seed)
    except ModelError:
        pytest.skip("refused")
    with fakes() as mode, Tracker(answers=True, results=Results(mode)):
        assert crossings(seed) == expected
