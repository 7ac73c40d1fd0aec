"""Dense models become mixtures: what is replaced, what stays, and what the experts begin as."""

import copy
import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from selection import by_default
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.errors import ModelError
from zeroshard.moe.convert.replace import Upcycling, replace_ffn
from zeroshard.moe.experts.experts import ExpertModules, Experts
from zeroshard.moe.layer import MoE
from zeroshard.moe.routing.gating import Gating
from zeroshard.moe.routing.router import Router
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig

transformers = pytest.importorskip("transformers")
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)  # gradients of key biases are nothing but rounding
TEXT: dict[str, Any] = {"vocab_size": 29, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
LLAMA: dict[str, Any] = {
    **{"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 4, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "max_position_embeddings": 32},
}


def llama() -> Any:
    """Four blocks with gated layers."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, **LLAMA))


def gpt2(dropout: float = 0.0) -> Any:
    """Two blocks whose linear layers have transposed weights and biases."""
    config = transformers.GPT2Config(
        **TEXT, n_positions=32, n_embd=12, n_layer=2, n_head=2, resid_pdrop=dropout, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config)


def t5(kind: str = "relu") -> Any:
    """An encoder and a decoder of two blocks each."""
    config = transformers.T5Config(
        **TEXT, d_model=12, d_kv=6, d_ff=20, num_layers=2, num_heads=2, decoder_start_token_id=0,
        feed_forward_proj=kind,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def ours() -> Any:
    """The built-in model."""
    return GPT(GPTConfig(vocabulary=29, context=32, width=16, heads=2, layers=2))


MODELS = {"llama": llama, "gpt2": gpt2, "t5": t5, "ours": ours, "gated t5": lambda: t5("gated-gelu")}
PATHS = {
    "llama": ("model.layers.1.mlp", "model.layers.3.mlp"),
    "gpt2": ("transformer.h.1.mlp",),
    "t5": ("encoder.block.1.layer.1.DenseReluDense", "decoder.block.1.layer.2.DenseReluDense"),
    "ours": ("blocks.1.mlp",),
}


def drawn(name: str) -> Any:
    """A model with weights large enough to tell layers apart, in evaluation."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model.eval()


def outputs(model: Any) -> Tensor:
    """Logits of two rows of tokens."""
    tokens = torch.randint(2, 29, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        if isinstance(model, GPT):
            return model(tokens)
        return model(input_ids=tokens, labels=tokens).logits


@pytest.mark.parametrize("name", MODELS)
def test_copies_with_gates_that_add_up_to_one_are_the_dense_layer(name: str) -> None:
    model = drawn(name)
    before = outputs(model)
    table = replace_ffn(model, every=2, experts=4, router="gshard")
    assert table.replaced == PATHS[name.split()[-1]]
    for path in table.replaced:
        mixture = model.get_submodule(path)
        assert isinstance(mixture, MoE) and isinstance(mixture.experts, Experts)
    after = outputs(model)
    assert (after - before).abs().max() <= 2e-6 * before.abs().max()


def test_the_table_says_what_was_replaced_and_why_not() -> None:
    text = str(replace_ffn(drawn("llama"), every=2, experts=4))
    lines = text.splitlines()
    assert len(lines) == 5 and lines[0].split() == ["layer", "was", "experts", "parameters"]
    assert lines[1].split()[:4] == ["model.layers.0.mlp", "LlamaMLP", "-", "720"]
    assert lines[1].endswith("number 1 of its list, and every 2 are replaced")
    assert "720 -> 2,928" in lines[2] and "stacked experts, gated silu; copies, the same function" in lines[2]


class OwnBlock(nn.TransformerEncoderLayer):
    """A block whose forward may use its layers otherwise."""

    def _ff_block(self, x: Tensor) -> Tensor:
        return 2 * super()._ff_block(x)


def test_layers_inside_of_unknown_blocks_are_refused_with_the_reason() -> None:
    with pytest.raises(ModelError, match="OwnBlock is more than a feed-forward layer"):
        replace_ffn(nn.TransformerEncoder(OwnBlock(16, 2, 32), 2, enable_nested_tensor=False), every=1)
    with pytest.raises(ModelError, match="no feed-forward layers"):
        replace_ffn(nn.Linear(4, 4))


def test_layers_that_drop_their_output_keep_their_module() -> None:
    torch.manual_seed(0)
    model = gpt2(dropout=0.1).eval()
    before = outputs(model)
    table = replace_ffn(model, experts=3)
    mixture = model.get_submodule(table.replaced[0])
    assert isinstance(mixture.experts, ExpertModules)
    assert "it drops features of its output in training" in table.layers[1].reason
    assert (outputs(model) - before).abs().max() <= 2e-6


class Limited(nn.Module):
    """A feed-forward layer with a limit far beyond usual activations."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """[..., 4] -> [..., 4]."""
        return self.down(torch.relu(self.up(x)).clamp(max=100.0))


def test_layers_with_a_limit_keep_their_module() -> None:
    model = nn.Sequential(Limited(), Limited())
    assert "its activation is none that stacked experts have" in replace_ffn(model, every=1, experts=2).layers[0].reason


def test_hidden_dropout_goes_to_the_experts() -> None:
    model = t5()
    table = replace_ffn(model, experts=2)
    assert model.get_submodule(table.replaced[0]).experts.dropout == 0.1


def test_raw_gates_are_undone_in_the_mean() -> None:
    model, same = drawn("llama"), drawn("llama")
    module = copy.deepcopy(model.model.layers[1].mlp)
    table = replace_ffn(model, experts=8, router="switch")
    replace_ffn(same, experts=8, router="switch", upcycling=Upcycling(scale=1.0))
    tokens = torch.randn(2048, 12, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted = module(tokens)
        scaled, raw = (each.model.layers[1].mlp(tokens) for each in (model, same))
    fit = [float((made * wanted).sum() / wanted.square().sum()) for made in (scaled, raw)]
    assert abs(fit[0] - 1) < 0.15 and 0.12 < fit[1] < 0.3  # outputs and gates of large tokens are larger
    reason = table.layers[1].reason
    assert "outputs times" in reason and reason.endswith("the same function in the mean over tokens")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_granular_experts_are_parts_of_the_copies(name: str) -> None:
    model = drawn(name)
    before = outputs(model)
    table = replace_ffn(model, experts=4, router="mixtral", upcycling=Upcycling(granularity=2))
    mixture = model.get_submodule(table.replaced[0])
    assert mixture.experts.experts == 8 and mixture.router.gating.choices == 4
    assert (outputs(model) - before).abs().max() <= 2e-6 * before.abs().max()


def test_granular_experts_need_whole_parts_and_known_features() -> None:
    with pytest.raises(ModelError, match="granularity=3 does not divide the 20 hidden features"):
        replace_ffn(drawn("llama"), router="mixtral", upcycling=Upcycling(granularity=3))
    with pytest.raises(ModelError, match="need to know the hidden features"):
        replace_ffn(gpt2(dropout=0.1), router="mixtral", upcycling=Upcycling(reinitialise=0.5))
    with pytest.raises(ModelError, match="at most 1"):
        Upcycling(reinitialise=1.5)


def test_noise_separates_experts_and_is_the_same_in_every_run() -> None:
    stacks = []
    for seed in (0, 0, 1):
        model = drawn("llama")
        dense = model.model.layers[1].mlp.down_proj.weight.detach().clone()
        replace_ffn(model, experts=4, upcycling=Upcycling(noise=0.01, seed=seed))
        stacks.append(model.model.layers[1].mlp.experts.down.detach())
    first, again, other = stacks
    assert torch.equal(first, again) and not torch.equal(first, other)
    changes = (first - dense).flatten(1).std(1) / dense.std()
    assert (changes - 0.01).abs().max() < 0.002 and not torch.equal(first[0], first[1])


def test_a_share_of_hidden_features_is_drawn_anew() -> None:
    model = drawn("llama")
    mlp = model.model.layers[1].mlp
    gate, up, down = (w.weight.detach().clone() for w in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    replace_ffn(model, experts=4, upcycling=Upcycling(reinitialise=0.3))
    experts = model.model.layers[1].mlp.experts
    chosen = []
    for number in range(4):
        new_gate, new_up = experts.up[number].chunk(2)
        kept = [(new == old).all(1) for new, old in ((new_gate, gate), (new_up, up), (experts.down[number].T, down.T))]
        assert torch.equal(kept[0], kept[1]) and torch.equal(kept[0], kept[2])
        assert int((~kept[0]).sum()) == 6
        chosen.append(tuple(kept[0].tolist()))
    assert len(set(chosen)) > 1


def test_shared_modules_stay_shared() -> None:
    layer = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    model = nn.ModuleDict({"one": nn.ModuleList([nn.Sequential(layer)]), "two": nn.Sequential(layer)})
    replace_ffn(model, every=1, experts=2)
    assert model["one"][0][0] is model["two"][0] and isinstance(model["two"][0], MoE)  # type: ignore[index]


def test_frozen_layers_of_16_bits_stay_so() -> None:
    model = drawn("llama").to(torch.bfloat16).requires_grad_(False)
    gating = Gating(choices=2, score="sigmoid", normalise="before", scale=2.5, bias_step=1e-3, init="normal")
    table = replace_ffn(model, experts=2, router=lambda width, experts: Router(width, experts, gating))
    assert table.layers[1].reason.endswith("copies, outputs times 0.4, the same function in evaluation")
    mixture = model.model.layers[1].mlp
    assert {p.dtype for p in mixture.parameters()} == {torch.bfloat16}
    assert mixture.router.bias.dtype == mixture.experts.statistics.entropy.dtype == torch.float32
    assert not any(p.requires_grad for p in mixture.experts.parameters())
    assert all(p.requires_grad for p in mixture.router.parameters())


def test_replaced_models_write_train_with_recomputation_and_are_saved(tmp_path: Path) -> None:
    model = drawn("llama")
    tokens = torch.randint(2, 29, (2, 5), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "max_new_tokens": 6}
    written = model.generate(tokens, **options)
    replace_ffn(model, experts=4)
    assert torch.equal(model.generate(tokens, **options), written)
    model.train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    mixture = model.model.layers[1].mlp
    assert mixture.router.weight.grad.abs().max() > 0 and int(mixture.experts.statistics.forwards) == 1
    model.save_pretrained(tmp_path)
    again = llama()
    replace_ffn(again, experts=4)
    from safetensors.torch import load_file

    again.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def upcycled(name: str) -> Any:
    """A model with mixtures in training."""
    model = drawn(name)
    replace_ffn(model, experts=4, router="switch", capacity=math.inf, upcycling=Upcycling(noise=0.1))
    for module in model.modules():
        if isinstance(module, Router):
            module.gating = dataclasses.replace(module.gating, noise=None)  # which would differ from one process
    return model.train()


def train_upcycled(mesh: zs.Mesh, name: str, plan: dict[str, Any]) -> Any:
    """Losses of this rank and the weights after three steps."""
    engine = zs.Engine(upcycled(name), OPTIMIZER, zs.Plan.from_dict(plan), mesh=mesh)
    losses = []
    for step in range(3):
        tokens = torch.randint(2, 29, (4, 9), generator=torch.Generator().manual_seed(step)).chunk(mesh.ranks)[
            mesh.rank
        ]
        losses.append(float(engine.train_step({"input_ids": tokens, "labels": tokens}).loss))
    return losses, engine.state_dict()


@pytest.mark.parametrize("zero", by_default([0, 3], 3), ids=["zero0", "zero3"])
@pytest.mark.parametrize("name", by_default(["llama", "gpt2"], "gpt2"))
def test_replaced_models_train_on_several_ranks_as_on_one(pool: Pool, name: str, zero: int) -> None:
    # losses of balance are those of microbatches
    losses, weights = pool.run(train_upcycled, 1, name, {"zero": 0, "microbatches": 2})[
        0
    ]  # losses of balance are of those
    answers = pool.run(train_upcycled, 2, name, {"zero": zero, "expert_parallel": 2})
    for step, loss in enumerate(losses):
        assert sum(mine[step] for mine, _ in answers) / 2 == pytest.approx(loss, rel=1e-5)
    for _, found in answers:
        assert found.keys() == weights.keys()
        assert all(torch.allclose(found[each], weights[each], rtol=1e-4, atol=1e-5) for each in weights)


def from_meta(mesh: zs.Mesh) -> list[float]:
    """Sums of the experts' weights of a model that was on the meta device; each expert was drawn by itself."""
    with torch.device("meta"):
        model = ours()
    replace_ffn(model, experts=4, router="gshard")
    engine = zs.Engine(model, OPTIMIZER, zs.Plan(zero=3, expert_parallel=mesh.ranks), mesh=mesh)
    ups = [values for key, values in engine.state_dict().items() if key.endswith("experts.up")]
    assert ups and all(float((up[0] - up[1]).abs().max()) > 1e-3 for up in ups)
    return [float(up.sum()) for up in ups]


def test_experts_of_meta_models_are_drawn_alike_on_any_ranks(pool: Pool) -> None:
    one, two = pool.run(from_meta, 1), pool.run(from_meta, 2)
    assert two == one * 2


@pytest.mark.parametrize("name", ["llama", "ours"])
def test_models_on_the_meta_device_are_replaced_without_values(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name]()
    table = replace_ffn(model, experts=4, router="switch")
    mixture = model.get_submodule(table.replaced[0])
    assert {tensor.device.type for tensor in (*mixture.parameters(), *mixture.buffers())} == {"meta"}
    assert "drawn when they are materialised" in table.layers[1].reason
