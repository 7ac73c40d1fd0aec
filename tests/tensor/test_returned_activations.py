"""Activations between blocks that a model returns are whole under sequence parallelism, and so are their gradients."""

from functools import partial
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs

transformers = pytest.importorskip("transformers")
SGD = partial(torch.optim.SGD, lr=0.1)
TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "use_cache": False,
}  # fmt: skip
IMAGE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 7,
}  # fmt: skip
TOKEN, PATCHES = 60, 16  # that stands for a part of an image, and the parts


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    text = transformers.LlamaConfig(**TEXT)
    if kind == "text":
        model: nn.Module = transformers.LlamaForCausalLM(text)
    else:  # the projector reads the last layer but one of the tower
        vision = transformers.CLIPVisionConfig(**IMAGE)
        config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=TOKEN)
        model = transformers.LlavaForConditionalGeneration(config)
    return model


def batch(kind: str, step: int) -> dict[str, Any]:
    """13 positions, or 21 behind an image; neither 2 ranks nor 4 divide them."""
    torch.manual_seed(step)
    words = torch.randint(0, TOKEN, (2, 13 if kind == "text" else PATCHES + 5))
    if kind == "text":
        return {"input_ids": words, "labels": words, "output_hidden_states": True}
    words[:, :PATCHES] = TOKEN
    return {"input_ids": words, "labels": words, "pixel_values": torch.randn(2, 3, 28, 28)}


def loss_of(output: Any) -> Tensor:
    states = output.hidden_states or ()
    loss: Tensor = output.loss + sum(weight * state.square().mean() for weight, state in enumerate(states, 1))
    return loss


def plain(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = made(kind), []
    optimizer = SGD(model.parameters())
    for step in range(3):
        loss = loss_of(model(**batch(kind, step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def on_ranks(mesh: zs.Mesh, kind: str, plan: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    engine, losses = zs.Engine(made(kind), SGD, zs.Plan(**plan), mesh=mesh), []
    for step in range(3):
        loss = loss_of(engine(**batch(kind, step)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine.state_dict()


@pytest.mark.parametrize(
    "kind, ranks, plan",
    [("text", 2, {}), ("text", 4, {"recompute": "blocks"}), ("images", 2, {}), ("images", 2, {"recompute": "blocks"})],
)
def test_they_are_whole(pool: Pool, kind: str, ranks: int, plan: dict[str, Any]) -> None:
    wanted, weights = plain(kind)
    for losses, found in pool.run(on_ranks, ranks, kind, {"tensor_parallel": ranks, **plan}):
        assert losses == pytest.approx(wanted, rel=1e-6)
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
