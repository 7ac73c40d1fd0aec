"""What is found in models of every family, beside tables written by hand from the rules of Megatron-LM (1909.08053).

Heads are shared out whole; keys and values of K < t heads are on t / K ranks each; what is fused is cut by parts; the
layer that comes back is cut by its inputs; the vocabulary by rows; all else is whole.
"""

import re
from typing import Any

import pytest
import torch
from split_models.small_models import FAMILIES, LAYERS, family

from zeroshard.planner.predict.torch_internals import fakes
from zeroshard.tensor.find.found import FoundLayers, HeadArgument, Style
from zeroshard.tensor.find.layers import find
from zeroshard.tensor.find.layout import every
from zeroshard.tensor.policy import TensorParallel

# Features / parts of each segment; t ranks, k = min(t, KV heads). W is 32; d_ff, heads and KV heads as in FAMILIES.
TABLES = {
    "gpt": """
        embedding                            embedding  257/t
        blocks.*.attention.query_key_value   column     32/t 32/t 32/t
        blocks.*.attention.output            row        32/t
        blocks.*.mlp.up                      column     128/t
        blocks.*.mlp.down                    row        128/t
        head                                 output     257/t
    """,
    "gpt2": """
        transformer.wte                      embedding  257/t
        transformer.h.*.attn.c_attn          column     32/t 32/t 32/t
        transformer.h.*.attn.c_proj          row        32/t
        transformer.h.*.mlp.c_fc             column     128/t
        transformer.h.*.mlp.c_proj           row        128/t
        lm_head                              output     257/t
    """,
    "llama": """
        model.embed_tokens                   embedding  257/t
        model.layers.*.self_attn.q_proj      column     32/t
        model.layers.*.self_attn.k_proj      column     4K/k
        model.layers.*.self_attn.v_proj      column     4K/k
        model.layers.*.self_attn.o_proj      row        32/t
        model.layers.*.mlp.gate_proj         column     48/t
        model.layers.*.mlp.up_proj           column     48/t
        model.layers.*.mlp.down_proj         row        48/t
        lm_head                              output     257/t
    """,
    "qwen3": """
        model.embed_tokens                   embedding  257/t
        model.layers.*.self_attn.q_proj      column     64/t
        model.layers.*.self_attn.k_proj      column     16/2
        model.layers.*.self_attn.v_proj      column     16/2
        model.layers.*.self_attn.o_proj      row        64/t
        model.layers.*.self_attn.q_norm      partial
        model.layers.*.self_attn.k_norm      partial
        model.layers.*.mlp.gate_proj         column     48/t
        model.layers.*.mlp.up_proj           column     48/t
        model.layers.*.mlp.down_proj         row        48/t
        lm_head                              output     257/t
    """,
    "gemma2": """
        model.embed_tokens                   embedding  257/t
        model.layers.*.self_attn.q_proj      column     64/t
        model.layers.*.self_attn.k_proj      column     32/t
        model.layers.*.self_attn.v_proj      column     32/t
        model.layers.*.self_attn.o_proj      row        64/t
        model.layers.*.mlp.gate_proj         column     48/t
        model.layers.*.mlp.up_proj           column     48/t
        model.layers.*.mlp.down_proj         row        48/t
        lm_head                              output     257/t
    """,
    "phi3": """
        model.embed_tokens                   embedding  257/t
        model.layers.*.self_attn.qkv_proj    column     32/t 8/2 8/2
        model.layers.*.self_attn.o_proj      row        32/t
        model.layers.*.mlp.gate_up_proj      column     48/t 48/t
        model.layers.*.mlp.down_proj         row        48/t
        lm_head                              output     257/t
    """,
    "falcon": """
        transformer.word_embeddings                    embedding  257/t
        transformer.h.*.self_attention.query_key_value column     32/t 4/1 4/1
        transformer.h.*.self_attention.dense           row        32/t
        transformer.h.*.mlp.dense_h_to_4h              column     128/t
        transformer.h.*.mlp.dense_4h_to_h              row        128/t
        lm_head                                        output     257/t
    """,
    "falcon-heads": """
        transformer.word_embeddings                    embedding  257/t
        transformer.h.*.self_attention.query_key_value column     96/t
        transformer.h.*.self_attention.dense           row        32/t
        transformer.h.*.mlp.dense_h_to_4h              column     128/t
        transformer.h.*.mlp.dense_4h_to_h              row        128/t
        lm_head                                        output     257/t
    """,
    "opt": """
        model.decoder.embed_tokens                     embedding  257/t
        model.decoder.layers.*.self_attn.k_proj        column     32/t
        model.decoder.layers.*.self_attn.v_proj        column     32/t
        model.decoder.layers.*.self_attn.q_proj        column     32/t
        model.decoder.layers.*.self_attn.out_proj      row        32/t
        model.decoder.layers.*.fc1                     column     64/t
        model.decoder.layers.*.fc2                     row        64/t
        lm_head                                        output     257/t
    """,
    "bert": """
        bert.embeddings.word_embeddings                embedding  257/t
        bert.encoder.layer.*.attention.self.query      column     32/t
        bert.encoder.layer.*.attention.self.key        column     32/t
        bert.encoder.layer.*.attention.self.value      column     32/t
        bert.encoder.layer.*.attention.output.dense    row        32/t
        bert.encoder.layer.*.intermediate.dense        column     64/t
        bert.encoder.layer.*.output.dense              row        64/t
        cls.predictions.decoder                        output     257/t
    """,
    "t5": """
        shared                                         embedding  257/t
        encoder.embed_tokens                           embedding  257/t
        decoder.embed_tokens                           embedding  257/t
        encoder.block.*.layer.*.SelfAttention.q        column     16/t
        encoder.block.*.layer.*.SelfAttention.k        column     16/t
        encoder.block.*.layer.*.SelfAttention.v        column     16/t
        encoder.block.*.layer.*.SelfAttention.o        row        16/t
        encoder.block.*.layer.*.SelfAttention.relative_attention_bias heads 4/t
        encoder.block.*.layer.*.DenseReluDense.wi      column     64/t
        encoder.block.*.layer.*.DenseReluDense.wo      row        64/t
        decoder.block.*.layer.*.SelfAttention.q        column     16/t
        decoder.block.*.layer.*.SelfAttention.k        column     16/t
        decoder.block.*.layer.*.SelfAttention.v        column     16/t
        decoder.block.*.layer.*.SelfAttention.o        row        16/t
        decoder.block.*.layer.*.SelfAttention.relative_attention_bias heads 4/t
        decoder.block.*.layer.*.EncDecAttention.q      column     16/t
        decoder.block.*.layer.*.EncDecAttention.k      column     16/t
        decoder.block.*.layer.*.EncDecAttention.v      column     16/t
        decoder.block.*.layer.*.EncDecAttention.o      row        16/t
        decoder.block.*.layer.*.DenseReluDense.wi      column     64/t
        decoder.block.*.layer.*.DenseReluDense.wo      row        64/t
        lm_head                                        output     257/t
    """,
}  # fmt: skip
SIZES: dict[str, dict[int, dict[str, Any]]] = {  # of each attention, by t
    "gpt": {2: {"heads": 2}, 4: {"heads": 1}},
    "gpt2": {2: {"num_heads": 2, "split_size": 16}, 4: {"num_heads": 1, "split_size": 8}},
    "llama": {2: {}, 4: {"num_key_value_groups": 2}},
    "qwen3": {2: {}, 4: {"num_key_value_groups": 2}},
    "gemma2": {2: {}, 4: {}},
    "falcon": {2: {"num_heads": 4, "split_size": 16}, 4: {"num_heads": 2, "split_size": 8}},
    "falcon-groups": {
        2: {"num_heads": 4, "num_kv_heads": 1, "split_size": 16},
        4: {"num_heads": 2, "num_kv_heads": 1, "split_size": 8},
    },
    "falcon-heads": {
        2: {"num_heads": 4, "num_kv_heads": 4, "split_size": 16},
        4: {"num_heads": 2, "num_kv_heads": 2, "split_size": 8},
    },
    "opt": {2: {"num_heads": 2}, 4: {"num_heads": 1}},
    "bert": {2: {"num_attention_heads": 2, "all_head_size": 16}, 4: {"num_attention_heads": 1, "all_head_size": 8}},
    "t5": {2: {"n_heads": 2, "inner_dim": 8}, 4: {"n_heads": 1, "inner_dim": 4}},
}
STACKS = {
    **dict.fromkeys(("llama", "qwen3", "gemma2", "phi3"), ("model.layers",)),
    **dict.fromkeys(("gpt2", "falcon", "falcon-groups", "falcon-heads"), ("transformer.h",)),
    **{"gpt": ("blocks",), "opt": ("model.decoder.layers",), "bert": ("bert.encoder.layer",)},
    "t5": ("encoder.block", "decoder.block"),
}
Row = tuple[str, list[tuple[int, int]]]


def table(text: str, ranks: int, kv_heads: int = 2) -> dict[str, Row]:
    """A table of TABLES for so many ranks."""

    def number(text: str) -> int:
        times = re.fullmatch(r"(\d+)K", text)
        letters = {"t": ranks, "k": min(ranks, kv_heads)}
        return int(times.group(1)) * kv_heads if times else letters.get(text) or int(text)

    rows: dict[str, Row] = {}
    for line in text.strip().splitlines():
        name, style, *segments = line.split()
        rows[name] = style, [(number(a), number(b)) for a, b in (segment.split("/") for segment in segments)]
    return rows


def split_of(found: FoundLayers) -> dict[str, Row]:
    """What is split or partial, with `*` for numbers; those of all blocks must be alike."""
    rows: dict[str, Row] = {}
    for layer in found.layers:
        if layer.style is not Style.WHOLE or layer.partial:
            style = "partial" if layer.partial else layer.style.value
            row = style, [(segment.size, segment.parts) for segment in layer.segments]
            assert rows.setdefault(every(layer.name), row) == row
    return rows


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "name, attention",
    [(name, kind) for name in TABLES for kind in ("eager", "sdpa") if (name, kind) != ("gemma2", "sdpa")],
)  # Gemma2 caps its scores, which sdpa cannot
def test_families(name: str, attention: str, ranks: int) -> None:
    model = family(name) if name == "gpt" else family(name, attn_implementation=attention)
    found = find(model, ranks, TensorParallel(ranks))
    assert split_of(found) == table(TABLES[name], ranks)
    owners = [path for path, module in model.named_modules() if list(module.parameters(recurse=False))]
    assert [layer.name for layer in found.layers] == owners
    assert all(segment.ranks is None for layer in found.layers for segment in layer.segments)
    stacks = [tuple(f"{stack}.{n}" for n in range(LAYERS)) for stack in STACKS[name]]
    assert (list(found.blocks), found.whole_sequences) == (stacks, ())
    if name != "phi3":
        assert all(each.sizes == SIZES[name][ranks] for each in found.attentions)


@pytest.mark.parametrize("name", [*FAMILIES, "gpt"])
def test_what_is_found_was_tried(name: str) -> None:
    """No family relies on its class being known."""
    found = find(family(name), 4, TensorParallel(4))
    assert [layer.name for layer in found.layers if "not tried" in layer.reason] == []


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [2, 4])
def test_grouped_queries(ranks: int, kv_heads: int) -> None:
    found = find(family("llama", num_key_value_heads=kv_heads), ranks, TensorParallel(ranks))
    assert split_of(found) == table(TABLES["llama"], ranks, kv_heads)
    groups = 8 // ranks if kv_heads < ranks else 8 // kv_heads
    sizes = {} if groups == 8 // kv_heads else {"num_key_value_groups": groups}
    assert [each.sizes for each in found.attentions] == [sizes] * LAYERS


def test_falcon_in_groups() -> None:
    """Two groups of four queries, a key and a value, 4 features each: at t = 4 two ranks share a group."""
    (two,) = {layer.segments for layer in find(family("falcon-groups"), 2, TensorParallel(2)).layers
              if layer.name.endswith("query_key_value")}  # fmt: skip
    assert [(s.size, s.parts, s.ranks) for s in two] == [(48, 2, None)]
    (four,) = {layer.segments for layer in find(family("falcon-groups"), 4, TensorParallel(4)).layers
               if layer.name.endswith("query_key_value")}  # fmt: skip
    first, second = (0, 2), (2, 4)
    group = [(16, 2), (4, 1), (4, 1)]
    assert [(s.size, s.parts, s.ranks) for s in four] == [(*each, first) for each in group] + [
        (*each, second) for each in group
    ]


@pytest.mark.parametrize("ranks, heads, kv_heads", [(2, 4, 1), (4, 2, 1)])
def test_phi3_gets_a_configuration_of_its_own(ranks: int, heads: int, kv_heads: int) -> None:
    model = family("phi3")
    found = find(model, ranks, TensorParallel(ranks))
    for each in found.attentions:
        config = each.sizes["config"]
        assert (config.num_attention_heads, config.hidden_size) == (heads, 32)
        assert config._attn_implementation == model.config._attn_implementation
        sizes = {"num_key_value_heads": kv_heads} | ({"num_key_value_groups": 2} if ranks == 4 else {})
        assert {name: value for name, value in each.sizes.items() if name != "config"} == sizes
    assert model.config.num_attention_heads == 8 and model.model.layers[0].self_attn.config is model.config


def test_row_layers_name_the_columns_that_they_read() -> None:
    found = find(family("phi3"), 2, TensorParallel(2))
    rows = {every(layer.name): {*map(every, layer.columns)} for layer in found.layers if layer.style is Style.ROW}
    assert rows == {
        "model.layers.*.self_attn.o_proj": {"model.layers.*.self_attn.qkv_proj"},
        "model.layers.*.mlp.down_proj": {"model.layers.*.mlp.gate_up_proj"},
    }


def test_bert_shares_the_bias_of_its_output_layer() -> None:
    found = {layer.name: layer for layer in find(family("bert"), 2, TensorParallel(2)).layers}
    assert found["cls.predictions"].reason == "its parameters are those of cls.predictions.decoder, and split with it"
    assert found["cls.predictions.transform.dense"].style is Style.WHOLE


def test_gated_t5_and_cross_attention_of_gpt2() -> None:
    gated = split_of(find(family("t5", feed_forward_proj="gated-gelu"), 4, TensorParallel(4)))
    for inner in ("wi_0", "wi_1"):
        assert gated[f"decoder.block.*.layer.*.DenseReluDense.{inner}"] == ("column", [(64, 4)])
    crossed = split_of(find(family("gpt2", add_cross_attention=True), 4, TensorParallel(4)))
    assert crossed["transformer.h.*.crossattention.c_attn"] == ("column", [(32, 4), (32, 4)])
    assert crossed["transformer.h.*.crossattention.q_attn"] == ("column", [(32, 4)])


def test_alibi_is_made_for_all_heads() -> None:
    found = find(family("falcon", alibi=True), 2, TensorParallel(2))
    assert split_of(found) == table(TABLES["falcon"], 2)
    assert all(HeadArgument("alibi", 1) in each.arguments for each in found.attentions)


@pytest.mark.parametrize("name", ["gpt", "gpt2", "qwen3", "t5"])
def test_it_is_the_same_with_values_without_and_in_rehearsals(name: str) -> None:
    expected = find(family(name), 2, TensorParallel(2))
    assert find(family(name, device="cpu"), 2, TensorParallel(2)) == expected
    with fakes():
        assert find(family(name, device="cpu"), 2, TensorParallel(2)) == expected
    with torch.device("meta"):
        assert find(family(name), 2, TensorParallel(2)) == expected


def test_finding_changes_nothing() -> None:
    model = family("gpt2", device="cpu")
    before = {name: (id(p), p._version) for name, p in model.named_parameters()}
    said, state = repr(model), torch.random.get_rng_state()
    find(model, 4, TensorParallel(4))
    assert {name: (id(p), p._version) for name, p in model.named_parameters()} == before
    assert repr(model) == said and model.training and torch.equal(torch.random.get_rng_state(), state)
    assert model.transformer.h[0].attn.split_size == 32


def test_one_rank_finds_nothing_to_do() -> None:
    assert find(family("gpt2"), 1, TensorParallel()) == FoundLayers()
