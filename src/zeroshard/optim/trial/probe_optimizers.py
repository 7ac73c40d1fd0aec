"""Copies of the user's optimizer over scratch tensors, for trial steps, and the sizes of their states.

The constructor gets its settings from the optimizer's defaults and from a group. Other attributes (`self.rule`) are
copied from the optimizer; a constructor with arguments in neither is not called.
"""

import copy
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from types import MethodType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from zeroshard.errors import OptimizerError
from zeroshard.optim.states.whole_states import tensor_bytes

SIDES = (7, 5, 3, 2)  # of a tensor whose states show how they grow
PLAIN = (bool, int, float, str, type(None), torch.dtype)
TORCHS = vars(torch.optim.Optimizer([torch.zeros(())], {})).keys()  # attributes of every optimizer


def probe_of(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    tensors: list[torch.Tensor],
    over: Mapping[str, Any] | None = None,
) -> torch.optim.Optimizer:
    """A copy with the settings of `optimizer`, and a group of some tensors with the options of `group`.

    Args:
        over: replacements of the defaults for the constructor, which checks their ranges.

    Raises:
        OptimizerError: the constructor has unknown arguments and makes states. Other errors are the constructor's.
    """
    return probe_over_groups(optimizer, [(group, tensors)], over)


def probe_over_groups(
    optimizer: torch.optim.Optimizer,
    members: Sequence[tuple[Mapping[str, Any], list[torch.Tensor]]],
    over: Mapping[str, Any] | None = None,
) -> torch.optim.Optimizer:
    """As `probe_of`, with several groups; in training mode, if the optimizer has modes (2405.15682).

    Args:
        members: the options and the tensors of each group.
    """
    kind = type(optimizer)
    accepted = inspect.signature(kind.__init__).parameters
    settings = {k: v for k, v in {**optimizer.defaults, **(over or {})}.items() if k in accepted and k != "params"}
    real = all(_has_value(tensor) for _, tensors in members for tensor in tensors)
    settings = tree_map(_with_value, settings) if real else settings
    groups = []
    for group, tensors in members:
        own = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append({**(tree_map(_with_value, own) if real else own), "params": tensors})
    needed = [
        name for name, each in list(accepted.items())[2:]
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]  # fmt: skip
    hidden = [name for name in list(accepted)[1:2] if "name" in name]  # of pairs of a name and a parameter
    hidden += [name for name in needed if name not in settings]
    if not hidden:
        probe = kind(groups, **settings)
        vars(probe).update((key, value) for key, value in attributes_of(optimizer) if _is_setting(value))
        return _training(probe)
    if optimizer.state:
        raise OptimizerError(
            f"{kind.__name__} makes states in its constructor, which takes {hidden[0]!r}, and that is not among its "
            f"defaults, so that no other can be made for slices. Put it into the defaults that it gives to "
            f"torch.optim.Optimizer, or make the states in the first step."
        )
    probe = kind.__new__(kind)
    torch.optim.Optimizer.__init__(probe, groups, dict(optimizer.defaults))
    known = {id(p): p for each in optimizer.param_groups for p in each["params"]} | {id(optimizer): probe}
    for key, value in attributes_of(optimizer):
        with suppress(TypeError):  # an iterator that the constructor was given has no copies
            vars(probe)[key] = copy.deepcopy(value, dict(known))
    return _training(probe)


def _training(probe: torch.optim.Optimizer) -> torch.optim.Optimizer:
    train = getattr(probe, "train", None)
    if callable(train):
        train()
    return probe


def attributes_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """The user's attributes of the object, except replaced methods (a scheduler wraps some)."""
    kind = type(optimizer)
    yield from ((k, value) for k, value in vars(optimizer).items() if k not in TORCHS and not hasattr(kind, k))


def _is_setting(value: Any) -> bool:
    """Whether a value is a setting; not bound methods of the optimizer, nor tensors, which may be states."""
    return all(
        isinstance(leaf, PLAIN) or (callable(leaf) and not isinstance(leaf, MethodType)) for leaf in tree_leaves(value)
    )


def _has_value(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values; not in a rehearsal."""
    return type(tensor.detach()) is torch.Tensor


def _with_value(option: Any) -> Any:
    """An option of a trial; a tensor without a value gets one."""
    lacking = isinstance(option, torch.Tensor) and not _has_value(option)
    return torch.full(option.shape, 0.01, dtype=option.dtype) if lacking else option


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Bytes of optimizer state: per fp32 element, and in scalars (a step count) per tensor.

    Attributes:
        bytes_per_element: of an elementwise optimizer; else the mean over its parameters.
        scalar_bytes: of one tensor.
        whole: the reason why it needs whole tensors; None if it does not.
        rebinds: whether a step rebinds the parameters' data, or keeps gradients among its states.
    """

    bytes_per_element: int | Fraction
    scalar_bytes: int
    whole: str | None = None
    rebinds: bool = False


def state_nbytes(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], shape: torch.Size, dtype: torch.dtype = torch.float32
) -> int:
    """Bytes of the states with dimensions that an optimizer makes for a parameter of a shape, computed without values.

    An optimizer that reads values runs on a small tensor instead; the sizes of its states are scaled by its sides.
    """
    with _disable_current_modes():
        return _state_nbytes(optimizer, group, shape, dtype)


def _state_nbytes(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], shape: torch.Size, dtype: torch.dtype
) -> int:
    try:
        return tensor_bytes(_stepped(optimizer, group, torch.empty(shape, dtype=dtype, device="meta")))
    except Exception:  # it reads values, which meta tensors refuse with several errors
        sides = dict(zip(SIDES, shape, strict=False))
        small = torch.ones(tuple(sides), dtype=dtype)
        try:
            leaves = tree_leaves(dict(_stepped(optimizer, group, small)))
        except Exception as error:
            raise OptimizerError(
                f"{type(optimizer).__name__} does not run on a parameter of shape {tuple(shape)} "
                f"({type(error).__name__}: {error}). Give such parameters to an optimizer that takes them."
            ) from error
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
        return sum(leaf.itemsize * math.prod(sides.get(side, side) for side in leaf.shape) for leaf in tensors)


class StateSizes:
    """Bytes of the states of whole parameters, computed once for each shape.

    Attributes:
        templates: the initial options of each parameter group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.templates = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        self._known: dict[tuple[int, torch.Size, torch.dtype], int] = {}

    def of(self, group: int, tensor: torch.Tensor) -> int:
        """Bytes for a parameter in a group; for fewer than 32 bits, for its fp32 master weights."""
        return self.of_shape(group, tensor.shape, tensor.dtype)

    def of_shape(self, group: int, shape: torch.Size, dtype: torch.dtype) -> int:
        """Bytes for a parameter of this shape."""
        dtype = torch.promote_types(dtype, torch.float32)
        key = (group, shape, dtype)
        if key not in self._known:
            self._known[key] = state_nbytes(self._optimizer, self.templates[group], shape, dtype)
        return self._known[key]


def _stepped(optimizer: torch.optim.Optimizer, group: dict[str, Any], values: torch.Tensor) -> dict[str, Any]:
    """The states of a parameter after a step."""
    own = {key: value for key, value in group.items() if key != "params"}
    parameter = torch.nn.Parameter(values)
    probe = probe_of(optimizer, own, [parameter])
    parameter.grad = torch.ones_like(values)
    with torch.enable_grad():
        probe.step()
    return dict(probe.state.get(parameter, {}))


def fresh_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], tensor: torch.Tensor) -> dict[str, Any]:
    """The state that the optimizer's constructor makes for a new tensor (Adagrad does), empty for most."""
    if not optimizer.state:
        return {}
    return dict(probe_of(optimizer, group, [tensor]).state.get(tensor, {}))
