"""Warnings of a routing that collapses: experts without tokens, one with most of them, or many dropped choices.

Balance is a matter of a layer, so each layer is watched alone, and each kind of trouble is told once.
"""

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

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
        self._told: set[str] = set()

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
            if kind not in self._told:
                self._told.add(kind)
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
