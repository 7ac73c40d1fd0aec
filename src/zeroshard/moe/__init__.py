"""Mixtures of experts: a router sends each token to a few experts, which may lie on other ranks.

Shazeer et al. (1701.06538), GShard (2006.16668), Switch (2101.03961). Read `routing`, the record that all share; then
`router`, `layer`, `experts` and `technique`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeroshard.moe.experts import ExpertModules, Experts
    from zeroshard.moe.layer import SWIGLU, FeedForward, MoE, SharedExpert
    from zeroshard.moe.routing import Routing
    from zeroshard.moe.statistics import Statistics
else:
    # loaded on first use, so that plans can name their policy without torch (PEP 562)
    _MODULES = {
        "ExpertModules": "experts",
        "Experts": "experts",
        "SWIGLU": "layer",
        "FeedForward": "layer",
        "MoE": "layer",
        "SharedExpert": "layer",
        "Routing": "routing",
        "Statistics": "statistics",
    }

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, getattr(import_module(f"{__name__}.{_MODULES[name]}"), name))


__all__ = ["SWIGLU", "ExpertModules", "Experts", "FeedForward", "MoE", "Routing", "SharedExpert", "Statistics"]
