"""Models of transformers with embedding and output layer in parts, and all else whole, beside the whole models."""

import copy
import io
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import Pool
from split_models.vocabularies import Ranks, Widths, close, seeded, split
from torch import Tensor

import zeroshard as zs
from zeroshard.errors import ModelError, PlanError
from zeroshard.losses.absent_logits import AbsentLogits
from zeroshard.losses.causal_models import set_loss_chunk
from zeroshard.tensor.split.logits import ShardedLogits

transformers = pytest.importorskip("transformers")
V, D, ROWS = 257, 12, 30
LLAMA = {
    "vocab_size": V, "use_cache": False, "hidden_size": D, "intermediate_size": 20, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "bos_token_id": 1,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
DROPPED = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
GPT2 = {"vocab_size": V, "use_cache": False, "n_positions": 32, "n_embd": D, "n_layer": 1, "n_head": 2,
        "bos_token_id": 1, "eos_token_id": None, **dict.fromkeys(DROPPED, 0)}  # fmt: skip
BERT = {**LLAMA, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
OPT = {**LLAMA, "ffn_dim": 20, "word_embed_proj_dim": D, "dropout": 0.0, "attention_dropout": 0.0}
FALCON = {**LLAMA, "hidden_dropout": 0.0, "attention_dropout": 0.0, "alibi": False}
T5 = {"vocab_size": V, "d_model": D, "d_kv": 6, "d_ff": 20, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0,
      "decoder_start_token_id": 0, "use_cache": False}  # fmt: skip
BART = {"vocab_size": V, "d_model": D, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "max_position_embeddings": 32,
        "dropout": 0.0, "use_cache": False}  # fmt: skip
Entry = tuple[str, str, dict[str, Any], list[str], str]
MODELS: dict[str, Entry] = {  # class, configuration, its settings, embeddings, output layer
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA, ["model.embed_tokens"], "lm_head"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**LLAMA, "head_dim": 6, "tie_word_embeddings": True},
              ["model.embed_tokens"], "lm_head"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2, ["transformer.wte"], "lm_head"),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**LLAMA, "head_dim": 6, "final_logit_softcapping": 2.0},
               ["model.embed_tokens"], "lm_head"),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {**LLAMA, "logits_scaling": 3.0}, ["model.embed_tokens"],
                "lm_head"),
    "opt": ("OPTForCausalLM", "OPTConfig", OPT, ["model.decoder.embed_tokens"], "lm_head"),
    "falcon": ("FalconForCausalLM", "FalconConfig", FALCON, ["transformer.word_embeddings"], "lm_head"),
    "bert": ("BertForMaskedLM", "BertConfig", BERT, ["bert.embeddings.word_embeddings"], "cls.predictions.decoder"),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5, ["shared", "encoder.embed_tokens", "decoder.embed_tokens"],
           "lm_head"),
    "bart": ("BartForConditionalGeneration", "BartConfig", BART,
             ["model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens"], "lm_head"),
}  # fmt: skip
CHUNKED = ("llama", "qwen3", "gpt2", "gemma2", "granite", "opt", "falcon")
ENCODERS = ("t5", "bart")  # which look up twice


def pair(name: str, ranks: Ranks, chunk: int | None = None) -> tuple[Any, Any]:
    """A model, and one of the same weights that has its vocabulary in parts."""
    kind, config, settings, embeddings, output = MODELS[name]
    seeded(6)
    whole = getattr(transformers, kind)(getattr(transformers, config)(**settings))
    with torch.no_grad():
        for parameter in whole.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)  # biases that are not zero
    parts = copy.deepcopy(whole)
    set_loss_chunk(parts, chunk)
    paths = {path for path, _ in parts.named_modules(remove_duplicate=False)}
    split(parts, ranks, [path for path in embeddings if path in paths], [output])
    return whole, parts


def words() -> tuple[Tensor, Tensor]:
    """Tokens, and labels of which some do not count."""
    seeded(9)
    tokens = torch.randint(2, V, (3, 10))
    labels = tokens.roll(1).clone()
    labels[0, :4] = -100
    return tokens, labels


def compare(whole: Any, parts: Any, ranks: Ranks) -> None:
    """Gradients of all parameters: of whole ones whole, equal on all ranks, and of parts theirs."""
    theirs = dict(whole.named_parameters())
    assert theirs.keys() == dict(parts.named_parameters()).keys()
    for name, found in parts.named_parameters():
        expected = theirs[name].grad
        assert (expected is None) == (found.grad is None), name
        if expected is not None:
            own = expected if found.shape == expected.shape else ranks.part(expected)
            largest = expected.abs().max().item()
            assert (found.grad - own).abs().max().item() <= 1e-5 * largest + 2e-9, name


def trained(mesh: zs.Mesh, name: str, chunk: int | None) -> float:
    ranks = Ranks(mesh)
    whole, parts = pair(name, ranks, chunk)
    tokens, labels = words()
    expected = whole(input_ids=tokens, labels=labels)
    expected.loss.backward()
    with Widths(V) as wide, warnings.catch_warnings():
        warnings.simplefilter("error")
        found = parts(input_ids=tokens, labels=labels)
        found.loss.backward()
    assert not wide.found
    close(found.loss.detach(), expected.loss.detach())
    compare(whole, parts, ranks)
    chunks = -(-ROWS // (chunk or ROWS))
    sums = (2 if name in ENCODERS else 1, chunks if name in CHUNKED else 1)
    lookups = 2 if name in ENCODERS else 1
    assert ranks.sent() == {
        "SUM_LOSSES": (2 * sums[1], 3 * ROWS),
        "SUM_ACTIVATIONS": (lookups + sums[1], (lookups + 1) * ROWS * D),
    }
    return float(found.loss)


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_the_whole_model(pool: Pool, name: str) -> None:
    for ranks in (2, 4):
        first, *others = pool.run(trained, ranks, name, None)
        assert all(loss == first for loss in others)


@pytest.mark.parametrize("name", CHUNKED)
def test_the_chunk_of_the_plan_holds(pool: Pool, name: str) -> None:
    pool.run(trained, 2, name, 7)


def by_logits(mesh: zs.Mesh, name: str) -> None:
    """A loss of the user's own, evaluation, and generation."""
    ranks = Ranks(mesh)
    whole, parts = pair(name, ranks)
    tokens, labels = words()
    more = {"decoder_input_ids": tokens} if name in ENCODERS else {}
    losses = []
    for model in (whole, parts):
        logits = model(input_ids=tokens, **more).logits[..., :-1, :]
        losses.append(F.cross_entropy(logits.reshape(-1, V).float(), labels[:, 1:].reshape(-1)))
        losses[-1].backward()
    close(losses[1].detach(), losses[0].detach())
    compare(whole, parts, ranks)
    with torch.no_grad():
        expected, found = (model.eval()(input_ids=tokens, **more).logits for model in (whole, parts))
        assert type(found) is Tensor
        torch.testing.assert_close(found, expected)
        for given in ({"labels": labels}, {"labels": labels, "num_items_in_batch": 50}):
            if "num_items_in_batch" not in given or name in CHUNKED:
                outputs = [model(input_ids=tokens, **given).loss for model in (whole, parts)]
                close(outputs[1], outputs[0])
    if name != "bert":
        drawn = [m.generate(tokens[:1, :4], max_new_tokens=5, do_sample=False, pad_token_id=0) for m in (whole, parts)]
        assert torch.equal(*drawn)


@pytest.mark.filterwarnings("ignore:.*generation flags.*")
@pytest.mark.parametrize("name", ["llama", "gemma2", "bert", "t5"])
def test_losses_of_logits_evaluation_and_generation(pool: Pool, name: str) -> None:
    pool.run(by_logits, 2, name)


def absent(mesh: zs.Mesh) -> None:
    ranks = Ranks(mesh)
    _, parts = pair("llama", ranks)
    tokens, labels = words()
    logits = parts(input_ids=tokens, labels=labels).logits
    assert isinstance(logits, AbsentLogits)
    with pytest.raises(PlanError, match=r"logits were read \(argmax\).*tensor_parallel.*leave the labels out"):
        logits.argmax(-1)
    whole, parts = pair("t5", ranks)
    theirs, ours = (model(input_ids=tokens, labels=labels).logits for model in (whole, parts))
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))  # read by the model itself, and so made
    whole, parts = pair("llama", ranks)
    with pytest.raises(ValueError, match="batch_size"):
        whole(input_ids=tokens, labels=labels, logits_to_keep=3)
    with pytest.raises(ValueError, match="batch_size"):
        parts(input_ids=tokens, labels=labels, logits_to_keep=3)


@pytest.mark.filterwarnings("ignore:All 257 logits")
def test_logits_beside_labels(pool: Pool) -> None:
    pool.run(absent, 2)


def copies(mesh: zs.Mesh, name: str) -> None:
    ranks = Ranks(mesh)
    whole, parts = pair(name, ranks)
    tokens, labels = words()
    parts(input_ids=tokens, labels=labels)
    copied = copy.deepcopy(parts)
    expected, found = (model(input_ids=tokens, labels=labels).loss for model in (whole, copied))
    close(found.detach(), expected.detach())
    found.backward()
    assert all(parameter.grad is None for parameter in parts.parameters())
    file = io.BytesIO()
    torch.save(parts, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with pytest.raises(ModelError, match=r"has the rows \d+ to \d+ of 257 and was loaded without the ranks"):
        loaded(input_ids=tokens, labels=labels)
    shown: Any = copied(input_ids=tokens, labels=labels).logits
    assert isinstance(shown, ShardedLogits)  # a copy has the loss of its class, which is computed in parts too


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_copies_work_with_the_same_ranks(pool: Pool, name: str) -> None:
    pool.run(copies, 2, name)
