"""Statistics of routings: sums over the forwards of a layer and over all data ranks, and warnings of collapse.

Forwards in training are counted. Those inside a backward are recomputations (torch.utils.checkpoint, both kinds), which
are not; a pipeline that recomputes puts buffers back by itself. Before anything is sent, a recomputation compares its
choices with those of the forwards: rows that differ would be an error of shapes at best, and a hang where ranks
exchange them.

Biases of routers without a balance loss move by the load of a whole step, of all microbatches and data ranks
(2408.15664, algorithm 1): all ranks have the same counts, so biases stay the same on all.
"""

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Comm
from zeroshard.errors import ModelError, RoutingWarning
from zeroshard.moe.exchange.exchange import BUFFERS
from zeroshard.moe.routing.record import Routing
from zeroshard.traffic import Purpose

LOSSES = ("balance", "z", "importance", "load", "other")  # names of penalties that are summed apart
REMEMBERED = 1024  # forwards, more than are under way at once, whose choices a recomputation is compared with


class Statistics(nn.Module):
    """Sums over the forwards in training since the last `clear`; buffers, so that they follow the model.

    Attributes:
        load: [E], int64: choices of each expert, before capacity.
        choices: int64: all of them.
        dropped: int64: those without a place in their expert's capacity.
        tokens: int64.
        entropy: fp32: the sum over tokens of the entropy of their probabilities, in nats.
        losses: fp32, one for each of LOSSES: sums over forwards of the weighted penalties.
        forwards: int64.
        last: those of all ranks in the last step, by name, once an engine has taken one.
    """

    load: Tensor
    choices: Tensor
    dropped: Tensor
    tokens: Tensor
    entropy: Tensor
    losses: Tensor
    forwards: Tensor

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.last: dict[str, Tensor] = {}
        self._fingerprints: deque[Tensor] = deque(maxlen=REMEMBERED)
        self.register_buffer("load", torch.zeros(experts, dtype=torch.int64), persistent=False)
        for name in ("choices", "dropped", "tokens", "forwards"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("entropy", torch.zeros((), dtype=torch.float32), persistent=False)
        self.register_buffer("losses", torch.zeros(len(LOSSES), dtype=torch.float32), persistent=False)

    def reset_parameters(self) -> None:
        """Zeros, for a model that was on the meta device."""
        self.clear()

    @torch.no_grad()
    def clear(self) -> None:
        """Begin new sums."""
        for buffer in self.buffers():
            buffer.zero_()

    @contextmanager
    def watching(self, routing: Routing) -> Iterator[None]:
        """Around the experts' work: compare the routing of a recomputation before it, count that of a forward after it.

        Raises:
            ModelError: a recomputation chose other experts than its forward.
        """
        self.compare(routing)
        yield
        self.add(routing)

    @torch.no_grad()
    def compare(self, routing: Routing) -> None:
        """In a recomputation, compare a routing that is about to be carried out with those of the forwards.

        Raises:
            ModelError: it chose other experts than its forward.
        """
        if self._watches(routing) and _recomputing():
            self._find(_fingerprint(routing))

    @torch.no_grad()
    def add(self, routing: Routing) -> None:
        """Count a routing of a forward in training, once the experts' work is under way, which need not wait for it."""
        if not self._watches(routing) or _recomputing():
            return
        self._fingerprints.append(_fingerprint(routing))
        choices = routing.counts.sum()
        self.load += routing.counts
        self.choices += choices
        if routing.kept is not None:
            self.dropped += (choices - routing.kept.sum()).clamp_(min=0)  # padding may be kept and is not counted
        tokens = len(routing.experts)
        self.tokens += tokens
        self.forwards += 1
        if routing.entropy is not None:
            self.entropy += (routing.entropy * tokens).to(self.entropy.dtype)
        for name, loss in routing.losses.items():
            index = LOSSES.index(name) if name in LOSSES else -1
            self.losses[index] += loss.detach().to(self.losses.dtype)

    def _watches(self, routing: Routing) -> bool:
        return self.training and not routing.experts.is_meta

    def _find(self, fingerprint: Tensor) -> None:
        if type(fingerprint) is not Tensor:  # without values, in a rehearsal
            return
        # A pipeline has run the model where it was made, to find its layers.
        known = [each for each in self._fingerprints if each.device == fingerprint.device]
        if not known or bool((torch.stack(known) == fingerprint).all(-1).any()):
            return
        raise ModelError(
            "A recomputed forward chose other experts than its forward did, so its gradients would belong to other "
            "rows. Random numbers, autocast and the state of the router must be the same in both: keep "
            "torch.utils.checkpoint(preserve_rng_state=True), and change no router between a forward and its backward."
        )


def _recomputing() -> bool:
    return torch._C._current_graph_task_id() != -1


def _fingerprint(routing: Routing) -> Tensor:
    """[2], int64: sums of the choices under two odd weightings by position, modulo 2^64; -1 stands for dropped ones."""
    chosen = routing.experts if routing.kept is None else torch.where(routing.kept, routing.experts, -1)
    flat = chosen.reshape(-1)
    places = torch.arange(1, len(flat) + 1, device=flat.device)
    mixed = (flat + 3) * (places * -7046029254386353131)  # the odd integer next to 2^64 / golden ratio
    return torch.stack([mixed.sum(), (mixed ^ (mixed >> 29)).sum()])


WINDOW = 50  # steps that a judgement is over
MOST = 0.5  # of the tokens, for one expert among at least three times its even share
DROPPED = 0.25  # of the choices
WAYS_OUT = "a larger weight of the balance loss, a lower learning rate, or a router with a bias (deepseek_v3)"


class RoutingWatch:
    """Watches the loads of one layer.

    Args:
        layer: the path of its experts.
    """

    def __init__(self, layer: str) -> None:
        self._layer = layer
        self._loads: deque[Tensor] = deque(maxlen=WINDOW)
        self._sums: deque[tuple[int, int, int]] = deque(maxlen=WINDOW)
        self._warned: set[str] = set()

    def add(self, load: Tensor, tokens: int, dropped: int) -> Iterator[str]:
        """Take in a step; the warnings that it gives rise to.

        Args:
            load: [E], choices of each expert before capacity.
            tokens: routed in the step.
            dropped: choices without a place in their expert's capacity.
        """
        self._loads.append(load)
        self._sums.append((int(load.sum()), tokens, dropped))
        if len(self._loads) < WINDOW:
            return
        total = torch.stack(list(self._loads)).sum(0)
        choices, tokens, dropped = map(sum, zip(*self._sums, strict=True))
        for kind, text in self._judged(total, choices, tokens, dropped):
            if kind not in self._warned:
                self._warned.add(kind)
                yield f"Over the last {WINDOW} steps {text} in {self._layer!r}. What helps: {WAYS_OUT}."

    def _judged(self, load: Tensor, choices: int, tokens: int, dropped: int) -> Iterator[tuple[str, str]]:
        experts, even = len(load), choices / len(load)
        dead = (load == 0).nonzero().flatten().tolist()
        if dead and tokens >= experts:
            names = ", ".join(map(str, dead[:8])) + (f" and {len(dead) - 8} more" if len(dead) > 8 else "")
            yield "dead", f"{len(dead)} of {experts} experts got no token (expert {names})"
        most = int(load.argmax())
        if load[most] >= MOST * tokens and load[most] >= 3 * even:
            yield "most", f"expert {most} got {load[most] / tokens:.0%} of the tokens, and {even / tokens:.1%} is even"
        if dropped > DROPPED * choices:
            yield "dropped", f"{dropped / choices:.0%} of the choices had no place in their expert's capacity"


class MixtureSteps:
    """The mixtures of the layers on this rank, at the end of each step.

    Args:
        comm: of the ranks that have these layers.
        elsewhere: whether a module runs on other ranks alone.
        ranks_per_batch: how many ranks have the same tokens.
    """

    def __init__(
        self, model: nn.Module, comm: Comm, elsewhere: Callable[[nn.Module], bool], ranks_per_batch: int = 1
    ) -> None:
        self._comm, self._ranks_per_batch = comm, ranks_per_batch
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
            own = comm.part(everyone, "loads of experts")
            for router in routers:
                router.summed = _Sum(own, ranks_per_batch)

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
        """Warn of mixtures whose routing collapses, on the first rank of the stage."""
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
        flat /= self._ranks_per_batch
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

    def __init__(self, comm: Comm, ranks_per_batch: int) -> None:
        self._comm, self._ranks_per_batch = comm, ranks_per_batch

    def __call__(self, counts: Tensor) -> Tensor:
        total = counts.clone()
        if counts.is_meta:
            return total
        self._comm.all_reduce(total, Purpose.COUNT_TOKENS, "loads of a forward").wait()
        return total // self._ranks_per_batch


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, Any, list[Any]]]:
    """Each module of experts with statistics, once, these, and the routers of the layers that have it."""
    found: dict[nn.Module, dict[Any, None]] = {}
    for layer in model.modules():
        counted = [child for child in layer.children() if isinstance(getattr(child, "statistics", None), Statistics)]
        routers = [child for child in layer.children() if hasattr(child, "update_bias")] if counted else []
        for module in counted:
            found.setdefault(module, {}).update(dict.fromkeys(routers[:1]))
    for module, known in found.items():
        yield module, module.statistics, list(known)
