"""The plain loop of a model whose ignored parameters the user trains, and the sums of their gradients over ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from plain_loop import PlainRun
from torch import Tensor, nn

import zeroshard as zs

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def loop_of_two(
    model: Any, own: Sequence[nn.Parameter], optimizers: tuple[MakeOptimizer, MakeOptimizer], clip: float, batches: Any
) -> PlainRun:
    """Train the user's own parameters by the first optimizer, and the others, clipped, by the second."""
    seen = PlainRun()
    mine = {id(p) for p in own}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in mine]
    pairs = zip(optimizers, (list(own), others), strict=True)
    updates = [make(parameters) for make, parameters in pairs if parameters]
    for batch in batches:
        loss: Tensor = model(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(others, clip)
        for optimizer in updates:
            optimizer.step()
            optimizer.zero_grad()
        seen.losses.append(loss.item())
    seen.weights = model.state_dict()
    return seen


def average(mesh: zs.Mesh, parameters: Sequence[nn.Parameter], copies: int) -> None:
    """Sum gradients over all ranks, those of other stages as zeros, and divide by the ranks that make them."""
    for parameter in parameters:
        gradient = torch.zeros(parameter.shape) if parameter.grad is None else parameter.grad
        if mesh.ranks > 1:
            dist.all_reduce(gradient, group=mesh.reductions)
        if parameter.grad is not None:
            parameter.grad /= copies
