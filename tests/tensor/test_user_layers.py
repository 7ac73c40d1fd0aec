"""The user's own plans of layers: patterns, styles of DTensor and of transformers, and every mistake."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from split_models.small_models import Stack, family
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional as F

import zeroshard as zs
from tensor.test_structure import HEADS, SIZE, WIDTH, FeedForward, Fused, shapes
from zeroshard.errors import PlanError
from zeroshard.tensor.find.found import FoundLayer, Style
from zeroshard.tensor.find.layers import find
from zeroshard.tensor.find.layout import every
from zeroshard.tensor.policy import TensorParallel

BLOCK = "model.layers.*."


def layers_of(model: nn.Module, layers: Any, ranks: int = 2) -> dict[str, FoundLayer]:
    found = find(model, ranks, TensorParallel(ranks, layers=layers))
    return {every(layer.name): layer for layer in found.layers}


def split(found: Mapping[str, FoundLayer]) -> dict[str, str]:
    return {name: layer.style.value for name, layer in found.items() if layer.style is not Style.WHOLE}


LLAMA = split(layers_of(family("llama"), None))
DTENSOR: dict[str, Any] = {  # as for torch's parallelize_module
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "model.norm": SequenceParallel(),
    "model.layers.*.input_layernorm": SequenceParallel(),
    "model.layers.*.self_attn": PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
    ),
    **{f"model.layers.*.self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
    "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
    "model.layers.*.mlp": PrepareModuleOutput(output_layouts=(Replicate(),), desired_output_layouts=(Replicate(),)),
    **{f"model.layers.*.mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")},
    "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
NAMES = {
    **{f"self_attn.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")},
    **{"self_attn.o_proj": "rowwise", "mlp.gate_proj": "ColwiseParallel", "mlp.up_proj": "column"},
    "mlp.down_proj": "RowwiseParallel",
}


@pytest.mark.parametrize(
    "layers",
    [
        DTENSOR,
        {f"layers.*.{name}": style for name, style in NAMES.items()},
        [f"model.layers.*.{name} = {style}" for name, style in NAMES.items()],
        {f"layers.[01].{name}.weight": style for name, style in NAMES.items()},
        {"lm_head": "output", "embed_tokens": "embedding"},
    ],
)
def test_plans_that_say_what_is_found_anyway(layers: Any) -> None:
    found = layers_of(family("llama"), layers)
    assert split(found) == LLAMA
    assert split(layers_of(family("llama"), TensorParallel(2, layers=layers).layers)) == LLAMA  # as it is stored


def test_the_reason_is_what_was_said() -> None:
    found = layers_of(family("llama"), {f"layers.*.{name}": style for name, style in NAMES.items()})
    assert found["model.layers.*.mlp.gate_proj"].reason == "24 of 48 inner features; layers says 'ColwiseParallel'"
    plan = layers_of(family("llama"), None)
    assert plan["model.layers.*.mlp.down_proj"].reason == "24 of 48 inner features; 'rowwise' in the model's plan"
    own = layers_of(family("opt"), None)
    assert own["model.decoder.layers.*.fc1"].reason == "32 of 64 inner features; found by its structure"


@pytest.mark.parametrize(
    "pattern, kept",
    [
        ("layers.*.mlp", {f"{BLOCK}mlp.{name}_proj" for name in ("gate", "up", "down")}),
        ("model.layers.*", {name for name in LLAMA if "layers" in name}),
        ("lm_head", {"lm_head"}),
        ("embed_tokens", {"model.embed_tokens"}),
    ],
)
def test_whole_is_for_all_that_is_inside(pattern: str, kept: set[str]) -> None:
    found = layers_of(family("llama"), {pattern: "whole"})
    assert split(found) == {name: style for name, style in LLAMA.items() if name not in kept}
    assert {found[name].reason for name in kept} == {"layers says 'whole'"}


def test_one_layer_that_is_whole_leaves_its_partners_whole() -> None:
    found = layers_of(family("llama"), {"layers.*.mlp.up_proj": "whole"})
    assert {name for name in LLAMA if "mlp" in name} & set(split(found)) == set()


def test_a_tied_vocabulary_is_whole_together() -> None:
    found = layers_of(family("gpt2"), {"lm_head": "whole"})
    assert found["transformer.wte"].reason == "shares its weight with lm_head; layers says 'whole'"


def test_what_is_said_of_a_layer_decides_for_its_module() -> None:
    model = family("gpt")
    found = layers_of(model, {"blocks.0.mlp.up": "column", "blocks.0.mlp.down": "row"})
    assert split(found) == split(layers_of(model, None))
    names = {layer.name: layer for layer in find(model, 2, TensorParallel(2, layers={
        "blocks.0.mlp.up": "column", "blocks.0.mlp.down": "row"})).layers}  # fmt: skip
    assert "layers says" in names["blocks.0.mlp.up"].reason and "structure" in names["blocks.1.mlp.up"].reason


class Strange(nn.Module):
    """Attention whose layers have names that say nothing, and whose forward cannot be tried."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, SIZE
        self.a, self.b, self.c = (nn.Linear(WIDTH, HEADS * SIZE) for _ in range(3))
        self.d = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x: Tensor, scale: Any) -> Tensor:
        q, k, v = (each(x).view(*x.shape[:2], self.num_heads, -1).transpose(1, 2) for each in (self.a, self.b, self.c))
        y = F.scaled_dot_product_attention(q, k, v, scale=scale["x"])
        return self.d(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def test_layers_that_cannot_be_tried_are_split_on_the_users_word() -> None:
    model = Stack(Strange)
    assert split(layers_of(model, None)) == {}
    layers = {f"blocks.*.inner.{name}": "column" for name in "abc"} | {"blocks.*.inner.d": "row"}
    policy = TensorParallel(2, layers=layers)
    found = find(model, 2, policy)
    rows = {every(layer.name): layer for layer in found.layers}
    assert shapes(rows["blocks.*.inner.b"]) == ("column", [(24, 2)])
    assert "not tried: its forward cannot be tried (TypeError" in rows["blocks.*.inner.b"].reason
    assert [each.sizes for each in found.attentions] == [{"num_heads": 2}] * 2


def test_a_vocabulary_that_only_the_user_knows() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(11, 8), nn.Embedding(11, 8)
            self.scores = nn.Linear(8, 11)

    assert split(layers_of(Net(), None)) == {}
    found = layers_of(Net(), {"words": "embedding", "scores": "output"})
    assert split(found) == {"words": "embedding", "scores": "output"}
    assert shapes(found["scores"]) == ("output", [(11, 2)])
    assert found["places"].reason == "not of the vocabulary"


def test_several_models_of_transformers_in_one() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = family("llama"), family("qwen3")

    found = layers_of(Two(), None)
    for name in ("one", "other"):
        assert shapes(found[f"{name}.model.layers.*.mlp.up_proj"]) == ("column", [(48, 2)])
        assert "the model's plan" in found[f"{name}.model.layers.*.mlp.up_proj"].reason
    kept = layers_of(Two(), {"layers.*.mlp": "whole"})  # of both
    assert not [name for name in split(kept) if "mlp" in name]


LLAMA_LAYERS = "model.layers.*.self_attn.q_proj"
MISTAKES: list[tuple[str, Any, str]] = [
    ("llama", {"layers.*.mlp.upproj": "column"},
     r"tensor_parallel.layers names 'layers.\*.mlp.upproj', which is no module of the model. "
     r"Did you mean 'layers.\*.mlp.up_proj' or "),
    ("llama", {"xyz": "column"}, r"names 'xyz', which is no module of the model. Write a path as named_modules"),
    ("llama", {"layers.*.mlp.up_proj": "columns"}, r"has a style 'columns', which is none. Did you mean 'column'\?"),
    ("llama", {"layers.*.mlp.up_proj": "sideways!"}, r"has a style 'sideways!', which is none. Styles are column, row"),
    ("llama", {"layers.*.mlp.up_proj": "column", "model.layers.0.mlp.up_proj": "column"},
     r"names 'model.layers.0.mlp.up_proj' twice, by 'layers.\*.mlp.up_proj' and by 'model.layers.0.mlp.up_proj'"),
    ("llama", {"layers.*.mlp": "whole", "layers.*.mlp.up_proj": "column"}, r"names '\S+mlp.up_proj' twice"),
    ("llama", {"layers.*.mlp.down_proj": "row"},
     r"gives 'model.layers.0.mlp.down_proj' the style 'row', and no column-parallel layer stands before it.*"
     r"Give the layers that make what it reads the style 'column'"),
    ("llama", {"layers.*.mlp.up_proj": "column"},
     r"gives 'model.layers.0.mlp.up_proj' the style 'column', and no row-parallel layer reads what it makes"),
    ("llama", {"layers.*.mlp": "column"}, r"gives '\S+mlp' the style 'column', and LlamaMLP is no linear layer"),
    ("llama", {"layers.*.input_layernorm": "column"}, r"the style 'column', and LlamaRMSNorm is no linear layer"),
    ("llama", {"embed_tokens": "column"}, r"'model.embed_tokens' the style 'column', and Embedding is no linear"),
    ("llama", {"lm_head": "embedding"}, r"'lm_head' the style 'embedding', and a Linear is no embedding"),
    ("llama", {"embed_tokens": "embedding_colwise"}, r"an embedding is split by its vocabulary, not by its features"),
    ("llama", {"layers.*.mlp.up_proj": "moe_tp_experts"}, r"experts are not split. Leave it out"),
    ("llama", {"layers.*.mlp.gate_proj": "column", "layers.*.mlp.down_proj": "row"},
     r"splits 'model.layers.0.mlp' \(LlamaMLP\), which cannot be split: its forward fails on the features of one rank"),
]  # fmt: skip


@pytest.mark.parametrize("name, layers, message", MISTAKES)
def test_mistakes(name: str, layers: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        layers_of(family(name), layers)


@pytest.mark.parametrize(
    "make, layers, message",
    [
        (lambda: Fused("features"), {"qkv": "column", "wo": "row"},
         r"splits 'blocks.0.inner' \(Fused\), which cannot be split: its forward makes something else of the features"),
        (lambda: FeedForward(lambda x: x.softmax(-1)), {"first": "column", "last": "row"},
         r"cannot be split: its forward makes something else of the features of one rank"),
        (lambda: FeedForward(F.relu), {"last": "column", "first": "row"},
         r"which cannot be split: its forward"),
    ],
)  # fmt: skip
def test_a_split_that_changes_what_is_computed_is_refused(make: Any, layers: dict[str, str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        layers_of(Stack(make), {f"blocks.*.inner.{name}": style for name, style in layers.items()})


@pytest.mark.parametrize(
    "name, changes, ranks, message",
    [
        ("gpt2", {"n_head": 2}, 4,
         r"'transformer.h.0.attn' \(GPT2Attention\) has 2 attention heads, and tensor_parallel=4 does not divide them. "
         r"Set tensor_parallel to 2, or leave attention whole: "
         r"TensorParallel\(4, layers={'transformer.h.\*.attn': 'whole'}\)"),
        ("llama", {"num_attention_heads": 8}, 3, r"has 8 attention heads and 2 key-value heads, and tensor_parallel=3"),
        ("llama", {"num_attention_heads": 12, "hidden_size": 48, "num_key_value_heads": 3}, 2,
         r"12 attention heads and 3 key-value heads, and tensor_parallel=2 neither divides the key-value heads nor is "
         r"a multiple of them. Set tensor_parallel to one of 3, 6, 12"),
        ("llama", {"intermediate_size": 50}, 4,
         r"'model.layers.0.mlp' has 50 inner features, and tensor_parallel=4 does not divide them. Set "
         r"tensor_parallel to one of 2, 5, 10, 25, 50, or leave it whole: "
         r"TensorParallel\(4, layers={'model.layers.\*.mlp': 'whole'}\)"),
    ],
)  # fmt: skip
def test_numbers_that_do_not_divide(name: str, changes: dict[str, int], ranks: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        find(family(name, **changes), ranks, TensorParallel(ranks))


def test_the_way_out_of_numbers_that_do_not_divide_works() -> None:
    found = layers_of(family("gpt2", n_head=2), {"transformer.h.*.attn": "whole"}, ranks=4)
    assert "transformer.h.*.mlp.c_fc" in split(found) and "transformer.h.*.attn.c_attn" not in split(found)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"ranks": 0}, "tensor_parallel is 0; it must be a whole number of 1 or more"),
        ({"ranks": True}, "tensor_parallel is True"),
        ({"sequence": 1}, "tensor_parallel.sequence is 1; it must be True or False"),
        ({"layers": "up"}, "tensor_parallel.layers has 'up'; it must be a table of paths and styles"),
        ({"layers": {"up": ""}}, "has 'up='; it must be"),
        ({"layers": [3]}, "has 3; it must be"),
    ],
)
def test_settings_out_of_range(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        TensorParallel(**given)


def test_a_plan_of_layers_is_stored_with_the_plan() -> None:
    plan = zs.Plan(tensor_parallel=TensorParallel(2, layers=DTENSOR))
    assert zs.Plan.from_dict(plan.as_dict()) == plan
    assert plan.tensor.styles is not None
    styles = dict(plan.tensor.styles)
    assert styles["lm_head"] == "colwise_gather_output" and styles["model.embed_tokens"] == "rowwise_split_input"


def test_experts_of_a_models_plan_stay_whole() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_experts=4, moe_intermediate_size=16, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
    found = find(model, 2, TensorParallel(2))
    rows = {every(layer.name): layer for layer in found.layers}
    assert rows["model.layers.*.self_attn.q_proj"].style is Style.COLUMN
    assert rows["model.layers.*.mlp.experts"].style is Style.WHOLE
    assert "may mix positions, and is whole" in found.whole_sequences[0][1]


def test_a_norm_over_all_heads_that_a_models_plan_gathers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Olmo2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Olmo2ForCausalLM(config)
    rows = layers_of(model, None)
    assert rows["model.layers.*.self_attn.q_proj"].style is Style.COLUMN
    assert rows["model.layers.*.self_attn.q_norm"].gathers
    assert rows["model.layers.*.mlp.up_proj"].style is Style.COLUMN


def test_all_numbers_that_do_not_divide_are_named_at_once() -> None:
    message = (
        r"'model.layers.0.self_attn' \(LlamaAttention\) has 4 attention heads and 2 key-value heads and "
        r"'model.layers.0.mlp' has 50 inner features, and tensor_parallel=3 divides neither. Set tensor_parallel to 2, "
        r"or leave them whole: TensorParallel\(3, layers={'model.layers.\*.self_attn': 'whole', "
        r"'model.layers.\*.mlp': 'whole'}\)."
    )
    with pytest.raises(PlanError, match=message):
        find(family("llama", num_attention_heads=4, intermediate_size=50), 3, TensorParallel(3))
