"""Trial steps that show whether an optimizer is elementwise, and which states it keeps.

An update on slices is exact if a tensor cut into flat pieces, stepped one after the other, gets the same values.
"""

import inspect
import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from zeroshard.errors import OptimizerError
from zeroshard.optim.whole_states import tensor_bytes

SHAPE = torch.Size((6, 4))
STEPS = 3
SIDES = (7, 5, 3, 2)  # of a tensor whose states show how they grow


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Bytes of optimizer state: per fp32 element, and in scalars (a step count) per tensor.

    Attributes:
        bytes_per_element: of one that treats each element alone; else the mean over its parameters.
        scalar_bytes: of one tensor.
        whole: the reason why it needs whole tensors; None if it does not.
    """

    bytes_per_element: int | Fraction
    scalar_bytes: int
    whole: str | None = None


def layout_of(optimizer: torch.optim.Optimizer) -> StateLayout:
    """The states of an optimizer, and whether it needs whole tensors.

    The trial steps have values in a rehearsal too, where other tensors have none.

    Raises:
        OptimizerError: it needs a closure (LBFGS), does not run, or its parameters depend on each other.
    """
    with _disable_current_modes():
        return _layout_of(optimizer)


def _layout_of(optimizer: torch.optim.Optimizer) -> StateLayout:
    try:
        return check_elementwise(optimizer)
    except OptimizerError as error:
        for group in optimizer.param_groups:
            _check_tensors_alone(optimizer, group)
        whole = str(error).split(" Under slices", 1)[0]
    nbytes = numel = 0
    for group in optimizer.param_groups:
        shapes = Counter(p.shape for p in group["params"])
        nbytes += sum(count * state_nbytes(optimizer, group, shape) for shape, count in shapes.items())
        numel += sum(count * shape.numel() for shape, count in shapes.items())
    return StateLayout(Fraction(nbytes, max(1, numel)), 4, whole)


def _check_tensors_alone(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Compare steps on two tensors together with steps on one after the other, as the engine takes them."""
    name, generator = type(optimizer).__name__, torch.Generator().manual_seed(0)
    starts = [torch.randn(SHAPE, generator=generator) for _ in range(2)]
    gradients = [[torch.randn(SHAPE, generator=generator) * (1 + 9 * n) for n in range(2)] for _ in range(STEPS)]
    try:
        with torch.enable_grad():
            runs = [_run(optimizer, {**group, "lr": 0.01}, starts, gradients, one_by_one=way) for way in (False, True)]
    except Exception as error:  # a user's optimizer may raise any kind of error
        raise OptimizerError(
            f"{name} does not run by step() alone ({type(error).__name__}: {error}). The engine steps without a "
            f"closure that evaluates the model again, and with dense gradients: use an optimizer that takes those."
        ) from error
    (_, together), (_, alone) = runs
    if not all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(together, alone, strict=True)):
        raise OptimizerError(
            f"{name} gives other results when it steps over one parameter after the other, so its parameters depend on "
            f"each other (a norm or a count over all of them). Under slices each rank updates its own: clip with "
            f"engine.clip_grad_norm or Plan(clip_norm=...), and count steps by parameter."
        )


def state_nbytes(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], shape: torch.Size, dtype: torch.dtype = torch.float32
) -> int:
    """Bytes of the states with dimensions that an optimizer makes for a parameter of a shape, computed without values.

    An optimizer that reads values runs on a small tensor instead, whose states tell how theirs grow with its sides.
    """
    with _disable_current_modes():
        return _state_nbytes(optimizer, group, shape, dtype)


def _state_nbytes(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], shape: torch.Size, dtype: torch.dtype
) -> int:
    try:
        return tensor_bytes(_stepped(optimizer, group, torch.empty(shape, dtype=dtype, device="meta")))
    except Exception:  # it reads values, which a tensor without any refuses in many ways
        sides = dict(zip(SIDES, shape, strict=False))
        small = torch.ones(tuple(sides), dtype=dtype)
        leaves = tree_leaves(dict(_stepped(optimizer, group, small)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
        return sum(leaf.itemsize * math.prod(sides.get(side, side) for side in leaf.shape) for leaf in tensors)


class StateSizes:
    """Bytes of the states of whole parameters, found once for each shape.

    Attributes:
        templates: the options of each parameter group, as they were at first.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.templates = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        self._known: dict[tuple[int, torch.Size, torch.dtype], int] = {}

    def of(self, group: int, tensor: torch.Tensor) -> int:
        """Those of a parameter in a group; of fewer than 32 bits, those of its fp32 master weights."""
        return self.of_shape(group, tensor.shape, tensor.dtype)

    def of_shape(self, group: int, shape: torch.Size, dtype: torch.dtype) -> int:
        """Those of a parameter of this shape."""
        dtype = torch.promote_types(dtype, torch.float32)
        key = (group, shape, dtype)
        if key not in self._known:
            self._known[key] = state_nbytes(self._optimizer, self.templates[group], shape, dtype)
        return self._known[key]


def _stepped(optimizer: torch.optim.Optimizer, group: dict[str, Any], values: torch.Tensor) -> dict[str, Any]:
    """The states of a parameter after a step."""
    own = {key: value for key, value in group.items() if key != "params"}
    parameter = torch.nn.Parameter(values)
    probe = _construct(optimizer, own, [parameter])
    parameter.grad = torch.ones_like(values)
    with torch.enable_grad():
        probe.step()
    return dict(probe.state.get(parameter, {}))


def check_elementwise(optimizer: torch.optim.Optimizer) -> StateLayout:
    """Compare steps of the optimizer on a whole tensor and on pieces of it.

    Raises:
        OptimizerError: it needs whole tensors (Adafactor, Muon, LAMB, ...), a closure (LBFGS), or sparse gradients.
    """
    way_out = (
        "Under slices an optimizer must treat every element alone: use AdamW, Adam, SGD, Adagrad, RMSprop or another "
        "elementwise one from torch.optim."
    )
    if getattr(optimizer, "whole_tensors", False):  # blocks of a large tensor do not show in a trial on a small one
        raise OptimizerError(f"{type(optimizer).__name__} needs whole tensors. {way_out}")
    layouts = [_try_group(optimizer, group, way_out) for group in optimizer.param_groups]
    return max(layouts, key=lambda layout: (layout.bytes_per_element, layout.scalar_bytes))


def _try_group(optimizer: torch.optim.Optimizer, group: dict[str, Any], way_out: str) -> StateLayout:
    name = type(optimizer).__name__
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(SHAPE, generator=generator)
    gradients = [torch.randn(SHAPE, generator=generator) for _ in range(STEPS)]
    group = {**group, "lr": 0.01}  # a scheduler may have set it to 0, which would hide every difference
    cut = SHAPE.numel() // 3
    try:
        with torch.enable_grad():
            whole = _run(optimizer, group, [start], [[g] for g in gradients])[0]
            states = whole.state[whole.param_groups[0]["params"][0]]
            _pieces, parts = _run(
                optimizer, group, _cut(start, cut), [_cut(g, cut) for g in gradients], one_by_one=True
            )
    except Exception as error:  # a user's optimizer may raise any kind of error on flat tensors
        raise OptimizerError(
            f"{name} does not run on flat slices ({type(error).__name__}: {error}). {way_out}"
        ) from error
    together = torch.cat([part.detach() for part in parts])
    reference = whole.param_groups[0]["params"][0].detach().flatten()
    if not torch.allclose(together, reference, rtol=1e-5, atol=1e-7):
        raise OptimizerError(
            f"{name} gives other results on flat slices than on whole tensors, so it needs whole tensors. {way_out}"
        )
    return _layout(name, states, way_out)


def fresh_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], tensor: torch.Tensor) -> dict[str, Any]:
    """The state that the optimizer's constructor makes for a new tensor (Adagrad does), empty for most."""
    if not optimizer.state:
        return {}
    return dict(_construct(optimizer, group, [tensor]).state.get(tensor, {}))


def try_states(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> list[dict[str, Any]]:
    """The states of a tensor of shape `SHAPE` after each of some steps under the options of `group`.

    Raises:
        OptimizerError: the constructor refuses the options, or a step fails under them.
    """
    kind, generator = type(optimizer), torch.Generator().manual_seed(0)
    accepted = inspect.signature(kind.__init__).parameters
    options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    parameter = torch.nn.Parameter(torch.randn(SHAPE, generator=generator))
    try:
        # The constructors of torch.optim check their arguments, not the options of a group.
        settings = {k: v for k, v in {**optimizer.defaults, **options}.items() if k in accepted}
        probe = kind([{**options, "params": [parameter]}], **settings)
        found = []
        with torch.enable_grad():
            for _ in range(STEPS):
                parameter.grad = torch.randn(SHAPE, generator=generator)
                probe.step()
                found.append(dict(probe.state.get(parameter, {})))
    except Exception as error:  # a user's optimizer may raise any kind of error
        raise OptimizerError(f"{kind.__name__} cannot use them ({type(error).__name__}: {error}).") from error
    return found


def _cut(tensor: torch.Tensor, at: int) -> list[torch.Tensor]:
    flat = tensor.flatten()
    return [flat[:at], flat[at:]]


def _construct(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], tensors: list[torch.Tensor]
) -> torch.optim.Optimizer:
    kind = type(optimizer)
    accepted = inspect.signature(kind.__init__).parameters
    settings = {k: v for k, v in optimizer.defaults.items() if k in accepted}
    own = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    if all(_has_value(tensor) for tensor in tensors):
        settings, own = (tree_map(_with_value, options) for options in (settings, own))
    return kind([{**own, "params": tensors}], **settings)


def _has_value(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values, which those of a rehearsal do not."""
    return type(tensor.detach()) is torch.Tensor


def _with_value(option: Any) -> Any:
    """An option of a trial; a tensor without a value gets one."""
    lacking = isinstance(option, torch.Tensor) and not _has_value(option)
    return torch.full(option.shape, 0.01, dtype=option.dtype) if lacking else option


def _run(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    starts: list[torch.Tensor],
    gradients: list[list[torch.Tensor]],
    one_by_one: bool = False,
) -> tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]:
    """Step copies of `starts`; with `one_by_one`, `step` is called once per tensor, as the engine does."""
    parameters = [torch.nn.Parameter(start.clone()) for start in starts]
    probe = _construct(optimizer, group, list(parameters))
    for step in gradients:
        rounds = [[n] for n in range(len(parameters))] if one_by_one else [list(range(len(parameters)))]
        for members in rounds:
            for n in members:
                parameters[n].grad = step[n].clone()
            probe.step()
            for n in members:
                parameters[n].grad = None
    return probe, parameters


def _layout(name: str, states: dict[str, Any], way_out: str) -> StateLayout:
    per_element, scalars = 0, 0
    for key, value in states.items():
        if not isinstance(value, torch.Tensor):
            continue
        if value.dim() > 0 and value.shape == SHAPE:
            per_element += value.itemsize
        elif value.numel() == 1:
            scalars += value.nbytes
        else:
            raise OptimizerError(
                f"{name} keeps a state '{key}' of shape {tuple(value.shape)} for a tensor of shape {tuple(SHAPE)}. "
                f"{way_out}"
            )
    return StateLayout(per_element, scalars)
