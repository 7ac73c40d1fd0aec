"""How the ranks of a job find each other, and which of them did not come.

[Note: roll call] Making a process group waits inside torch until every rank is there, longer than `timeout` and without
a name for the rank that is missing. So before a group is made each rank enters its name in the job's store and waits
for those of the others; after that, the group is made at once.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from zeroshard.errors import CommError, PlanError

SHORTEST, LONGEST = 0.001, 0.25  # seconds between two looks at who is there
PATIENCE = 2.0  # seconds before a rank looks whether another one has failed
CALLS: Counter[str] = Counter()  # by its name, how often this process has answered a roll call


def connect(place: tuple[str, str], rank: int, ranks: int, served: bool, timeout: float) -> Store:
    """The key-value store of the job, kept by rank 0 or, where `served`, by the launcher.

    Args:
        place: MASTER_ADDR and MASTER_PORT.

    Raises:
        PlanError: the place is none. CommError: the process that keeps the store did not come.
    """
    address, port = place
    if not address or not port.isdecimal() or not int(port) < 2**16:
        raise PlanError(
            f"MASTER_ADDR is {address!r} and MASTER_PORT {port!r}; rank {rank} of {ranks} needs the address and the "
            f"port (below 65536) at which rank 0 can be reached. Start the job with torchrun, which sets both."
        )
    keeps = rank == 0 and not served
    patience = timedelta(seconds=timeout)
    try:
        store: Store = dist.TCPStore(  # type: ignore[attr-defined]
            address, int(port), ranks, keeps, patience, wait_for_workers=False, multi_tenant=keeps
        )
        return store
    except dist.DistError as error:
        first = str(error).splitlines()[0]
        if keeps:
            raise CommError(
                f"Rank 0 cannot keep the job's store at {address}:{port} ({first}). Set MASTER_ADDR to an address of "
                f"its machine and MASTER_PORT to a free port, alike on all ranks."
            ) from error
        keeper = "the launcher" if served else "rank 0"
        raise CommError(
            f"Rank {rank} waited {timeout:.0f} s for {keeper}, which keeps the job's store at {address}:{port}, and it "
            f"did not come ({first}). Look at its log, and compare MASTER_ADDR and MASTER_PORT; raise `timeout` if it "
            f"may take that long to start."
        ) from error


def wait_for_all(store: Store, rank: int, ranks: int, timeout: float, what: str) -> None:
    """Wait until every rank is about to make `what`; called equally often by all ranks of `store`.

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
        reason = "the job's store is gone, and with it the process that kept it (rank 0 or the launcher)"
        raise CommError(f"Rank {rank} cannot make {what} because {reason}.") from error
    if failed is not None:
        raise CommError(f"Rank {rank} cannot make {what} because {failed}")
    who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(missing)}"
    raise CommError(
        f"Rank {rank} waited {timeout:.0f} s for {who} of {ranks} to make {what}, and gave up. Every rank must make "
        f"the mesh and the engine; see that rank's log: it was not started, is busy before that point, or is dead. "
        f"Raise `timeout` if it may take that long."
    )


def _all_arrive(store: Store, names: list[str], timeout: float) -> bool:
    """Whether all names are entered in time, before a rank fails; looks, because a store's wait writes warnings."""
    start, pause = time.monotonic(), SHORTEST
    while not store.check(names):
        waited = time.monotonic() - start
        if waited > timeout or (waited > PATIENCE and store.check(["failure"])):
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST)
    return True


@contextlib.contextmanager
def naming(rank: int, what: str) -> Iterator[None]:
    """Turn an error of torch in making `what` into a `CommError`."""
    try:
        yield
    except dist.DistError as error:
        raise CommError(
            f"Rank {rank} could not make {what} ({str(error).splitlines()[0]}): a rank was there and left, or its "
            f"address cannot be reached. Look at the logs of the other ranks, and run `zeroshard doctor`."
        ) from error
