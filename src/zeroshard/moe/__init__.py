"""Mixtures of experts: a router sends each token to a few experts, which may lie on other ranks.

Shazeer et al. (1701.06538), GShard (2006.16668), Switch (2101.03961). Read `routing`, whose record
all share; then `layer`, `experts`, `exchange` (between ranks) and `convert` (of dense models).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeroshard.moe.convert.replace import Replacement, Upcycling, replace_ffn
    from zeroshard.moe.experts.experts import ExpertModules, Experts
    from zeroshard.moe.layer import SWIGLU, FeedForward, MoE, SharedExpert
    from zeroshard.moe.routing.balance import Losses
    from zeroshard.moe.routing.gating import Gating, Noise, SecondChoice
    from zeroshard.moe.routing.hierarchical import HierarchicalRouter
    from zeroshard.moe.routing.presets import router_of
    from zeroshard.moe.routing.record import Routing
    from zeroshard.moe.routing.router import Router
    from zeroshard.moe.routing.selection import Capacity, ExpertChoice, GroupLimited
    from zeroshard.moe.routing.statistics import Statistics
else:
    # loaded on first use, so that plans can name their policy without torch (PEP 562)
    _MODULES = {
        "ExpertModules": "experts.experts",
        "Experts": "experts.experts",
        "Losses": "routing.balance",
        "Capacity": "routing.selection",
        "Gating": "routing.gating",
        "SecondChoice": "routing.gating",
        "HierarchicalRouter": "routing.hierarchical",
        "SWIGLU": "layer",
        "FeedForward": "layer",
        "MoE": "layer",
        "SharedExpert": "layer",
        "Noise": "routing.gating",
        "router_of": "routing.presets",
        "Replacement": "convert.replace",
        "Upcycling": "convert.replace",
        "replace_ffn": "convert.replace",
        "Router": "routing.router",
        "Routing": "routing.record",
        "ExpertChoice": "routing.selection",
        "GroupLimited": "routing.selection",
        "Statistics": "routing.statistics",
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


def __dir__() -> list[str]:
    """Only the public names."""
    return sorted(__all__)
