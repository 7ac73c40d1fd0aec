"""Stacks of blocks, and whether their blocks can work on parts of sequences (2205.05198, section 4.2.2).

[Note: Positions apart]
Between split layers, sequence parallelism gives each rank some positions. This is right if a block applies the same
function to each position, apart from its attention; the same holds for blocks without split layers between others.
Blocks of transformers with all linear layers split satisfy it. Of another block a copy is tried, with cheap stand-ins
for attention and linear layers: a change of one position must change only its output, and a permutation of the
positions must permute the output.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zeroshard.errors import ModelError
from zeroshard.tensor.find.found import AttentionSizes, FoundLayer, Style
from zeroshard.tensor.find.linear import linear_features
from zeroshard.tensor.find.small_run import Calls
from zeroshard.tensor.find.trial import (
    ByPosition,
    TrialWeights,
    alike,
    apart,
    call,
    copy_of,
    first_tensor,
    in_short,
    taken,
)
from zeroshard.tensor.split.sequence import activation_in, with_activation

KNOWN = ("transformers.models.", "zeroshard.train.gpt")  # whose blocks mix positions in attention alone
BETWEEN = ("_deepstack_process",)  # methods of their models that add features of images between blocks
MIXING_NORMS = ("BatchNorm", "GroupNorm", "InstanceNorm")
POSITIONS, MOST_VALUES = 4, 3
TOLERANCE = 1e-5
Found = Mapping[str, FoundLayer]
Call = tuple[Any, Any]


def stacks_of(modules: Mapping[str, nn.Module], found: Found) -> Iterator[tuple[str, list[str]]]:
    """The stacks with split layers: the path of a list of modules, and the paths of its blocks in order."""
    rows = [f"{path}." for path, layer in found.items() if layer.style is Style.ROW]
    inside: list[str] = []
    for path, module in modules.items():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or any(f"{path}.".startswith(b) for b in inside):
            continue
        children = [f"{path}.{name}".strip(".") for name, _ in module.named_children()]
        blocks = [
            child for child in children
            if any(row.startswith(f"{child}.") and row != f"{child}." for row in rows)
            and not isinstance(modules[child], (nn.ModuleList, nn.Sequential))
        ]  # fmt: skip
        if blocks:
            inside += [f"{block}." for block in blocks]
            yield path, blocks


def why_whole_sequences(
    modules: Mapping[str, nn.Module], path: str, blocks: Sequence[str], found: Found,
    attentions: Sequence[AttentionSizes], calls: Calls,
) -> str:  # fmt: skip
    """Why the blocks of the stack at `path` cannot work on parts of sequences; "" if they can."""
    names = [attention.name for attention in attentions]
    held = list(modules[path]._modules.values())
    if len(set(held)) < len(held):
        return "a block stands in it more than once, and sequences are cut before the first and joined after the last"
    owner = modules[path.rpartition(".")[0]]
    if any(hasattr(owner, method) for method in BETWEEN):
        return "the model adds features of images to some positions between the blocks"
    if not any(name.startswith(f"{block}.") for block in blocks for name in names):
        return "no attention in it is split, so that its input need not be [B, T, D]"
    seen: dict[Any, str] = {}
    children = [f"{path}.{name}".strip(".") for name, _ in modules[path].named_children()]
    through = children[children.index(blocks[0]) : children.index(blocks[-1]) + 1]
    for before, after in pairwise(through):
        if calls.changes_between(before, after):
            return f"the model changes activations between {before} and {after}"
    for block in through:
        of_block = (found.get(f"{block}.{inner}".strip(".")) for inner, _ in modules[block].named_modules())
        styles = [layer.style for layer in of_block if layer is not None]
        key = (tuple((path, type(module)) for path, module in modules[block].named_modules()), tuple(styles))
        if key not in seen:
            inside = [calls.of(name) for name in names if name.startswith(f"{block}.")]
            seen[key] = _why_several(calls.of(block), inside) or _why(modules, block, found, names, calls.of(block))
        if seen[key]:
            return f"{block}: {seen[key]}"
    return ""


def _why_several(given: Call | None, inside: Sequence[Call | None]) -> str:
    """Why attention modules that get several activations of their block cannot be opened; "" if each gets one.

    Args:
        given: arguments of the block's call.
        inside: arguments of the calls of its attention modules.
    """
    if given is None:
        return ""
    outside = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)][1:]
    with apart():
        for args, kwargs in filter(None, inside):
            floats = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
            for x in floats[1:]:
                from_outside = any(x.shape == each.shape and torch.equal(x, each) for each in outside)
                if x.dim() == 3 and len(x) == len(floats[0]) and not from_outside:
                    return "its attention gets several activations, of which one would be whole"
    return ""


def _why(
    modules: Mapping[str, nn.Module], block: str, found: Found, attentions: Sequence[str], given: Call | None
) -> str:
    whole_linear = False
    for inner, module in modules[block].named_modules():
        path = f"{block}.{inner}".strip(".")
        layer = found.get(path)
        if layer is not None and layer.style is Style.EXPERTS:
            return f"{inner or 'it'} has experts, which read the tokens of all ranks"
        if layer is None or layer.style is not Style.WHOLE or layer.partial:
            continue
        if any(path.startswith(f"{name}.") or path == name for name in attentions):
            return f"{inner or 'it'} is part of a module with attention, and not of its heads"
        whole_linear |= linear_features(module) is not None
        kind = type(module).__name__
        is_norm = kind.endswith("Norm") and not kind.startswith(MIXING_NORMS)
        if not is_norm and linear_features(module) is None:
            return f"{inner or 'it'} ({kind}) may mix positions, and is whole"
    rows = [path for path, layer in found.items() if layer.style is Style.ROW and path.startswith(f"{block}.")]
    known = type(modules[block]).__module__.startswith(KNOWN)
    if known and not whole_linear and rows:
        return ""
    own = [name.removeprefix(f"{block}.") for name in attentions if name.startswith(f"{block}.")]
    return _tried(modules[block], block, own, found, given)


def _tried(block: nn.Module, name: str, attentions: Sequence[str], found: Found, given: Call | None) -> str:
    """Why a copy of the block fails its trial, with the arguments of the model's call if known; "" if it passes."""
    features = [each for each in map(linear_features, block.modules()) if each is not None]
    rows = [path for path, layer in found.items() if layer.style is Style.ROW and path.startswith(f"{name}.")]
    if rows:
        of_row = (block.get_submodule(path.removeprefix(f"{name}.")) for path in found[rows[0]].columns)
        features = [each for each in map(linear_features, of_row) if each is not None]
    width = features[0].inputs if features else 1
    with apart():
        weights, problem = TrialWeights(), ""
        try:
            x = weights.drawn("x", (1, POSITIONS, width)) if given is None else activation_in(*given, name)
        except ModelError:
            return "it gets no activation [B, T, D]"
        if x.dim() != 3:
            return f"it gets an activation of {x.dim()} dimensions"
        for more in range(MOST_VALUES):
            copy = _copy(block, attentions, weights, more)
            run = partial(_run, copy, weights, given)
            try:
                y = run(x)
            except Exception as error:
                problem = problem or f"its forward cannot be tried ({in_short(error)})"
                continue
            order = torch.tensor([2, 0, 3, 1, *range(4, x.shape[1])])
            changed, others = x.clone(), [n for n in range(x.shape[1]) if n != 1]
            changed[:, 1] = weights.drawn("change", (x.shape[2],))
            if y.shape[:2] != x.shape[:2] or not alike(run(changed)[:, others], y[:, others], TOLERANCE):
                return "it mixes positions outside of attention"
            return "" if alike(run(x[:, order]), y[:, order], TOLERANCE) else "it does not treat all positions alike"
    return problem


def _copy(block: nn.Module, attentions: Sequence[str], weights: TrialWeights, more: int) -> nn.Module:
    """A copy of a block whose attention returns `more` values after the activation."""
    stands: dict[str, nn.Module] = {}
    for path, module in block.named_modules():
        features = linear_features(module)
        if path in attentions:
            last = [f for f in map(linear_features, module.modules()) if f is not None][-1]
            stands[path] = ByPosition(last.outputs, more)
        elif features is not None:
            stands[path] = ByPosition(features.outputs)
    shapes = {name: tuple(parameter.shape) for name, parameter in block.named_parameters()}
    copy: nn.Module = copy_of(
        block, stands, lambda path, name: weights.drawn((path, name), shapes[f"{path}.{name}".strip(".")])
    )
    return copy


def _run(copy: nn.Module, weights: TrialWeights, given: Call | None, x: Tensor) -> Tensor:
    if given is None:
        return first_tensor(call(copy, x, 0, weights))
    args, kwargs = with_activation(*taken(*given), x.clone())
    return first_tensor(copy(*args, **kwargs))
