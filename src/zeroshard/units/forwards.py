"""A module's forward as a list of named layers, each around the next, with the module's own forward innermost.

[Note: layers of a forward] A technique that computes in the place of a module, or around it, inserts a layer by name;
`ORDER` says which is around which, whatever the order of insertion. A layer is made from the forward inside of it. All
are composed when the list changes, so a call costs only the work of the layers. A forward that the user has set on the
module is innermost if it was there first; one that is set later is around all layers, and later insertions around it.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

Forward = Callable[..., Any]
Make = Callable[[Forward], Forward]  # a layer, from the forward inside of it

ORDER = {  # outermost first
    "gate": "a stage of a pipeline runs the module, or passes it over",
    "segment": "the module is computed again in the backward",
    "compiled": "a compiled module runs outside of the mode that compresses",
    "exchanged": "tokens travel to the ranks of their experts, and back",
    "loss": "an output layer makes the loss by chunks",
    "gathered": "a norm sees the features of all tensor ranks",
    "divided": "the module computes its tensor rank's part",
    "deferred": "a linear layer leaves its weight's gradient for later",
    "graph": "the operations of a block run as a graph of torch.compile",
}
OWN, USER = "own", "user"  # the forward of the module's class, and one that the user has set on the module
_RANKS = {name: rank for rank, name in enumerate(ORDER)}
_KEY = "forward_layers"  # attribute of a module with layers


@dataclass(slots=True, eq=False)
class ForwardLayer:
    """One layer.

    Attributes:
        make: as given to `insert`.
        forward: the layer around those inside of it, once composed.
    """

    name: str
    make: Make
    forward: Forward | None = None


class _Layers:
    """The layers of one module, outermost first; copies of the module have none.

    Attributes:
        module: weakly, since a shallow copy of the module shares this object.
        user: the forward inside of all layers, if the user has set it.
        before: the layers that this forward was set around.
        inner: the names of that forward and of earlier layers inside of it.
    """

    __slots__ = ("__weakref__", "all", "before", "inner", "module", "user")

    def __init__(self, module: nn.Module) -> None:
        self.module, self.all = weakref.ref(module), list[ForwardLayer]()
        self.user, self.inner, self.before = vars(module).get("forward"), layers_of(module), _known(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def insert(module: nn.Module, name: str, make: Make) -> ForwardLayer:
    """Insert a layer into a module's forward, around the layers of its name and of those behind it in `ORDER`."""
    layers = _current(module)
    if layers is None:
        layers = vars(module)[_KEY] = _Layers(module)
    layer = ForwardLayer(name, make)
    at = next((n for n, other in enumerate(layers.all) if _RANKS[other.name] >= _RANKS[name]), len(layers.all))
    layers.all.insert(at, layer)
    _compose(module, layers)
    return layer


def remove(module: nn.Module, layer: ForwardLayer) -> None:
    """Remove a layer that `insert` returned. Without layers, a module is as it was before the first.

    Raises:
        ValueError: the module has no such layer, or another forward was set around it.
    """
    layers = _current(module)
    if layers is None or layer not in layers.all:
        raise ValueError(f"{type(module).__name__} has no layer {layer.name!r} to remove; it has {layers_of(module)}.")
    layers.all.remove(layer)
    _compose(module, layers)


def remove_all(module: nn.Module) -> None:
    """Remove all layers: the module's forward is its class's, or the user's, as before the first."""
    while (layers := _current(module)) is not None:
        layers.all.clear()
        _compose(module, layers)


def layers_of(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's layers, outermost first, with "own" or "user" for the forwards without one."""
    layers, now = _known(module), vars(module).get("forward")
    if layers is None or now is None:
        return (OWN,) if now is None else (USER,)
    named = (*(layer.name for layer in layers.all), *layers.inner)
    return named if layers.all and now is layers.all[0].forward else (USER, *named)


def layer_of(module: nn.Module, name: str) -> Any:
    """The callable of a module's layer with this name, outermost first; None if there is none."""
    layers = _known(module)
    return next((layer.forward for layer in layers.all if layer.name == name), None) if layers is not None else None


def inside(module: nn.Module, name: str) -> Forward:
    """The forward inside of a layer with this name, or inside of the place for one."""
    layers = _current(module)
    if layers is None:
        own: Forward = module.forward
        return own
    inner = (layer.forward for layer in layers.all if _RANKS[layer.name] > _RANKS[name])
    return next(inner, None) or _innermost(module, layers)


def replaced(module: nn.Module, forward: Forward) -> Forward | None:
    """The forward itself, unless it is that of the module's class; None then."""
    return None if getattr(forward, "__func__", None) is type(module).forward else forward


@contextmanager
def instead(module: nn.Module, forward: Forward) -> Iterator[None]:
    """Give a module another forward inside, without any layer."""
    before = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        _set(module, before)


def _known(module: nn.Module) -> _Layers | None:
    layers = vars(module).get(_KEY)
    return layers if layers is not None and layers.module() is module else None


def _current(module: nn.Module) -> _Layers | None:
    """The layers, if others can be added: no forward was set around them."""
    layers = _known(module)
    return layers if layers is not None and vars(module).get("forward") is layers.all[0].forward else None


def _compose(module: nn.Module, layers: _Layers) -> None:
    forward = _innermost(module, layers)
    for layer in reversed(layers.all):
        layer.forward = forward = layer.make(forward)
    _set(module, forward if layers.all else layers.user)
    if not layers.all and layers.before is None:
        del vars(module)[_KEY]
    elif not layers.all:
        vars(module)[_KEY] = layers.before


def _innermost(module: nn.Module, layers: _Layers) -> Forward:
    if layers.user is not None:
        forward: Forward = layers.user
        return forward
    now = vars(module).pop("forward", None)
    try:
        return module.forward
    finally:
        _set(module, now)


def _set(module: nn.Module, forward: Forward | None) -> None:
    if forward is None:
        vars(module).pop("forward", None)
    else:
        vars(module)["forward"] = forward
