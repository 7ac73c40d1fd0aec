"""Trial steps that show whether an optimizer is elementwise, and which states it keeps.

An update on slices is exact if a tensor cut into flat pieces, stepped one after the other, gets the same values; and if
no operation brings data of other elements to an element, which `dependence` watches, for all values.
"""

import inspect
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from zeroshard.errors import OptimizerError
from zeroshard.optim.slices.spans import OneStep
from zeroshard.optim.trial.dependence import Dependence, dependence_of, shaped_alike
from zeroshard.optim.trial.probe_optimizers import StateLayout, probe_of, state_nbytes

SHAPE = torch.Size((6, 4))
LARGE = torch.Size((160, 136))  # above sizes from which some keep rows, columns or blocks (2110.02861: 4,096 elements)
STEPS = 3


def layout_of(optimizer: torch.optim.Optimizer) -> StateLayout:
    """The states of an optimizer, and whether it needs whole tensors.

    The trial steps have values even in a rehearsal.

    Raises:
        OptimizerError: it needs a closure (LBFGS), does not run, or its parameters depend on each other.
    """
    with _disable_current_modes(), _own_numbers():
        return _layout_of(optimizer)


def _own_numbers() -> AbstractContextManager[Any]:
    """Keep the user's random numbers unchanged by trial steps."""
    return torch.random.fork_rng(devices=[])


def _layout_of(optimizer: torch.optim.Optimizer) -> StateLayout:
    try:
        return check_elementwise(optimizer)
    except OptimizerError as error:
        found = [_check_tensors_alone(optimizer, group) for group in optimizer.param_groups]
        if reason := _watched(optimizer).on_parameters:
            raise _depend(optimizer, reason) from None
        whole = str(error).split(" Under slices", 1)[0]
    nbytes = numel = 0
    for group in optimizer.param_groups:
        shapes = Counter(p.shape for p in group["params"])
        nbytes += sum(count * state_nbytes(optimizer, group, shape) for shape, count in shapes.items())
        numel += sum(count * shape.numel() for shape, count in shapes.items())
    return StateLayout(Fraction(nbytes, max(1, numel)), 4, whole, any(found))


def _check_tensors_alone(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Compare steps on two tensors at once with steps on one after the other, as in the engine.

    Returns:
        As `StateLayout.rebinds`.
    """
    name, generator = type(optimizer).__name__, torch.Generator().manual_seed(0)
    starts = [torch.randn(SHAPE, generator=generator) for _ in range(2)]
    gradients = [[torch.randn(SHAPE, generator=generator) * (1 + 9 * n) for n in range(2)] for _ in range(STEPS)]
    ways = (False, False, True)
    try:
        with torch.enable_grad():
            runs = [_run(optimizer, {**group, "lr": 0.01}, starts, gradients, one_by_one=way) for way in ways]
    except OptimizerError:
        raise
    except Exception as error:  # a user's optimizer may raise any kind of error
        raise OptimizerError(
            f"{name} does not run by step() alone ({type(error).__name__}: {error}). {_way_out(optimizer, error)}"
        ) from error
    together, again, alone = (run.values for run in runs)
    if not _close(together, again):
        raise OptimizerError(
            f"{name} gives other results each time, so it draws random numbers. Ranks that update the same parameter "
            f"would draw others, and none those of one process: use an optimizer that draws none."
        )
    if not _close(together, alone):
        raise _depend(optimizer, "it gives other results when it steps over one parameter after the other")
    return runs[0].rebinds


def _way_out(optimizer: torch.optim.Optimizer, error: Exception) -> str:
    """The advice for an optimizer whose trial step has failed."""
    said = f"{error}".lower()
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if "closure" in said or (closure is not None and closure.default is closure.empty):
        return "The engine steps without a closure that evaluates the model again: use an optimizer that needs none."
    if "sparse" in said:
        return "The engine has dense gradients: use an optimizer that takes those."
    return (
        f"The engine tries an optimizer on small tensors {tuple(SHAPE)} and steps over tensors of its own, by one of "
        f"the same class, defaults, groups and settings. Use one that takes tensors of any shape, with what its step "
        f"needs (sizes of heads, names) in its defaults, in its groups, or in self.state of each parameter."
    )


def _watched(optimizer: torch.optim.Optimizer) -> Dependence:
    """The dependences of the updates of an optimizer."""
    try:
        return dependence_of(optimizer)
    except OptimizerError:
        raise
    except Exception as error:  # a user's optimizer may raise any kind of error
        raise OptimizerError(
            f"The steps of {type(optimizer).__name__} cannot be watched ({type(error).__name__}: {error}), so that it "
            f"is not known on which data the update of a parameter depends. {_way_out(optimizer, error)}"
        ) from error


def _depend(optimizer: torch.optim.Optimizer, reason: str) -> OptimizerError:
    return OptimizerError(
        f"The parameters of {type(optimizer).__name__} depend on each other (as by a norm over all of them): {reason}. "
        f"Under slices each rank updates its own: clip with engine.clip_grad_norm or Plan(clip_norm=...), and keep "
        f"counts as numbers of the group or by parameter."
    )


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
    found = _watched(optimizer)
    reason = found.on_parameters or found.on_elements
    if reason is None and found.shapes and not shaped_alike(optimizer):
        reason = "it treats parameters by their shapes"
    if reason is not None:
        raise OptimizerError(f"{type(optimizer).__name__} needs whole tensors: {reason}. {way_out}")
    return max(layouts, key=lambda layout: (layout.bytes_per_element, layout.scalar_bytes))


_TRIED: dict[tuple[type, str], StateLayout] = {}  # of torch's own optimizers, by their options


def _try_group(optimizer: torch.optim.Optimizer, group: dict[str, Any], way_out: str) -> StateLayout:
    group = {**group, "lr": 0.01}  # a scheduler may have set it to 0, which would hide every difference
    if not type(optimizer).__module__.startswith("torch.optim."):
        layout = _try_shape(optimizer, group, SHAPE, way_out)
        _try_shape(optimizer, group, LARGE, way_out)  # none of torch's goes by sizes
        return layout
    options = {**optimizer.defaults, **group, "params": None, "param_names": None}
    key = type(optimizer), repr(sorted(options.items()))
    if key not in _TRIED:
        _TRIED[key] = _try_shape(optimizer, group, SHAPE, way_out)
    return _TRIED[key]


def _try_shape(optimizer: torch.optim.Optimizer, group: dict[str, Any], shape: torch.Size, way_out: str) -> StateLayout:
    name = type(optimizer).__name__
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    gradients = [torch.randn(shape, generator=generator) for _ in range(STEPS)]
    cut = shape.numel() // 3
    try:
        with torch.enable_grad():
            whole = _run(optimizer, group, [start], [[g] for g in gradients])
            pieces = _run(optimizer, group, _cut(start, cut), [_cut(g, cut) for g in gradients], one_by_one=True)
    except Exception as error:  # a user's optimizer may raise any kind of error on flat tensors
        raise OptimizerError(
            f"{name} does not run on flat slices ({type(error).__name__}: {error}). {way_out}"
        ) from error
    if not _close([torch.cat(pieces.values)], [whole.values[0].flatten()]):
        raise OptimizerError(
            f"{name} gives other results on flat slices than on whole tensors, so it needs whole tensors. {way_out}"
        )
    return replace(_layout(name, whole.states, shape, way_out), rebinds=whole.rebinds)


def _close(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(some, others, strict=True))


def try_states(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> list[dict[str, Any]]:
    """The states of a tensor of shape `SHAPE` after each of some steps under the options of `group`.

    Raises:
        OptimizerError: the constructor refuses the options, or a step fails under them.
    """
    kind, generator = type(optimizer), torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(SHAPE, generator=generator))
    try:
        probe = probe_of(optimizer, group, [parameter], over=group)  # constructors check arguments, and no options
        found = []
        with torch.enable_grad(), _own_numbers():
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


@dataclass(frozen=True, slots=True)
class _Run:
    """The result of trial steps: the values of each tensor, the states of the first, and `StateLayout.rebinds`."""

    values: list[torch.Tensor]
    states: dict[str, Any]
    rebinds: bool


def _run(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    starts: list[torch.Tensor],
    gradients: list[list[torch.Tensor]],
    one_by_one: bool = False,
) -> _Run:
    """Step copies of `starts`; with `one_by_one`, `step` is called once per tensor, as the engine does."""
    parameters, rebinds = [torch.nn.Parameter(start.clone()) for start in starts], False
    probe = probe_of(optimizer, group, list(parameters))
    one_step = OneStep(probe)
    for step in gradients:
        rounds = [[n] for n in range(len(parameters))] if one_by_one else [list(range(len(parameters)))]
        for members in rounds:
            given = {n: step[n].clone() for n in members}
            places = [parameter.data_ptr() for parameter in parameters]
            for n in members:
                parameters[n].grad = given[n]
            probe.param_groups[0]["params"] = [parameters[n] for n in members]  # as the engine does
            one_step.call()
            for n in members:
                parameters[n].grad = None
                kept = {leaf.data_ptr() for leaf in tree_leaves(dict(probe.state.get(parameters[n], {})))
                        if isinstance(leaf, torch.Tensor)}  # fmt: skip
                rebinds |= given[n].data_ptr() in kept or parameters[n].data_ptr() != places[n]
        one_step.end()
    states = dict(probe.state.get(parameters[0], {}))
    return _Run([parameter.detach() for parameter in parameters], states, rebinds)


def _layout(name: str, states: dict[str, Any], shape: torch.Size, way_out: str) -> StateLayout:
    per_element, scalars = 0, 0
    for key, value in states.items():
        if not isinstance(value, torch.Tensor):
            continue
        if value.dim() > 0 and value.shape == shape:
            per_element += value.itemsize
        elif value.numel() == 1:
            scalars += value.nbytes
        else:
            raise OptimizerError(
                f"{name} keeps a state '{key}' of shape {tuple(value.shape)} for a tensor of shape {tuple(shape)}. "
                f"{way_out}"
            )
    return StateLayout(per_element, scalars)
