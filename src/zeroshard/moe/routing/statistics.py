"""Statistics of the routings of one layer, and the check that recomputed forwards route as their forwards did.

They count forwards in training. Forwards inside a backward are recomputations (torch.utils.checkpoint, both kinds) and
not counted; a pipeline that recomputes puts buffers back by itself. Before anything is sent, a recomputation compares
its choices with those of the forwards: rows that differ would be an error of shapes at best, and a hang where ranks
exchange them.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zeroshard.errors import ModelError
from zeroshard.moe.routing.record import Routing

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
        known = self._fingerprints
        if type(fingerprint) is not Tensor:  # without values, in a rehearsal
            return
        if not known or bool((torch.stack(list(known)) == fingerprint).all(-1).any()):
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
