"""Input embeddings and output layers of models of transformers, and of models without them."""

import pytest
from torch import nn

from zeroshard.units.token_layers import output_layer, token_layers

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_layers_are_those_of_the_model() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    assert output_layer(model) is model.lm_head
    assert list(token_layers(model)) == [model.model.embed_tokens, model.lm_head]
    assert list(token_layers(model.model)) == [model.model.embed_tokens]


class Abstract(nn.Module):
    """A model whose class names no layers."""

    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError


@pytest.mark.parametrize("model", [nn.Linear(2, 2), Abstract()])
def test_other_models_have_none(model: nn.Module) -> None:
    assert output_layer(model) is None and list(token_layers(model)) == []
