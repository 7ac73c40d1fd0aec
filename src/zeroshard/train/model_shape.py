"""Sizes of a language model by its configuration alone, without an import of torch: a built-in size, or config.json."""

import json
from collections.abc import Mapping
from typing import Any

from zeroshard.errors import ModelError
from zeroshard.planner.formulas import ModelBlock, ModelShape
from zeroshard.train.named_models import model_named
from zeroshard.train.sizes import SIZES

LIKE_LLAMA = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
    *("olmo2", "phi3", "granite", "stablelm", "smollm3", "gemma3", "deepseek_v2", "deepseek_v3"),
)
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # names of their number
LIKE_GPT2 = ("gpt2", "gpt_neox")
GPT_SIDES = 16  # inputs and outputs of its linear layers, by width: 1 + 3, 1 + 1, 1 + 4, 4 + 1
GPT_KEPT = 19.1  # numbers of 16 bits that autograd keeps of a token, by width, in the built-in model's block
WIDTHS_KEPT, QUERIES_KEPT, PAIRS_KEPT, INNER_KEPT = 8.04, 2, 2, 4  # by width, queries, keys and inner width, in Llama's


def configuration(model: str) -> Mapping[str, Any] | None:
    """The table of a Hugging Face configuration; None for other models.

    Raises:
        ModelError: there is no such model, or its file holds no table.
    """
    file = model_named(model).file
    if file is None:
        return None
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read as JSON ({error}); give the config.json of a model.") from error
    if not isinstance(table, Mapping):
        raise ModelError(f"{file} holds a {type(table).__name__}; a config.json holds a table.")
    return {**table, **table.get("text_config", {})}


def stated_dtype(model: str) -> str | None:
    """The dtype that a model's configuration states, such as "bfloat16"; None for those that state none."""
    table = configuration(model) or {}
    dtype = table.get("dtype", table.get("torch_dtype"))
    return None if dtype is None else str(dtype)


def row_length(model: str, asked: int | None, usual: int) -> int:
    """Tokens of a row: as asked for, else a built-in size's context, or `usual` and at most the model's positions.

    Raises:
        ModelError: the model has fewer positions than asked for; and as `configuration`.
    """
    if model in SIZES:
        return SIZES[model].context if asked is None else asked
    table = configuration(model) or {}
    positions = table.get("max_position_embeddings", table.get("n_positions"))
    if not isinstance(positions, int) or positions <= 0:  # relative ones, which XLNet bounds by -1
        return usual if asked is None else asked
    if asked is not None and asked > positions:
        raise ModelError(
            f"The model of {model} has {positions} positions and a row {asked} tokens; set sequence to {positions} or "
            f"less, or raise the positions in the configuration."
        )
    return min(usual, positions) if asked is None else asked


def shape_of(model: str) -> ModelShape | None:
    """The shape of a built-in size or of a known family of configurations; None for others.

    Raises:
        ModelError: as `configuration`.
    """
    if model in SIZES:
        size = SIZES[model]
        width, vocabulary = size.width, size.vocabulary
        each = 12 * width**2 + 2 * width
        block = ModelBlock(size.layers, each, each, GPT_KEPT * width, 2 * width, GPT_SIDES * width)
        return ModelShape((block,), vocabulary * width + width, width, vocabulary, chunks=True)
    table = configuration(model)
    if table is None:
        return None
    try:
        if table.get("model_type") in LIKE_GPT2:
            return _like_gpt2(table)
        return _like_llama(table) if table.get("model_type") in LIKE_LLAMA else None
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None  # keys that this family leaves to their defaults


def _like_gpt2(table: Mapping[str, Any]) -> ModelShape:
    width, layers = table.get("n_embd", table.get("hidden_size")), table.get("n_layer", table.get("num_hidden_layers"))
    assert width is not None and layers is not None
    vocabulary, learned = table["vocab_size"], table.get("n_positions", 0)
    each = 12 * width**2 + 13 * width
    tables = 1 if table.get("tie_word_embeddings", table["model_type"] == "gpt2") else 2
    rest = (tables * vocabulary + learned + 2) * width
    block = ModelBlock(layers, each, each, GPT_KEPT * width, 2 * width, GPT_SIDES * width)
    return ModelShape((block,), rest, width, vocabulary, chunks=False)


def _like_llama(table: Mapping[str, Any]) -> ModelShape:
    width, layers, vocabulary = table["hidden_size"], table["num_hidden_layers"], table["vocab_size"]
    attention, queries, pairs, values = _attention(table)
    many, inner = next(filter(None, map(table.get, EXPERTS)), 0), table["intermediate_size"]

    def block(number: int, held: int, used: int) -> ModelBlock:
        """A block whose feed-forward has so many inner features, of which a token uses some."""
        kept = WIDTHS_KEPT * width + QUERIES_KEPT * queries + PAIRS_KEPT * pairs + INNER_KEPT * used
        common = attention + 2 * width + many * width * (held != used)
        sides = 4 * width + 2 * queries + 2 * pairs + (3 * (width + held) if held == used else 0)
        held, used = common + 3 * width * held, common + 3 * width * used
        return ModelBlock(number, held, used, kept, queries + values, sides)

    each = table.get("moe_intermediate_size") or inner
    shared = table.get("n_shared_experts", 0) * each + table.get("shared_expert_intermediate_size", 0)
    dense = table.get("first_k_dense_replace", len(table.get("mlp_only_layers", ()))) if many else layers
    blocks = [block(dense, inner, inner)]
    if many:
        blocks.append(block(layers - dense, many * each + shared, table["num_experts_per_tok"] * each + shared))
    ties = table.get("tie_word_embeddings", table["model_type"].startswith("gemma"))
    rest = (2 - ties) * vocabulary * width + width
    return ModelShape(tuple(each for each in blocks if each.number), rest, width, vocabulary, chunks=False)


def _attention(table: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Parameters of an attention, and the widths of its queries, of its keys and of the values of all heads."""
    width, heads = table["hidden_size"], table["num_attention_heads"]
    if table.get("kv_lora_rank"):  # multi-head latent attention (2405.04434, section 2.1)
        plain, turned, value = table["qk_nope_head_dim"], table["qk_rope_head_dim"], table["v_head_dim"]
        inside, queries = table["kv_lora_rank"], table.get("q_lora_rank")
        asked = heads * (plain + turned)
        to_queries = width * asked if queries is None else queries * (width + asked + 1)
        rest = width * (inside + turned) + inside * (1 + heads * (plain + value)) + heads * value * width
        return to_queries + rest, asked, asked, heads * value
    head = table.get("head_dim") or width // heads
    pairs = (table.get("num_key_value_heads") or heads) * head
    return 2 * width * heads * head + 2 * width * pairs, heads * head, pairs, heads * head
