"""Rendezvous: the ranks of a job connect, or an error names the missing ranks.

[Note: roll call] Making a process group waits inside torch until every rank is there, longer than `timeout` and without
a name for the rank that is missing. So before a group is made each rank enters its name in the job's store and waits
for those of the others; after that, the group is made at once.

[Note: a store that does not answer] torch waits without limit for the store's answer, which does not come over a cut
cable or from a stopped process. So the socket to the store has a deadline, for requests of this package and for those
of torch when it makes a group. A late answer would be taken for that to the next request, so a connection that was
given up is shut, and later requests fail at once.
"""

import contextlib
import ctypes
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from zeroshard.errors import CommError, PlanError

SHORTEST, LONGEST = 0.001, 0.25  # seconds between polls for the ranks that have come
PATIENCE = 2.0  # seconds before a rank looks whether another one has failed
SHAKE = 1.0  # seconds more than torch's own deadline for a connection
BACKLOG = 1024  # connections that may wait to be accepted
ADDRESS_BYTES = 128  # of the kernel's sockaddr_storage
SILENT = "Socket Timeout"  # in torch's errors
LIBC = ctypes.CDLL(None)  # for torch's sockets, which a socket object of Python would change
LEAST = 1.0  # seconds: the shortest deadline of a store
CALLS: Counter[str] = Counter()  # roll calls that this process has answered, by name


def connect(place: tuple[str, str], rank: int, ranks: int, served: bool, timeout: float) -> Store:
    """The key-value store of the job, kept by rank 0 or, where `served`, by the launcher.

    Args:
        place: MASTER_ADDR and MASTER_PORT.

    Raises:
        PlanError: the address or the port is invalid. CommError: the process that keeps the store did not come.
    """
    address, port = place
    if not address or not port.isdecimal() or not int(port) < 2**16:
        raise PlanError(
            f"MASTER_ADDR is {address!r} and MASTER_PORT {port!r}; rank {rank} of {ranks} needs the address and the "
            f"port (below 65536) at which rank 0 can be reached. Start the job with torchrun, which sets both."
        )
    keeps = rank == 0 and not served
    try:
        store = reach(address, int(port), keeps, timeout)
        limit_waits(store, timeout)
        return store
    except dist.DistError as error:
        first = str(error).splitlines()[0]
        if keeps:
            raise CommError(
                f"Rank 0 cannot keep the job's store at {address}:{port} ({first}). Set MASTER_ADDR to an address of "
                f"its machine and MASTER_PORT to a free port, the same on all ranks."
            ) from error
        keeper = "the launcher" if served else "rank 0"
        raise CommError(
            f"Rank {rank} waited {timeout:.0f} s for {keeper}, which keeps the job's store at {address}:{port}, and it "
            f"did not come ({first}). Look at its log, and compare MASTER_ADDR and MASTER_PORT; raise `timeout` if it "
            f"may take that long to start."
        ) from error


def reach(address: str, port: int, keeps: bool, timeout: float) -> Store:
    """The store at an address; made in a thread, because torch waits without limit for a silent listener.

    Args:
        keeps: whether this process keeps it.

    Raises:
        DistError: the store did not come within `timeout` seconds, or the port is taken.
    """
    found: list[Store | dist.DistError] = []
    patience, listener = timedelta(seconds=timeout), _listen_inside(address, port) if keeps else None

    def connect_there() -> None:
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                address, port, None, keeps, patience, False, multi_tenant=keeps, master_listen_fd=listener
            )
        except dist.DistError as error:
            found.append(error)
        else:
            found.append(store)

    thread = threading.Thread(target=connect_there, name="zeroshard store", daemon=True)
    thread.start()
    thread.join(timeout + SHAKE)
    if not found:
        raise dist.DistStoreError("the process that listens there does not answer as a store does")
    if isinstance(found[0], dist.DistError):
        raise found[0]
    return found[0]


def _listen_inside(address: str, port: int) -> int | None:
    """A descriptor that listens on the loopback address alone, if `address` is one; None leaves it to torch."""
    if address != "localhost" and not address.startswith("127."):
        return None
    try:
        return socket.create_server((address, port), backlog=BACKLOG).detach()  # the store closes it
    except OSError:
        return None  # this process may keep a store there already; torch finds it, or raises that the port is taken


def limit_waits(store: Store, timeout: float) -> None:
    """Set a deadline for a TCP store's answers; see [Note: a store that does not answer].

    A rank that reads after `PATIENCE` has its answer or an error by `timeout`.
    """
    seconds = max(timeout - PATIENCE, LEAST)
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for connection in _connections(store):
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            LIBC.setsockopt(connection, socket.SOL_SOCKET, option, limit, len(limit))


def give_up(store: Store | None) -> str:
    """End the connection to a store that has failed; returns the text of the error."""
    for connection in _connections(store):
        LIBC.shutdown(connection, socket.SHUT_RDWR)
    return (
        "the job's store does not answer: the process that keeps it (rank 0 or the launcher) is gone or stopped, or "
        "its machine cannot be reached any more (cable, firewall). Look at the logs of the other ranks and at the "
        "network between the machines, and start again from the last checkpoint"
    )


def _connections(store: Store | None) -> list[int]:
    """The descriptors of this process's connections to a TCP store, found by the port at their other end."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    port = getattr(store, "port", None)
    if port is None:
        return []
    peer, found = ctypes.create_string_buffer(ADDRESS_BYTES), []
    for name in os.listdir("/dev/fd"):
        length = ctypes.c_uint32(ADDRESS_BYTES)
        if LIBC.getpeername(int(name), peer, ctypes.byref(length)) == 0:
            family, remote_port = struct.unpack_from("=H", peer.raw)[0], struct.unpack_from(">H", peer.raw, 2)[0]
            if family in (socket.AF_INET, socket.AF_INET6) and remote_port == port:
                found.append(int(name))
    return found


def wait_for_all(store: Store, rank: int, ranks: int, timeout: float, what: str) -> None:
    """Wait until every rank calls this for the same object; called equally often by all ranks of `store`.

    Raises:
        CommError: with the ranks that did not come within `timeout` seconds, or the failure of one of them.
    """
    CALLS[what] += 1
    names = [f"arrived/{what}/{CALLS[what]}/{other}" for other in range(ranks)]
    try:
        store.set(names[rank], "here")
        if _all_arrive(store, names, timeout):
            return
        missing = [str(other) for other, name in enumerate(names) if not store.check([name])]
        store.delete_key(names[rank])  # a rank that comes later must not go on alone
        CALLS[what] -= 1
        failed = store.get("failure").decode() if store.check(["failure"]) else None
    except dist.DistError as error:
        raise CommError(f"Rank {rank} cannot make {what} because {give_up(store)}.") from error
    if failed is not None:
        raise CommError(f"Rank {rank} cannot make {what} because {failed}")
    absent = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(missing)}"
    raise CommError(
        f"Rank {rank} waited {timeout:.0f} s for {absent} of {ranks} to make {what}, and gave up. Every rank must make "
        f"the mesh and the engine; see that rank's log: it was not started, is busy before that point, or is dead. "
        f"Raise `timeout` if it may take that long."
    )


def _all_arrive(store: Store, names: list[str], timeout: float) -> bool:
    """Whether all names are recorded in time, before a rank fails; polls, because a store's wait logs warnings."""
    start, pause = time.monotonic(), SHORTEST
    while not store.check(names):
        waited = time.monotonic() - start
        if waited > timeout or (waited > PATIENCE and store.check(["failure"])):
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST)
    return True


@contextlib.contextmanager
def naming(store: Store, rank: int, what: str) -> Iterator[None]:
    """Turn an error of the store, while torch makes an object with it, into a `CommError`."""
    try:
        yield
    except dist.DistError as error:
        if SILENT in str(error):
            raise CommError(f"Rank {rank} could not make {what} because {give_up(store)}.") from error
        raise CommError(
            f"Rank {rank} could not make {what} ({str(error).splitlines()[0]}): a rank came and left, or its "
            f"address cannot be reached. Look at the logs of the other ranks, and run `zeroshard doctor`."
        ) from error
