"""Comm: every collective of the engine, counted, labelled and watched.

Counts follow the ZeRO paper (1910.02054, section 7): an all-gather or a reduce-scatter of Ψ elements counts Ψ. What
one rank really sends is (N-1)/N of that, counted separately in bytes.

[Note: fixed-order sums] gloo's reduce-scatter is an all-reduce and a slice (twice the bytes), and no backend promises
an order. So each rank's gradients go to the rank that owns the slice, which adds them in rank order, in fp32.

[Note: no silent disagreement] A rank that waits longer than `PATIENCE` writes into the store which operation it waits
for and how many it has started in each group. Two ranks that wait for operations which the other has not started can
never go on, so both stop with both names instead of hanging. Slow ranks are waited for until the timeout.
"""

import contextlib
import json
import math
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.comm.disagreement import disagreement, noted_error
from zeroshard.comm.hang_detector import PATIENCE, DeviceDetector, HangDetector
from zeroshard.comm.left_passes import left_elsewhere
from zeroshard.comm.mesh import Mesh, MessageGroups, part_of
from zeroshard.comm.over_budget import over_budget_elsewhere
from zeroshard.comm.pending import Exchange, InPlace, Naming, Pending, Position, SideBySide
from zeroshard.comm.rendezvous import SHORTEST, give_up
from zeroshard.errors import CommError, PlanError
from zeroshard.memory.zeros import zeros
from zeroshard.platform.accelerator import is_accelerator
from zeroshard.platform.shared_memory import Signal
from zeroshard.platform.shared_operands import SharedOperands
from zeroshard.platform.transport import Bounds, Scratch, Shared, part_of_rank
from zeroshard.traffic import BACKWARDS as BACKWARDS
from zeroshard.traffic import Count as Count
from zeroshard.traffic import Purpose as Purpose

REMEMBERED = 32  # latest messages per channel whose labels are stored
# An agreement's frame: label, 8 bytes for the length, content; longer content takes a second round.
LABEL_BYTES, CONTENT_BYTES = 64, 440


class Comm:
    """The collectives of one rank.

    Attributes:
        on_accelerator: whether tensors are on one, whose streams wait in place of the host.
        shared: the memory that the ranks share; None where they send.
        operands: memory in which ranks read each other's activations; None where they send them.
        counts: by purpose, since the last `reset`.
        digests: by group, a checksum of the labels of all collectives so far, equal on ranks that started the same.
        evaluates: whether the model is evaluated, so that collectives inside of layers are no training traffic.
        session: a number that all ranks agreed on, which separates messages of different engines.
        message_groups: the process groups of messages.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.on_accelerator = mesh, is_accelerator(mesh.device)
        self.counts: dict[Purpose, Count] = defaultdict(Count)
        self.digests = {"gather": 0, "reduce": 0}
        self.session = 0
        self.evaluates = False
        self.shared: Shared | None = None
        self.operands: SharedOperands | None = None
        self._network = mesh.platform.network(mesh.rank, mesh.ranks, mesh.device)
        self._groups = {"gather": mesh.gathers, "reduce": mesh.reductions, "control": mesh.control}
        self._started: dict[str, int] = defaultdict(int)
        self.message_groups = MessageGroups(mesh)
        self._watch: HangDetector | None = None
        self._stream_watch: DeviceDetector | None = None
        self._labels: dict[str, deque[tuple[int, str]]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._parts: list[Comm] = []

    def __deepcopy__(self, memo: Any) -> Any:
        """Refuse a copy: a communicator belongs to one engine.

        Raises:
            PlanError: always.
        """
        raise PlanError(
            "copy.deepcopy() was called on a model whose layers or experts lie on several ranks, so that a copy would "
            "be a part of the model. Build the model anew, and load engine.state_dict() into it."
        )

    def part(self, parts: Sequence[Sequence[int]], name: str) -> "Comm":
        """The collectives of this rank's part, counted with these; all ranks call it with equal parts."""
        comm = Comm(part_of(self.mesh, parts, name))
        comm.counts = self.counts
        self._parts.append(comm)
        return comm

    @property
    def communicators(self) -> set[tuple[int, str]]:
        """The communicators of a backend such as NCCL that this rank's operations so far need, those of parts too.

        NCCL has one for a process group's collectives, and one for each pair of ranks that exchange messages in it.
        """
        collectives = [name for name in ("gather", "reduce") if self._started[name] and self.mesh.ranks > 1]
        found = self.message_groups.communicators | {(id(self.mesh.lease or self.mesh), name) for name in collectives}
        return found.union(*(part.communicators for part in self._parts))

    def reset(self) -> None:
        """Restart counting from zero."""
        self.counts.clear()

    def share(self, nbytes: int) -> str | None:
        """Map memory of all ranks for parameters and gradients; a collective call.

        Args:
            nbytes: bytes that will be needed.

        Returns:
            the reason why memory cannot be shared, or None.
        """
        mesh = self.mesh
        found = mesh.platform.share(mesh.rank, mesh.ranks, self.agree_on, nbytes)
        if isinstance(found, str):
            return found
        self.shared = Shared(found)
        return None

    def share_operands(self) -> str | None:
        """Map memory of all ranks for `side_by_side`; a collective call, which returns as `share`."""
        found = self.mesh.platform.share(self.mesh.rank, self.mesh.ranks, self.agree_on, 0)
        if isinstance(found, str):
            return found
        self.operands = SharedOperands(found)
        return None

    def side_by_side(
        self, x: torch.Tensor | Sequence[torch.Tensor], elements: int, purpose: Purpose, label: str
    ) -> SideBySide:
        """Start to show every rank's `x` to all, in shared memory.

        Args:
            x: of one dtype; several are shown one after the other.
            elements: of the operation, for `counts`.
        """
        pieces = (x,) if isinstance(x, torch.Tensor) else x
        assert self.operands is not None
        place, count = self._enter("reduce", purpose, label)
        with self._naming(place):
            used = self.operands.used
            if used is not None:
                Pending(self, used, place, purpose).wait()
            work = self.operands.put(*pieces)
        self._count(count, elements, elements * pieces[0].itemsize, sent=False)
        return SideBySide(self, work, place, purpose)

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A zeroed 1-D buffer of this rank, which the other ranks can read if they share memory."""
        if self.shared is not None:
            return self.shared.memory.mine(numel, dtype)
        return zeros(numel, dtype, self.mesh.device)

    def gather(
        self,
        full: torch.Tensor,
        own: torch.Tensor,
        purpose: Purpose,
        label: str,
        padding: int = 0,
        bounds: Bounds = None,
    ) -> Pending:
        """Start to fill `full` [N*S] with the slices [S] of all ranks; `own` may be this rank's part of `full`.

        Args:
            bounds: of uneven slices.
        """
        place, count = self._enter("gather", purpose, label)
        with self._naming(place):
            if self.shared is None:
                work = self._network.gather(full, own, self._groups["gather"], bounds)
            else:
                work = self.shared.gather(full, own, place.label, bounds)
        if self.shared is None or not self.shared.memory.is_common(full):
            self._add(count, full, padding, own.nbytes * (self.mesh.ranks - 1), sent=self.shared is None)
        return Pending(self, work, place, purpose)

    def show(
        self, shared: Shared, full: torch.Tensor, own: torch.Tensor, purpose: Purpose, label: str, padding: int = 0
    ) -> InPlace:
        """As `gather` among ranks that share memory, without copies: each rank reads the others' `own` in place."""
        place, count = self._enter("gather", purpose, label)
        shared.memory.publish(place.label, own)
        shared.memory.post(Signal.GATHER)
        self._add(count, full, padding, 0, sent=False)
        return InPlace(self, shared.memory.work(Signal.GATHER), place, purpose, Signal.COPIED)

    def exchange(
        self,
        full: torch.Tensor,
        scratch: Scratch,
        label: str,
        padding: int = 0,
        purpose: Purpose = Purpose.REDUCE_GRADIENTS,
        bounds: Bounds = None,
    ) -> Exchange:
        """Start to send each rank's slice of `full` [N*S] to its owner, which receives all ranks' copies.

        Args:
            scratch: makes a buffer of a number of elements of `full`'s dtype; called if one is needed.
            bounds: of uneven slices.
        """
        place, count = self._enter("reduce", purpose, label)
        with self._naming(place):
            if self.shared is None:
                work, arrival = self._network.exchange(full, self._groups["reduce"], scratch, bounds)
            else:
                work, arrival = self.shared.exchange(full, place.label, bounds)
        own = part_of_rank(full, self.mesh.rank, self.mesh.ranks, bounds)
        self._add(count, full, padding, full.nbytes - own.nbytes, sent=self.shared is None)
        return Exchange(self, work, place, purpose, arrival)

    def all_to_all(
        self,
        into: torch.Tensor,
        rows: torch.Tensor,
        receives: Sequence[int],
        sends: Sequence[int],
        purpose: Purpose,
        label: str,
    ) -> Pending:
        """Start to send each rank its run of `rows` [R, ...], and to fill `into` [M, ...] with the runs for this rank.

        The runs lie in rank order, this rank's own included. Rows sent to other ranks count once.

        Args:
            receives: rows from each rank; sends: rows to each.
        """
        place, count = self._enter("reduce", purpose, label)
        with self._naming(place):
            work = self._network.all_to_all_rows(into, rows, list(receives), list(sends), self._groups["reduce"])
        elements = (sum(sends) - sends[self.mesh.rank]) * math.prod(rows.shape[1:])
        self._count(count, elements, elements * rows.itemsize, sent=False)
        count.sent_nbytes += elements * rows.itemsize
        return Pending(self, work, place, purpose)

    def all_reduce(self, tensor: torch.Tensor, purpose: Purpose, label: str, maximum: bool = False) -> Pending:
        """Start to overwrite `tensor` with its sum over the ranks, or with the largest of each element.

        The order of a sum is the backend's, one for all ranks. A sum of Ψ elements counts 2Ψ.
        """
        place, count = self._enter("reduce", purpose, label)
        with self._naming(place):
            work = self._network.all_reduce(tensor, self._groups["reduce"], maximum)
        self._count(count, 2 * tensor.numel(), 2 * tensor.nbytes, sent=True)
        return Pending(self, work, place, purpose)

    def broadcast(self, tensor: torch.Tensor, label: str, source: int = 0) -> None:
        """Overwrite `tensor` with rank `source`'s; for set-up and exports, not for every step."""
        if self.mesh.ranks == 1:
            return
        place, count = self._enter("gather", Purpose.SETUP, label)
        self._count(count, tensor.numel(), tensor.nbytes, sent=True)
        with self._naming(place):
            work = self._network.broadcast(tensor, source, self._groups["gather"])
        Pending(self, work, place, Purpose.SETUP).wait()

    def send(self, tensor: torch.Tensor, peer: int, purpose: Purpose, label: str) -> Pending:
        """Start to send `tensor` to rank `peer`; it must stay unchanged until the result's `wait`."""
        place, count, group = self._channel(self.mesh.rank, peer, purpose, label)
        count.elements += tensor.numel()
        count.nbytes += tensor.nbytes
        count.sent_nbytes += tensor.nbytes
        count.calls += 1
        with self._naming(place):
            work = self._network.send(tensor, peer, _tag(label, self.session), group)
        return Pending(self, work, place, purpose)

    def receive(self, into: torch.Tensor, peer: int, purpose: Purpose, label: str) -> Pending:
        """Start to fill `into` with the tensor that rank `peer` sends under the same label."""
        place, _, group = self._channel(peer, self.mesh.rank, purpose, label)
        with self._naming(place):
            work = self._network.receive(into, peer, _tag(label, self.session), group)
        return Pending(self, work, place, purpose)

    def agree(self, content: bytes, label: str) -> list[bytes]:
        """Every rank's `content`, in rank order.

        Raises:
            CommError: ranks called it with different labels; names two of them.
        """
        if self.mesh.ranks == 1:
            return [content]
        name = label.encode()[:LABEL_BYTES].ljust(LABEL_BYTES)
        head, tail = content[:CONTENT_BYTES].ljust(CONTENT_BYTES), content[CONTENT_BYTES:]
        lengths, heads = [], []
        for rank, frame in enumerate(self._all_gather(name + len(content).to_bytes(8) + head, label)):
            if frame[:LABEL_BYTES] != name:
                theirs = frame[:LABEL_BYTES].decode(errors="replace").strip()
                raise disagreement((self.mesh.rank, label, self.mesh.caught), (rank, theirs, []))
            lengths.append(int.from_bytes(frame[LABEL_BYTES : LABEL_BYTES + 8]))
            heads.append(frame[LABEL_BYTES + 8 :])
        longest = max(lengths) - CONTENT_BYTES
        tails = self._all_gather(tail.ljust(longest), label) if longest > 0 else [b""] * len(heads)
        return [(a + b)[:n] for a, b, n in zip(heads, tails, lengths, strict=True)]

    def agree_on(self, value: Any, label: str) -> list[Any]:
        """Every rank's `value`, a JSON value, in rank order; for errors and for set-up, not for every step."""
        return [json.loads(content) for content in self.agree(json.dumps(value).encode(), label)]

    def _all_gather(self, frame: bytes, label: str) -> list[bytes]:
        """Every rank's `frame`, which must be equally long on all ranks."""
        place = self._place("control", label)
        with self._naming(place):
            work, everyone = self._network.gather_frames(frame, self._groups["control"])
        if work is not None:
            count = self.counts[Purpose.CONTROL]
            nbytes = len(frame) * self.mesh.ranks
            self._count(count, nbytes, nbytes, sent=True)
            Pending(self, work, place, Purpose.CONTROL).wait()
        return everyone()

    def wait(self, work: dist.Work, place: Position) -> None:
        """Wait for `work`; find the reason when it takes long."""
        if ">" in place.group:
            self._wait_for_message(work, place)
            return
        if place.group != "control" and self.on_accelerator:
            self._wait_in_stream(work, place)
            return
        deadline = time.monotonic() + self.mesh.timeout
        published = False
        while True:
            try:
                with self._naming(place, starts=False):
                    left = max(deadline - time.monotonic(), SHORTEST)
                    work.wait(timedelta(seconds=min(PATIENCE, left)))
                break
            except TimeoutError:
                published = True
                self.explain(place, expired=time.monotonic() > deadline)
        if published:
            self.withdraw()

    def explain(self, place: Position, expired: bool) -> None:
        """Publish this rank's operation in the store, and compare it with the other ranks'.

        Raises:
            CommError: the wait can never end, or has lasted too long.
        """
        try:
            self._publish(place)
            self._compare(place, expired)
        except dist.DistError as error:
            reason = give_up(self.mesh.store)
            raise CommError(f"Rank {self.mesh.rank} stopped in '{place.label}' because {reason}.") from error

    def withdraw(self) -> None:
        """Withdraw the published wait; if the store does not answer, the next long wait reports it."""
        if self.mesh.store is None:
            return
        try:
            self.mesh.store.delete_key(f"where/{self.mesh.rank}")
        except dist.DistError:
            give_up(self.mesh.store)

    def break_messages(self, place: Position | None) -> None:
        """Make the wait at `place` fail."""
        group = self._groups["reduce" if place is not None and place.group.endswith("backward") else "gather"]
        other = (self.mesh.rank + 1) % self.mesh.ranks
        with contextlib.suppress(RuntimeError):
            empty = torch.empty(0)
            work = dist.irecv(empty, group=group, group_src=other, tag=_tag("never", self.session))
            assert work is not None
            work.wait(timedelta(milliseconds=1))

    def _wait_in_stream(self, work: dist.Work, place: Position) -> None:
        if self._stream_watch is None:
            self._stream_watch = DeviceDetector(self)
        with self._naming(place, starts=False):
            work.wait()
        self._stream_watch.follow(place)

    def _wait_for_message(self, work: dist.Work, place: Position) -> None:
        """[Note: watched messages] gloo breaks a group when a wait for a message times out, so the wait has no
        timeout; a thread of its own looks for the reason when it takes long, and breaks the group when it finds one.
        """
        if self._watch is None:
            self._watch = HangDetector(self)
        self._watch.since, self._watch.place = time.monotonic(), place
        try:
            with self._naming(place, starts=False):
                work.wait()
        except CommError:
            if self._watch.found is not None:
                raise self._watch.found from None
            raise
        finally:
            self._watch.place = None

    def _enter(self, group: str, purpose: Purpose, label: str) -> tuple[Position, Count]:
        place = self._place(group, f"{purpose} of {label}")
        self.digests[group] = zlib.crc32(place.label.encode(), self.digests[group])
        return place, self.counts[purpose]

    def _channel(
        self, source: int, destination: int, purpose: Purpose, label: str
    ) -> tuple[Position, Count, dist.ProcessGroup | None]:
        backward = purpose in BACKWARDS
        place = self._place(f"{source}>{destination}{' backward' if backward else ''}", label)
        self._labels[place.group].append((place.number, label))
        return place, self.counts[purpose], self.message_groups.of((source, destination), purpose, backward)

    def _place(self, group: str, label: str) -> Position:
        self._started[group] += 1
        place = Position(group, self._started[group], label)
        if self.mesh.heartbeat is not None:
            self.mesh.heartbeat.start(place)
        return place

    def _add(self, count: Count, full: torch.Tensor, padding: int, to_others: int, sent: bool) -> None:
        self._count(count, full.numel() - padding, full.nbytes, sent=False)
        count.padding += padding
        count.sent_nbytes += to_others if sent else 0

    def _count(self, count: Count, elements: int, nbytes: int, sent: bool) -> None:
        ranks = self.mesh.ranks
        count.calls += 1
        if ranks > 1:  # a rank alone, as under strict=True, copies within its own memory
            count.elements += elements
            count.nbytes += nbytes
            count.sent_nbytes += nbytes * (ranks - 1) // ranks if sent else 0

    def _naming(self, place: Position, starts: bool = True) -> Naming:
        return Naming(self, place, starts)

    def _publish(self, place: Position) -> None:
        labels = {group: list(numbered) for group, numbered in self._labels.items()}
        wait = {
            "place": [place.group, place.number, place.label],
            "started": self._started,
            "said": labels,
            "caught": self.mesh.caught,
        }
        assert self.mesh.store is not None
        self.mesh.store.set(f"where/{self.mesh.rank}", json.dumps(wait))

    def _compare(self, place: Position, expired: bool) -> None:
        """Raise if another rank provably waits for a different operation, or if the time is up."""
        rank, store = self.mesh.rank, self.mesh.store
        assert store is not None
        elsewhere = over_budget_elsewhere(self.mesh)
        if elsewhere is not None:
            raise elsewhere
        first = left_elsewhere(self.mesh) or self.failure()
        if first:
            raise CommError(f"Rank {rank} stopped in '{place.label}' because {first}")
        silent = []
        for other in (r for r in range(self.mesh.ranks) if r != rank):
            if not store.check([f"where/{other}"]):
                silent.append(other)
                continue
            content = store.get(f"where/{other}")
            if not content:  # withdrawn between the two calls: that rank continues
                continue
            wait = json.loads(content)
            theirs = Position(*wait["place"])
            if not (_in(other, place.group) and _in(rank, theirs.group)):
                continue
            stuck = wait["started"].get(place.group, 0) < place.number and self._started[theirs.group] < theirs.number
            labels = dict(wait["said"].get(place.group, []))  # of all messages that it has started
            label = labels.get(place.number, theirs.label if theirs[:2] == place[:2] else place.label)
            if stuck or label != place.label:
                label = theirs.label if stuck else label
                raise disagreement((rank, place.label, self.mesh.caught), (other, label, wait["caught"]))
        if expired:
            others = f"rank {', '.join(map(str, silent))} is silent" if silent else "all ranks wait as well"
            raise CommError(
                f"Rank {rank} waited {self.mesh.timeout:.0f} s for '{place.label}' and gave up; {others}."
                f"{noted_error(self.mesh)} See that rank's log: it is computing, stopped or dead. Raise `timeout` if a "
                f"step may take that long."
            )

    def failure(self) -> str | None:
        """The first rank's failure, if any and if the store still answers."""
        store = self.mesh.failures
        try:
            return store.get("failure").decode() if store is not None and store.check(["failure"]) else None
        except dist.DistError:
            give_up(store)
            return None


def _in(rank: int, group: str) -> bool:
    """Whether a rank takes part in a group or in a channel."""
    ends = group.removesuffix(" backward").split(">")
    return len(ends) == 1 or str(rank) in ends


def _tag(label: str, session: int) -> int:
    """A message's tag, from its label: ranks that disagree wait (and get an error) instead of mixing messages."""
    return zlib.crc32(label.encode(), session) & 0x3FFFFFFF
