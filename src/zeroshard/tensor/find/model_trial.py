"""Trials of a small model: it runs whole and as each rank would, and outputs and gradients are compared.

[Note: ranks one after the other] A trial of one module does not see the tensors that layers share beside the residual
stream: keys and values that several layers read, biases made once for all heads. So the small model
([Note: models in small]) is run and differentiated whole, and then once for each rank. Ranks need not run at once: the
sum of a row-parallel layer and the gradient of a column-parallel layer's input are read from the run of the whole
model, and each rank's own share is kept. If the shares of all ranks add up to these sums, and each rank has the
outputs and gradients of the whole model, the split is right.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.parts.place import Piece
from zeroshard.tensor.find.found import AttentionSizes, FoundLayer, FoundLayers, Style, pieces_of
from zeroshard.tensor.find.linear import linear_features
from zeroshard.tensor.find.small_run import CannotRun, NarrowLinear, SmallModel, likeness, tensors
from zeroshard.tensor.find.trial import TrialWeights, alike, apart
from zeroshard.tensor.split.experts import cut_experts, fit_experts
from zeroshard.tensor.split.heads import cut_heads, fit_attention, fit_layer

TOLERANCE = 1e-3  # relative, as of the trials of modules
ROUNDING = 1e-2  # of the largest gradient
Key = tuple[str, int]


def equal(a: Tensor, b: Tensor, largest: float) -> bool:
    """Whether gradients are equal up to rounding of the `largest` gradient: some are zero but for it (key biases)."""
    scale = max(float(b.abs().max()) if b.numel() else 0.0, ROUNDING * largest)
    return a.shape == b.shape and (not a.numel() or float((a - b).abs().max()) <= TOLERANCE * scale)


@dataclass
class Tape:
    """Sums at the borders of split layers in a run of the whole model, and the ranks' shares of them.

    Attributes:
        rank: the rank that runs; None for the whole model.
        sums: outputs of row-parallel layers, by path and number of the call.
        gradients: gradients of the inputs of column-parallel layers.
        shares: of both, added up over the ranks that have run.
    """

    rank: int | None = None
    sums: dict[Key, Tensor] = field(default_factory=dict)
    gradients: dict[Key, Tensor] = field(default_factory=dict)
    shares: dict[tuple[str, Key], Tensor] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)

    def begin(self, rank: int | None) -> None:
        """Begin a run of a rank, or of the whole model (None)."""
        self.rank = rank
        self.calls.clear()
        if rank is None:
            self.sums.clear()
            self.gradients.clear()

    def _key(self, path: str) -> Key:
        self.calls[path] += 1
        return path, self.calls[path]

    def entered(self, path: str, x: Tensor) -> Tensor:
        """x; its gradient is summed over the ranks."""
        key = self._key(path)
        if not x.requires_grad:
            return x
        x = x.view_as(x)

        def note(gradient: Tensor) -> Tensor:
            if self.rank is None:
                self.gradients[key] = gradient
                return gradient
            self._add("gradient", key, gradient)
            return self.gradients.get(key, gradient)

        x.register_hook(note)
        return x

    def shared(self, path: str, x: Tensor, features: int) -> Tensor:
        """x; the gradient of its last features is summed over the ranks."""
        key, x = self._key(path), x.view_as(x)

        def note(gradient: Tensor) -> Tensor:
            last = gradient[..., -features:]
            if self.rank is None:
                self.gradients[key] = last
                return gradient
            self._add("gradient", key, last)
            return torch.cat([gradient[..., :-features], self.gradients[key]], -1)

        x.register_hook(note)
        return x

    def summed(self, path: str, y: Tensor) -> Tensor:
        """The sum over the ranks of y."""
        key = self._key(path)
        if self.rank is None:
            self.sums[key] = y.detach().clone()
            return y
        self._add("output", key, y.detach())
        return self.sums[key] + (y - y.detach())

    def gathered(self, path: str, x: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """The features of all ranks; x has this rank's."""
        key = self._key(path)
        if self.rank is None:
            self.sums[key] = x.detach()
            return self.entered(f"{path}#", x)
        whole, at = torch.zeros_like(self.sums[key]), 0
        for piece in pieces:
            whole[..., piece.start : piece.stop] = x.detach()[..., at : at + piece.length]
            at += piece.length
        self._add("output", key, whole)
        places = torch.cat([torch.arange(p.start, p.stop) for p in pieces])
        own = torch.zeros_like(whole).index_copy(-1, places, x - x.detach())
        return self.entered(f"{path}#", self.sums[key] + own)

    def _add(self, kind: str, key: Key, share: Tensor) -> None:
        before = self.shares.get((kind, key))
        self.shares[kind, key] = share.clone() if before is None else before + share

    def differing(self) -> str:
        """The first layer whose shares do not add up; "" if there is none."""
        for key, whole in self.sums.items():
            share = self.shares.get(("output", key))
            if share is None or not alike(share, whole, TOLERANCE):
                return f"the output of {key[0]}"
        least = max((float(each.abs().max()) for each in self.gradients.values()), default=0.0)
        for key, whole in reversed(self.gradients.items()):
            share = self.shares.get(("gradient", key))  # none where each rank makes its heads' part of an argument
            if share is not None and not equal(share, whole, least):
                return f"the gradient of the input of {key[0].strip('#')}"
        return ""


class _Column(NarrowLinear):
    """A column-parallel layer, or a rank's part of it."""

    def __init__(self, weights: TrialWeights, path: str, module: nn.Module, tape: Tape, pieces: list[Piece] | None):
        super().__init__(weights, path, module)
        self._tape, self._path = tape, path
        if pieces is not None:
            parts = [self.made.detach()[:, p.start : p.stop] for p in pieces]
            self.made = nn.Parameter(torch.cat(parts, 1))
            if self.bias is not None:
                self.bias = nn.Parameter(torch.cat([self.bias.detach()[p.start : p.stop] for p in pieces]))
            self.out_features = self.nf = self.made.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O/t]."""
        x = getattr(x, "stands_for", x)
        return super().forward(self._tape.entered(self._path, x))


class _Row(NarrowLinear):
    """A row-parallel layer, or a rank's part of it."""

    def __init__(self, weights: TrialWeights, path: str, module: nn.Module, tape: Tape, pieces: list[Piece] | None):
        super().__init__(weights, path, module)
        self._tape, self._path = tape, path
        if pieces is not None:
            self.read = nn.Parameter(torch.cat([self.read.detach()[p.start : p.stop] for p in pieces]))
            self.in_features = self.nx = len(self.read)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I/t] to [..., O]."""
        y = self._tape.summed(self._path, x @ self.read @ self.made)
        return y if self.bias is None else y + self.bias


class ModelTrial:
    """A trial of a split of a model.

    Args:
        layers: the model's layers, by path; attentions: their sizes.
    """

    def __init__(
        self, model: nn.Module, layers: Mapping[str, FoundLayer], attentions: Sequence[AttentionSizes], ranks: int
    ) -> None:
        self._model, self._layers, self._attentions, self._ranks = model, layers, attentions, ranks
        self._modules = dict(model.named_modules())
        columns = [path for path, layer in layers.items() if layer.style is Style.COLUMN]
        features = linear_features(self._modules[columns[0]]) if columns else None
        self._width = features.inputs if features is not None else 1

    def run(self) -> str:
        """The first difference from the whole model; "" if there is none.

        Raises:
            CannotRun: the small model fails.
        """
        with apart(), torch.enable_grad():
            weights, tape, problem = TrialWeights(), Tape(), None
            for deep in (False, True):
                try:
                    tape = Tape()
                    outputs, gradients = self._compute(weights, tape, None, deep)
                    break
                except Exception as error:
                    problem = problem or error
            else:
                raise CannotRun(f"{type(problem).__name__}: {problem}"[:120])
            sums: dict[Any, Tensor] = {}
            least = max((float(each.abs().max()) for each in gradients.values() if each.numel()), default=0.0)
            for rank in range(self._ranks):
                try:
                    made, own = self._compute(weights, tape, rank, deep)
                except Exception as error:
                    last = next(reversed(tape.calls), "its first layer")
                    return f"its forward behind {last.strip('#')} ({type(error).__name__}: {error})"[:160]
                if len(made) != len(outputs) or not all(
                    alike(a, b, TOLERANCE) for a, b in zip(made, outputs, strict=True)
                ):
                    return "its output"
                for key, gradient in own.items():
                    layer = self._layers.get(key[0])
                    if layer is not None and (
                        layer.partial or layer.style in (Style.COLUMN, Style.HEADS, Style.EXPERTS)
                    ):
                        self._share(sums, key, gradient, gradients[key], rank)
                    elif not equal(gradient, gradients[key], least):
                        return f"the gradient of {'.'.join(key)}"
            problem_at = tape.differing()
            wrong = (key for key, total in sums.items() if not equal(total, gradients[key], least))
            return problem_at or next((f"the gradient of {'.'.join(key)}" for key in wrong), "")

    def _share(self, sums: dict[Any, Tensor], key: tuple[str, str], part: Tensor, whole: Tensor, rank: int) -> None:
        """Add a rank's part of a gradient to the sum, at its features."""
        total = sums.setdefault(key, torch.zeros_like(whole))
        if part.shape == whole.shape:
            total += part
            return
        dim = next(n for n in range(part.dim()) if part.shape[n] != whole.shape[n])
        at = 0
        for piece in pieces_of(self._layers[key[0]].segments_of(key[1]), self._ranks, rank):
            total.narrow(dim, piece.start, piece.length).add_(part.narrow(dim, at, piece.length))
            at += piece.length

    def _compute(
        self, weights: TrialWeights, tape: Tape, rank: int | None, deep: bool
    ) -> tuple[list[Tensor], dict[tuple[str, str], Tensor]]:
        """Outputs, and gradients of parameters except the stand-ins' own factors."""
        stands: dict[str, nn.Module] = {}
        for path, layer in self._layers.items():
            if layer.style in (Style.COLUMN, Style.ROW):
                own = None if rank is None else list(pieces_of(layer.segments, self._ranks, rank))
                kind = _Column if layer.style is Style.COLUMN else _Row
                stands[path] = kind(weights, path, self._modules[path], tape, own)
        small = SmallModel(self._model, weights, stands, deep)
        copied: dict[str, Any] = dict(small.copy.named_modules())
        for path, layer in self._layers.items():
            if path in copied and (rank is None or path not in stands):
                if rank is not None:
                    cut_heads(copied[path], layer, self._ranks, rank)
                fit_layer(copied[path], layer, tape, self._ranks, rank)
            if layer.style is Style.EXPERTS and path in copied and copied[path]._parameters:  # no stand-in
                if rank is not None:
                    cut_experts(copied[path], layer, self._ranks, rank)
                fit_experts(copied[path], layer, tape, 1 if rank is None else self._ranks)
        for attention in self._attentions:
            if attention.name in copied:
                if rank is not None:
                    vars(copied[attention.name]).update(attention.sizes)
                fit_attention(copied[attention.name], attention, tape, self._ranks, rank, None)
        output = small.run(self._width, partial(tape.begin, rank))
        outputs = [y for y in tensors(output) if y.is_floating_point()]
        target = sum((y.float() * weights.drawn(("out", n), tuple(y.shape))).sum() for n, y in enumerate(outputs))
        named = {
            (path, name): parameter
            for path, module in copied.items() for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad and name not in ("read", "made" if not isinstance(module, _Column) else "")
        }  # fmt: skip
        assert isinstance(target, Tensor)
        gradients = torch.autograd.grad(target, list(named.values()), allow_unused=True)
        found = {
            key: torch.zeros_like(parameter) if gradient is None else gradient
            for (key, parameter), gradient in zip(named.items(), gradients, strict=True)
        }
        return [y.detach() for y in outputs], found


KEPT = 32  # verdicts
_verdicts: dict[Any, str] = {}


def differing(model: nn.Module, found: FoundLayers, ranks: int) -> str:
    """The first difference between the split model and the whole one; "" if there is none.

    If the small model fails: the reason if the split needs more than sizes, else "".
    """
    layers = {layer.name: layer for layer in found.layers}
    if not any(layer.style in (Style.COLUMN, Style.ROW, Style.EXPERTS) for layer in layers.values()):
        return ""
    split = tuple((n, e.style, e.segments, e.partial, e.gathers, e.shared, e.cuts) for n, e in layers.items())
    key = (likeness(model), ranks, split, repr(found.attentions))
    if key not in _verdicts:
        while len(_verdicts) >= KEPT:
            del _verdicts[next(iter(_verdicts))]
        try:
            _verdicts[key] = ModelTrial(model, layers, found.attentions, ranks).run()
        except CannotRun as error:
            _verdicts[key] = f"what cannot be tried ({error})" if found.adapted else ""
    return _verdicts[key]
