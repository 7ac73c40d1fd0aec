"""Model FLOPs, compared with torch's FlopCounterMode over a run on values, with attention as plain products."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from zeroshard import ModelError
from zeroshard.planner.predict.model_flops import model_flops, sequence_flops


def llama(**settings: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 100}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**{**sizes, **heads, **settings})
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def language_batch(length: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(1, length, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def counted(model: nn.Module, *inputs: Any, **named: Any) -> int:
    """FLOPs of a run, as torch counts them."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        output = model(*inputs, **named)
        ends = [getattr(output, "loss", output)]
        if not isinstance(ends[0], torch.Tensor):  # an output of several
            ends = [end for end in dict(output).values() if isinstance(end, torch.Tensor) and end.requires_grad]
        torch.autograd.backward([end.sum() for end in ends])
    return counter.get_total_flops()


def test_a_language_model_has_the_flops_that_torch_counts() -> None:
    model = llama()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    assert model_flops(model, **language_batch(24)) == counted(model, **language_batch(24))
    assert all(value.equal(kept[name]) for name, value in model.state_dict().items())


def test_frozen_parameters_have_no_products_for_gradients() -> None:
    model = llama()
    everything = model_flops(model, **language_batch(24))
    for parameter in model.model.layers[1].parameters():  # type: ignore[union-attr,index]
        parameter.requires_grad_(False)
    found = model_flops(model, **language_batch(24))
    assert found == counted(model, **language_batch(24)) < everything


def test_convolutions_count_on_the_meta_device_too() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))

    images = torch.zeros(2, 3, 8, 8)
    with torch.device("meta"):
        bare = net()
    assert model_flops(bare, images) == counted(net(), images)


VISION: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "vit": ({"image_size": 16, "patch_size": 4}, {"pixel_values": (2, 3, 16, 16)}),
    "swin": ({"image_size": 32, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
             {"pixel_values": (2, 3, 32, 32)}),
    "convnext": ({"depths": [1, 1], "hidden_sizes": [16, 32], "num_stages": 2}, {"pixel_values": (2, 3, 32, 32)}),
    "whisper": ({"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
                 "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 60,
                 "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 16, "pad_token_id": 0,
                 "decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2},
                {"input_features": (2, 8, 24), "decoder_input_ids": (2, 5)}),
}  # fmt: skip
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize("family", VISION)
def test_models_of_images_and_sound_have_the_flops_that_torch_counts(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes, shapes = VISION[family]
    small = SMALL if family == "vit" else {}
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(family, **small, **sizes))
    given = {
        name: torch.zeros(shape, dtype=torch.long if name.endswith("ids") else torch.float32)
        for name, shape in shapes.items()
    }
    assert model_flops(model, **given) == pytest.approx(counted(model, **given), rel=0.01)


def test_causal_attention_needs_half_of_the_square() -> None:
    model, length = llama(), 32
    whole, causal = sequence_flops(model, language_batch, length)
    assert whole == counted(model, **language_batch(length))
    square = 2 * 3 * 2 * 2 * length**2 * 64  # layers, forward and backward, two products of 2 n² features
    assert whole - causal == square // 2


class LooksAtValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x[x > 0].view(-1, 4))
        return y


def test_a_forward_that_depends_on_values_is_refused() -> None:
    with pytest.raises(ModelError, match="LooksAtValues cannot be counted without values"):
        model_flops(LooksAtValues(), torch.ones(2, 4))


def test_an_output_without_a_gradient_is_refused() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(ModelError, match="output of Linear has no gradient"):
        model_flops(model, torch.ones(2, 4))
