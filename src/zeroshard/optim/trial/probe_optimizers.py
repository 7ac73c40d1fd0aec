"""Other optimizers of the user's kind and settings, over other tensors, on which trial steps are taken.

A constructor has its settings from the optimizer's defaults and from a group. Those that are not there (`self.rule`)
are taken over from the optimizer; where the constructor cannot do without them, it is not called.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import MethodType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from zeroshard.errors import OptimizerError

PLAIN = (bool, int, float, str, type(None), torch.dtype)
TORCHS = vars(torch.optim.Optimizer([torch.zeros(())], {})).keys()  # attributes of every optimizer


def twin_of(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    tensors: list[torch.Tensor],
    over: Mapping[str, Any] | None = None,
) -> torch.optim.Optimizer:
    """One with the settings of `optimizer`, and a group of some tensors with the options of `group`.

    Args:
        over: what the constructor gets in the place of the defaults, whose ranges it checks.

    Raises:
        OptimizerError: the constructor needs what the optimizer does not show, and makes states. Other errors are its.
    """
    return twin_over(optimizer, [(group, tensors)], over)


def twin_over(
    optimizer: torch.optim.Optimizer,
    members: Sequence[tuple[Mapping[str, Any], list[torch.Tensor]]],
    over: Mapping[str, Any] | None = None,
) -> torch.optim.Optimizer:
    """As `twin_of`, with several groups; in training mode, where the optimizer has modes (2405.15682).

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
        twin = kind(groups, **settings)
        vars(twin).update((key, value) for key, value in attributes_of(optimizer) if _is_setting(value))
        return _training(twin)
    if optimizer.state:
        raise OptimizerError(
            f"{kind.__name__} makes states in its constructor, which takes {hidden[0]!r}, and that is not among its "
            f"defaults, so that no other can be made for slices. Put it into the defaults that it gives to "
            f"torch.optim.Optimizer, or make the states in the first step."
        )
    twin = kind.__new__(kind)
    torch.optim.Optimizer.__init__(twin, groups, dict(optimizer.defaults))
    known = {id(p): p for each in optimizer.param_groups for p in each["params"]} | {id(optimizer): twin}
    for key, value in attributes_of(optimizer):
        with suppress(TypeError):  # an iterator that the constructor was given has no copies
            vars(twin)[key] = copy.deepcopy(value, dict(known))
    return _training(twin)


def _training(twin: torch.optim.Optimizer) -> torch.optim.Optimizer:
    train = getattr(twin, "train", None)
    if callable(train):
        train()
    return twin


def attributes_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """The user's attributes of the object; one in the place of a method (a scheduler wraps some) is none of these."""
    kind = type(optimizer)
    yield from ((k, value) for k, value in vars(optimizer).items() if k not in TORCHS and not hasattr(kind, k))


def _is_setting(value: Any) -> bool:
    """Whether a value is one of a setting; methods of the optimizer are bound to it, and tensors may be states."""
    return all(
        isinstance(leaf, PLAIN) or (callable(leaf) and not isinstance(leaf, MethodType)) for leaf in tree_leaves(value)
    )


def _has_value(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values, which those of a rehearsal do not."""
    return type(tensor.detach()) is torch.Tensor


def _with_value(option: Any) -> Any:
    """An option of a trial; a tensor without a value gets one."""
    lacking = isinstance(option, torch.Tensor) and not _has_value(option)
    return torch.full(option.shape, 0.01, dtype=option.dtype) if lacking else option
