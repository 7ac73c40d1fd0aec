"""Hooks that belong to one engine, on modules and on the tensors that modules take and return.

[Note: compiled modules] torch.compile must not trace gathers. The hooks of a unit and of the model are left out of
the graph, which breaks there; those of modules inside a unit are traced to nothing, since the unit is gathered by then.
Where a module is compiled in place, such hooks of its own run around its graph, which does not break.

[Note: transforms] Inside of a transform of `torch.func` (`grad`, `vjp`, `jvp`, `vmap` and their like), tensors are
wrappers without memory of their own, and a plain tensor must not be written. A model called there computes as without
an engine, on weights that are whole already. Weights that are sliced are gathered outside of the transform, which the
hooks of modules leave for that time, under `jvp` and `vmap`: the operations of these are recorded for the backward of
the tensors inside of the wrappers, with hooks of saved tensors. Under `grad` and `vjp` torch runs no such hooks.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._pytree import tree_map

from zeroshard.errors import PlanError


class Hook:
    """A hook that belongs to one engine: in a deep copy of the module it does nothing."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        """Call the function of the hook."""
        return self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_nothing,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing


OUTSIDE = (
    "the engine gathers and waits for weights there, outside of graphs; for fullgraph=True compile the blocks, by "
    "engine.compile(fullgraph=True) or block.compile(fullgraph=True)"
)


class Outside(Hook):
    """A hook that torch.compile leaves out of its graphs ([Note: compiled modules]).

    Attributes:
        skipped: whether the hook is called around the graph of its module now, and so not inside of it.
    """

    __slots__ = ("skipped",)

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__(torch.compiler.disable(call, reason=OUTSIDE))
        self.skipped = False

    def __call__(self, *args: Any) -> Any:
        """Call the function of the hook, unless it is called around the graph."""
        return None if self.skipped else self.call(*args)


def outside(call: Callable[..., Any]) -> Hook:
    """A hook that torch.compile leaves out of its graphs ([Note: compiled modules])."""
    return Outside(call)


def active_compiler() -> Any:
    """The compiler whose graph breaks around the function that asks, of an `outside` hook; None without one.

    The caller of such a function keeps the compiler that is at work, to go on with it.
    """
    compiler = sys._getframe(2).f_locals.get("prior")
    return compiler if callable(compiler) else None


def in_place_of(parameter: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
    """A parameter with other values that replaces `parameter`: of its class, with its attributes and its hooks.

    The hooks are one collection, so a handle of the user removes a hook from both.
    """
    made: nn.Parameter = torch.Tensor._make_subclass(type(parameter), values, parameter.requires_grad)
    own = vars(made).keys()  # of a tensor without values its device
    vars(made).update({name: value for name, value in vars(parameter).items() if name not in own})
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(parameter, name)
        if hooks is not None:
            setattr(made, name, hooks)
    return made


class GradientHooks:
    """The hooks on gradients that parameters have now, for the parameters that replace them.

    Hooks that the user removes are not called any more.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._hooks = [(p._backward_hooks, tuple(p._backward_hooks or ())) for p in parameters]

    def put_on(self, parameters: Sequence[nn.Parameter]) -> None:
        """Register them on as many other parameters, in the same order."""
        for parameter, (hooks, keys) in zip(parameters, self._hooks, strict=True):
            for key in keys:
                parameter.register_hook(partial(_call, hooks, key))


def _call(hooks: Any, key: int, gradient: torch.Tensor) -> torch.Tensor | None:
    changed: torch.Tensor | None = hooks[key](gradient) if key in hooks else None
    return changed


def listen(tree: Any, hook: Callable[[torch.Tensor], None], first: bool = False, besides: Any = ()) -> None:
    """Call `hook` in the backward with the gradients of all tensors in `tree`, or of the first alone.

    Leaves, such as parameters, are skipped: they live on, and would get one more hook in every step. In a transform
    nothing is called.

    Args:
        besides: tensors that are skipped, too.
    """
    if transforming():
        return
    skipped = {id(tensor) for tensor in tensors_in(besides)}
    for tensor in tensors_in(tree):
        if not tensor.is_leaf and id(tensor) not in skipped:
            tensor.register_hook(hook)
            if first:
                return


def place_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage; -1 for tensors without one, such as sparse ones."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else -1


def _nothing(*args: Any) -> None:
    pass


NOT_WALKED = (str, bytes, int, float, type, nn.Module, FunctionType, MethodType, ModuleType)
IN_TRANSFORM = "A transform of torch.func cannot go through this model: "
UNHOOKED = "don't yet support saved tensor hooks"  # of torch's error
OPAQUE = ("must override the setup_context", "doesn't have storage", "Cannot access storage of")  # of others


# Whether a transform of `torch.func` is running ([Note: transforms]).
transforming: Callable[[], bool] = torch._C._are_functorch_transforms_active


# Whether torch runs hooks of saved tensors, which `grad` and `vjp` of `torch.func` turn off.
runs_saved_hooks: Callable[[], bool] = vars(torch._C._autograd)["_saved_tensors_hooks_is_enabled"]


def outside_transforms() -> AbstractContextManager[Any]:
    """Inside, no transform is running, so plain tensors may be written ([Note: transforms])."""
    return temporarily_clear_interpreter_stack() if transforming() else nullcontext()


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor inside of the wrappers of transforms."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def absent_in_transform(unit: str) -> PlanError:
    """The error of a module whose parameters are on other ranks.

    Args:
        unit: of the module.
    """
    return PlanError(
        f"A transform of torch.func that takes gradients (grad, vjp, jacrev or one made of them) calls a module with "
        f"parameters of unit '{unit}', which are sliced (zero=3) and would be gone by its backward. Put `with "
        f"engine.gathered():` around the whole transform, on every rank, use torch.autograd.grad or jvp, or use zero=2."
    )


def explain_transform(error: BaseException) -> None:
    """Add a note to torch's error, if a transform met functions of the engine that it cannot go through."""
    if not isinstance(error, RuntimeError):
        return  # the text of an exception that leaves a stage would be the values of its activation
    if UNHOOKED in str(error):
        error.add_note(
            f"{IN_TRANSFORM}grad, vjp, jacrev or hessian are called in the forward of a model, where torch runs no "
            f"hooks of saved tensors. By these sliced weights (zero=3) and activations that are recomputed, offloaded, "
            f"compressed or counted for device_memory come back in the backward. Use zero=2, without those settings."
        )
    elif transforming() and any(text in str(error) for text in OPAQUE):
        error.add_note(
            f"{IN_TRANSFORM}a function of the engine has no derivative or batched form there. Under tensor_parallel, "
            f"expert_parallel and pipeline_parallel call the transform on a copy of the model that was built anew and "
            f"given engine.state_dict(), or leave these settings out."
        )


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """All tensors in mappings, sequences, sets and attributes of any objects."""
    pending, seen = [tree], set()
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif item is not None and not isinstance(item, NOT_WALKED) and id(item) not in seen:
            seen.add(id(item))
            pending += [value for _, value in _children(item)]


def with_tensors(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`tree` with `change` applied to each tensor: tuples and sets are new objects, all else is changed in place."""
    seen: set[int] = set()

    def walk(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return change(item)
        if item is None or isinstance(item, NOT_WALKED) or id(item) in seen:
            return item
        seen.add(id(item))
        changed = [(key, value, walk(value)) for key, value in _children(item)]
        if isinstance(item, (tuple, Set)):
            values = [new for _, _, new in changed]
            return type(item)(*values) if hasattr(item, "_fields") else type(item)(values)  # type: ignore[call-arg]
        for key, old, new in changed:
            if new is not old:
                _put(item, key, new)
        return item

    return walk(tree)


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """A copy of a tree with `change` applied to each tensor, in dataclasses and mappings too; the original stays.

    Objects without changed tensors are shared with the original. Constructors of dataclasses are not called; their
    fields, and not other attributes, are looked through. Objects of any other class stay as they are.
    """
    if type(tree) is tuple and all(isinstance(item, torch.Tensor) for item in tree):
        return tuple(map(change, tree))  # many times faster than by torch's pytrees
    made: dict[int, Any] = {}  # by the identity of a record, its copy: records may hold one another

    def leaf(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return change(item)
        if isinstance(item, NOT_WALKED):
            return item
        if hasattr(item, "_make"):  # of a class that extends a named tuple, such as PackedSequence
            return item._make([tree_map(leaf, each) for each in item])
        if not (is_dataclass(item) or isinstance(item, MutableMapping)):
            return item
        if id(item) not in made:
            made[id(item)] = twin = copy.copy(item)
            _fill(twin, leaf)
        return made[id(item)]

    return tree_map(leaf, tree)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors to which `map_tensors` applies a change, in its order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, tree)
    return found


def _fill(record: Any, leaf: Callable[[Any], Any]) -> None:
    """Change the members of a copy of a dataclass or mapping where they change."""
    if is_dataclass(record):
        held = {field.name: getattr(record, field.name) for field in fields(record) if hasattr(record, field.name)}
    else:
        held = dict(record)
    for key, value in held.items():
        new = tree_map(leaf, value)
        if new is value:
            continue
        if is_dataclass(record):
            object.__setattr__(record, key, new)  # a frozen one too
        else:
            record[key] = new


def _children(item: Any) -> list[tuple[Any, Any]]:
    """(key, index or attribute name; value) of each member of an object."""
    if isinstance(item, Mapping):
        return list(item.items())
    if isinstance(item, (list, tuple, Set)):
        return list(enumerate(item))
    slots = [name for kind in type(item).__mro__ for name in _names(getattr(kind, "__slots__", ()))]
    held = {name: getattr(item, name) for name in slots if hasattr(item, name)}
    return list((held | getattr(item, "__dict__", {})).items())


def _put(item: Any, key: Any, value: Any) -> None:
    if isinstance(item, (list, MutableMapping)):
        item[key] = value
    elif not isinstance(item, Mapping):
        object.__setattr__(item, key, value)


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
