"""Draws of techniques whose settings go together: layers split among ranks, and experts shared out among ranks."""

import random
from typing import Any

LAYERS = (("blocks.*.up=column", "blocks.*.down=row"), ("head=whole", "embed=whole"), ("blocks.*.fc=column",))


def draw_split_layers(rng: random.Random, plan: dict[str, Any], other: dict[str, Any], ranks: int) -> int:
    """Draw tensor parallelism in a plan, in the one that goes on, or in both; ranks that fit."""
    stages = [settings.get("pipeline_parallel", 1) for settings in (plan, other)]
    for settings, cut in zip((plan, other), stages, strict=True):
        most = 4 // cut if rng.random() < 0.97 else 4
        _name_blocks(settings)
        if rng.random() < 0.75 and most > 1 and (settings or settings is plan):
            settings["tensor_parallel"] = rng.choice([n for n in (2, 2, 4) if n <= most])
            settings |= {"tensor_parallel.sequence": False} if rng.random() < 0.4 else {}
            if "tensor_parallel.sequence" in settings and rng.random() < 0.6:
                settings["activations.partition"] = True
            settings |= {"tensor_parallel.layers": rng.choice(LAYERS)} if rng.random() < 0.2 else {}
            if "pipeline_parallel.replicas" in settings and rng.random() < 0.9:
                del settings["pipeline_parallel.replicas"]
    least = max(cut * settings.get("tensor_parallel", 1) for settings, cut in zip((plan, other), stages, strict=True))
    fits = least > 1 and rng.random() < 0.97
    return rng.choice([n for n in (2, 4) if n % least == 0] or [4]) if fits else ranks


def draw_experts(rng: random.Random, plan: dict[str, Any], other: dict[str, Any], ranks: int) -> int:
    """Draw expert parallelism in a plan, in the one that goes on, or in both; ranks that fit."""
    if "pipeline_parallel.replicas" not in plan and "pipeline_parallel.replicas" not in other and rng.random() < 0.9:
        widths = [each.get("pipeline_parallel", 1) * each.get("tensor_parallel", 1) for each in (plan, other)]
        ranks = rng.choice([n for n in (2, 4, 4) if all(n % width == 0 for width in widths)] or [ranks])
    for settings in (plan, other):
        _name_blocks(settings)
        together = ranks // settings.get("pipeline_parallel", 1)
        fitting = [n for n in (1, 2, 2, 4) if together and together % n == 0] or [1]
        if rng.random() < 0.8 and (settings or settings is plan):
            settings["expert_parallel"] = rng.choice(fitting) if rng.random() < 0.97 else 3
            settings |= {"expert_parallel.two_level": True} if rng.random() < 0.15 else {}
    return ranks


def _name_blocks(settings: dict[str, Any]) -> None:
    """Let settings name the blocks of these models."""
    for name in ("units", "fp32_modules"):
        if isinstance(settings.get(name), tuple):
            settings[name] = tuple("AttentionBlock" if each == "Block" else each for each in settings[name])
