"""Checks of an engine's arguments: model, optimizer and plan, each of the right kind, and an unused optimizer."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from zeroshard.comm.mesh import Mesh
from zeroshard.errors import ModelError, OptimizerError, PlanError
from zeroshard.optim import StateLayout
from zeroshard.optim.algorithms.tensor_optimizer import leading_shape
from zeroshard.optim.slices.spans import SpanOptimizer
from zeroshard.parts.place import Cuts, Split
from zeroshard.plan import Plan
from zeroshard.units.ignored import is_ignored

ORDER = "Engine(model, optimizer, plan) takes an nn.Module, an optimizer and a zs.Plan, in this order"
DEEPSPEED = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "fp16", "bf16"}
CALLED = {  # each argument that is a function, and an example
    "loss": "write for example loss=lambda output, batch: F.mse_loss(output, batch[1])",
    "initialise": "write for example initialise=lambda module: module.reset_parameters()",
}
LONGEST = 60  # characters of a value in a message


def check_arguments(model: Any, optimizer: Any, plan: Any) -> None:
    """Refuse arguments of other kinds, before anything is built from them.

    Raises:
        ModelError, OptimizerError, PlanError: with the argument found, the kind needed, and the way out.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"The model is {_found(model)}. {ORDER}{_place_of(model, 'first')}.")
    if isinstance(optimizer, str):
        raise OptimizerError(
            f"The optimizer is {_found(optimizer)}, and it must be a torch.optim optimizer, or a function of the "
            f"parameters that makes one; write functools.partial(torch.optim.{_class_called(optimizer)}, lr=1e-3)."
        )
    if isinstance(optimizer, (list, tuple)):
        kinds = ", ".join(type(one).__name__ for one in optimizer)
        raise OptimizerError(
            f"The engine was given a {type(optimizer).__name__} of {len(optimizer)} optimizers ({kinds}), and takes "
            f"one. Give one optimizer several parameter groups, each with its own rate: "
            f"AdamW([{{'params': ..., 'lr': ...}}, ...])."
        )
    misplaced = isinstance(optimizer, nn.Module | Plan)
    if misplaced or not (isinstance(optimizer, torch.optim.Optimizer) or callable(optimizer)):
        raise OptimizerError(f"The optimizer is {_found(optimizer)}. {ORDER}{_place_of(optimizer, 'second')}.")
    if plan is not None and not isinstance(plan, Plan):
        raise PlanError(f"The plan is {_found(plan)}, and it must be a zs.Plan; {_plan_meant(plan)}.")


def check_compiling(plan: Plan) -> None:
    """Refuse compiled blocks under a plan that replaces operations inside of them.

    Raises:
        PlanError: with the way out.
    """
    if plan.rng == "exact":
        raise PlanError("rng='exact' replaces random draws one by one, which a graph hides; use rng='fast' to compile.")
    if plan.saving.compress:
        raise PlanError(
            f"activations.compress={plan.saving.compress} replaces saved tensors of single operations, which a "
            f"graph joins; compile without it."
        )


def check_within(model: nn.Module, module: Any) -> None:
    """Refuse an argument of `layers_of` that is no module of the model.

    Raises:
        PlanError: with the way out.
    """
    if isinstance(module, nn.Module) and any(module is each for each in model.modules()):
        return
    found = f"a {type(module).__name__} of elsewhere" if isinstance(module, nn.Module) else repr(module)
    raise PlanError(
        f"layers_of takes a module of the engine's model, and was given {found}. Pass engine.model, or one of its "
        f"modules by engine.model.get_submodule('its.path')."
    )


def check_options(mesh: Any, **functions: Any) -> None:
    """Refuse a mesh of another kind, and functions that cannot be called; each may be None.

    Args:
        functions: by name, the arguments that must be callable.

    Raises:
        PlanError: with the argument found, the kind needed, and the way out.
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        raise PlanError(f"The mesh is {_found(mesh)}, and it must be a mesh of zs.init_mesh(); or leave it out.")
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise PlanError(f"{name} is {_found(value)}, and it must be a function; {CALLED[name]}, or leave it out.")


def _plan_meant(plan: Any) -> str:
    """The way out in the error message for an argument that is no plan."""
    names = {field.name for field in fields(Plan)}
    if isinstance(plan, Mapping) and plan.keys() <= names:
        return f"write zs.Plan({', '.join(f'{key}={value!r}' for key, value in plan.items())})"
    if isinstance(plan, Mapping) and plan.keys() & DEEPSPEED:
        return "DeepSpeed's configurations are read by zs.from_deepspeed(config)"
    if plan == "auto":
        return "write zs.Plan.auto(model, batch, optimizer) to search the fastest that fits"
    if isinstance(plan, torch.optim.Optimizer):
        return "the optimizer is the second argument"
    return "write for example zs.Plan(zero=2), or leave it out"


def _found(value: Any) -> str:
    """A value in a few characters, with its type."""
    kind = type(value).__name__
    if isinstance(value, nn.Module | torch.optim.Optimizer | Plan):
        return f"a {kind}"
    text = repr(value)
    return f"{text if len(text) <= LONGEST else text[:LONGEST] + '...'} ({kind})"


def _place_of(value: Any, place: str) -> str:
    """The end of an error message about swapped arguments; empty for other values."""
    kinds = {"model": nn.Module, "optimizer": torch.optim.Optimizer, "plan": Plan}
    name = next((name for name, kind in kinds.items() if isinstance(value, kind)), None)
    return f"; the {place} argument here is the {name}" if name else ""


def _class_called(text: str) -> str:
    """The torch.optim class of this name in any spelling; AdamW if there is none."""
    known = {name.lower(): name for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    return known.get(text.lower().replace("_", ""), "AdamW")


def refuse_used(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that has taken steps, wraps another one, or has another `step` or states without a parameter.

    Raises:
        OptimizerError: with the way out.
    """
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            raise OptimizerError(
                f"{type(optimizer).__name__} holds a {type(value).__name__} as '{name}', which would go on with the "
                f"model's parameters, where the engine has slices of them. Give the engine that one itself, or write "
                f"both into one class."
            )
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):  # schedulers count calls so
        raise OptimizerError(
            f"The step of this {type(optimizer).__name__} was replaced on the object, and an engine tries the step of "
            f"its class to find what it needs. Write a class whose step does the same."
        )
    for key, state in optimizer.state.items():
        if not isinstance(key, torch.Tensor):
            raise OptimizerError(
                f"{type(optimizer).__name__} keeps a state under {key!r}, which is no parameter, and each rank updates "
                f"its own slices. Keep it as a number in the parameter groups, or by parameter."
            )
        if "momentum_buffer" in state or not bool(torch.as_tensor(state.get("step", 0)) == 0):
            raise OptimizerError(
                f"The {type(optimizer).__name__} has already taken steps; its states belong to whole tensors. Give "
                f"the engine a new "
                "optimizer, and load a zeroshard checkpoint to go on from an earlier run."
            )


def groups_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[nn.Parameter, int]:
    """The optimizer group of every parameter; trainable parameters without a group are frozen, with a warning.

    Raises:
        OptimizerError: it holds parameters that are not in the model.
    """
    groups = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    names = {parameter: name for name, parameter in model.named_parameters()}
    foreign = [p for p in groups if p not in names]
    if foreign:
        raise OptimizerError(
            f"The optimizer holds {len(foreign)} parameters that are not in the model (the first has shape "
            f"{tuple(foreign[0].shape)}). "
            "Make it from this model's parameters()."
        )
    left_out = [p for p in names if p.requires_grad and p not in groups and not is_ignored(p)]
    if left_out:
        warnings.warn(
            f"{len(left_out)} parameters require gradients but are in no optimizer group (the first is "
            f"{names[left_out[0]]!r}); "
            "they are frozen. Put them into the optimizer to train them.",
            stacklevel=5,
        )
        for parameter in left_out:
            parameter.requires_grad_(False)
    return groups


def refuse_split(optimizer: torch.optim.Optimizer, layout: StateLayout, cuts: Cuts) -> None:
    """Refuse an optimizer over whole tensors where a technique has cut a matrix among ranks.

    None of those are matrices that one rank updates for all that hold parts ([Note: joined matrices]); parameters that
    one rank holds whole and others not at all, as experts that are modules; and stacks of experts of which each rank
    holds some, for an optimizer that takes every matrix or vector of them alone.

    Raises:
        PlanError: with the reason why it needs whole tensors.
    """
    if layout.whole is None:
        return
    _refuse_empty(optimizer, layout, [cut for cut in cuts.values() if isinstance(cut, Split) and cut.by_rank])
    stacks = getattr(optimizer, "whole_tensors", False)
    options = {p: group.get("batch_dims") for group in optimizer.param_groups for p in group["params"]}
    split = [
        cut for p, cut in cuts.items()
        if isinstance(cut, Split) and p in options and not cut.by_rank
        and cut.part_shape[cut.dimension] not in (0, cut.shape[cut.dimension])
        and not (stacks and cut.dimension == 0 and leading_shape(torch.Size(cut.shape), options[p]))
    ]  # fmt: skip
    if not split:
        return
    setting = {"tensor": "tensor_parallel", "experts": "expert_parallel"}.get(split[0].axis, split[0].axis)
    others = (
        f"an optimizer that treats every element alone, such as AdamW; or zero=1, 2 or 3 and pipeline_parallel in the "
        f"place of {setting}"
    )
    way_out = f"Use {others}."
    if stacks and split[0].dimension == 0:
        way_out = (
            f"If the first dimension counts experts, give such parameters a group of their own with batch_dims=1, so "
            f"that each expert has statistics of its own. Or use {others}."
        )
    raise PlanError(
        f"{type(optimizer).__name__} and {setting} do not combine: {layout.whole} And the plan splits {len(split)} "
        f"parameters inside of layers over the axis '{split[0].axis}' (the first of shape {split[0].shape}), so that "
        f"no rank has the whole of them. {way_out}"
    )


def _refuse_empty(optimizer: torch.optim.Optimizer, layout: StateLayout, splits: Sequence[Split]) -> None:
    """Refuse a matrix of which some rank has no elements: all ranks that hold parts take part in its update."""
    name = type(optimizer).__name__
    empty = next((cut for cut in splits if not all(cut.by_rank)), None)
    if empty is not None:
        raise PlanError(
            f"{name} and tensor_parallel={len(empty.by_rank)} do not combine here: {layout.whole} And of a parameter "
            f"of shape {empty.shape} that is split over dimension {empty.dimension} some rank has no element, so that "
            f"it could not take part in the update. Use a smaller tensor_parallel, or an optimizer that treats every "
            f"element alone, such as AdamW."
        )


def unjoined(plan: Plan) -> str | None:
    """The reason why a plan takes no uneven numbers of batches; None if it takes them."""
    reasons = (
        (plan.streams, "its stages update before they know the counts of all ranks. Use schedule='1f1b'."),
        (
            plan.experts.divides,
            "tokens of a rank without batches would take places of others' in the experts. Use expert_parallel=1.",
        ),
    )
    return next((reason for holds, reason in reasons if holds), None)


def refuses_unfreezing(plan: Plan, optimizer: SpanOptimizer, ranks: int) -> str | None:
    """The reason why parameters that were frozen when the engine was made cannot be trained later; None if they can."""
    whole, name = optimizer.layout.whole is not None, type(optimizer.optimizer).__name__
    found = (
        (plan.streams, f"schedule={plan.pipeline.schedule!r} keeps several versions of the weights"),
        (plan.overlap_gather, "overlap_gather=True gathers updated weights unit by unit, as they were at the start"),
        (all((plan.offloading.parameters, plan.offloading.disk)), "parameters lie on a disk, laid out at the start"),
        (whole and ranks > 1, f"{name} needs whole tensors, which are dealt out to the {ranks} ranks at the start"),
    )
    return next((reason for holds, reason in found if holds), None)
