"""Models that change some positions between blocks: Qwen3-VL adds features of images to the hidden states there."""

import copy

import pytest
import torch
from pool import Pool
from torch import nn

import zeroshard as zs

qwen = pytest.importorskip("transformers.models.qwen3_vl.modeling_qwen3_vl")


def model_of() -> nn.Module:
    torch.manual_seed(0)
    config = qwen.Qwen3VLTextConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=32,
        rope_scaling={"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4},
    )  # fmt: skip
    config._attn_implementation = "eager"
    return qwen.Qwen3VLTextModel(config)


class WithImages(nn.Module):
    """The language part of Qwen3-VL, given features for the positions of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model_of()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        masks = torch.zeros(tokens.shape, dtype=torch.bool)
        masks[:, 1:4] = True
        features = [torch.full((int(masks.sum()), 32), 0.1 * layer) for layer in (1, 2)]
        inputs = {"visual_pos_masks": masks, "deepstack_visual_embeds": features, "use_cache": False}
        return self.model(input_ids=tokens, **inputs).last_hidden_state.square().mean()


def differences(mesh: zs.Mesh) -> float:
    """The largest difference of a loss from that of a plain loop."""
    model = WithImages()
    plain = copy.deepcopy(model)
    engine = zs.Engine(model, lambda ps: torch.optim.SGD(ps, lr=0.1), zs.Plan(tensor_parallel=2), mesh=mesh)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    far = 0.0
    for step in range(3):
        tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(step))
        loss, expected = engine(tokens), plain(tokens)
        engine.backward(loss)
        engine.step()
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        far = max(far, abs(loss.item() - expected.item()))
    return far


def test_features_of_images_between_blocks_meet_whole_sequences(pool: Pool) -> None:
    assert max(pool.run(differences, 2)) < 1e-5
