"""Gates around modules' forwards: a chain decides whether each runs, and which tensor is its activation."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves, tree_unflatten

from zeroshard.errors import ModelError
from zeroshard.units.forwards import insert, remove

Enter = Callable[["Gate", tuple[Any, ...], dict[str, Any]], Any]


class Gate:
    """The outermost layer of a module's forward ([Note: layers of a forward]).

    Args:
        enter: returns the module's output for its caller.
        path: the module's name in the model.

    Attributes:
        inner: the forward inside of the gate.
        learned: whether its output depends on parameters, its own or earlier ones.
        overwritten: whether a frame writes into its output.
        takes: of a block, the index of the activation among the leaves of its arguments.
        returns: of the last block, the index of the activation among the leaves of its output.
    """

    def __init__(self, enter: Enter, path: str, module: nn.Module) -> None:
        self._enter, self.path, self.module = enter, path, module
        self.learned = next(module.parameters(), None) is not None
        self.overwritten = False
        self.takes = self.returns = 0
        self.inner: Callable[..., Any] = module.forward
        self._layer = insert(module, "gate", self._around)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._enter(self, args, kwargs)

    def remove(self) -> None:
        """Remove this gate from the module."""
        remove(self.module, self._layer)

    def _around(self, inner: Callable[..., Any]) -> "Gate":
        self.inner = inner
        return self


def open_up(tree: Any, gate: Gate, given: Any = ()) -> None:
    """Register dataclasses in an output with torch's pytrees, which treat each as one value.

    Args:
        given: the module's arguments, which it may return unchanged.

    Raises:
        ModelError: an object of another class has tensors inside.
    """
    for leaf in tree_leaves(tree):
        if (is_dataclass(leaf) and not isinstance(leaf, type)) or isinstance(leaf, SimpleNamespace):
            register_pytree_node(type(leaf), _names_and_values, _from_values)
            return open_up(tree, gate, given)
        inside = [] if isinstance(leaf, (Tensor, nn.Module, type)) else list(getattr(leaf, "__dict__", {}).values())
        if any(isinstance(value, Tensor) for value in inside) and not any(
            leaf is other for other in tree_leaves(given)
        ):
            raise ModelError(
                f"{gate.path!r} returns a {type(leaf).__name__} with tensors inside, which other stages cannot have; "
                f"let it return a tuple, a dict or a dataclass of them, or use pipeline_parallel=1."
            )
    return None


def _names_and_values(instance: Any) -> tuple[list[Any], Any]:
    names = [each.name for each in fields(instance)] if is_dataclass(instance) else list(vars(instance))
    return [getattr(instance, name) for name in names], (type(instance), names)


def _from_values(values: Any, context: Any) -> Any:
    made, names = context
    instance = object.__new__(made)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(instance, name, value)
    return instance


def place_of_activation(tree: Any) -> int:
    """The index of the activation's leaf: the first that requires a gradient, else the first floating-point tensor."""
    leaves = tree_leaves(tree)
    carriers = [n for n, leaf in enumerate(leaves) if _carries(leaf)]
    return next((n for n in carriers if leaves[n].requires_grad), carriers[0] if carriers else len(leaves))


def activation_at(tree: Any, place: int, gate: Gate) -> Tensor:
    """The leaf that is sent from stage to stage.

    Raises:
        ModelError: it cannot carry a gradient.
    """
    leaves = [tree] if isinstance(tree, Tensor) else _first_argument(tree, place) or tree_leaves(tree)
    if place < len(leaves) and _carries(leaves[place]):
        hidden: Tensor = leaves[place]
        return hidden
    raise ModelError(
        f"The block {gate.path!r} takes or returns no floating-point tensor to hand on to the next "
        f"stage; name other blocks with units=(...)."
    )


def with_activation(tree: Any, place: int, hidden: Tensor) -> Any:
    """The same arguments, or output, with another activation."""
    if isinstance(tree, Tensor):
        return hidden
    if _first_argument(tree, place):
        args, kwargs = tree
        return (hidden, *args[1:]), kwargs
    leaves, spec = tree_flatten(tree)
    leaves[place] = hidden
    return tree_unflatten(leaves, spec)


def _first_argument(tree: Any, place: int) -> tuple[Tensor, ...]:
    """The activation, if it is the first argument of a call (args, kwargs), as of most blocks: pytrees are slow.

    A tuple of one; empty for any other place.
    """
    plain = not place and type(tree) is tuple and len(tree) == 2 and type(tree[0]) is tuple and type(tree[1]) is dict
    return tree[0][:1] if plain and tree[0] and isinstance(tree[0][0], Tensor) else ()


def _carries(leaf: Any) -> bool:
    """Whether a value can be sent from stage to stage, and its gradient back."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
