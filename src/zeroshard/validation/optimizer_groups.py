"""The groups of the user's optimizer: which parameters it holds, and that it is new."""

import warnings

import torch
from torch import nn

from zeroshard.errors import OptimizerError


def refuse_used(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that has taken steps, holds another one, has another step or states of no parameter.

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
    """The optimizer group of every parameter; trainable ones that are in none are frozen, with a warning.

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
    left_out = [p for p in names if p.requires_grad and p not in groups]
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
