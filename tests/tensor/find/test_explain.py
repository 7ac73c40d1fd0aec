"""What is said about each module: how it is split, and why the rest is whole."""

import io

from rich.console import Console
from split_models.small_models import Stack, family
from tensor.test_structure import Separate
from torch import nn

from zeroshard.report.plan_text import layers_table
from zeroshard.tensor.find.explain import explain, explain_sequences
from zeroshard.tensor.find.layers import find
from zeroshard.tensor.policy import TensorParallel


def test_alike_modules_of_blocks_are_one_row() -> None:
    model = family("qwen3")
    rows = explain(model, find(model, 4, TensorParallel(4)), 4)
    facts = {row.name: (row.count, row.kind, row.style, row.part) for row in rows}
    assert facts == {
        "model.embed_tokens": (1, "Embedding", "embedding", "65 of 257"),
        "model.layers.*.self_attn.q_proj": (2, "Linear", "column", "16 of 64"),
        "model.layers.*.self_attn.k_proj": (2, "Linear", "column", "8 of 16"),
        "model.layers.*.self_attn.v_proj": (2, "Linear", "column", "8 of 16"),
        "model.layers.*.self_attn.o_proj": (2, "Linear", "row", "16 of 64"),
        "model.layers.*.self_attn.q_norm": (2, "Qwen3RMSNorm", "whole, partial gradient", ""),
        "model.layers.*.self_attn.k_norm": (2, "Qwen3RMSNorm", "whole, partial gradient", ""),
        "model.layers.*.mlp.gate_proj": (2, "Linear", "column", "12 of 48"),
        "model.layers.*.mlp.up_proj": (2, "Linear", "column", "12 of 48"),
        "model.layers.*.mlp.down_proj": (2, "Linear", "row", "12 of 48"),
        "model.layers.*.input_layernorm": (2, "Qwen3RMSNorm", "whole", ""),
        "model.layers.*.post_attention_layernorm": (2, "Qwen3RMSNorm", "whole", ""),
        "model.norm": (1, "Qwen3RMSNorm", "whole", ""),
        "lm_head": (1, "Linear", "output", "65 of 257"),
    }
    reasons = {row.name: row.reason for row in rows}
    assert reasons["model.layers.*.self_attn.k_proj"] == (
        "1 of 2 key-value heads, each on 2 ranks; 'colwise' in the model's plan"
    )
    assert rows[0].as_dict()["part"] == "65 of 257"


def test_modules_of_blocks_that_differ_have_rows_of_their_own() -> None:
    model = family("gpt")
    policy = TensorParallel(2, layers={"blocks.1.mlp": "whole"})
    rows = {row.name: row for row in explain(model, find(model, 2, policy), 2)}
    assert (rows["blocks.0.mlp.up"].style, rows["blocks.1.mlp.up"].style) == ("column", "whole")
    assert rows["blocks.1.mlp.up"].reason == "layers says 'whole'" and rows["blocks.*.attention.output"].count == 2


def test_sentences_about_sequences() -> None:
    model = family("t5")
    assert explain_sequences(find(model, 2, TensorParallel(2)), sequence=True) == [
        "encoder.block.0 to encoder.block.1 work on parts of sequences between their split layers.",
        "decoder.block.0 to decoder.block.1 work on parts of sequences between their split layers.",
    ]
    whole = Stack(lambda: nn.Sequential(Separate(), nn.Conv1d(3, 3, 1)))
    assert explain_sequences(find(whole, 2, TensorParallel(2)), sequence=True) == [
        "blocks works on whole sequences: blocks.0: inner.1 (Conv1d) may mix positions, and is whole."
    ]
    off = find(model, 2, TensorParallel(2, sequence=False))
    assert "Sequence parallelism is off" in explain_sequences(off, sequence=False)[0]


def test_the_table() -> None:
    model = family("falcon")
    out = io.StringIO()
    Console(file=out, width=120).print(layers_table(explain(model, find(model, 2, TensorParallel(2)), 2), 2))
    lines = " ".join(out.getvalue().split())
    assert "Layers on 2 ranks of tensor parallelism" in lines
    assert "FalconLinear column" in lines and "LayerNorm whole" in lines
    assert "64 of 128" in lines and "2x" in lines
