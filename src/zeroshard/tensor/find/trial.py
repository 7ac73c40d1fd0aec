"""Trials of a split: copies of a module compute with all heads and with the heads of some ranks, and are compared.

[Note: Trials]
Names and shapes suggest a split; only the forward's result confirms it. A trial copies the module with its linear
layers replaced: column-parallel ones by layers that read a few features of their input, so that they are small
whatever the width, others by functions without weights. One copy has all heads, others have one rank's heads, with the
sizes that a split sets. All run on the same random input. The row-parallel layer must read, on each rank, the features
that the whole one reads there, and with the same sum as its output the module's output must be the same. This detects
projections with another order of features, norms over all heads and sizes that a split does not set, before training.
Parameters between the column-parallel layers and the row-parallel one work on their rank's features only, so each rank
has a part of their gradient.

No value of the model is read, so a trial gives the same verdict on the meta device and in rehearsals.
"""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from zeroshard.parts.place import Piece
from zeroshard.parts.technique import CUT
from zeroshard.tensor.find.found import AttentionSizes, FoundLayer, Segment, pieces_of
from zeroshard.tensor.find.linear import linear_features
from zeroshard.tensor.split.heads import fit_attention, fit_layer, head_dimension

READ, BATCH, POSITIONS = 8, 2, 3  # input features that stand-ins of column-parallel layers read; shape of the input
SIDES = (32, 28)  # of images, as CIFAR and MNIST have them: classifiers often fix the size
MOST = 2**25  # elements of all other parameters
TOLERANCE = 1e-3  # relative; features in a wrong order differ by as much as they are
MASKS = ("attention_mask", "mask", "causal_mask", "attn_mask")
OUTSIDE = ("key_value_states", "encoder_hidden_states", "memory", "context", "encoder_states")
LIKE_INPUT = ("input_tensor", "residual")


class _Mixed(Exception):
    """A module with both whole gradients and parts of sums."""


@dataclass(frozen=True, slots=True)
class TrialVerdict:
    """The verdict of a trial.

    Attributes:
        ran: whether the whole copy ran.
        agrees: whether the ranks' copies agree with the whole one.
        reason: why not.
        partial: paths of modules whose parameters work on one rank's features only.
    """

    ran: bool
    agrees: bool
    reason: str = ""
    partial: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial of a split of layers in one module; paths are relative to the module.

    Attributes:
        module: its forward uses all the layers.
        columns: segments of the column-parallel layers.
        heads: segments of modules with a row or a column per head.
        row: path of the row-parallel layer.
        row_segments: segments of its input.
        sizes: attributes to set, by path.
        head_size: features of a head, for rotary positions; 0 without heads.
        given: arguments of the model's call of the module; None if unknown.
        attention: needs of the attention module besides sizes.
        layers: modules inside that need more than sizes.
    """

    module: nn.Module
    columns: Mapping[str, tuple[Segment, ...]]
    heads: Mapping[str, tuple[Segment, ...]]
    row: str
    row_segments: tuple[Segment, ...]
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    head_size: int = 0
    given: tuple[Any, Any] | None = None
    attention: AttentionSizes | None = None
    layers: Sequence[FoundLayer] = ()

    def run(self, ranks: int) -> TrialVerdict:
        """Try the first, the second and the last of `ranks`."""
        width = next(found.inputs for path in self.columns if (found := linear_features(self._at(path))) is not None)
        others = [module for module in self.module.modules() if linear_features(module) is None]
        if sum(p.numel() for module in others for p in module.parameters(recurse=False)) > MOST:
            return TrialVerdict(False, False, f"{type(self.module).__name__} is too large to be tried")
        with apart():
            weights, borders = TrialWeights(), _Borders()
            errors = list[str]()
            for shape in _shapes(self.module, width):
                x = weights.drawn(shape, shape)
                try:
                    whole, total, partial = self._compute(weights, x, {}, {}, borders, None, ranks)
                    break
                except _Mixed as error:
                    return TrialVerdict(True, False, str(error))
                except Exception as error:
                    errors.append(in_short(error))
            else:
                return TrialVerdict(False, False, f"its forward cannot be tried ({errors[0]})")
            for rank in sorted({0, 1, ranks - 1}):
                split = {**self.columns, **self.heads}
                pieces = {path: list(pieces_of(segments, ranks, rank)) for path, segments in split.items()}
                own = list(pieces_of(self.row_segments, ranks, rank))
                expected = torch.cat([whole[..., piece.start : piece.stop] for piece in own], dim=-1)
                try:
                    read, output, _ = self._compute(weights, x, pieces, self.sizes, borders, rank, ranks)
                except Exception as error:
                    return TrialVerdict(
                        True, False, f"its forward fails on the features of one rank ({in_short(error)})"
                    )
                if not alike(read, expected, TOLERANCE):
                    return TrialVerdict(True, False, "its forward makes something else of the features of one rank")
                if not alike(output, total, TOLERANCE):
                    return TrialVerdict(True, False, "its output needs the features of all ranks")
        return TrialVerdict(True, True, partial=partial)

    def _at(self, path: str) -> nn.Module:
        return self.module.get_submodule(path)

    def _compute(
        self,
        weights: "TrialWeights",
        x: Tensor,
        pieces: Mapping[str, list[Piece]],
        sizes: Mapping[str, Mapping[str, Any]],
        borders: "_Borders",
        rank: int | None,
        ranks: int,
    ) -> tuple[Tensor, Tensor, tuple[str, ...]]:
        """The row-parallel layer's input, the output, and the modules whose parameters the former depends on.

        Raises:
            _Mixed: the column-parallel layers and the row-parallel layer both depend on a module.
        """
        replaced: dict[str, nn.Module] = {}
        for path, module in self.module.named_modules():
            features = linear_features(module)
            if features is not None:
                replaced[path] = ByPosition(features.outputs)
                if path in self.columns:
                    replaced[path] = _Column(weights, path, features.outputs, module, pieces.get(path))
        features = linear_features(self._at(self.row))
        assert features is not None
        replaced[self.row] = row = _Row(weights, features.outputs)
        whole = {path: segments for path, segments in self.heads.items() if path in pieces}

        def parameter(path: str, name: str) -> Tensor:
            values = weights.drawn((path, name), tuple(getattr(self._at(path), name).shape))
            dimension = head_dimension(self._at(path))
            parts = [values.narrow(dimension, p.start, p.length) for p in pieces.get(path, ())]
            return torch.cat(parts, dimension) if path in whole else values

        made = copy_of(self.module, replaced, parameter)
        for path, values in sizes.items():
            vars(made.get_submodule(path)).update(values)
        borders.whole = rank is None
        for layer in self.layers:
            fit_layer(made.get_submodule(layer.name), layer, borders, ranks, rank)
        if self.attention is not None:
            fit_attention(made.get_submodule(self.attention.name), self.attention, borders, ranks, rank, None)
        with torch.enable_grad():
            if self.given is None:
                output = first_tensor(call(made, x, self.head_size, weights))
            else:
                args, kwargs = taken(*self.given)
                output = first_tensor(made(*args, **kwargs))
            if row.read is None:
                raise RuntimeError(f"it does not call {self.row}")
            partial = tuple(
                _before(row.read, made, {*self.columns, *self.heads}, [e.name for e in self.layers if e.shared])
            )
            entered = [each.entered for each in replaced.values() if isinstance(each, _Column)]
            mixed = [p for x in entered if x is not None for p in _before(x, made, {*self.columns}) if p in partial]
            if mixed:
                raise _Mixed(f"all heads read what {mixed[0]} makes, and its layers of heads read it too")
        return row.read.detach(), output.detach(), partial


def _shapes(module: nn.Module, width: int) -> Iterator[tuple[int, ...]]:
    """Shapes of inputs to try: sequences of features, and images for convolutions."""
    yield BATCH, POSITIONS, width
    for each in module.modules():
        if isinstance(each, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            yield from ((BATCH, each.in_channels, *[side] * len(each.kernel_size)) for side in SIDES)
            return


def _before(read: Tensor, copy: nn.Module, split: set[str], shared: Sequence[str] = ()) -> Iterator[str]:
    """The modules on whose parameters a tensor depends, except the split ones.

    Args:
        shared: modules with features that all heads read: their gradient is summed there, and may be zero here.
    """
    if not read.requires_grad:
        return
    for path, module in copy.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad] if path not in split else []
        gradients = torch.autograd.grad(read.sum(), own, allow_unused=True, retain_graph=True) if own else ()
        if any(gradient is not None and (path not in shared or bool(gradient.any())) for gradient in gradients):
            yield path


class _Borders:
    """The borders of a module under trial.

    Attributes:
        whole: whether the copy with all heads computes.
    """

    def __init__(self) -> None:
        self.whole = True
        self._read: dict[str, Tensor] = {}

    def entered(self, path: str, x: Tensor) -> Tensor:
        """x, detached: its gradient would be summed over the ranks."""
        return x.detach()

    def shared(self, path: str, x: Tensor, features: int) -> Tensor:
        """x with its last features detached: their gradient would be summed over the ranks."""
        return torch.cat([x[..., :-features], x[..., -features:].detach()], -1)

    def gathered(self, path: str, x: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """The features of all ranks; x has this rank's."""
        if self.whole:
            self._read[path] = x.detach()
            return x
        places = torch.cat([torch.arange(p.start, p.stop) for p in pieces])
        return self._read[path].index_copy(-1, places, x)


class TrialWeights:
    """Random numbers from a generator of their own; the same for every copy under one key."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._made: dict[Any, Tensor] = {}

    def drawn(self, key: Any, shape: tuple[int, ...]) -> Tensor:
        """Normal numbers, fp32."""
        if key not in self._made:
            self._made[key] = torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")
        return self._made[key]


class _Column(nn.Module):
    """A stand-in for a column-parallel layer, with all output features or one rank's."""

    def __init__(
        self, weights: TrialWeights, path: str, outputs: int, module: nn.Module, pieces: list[Piece] | None
    ) -> None:
        super().__init__()
        weight, bias = weights.drawn((path, "weight"), (outputs, READ)), weights.drawn((path, "bias"), (outputs,))
        if pieces is not None:
            weight, bias = (torch.cat([each[p.start : p.stop] for p in pieces]) for each in (weight, bias))
        self.weight = nn.Parameter(weight / READ**0.5, requires_grad=False)
        self.bias = None if module.bias is None else nn.Parameter(bias, requires_grad=False)
        self.in_features, self.out_features = READ, len(weight)
        self.entered: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        x = self.entered = getattr(x, "stands_for", x)
        return nn.functional.linear(x.detach()[..., :READ], self.weight[:, : x.shape[-1]], self.bias)


class ByPosition(nn.Module):
    """A stand-in for layers outside of the trial: a function of each position alone, with `features` outputs."""

    def __init__(self, features: int, more: int = 0) -> None:
        """`more`: number of values (None) to return after the output."""
        super().__init__()
        self.out_features, self._more = features, more
        self.weight, self.bias = nn.Parameter(torch.ones(1, device="cpu")), None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """[..., I] to [..., O]."""
        x = first_tensor((args, kwargs))
        made = (x.mean(-1, keepdim=True) * torch.linspace(-1, 1, self.out_features) + x[..., :1]) * self.weight
        return (made, *[None] * self._more) if self._more else made


class _Row(nn.Module):
    """A stand-in for the row-parallel layer: it keeps its input, and returns the same sum every time."""

    def __init__(self, weights: TrialWeights, outputs: int) -> None:
        super().__init__()
        self.out_features, self._weights = outputs, weights
        self.weight, self.bias = nn.Parameter(torch.zeros(1, device="cpu"), requires_grad=False), None
        self.read: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        self.read = x
        return self._weights.drawn("sum", (*x.shape[:-1], self.out_features)).clone()  # may be changed in place


@contextmanager
def apart() -> Iterator[None]:
    """Compute with real tensors on the CPU, outside of all modes; random numbers and warnings of the process stay."""
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def copy_of(
    module: nn.Module,
    replaced: Mapping[str, nn.Module],
    parameter: Callable[[str, str], Tensor],
    path: str = "",
    tables: dict[int, Any] | None = None,
) -> Any:
    """A copy of a module without hooks, in evaluation mode, with other parameters, and ones in its buffers.

    Args:
        replaced: replacements of modules, by path.
        parameter: makes a parameter, from the path of its module and its name.
        tables: if given, also copies the dicts, lists and sets that modules hold and forwards may fill; by identity.
    """
    if path in replaced:
        return replaced[path]
    made: Any = type(module).__new__(type(module))
    fresh = {k: v for k, v in vars(nn.Module()).items() if k not in ("_parameters", "_buffers", "_modules")}
    vars(made).update({**vars(module), **fresh, "training": False})
    if tables is not None:
        held = {k: v for k, v in vars(module).items() if type(v) in (dict, list, set) and k[0] != "_"}
        vars(made).update({k: tables.setdefault(id(v), copy.copy(v)) for k, v in held.items()})
    vars(made).pop("forward", None)  # set by another technique
    if hasattr(module, CUT):
        vars(made)["forward"] = lambda x, *others, **named: x.clone()  # its own would need other ranks
    vars(made)["_parameters"] = {
        name: None if value is None else nn.Parameter(parameter(path, name))
        for name, value in module._parameters.items()
    }
    vars(made)["_buffers"] = {
        name: None if value is None else torch.ones(value.shape, dtype=value.dtype, device="cpu")
        for name, value in module._buffers.items()
    }
    vars(made)["_modules"] = {
        name: None if child is None else copy_of(child, replaced, parameter, f"{path}.{name}".strip("."), tables)
        for name, child in module._modules.items()
    }
    return made


def call(module: nn.Module, x: Tensor, head_size: int, weights: TrialWeights) -> Any:
    """Call a module with an activation; other required arguments are made by their names."""
    given: dict[str, Any] = {}
    for parameter in list(inspect.signature(type(module).forward).parameters.values())[2:]:
        name, needed = parameter.name, parameter.default is inspect.Parameter.empty
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            continue
        if name == "position_embeddings" and head_size:
            shape = (1, x.shape[1], head_size)
            given[name] = tuple(weights.drawn((name, each), shape) for each in ("cos", "sin"))
        elif name in OUTSIDE and (needed or getattr(module, "is_cross_attention", False)):
            given[name] = weights.drawn(name, (x.shape[0], x.shape[1] + 1, x.shape[2]))
        elif needed:
            masks = dict.fromkeys(MASKS, torch.zeros(1, 1, x.shape[1], x.shape[1]))
            known = {**masks, **dict.fromkeys(LIKE_INPUT, x), "position_ids": torch.arange(x.shape[1])[None]}
            given[name] = known.get(name)
    return module(x.clone(), **given)


def taken(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Copies of arguments, which a forward may change."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone()
        if hasattr(leaf, "get_seq_length"):  # a cache, which would have the positions twice
            return None
        return copy.copy(leaf) if isinstance(leaf, (dict, list, set)) else leaf

    made: tuple[Any, Any] = tree_map(one, (args, kwargs))
    return made


def first_tensor(tree: Any) -> Tensor:
    """The first tensor of arguments or of an output."""
    return next(leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def alike(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether two tensors are equal up to rounding."""
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1e-6))


def in_short(error: Exception) -> str:
    """An error's class and first line, shortened."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]
