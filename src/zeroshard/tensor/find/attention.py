"""Attention: numbers of heads, the order of features in fused projections, and the sizes that a forward reads.

Queries have H heads of d features, keys and values K heads (K < H: grouped queries, 2305.13245). A rank of t computes
H / t heads. K >= t must divide by t; K < t must divide t, and each KV head is then on t / K neighbouring ranks
(Megatron-LM).
"""

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import CodeType
from typing import Any

from torch import Tensor, nn

from zeroshard.tensor.find.found import Segment
from zeroshard.tensor.find.layout import CannotSplit, DoesNotDivide, SplitLayout, last_part
from zeroshard.tensor.find.linear import LinearFeatures, class_path, linear_features
from zeroshard.tensor.find.projections import FUSED, QUERY, gate_choices, gated_queries, projections_of
from zeroshard.tensor.find.trial import first_tensor
from zeroshard.tensor.split.heads import per_head

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "num_query_heads", "n_q_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads", "n_head_kv", "num_key_value_head")
GROUPS = ("num_key_value_groups", "n_rep", "kv_groups", "num_queries_per_kv")
SIZES = (
    *("head_dim", "head_size", "attention_head_size", "key_value_proj_dim", "head_width", "dim_head", "d_head", "d_kv"),
    *("d_k", "dim_per_head", "hidden_size_per_attention_head", "size_per_head", "head_features"),
)
FEATURES = ("all_head_size", "inner_dim", "split_size", "inner_size", "projection_size", "q_size", "attn_dim")
WIDTHS = ("embed_dim", "hidden_size", "n_embd", "dim", "d_model", "width", "embed_size", "emb_dim", "n_state")
KV_FEATURES = ("kv_dim", "kv_size", "kv_inner_dim")
PER_HEAD = ("alibi", "position_bias", "relative_position_bias")  # arguments made elsewhere, for all heads
NO_NUMBERS = ("dim", "size", "width", "feature", "kv", "group")  # in names with "head" that are no number of heads
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
CHANNELS = ("groups", "in_channels", "out_channels")  # of a convolution of each head alone
MP_BLOCKS = 4  # blocks of CodeGen's fused projection, each with some heads of queries, values and keys


class Order(StrEnum):
    """The order of features in a fused projection."""

    PARTS = "parts"
    """All queries, then all keys, then all values."""
    GROUPS = "groups"
    """For each KV head its queries, its keys, its values."""
    BLOCKS = "blocks"
    """For each quarter of the heads three parts, of queries, values and keys (CodeGen)."""


ORDERS: dict[Order | None, str] = {
    Order.PARTS: ", queries, keys and values one after the other",
    Order.GROUPS: ", queries, keys and values next to each other",
    Order.BLOCKS: ", queries, values and keys of each quarter one after the other",
}


def _falcon(module: Any) -> Order:
    multi_query = module.multi_query and not module.new_decoder_architecture
    return Order.PARTS if multi_query else Order.GROUPS


KNOWN_ORDERS: Mapping[str, Any] = {  # read off the forwards of these classes
    "zeroshard.train.gpt.Attention": lambda module: Order.PARTS,
    "transformers.models.gpt2.modeling_gpt2.GPT2Attention": lambda module: Order.PARTS,
    "transformers.models.phi3.modeling_phi3.Phi3Attention": lambda module: Order.PARTS,
    "transformers.models.falcon.modeling_falcon.FalconAttention": _falcon,
    "transformers.models.falcon.modeling_falcon.FalconFlashAttention2": _falcon,
    "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXAttention": lambda module: Order.GROUPS,
}


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """The heads of an attention module.

    Attributes:
        heads: of queries, H.
        kv_heads: of keys and values, K.
        size: features of a head, d.
    """

    heads: int
    kv_heads: int
    size: int

    def kv_heads_of(self, ranks: int) -> int:
        """KV heads of one rank."""
        return max(self.kv_heads // ranks, 1)


def has_heads(module: nn.Module) -> bool:
    """Whether a module has attributes of attention heads."""
    return any(isinstance(vars(module).get(name), int) for name in (*HEADS, *SIZES, *GROUPS, *_unknown_heads(module)))


def _unknown_heads(module: Any) -> list[str]:
    """Attributes with a number of heads under a name that is in no list, such as `num_attn_heads`."""
    known = {*KV_HEADS, *GROUPS, *SIZES}
    names = [name for name in vars(module) if "head" in name and not any(part in name for part in NO_NUMBERS)]
    return [name for name in names if name not in known and isinstance(vars(module)[name], int)]


def number_of(module: Any, names: Sequence[str]) -> int | None:
    """The first of the attributes that is an integer."""
    found = (vars(module).get(name) for name in names)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), None)


def attention_layouts(
    modules: Mapping[str, nn.Module],
    columns: Sequence[str],
    row: str,
    ranks: int,
    given: tuple[Any, Any] | None = None,
) -> Iterator[SplitLayout]:
    """Possible layouts of an attention module's heads in its layers; known classes have one.

    Args:
        modules: all modules of the model, by path.
        columns: paths of one module's linear layers of queries, keys and values.
        row: path of the linear layer that reads the heads' output.
        given: arguments of the model's call of the module; None if unknown.

    Raises:
        CannotSplit: the module's structure is unknown.
        DoesNotDivide: the ranks do not divide the heads.
    """
    name = columns[0].rpartition(".")[0]
    module: Any = modules[name]
    if given is None:
        _check_arguments(module)
    made = projections_of(columns)
    outputs = {path: _features(modules[path]).outputs for path in made}
    counts, fused = _counts(module, outputs, _features(modules[row]).inputs)
    check_heads(name, type(module).__name__, counts, ranks)
    known = KNOWN_ORDERS.get(class_path(module))
    orders = [known(module)] if known else list(Order) if fused and counts.kv_heads > 1 else [Order.PARTS]
    arguments = () if given is None else per_head(*given, counts.heads, first_tensor(given).shape[0])
    planned = [path for path in columns if path not in made]
    for gates in gate_choices(modules, name, [*made, row], counts.heads, planned):
        layers = {*made, *gates, row}
        heads, partial, unknown, gathers = _others(modules, name, layers, counts, ranks)
        for sizes, narrow in _ways(modules, name, layers, counts, ranks):
            for order in orders:
                found = _segments(modules, outputs, row, counts, order if fused else None, fused, ranks)
                for segments, reasons in found:
                    more = {path: (Segment(_features(modules[path]).outputs, ranks),) for path in gates}
                    text = f"{counts.heads // ranks} of {counts.heads} heads, of what is made for each beside"
                    layout = SplitLayout(
                        {**segments, **more}, heads, partial, unknown, sizes, {**reasons, **dict.fromkeys(gates, text)},
                        counts.size, not fused or known is not None, counts.heads, arguments, narrow, gathers,
                        reuses=reuses(made),
                    )  # fmt: skip
                    yield layout
                    if shared := _shared(modules, name, layers, made):
                        yield replace(layout, shared=shared)


def _segments(
    modules: Mapping[str, nn.Module],
    outputs: Mapping[str, int],
    row: str,
    counts: HeadCounts,
    order: Order | None,
    fused: str | None,
    ranks: int,
) -> Iterator[tuple[dict[str, tuple[Segment, ...]], dict[str, str]]]:
    """The segments of queries, keys, values and the row-parallel layer, with reasons; none if an order does not fit."""
    queries = counts.heads if len(outputs) == 1 else 0  # in a fused layer
    if order is Order.BLOCKS and (counts.heads != counts.kv_heads or counts.heads % (MP_BLOCKS * ranks)):
        return
    segments = {
        path: _fused(counts, queries, order or Order.PARTS, ranks) if path == fused else (_apart(n, counts, ranks),)
        for path, n in outputs.items()
    }
    segments[row] = (Segment(_features(modules[row]).inputs, ranks),)
    if order is Order.BLOCKS:
        segments[row] = (Segment(counts.heads * counts.size // MP_BLOCKS, ranks),) * MP_BLOCKS
    reasons = {path: _reason(counts, n, ranks, order if path == fused else None) for path, n in outputs.items()}
    reasons[row] = f"reads {counts.heads // ranks} of {counts.heads} heads"
    gated = gated_queries(outputs, counts.heads * counts.size)
    segments |= {path: (Segment(outputs[path], ranks),) for path in gated}
    yield segments, reasons | dict.fromkeys(gated, f"{counts.heads // ranks} of {counts.heads} heads with their gates")
    if gated:  # gates behind all queries
        parts = {path: (Segment(counts.heads * counts.size, ranks),) * 2 for path in gated}
        yield {**segments, **parts}, reasons


def _ways(
    modules: Mapping[str, nn.Module], name: str, layers: set[str], counts: HeadCounts, ranks: int
) -> Iterator[tuple[dict[str, dict[str, Any]], bool]]:
    """The attributes to set, and whether the forward reads the features of its heads off its input."""
    first = _sizes_inside(modules, name, layers, counts, ranks, False)
    second = _sizes_inside(modules, name, layers, counts, ranks, True)
    for narrow in (False, True):
        yield first, narrow
        if second != first:
            yield second, narrow


def _shared(modules: Mapping[str, nn.Module], name: str, layers: set[str], columns: Sequence[str]) -> dict[str, int]:
    """Whole layers by path, with the number of last output features that all heads read (MLA)."""
    read = {_features(modules[path]).inputs for path in columns}
    found: dict[str, int] = {}
    for inner, module in modules[name].named_children():
        path, features = f"{name}.{inner}".strip("."), linear_features(module)
        if path not in layers and features is not None and features.outputs not in read:
            more = [features.outputs - n for n in read if features.outputs > n and n != features.inputs]
            found |= {path: more[0]} if more else {}
    return found


def reuses(columns: Iterable[str]) -> bool:
    """Whether the layers make queries only: keys and values come from another layer."""
    names = [last_part(path) for path in columns]
    return len(names) == 1 and names[0] in QUERY


def check_heads(name: str, kind: str, counts: HeadCounts, ranks: int) -> None:
    """Refuse heads that the ranks do not divide.

    Raises:
        DoesNotDivide: the numbers of heads and of ranks do not fit.
    """
    heads, kv_heads = counts.heads, counts.kv_heads
    if heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0):
        return
    fine = [t for t in range(2, heads + 1) if heads % t == 0 and (kv_heads % t == 0 or t % kv_heads == 0)]
    what = f"{heads} attention heads" + (f" and {kv_heads} key-value heads" if kv_heads != heads else "")
    why = "does not divide them" if heads % ranks else "neither divides the key-value heads nor is a multiple of them"
    raise DoesNotDivide(name, f"{name!r} ({kind}) has {what}", why, fine, "attention")


def _check_arguments(module: Any) -> None:
    """Refuse a forward with a required argument that is made for all heads elsewhere."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    for name in (p.name for p in parameters if p.name in PER_HEAD and p.default is inspect.Parameter.empty):
        if getattr(getattr(module, "config", None), name, True):
            raise CannotSplit(f"{type(module).__name__} takes {name} from outside, which is made for all heads")


def _features(module: nn.Module) -> LinearFeatures:
    found = linear_features(module)
    assert found is not None
    return found


def _counts(module: Any, outputs: Mapping[str, int], inputs: int) -> tuple[HeadCounts, str | None]:
    """The numbers of heads, from the layers' shapes and one attribute of the module; and the path of a fused layer."""
    size, heads = number_of(module, SIZES), number_of(module, HEADS)
    configs = [value for name, value in vars(module).items() if is_config(name, value)]
    heads = heads or next(filter(None, (number_of(config, HEADS) for config in configs)), None)
    if not size and not heads:
        raise CannotSplit(f"{type(module).__name__} has no attribute with the number of heads")
    kv_heads = next(filter(None, (number_of(each, KV_HEADS) for each in (module, *configs))), None)
    if size and heads and heads * size != inputs and number_of(module, HEADS) is None:
        heads = inputs // size  # a module beside those that the configuration describes
    size = size or inputs // (heads or 1)
    heads = heads or inputs // size
    if heads * size != inputs:
        raise CannotSplit(
            f"{type(module).__name__} has {heads} heads of {size} features and its output layer reads {inputs}"
        )
    if reuses(outputs) and list(outputs.values()) == [inputs]:
        return HeadCounts(heads, kv_heads or heads, size), None
    outputs = dict(outputs) | {path: outputs[path] // 2 for path in gated_queries(outputs, inputs)}
    most = max(outputs.values())
    queries = [path for path, n in outputs.items() if n == inputs]
    fused = [path for path, n in outputs.items() if n > inputs] if len(outputs) < 3 else []
    if len(outputs) >= 3 and queries and len({n for n in outputs.values() if n != inputs}) <= 1:
        kv_features: float = min(outputs.values())
    elif len(outputs) == 2 and queries and any(last_part(path) in FUSED for path in outputs):
        fused = [path for path in outputs if last_part(path) in FUSED]  # keys with values
        kv_features = outputs[fused[0]] / 2
    elif len(outputs) == 1:
        kv_features = (most - inputs) / 2
    else:
        kv_features = 0
    found = kv_features / size
    if found < 1 or found % 1 or heads % found:
        if kv_heads in (None, heads) and len(outputs) == 2 and not any(n % heads for n in outputs.values()):
            return HeadCounts(heads, heads, size), None  # queries, keys and values of unlike width (MLA)
        made = " and ".join(map(str, outputs.values()))
        raise CannotSplit(f"its layers make {made} features for {heads} heads of {size}")
    return HeadCounts(heads, int(found), size), fused[0] if fused else None


def is_config(name: str, value: Any) -> bool:
    """Whether an attribute of a module is a configuration: an object or a table with numbers of heads or widths."""
    if name.startswith("_") or isinstance(value, (nn.Module, Tensor, type, str, int, float)) or value is None:
        return False
    return hasattr(value, "__dict__") and any(hasattr(value, known) for known in (*HEADS, *WIDTHS))


def _apart(outputs: int, counts: HeadCounts, ranks: int) -> Segment:
    """The segment of a layer of only queries, only keys or only values."""
    whole = outputs == counts.heads * counts.size or counts.heads == counts.kv_heads
    return Segment(outputs, ranks if whole else min(counts.kv_heads, ranks))


def _fused(counts: HeadCounts, queries: int, order: Order, ranks: int) -> tuple[Segment, ...]:
    """The segments of a fused layer of keys, values and `queries` heads of queries (0: none)."""
    kv_heads, size = counts.kv_heads, counts.size
    if order is Order.BLOCKS:
        return (Segment(counts.heads * size // MP_BLOCKS, ranks),) * 3 * MP_BLOCKS
    if order is Order.PARTS or kv_heads == 1:
        keys = Segment(kv_heads * size, min(kv_heads, ranks))
        return (*([Segment(queries * size, ranks)] if queries else []), keys, keys)
    if kv_heads >= ranks:
        return (Segment((queries + 2 * kv_heads) * size, ranks),)
    each = ranks // kv_heads  # ranks that share a group
    segments: list[Segment] = []
    for group in range(kv_heads):
        own = (group * each, (group + 1) * each)
        segments += [Segment(queries // kv_heads * size, each, own)] if queries else []
        segments += [Segment(size, 1, own), Segment(size, 1, own)]
    return tuple(segments)


def _reason(counts: HeadCounts, outputs: int, ranks: int, order: Order | None) -> str:
    """A rank's share of the heads in a layer of `outputs` features, with the order of a fused one, as text."""
    heads, kv_heads = counts.heads, counts.kv_heads
    copies = f", each on {ranks // kv_heads} ranks" if kv_heads < ranks else ""
    own = f"{counts.kv_heads_of(ranks)} of {kv_heads} key-value heads{copies}"
    if order is None and outputs != heads * counts.size:
        return own
    both = f" and {own}" if order is not None and kv_heads != heads else ""
    return f"{heads // ranks} of {heads} heads{both}" + ({None: "", **ORDERS}[order])


def _others(
    modules: Mapping[str, nn.Module], name: str, layers: set[str], counts: HeadCounts, ranks: int
) -> tuple[dict[str, tuple[Segment, ...]], tuple[str, ...], tuple[str, ...], dict[str, tuple[Segment, ...]]]:
    """Other modules with parameters: one row or column per head; per-head norms; unknown ones; norms over all heads."""
    heads: dict[str, tuple[Segment, ...]] = {}
    gathers: dict[str, tuple[Segment, ...]] = {}
    partial, unknown = list[str](), list[str]()
    divided = [n for n in (counts.heads, counts.kv_heads) if n % ranks == 0]
    for inner, module in modules[name].named_modules():
        path = f"{name}.{inner}".strip(".")
        shapes = [tuple(parameter.shape) for parameter in module.parameters(recurse=False)]
        if path in layers or not shapes:
            continue
        first = {shape[0] if shape else 0 for shape in shapes}
        features = [n * counts.size for n in divided]
        if isinstance(module, nn.Embedding):
            if module.embedding_dim == counts.heads:
                heads[path] = (Segment(counts.heads, ranks),)
            else:
                unknown.append(path)
        elif inner and all(shape == (counts.size,) for shape in shapes):
            partial.append(path)
        elif inner and len(first) == 1 and first <= {*features} and all(len(shape) == 1 for shape in shapes):
            gathers[path] = (Segment(first.pop(), ranks),)
        elif linear_features(module) is None and len(first) == 1 and first <= {*divided} and first != {1}:
            heads[path] = (Segment(first.pop(), ranks),)
        else:
            unknown.append(path)
    return heads, tuple(partial), tuple(unknown), gathers


def _sizes_inside(
    modules: Mapping[str, nn.Module], name: str, layers: set[str], counts: HeadCounts, ranks: int, widths: bool
) -> dict[str, dict[str, Any]]:
    """The attributes to set on an attention module and its submodules, by path; the first is the module itself.

    A submodule with linear layers that stay whole has heads of its own, as the indexer of DeepSeek V3.2.
    """
    found = {name: _sizes(modules[name], counts, ranks, widths)}
    apart: list[str] = []
    for inner, module in modules[name].named_modules():
        path = f"{name}.{inner}".strip(".")
        if not inner or linear_features(module) is not None:
            continue
        linears = [f"{path}.{child}" for child, each in module.named_children() if linear_features(each) is not None]
        apart += [f"{path}."] if linears and not {*linears} & layers else []
        if not f"{path}.".startswith(tuple(apart)) and (sizes := _sizes(module, counts, ranks, widths)):
            found[path] = sizes
    return found


def _sizes(module: Any, counts: HeadCounts, ranks: int, widths: bool) -> dict[str, Any]:
    """The attributes of one module with numbers of heads or of features, with one rank's values.

    Args:
        widths: whether an attribute of the model's width counts as the features of all heads if it equals them.
    """
    heads, kv_heads = counts.heads // ranks, counts.kv_heads_of(ranks)
    convolved = CHANNELS if isinstance(module, CONVOLUTIONS) and module.groups == counts.heads else ()
    meanings = [
        ((*HEADS, *_unknown_heads(module), *convolved), counts.heads, heads),
        (KV_HEADS, counts.kv_heads, kv_heads),
        (GROUPS, counts.heads // counts.kv_heads, heads // kv_heads),
        ((*FEATURES, *(WIDTHS if widths else ())), counts.heads * counts.size, heads * counts.size),
        (KV_FEATURES, counts.kv_heads * counts.size, kv_heads * counts.size),
    ]
    sizes: dict[str, Any] = {}
    for names, whole, own in meanings:
        for name in names:
            if vars(module).get(name) == whole and whole != own:
                sizes[name] = own
    return sizes | _configs_for(module, meanings)


def _configs_for(module: Any, meanings: Sequence[tuple[Sequence[str], int, int]]) -> dict[str, Any]:
    """Copies of the configurations that the forward reads, with one rank's numbers."""
    read = _names_read(type(module))
    found: dict[str, Any] = {}
    for attribute, config in [(n, v) for n, v in vars(module).items() if is_config(n, v)]:
        changes = {
            name: own for names, whole, own in meanings for name in names
            if whole != own and name in read and not hasattr(module, name) and getattr(config, name, None) == whole
        }  # fmt: skip
        if changes:
            found[attribute] = made = copy.copy(config)
            for name, value in changes.items():
                vars(made)[name] = value  # past a frozen dataclass
    return found


def _names_read(kind: type) -> set[str]:
    """The names of attributes that the methods of a class read, except in constructors."""
    names: set[str] = set()
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for name, value in vars(base).items():
            code = getattr(getattr(value, "__wrapped__", value), "__code__", None)
            if name != "__init__" and isinstance(code, CodeType):
                names |= {*code.co_names, *(n for c in code.co_consts if isinstance(c, CodeType) for n in c.co_names)}
    return names
