"""Parameters in whose place a technique puts its parts, before flat buffers are made."""

from collections.abc import Mapping

from torch import nn

from zeroshard.parts.place import Axis, Cuts
from zeroshard.parts.technique import Technique

Replaced = tuple[Cuts, dict[nn.Parameter, nn.Parameter]]


def replaced(model: nn.Module, technique: Technique, axes: Mapping[str, Axis]) -> Replaced:
    """Let a technique cut a model.

    Returns:
        what it says of parameters; and of each that is gone the one that took its place, by name.
    """
    before = dict(model.named_parameters())
    cuts = technique.cut(model, axes)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys(), before.keys() ^ after.keys()
    return cuts, {parameter: after[name] for name, parameter in before.items() if after[name] is not parameter}
