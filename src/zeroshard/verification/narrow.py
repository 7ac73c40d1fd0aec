"""A model narrowed for verification: fewer layers, less width, the same kinds of modules in the same proportions.

Bugs of a plan lie in how parts are cut, gathered, reduced and tied, and show at any width. Numbers of heads keep their
proportion to those of keys and values, and the fewest layers that the plan can cut into its chunks are kept.
"""

import copy
import importlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.errors import ModelError
from zeroshard.plan import Plan
from zeroshard.planner.predict.shallow import cut, stacks_of

HEAD = 8  # elements of a head
LAYERS, EXPERTS, VOCABULARY, POSITIONS = 4, 4, 192, 64
ROW = 16  # tokens of a row
DROPOUTS = ("dropout", "pdrop", "drop_rate", "drop_prob", "dropout_rate", "dropout_prob", "layerdrop")
ALIASES = {  # names in other configurations, by the usual names
    "n_embd": "hidden_size", "d_model": "hidden_size", "dim": "hidden_size",
    "n_head": "num_attention_heads", "num_heads": "num_attention_heads", "n_heads": "num_attention_heads",
    "n_layer": "num_hidden_layers", "num_layers": "num_hidden_layers", "n_layers": "num_hidden_layers",
    "n_inner": "intermediate_size", "d_ff": "intermediate_size", "ffn_dim": "intermediate_size",
    "n_positions": "max_position_embeddings", "n_ctx": "max_position_embeddings",
}  # fmt: skip
SIZES = {  # set to these values, where a configuration has them
    **{"head_dim": HEAD, "d_kv": HEAD, "qk_rope_head_dim": HEAD, "qk_nope_head_dim": HEAD, "v_head_dim": HEAD},
    **{"q_lora_rank": 2 * HEAD, "kv_lora_rank": 2 * HEAD, "sliding_window": ROW // 2, "n_group": 1, "topk_group": 1},
    **{"first_k_dense_replace": 1, "decoder_sparse_step": 1},
}
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def narrowed(config: Any, plan: Plan, tokens: bool = True) -> Any:
    """A Hugging Face configuration with small sizes, without dropout.

    Args:
        tokens: narrow the vocabulary and the positions too; not for a batch of the user.
    """
    small = copy.deepcopy(config)
    facts: dict[str, Any] = config.to_dict()
    names = {ALIASES.get(name, name): name for name in facts if isinstance(facts[name], int)}

    def give(name: str, value: int) -> None:
        own = names.get(name)
        if own is not None and facts[own] and facts[own] > value:
            setattr(small, own, value)

    heads = facts.get(names.get("num_attention_heads", ""), 4)
    pairs = facts.get("num_key_value_heads") or heads
    together = plan.tensor.ranks  # each of which has whole heads
    kept_pairs = min(2 if pairs % together else max(2, together), pairs)
    kept_heads = min(heads, max(2 * max(2, kept_pairs), together), kept_pairs * max(1, heads // pairs))
    kept_heads = max(kept_pairs, kept_heads // kept_pairs * kept_pairs)
    width, inner = facts.get(names.get("hidden_size", ""), 0), facts.get(names.get("intermediate_size", ""), 0)
    give("num_attention_heads", kept_heads)
    give("num_key_value_heads", kept_pairs)
    give("hidden_size", kept_heads * HEAD)
    if width and inner:
        give("intermediate_size", max(HEAD, round(kept_heads * HEAD * inner / width / HEAD) * HEAD))
    give("moe_intermediate_size", 2 * HEAD)
    give("num_hidden_layers", depth(plan))
    give("num_decoder_layers", depth(plan))
    for name, value in SIZES.items():
        give(name, value)
    for name in COUNTS:
        give(name, EXPERTS)
    give("num_experts_per_tok", 2)
    if tokens:
        give("vocab_size", VOCABULARY)
        give("max_position_embeddings", POSITIONS)
        _keep_tokens(small, facts)
    _without_dropout(small, facts)
    kinds = facts.get("layer_types")
    layers = getattr(small, names.get("num_hidden_layers", ""), None)
    if isinstance(kinds, list) and layers:
        small.layer_types = kinds[:layers]
    return small


def depth(plan: Plan) -> int:
    """Blocks that are enough: one for each chunk of a pipeline, and `LAYERS` at least."""
    return max(LAYERS, plan.pipeline.stages * plan.pipeline.virtual_stages)


def config_of(model: Any) -> Any | None:
    """The Hugging Face configuration at a path or in an object; None if it is none.

    Raises:
        ModelError: a file that is none, or transformers is not installed.
    """
    if hasattr(model, "to_dict") and hasattr(model, "model_type"):
        return model
    if not isinstance(model, (str, Path)):
        return None
    file = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    try:
        transformers = importlib.import_module("transformers")
        return transformers.AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    except ImportError as error:
        raise ModelError(
            f'{file} needs the package transformers, which is not installed; run pip install "zeroshard[hf]".'
        ) from error
    except Exception as error:
        raise ModelError(
            f"{file} is no Hugging Face configuration ({error}); give the path of a config.json."
        ) from error


def language_model(config: str) -> nn.Module:
    """The causal language model of a configuration (JSON) with fresh weights, in fp32.

    Raises:
        ModelError: transformers refuses it.
    """
    transformers = importlib.import_module("transformers")
    facts = json.loads(config)
    try:
        made = transformers.AutoConfig.for_model(facts.pop("model_type"), **facts)
        made.use_cache = False
        module: nn.Module = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    except Exception as error:
        raise ModelError(f"transformers cannot build a causal language model of this configuration: {error}") from error
    return module


def language_factory(config: Any) -> Callable[[], nn.Module]:
    """A function that makes the model of a configuration, and goes to other processes."""
    return partial(language_model, json.dumps(config.to_dict(), default=str))


def token_batch(vocabulary: int, rows: int, tokens: int = ROW) -> dict[str, Tensor]:
    """Random tokens [rows, tokens] as input and labels of a causal language model."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(vocabulary // 2, vocabulary, (rows, tokens), generator=generator)
    return {"input_ids": words, "labels": words}


def shallow_factory(factory: Callable[[], nn.Module], plan: Plan) -> tuple[Callable[[], nn.Module], str]:
    """A factory of the model with fewer repeated blocks, and a text on the others; `factory` itself without any."""
    with torch.device("meta"):
        try:
            stacks = stacks_of(factory())
        except Exception:
            return factory, ""  # a factory that needs values
    deep = [stack for stack in stacks if stack.depth > 2 * depth(plan)]
    if not deep:
        return factory, ""
    few = {stack.path: stack.others + depth(plan) for stack in deep}
    text = ", ".join(f"{one.path} {one.others + one.depth} -> {few[one.path]} blocks" for one in deep)
    return partial(_shallow, factory, few), text


def difference(config: Any, small: Any) -> str:
    """The changes of a narrowed configuration, in words."""
    before, after = config.to_dict(), small.to_dict()
    changed = [
        f"{name} {before[name]} -> {value}"
        for name, value in after.items()
        if isinstance(value, int) and not isinstance(value, bool) and before.get(name) != value and before.get(name)
    ]
    return ", ".join(changed)


def _shallow(factory: Callable[[], nn.Module], depths: Mapping[str, int]) -> nn.Module:
    return cut(factory(), depths)


def _keep_tokens(small: Any, facts: Mapping[str, Any]) -> None:
    """Move the numbers of special tokens into the vocabulary."""
    for name, value in facts.items():
        if name.endswith("token_id") and isinstance(value, int) and value >= small.vocab_size:
            setattr(small, name, small.vocab_size // 4)
        elif name.endswith("token_id") and isinstance(value, list):
            setattr(small, name, [min(each, small.vocab_size // 4) for each in value])


def _without_dropout(small: Any, facts: Mapping[str, Any]) -> None:
    for name, value in facts.items():
        if isinstance(value, float) and any(name.endswith(end) for end in DROPOUTS):
            setattr(small, name, 0.0)
