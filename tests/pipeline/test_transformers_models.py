"""Causal models of transformers that are built on the meta device, cut into stages, and trained as in one process."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import OPTIMIZERS
from pool import Pool
from safetensors.torch import save_file
from selection import by_default
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import zeroshard as zs

transformers = pytest.importorskip("transformers")
VOCABULARY, STEPS = 29, 3
TEXT = {
    "vocab_size": VOCABULARY, "use_cache": False, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 4,
    "num_attention_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
LLAMA = {**TEXT, "num_key_value_heads": 1}
BERT = {**TEXT, "is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {
    "vocab_size": VOCABULARY, "use_cache": False, "n_positions": 32, "n_embd": 12, "n_layer": 4, "n_head": 2,
    "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
EXPERTS = {**LLAMA, "num_experts_per_tok": 2}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", GPT2),
    "llama": ("LlamaConfig", LLAMA),
    "llama-yarn": ("LlamaConfig", {**LLAMA, "rope_parameters": {"rope_type": "yarn", "factor": 4.0,
                                                               "rope_theta": 1e4,
                                                               "original_max_position_embeddings": 8}}),
    "qwen2": ("Qwen2Config", {**LLAMA, "tie_word_embeddings": True}),
    "bert": ("BertConfig", BERT),
    "mixtral": ("MixtralConfig", {**EXPERTS, "num_local_experts": 4}),
    "qwen3-moe": ("Qwen3MoeConfig", {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 12, "head_dim": 6}),
    "llama4": ("Llama4TextConfig", {**LLAMA, "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 6,
                                    "intermediate_size_mlp": 20, "pad_token_id": 0}),
}  # fmt: skip


def model_of(name: str, device: str, **more: Any) -> Any:
    kind, settings = CONFIGS[name]
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**settings, **more))


def tokens(step: int, rows: int = 4) -> dict[str, Tensor]:
    found = torch.randint(2, VOCABULARY, (rows, 10), generator=torch.Generator().manual_seed(step))
    return {"input_ids": found, "labels": found}


def engine_of(mesh: zs.Mesh, model: Any, stages: int, **plan: Any) -> zs.Engine:
    chosen = zs.Plan.from_dict(
        {
            "microbatches": 2,
            "pipeline_parallel": stages,
            "pipeline_parallel.balance": "parameters",
            "zero": 0,
            "seed": 5,
            **plan,
        }
    )
    initialise = model._init_weights if next(model.parameters()).is_meta else None
    example = tokens(0, 2) if stages > 1 else None
    return zs.Engine(model, OPTIMIZERS["sgd"], chosen, mesh=mesh, initialise=initialise, example=example)


def stored(parameter: Tensor) -> bool:
    """Whether there is memory for each element."""
    return not parameter.is_meta and parameter.untyped_storage().nbytes() > parameter.element_size()


def constants(model: nn.Module) -> dict[str, Tensor]:
    """The buffers with values that no state dict has."""
    kept = model.state_dict().keys()
    return {k: b.clone() for k, b in model.named_buffers() if k not in kept and not b.is_meta}


def trained(mesh: zs.Mesh, name: str, stages: int, device: str = "meta", weights: str = "") -> Any:
    """Losses, weights, constant buffers, and the parameters with storage of their own."""
    engine = engine_of(mesh, model_of(name, device), stages)
    if weights:
        engine.load_weights(weights)
    fixed = constants(engine.model)
    losses = []
    for step in range(STEPS):
        result = engine.train_step(tokens(step))
        assert result.loss is not None
        losses.append(result.loss.item())
    with torch.no_grad():
        losses.append(engine(**tokens(STEPS)).loss.item())
    here = {k for k, p in engine.model.named_parameters() if stored(p)}
    return losses, engine.state_dict(), fixed, here


@functools.cache
def whole(pool: Pool, name: str) -> Any:
    return pool.run(trained, 1, name, 1)[0]


@pytest.mark.parametrize("name", by_default(CONFIGS, "gpt2", "llama-yarn", "qwen3-moe", "llama4"))
def test_a_model_on_meta_is_cut_and_trains_as_in_one_process(pool: Pool, name: str) -> None:
    losses, weights, _, _ = whole(pool, name)
    values = constants(model_of(name, "cpu"))
    runs = pool.run(trained, 2, name, 2)
    for found, state, fixed, here in runs:
        assert found == pytest.approx(losses, rel=1e-6)
        assert state.keys() == weights.keys()
        for key, value in state.items():
            torch.testing.assert_close(value, weights[key], rtol=1e-5, atol=1e-6)
        assert fixed.keys() == values.keys()
        assert all(torch.equal(fixed[key], value) for key, value in values.items())
        assert here < weights.keys()


@pytest.mark.parametrize("name", by_default(["gpt2", "llama", "llama4"], "llama"))
def test_weights_from_a_file(pool: Pool, tmp_path: Path, name: str) -> None:
    """A model on meta that is given the weights of one on the CPU is that model."""
    path = tmp_path / "model.safetensors"
    save_file({k: v.clone() for k, v in model_of(name, "cpu").state_dict().items()}, path)
    real = pool.run(trained, 2, name, 2, "cpu")[0]
    for found, state, _, _ in pool.run(trained, 2, name, 2, "meta", str(path)):
        assert found == real[0]
        assert all(torch.equal(state[key], value) for key, value in real[1].items())


def resident(mesh: zs.Mesh, schedule: str, precision: str) -> Any:
    """Of a real model: the parameters, with whether this rank has their layer, and whether their storage lives on."""
    model = model_of("qwen2", "cpu")
    storages = {k: StorageWeakRef(p.untyped_storage()) for k, p in model.named_parameters()}
    held = dict(model.named_parameters())  # as a user's own list of parameters would
    engine = engine_of(mesh, model, 2, precision=precision, **{"pipeline_parallel.schedule": schedule})
    lives = {key for key, storage in storages.items() if not storage.expired()}
    large = {k for k, p in held.items() if stored(p)}
    engine.train_step(tokens(0))
    return engine.layers, set(storages), lives, large


@pytest.mark.parametrize("schedule, precision", [("1f1b", "fp32"), ("1f1b", "bf16"), ("2bw", "fp32")])
def test_a_real_model_keeps_no_weights_of_other_stages(pool: Pool, schedule: str, precision: str) -> None:
    for layers, names, lives, large in pool.run(resident, 2, schedule, precision):
        blocks = {name for name in names if any(name.startswith(f"{layer}.") for layer in layers)}
        others = {name for name in names if ".layers." in name} - blocks
        assert blocks and others
        assert not lives, "the values were moved into flat buffers, or belong to another stage"
        assert large & others == set()


def mixture(mesh: zs.Mesh, name: str, device: str, stages: int = 2) -> list[float]:
    engine = engine_of(mesh, model_of(name, device, output_router_logits=True), stages)
    return [float(engine.train_step(tokens(step)).loss) for step in range(STEPS)]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_losses_of_routers_are_those_of_one_process(pool: Pool, name: str, device: str) -> None:
    """Their logits leave the blocks by hooks of transformers."""
    one = pool.run(mixture, 1, name, device, 1)[0]
    for losses in pool.run(mixture, 2, name, device):
        assert losses == pytest.approx(one, rel=1e-6)
