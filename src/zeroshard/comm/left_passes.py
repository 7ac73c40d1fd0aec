"""Passes and calls that a rank left without ending them, and the errors of the ranks that wait for it.

[Note: left passes] A loop that catches errors (`except Exception: continue`) on one rank alone is a batch ahead of the
others from then on, and each step would sum gradients of unlike batches. So each rank counts the forwards for training
whose outputs never got a gradient, and the backwards that ended in an error; the agreement on a step compares the
counts, in a message that is sent anyway. A step does not reset them: ranks that left equally many passes are at the
same batch again, as after `discard_batch` on all. Forwards without gradients do not count, nor those in evaluation
mode, unless the model is trained in it.

[Note: left calls] Stages send each other messages in the middle of a step, so an error of one rank leaves the others in
waits that never end. That rank writes its error into the store, with the number of the call, and a rank that waits long
raises it, unless it met an error in that call itself. What was sent in such a call would be taken for a message of the
next, so once a call has ended with something under way, no rank goes on. Evaluations are counted for each data rank.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from zeroshard.comm.disagreement import at_unlike_batches, note_error
from zeroshard.comm.mesh import Mesh
from zeroshard.comm.over_budget import announce_over_budget
from zeroshard.comm.rendezvous import give_up
from zeroshard.errors import BudgetExceeded, CommError

SHOWN = 300  # letters of an error


class Agreeing(Protocol):
    """The method of `Comm` that a comparison calls."""

    def agree_on(self, value: list[str], label: str) -> list[list[str]]:
        """Every rank's value."""


class LeftPasses:
    """The forwards of one engine for training, and their backwards.

    Args:
        mesh: has the list of errors, for the first since the ranks last agreed.

    Attributes:
        counts: whether passes count; not inside of `join`, where ranks agree on each call.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._caught, self.counts = mesh, mesh.caught, True
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
        self._mesh.forget_errors()

    def interrupt(self) -> None:
        """Count a backward that ended in an error; its forward counts already if it did not come so far."""
        self._left += self.counts and (self._reached or not self._open)
        self._reached = False

    def fail(self, error: BaseException) -> None:
        """Remember an error of this rank's own, for the errors of the other ranks."""
        if not (isinstance(error, CommError) or getattr(error, "expected", False) or self._caught):
            note_error(self._mesh, f"{type(error).__name__}: {error}".partition("\n")[0][:SHOWN])

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
            if self._caught:
                self._mesh.forget_errors()
            return None
        return at_unlike_batches(counts, comm.agree_on(self._caught, "errors of passes"), step)

    def _close(self, left: int, updates: int) -> None:
        """Count the open forwards for good."""
        self._left, self._updates, self._open = left, updates, {}


ANNOUNCED = 2000  # letters of an error that ends a call on all ranks
BROKEN = "broken"  # the key of an engine that takes no further call
_engines: WeakKeyDictionary[Store, "WeakSet[LeftCalls]"] = WeakKeyDictionary()


class LeftCalls:
    """The calls of one engine over stages, which its ranks make together ([Note: left calls]).

    Args:
        key: of the engine in the store; place: of this rank, for errors.
        kinds: of calls, each with a name that only the ranks that make them together have.

    Attributes:
        numbers: of calls so far, by kind.
        caught: the last error of this rank's own in a call.
    """

    def __init__(self, mesh: Mesh, key: str, place: str, kinds: Sequence[str]) -> None:
        self._failures, self._key, self._place = mesh.failures, key, place
        self.numbers, self._left = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0)
        self._broken, self.caught = "", list[str]()
        if mesh.failures is not None:
            _engines.setdefault(mesh.failures, WeakSet()).add(self)

    @contextmanager
    def call(self, kind: str, name: str, under_way: Callable[[], frozenset[object]]) -> Iterator[None]:
        """Count a call, which an error of this rank's own ends on all of them; refuse it after one that was broken off.

        Args:
            under_way: the microbatches and messages under way.
        """
        self.numbers[kind] += 1
        before = under_way()
        try:
            if self._broken:
                raise CommError(self._broken)
            yield
        except Exception as error:
            self._left[kind] = self.numbers[kind]
            if not isinstance(error, BudgetExceeded | CommError):
                self.caught = [_text(error)]
                self._write(kind, f"{self.numbers[kind]} {self._place} left {name} in an error ({_text(error)})")
            if under_way() - before:
                self.break_off(error)
            raise

    def break_off(self, error: BaseException) -> None:
        """Refuse all later calls of the engine, on all ranks, after an error in the middle of one."""
        if not self._broken:
            self._broken = (
                f"A call of this engine ended in its middle on {self._place} ({_text(error)}), and messages between "
                f"stages are still under way, so it takes no further call. Let errors end the job; or make a new "
                f"engine on all ranks and load a checkpoint."
            )
            self._write(BROKEN, f"0 {self._broken[0].lower()}{self._broken[1:]}")

    def elsewhere(self) -> str | None:
        """The error with which another rank left a call that this one has not left by an error."""
        assert self._failures is not None
        for kind, left in {**self._left, BROKEN: 0 if self._broken else -1}.items():
            if self._failures.check([f"{self._key}/{kind}"]):
                number, _, text = self._failures.get(f"{self._key}/{kind}").decode().partition(" ")
                if int(number) > left:
                    return text
        return None

    def _write(self, kind: str, text: str) -> None:
        if self._failures is not None:
            try:
                self._failures.set(f"{self._key}/{kind}", text)
            except dist.DistError:
                give_up(self._failures)


def engines_over_stages(mesh: Mesh) -> tuple[LeftCalls, ...]:
    """The calls of these ranks' engines over stages."""
    return () if mesh.failures is None else tuple(_engines.get(mesh.failures, ()))


def left_elsewhere(mesh: Mesh) -> str | None:
    """The error with which another rank left a call of an engine; None without one.

    Raises:
        DistError: the store is gone.
    """
    return next(filter(None, (engine.elsewhere() for engine in engines_over_stages(mesh))), None)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:ANNOUNCED]
