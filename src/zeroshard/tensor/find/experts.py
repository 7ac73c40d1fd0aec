"""Experts in stacked parameters: found by their shapes, and split by the inner features of every expert.

A module has parameters [E, ...] of E experts: up projections from D features of a token to I inner ones (2 I with a
gate), and down projections back. A rank of t computes I / t inner features of each expert, so that its output is a
part of a sum, as that of a row-parallel layer (1909.08053, section 3); so is its gradient of the tokens and of their
weights.
Biases of down projections are divided by t. Which dimension is which, and the order of gates, is decided by a trial
([Note: Trials]): a copy with few features computes whole and as each rank would, outputs and gradients.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from zeroshard.parts.technique import CUT
from zeroshard.tensor.find.found import ExpertCut, FoundLayer, Segment, Style, pieces_of
from zeroshard.tensor.find.layout import CannotSplit
from zeroshard.tensor.find.linear import class_path
from zeroshard.tensor.find.small_run import Calls, likeness
from zeroshard.tensor.find.trial import TrialWeights, alike, apart, copy_of, in_short, taken
from zeroshard.tensor.split.experts import cut_experts, divided_biases

OWN = "zeroshard.moe."  # whose experts `expert_parallel` divides
MOST_EXPERTS, FEATURES, INNER = 8, 12, 4  # of the copy; inner features of each rank
MOST_CHOICES, TOLERANCE = 32, 1e-3
SIZES = (
    "intermediate",
    "inner",
    "expert_dim",
    "ffn",
    "ff_dim",
)  # in names of attributes with numbers of inner features


@dataclass(frozen=True, slots=True)
class _Shape:
    """The sizes of experts: E, D and I."""

    experts: int
    features: int
    inner: int

    def small(self, ranks: int) -> dict[int, int]:
        """The sizes of a copy, by those of the module; equal sizes stay equal."""
        inner = INNER * ranks
        features = {self.inner: inner, 2 * self.inner: 2 * inner}.get(self.features, FEATURES)
        experts = max(n for n in range(1, MOST_EXPERTS + 1) if self.experts % n == 0)
        return {self.experts: experts, self.inner: inner, 2 * self.inner: 2 * inner, self.features: features}


def find_experts(
    modules: Mapping[str, nn.Module], calls: Calls, ranks: int, kept: Mapping[str, str]
) -> tuple[dict[str, FoundLayer], dict[str, str]]:
    """Modules of experts to split, and reasons of the others, by path.

    Args:
        kept: modules that stay whole, with the reason.
    """
    layers: dict[str, FoundLayer] = {}
    reasons: dict[str, str] = {}
    tried: dict[Any, FoundLayer | str] = {}
    for path, module in modules.items():
        if not _are_experts(module):
            continue
        key = likeness(module)
        if path in kept:
            reasons[path] = kept[path]
            continue
        if key not in tried:
            try:
                tried[key] = _split(path, module, calls.of(path), ranks)
            except CannotSplit as error:
                tried[key] = f"experts: {error}"
        found = tried[key]
        if isinstance(found, str):
            reasons[path] = found
        else:
            layers[path] = replace(found, name=path)
    return layers, reasons


def _are_experts(module: nn.Module) -> bool:
    """Whether a module's own parameters are stacks of one number of experts."""
    shapes = [tuple(parameter.shape) for parameter in module.parameters(recurse=False)]
    stacked = [shape for shape in shapes if len(shape) == 3]
    other = class_path(module).startswith(OWN) or hasattr(module, CUT) or isinstance(module, nn.modules.conv._ConvNd)
    return len(stacked) > 1 and not other and len({shape[0] for shape in shapes if shape}) == 1


def _split(path: str, module: nn.Module, call: tuple[Any, Any] | None, ranks: int) -> FoundLayer:
    """The layer of a module of experts.

    Raises:
        CannotSplit: with the reason.
    """
    tokens = [leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if call is None or not tokens:
        raise CannotSplit("no call of it in small is known")
    reason = "its parameters do not lead from the features of tokens and back"
    for shape, cuts, text in _choices(module, tokens[0].shape[-1], ranks):
        if shape.inner % ranks:
            raise CannotSplit(f"{ranks} ranks do not divide {shape.inner} inner features")
        sizes = _sizes(module, shape.inner, ranks)
        part = f"{shape.inner // ranks} of {shape.inner} inner features of each of {shape.experts} experts{text}"
        segments = (Segment(shape.inner, ranks),)
        layer = FoundLayer(path, Style.EXPERTS, segments, f"{part}; found by their shapes", cuts=cuts, sizes=sizes)
        with apart(), torch.enable_grad():
            try:
                found = _Trial(module, call, layer, shape, ranks).differing()
            except Exception as error:
                found = f"they cannot be tried ({in_short(error)})"
        if not found:
            return layer
        reason = found
    raise CannotSplit(reason)


def _choices(module: nn.Module, features: int, ranks: int) -> Iterator[tuple[_Shape, tuple[ExpertCut, ...], str]]:
    """Possible meanings of the dimensions of experts' parameters."""
    own = dict(module.named_parameters(recurse=False))
    stacks = {name: tuple(p.shape) for name, p in own.items() if p.dim() == 3}
    ways = [[d for d in (1, 2) if shape[3 - d] == features] for shape in stacks.values()]
    count = 0
    for dims in product(*ways):
        made = {name: stacks[name][d] for name, d in zip(stacks, dims, strict=True)}
        inner = min(made.values())
        if any(n not in (inner, 2 * inner) for n in made.values()) or inner not in made.values():
            continue
        shape = _Shape(len(next(iter(own.values()))), features, inner)
        biases = {name: p.shape[1] for name, p in own.items() if p.dim() == 2}
        meant = [
            [each for each in (1, 0) if (n in (inner, 2 * inner) if each else n == features)] for n in biases.values()
        ]
        for kinds in product(*meant):
            doubled = [n for n in made.values() if n != inner]
            for interleaved in (False, True) if doubled else (False,):
                count += 1
                if count > MOST_CHOICES:
                    return
                place = [*zip(stacks, dims, strict=True), *zip(biases, kinds, strict=True)]
                cuts = [
                    ExpertCut(name, d, _order(own[name].shape[d] if d else 0, inner, interleaved, ranks))
                    for name, d in place
                ]
                text = ", gates next to what they gate" if interleaved else ""
                yield shape, tuple(cuts), text


def _order(size: int, inner: int, interleaved: bool, ranks: int) -> tuple[Segment, ...]:
    """The segments of a dimension of I or 2 I features; () for a bias of a down projection."""
    if not size:
        return ()
    return (Segment(size, ranks),) if interleaved else (Segment(inner, ranks),) * (size // inner)


def _sizes(module: nn.Module, inner: int, ranks: int) -> tuple[tuple[str, int], ...]:
    """The attributes with numbers of inner features, with one rank's numbers."""
    named = ((name, n) for name, n in vars(module).items() if any(part in name for part in SIZES))
    return tuple((name, n // ranks) for name, n in named if type(n) is int and n in (inner, 2 * inner))


class _Trial:
    """A copy of experts with few features, whole and as each rank has it."""

    def __init__(self, module: nn.Module, call: tuple[Any, Any], layer: FoundLayer, shape: _Shape, ranks: int) -> None:
        self._module, self._call, self._layer, self._shape, self._ranks = module, call, layer, shape, ranks
        self._small = shape.small(ranks)
        if len(self._small) < len({shape.experts, shape.inner, 2 * shape.inner, shape.features}):
            raise ValueError("numbers of experts and of features are equal")
        self._weights = TrialWeights()
        cuts = [
            replace(cut, segments=tuple(Segment(self._small[s.size], s.parts) for s in cut.segments))
            for cut in layer.cuts
        ]
        self._own = replace(
            layer, cuts=tuple(cuts), sizes=tuple((name, self._small[n * ranks] // ranks) for name, n in layer.sizes)
        )

    def differing(self) -> str:
        """The first difference; "" if there is none."""
        output, gradients = self._compute(None)
        if not any(bool(gradient.any()) for gradient in gradients.values()):
            return "their gradients are zero"
        total = torch.zeros_like(output)
        sums = {key: torch.zeros_like(gradient) for key, gradient in gradients.items()}
        for rank in range(self._ranks):
            made, own = self._compute(rank)
            if made.shape != output.shape:
                return "their output has another shape on one rank"
            total += made
            for key, gradient in own.items():
                cut = next((cut for cut in self._own.cuts if cut.name == key and cut.segments), None)
                if cut is None:
                    sums[key] += gradient
                    continue
                at = 0
                for piece in pieces_of(cut.segments, self._ranks, rank):
                    part = gradient.narrow(cut.dimension, at, piece.length)
                    sums[key].narrow(cut.dimension, piece.start, piece.length).add_(part)
                    at += piece.length
        if not alike(total, output, TOLERANCE):
            return "their outputs of all ranks do not add up"
        wrong = next((key for key, each in gradients.items() if not alike(sums[key], each, TOLERANCE)), None)
        return "" if wrong is None else f"the gradients of {wrong} of all ranks do not add up"

    def _compute(self, rank: int | None) -> tuple[Tensor, dict[str, Tensor]]:
        """The output, and gradients of parameters and of the arguments."""
        small, weights = self._small, self._weights

        def parameter(path: str, name: str) -> Tensor:
            shape = getattr(self._module.get_submodule(path), name).shape
            return weights.drawn((path, name), tuple(small.get(n, n) for n in shape)) * 0.5

        made = copy_of(self._module, {}, parameter)
        for name, value in list(vars(made).items()):
            if type(value) is int and value in small:
                vars(made)[name] = small[value]
        if rank is not None:
            cut_experts(made, self._own, self._ranks, rank)
        given: dict[str, Tensor] = {}

        def argument(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.dim():
                return leaf
            if not leaf.is_floating_point():
                return leaf if leaf.dtype is torch.bool else leaf % small[self._shape.experts]
            *more, last = leaf.shape
            if last in (self._shape.features, self._shape.experts):
                last = small[last]
            key = f"argument {len(given)}"
            given[key] = weights.drawn(key, (*more, last)).requires_grad_()
            return given[key]

        args, kwargs = tree_map(argument, taken(*self._call))
        with divided_biases(made, self._own, 1 if rank is None else self._ranks):
            output = made(*args, **kwargs)
        if not isinstance(output, Tensor):
            raise TypeError(f"they return a {type(output).__name__}")
        of = {**dict(made.named_parameters(recurse=False)), **given}
        target = (output * weights.drawn("target", tuple(output.shape))).sum()
        gradients = torch.autograd.grad(target, list(of.values()), allow_unused=True)
        return output.detach(), {
            key: torch.zeros_like(value) if gradient is None else gradient
            for (key, value), gradient in zip(of.items(), gradients, strict=True)
        }
