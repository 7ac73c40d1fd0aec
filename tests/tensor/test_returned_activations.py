"""Activations between blocks that a model returns are whole under sequence parallelism, and so are their gradients."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_loop import plain_loop
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.errors import ModelError
from zeroshard.tensor.find.found import AttentionSizes
from zeroshard.tensor.split.returned import ReturnedActivations

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
    text = transformers.LlamaConfig(**TEXT, attn_implementation="eager")
    if kind != "images":
        model: nn.Module = transformers.LlamaForCausalLM(text)
    else:  # the projector reads the last layer but one of the tower
        vision = transformers.CLIPVisionConfig(**IMAGE)
        config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=TOKEN)
        model = transformers.LlavaForConditionalGeneration(config)
    return model.double()


def batch(kind: str, step: int) -> dict[str, Any]:
    """13 positions, or 21 behind an image; neither 2 ranks nor 4 divide them."""
    torch.manual_seed(step)
    words = torch.randint(0, TOKEN, (2, PATCHES + 5 if kind == "images" else 13))
    if kind != "images":
        name = "output_hidden_states" if kind == "text" else "output_attentions"
        return {"input_ids": words, "labels": words, name: True}
    words[:, :PATCHES] = TOKEN
    return {"input_ids": words, "labels": words, "pixel_values": torch.randn(2, 3, 28, 28).double()}


def loss_of(output: Any) -> Tensor:
    states = output.hidden_states or output.get("attentions") or ()
    loss: Tensor = output.loss + sum(10 * weight * (state**2).mean() for weight, state in enumerate(states, 1))
    return loss


def on_ranks(mesh: zs.Mesh, kind: str, plan: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    engine, losses = zs.Engine(made(kind), SGD, zs.Plan(**plan), mesh=mesh), []
    for step in range(3):
        loss = loss_of(engine(**batch(kind, step)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine.state_dict()


CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("text", 2, {}),
    ("text", 4, {"recompute": "blocks"}),
    ("heads", 2, {}),
    ("images", 2, {}),
    ("images", 2, {"recompute": "blocks"}),
]


@pytest.mark.parametrize("kind, ranks, plan", CASES)
def test_they_are_whole(pool: Pool, kind: str, ranks: int, plan: dict[str, Any]) -> None:
    steps = [[batch(kind, step)] for step in range(3)]
    wanted = plain_loop(made(kind), SGD, steps, lambda model, part: loss_of(model(**part)))
    for losses, found in pool.run(on_ranks, ranks, kind, {"tensor_parallel": ranks, **plan}):
        assert losses == pytest.approx(wanted.losses, rel=1e-6)
        for name, value in wanted.weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


class Attention(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.softmax(x[:, None] @ x[:, None].mT, -1)


def test_attention_weights_of_an_unknown_number_of_heads_are_refused() -> None:
    model = nn.Sequential(Attention())
    ReturnedActivations(model, SimpleNamespace(size=2), [], [AttentionSizes("0", {})])  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"attention weights of 0, of which each of 2 tensor ranks has its own heads"):
        model(torch.randn(1, 3, 4))
