"""Passes that a rank left: an error in a forward or its backward, after which the rank went on with another batch.

[Note: left passes] A loop that catches errors (`except Exception: continue`) on one rank alone is a batch ahead of the
others from then on, and each step would sum gradients of unlike batches. So each rank counts the forwards for training
whose outputs never got a gradient, and the backwards that ended in an error; the agreement on a step compares the
counts, in a message that is sent anyway. They are never reset: ranks that leave equally many passes are at the same
batch again, as do all that discard one together. Forwards without gradients do not count, nor those in evaluation mode,
unless the model is trained in it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from zeroshard.comm.mesh import Mesh
from zeroshard.comm.over_budget import announce_over_budget
from zeroshard.errors import BudgetExceeded, CommError

SHOWN = 300  # letters of an error
MOST = 3  # ranks in an error


class Agreeing(Protocol):
    """The method of `Comm` that a comparison calls."""

    def agree_on(self, value: list[str], label: str) -> list[list[str]]:
        """Every rank's value."""


class LeftPasses:
    """The forwards of one engine for training, and their backwards.

    Args:
        caught: the list of the mesh, for the first error since the ranks last agreed.

    Attributes:
        counts: whether passes count; not inside of `join`, where ranks agree on each call.
    """

    def __init__(self, caught: list[str]) -> None:
        self._caught, self.counts = caught, True
        self._left, self._agreed, self._updates = 0, 0, 0
        self._open: dict[int, bool] = {}  # forwards without a gradient since the last update: whether in training mode
        self._latest = 0
        self._evaluated = self._reached = False  # whether backwards come through forwards in evaluation mode; this one

    @property
    def left(self) -> int:
        """How many passes this rank has left so far, in 32 bits."""
        return (self._left + sum(mode or self._evaluated for mode in self._open.values())) % 2**32

    @property
    def latest(self) -> int:
        """The number of the latest forward."""
        return self._latest

    def begin(self, mode: bool, updates: int) -> None:
        """Begin a forward for training.

        Args:
            mode: whether the model is in training mode.
            updates: of the weights so far; an earlier forward has no backward after one.
        """
        if self.counts:
            if updates != self._updates:
                self._close(self.left, updates)
            self._latest += 1
            self._open[self._latest] = mode

    def reach(self, number: int) -> None:
        """Note that the backward under way comes through this forward."""
        if self.counts:
            self._reached = True
            self._evaluated |= not self._open.pop(number, True)

    def end(self) -> None:
        """End a backward; one through no output, of a loss on inner activations or on none, is that of the latest."""
        if self.counts and not self._reached and self._open:
            self._evaluated |= not self._open.popitem()[1]
        self._reached = False

    def leave(self) -> None:
        """Count one, however many passes were begun since the ranks last agreed."""
        if self.counts:
            self._agreed += 1
            self._close(self._agreed, self._updates)

    def restart(self) -> None:
        """Count from 0 on all ranks, which go on from one checkpoint."""
        self._agreed = 0
        self._close(0, self._updates)
        self._caught.clear()

    def interrupt(self) -> None:
        """Count a backward that ended in an error; its forward counts already if it did not come so far."""
        self._left += self.counts and (self._reached or not self._open)
        self._reached = False

    def fail(self, error: BaseException) -> None:
        """Remember an error of this rank's own, for the errors of the other ranks."""
        if not isinstance(error, CommError) and not self._caught:
            self._caught.append(f"{type(error).__name__}: {error}".partition("\n")[0][:SHOWN])

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Remember an error inside."""
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise

    @contextmanager
    def train_step(self, discard: Callable[[], None], world: Mesh) -> Iterator[None]:
        """Count a step that raises, and drop its gradients, unless a connection broke, which ends training."""
        before = self.left
        try:
            yield
        except Exception as error:
            if isinstance(error, BudgetExceeded) and not isinstance(error, CommError):
                announce_over_budget(world, error)
            self.fail(error)
            try:
                if not isinstance(error, CommError):
                    with suppress(CommError):  # ranks that this one waits for may have met another error
                        discard()
            finally:
                if self.counts:
                    self._close(before + 1, self._updates)
            raise

    def check(self, counts: Sequence[int], comm: Agreeing, step: int) -> CommError | None:
        """The error of ranks that left unlike numbers of passes, which each of them raises; None without.

        Args:
            counts: of all ranks; the same on each.
        """
        if len(set(counts)) == 1:
            self._agreed = counts[0]
            self._caught.clear()
            return None
        told = comm.agree_on(self._caught, "errors of passes")
        least = min(counts)
        ahead = [rank for rank, count in enumerate(counts) if count > least]
        texts = [f"rank {rank} left {_number(counts[rank] - least)}{_after(told[rank])}" for rank in ahead[:MOST]]
        more = f", and ranks {', '.join(map(str, ahead[MOST:]))} did so too" if ahead[MOST:] else ""
        return CommError(
            f"The ranks are at unlike batches: {'; '.join(texts)}{more}, which rank {counts.index(least)} did not. "
            f"Step {step + 1} was not taken, and its gradients are gone. Let errors end the job, or let all ranks "
            f"call engine.discard_batch() for the same batch, when torch.distributed.all_reduce() before "
            f"engine.backward() says that one failed. Forwards that train nothing belong under torch.no_grad()."
        )

    def _close(self, left: int, updates: int) -> None:
        """Count the open forwards for good."""
        self._left, self._updates = left, updates
        self._open.clear()


Wait = tuple[int, str, Sequence[str]]  # a rank, the operation that it waits for, and the error after which it went on


def disagreement(one: Wait, other: Wait) -> CommError:
    """The error of two ranks that wait for different operations."""
    return CommError(
        f"The ranks disagree about what comes next: rank {one[0]} waits for '{one[1]}', rank {other[0]} for "
        f"'{other[1]}'. Every rank must call forward, backward and step equally often and in the same order."
        f"{went_on(one[0], one[2])}{went_on(other[0], other[2])}"
    )


def went_on(rank: int, caught: Sequence[str]) -> str:
    """A sentence about an error in a pass after which a rank went on; empty without one."""
    return "".join(f" Rank {rank} had gone on after an error in a pass ({text})." for text in caught)


def _number(count: int) -> str:
    return f"{count} pass{'es' if count > 1 else ''} without a whole backward"


def _after(caught: Sequence[str]) -> str:
    return f" (after {caught[0]})" if caught else ""
