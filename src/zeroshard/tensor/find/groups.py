"""Groups of layers to split: column-parallel layers, and the row-parallel layer that reads their output.

A plan names them, or the structure of modules suggests them: by names, with shapes that agree.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise, takewhile

from torch import nn

from zeroshard.errors import PlanError
from zeroshard.tensor.find import attention, feed_forward, projections
from zeroshard.tensor.find.found import Style
from zeroshard.tensor.find.layer_plans import PlannedLayer
from zeroshard.tensor.find.layout import last_part
from zeroshard.tensor.find.linear import linear_features


class Source(StrEnum):
    """The origin of a group."""

    USER = "layers"
    MODEL = "model's plan"
    STRUCTURE = "structure"


@dataclass(frozen=True, slots=True)
class Group:
    """Column-parallel layers and the row-parallel layer behind them.

    Attributes:
        columns: paths of the column-parallel layers, all of one module.
        row: path of the row-parallel layer.
        source: origin of the group.
        said: the reason of each layer, by path.
        certain: whether the code between the layers is known.
        gathered: whether a plan gathers features between them.
    """

    columns: tuple[str, ...]
    row: str
    source: Source
    said: Mapping[str, str]
    certain: bool = False
    gathered: bool = False

    @property
    def holder(self) -> str:
        """The module that holds the column-parallel layers."""
        return self.columns[0].rpartition(".")[0]

    @property
    def around(self) -> str:
        """The path of the innermost module that contains all the layers."""
        parts, others = self.holder.split("."), self.row.split(".")[:-1]
        both = takewhile(lambda pair: pair[0] == pair[1], zip(parts, others, strict=False))
        return ".".join(part for part, _ in both)

    def tried(self, modules: Mapping[str, nn.Module]) -> str:
        """The path of the innermost module with a forward that contains all the layers."""
        path = self.around
        while path and isinstance(modules[path], (nn.ModuleList, nn.ModuleDict)):
            path = path.rpartition(".")[0]
        return path


ELEMENTWISE = (  # modules of torch that work on each feature alone
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU),
    *(nn.Softplus, nn.Softsign, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.LogSigmoid, nn.Dropout, nn.Identity),
)


def planned_groups(
    order: Sequence[str], planned: Mapping[str, PlannedLayer], source: Source
) -> tuple[list[Group], dict[str, str]]:
    """The groups of a plan, and the reasons of its layers without a group.

    Args:
        order: all paths of the model.

    Raises:
        PlanError: a layer of the user's plan has no group.
    """
    columns = [path for path in order if path in planned and planned[path].style is Style.COLUMN]
    rows = [path for path in order if path in planned and planned[path].style is Style.ROW]
    place = {path: n for n, path in enumerate(order)}
    free, groups, reasons = dict.fromkeys(columns), list[Group](), dict[str, str]()
    for row in rows:
        holder = row.rpartition(".")[0]
        beside = [path for path in free if path.rpartition(".")[0] == holder]
        if sum(other.rpartition(".")[0] == holder for other in rows) > 1:
            beside = [path for path in beside if place[path] < place[row]]
        before = [path for path in free if place[path] < place[row]]
        own = beside or [path for path in before if path.rpartition(".")[0] == before[-1].rpartition(".")[0]]
        if not own:
            reasons[row] = "no column-parallel layer stands before it, so that it would read whole features"
            continue
        for path in own:
            del free[path]
        gathered = any(planned[path].gathered for path in (*own, row))
        said = {path: planned[path].said for path in (*own, row)}
        groups.append(Group(tuple(own), row, source, said, gathered=gathered))
    reasons |= dict.fromkeys(free, "no row-parallel layer reads what it makes")
    for path, reason in reasons.items():
        if source is Source.USER:
            style, other = (Style.ROW, Style.COLUMN) if path in rows else (Style.COLUMN, Style.ROW)
            raise PlanError(
                f"tensor_parallel.layers gives {path!r} the style {style.value!r}, and {reason}. Give the layers that "
                f"{'make what it reads' if path in rows else 'read what it makes'} the style {other.value!r}, or leave "
                f"{path!r} out."
            )
    return groups, reasons


def own_groups(modules: Mapping[str, nn.Module], free: Callable[[str], bool]) -> Iterator[Group]:
    """Groups by the structure of modules.

    Args:
        free: whether no plan names a module.
    """
    for name, module in modules.items():
        if type(module).forward is nn.Sequential.forward:
            found = [*_in_sequence(module, name)]
        elif isinstance(module, nn.ModuleList) and (pairs := [*_in_list(module, name)]):
            found = pairs
        else:
            found = _attention(modules, name) or _attention_by_shapes(module, name) or _feed_forward(modules, name)
        for columns, row, certain in found:
            if all(map(free, (*columns, row))):
                said = dict.fromkeys((*columns, row), "found by its structure")
                yield Group(tuple(columns), row, Source.STRUCTURE, said, certain)


def _linears(module: nn.Module) -> dict[str, int]:
    """The linear layers that a module holds, with their numbers of output features."""
    found = {name: linear_features(child) for name, child in module.named_children()}
    return {name: features.outputs for name, features in found.items() if features is not None}


def _attention(modules: Mapping[str, nn.Module], name: str) -> list[tuple[list[str], str, bool]]:
    """Projections to queries, keys and values by name, and the output projection, in the module or in a sibling."""
    linears = _linears(modules[name])
    query, key, value, fused, output = (
        next((n for n in names if n in linears), None)
        for names in (projections.QUERY, projections.KEY, projections.VALUE, projections.FUSED, projections.OUTPUT)
    )
    apart = bool(query and key and value)
    alone = bool(query and output and attention.has_heads(modules[name])) and not (key or value)
    if not apart and not fused and not alone:
        return []
    columns = [n for n in ((query, key, value) if apart else (query, fused)) if n]
    rows = [f"{name}.{output}"] if output else [*_inside(modules, name), *_beside(modules, name, linears[columns[0]])]
    return [([f"{name}.{n}".strip(".") for n in columns], rows[0].strip("."), False)] if rows else []


def _attention_by_shapes(module: nn.Module, name: str) -> list[tuple[list[str], str, bool]]:
    """Four linear layers of a module with heads, or a fused one and one that reads its queries' features."""
    linears = _linears(module)
    *first, last = linears or [""]
    read = linear_features(module.get_submodule(last)) if last else None
    if read is None or not attention.has_heads(module) or {*linears} & {*feed_forward.UP}:
        return []
    made = [linears[n] for n in first]
    if not (len(made) == 3 and read.inputs in made) and made != [3 * read.inputs]:
        return []
    return [([f"{name}.{n}".strip(".") for n in first], f"{name}.{last}".strip("."), False)]


def _inside(modules: Mapping[str, nn.Module], name: str) -> Iterator[str]:
    """The linear layer of an output projection that is a sequence of modules."""
    for child, module in modules[name].named_children():
        if child in projections.OUTPUT and isinstance(module, nn.Sequential):
            yield from (f"{name}.{child}.{n}" for n in _linears(module))


def _beside(modules: Mapping[str, nn.Module], name: str, features: int) -> Iterator[str]:
    """Output projections in sibling modules that may read a module's `features` outputs."""
    parent, _, own = name.rpartition(".")
    for child, module in modules[parent].named_children() if own else ():
        for n in _linears(module) if child != own else ():
            found = linear_features(module.get_submodule(n))
            if n in projections.OUTPUT and found is not None and found.inputs == features:
                yield f"{parent}.{child}.{n}"


def _feed_forward(modules: Mapping[str, nn.Module], name: str) -> list[tuple[list[str], str, bool]]:
    """Up projections and one down projection, by names; by shapes if the module holds no other linear layers."""
    module = modules[name]
    linears = _linears(module)
    ups, downs = [n for n in linears if n in feed_forward.UP], [n for n in linears if n in feed_forward.DOWN]
    if not (ups and len(downs) == 1) and len(linears) in (2, 3):
        made = list(linears.values())
        downs = [n for n in linears if made.count(linears[n]) == 1 or len(made) == 2][-1:]
        ups = [n for n in linears if n not in downs]
    for one, other in feed_forward.TOGETHER:
        inner = [dict(module.named_children()).get(n, nn.Identity()) for n in (one, other)]
        first, second = (list(_linears(each)) for each in inner)
        if len(first) == len(second) == 1:
            return [([f"{name}.{one}.{first[0]}".strip(".")], f"{name}.{other}.{second[0]}".strip("."), False)]
    if not ups and len(downs) == len(linears) == 1:
        return _up_in_child(module, name, downs[0])
    if not ups or len(downs) != 1 or (attention.has_heads(module) and len(linears) > len(ups) + 1):
        return []
    last = linear_features(module.get_submodule(downs[0]))
    if last is None or any(linears[n] % last.inputs for n in ups):
        return []
    return [([f"{name}.{n}".strip(".") for n in ups], f"{name}.{downs[0]}".strip("."), False)]


def _up_in_child(module: nn.Module, name: str, down: str) -> list[tuple[list[str], str, bool]]:
    """Up projections in a module beside the down projection (CPM-Ant)."""
    last = linear_features(module.get_submodule(down))
    for child, each in module.named_children():
        ups = _linears(each)
        if last is not None and ups and len(list(each.modules())) <= len(ups) + 3 and {*ups.values()} == {last.inputs}:
            return [([f"{name}.{child}.{n}".strip(".") for n in ups], f"{name}.{down}".strip("."), False)]
    return []


def _in_sequence(module: nn.Module, name: str) -> Iterator[tuple[list[str], str, bool]]:
    """Pairs of linear layers of an nn.Sequential with only elementwise modules between them, which may overlap."""
    first: str | None = None
    for child, each in module.named_children():
        features = linear_features(each)
        if features is not None and first is not None:
            yield [f"{name}.{first}".strip(".")], f"{name}.{child}".strip("."), True
        if features is not None:
            first = child
        elif not isinstance(each, ELEMENTWISE):
            first = None


def _in_list(module: nn.Module, name: str) -> Iterator[tuple[list[str], str, bool]]:
    """Pairs of neighbours of an nn.ModuleList whose linear layers can follow each other, which may overlap."""
    features = [linear_features(each) for each in module.children()]
    sizes = [(found.inputs, found.outputs) for found in features if found is not None]
    if len(sizes) == len(features) and all(one[1] == other[0] for one, other in pairwise(sizes)):
        paths = [f"{name}.{child}".strip(".") for child, _ in module.named_children()]
        yield from (([one], other, False) for one, other in pairwise(paths))


def is_attention(module: nn.Module, columns: Sequence[str]) -> bool:
    """Whether layers of a module make queries, keys and values."""
    parts = [last_part(path) for path in columns]
    if all(part in projections.PROJECTIONS for part in parts):
        return True
    made = any(part in projections.QUERY for part in parts) or not any(part in feed_forward.UP for part in parts)
    return attention.has_heads(module) and made
