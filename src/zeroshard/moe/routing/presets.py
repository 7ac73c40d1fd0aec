"""Routers by name: of the papers, and as in other systems."""

import difflib
import math
from dataclasses import replace
from typing import Any

from zeroshard.errors import PlanError
from zeroshard.moe.routing.balance import Losses
from zeroshard.moe.routing.gating import Gating, Noise, SecondChoice
from zeroshard.moe.routing.hierarchical import HierarchicalRouter
from zeroshard.moe.routing.router import Router
from zeroshard.moe.routing.selection import Capacity, ExpertChoice, GroupLimited

_SHAZEER = Losses(importance=0.1, load=0.1)
_TOP2 = Losses(balance=1e-2, counted="first")
_ALL = Losses(balance=1e-2)

PRESETS: dict[str, Gating] = {
    # 1701.06538, section 2.1 and appendix A and C: noise that starts at softplus(0) around zero weights.
    "shazeer2017": Gating(choices=4, normalise="before", noise=Noise("learned"), init="zero", losses=_SHAZEER),
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
    "switch": Gating(noise=Noise("jitter", 1e-2), capacity=Capacity(train=1.25), losses=_TOP2),
    # 2202.08906: two experts by Mesh TensorFlow's rules, and the z-loss.
    "st_moe": Gating(
        choices=2,
        normalise="before",
        second=SecondChoice(threshold=0.2, holds_place=False),
        capacity=Capacity(train=1.25, formula="mesh", minimum=4),
        losses=Losses(balance=1e-2, counted="first", z=1e-3),
    ),
    # Hugging Face weighs a loss that is 2 where balanced by 0.001; this one is 1 there.
    "mixtral": Gating(choices=2, normalise="before", losses=Losses(balance=2e-3), init="normal", init_scale=0.02),
    # 2412.19437, sections 2.1.2 and 4.2: sigmoid, a bias in place of most of the loss, 4 of 8 groups.
    "deepseek_v3": Gating(
        choices=8,
        score="sigmoid",
        selection=GroupLimited(groups=8, kept=4),
        normalise="before",
        scale=2.5,
        group="sequence",
        losses=Losses(balance=1e-4, counted="scores", scope="group"),
        bias_step=1e-3,
        init="normal",
        init_scale=0.006,
    ),
    # 2202.09368, EC-CF2: two experts of a token on average.
    "expert_choice": Gating(choices=2, selection=ExpertChoice()),
    # What other systems compute in training, for comparisons; losses are 1 where balanced, whatever theirs are.
    "tensor2tensor": Gating(choices=4, normalise="before", noise=Noise("learned", 1e-2), init="zero", losses=_SHAZEER),
    "mesh_top2": Gating(
        choices=2,
        normalise="before",
        second=SecondChoice(threshold=0.2, holds_place=False),
        capacity=Capacity(train=1.25, evaluate=2.0, formula="mesh", minimum=4),
        losses=_TOP2,
    ),
    "deepspeed_top1": Gating(priority="random", capacity=Capacity(1.0, 1.0, minimum=4), losses=_TOP2),
    "deepspeed_top2": Gating(
        choices=2, noise=Noise("gumbel"), normalise="after", capacity=Capacity(1.0, 1.0, minimum=4), losses=_TOP2
    ),
    "deepspeed_topk": Gating(
        choices=2, normalise="after", priority="gate", capacity=Capacity(1.0, 1.0, minimum=4), losses=_ALL
    ),
    "fairscale": Gating(
        choices=2,
        noise=Noise("gumbel"),
        normalise="after",
        capacity=Capacity(1.0, 1.0, "down"),
        losses=_TOP2,
        dtype=None,
    ),
    "tutel": Gating(choices=2, normalise="before", capacity=Capacity(1.0, 1.0, "tutel"), losses=_TOP2, dtype=None),
    "megatron_probs": Gating(
        choices=2, normalise="before", priority="gate", capacity=Capacity(1.0, 1.0), losses=_ALL, dtype=None
    ),
    "megatron_position": Gating(choices=2, normalise="before", capacity=Capacity(1.0, 1.0), losses=_ALL, dtype=None),
    "megablocks": Gating(capacity=Capacity(1.0, 1.0, "down"), losses=_ALL, dtype=None),
    "hf_mixtral": Gating(
        choices=2, normalise="before", losses=Losses(balance=2e-3), init="normal", init_scale=0.02, dtype=None
    ),
    "hf_switch": Gating(
        noise=Noise("jitter", 1e-2),
        capacity=Capacity(64, 64, "constant"),
        group="sequence",
        losses=Losses(balance=1e-3, scope="group", z=1e-3),
        init="normal",
        init_scale=1.0,
    ),
}
TWO_LEVELS = "hierarchical"


def router_of(
    name: str, width: int, experts: int, k: int | None = None, capacity: float | Capacity | None = None, **changes: Any
) -> Router:
    """The router of a name in PRESETS, or of "hierarchical", for two levels (1701.06538, appendix B).

    Args:
        width: the features of a token.
        experts: E.
        k: the experts of a token; None for the preset's own. With two levels the choices of each, 2 by default.
        capacity: its factor in training, or all of its settings; math.inf for no limit, None for the preset's own.
        changes: settings of `Gating` in place of the preset's; with two levels arguments of `HierarchicalRouter`, whose
            groups are by default the divisor of E next to its root.

    Raises:
        PlanError: no such name, or settings that do not combine.
    """
    if name == TWO_LEVELS:
        if capacity not in (None, math.inf):
            raise PlanError(f"capacity is {capacity!r}; a router of two levels has no limit. Leave it out.")
        changes.setdefault("choices", (k or 2, k or 2))
        changes.setdefault("groups", _near_root(experts))
        return HierarchicalRouter(width, experts, **changes)
    if name not in PRESETS:
        known = [*PRESETS, TWO_LEVELS]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Name one of {', '.join(known)}, or pass a Router."
        raise PlanError(f"router={name!r} is no router that is known by name. {hint}")
    gating = PRESETS[name]
    if isinstance(capacity, Capacity):
        changes["capacity"] = capacity
    elif capacity is not None:
        changes["capacity"] = replace(gating.capacity or Capacity(), train=capacity) if capacity != math.inf else None
    if k is not None:
        changes["choices"] = k
    return Router(width, experts, replace(gating, **changes))


def _near_root(experts: int) -> int:
    """The largest divisor of the number that is at most its square root."""
    return next(groups for groups in range(math.isqrt(experts), 0, -1) if experts % groups == 0)
