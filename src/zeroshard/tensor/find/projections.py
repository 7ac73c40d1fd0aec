"""Projections of attention: names of the layers of queries, keys and values, and layers beside them, such as gates.

A gate multiplies the output of attention, feature by feature or head by head (Qiu et al., 2505.06708), and is split as
the heads are. The names of such layers differ, so that shapes suggest them and the trial decides.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from zeroshard.tensor.find.layout import last_part
from zeroshard.tensor.find.linear import linear_features

QUERY = (
    *("q_proj", "query", "q", "wq", "q_lin", "to_q", "query_proj", "q_attn", "linear_q", "w_q", "query_projection"),
    *("q_b_proj", "wq_b"),
)
KEY = ("k_proj", "key", "k", "wk", "k_lin", "to_k", "key_proj", "linear_k", "w_k", "key_projection")
VALUE = ("v_proj", "value", "v", "wv", "v_lin", "to_v", "value_proj", "linear_v", "w_v", "value_projection")
WITH_QUERIES = (
    *("c_attn", "query_key_value", "qkv_proj", "qkv", "Wqkv", "wqkv", "to_qkv", "in_proj", "attn_qkv", "qkv_lin"),
)
FUSED = (
    *WITH_QUERIES,
    *("kv_proj", "to_kv", "key_value", "kv_b_proj", "wkv_b"),
)
OUTPUT = (
    *("o_proj", "out_proj", "o", "wo", "dense", "out_lin", "to_out", "output", "c_proj", "proj", "out", "output_proj"),
    *("linear_out", "w_o", "Wo", "attn_out", "output_projection", "attention_out"),
)


PROJECTIONS = {*QUERY, *KEY, *VALUE, *FUSED}
MOST = 4  # layers of which each is tried alone


def gate_choices(
    modules: Mapping[str, nn.Module], name: str, layers: Sequence[str], heads: int, planned: Sequence[str]
) -> Iterator[tuple[str, ...]]:
    """Choices of further layers of a module that are split by heads, by path: none, all, then each alone.

    Args:
        layers: the layers that are split in any case, the row-parallel one last.
        planned: further layers that a plan names; then no others are chosen.
    """
    if planned:
        yield tuple(planned)
        return
    found: list[str] = []
    for child, module in modules[name].named_children():
        features, path = linear_features(module), f"{name}.{child}".strip(".")
        if features is not None and path not in layers and features.outputs % heads == 0:
            found.append(path)
    yield ()
    if found:
        yield tuple(found)
    if 1 < len(found) <= MOST:
        yield from ((each,) for each in found)


def projections_of(columns: Sequence[str]) -> list[str]:
    """The layers of queries, keys and values among those of a plan; all of them if none has a name of queries."""
    named = [path for path in columns if last_part(path) in PROJECTIONS]
    return named if any(last_part(path) in (*QUERY, *WITH_QUERIES) for path in named) else list(columns)


def gated_queries(outputs: Mapping[str, int], features: int) -> list[str]:
    """Layers of queries that make a gate for each of their features, too (Qwen3-Next)."""
    queries = [path for path, n in outputs.items() if last_part(path) in QUERY and n == 2 * features]
    return queries if len(outputs) > 2 else []
