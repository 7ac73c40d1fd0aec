"""KeptResults that a forward keeps for its recomputation: collectives and whatever else should not run twice.

A technique asks `current()` where it makes such a result. Nothing is kept, and nothing is asked for, outside of a
forward that is to be computed again and of its recomputation.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class KeptResults(Protocol):
    """The results of one forward, in the order in which it makes them."""

    def once(self, make: Callable[[], Tensor], written: Tensor) -> Tensor:
        """What `make` returns: in the forward it is called, in the recomputation that result comes again.

        Args:
            written: what `make` may write into, which no dispatch shows.
        """


_current: list[KeptResults] = []


def current() -> KeptResults | None:
    """The results of the forward under way that is to be computed again, or of its recomputation."""
    return _current[-1] if _current else None


class Using:
    """A context in which `current()` is `results`."""

    __slots__ = ("results",)

    def __init__(self, results: KeptResults) -> None:
        self.results = results

    def __enter__(self) -> None:
        _current.append(self.results)

    def __exit__(self, *_: object) -> None:
        _current.pop()
