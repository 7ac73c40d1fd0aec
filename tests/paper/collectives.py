"""Collectives of a device of paper: NCCL's meaning of launches and waits, while gloo moves the bytes.

A collective runs on its communicator's own stream, after all that the launching stream holds so far; `wait` makes the
current stream wait, and not the host. Two ranks' messages have a communicator of that pair in each group, as in
torch, and NCCL matches them by order alone. Tensors of the host go through gloo, whose `wait` makes the host wait.
"""

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from paper import threads
from paper.record import Clock, site
from torch import Tensor

if TYPE_CHECKING:
    from paper.device import Paper


class Work(dist.Work):
    """A collective under way; holds its tensors until the wait, as NCCL's work does."""

    def __init__(self, paper: "Paper", work: Any, name: str, clock: Clock, tensors: list[Tensor]) -> None:
        super().__init__()
        self._paper, self._work, self._name, self._clock = paper, work, name, clock
        self._tensors = tensors

    def is_completed(self) -> bool:
        """Whether gloo is ready."""
        return bool(self._work.is_completed())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait; gloo must be ready here, for the values."""
        self._work.wait() if timeout is None else self._work.wait(timeout)
        paper = self._paper
        with paper.record.lock:
            paper.record.join(paper.stream.name, self._clock)
        self._tensors = []
        return True


class HostWork(dist.Work):
    """A collective of the host; its wait makes the host wait."""

    def __init__(self, paper: "Paper", work: Any, clock: Clock) -> None:
        super().__init__()
        self._paper, self._work, self._clock = paper, work, clock

    def is_completed(self) -> bool:
        """Whether it has ended."""
        ended = bool(self._work.is_completed())
        if ended and sys._getframe(1).f_code.co_name != "__del__":  # a finalizer orders nothing
            self._paper.join_host(self._clock)
        return ended

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait."""
        self._work.wait() if timeout is None else self._work.wait(timeout)
        self._paper.join_host(self._clock)
        return True


def replaced(paper: "Paper") -> list[tuple[Any, str, Any]]:
    """(owner, name, replacement) of the collectives."""
    names = {
        "all_gather_single": (0, 1),
        "all_to_all_single": (0, 1),
        "all_reduce": (0, None),
        "broadcast": (0, None),
        "isend": (None, 0),
        "irecv": (0, None),
    }
    return [(dist, name, _recording(paper, name, *places)) for name, places in names.items()]


def _recording(paper: "Paper", name: str, written: int | None, read: int | None) -> Any:
    function = getattr(dist, name)
    in_place = name == "all_reduce"

    def launched(*args: Any, **kw: Any) -> Any:
        uses: list[tuple[Tensor, bool]] = []
        if read is not None:
            uses.append((args[read], False))
        if written is not None:
            source = name == "broadcast" and kw.get("group_src") == dist.get_rank(kw["group"])
            uses.append((args[written], not source))
            if in_place:
                uses.append((args[written], False))
        with paper.plainly():  # torch.distributed asks CUDA about tensors on it
            work = function(*args, **kw)
        if work is None:
            return None
        if paper.at_once and name not in ("isend", "irecv"):
            work.wait()
        if not any(paper.is_on_device(tensor) for tensor, _ in uses):
            return _on_host(paper, name, work, uses)
        communicator, launch = _communicator(name, kw, uses[0][0])
        with paper.record.lock:
            return _on_communicator(paper, communicator, launch, work, uses)

    return launched


def _communicator(name: str, kw: dict[str, Any], tensor: Tensor) -> tuple[str, str]:
    """The name of a communicator, equal on its ranks, and an operation of it as they all must launch it."""
    group = kw.get("group")
    members = dist.get_process_group_ranks(group)
    title = f"communicator {getattr(group, 'group_name', 'world')} of ranks {'-'.join(map(str, members))}"
    size = f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"
    if name not in ("isend", "irecv"):
        source = f" from {kw['group_src']}" if "group_src" in kw else ""
        uneven = name == "all_to_all_single"  # whose ranks have results of their own sizes
        return title, f"{name} of {tensor.dtype}" if uneven else f"{name}{source} of {size}"
    own, peer = dist.get_rank(group), kw["group_dst" if name == "isend" else "group_src"]
    ends = (own, peer) if name == "isend" else (peer, own)
    return f"{title}, pair {min(ends)}:{max(ends)}", f"message {ends[0]}>{ends[1]} of {size}"


def _on_host(paper: "Paper", name: str, work: Any, uses: list[tuple[Tensor, bool]]) -> HostWork:
    actor = f"gloo of {threads.here()}"
    with paper.record.lock:
        clock = paper.launched(actor)
        number = paper.record.tick(actor)
        paper.use(actor, number, name, uses)
        clock = paper.record.snapshot(actor)
    return HostWork(paper, work, clock)


def _on_communicator(
    paper: "Paper", communicator: str, launch: str, work: Any, uses: list[tuple[Tensor, bool]]
) -> Work:
    record, stream, at = paper.record, paper.stream.name, site()
    clock = paper.launched(stream)
    last = record.clock(communicator).get(communicator, 0)
    launcher = paper.launchers.get(communicator)
    own = record.clock(threads.here())
    if launcher is not None and own.get(launcher[0], 0) < launcher[1]:
        record.complain(
            "operations of one communicator launched by threads without an order",
            communicator,
            launcher[2],
            f"{launch} at {at} by {threads.here()}",
            f"{threads.here()} waits for {launcher[0]}",
        )
    number = record.tick(threads.here())
    paper.launchers[communicator] = (threads.here(), number, f"{launch} at {at} by {threads.here()}")
    del last
    record.join(communicator, clock)
    operation = record.tick(communicator)
    record.launches.setdefault(communicator, []).append(f"{launch} at {at}")
    paper.use(communicator, operation, launch.partition(" of ")[0], uses)
    return Work(paper, work, launch, record.snapshot(communicator), [tensor for tensor, _ in uses])
