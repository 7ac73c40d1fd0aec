"""Models that limit their own weights in the forward, against a plain loop."""

from functools import partial
from typing import Any

import pytest
import torch
from plain_loop import PlainRun, follows_plain_loop, plain_loop
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs


class Limited(nn.Module):
    """[B, 4] -> loss; each block clamps the weight that it is about to use."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block[0].weight.data.clamp_(-0.3, 0.3)  # type: ignore[index]
            x = x + block(x)
        return x.square().mean()


def gemma() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3nTextConfig(
        vocab_size=64,
        vocab_size_per_layer_input=64,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_kv_shared_layers=0,
        laurel_rank=8,
        layer_types=["sliding_attention", "full_attention"],
        activation_sparsity_pattern=[0.0] * 2,
        pad_token_id=0,
        altup_coef_clip=0.05,
    )
    model: nn.Module = transformers.Gemma3nForCausalLM(config).train()
    return model


def model_and_batches(name: str) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    if name == "blocks":
        return Limited(), [{"x": torch.randn(4, 4)} for _ in range(4)]
    tokens = [torch.randint(1, 64, (4, 6)) for _ in range(3)]
    return gemma(), [{"input_ids": each, "labels": each} for each in tokens]


def loss_of(output: Any) -> Tensor:
    loss: Tensor = getattr(output, "loss", output)
    return loss


def train(mesh: zs.Mesh, name: str, settings: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    model, batches = model_and_batches(name)
    engine = zs.Engine(model, lambda ps: torch.optim.SGD(ps, lr=0.5), zs.Plan(**settings), mesh=mesh)
    losses = []
    for batch in batches:
        loss = loss_of(engine(**{key: value.chunk(mesh.ranks)[mesh.rank] for key, value in batch.items()}))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine.state_dict()


def plain(name: str) -> PlainRun:
    model, batches = model_and_batches(name)
    steps = [[batch] for batch in batches]
    return plain_loop(model, partial(torch.optim.SGD, lr=0.5), steps, lambda model, batch: loss_of(model(**batch)))


PLANS: dict[str, dict[str, Any]] = {
    "stage 1": {"zero": 1},
    "stage 2": {"zero": 2, "transport": "network"},
    "stage 3": {"zero": 3, "transport": "network"},
    "stage 3, shared": {"zero": 3},
    "recomputed": {"zero": 3, "transport": "network", "recompute": "blocks"},
    "master weights": {"zero": 3, "offload": "optimizer", "transport": "network"},
}


@pytest.mark.parametrize("plan", PLANS)
def test_limits_in_the_forward_train_as_a_plain_loop(pool: Pool, plan: str) -> None:
    follows_plain_loop(pool.run(train, 2, "blocks", PLANS[plan]), plain("blocks"))


@pytest.mark.parametrize("plan", ["stage 1", "stage 3"])
def test_gemma_3n_trains_as_a_plain_loop(pool: Pool, plan: str) -> None:
    losses = plain("gemma").losses
    ranks = pool.run(train, 2, "gemma", PLANS[plan])
    assert [sum(each) / 2 for each in zip(*(found for found, _ in ranks), strict=True)] == pytest.approx(losses, 1e-5)
