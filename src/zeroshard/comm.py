"""Comm: every collective of the engine, counted, labelled and watched.

Counts follow the ZeRO paper (1910.02054, section 7): an all-gather or a reduce-scatter of Ψ elements counts Ψ. What
one rank really sends is (N-1)/N of that, counted beside it in bytes.

[Note: fixed-order sums] gloo's reduce-scatter is an all-reduce and a slice (twice the bytes), and no backend promises
an order. So gradients go by all-to-all to the rank that owns the slice, which adds them in rank order, in fp32.

[Note: no silent disagreement] A rank that waits longer than `PATIENCE` writes into the store which operation it waits
for and how many it has started in each group. Two ranks that each wait for what the other has not started can never
go on, so both stop with both names instead of hanging. Ranks that are merely slow are waited for until the timeout.
"""

import json
import time
import zlib
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.errors import CommError
from zeroshard.mesh import Mesh

PATIENCE = 2.0  # seconds of waiting before a rank says where it is
LABEL_BYTES, WORD_BYTES = 64, 440  # an agreement's frame, with 8 bytes for the length; longer words take a second round


class Purpose(StrEnum):
    """What a collective is for."""

    GATHER_PARAMETERS = "gather parameters"
    GATHER_TO_EVALUATE = "gather to evaluate"
    REDUCE_GRADIENTS = "reduce gradients"
    GATHER_GRADIENTS = "gather gradients"
    CONTROL = "agreement"
    SETUP = "set-up"


@dataclass(slots=True)
class Count:
    """What went over the wire for one purpose.

    Attributes:
        elements: elements moved, by the paper's count, without padding.
        padding: padding elements moved with them.
        nbytes: bytes of both.
        sent_nbytes: bytes that this rank itself sent.
        calls: number of collectives.
        seconds: time this rank stood waiting.
    """

    elements: int = 0
    padding: int = 0
    nbytes: int = 0
    sent_nbytes: int = 0
    calls: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one collective: its group, its number there (from 1), and its name."""

    group: str
    number: int
    label: str


class Pending:
    """A collective under way; `wait` returns when its result may be used."""

    def __init__(self, comm: "Comm", work: dist.Work | None, place: Place, count: Count) -> None:
        self._comm = comm
        self._work = work
        self._place = place
        self._count = count

    def arrives_within(self, seconds: float) -> bool:
        """Wait a little; False when the result is not there yet."""
        if self._work is not None and not self._work.is_completed() and self._comm.mesh.device.type == "cpu":
            try:
                self._work.wait(timedelta(seconds=seconds))
            except RuntimeError:
                return self._work.is_completed()  # a timeout, or an error that `wait` will report
        return True

    def wait(self) -> None:
        """Wait for the result (on CUDA: let the current stream wait).

        Raises:
            CommError: the ranks disagree about what comes next, one is silent, or a connection broke.
        """
        if self._work is None:
            return
        start = time.perf_counter()
        self._comm.wait(self._work, self._place)
        self._count.seconds += time.perf_counter() - start
        self._work = None


class Comm:
    """The collectives of one rank.

    Attributes:
        counts: by purpose, since the last `reset`.
        digests: by group, a checksum of the names of all its collectives so far; ranks that did the same have the same.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.counts: dict[Purpose, Count] = defaultdict(Count)
        self.digests = {"gather": 0, "reduce": 0}
        self._groups = {"gather": mesh.gathers, "reduce": mesh.reductions, "control": mesh.control}
        self._started = dict.fromkeys(self._groups, 0)

    def reset(self) -> None:
        """Start counting again from zero."""
        self.counts.clear()

    def gather(self, full: torch.Tensor, own: torch.Tensor, purpose: Purpose, label: str, padding: int = 0) -> Pending:
        """Start to fill `full` [N*S] with the slices [S] of all ranks; `own` may be this rank's part of `full`."""
        place, count = self._enter("gather", full, purpose, label, padding)
        with self._naming(place):
            work = dist.all_gather_single(full, own, group=self._groups["gather"], async_op=True)
        return Pending(self, work, place, count)

    def exchange(self, into: torch.Tensor, full: torch.Tensor, label: str, padding: int = 0) -> Pending:
        """Start an all-to-all: `into` [N*S] receives from each rank its copy of this rank's slice of `full` [N*S]."""
        place, count = self._enter("reduce", full, Purpose.REDUCE_GRADIENTS, label, padding)
        with self._naming(place):
            work = dist.all_to_all_single(into, full, group=self._groups["reduce"], async_op=True)
        return Pending(self, work, place, count)

    def broadcast(self, tensor: torch.Tensor, label: str) -> None:
        """Overwrite `tensor` with rank 0's; used once, at set-up."""
        if self.mesh.ranks == 1:
            return
        place, count = self._enter("gather", tensor, Purpose.SETUP, label, 0)
        with self._naming(place):
            work = dist.broadcast(tensor, group=self._groups["gather"], group_src=0, async_op=True)
        Pending(self, work, place, count).wait()

    def agree(self, words: bytes, label: str) -> list[bytes]:
        """Every rank's `words`, in rank order.

        Raises:
            CommError: the ranks came here with different labels, which are both named.
        """
        if self.mesh.ranks == 1:
            return [words]
        name = label.encode()[:LABEL_BYTES].ljust(LABEL_BYTES)
        head, tail = words[:WORD_BYTES].ljust(WORD_BYTES), words[WORD_BYTES:]
        lengths, heads = [], []
        for rank, frame in enumerate(self._spread(name + len(words).to_bytes(8) + head, label)):
            if frame[:LABEL_BYTES] != name:
                there = frame[:LABEL_BYTES].decode(errors="replace").strip()
                raise CommError(_disagreement(self.mesh.rank, label, rank, there))
            lengths.append(int.from_bytes(frame[LABEL_BYTES : LABEL_BYTES + 8]))
            heads.append(frame[LABEL_BYTES + 8 :])
        longest = max(lengths) - WORD_BYTES
        tails = self._spread(tail.ljust(longest), label) if longest > 0 else [b""] * len(heads)
        return [(a + b)[:n] for a, b, n in zip(heads, tails, lengths, strict=True)]

    def agree_on(self, value: Any, label: str) -> list[Any]:
        """Every rank's `value` (whatever JSON holds), in rank order; for errors and for set-up, not for every step."""
        return [json.loads(words) for words in self.agree(json.dumps(value).encode(), label)]

    def _spread(self, frame: bytes, label: str) -> list[bytes]:
        """Every rank's `frame`, which must be equally long on all ranks."""
        mine = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        everyone = torch.empty(self.mesh.ranks * len(frame), dtype=torch.uint8)
        place = self._place("control", label)
        count = self.counts[Purpose.CONTROL]
        self._add(count, everyone, 0)
        with self._naming(place):
            work = dist.all_gather_single(everyone, mine, group=self._groups["control"], async_op=True)
        Pending(self, work, place, count).wait()
        blob = everyone.numpy().tobytes()
        return [blob[i : i + len(frame)] for i in range(0, len(blob), len(frame))]

    def wait(self, work: dist.Work, place: Place) -> None:
        """Wait for `work`, looking for the reason when it takes long."""
        if place.group != "control" and self.mesh.device.type == "cuda":
            work.wait()
            return
        deadline = time.monotonic() + self.mesh.timeout
        published = False
        while True:
            try:
                with self._naming(place):
                    work.wait(timedelta(seconds=min(PATIENCE, self.mesh.timeout)))
                break
            except TimeoutError:
                published = True
                self._publish(place)
                self._compare(place, expired=time.monotonic() > deadline)
        if published and self.mesh.store is not None:
            self.mesh.store.delete_key(f"where/{self.mesh.rank}")

    def _enter(self, group: str, full: torch.Tensor, purpose: Purpose, label: str, padding: int) -> tuple[Place, Count]:
        place = self._place(group, f"{purpose} of {label}")
        self.digests[group] = zlib.crc32(place.label.encode(), self.digests[group])
        count = self.counts[purpose]
        self._add(count, full, padding)
        return place, count

    def _place(self, group: str, label: str) -> Place:
        self._started[group] += 1
        return Place(group, self._started[group], label)

    def _add(self, count: Count, full: torch.Tensor, padding: int) -> None:
        ranks = self.mesh.ranks
        count.elements += full.numel() - padding
        count.padding += padding
        count.nbytes += full.nbytes
        count.sent_nbytes += full.nbytes * (ranks - 1) // ranks
        count.calls += 1

    def _naming(self, place: Place) -> "_Naming":
        return _Naming(self, place)

    def _publish(self, place: Place) -> None:
        where = {"place": [place.group, place.number, place.label], "started": self._started}
        assert self.mesh.store is not None
        self.mesh.store.set(f"where/{self.mesh.rank}", json.dumps(where))

    def _compare(self, place: Place, expired: bool) -> None:
        """Raise when another rank provably waits for something else, or when the time is up."""
        rank, store = self.mesh.rank, self.mesh.store
        assert store is not None
        first = self.failure()
        if first:
            raise CommError(f"Rank {rank} stopped in '{place.label}' because {first}")
        silent = []
        for other in (r for r in range(self.mesh.ranks) if r != rank):
            if not store.check([f"where/{other}"]):
                silent.append(other)
                continue
            there = json.loads(store.get(f"where/{other}"))
            theirs = Place(*there["place"])
            apart = there["started"][place.group] < place.number and self._started[theirs.group] < theirs.number
            renamed = (theirs.group, theirs.number) == (place.group, place.number) and theirs.label != place.label
            if apart or renamed:
                raise CommError(_disagreement(rank, place.label, other, theirs.label))
        if expired:
            who = f"rank {', '.join(map(str, silent))} is silent" if silent else "all ranks wait as well"
            raise CommError(
                f"Rank {rank} waited {self.mesh.timeout:.0f} s for '{place.label}' and gave up; {who}. See that "
                f"rank's log: "
                "it is computing, stopped or dead. Raise `timeout` if a step may take that long."
            )

    def failure(self) -> str | None:
        """What the first rank to fail said of it, if one did and the store still answers."""
        store = self.mesh.store
        try:
            return store.get("failure").decode() if store is not None and store.check(["failure"]) else None
        except dist.DistError:
            return None


def _disagreement(rank: int, label: str, other: int, theirs: str) -> str:
    return (
        f"The ranks disagree about what comes next: rank {rank} waits for '{label}', rank {other} for '{theirs}'. "
        "Every rank must call forward, backward and step equally often and in the same order."
    )


class _Naming:
    """Turns a backend's error into a `CommError` that names the operation; lets a timeout through as `TimeoutError`."""

    def __init__(self, comm: Comm, place: Place) -> None:
        self._comm = comm
        self._place = place

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, CommError):
            return
        if str(error).startswith("Operation timed out"):
            raise TimeoutError from error
        first = self._comm.failure()
        reason = f"{first}" if first else f"a connection broke ({str(error).splitlines()[0]})"
        raise CommError(f"Rank {self._comm.mesh.rank} stopped in '{self._place.label}' because {reason}") from error
