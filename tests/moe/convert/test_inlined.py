"""Mixtures in blocks that compute their feed-forward layers themselves: torch's own, and those of BERT's kind."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.errors import ModelError
from zeroshard.moe import MoE, replace_ffn
from zeroshard.moe.experts.experts import Experts

PADDED = torch.tensor([[False] * 4 + [True], [False] * 5])


def transformer(dropout: float = 0.1, activation: Any = "relu") -> nn.Transformer:
    torch.manual_seed(0)
    return nn.Transformer(32, 4, 4, 2, 64, dropout, activation, batch_first=True)


def translated(model: nn.Transformer) -> Tensor:
    """The output for two padded sentences."""
    generator = torch.Generator().manual_seed(1)
    source, target = torch.randn(2, 5, 32, generator=generator), torch.randn(2, 4, 32, generator=generator)
    output: Tensor = model(source, target, src_key_padding_mask=PADDED, memory_key_padding_mask=PADDED)
    return output


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("activation", ["relu", nn.GELU(), torch.nn.functional.silu])
@pytest.mark.parametrize("gradients", [True, False])
def test_blocks_of_torch_compute_what_they_did(activation: Any, gradients: bool) -> None:
    """Without gradients too, where torch's encoders compute with the weights of their blocks."""
    model = transformer(activation=activation).eval()
    with torch.set_grad_enabled(gradients):
        before = translated(model)
        table = replace_ffn(model, experts=4, router="mixtral")
        after = translated(model)
    assert table.replaced == tuple(
        f"{part}.linear1" for part in ("encoder.layers.1", "encoder.layers.3", "decoder.layers.1")
    )
    assert all(isinstance(model.get_submodule(path), MoE) for path in table.replaced)
    real = ~PADDED[:, : before.shape[1]]
    torch.testing.assert_close(after[real], before[real], rtol=1e-5, atol=1e-5)


def test_hidden_features_are_dropped_in_training_as_before() -> None:
    model = transformer(dropout=0.3)
    replace_ffn(model, every=1, experts=2, router="mixtral")
    layer: Any = model.encoder.layers[0].linear1
    assert isinstance(layer.experts, Experts) and layer.experts.dropout == 0.3 and layer.training


def test_blocks_that_stay_are_as_they_were() -> None:
    model, plain = transformer(), transformer()
    replace_ffn(model, every=2)
    for (path, module), (_, other) in zip(
        model.encoder.layers[0].named_modules(), plain.encoder.layers[0].named_modules(), strict=True
    ):
        assert type(module) is type(other), path
    assert list(model.encoder.layers[0].state_dict()) == list(plain.encoder.layers[0].state_dict())
    before = {name: id(module) for name, module in plain.named_modules()}
    with pytest.raises(ModelError, match="granularity=3"):
        replace_ffn(plain, router="mixtral", upcycling=zs.moe.Upcycling(granularity=3))
    assert {name: id(module) for name, module in plain.named_modules()} == before
    assert plain.encoder.layers[0].activation_relu_or_gelu == 1


def test_mixtures_in_blocks_of_torch_train_in_an_engine_as_in_a_loop() -> None:
    losses = []
    for engine in (True, False):
        model = transformer(dropout=0.0)
        replace_ffn(model, experts=4, router="mixtral")
        make = partial(torch.optim.SGD, lr=0.1)
        net = Squared(model)
        run: Any = zs.Engine(net, make, zs.Plan(zero=3)) if engine else net
        optimizer = None if engine else make(net.parameters())
        found = []
        for _ in range(3):
            loss = run()
            if optimizer is None:
                run.backward(loss)
                run.step()
            else:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            found.append(loss.item())
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][2] < losses[0][0]


class Squared(nn.Module):
    """The mean square of what a transformer makes."""

    def __init__(self, model: nn.Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> Tensor:
        return translated(self.model).square().mean() * 10


@pytest.mark.parametrize("name", ["Bert", "Electra"])
def test_blocks_of_encoders_compute_what_they_did(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes, vocab_size=50)
    model = getattr(transformers, f"{name}Model")(config).eval()
    tokens = torch.arange(14).view(2, 7)
    before = model(tokens).last_hidden_state
    table = replace_ffn(model, experts=4, router="mixtral")
    assert table.replaced == ("encoder.layer.1.intermediate",)
    torch.testing.assert_close(model(tokens).last_hidden_state, before, rtol=1e-5, atol=1e-5)


def test_an_output_that_does_more_with_its_input_is_left_alone() -> None:
    transformers = pytest.importorskip("transformers")
    kind = transformers.models.bert.modeling_bert.BertOutput

    class Output(kind):  # type: ignore[misc,valid-type]
        def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
            return self.dense(hidden) + hidden.sum() + x

    config = transformers.BertConfig(hidden_size=32, intermediate_size=64, num_attention_heads=4)
    block = transformers.models.bert.modeling_bert.BertLayer(config)
    block.output = Output(config)
    with pytest.raises(ModelError, match="BertLayer is more than a feed-forward layer"):
        replace_ffn(nn.Sequential(block, nn.Identity()), every=1)
