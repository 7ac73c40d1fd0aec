"""The end of a step: the statistics of mixtures over all data ranks, and what routers learn from them.

Biases of routers without a balance loss move by the load of a whole step, of all microbatches and data ranks
(2408.15664, algorithm 1): all ranks have the same counts, so biases stay the same on all.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import part_of
from zeroshard.errors import RoutingWarning
from zeroshard.moe.exchange.buffers import BUFFERS
from zeroshard.moe.routing.collapse import RoutingWatch
from zeroshard.moe.routing.statistics import LOSSES, Statistics
from zeroshard.traffic import Purpose


class MixtureSteps:
    """The mixtures of the layers on this rank, at the end of each step.

    Args:
        comm: of the ranks that have these layers.
        elsewhere: whether a module runs on other ranks alone.
        together: how many ranks have the same tokens.
    """

    def __init__(self, model: nn.Module, comm: Comm, elsewhere: Callable[[nn.Module], bool], together: int = 1) -> None:
        self._comm, self._together = comm, together
        found = list(_layers(model))
        self.reads = bool(found)
        mine = [layer for layer in found if not elsewhere(layer[0])]
        self._layers = [(statistics, routers) for _, statistics, routers in mine]
        paths = {module: path for path, module in model.named_modules()}
        self._watches = {paths[module]: RoutingWatch(paths[module]) for module, _, _ in mine}
        self._totals_of: dict[str, dict[str, Tensor]] = {}
        self._buffers = [buffers for module, _, _ in mine if (buffers := getattr(module, BUFFERS, None)) is not None]
        every = dict.fromkeys(router for _, routers in self._layers for router in routers)
        routers = [router for router in every if getattr(router, "sums_counts", False)]
        if comm.mesh.ranks > 1 and routers:
            everyone = [list(range(comm.mesh.ranks))]  # their sums come between gathers of weights
            own = Comm(part_of(comm.mesh, everyone, "loads of experts"))
            own.counts = comm.counts
            for router in routers:
                router.summed = _Sum(own, together)

    def before_update(self) -> None:
        """Statistics are for the end of the step."""

    def end_step(self, skipped: bool) -> None:
        """Add up the statistics of all ranks, and move biases unless the step was skipped; a collective call.

        Each `Statistics` has the sums as `last` then, and begins anew.
        """
        if not self._layers:
            return
        totals = self._totals()
        loads: dict[Any, Tensor] = {}  # by router: one that several mixtures share moves once, by the load of all
        for (statistics, routers), total in zip(self._layers, totals, strict=True):
            statistics.last = total
            statistics.clear()
            for router in routers:
                loads[router] = total["load"] + loads.get(router, 0)
        for router, load in () if skipped else loads.items():
            router.update_bias(load)
        for buffers in self._buffers:
            buffers.share()
        self._totals_of = dict(zip(self._watches, totals, strict=True))
        self._warn()

    @property
    def readings(self) -> dict[str, dict[str, Any]]:
        """Loads, dropped choices and entropy of each mixture in the last step, by the path of its experts."""
        return {path: _reading(total) for path, total in self._totals_of.items() if int(total["forwards"])}

    def _warn(self) -> None:
        """Tell of mixtures whose routing collapses, on the rank that begins the stage."""
        for path, total in self._totals_of.items() if self._comm.mesh.rank == 0 else ():
            tokens, dropped = int(total["tokens"]), int(total["dropped"])
            for text in self._watches[path].add(total["load"].cpu(), tokens, dropped):
                warnings.warn(text, RoutingWarning, stacklevel=4)

    def _totals(self) -> list[dict[str, Tensor]]:
        """The sums over the ranks, layer by layer and by name."""
        found = [dict(statistics.named_buffers()) for statistics, _ in self._layers]
        flat = torch.cat([buffer.reshape(-1).double() for buffers in found for buffer in buffers.values()])
        if self._comm.mesh.ranks > 1:
            self._comm.all_reduce(flat, Purpose.CONTROL, "loads of experts").wait()
        flat /= self._together
        values = iter(flat.split([buffer.numel() for buffers in found for buffer in buffers.values()]))
        return [
            {name: next(values).view(buffer.shape).to(buffer.dtype) for name, buffer in buffers.items()}
            for buffers in found
        ]


def _reading(total: Mapping[str, Tensor]) -> dict[str, Any]:
    """Plain values of the sums of one layer."""
    load, choices, tokens = total["load"].tolist(), int(total["choices"]), int(total["tokens"])
    forwards = int(total["forwards"])
    losses = zip(LOSSES, (total["losses"] / forwards).tolist(), strict=True)
    return {
        "load": load,
        "dropped": int(total["dropped"]) / max(1, choices),
        "entropy": float(total["entropy"]) / max(1, tokens),
        "most_by_mean": max(load) * len(load) / max(1, choices),
        "dead": load.count(0),
        "losses": {name: loss for name, loss in losses if loss},
    }


class _Sum:
    """The counts of one forward over all ranks, for losses over the global batch."""

    def __init__(self, comm: Comm, together: int) -> None:
        self._comm, self._together = comm, together

    def __call__(self, counts: Tensor) -> Tensor:
        total = counts.clone()
        if counts.is_meta:
            return total
        self._comm.all_reduce(total, Purpose.COUNT_TOKENS, "loads of a forward").wait()
        return total // self._together


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, Any, list[Any]]]:
    """Each module of experts with statistics, once, these, and the routers of the layers that have it."""
    found: dict[nn.Module, dict[Any, None]] = {}
    for layer in model.modules():
        routers = [child for child in layer.children() if hasattr(child, "update_bias")]
        for module in layer.children():
            if isinstance(getattr(module, "statistics", None), Statistics):
                found.setdefault(module, {}).update(dict.fromkeys(routers[:1]))
    for module, known in found.items():
        yield module, module.statistics, list(known)
