"""Feed-forward layers of dense models, found by structure, and equivalent experts.

A narrow copy of each, with random weights, is compared with the activations of experts: it shows the forward's
activation, the order of gate and value, and where features are dropped. No value of the model is read, so that the
model may be on the meta device.

Shapes: D width, F hidden features.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.moe.experts.activations import ACTIVATIONS
from zeroshard.moe.layer import FeedForward
from zeroshard.tensor.find.groups import is_attention, own_groups
from zeroshard.tensor.find.linear import linear_features
from zeroshard.tensor.find.trial import TrialWeights, alike, apart, copy_of, in_short

WIDTH, HIDDEN = 4, 6  # features in a trial
SHAPE = 2, 3  # batch and positions in a trial
RATE = 0.5  # with which a trial drops features
LARGE = 1000.0  # times usual activations: beyond any clamp in a forward
TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A feed-forward layer of a block.

    Attributes:
        path: of its module.
        width: D.
        hidden: F.
        up: paths of the up projections in the module; with two, the gate first, then the value.
        down: path of the down projection.
        feed_forward: the architecture of an equivalent expert; None if there is none.
        reason: why there is none.
        refused: why the layer cannot be replaced; "" if it can.
    """

    path: str
    width: int
    hidden: int
    up: tuple[str, ...]
    down: str
    feed_forward: FeedForward | None
    reason: str = ""
    refused: str = ""


def dense_layers(model: nn.Module) -> Iterator[DenseLayer]:
    """The feed-forward layers of a model, in its order."""
    modules = dict(model.named_modules())
    for group in own_groups(modules, lambda path: True):
        last = linear_features(modules[group.row])
        assert last is not None
        holder = modules[group.around]
        if is_attention(modules[group.holder], group.columns):
            continue
        up, down = (
            tuple(path.removeprefix(f"{group.around}.") for path in paths) for paths in (group.columns, [group.row])
        )
        found = _Found(holder, up, down[0], last.outputs, last.inputs)
        yield found.layer(group.around)


@dataclass(frozen=True, slots=True)
class _Found:
    """Up projections and a down projection in one module."""

    module: nn.Module
    up: tuple[str, ...]
    down: str
    width: int
    hidden: int

    def layer(self, path: str) -> DenseLayer:
        """The feed-forward layer, after a trial."""
        refused = self._refused()
        if refused:
            return DenseLayer(path, self.width, self.hidden, self.up, self.down, None, refused=refused)
        with apart():
            try:
                up, feed_forward, reason = self._tried()
            except Exception as error:
                refused = f"its forward cannot be tried ({in_short(error)})"
                return DenseLayer(path, self.width, self.hidden, self.up, self.down, None, refused=refused)
        return DenseLayer(path, self.width, self.hidden, up or self.up, self.down, feed_forward, reason)

    def _refused(self) -> str:
        """Why the module cannot be replaced, by its structure; "" if it may be."""
        kind, made = type(self.module).__name__, [linear_features(self._at(path)) for path in self.up]
        others = [
            path for path, module in self.module.named_modules()
            if path not in (*self.up, self.down) and any(True for _ in module.parameters(recurse=False))
        ]  # fmt: skip
        if others:
            return f"{kind} is more than a feed-forward layer: it also holds {others[0]}"
        if any(features is None or features.inputs != self.width for features in made):
            return f"its input has other features than its output, which has {self.width}"
        if sum(features.outputs for features in made if features) not in (self.hidden, 2 * self.hidden):
            return "its layers are neither a plain nor a gated feed-forward layer"
        if self.module._forward_hooks or self.module._forward_pre_hooks:
            return "hooks are registered on it, which would be lost"
        return ""

    def _at(self, path: str) -> Any:
        return self.module.get_submodule(path)

    def _tried(self) -> tuple[tuple[str, ...], FeedForward | None, str]:
        """The order of the first layers, and the expert; or why there is none.

        Raises:
            ValueError: the module cannot be an expert.
        """
        weights, gated = TrialWeights(), self._gated
        copy, x = self._copy(weights), weights.drawn("x", (*SHAPE, WIDTH))
        output = copy(x.clone())
        if not isinstance(output, Tensor) or output.shape != x.shape:
            raise ValueError("it does not return one tensor of the shape of its input")
        if not alike(copy(x.reshape(-1, WIDTH)).view(x.shape), output, TOLERANCE):
            raise ValueError("it does not treat every position by itself")
        dropout, reason = self._dropout(weights, x, output)
        bias = {self._at(path).bias is not None for path in (*self.up, self.down)}
        if len(bias) > 1:
            reason = reason or "some of its layers have a bias and some have none"
        tried = [(each, copy(each.clone())) for each in (x, LARGE * x)]
        for up in permutations(self.up) if not reason else ():
            for name, activation in ACTIVATIONS.items():
                if all(alike(self._computed(copy, up, activation, each), made, TOLERANCE) for each, made in tried):
                    return up, FeedForward(activation=name, gated=gated, bias=True in bias, dropout=dropout), ""
        return self.up, None, reason or "its activation is none that stacked experts have"

    @property
    def _gated(self) -> bool:
        features = [linear_features(self._at(path)) for path in self.up]
        return sum(each.outputs for each in features if each is not None) == 2 * self.hidden

    def _copy(self, weights: TrialWeights, dropout: float = 0.0) -> Any:
        """A copy with a few features."""
        replaced: dict[str, nn.Module] = {}
        for path, module in self.module.named_modules():
            if path in self.up:
                made = HIDDEN * (2 if self._gated and len(self.up) == 1 else 1)
                replaced[path] = _drawn(weights, path, WIDTH, made, self._at(path).bias is not None)
            elif path == self.down:
                replaced[path] = _drawn(weights, path, HIDDEN, WIDTH, self._at(path).bias is not None)
            elif isinstance(module, nn.Dropout):
                replaced[path] = nn.Dropout(dropout if module.p else 0.0)
        copy = copy_of(self.module, replaced, lambda path, name: weights.drawn((path, name), (1,)))
        return copy.train(dropout > 0)

    def _dropout(self, weights: TrialWeights, x: Tensor, output: Tensor) -> tuple[float, str]:
        """The dropout probability of hidden features in training; or why experts cannot have the same."""
        rates = {m.p for m in self.module.modules() if isinstance(m, nn.Dropout) and m.p}
        still = self._copy(weights)
        if not alike(still.train()(x.clone()), output, TOLERANCE):
            return 0.0, "its forward does something else in training"
        seen: list[int] = []
        copy = self._copy(weights, RATE)
        for module in copy.modules():
            if isinstance(module, nn.Dropout) and module.p:
                module.register_forward_hook(lambda _module, _args, made: seen.append(made.shape[-1]))
        copy(x.clone())
        if not seen:
            return 0.0, ""
        if seen != [HIDDEN] or len(rates) > 1:
            return 0.0, "it drops features of its output in training"
        return rates.pop(), ""

    def _computed(
        self, copy: nn.Module, up: Sequence[str], activation: Callable[[Tensor], Tensor], x: Tensor
    ) -> Tensor:
        """The output of an expert with the weights of a copy."""
        made = torch.cat([copy.get_submodule(path)(x) for path in up], -1)
        if self._gated:
            gate, value = made.chunk(2, -1)
            hidden = activation(gate) * value
        else:
            hidden = activation(made)
        output: Tensor = copy.get_submodule(self.down)(hidden)
        return output


def _drawn(weights: TrialWeights, path: str, inputs: int, outputs: int, bias: bool) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=bias)
    made.weight.copy_(weights.drawn((path, "weight"), (outputs, inputs)))
    if bias:
        made.bias.copy_(weights.drawn((path, "bias"), (outputs,)))
    return made


def dense_weights(layer: DenseLayer, module: nn.Module) -> Mapping[str, Tensor]:
    """The weights of a layer as `Experts` have them: up [F or 2F, D], down [D, F], and biases where there are any."""
    ups = [_weight_of(module.get_submodule(path)) for path in layer.up]
    down: Any = module.get_submodule(layer.down)
    found = {"up": torch.cat(ups), "down": _weight_of(down)}
    if layer.feed_forward is not None and layer.feed_forward.bias:
        biases: list[Any] = [module.get_submodule(path) for path in layer.up]
        found |= {"up_bias": torch.cat([each.bias.detach() for each in biases]), "down_bias": down.bias.detach()}
    return found


def _weight_of(module: Any) -> Tensor:
    """[O, I]."""
    features = linear_features(module)
    assert features is not None
    weight: Tensor = module.weight.detach()
    return weight if features.dimension == 0 else weight.T
