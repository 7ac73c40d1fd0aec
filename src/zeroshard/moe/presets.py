"""Routers by name: those of the papers, and those of other systems as these compute."""

import difflib
import math
from dataclasses import replace
from typing import Any

from zeroshard.errors import PlanError
from zeroshard.moe.balance import Losses
from zeroshard.moe.capacity import Capacity
from zeroshard.moe.gating import Gating, SecondChoice
from zeroshard.moe.noise import Noise
from zeroshard.moe.router import Router

PRESETS: dict[str, Gating] = {
    # Algorithm 1 of 2006.16668: gates normalised before drops, first choices before second, C = 2S/E for each group.
    "gshard": Gating(
        choices=2,
        normalise="before",
        second=SecondChoice(threshold=0.5),
        capacity=Capacity(train=1.0),
        losses=Losses(balance=1e-2, counted="first", scope="group"),
        init_scale=1.0,
    ),
    # 2101.03961: the raw probability of one expert, fp32, input jitter, alpha = 1e-2, s = 0.1.
    "switch": Gating(
        noise=Noise("jitter", 1e-2),
        capacity=Capacity(train=1.25),
        losses=Losses(balance=1e-2, counted="first"),
    ),
    # Hugging Face weighs a loss that is 2 where balanced by 0.001; this one is 1 there.
    "mixtral": Gating(choices=2, normalise="before", losses=Losses(balance=2e-3), init="normal", init_scale=0.02),
}


def router_of(
    name: str, width: int, experts: int, k: int | None = None, capacity: float | Capacity | None = None, **changes: Any
) -> Router:
    """The router of a name in PRESETS.

    Args:
        width: the features of a token.
        experts: E.
        k: the experts of a token; None for the preset's own.
        capacity: its factor in training, or all of its settings; math.inf for no limit, None for the preset's own.
        changes: settings of `Gating` in place of the preset's.

    Raises:
        PlanError: no such name, or settings that do not combine.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Name one of {', '.join(PRESETS)}, or pass a Router."
        raise PlanError(f"router={name!r} is no router that is known by name. {hint}")
    gating = PRESETS[name]
    if isinstance(capacity, Capacity):
        changes["capacity"] = capacity
    elif capacity is not None:
        changes["capacity"] = replace(gating.capacity or Capacity(), train=capacity) if capacity != math.inf else None
    if k is not None:
        changes["choices"] = k
    return Router(width, experts, replace(gating, **changes))
