"""Layers: what a chain is made of."""

from dataclasses import dataclass, field

from torch import nn


@dataclass(slots=True, eq=False)
class Layer:
    """One layer of a chain.

    Attributes:
        modules: modules that run in it (a block includes its submodules).
        parameters: its parameters by name; a tied parameter appears in several layers.
    """

    number: int
    name: str
    modules: list[nn.Module] = field(default_factory=list)
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
