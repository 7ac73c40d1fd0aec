"""The optimizers of the main job."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zeroshard import optim
from zeroshard.platform.accelerator import is_accelerator
from zeroshard.train.config import TrainConfig

OTHERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adafactor": optim.Adafactor,
    "adam8bit": optim.Adam8bit,
    "adamw8bit": optim.AdamW8bit,
    "lamb": optim.LAMB,
    "muon": optim.Muon,
    "shampoo": optim.Shampoo,
    "sm3": optim.SM3,
    "soap": optim.SOAP,
}
WITH_BETAS = ("adam8bit", "adamw8bit", "lamb")  # Adam variants; the others have their own decay rates


def make_optimizer(config: TrainConfig, model: nn.Module, device: torch.device | None = None) -> torch.optim.Optimizer:
    """The optimizer that the options ask for, over a model's parameters.

    Args:
        device: of the training; None in the planner, where torch's fused update costs as much as ours.
    """
    rate, betas = config.learning_rate, (0.9, config.beta2)
    groups = decay_groups(model, config.weight_decay)
    match config.optimizer:
        case "adamw":
            on_cpus = device is not None and not is_accelerator(device)
            fused = False if on_cpus else not config.plan.offloading.optimizer  # CPUs have one, in memory and offloaded
            return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=fused)
        case "sgd":
            return torch.optim.SGD(groups, lr=rate, momentum=0.9)
        case "adagrad":
            return torch.optim.Adagrad(groups, lr=rate)
        case "muon":
            groups = [{**group, "betas": betas} for group in _muon_groups(model, config.weight_decay)]
    options = {"betas": betas} if config.optimizer in WITH_BETAS else {}
    return OTHERS[config.optimizer](groups, lr=rate, **options)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: matrices, which decay, and norms, biases and other vectors, which do not."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trainable if p.dim() >= 2], [p for p in trainable if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _muon_groups(model: nn.Module, weight_decay: float) -> Iterator[dict[str, Any]]:
    """The groups of `muon_groups`, without decay of vectors."""
    for group in optim.muon_groups(model):
        members = [parameter for _, parameter in group["params"]]
        for decay, params in (
            (weight_decay, [p for p in members if p.dim() >= 2]),
            (0.0, [p for p in members if p.dim() < 2]),
        ):
            if params:
                yield {**group, "params": params, "weight_decay": decay}
