"""The optimizers of the main job."""

from typing import Any

import torch
from torch import nn

from zeroshard.train.config import TrainConfig


def make_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that the options ask for, over a model's parameters."""
    groups = decay_groups(model, config.weight_decay)
    match config.optimizer:
        case "adamw":
            fused = not config.plan.offloading.optimizer  # the host's Adam rounds like the unfused one
            return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, config.beta2), fused=fused)
        case "sgd":
            return torch.optim.SGD(groups, lr=config.learning_rate, momentum=0.9)
        case "adagrad":
            return torch.optim.Adagrad(groups, lr=config.learning_rate)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: matrices, which decay, and norms, biases and other vectors, which do not."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trainable if p.dim() >= 2], [p for p in trainable if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
