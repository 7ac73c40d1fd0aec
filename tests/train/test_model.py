"""Built-in sizes and Hugging Face configurations behind one interface."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from zeroshard.engine import Engine
from zeroshard.errors import ModelError
from zeroshard.moe.policy import Mixture
from zeroshard.train.gpt import GPT
from zeroshard.train.model import build_model
from zeroshard.train.sizes import SIZES

GPT2 = {"model_type": "gpt2", "vocab_size": 256, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0, "dtype": "bfloat16"}
LLAMA = {"model_type": "llama", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 32}
LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32}


def folder(tmp_path: Path, config: dict[str, Any]) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize("name", SIZES)
def test_a_size_is_built_without_memory(name: str) -> None:
    built = build_model(name, vocabulary=256, context=64, dropout=0.1)
    assert all(tensor.is_meta for tensor in [*built.module.parameters(), *built.module.buffers()])
    assert built.name == name
    assert not built.hugging_face
    assert built.parameters == sum(parameter.numel() for parameter in built.module.parameters())
    assert isinstance(built.module, GPT)
    config = built.module.config
    assert (config.vocabulary, config.context, config.dropout) == (SIZES[name].vocabulary, 64, 0.1)


def test_a_size_grows_with_the_vocabulary() -> None:
    small, large = (build_model("tiny", vocabulary, context=64) for vocabulary in (256, 1000))
    assert large.parameters - small.parameters == (1000 - 256) * SIZES["tiny"].width


def test_a_built_in_model_is_asked_for_the_next_tokens() -> None:
    torch.manual_seed(0)
    built = build_model("tiny", 256, 16)
    model = GPT(SIZES["tiny"])
    tokens = torch.randint(256, (2, 9))
    logits = built.logits(model, tokens[:, :-1])
    assert logits.shape == (2, 8, 256)
    expected = F.cross_entropy(logits.reshape(-1, 256), tokens[:, 1:].reshape(-1))
    torch.testing.assert_close(built.loss(model, tokens), expected)


def test_a_misspelt_size_gets_its_nearest() -> None:
    with pytest.raises(ModelError, match=r"gpt-2xl names no model; did you mean gpt2-xl\? The sizes are tiny, small"):
        build_model("gpt-2xl", 256, 64)
    with pytest.raises(ModelError, match=r"zzz names no model; the sizes are tiny, small"):
        build_model("zzz", 256, 64)


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json, which does not exist"):
        build_model(str(tmp_path), 256, 64)
    with pytest.raises(ModelError, match=r"absent\.json, which does not exist"):
        build_model("absent.json", 256, 64)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"package transformers.*zeroshard\[hf\]"):
        build_model(folder(tmp_path, GPT2), 256, 32)


def test_dropout_of_a_configuration_is_not_overridden_in_silence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"--dropout 0\.1 is for built-in models.*config\.json"):
        build_model(folder(tmp_path, GPT2), 256, 32, dropout=0.1)


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_configuration_becomes_its_own_class(tmp_path: Path, config: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    built = build_model(folder(tmp_path, config), vocabulary=256, context=32)
    assert type(built.module) in (transformers.GPT2LMHeadModel, transformers.LlamaForCausalLM)
    assert built.hugging_face
    assert built.parameters == sum(parameter.numel() for parameter in built.module.parameters())
    tensors = [*built.module.parameters(), *built.module.buffers()]
    assert all(tensor.device.type == "cpu" and tensor.isfinite().all() for tensor in tensors)
    assert {parameter.dtype for parameter in built.module.parameters()} == {torch.float32}


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_configuration_is_asked_for_the_next_tokens(tmp_path: Path, config: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    built = build_model(str(Path(folder(tmp_path, config)) / "config.json"), vocabulary=256, context=32)
    model = built.module.eval()
    tokens = torch.randint(256, (2, 33))
    logits = built.logits(model, tokens[:, :-1])
    assert logits.shape == (2, 32, 256)
    expected = F.cross_entropy(logits[:, :-1].reshape(-1, 256), tokens[:, 1:-1].reshape(-1))
    torch.testing.assert_close(built.loss(model, tokens), expected)
    assert model(input_ids=tokens[:, :-1]).past_key_values is None


def test_a_configuration_is_drawn_from_the_global_generator(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    values = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        module = build_model(folder(tmp_path, GPT2), 256, 32).module
        values.append(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]))
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


def test_a_configuration_too_small_for_the_run_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    spec = folder(tmp_path, GPT2)
    with pytest.raises(ModelError, match="vocabulary of 256 and the tokenizer one of 300; use the tokenizer"):
        build_model(spec, vocabulary=300, context=32)
    with pytest.raises(ModelError, match="has 32 positions and the sequence is 33 tokens; shorten"):
        build_model(spec, vocabulary=256, context=33)


def test_relative_positions_have_no_bound(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    xlnet = {"model_type": "xlnet", "vocab_size": 256, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16}
    model = build_model(folder(tmp_path, xlnet), vocabulary=256, context=64).module  # its config has a bound of -1
    assert model(input_ids=torch.zeros(1, 64, dtype=torch.long)).logits.shape == (1, 64, 256)


@pytest.mark.parametrize("kind", ["t5", "vit", "clip"])
def test_models_for_other_tasks_are_left_to_code_of_the_user(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ModelError, match=r"config\.json configures no causal language model; make .* mine\.py:Net$"):
        build_model(folder(tmp_path, {"model_type": kind}), vocabulary=256, context=32)


@pytest.mark.parametrize("kind, name", [("bart", "BartForConditionalGeneration"), ("bert", "BertForMaskedLM")])
def test_a_named_class_that_reads_later_tokens_is_not_trained_as_another(tmp_path: Path, kind: str, name: str) -> None:
    pytest.importorskip("transformers")
    spec = folder(tmp_path, {"model_type": kind, "architectures": [name], "vocab_size": 256})
    with pytest.raises(ModelError, match=rf"configures {name}, which is no causal language model; make .* mine\.py"):
        build_model(spec, vocabulary=256, context=32)


@pytest.mark.parametrize("rows", [1, 3])
def test_labels_are_shifted_for_a_model_that_does_not(tmp_path: Path, rows: int) -> None:
    pytest.importorskip("transformers")
    sizes = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    spec = folder(tmp_path, {"model_type": "bart", "vocab_size": 256, **sizes})
    built = build_model(spec, vocabulary=256, context=32)
    assert type(built.module).__name__ == "BartForCausalLM" and not built.shifts
    tokens = torch.randint(256, (rows, 9))
    labels = tokens.index_fill(1, torch.tensor([4]), -100)
    built.module.eval()
    logits = built.logits(built.module, tokens[:, :-1])
    wanted = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(built.loss(built.module, tokens, labels), wanted)
    batch = built.batch(tokens, labels)
    loss, count = built.summed(built.module(**batch), batch)
    assert count == 7 * rows
    torch.testing.assert_close(loss, wanted * 7 * rows)


@pytest.mark.parametrize("config", [{}, {"model_type": "no-such-model"}])
def test_what_is_no_causal_language_model_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ModelError, match=r"cannot build a causal language model from .*config\.json"):
        build_model(folder(tmp_path, config), vocabulary=256, context=32)


def test_a_folder_with_weights_gives_a_pretrained_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    given = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    given.save_pretrained(tmp_path)
    assert build_model(str(tmp_path), 256, 32).values is None
    assert build_model(str(tmp_path / "config.json"), 256, 32, pretrained=True).values is None
    with pytest.raises(ModelError, match=r"experts=2 were asked for.* --no-pretrained"):
        build_model(str(tmp_path), 256, 32, mixture=Mixture(experts=2), pretrained=True)
    built = build_model(str(tmp_path), 256, 32, pretrained=True)
    assert all(parameter.is_meta for parameter in built.module.parameters()) and built.values is not None
    engine = Engine(built.module, lambda ps: torch.optim.SGD(ps, lr=0.1), initialise=built.values)
    engine.load_weights(built.values)
    tokens = torch.randint(256, (2, 32))
    assert torch.equal(built.logits(engine, tokens), given(input_ids=tokens).logits)


OWN = """
import torch
from types import SimpleNamespace

class Short(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=256, max_position_embeddings=16)

    def forward(self, tokens, targets):
        return tokens.float().mean()
"""


def test_an_own_model_too_small_for_the_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(OWN)
    with pytest.raises(ModelError, match="has 16 positions and the sequence is 32 tokens; shorten the sequence"):
        build_model(f"{tmp_path / 'short.py'}:Short", 256, 32)
    with pytest.raises(ModelError, match="has a vocabulary of 256 and the tokenizer one of 300"):
        build_model(f"{tmp_path / 'short.py'}:Short", 300, 16)
