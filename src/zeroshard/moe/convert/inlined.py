"""Feed-forward layers without a module: a block computes them with linear layers of its own or of its children.

During the search, a module replaces the first part of each such layer, and identities its other parts. Then it can be
replaced like any other; blocks whose layers stay get their parts back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import TransformerDecoderLayer, TransformerEncoder, TransformerEncoderLayer

from zeroshard.tensor.find.linear import linear_features
from zeroshard.tensor.find.trial import TrialWeights, alike, apart, copy_of

WIDTH, HIDDEN = 4, 6  # features in a trial
SHAPE = 2, 3  # batch and positions in a trial
TOLERANCE = 1e-5
PARTS = "linear1", "activation", "dropout", "linear2"  # of torch's blocks


class InlinedFeedForward(nn.Module):
    """down(dropout(activation(up(x)))), by the parts of a block.

    Args:
        dropout: of hidden features; None for none.
    """

    def __init__(self, up: nn.Module, activation: Any, dropout: nn.Module | None, down: nn.Module) -> None:
        super().__init__()
        self.up, self.activation, self.dropout, self.down = up, activation, dropout, down

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        hidden = self.activation(self.up(x))
        output: Tensor = self.down(hidden if self.dropout is None else self.dropout(hidden))
        return output


@contextmanager
def as_modules(model: nn.Module) -> Iterator[None]:
    """Turn the feed-forward layers of blocks into modules inside; replaced ones stay afterwards."""
    taken: list[tuple[_Slots, list[Any], nn.Module]] = []
    try:
        for module in list(model.modules()):
            found = _of_torch(module) or _of_encoder(module)
            if found is not None:
                slots, made = found
                taken.append((slots, slots.values, made.train(module.training)))
                slots.fill(made)
        yield
    finally:
        replaced = []
        for slots, before, feed_forward in taken:
            if slots.values[0] is feed_forward:
                slots.restore(before)
            else:
                replaced.append(slots.block)
        _leave_fast_paths(model, replaced)


@dataclass(frozen=True, slots=True)
class _Slots:
    """The sites of a feed-forward layer's parts (modules or functions).

    Attributes:
        block: the block that computes the layer.
        places: module and name of each part; the layer itself replaces the first.
    """

    block: nn.Module
    places: tuple[tuple[nn.Module, str], ...]

    @property
    def values(self) -> list[Any]:
        """The present parts."""
        return [getattr(module, name) for module, name in self.places]

    def restore(self, values: list[Any]) -> None:
        """Set the parts; modules keep their order."""
        for (module, name), value in zip(self.places, values, strict=True):
            home: Any = vars(module) if name in vars(module) else module._modules  # as attributes are looked up
            home[name] = value

    def fill(self, feed_forward: nn.Module) -> None:
        """Set a layer as the first part, and identities as the others."""
        others = [nn.Identity() if isinstance(value, nn.Module) else _same for value in self.values[1:]]
        self.restore([feed_forward, *others])


def _same(x: Tensor) -> Tensor:
    return x


def _of_torch(block: nn.Module) -> tuple[_Slots, InlinedFeedForward] | None:
    """The layer of one of torch's own blocks."""
    for kind in (TransformerEncoderLayer, TransformerDecoderLayer):
        same = isinstance(block, kind) and type(block).forward is kind.forward
        if same and type(block)._ff_block is kind._ff_block:  # type: ignore[attr-defined]
            slots = _Slots(block, tuple((block, name) for name in PARTS))
            return slots, InlinedFeedForward(*slots.values)
    return None


def _of_encoder(block: nn.Module) -> tuple[_Slots, InlinedFeedForward] | None:
    """The feed-forward layer of a block that has it in two modules, `intermediate` and `output`, as in BERT."""
    first, last = (getattr(block, name, None) for name in ("intermediate", "output"))
    up, activation, down = (
        getattr(first, "dense", None), getattr(first, "intermediate_act_fn", None), getattr(last, "dense", None)
    )  # fmt: skip
    if not isinstance(first, nn.Module) or not isinstance(last, nn.Module) or activation is None:
        return None
    if linear_features(up) is None or linear_features(down) is None or not _in_two(first, last, activation):  # type: ignore[arg-type]
        return None
    return _Slots(block, ((block, "intermediate"), (last, "dense"))), InlinedFeedForward(up, activation, None, down)  # type: ignore[arg-type]


def _in_two(first: nn.Module, last: nn.Module, activation: Any) -> bool:
    """Whether one module is activation(dense(x)), and the other reads the first of two inputs through `dense` alone."""
    with apart():
        weights = TrialWeights()

        def copied(module: nn.Module, inputs: int, outputs: int, replaced: nn.Module | None = None) -> Any:
            dense: Any = nn.Linear(inputs, outputs)
            dense.weight.copy_(weights.drawn((inputs, "weight"), (outputs, inputs)))
            dense.bias.copy_(weights.drawn((inputs, "bias"), (outputs,)))
            others = {path: nn.Identity() for path, child in module.named_modules() if isinstance(child, nn.LayerNorm)}
            stand_ins = {**others, "dense": replaced or dense}
            return copy_of(module, stand_ins, lambda path, name: weights.drawn((path, name), (1,))), dense

        try:
            x, hidden = weights.drawn("x", (*SHAPE, WIDTH)), weights.drawn("hidden", (*SHAPE, HIDDEN))
            (widen, up), (comes_back, down) = copied(first, WIDTH, HIDDEN), copied(last, HIDDEN, WIDTH)
            rest, _ = copied(last, HIDDEN, WIDTH, nn.Identity())
            first_alike = alike(widen(x), activation(up(x)), TOLERANCE)
            return first_alike and alike(comes_back(hidden, x), rest(down(hidden), x), TOLERANCE)
        except Exception:  # a forward of another form
            return False


def _leave_fast_paths(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Disable the fast paths of torch's encoders, which read weights of replaced blocks."""
    for block in blocks:
        if isinstance(block, TransformerEncoderLayer):
            block.activation_relu_or_gelu = 0
    for encoder in model.modules():
        if isinstance(encoder, TransformerEncoder) and any(layer in blocks for layer in encoder.layers):
            encoder.use_nested_tensor = False
