"""Adam's moments and its update (Kingma and Ba, 1412.6980), for optimizers that contain it."""

import math
from typing import Any

import torch
from torch.optim.adamw import adamw

from zeroshard.optim.algorithms.tensor_optimizer import Options, State, put_back, state_dtype
from zeroshard.platform.accelerator import on_cpus


def adam_update(
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    betas: tuple[float, float],
    step: float,
    eps: float,
) -> torch.Tensor:
    """Update both moments by a gradient, and return the bias-corrected m/(sqrt(v) + eps), all of one shape."""
    first.lerp_(gradient, 1.0 - betas[0])
    second.mul_(betas[1]).addcmul_(gradient, gradient, value=1.0 - betas[1])
    return adam_direction(first, second, betas, step, eps)


def adam_direction(
    first: torch.Tensor, second: torch.Tensor, betas: tuple[float, float], step: float, eps: float
) -> torch.Tensor:
    """The bias-corrected m/(sqrt(v) + eps) of both moments."""
    update = second.sqrt().div_(math.sqrt(1.0 - betas[1] ** step)).add_(eps)
    return torch.div(first, update, out=update).div_(1.0 - betas[0] ** step)


def moments(parameter: torch.Tensor) -> State:
    """Adam's states of a parameter before its first step, in fp32."""
    where: dict[str, Any] = {"dtype": state_dtype(parameter), "device": parameter.device}
    return {key: torch.zeros(parameter.shape, **where) for key in ("exp_avg", "exp_avg_sq")}


def adamw_steps(parameters: list[torch.Tensor], states: list[State], group: Options) -> None:
    """One step of AdamW (1711.05101) by torch's own loop, in fp32 for weights in 16 bits.

    Args:
        states: of each parameter: `exp_avg`, `exp_avg_sq` and `step`, which includes this step.
        group: with `lr`, `weight_decay`, `betas` and `eps`.
    """
    on_cpu = on_cpus(parameters[0])
    weights = [p.detach().to(state_dtype(p)) for p in parameters]
    gradients = [p.grad.to(state_dtype(p)) for p in parameters if p.grad is not None]
    adamw(
        weights,
        gradients,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] - 1 for state in states],  # torch's loop adds it again
        fused=on_cpu,
        foreach=not on_cpu,
        amsgrad=False,
        maximize=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=float(group["lr"]),  # torch's loop over lists refuses a tensor
        weight_decay=group["weight_decay"],
        eps=group["eps"],
    )
    for parameter, values in zip(parameters, weights, strict=True):
        put_back(parameter, values)
