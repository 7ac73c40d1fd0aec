"""The arguments of an engine: a model, an optimizer and a plan, each of the right kind and in this order."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from zeroshard.comm.mesh import Mesh
from zeroshard.errors import ModelError, OptimizerError, PlanError
from zeroshard.plan import Plan

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
    """The way out for an argument that is no plan."""
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
    """The end of a message about an argument in the place of another; empty for other values."""
    kinds = {"model": nn.Module, "optimizer": torch.optim.Optimizer, "plan": Plan}
    name = next((name for name, kind in kinds.items() if isinstance(value, kind)), None)
    return f"; the {place} argument here is the {name}" if name else ""


def _class_called(text: str) -> str:
    """The class of torch.optim with a name in any spelling; AdamW if there is none."""
    known = {name.lower(): name for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    return known.get(text.lower().replace("_", ""), "AdamW")
