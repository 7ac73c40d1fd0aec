"""Mixtures of experts: a router sends each token to a few experts, which may lie on other ranks.

Shazeer et al. (1701.06538), GShard (2006.16668), Switch (2101.03961). Read `routing`, the record that all share; then
`router`, `layer`, `experts` and `technique`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeroshard.moe.balance import Losses
    from zeroshard.moe.capacity import Capacity
    from zeroshard.moe.experts import ExpertModules, Experts
    from zeroshard.moe.gating import Gating, SecondChoice
    from zeroshard.moe.hierarchical import HierarchicalRouter
    from zeroshard.moe.layer import SWIGLU, FeedForward, MoE, SharedExpert
    from zeroshard.moe.noise import Noise
    from zeroshard.moe.presets import router_of
    from zeroshard.moe.replace import Replacement, Upcycling, replace_ffn
    from zeroshard.moe.router import Router
    from zeroshard.moe.routing import Routing
    from zeroshard.moe.selection import ExpertChoice, GroupLimited
    from zeroshard.moe.statistics import Statistics
else:
    # loaded on first use, so that plans can name their policy without torch (PEP 562)
    _MODULES = {
        "ExpertModules": "experts",
        "Experts": "experts",
        "Losses": "balance",
        "Capacity": "capacity",
        "Gating": "gating",
        "SecondChoice": "gating",
        "HierarchicalRouter": "hierarchical",
        "SWIGLU": "layer",
        "FeedForward": "layer",
        "MoE": "layer",
        "SharedExpert": "layer",
        "Noise": "noise",
        "router_of": "presets",
        "Replacement": "replace",
        "Upcycling": "replace",
        "replace_ffn": "replace",
        "Router": "router",
        "Routing": "routing",
        "ExpertChoice": "selection",
        "GroupLimited": "selection",
        "Statistics": "statistics",
    }

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, getattr(import_module(f"{__name__}.{_MODULES[name]}"), name))


__all__ = [
    "SWIGLU",
    "Capacity",
    "ExpertChoice",
    "ExpertModules",
    "Experts",
    "FeedForward",
    "Gating",
    "GroupLimited",
    "HierarchicalRouter",
    "Losses",
    "MoE",
    "Noise",
    "Replacement",
    "Router",
    "Routing",
    "SecondChoice",
    "SharedExpert",
    "Statistics",
    "Upcycling",
    "replace_ffn",
    "router_of",
]
