"""The mesh: the ranks of some processes, and their process groups.

A mesh is some processes that split and reduce among themselves: all of them, or the replicas of one pipeline stage.
It is passed as an object; there is no global registry.
"""

import atexit
import contextlib
import ctypes
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_group, _get_default_store

from zeroshard.comm.heartbeat import Heartbeat
from zeroshard.comm.process_groups import Lease, is_open, lease, roll_call
from zeroshard.comm.rendezvous import connect, give_up, limit_waits, naming, wait_for_all
from zeroshard.comm.run_lock import Owner
from zeroshard.errors import BudgetExceeded, PlanError
from zeroshard.memory import find_rooms
from zeroshard.platform import accelerator
from zeroshard.platform.real import REAL, Platform
from zeroshard.traffic import LOANS, Purpose

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as in malloc.h
MOST = 2**30  # bytes
HEARD = 3.0  # seconds within which a waiting rank reads the store (more than hang_detector.PATIENCE)
CONNECTIONS = 384 * 2**20  # bytes of address space that the threads of the groups take, malloc's part included
WORLD = "the process group of all ranks"
CALLS: Counter[float] = Counter()  # calls of `shared_mesh`, by timeout
LISTENING = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # interfaces of the backends; by default that of the hostname
BLOCKING = "waits would block the host, so that no collective overlaps and no hang is found"
UNWATCHED = "a hang that only NCCL sees would never end"
TRUE = ("1", "y", "yes", "t", "true")  # as torch reads variables
# Variables of torch for NCCL, with the values that are refused, and the reason.
REFUSED = (
    *((name, TRUE, BLOCKING) for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")),
    *((name, ("0",), UNWATCHED) for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")),
)
CAUGHT = "caught"  # the key of an error in a pass after which a rank went on
SETTLE = 0.1  # seconds between the last collective and the end of the interpreter


@dataclass(frozen=True, slots=True)
class Mesh:
    """This process's rank among `ranks` processes.

    Attributes:
        rank: this process, 0 to ranks - 1.
        ranks: number of processes (N in the formulas).
        device: of parameters and activations.
        gathers: the process group in which parameters are gathered; None when there is one rank.
        reductions: the process group in which gradients are reduced; a second one, because gathers and reductions
            interleave differently on ranks that take different branches; None when there is one rank.
        control: a gloo group for the few bytes on the host on which ranks agree; None when there is one rank.
        store: the key-value store in which ranks publish long waits; None when there is one rank.
        failures: the store in which a rank that fails writes its error; in a part of a mesh, the one of the world.
        timeout: seconds that a collective may wait before it is an error.
        heartbeat: of this rank, for its supervisor; None without one.
        platform: this machine, or a rehearsed one.
        lease: keeps the groups ([Note: leases]).
        caught: the first error of this rank's passes after which it went on; empty without one ([Note: left passes]).
    """

    rank: int = 0
    ranks: int = 1
    device: torch.device = torch.device("cpu")
    gathers: dist.ProcessGroup | None = None
    reductions: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    store: Store | None = None
    failures: Store | None = None
    timeout: float = 300.0
    heartbeat: Heartbeat | None = None
    platform: Platform = REAL
    lease: Lease | None = field(default=None, repr=False, compare=False)
    caught: list[str] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise PlanError(
                f"The mesh has {self.ranks} ranks; it needs at least 1. Start the job with one process or more."
            )
        if not 0 <= self.rank < self.ranks:
            raise PlanError(f"Rank {self.rank} is outside a mesh of {self.ranks} ranks; ranks count from 0.")

    def now(self) -> float:
        """Seconds of the platform's clock."""
        return self.platform.now()

    def forget_errors(self) -> None:
        """Forget the errors of passes after which this rank went on."""
        if self.caught and self.failures is not None:
            with contextlib.suppress(dist.DistError):
                self.failures.delete_key(CAUGHT)
        self.caught.clear()

    def split(self, parts: Sequence[Sequence[int]]) -> "Mesh":
        """The mesh of this rank's part, for an engine on some of the ranks; a collective call of all ranks.

        Args:
            parts: the ranks of each part, such as [[0, 1, 2], [3]]: every rank in one of them.

        Raises:
            PlanError: a rank is in no part, or in several, or there is no such rank.
        """
        found = sorted(rank for part in parts for rank in part)
        if found != list(range(self.ranks)):
            raise PlanError(
                f"split({[list(part) for part in parts]!r}) has the ranks {found}, and each of the ranks 0 to "
                f"{self.ranks - 1} must be in one part. Put ranks without an engine of the kind into a part of their "
                f"own."
            )
        return part_of(self, parts, "split " + ",".join("-".join(map(str, part)) for part in parts))


SHARED: dict[float, Mesh] = {}  # by their timeouts


def attempt() -> int:
    """The number of restarts of this job after failures: by `zeroshard run`, else by torchrun.

    Raises:
        PlanError: the variable is no whole number.
    """
    for name in ("ZEROSHARD_ATTEMPT", "TORCHELASTIC_RESTART_COUNT"):
        if name in os.environ:
            if not os.environ[name].isdecimal():
                raise PlanError(f"{name} is {os.environ[name]!r}; it must be a whole number. Unset it.")
            return int(os.environ[name])
    return 0


def job() -> str:
    """The job's name through all its attempts: from `zeroshard run`, else from torchrun; empty without either."""
    return os.environ.get("ZEROSHARD_JOB", os.environ.get("TORCHELASTIC_RUN_ID", ""))


def owner() -> Owner:
    """The owner of this rank: the process that restarts it after a failure, or else itself."""
    pid = os.environ.get("ZEROSHARD_SUPERVISOR", "")
    agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    count = os.environ.get("SLURM_RESTART_COUNT", "")
    requeued = int(count) if count.isdecimal() else 0
    return Owner.of(int(pid) if pid.isdecimal() else agent, os.environ.get("SLURM_JOB_ID", ""), requeued)


def local_ranks() -> int | None:
    """Number of this job's ranks that the launcher started on this machine; None without a launcher."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(count) if count.isdecimal() and int(count) else None


def ranks_of_job() -> int:
    """Number of ranks of the launcher, or of an initialised process group; 1 without either.

    Raises:
        PlanError: the launcher's variables make no rank of a world.
    """
    if dist.is_initialized():
        return dist.get_world_size()
    place = _place()
    return 1 if place is None else place[1]


def stay_inside() -> None:
    """Make new process groups listen on the loopback address alone, for a job on one machine.

    Variables that the user has set stay as they are.
    """
    for name in LISTENING:
        os.environ.setdefault(name, "lo")


def user_cache() -> str:
    """The user's folder for caches (XDG base directories); empty if it is not set."""
    return os.environ.get("XDG_CACHE_HOME", "")


def init_mesh(timeout: float = 300.0, device: str | None = None) -> Mesh:
    """The mesh of this process: the launcher's environment, an initialised process group, or one process alone.

    Args:
        timeout: seconds that a collective may wait before it is an error.
        device: "cpu", "cuda" (ROCm too) or another accelerator's type by torch's name; by default an accelerator where
            there is one for every local rank.

    Raises:
        PlanError: the launcher's variables make no rank of a world, or the device is not available. CommError: a rank
            did not come within `timeout`.
        BudgetExceeded: too little address space for connections.
    """
    own_device, heartbeat = _device(device), _heartbeat()
    _check_variables(accelerator.backend(own_device))
    if not dist.is_initialized():
        place = _place()
        if place is None:
            return Mesh(device=own_device, timeout=timeout, heartbeat=heartbeat)
        accelerator.select(own_device)
        _join(accelerator.backend(own_device), timeout, *place)
    else:
        limit_waits(_get_default_store(), timeout)
    ranks = dist.get_world_size()
    if ranks == 1:
        return Mesh(device=own_device, timeout=timeout, heartbeat=heartbeat)
    mesh = mesh_of(list(range(ranks)), own_device, timeout, heartbeat)
    atexit.register(_leave, replace(mesh, gathers=None, reductions=None, control=None, lease=None))
    return mesh


def shared_mesh(timeout: float) -> Mesh:
    """The mesh of engines without one: one for all with this timeout, until an operation in it fails.

    A collective call, because the failure may have been on some ranks only. Raises what `init_mesh` raises.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        mesh = init_mesh(timeout)
        if mesh.ranks > 1:
            SHARED[timeout] = mesh
        return mesh
    CALLS[timeout] += 1
    known, rank, ranks, store = SHARED.get(timeout), dist.get_rank(), dist.get_world_size(), _get_default_store()
    key = f"zeroshard/shared_mesh/{timeout}/{CALLS[timeout]}"
    usable = known is not None and is_open(known.gathers) and not (known.lease and known.lease.broken)
    store.add(key, int(usable))
    roll_call(store, rank, ranks, partial(wait_for_all, store, rank, ranks, timeout, "an engine"))
    if known is None or store.add(key, 0) < ranks:
        known = SHARED[timeout] = init_mesh(timeout)
    return known


def _place() -> tuple[int, int] | None:
    """This rank and the number of ranks, from the launcher; None without one.

    Raises:
        PlanError: a variable is missing, or its value makes no rank of the world.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
    if len(missing) == 2 or (missing == ["RANK"] and _variable("WORLD_SIZE", 1) == 1):
        return None
    if missing:
        (given,) = {"RANK", "WORLD_SIZE"} - set(missing)
        raise PlanError(
            f"{given} is {os.environ[given]}, and {missing[0]} is not set, so this process would train alone. Start "
            f"the job with torchrun, which sets both; or unset {given}."
        )
    rank, ranks = _variable("RANK", 0), _variable("WORLD_SIZE", 1)
    if rank >= ranks:
        raise PlanError(
            f"RANK is {rank} and WORLD_SIZE {ranks}; ranks are numbered from 0 to {ranks - 1}. Start the job with "
            f"torchrun, which sets both."
        )
    return rank, ranks


def _variable(name: str, least: int) -> int:
    """A whole number from the launcher; `least` where it sets none."""
    value = os.environ.get(name, str(least))
    if not value.isdecimal() or int(value) < least:
        raise PlanError(f"{name} is {value}; it must be {least} or more. Start the job with torchrun.")
    return int(value)


def _join(backend: str, timeout: float, rank: int, ranks: int) -> None:
    """Make the process group of the whole world.

    [Note: a store outlives an attempt] A launcher that restarts its processes keeps the store, and with it the
    addresses of processes that are gone; a rank that reads one fails to connect. So each attempt has its own keys.
    """
    _check_address_space()
    place = (os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""))
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if local_ranks() == ranks:
        stay_inside()
    own = PrefixStore(f"attempt-{attempt()}", connect(place, rank, ranks, served, timeout))
    wait_for_all(own, rank, ranks, timeout, WORLD)
    with naming(own, rank, WORLD):
        dist.init_process_group(backend, store=own, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))


def _check_address_space() -> None:
    """Refuse a limit under which gloo's threads cannot start, where gloo would end the process without an error.

    Raises:
        BudgetExceeded: with the bytes left.
    """
    for room in find_rooms():
        if room.limit.startswith("RLIMIT_AS") and room.nbytes < CONNECTIONS:
            raise BudgetExceeded(
                f"The connections of several ranks need {CONNECTIONS:,} more bytes of address space; "
                f"{room.limit} leaves {max(0, room.nbytes):,}.",
                "Raise that limit or free memory, or train on one rank.",
            )


def _check_variables(backend: str) -> None:
    """Refuse variables with which NCCL would block the host, or never end.

    Raises:
        PlanError: with the variable and its value.
    """
    for name, values, why in REFUSED if backend == "nccl" else ():
        if os.environ.get(name, "").casefold() in values:
            raise PlanError(f"{name} is {os.environ[name]}, and {why}. Unset it.")


def _heartbeat() -> Heartbeat | None:
    """The heartbeat of this process; None without a supervisor."""
    path = os.environ.get("ZEROSHARD_HEARTBEAT")
    return Heartbeat(Path(path), _variable("RANK", 0)) if path else None


def mesh_of(members: list[int], device: torch.device, timeout: float, heartbeat: Heartbeat | None = None) -> Mesh:
    """The mesh of some processes of the initialised world, in the order of `members`.

    Every process of the world must call this with the same members, also those that are not among them (they get
    a mesh that they cannot use), because making a group is itself collective.
    """
    patience = timedelta(seconds=timeout + 30.0)  # Comm gives up first, with the names
    own_rank, name = dist.get_rank(), "-".join(map(str, members))
    store, what = PrefixStore(f"zeroshard/{name}", _get_default_store()), f"the process groups of ranks {name}"
    ranks = dist.get_world_size()
    roll_call(_get_default_store(), own_rank, ranks, partial(wait_for_all, store, own_rank, ranks, timeout, what))
    with naming(store, own_rank, what):
        gathers = dist.new_group(members, timeout=patience)
        reductions = dist.new_group(members, timeout=patience)
        control = dist.new_group(members, timeout=patience, backend="gloo")
    rank = members.index(own_rank) if own_rank in members else 0
    kept = lease(f"ranks {name}", (gathers, reductions, control))
    return Mesh(rank, len(members), device, gathers, reductions, control, store, store, timeout, heartbeat, lease=kept)


def part_of(mesh: Mesh, parts: Sequence[Sequence[int]], name: str) -> Mesh:
    """The mesh of this rank's part; all ranks of `mesh` call it with the same parts.

    Args:
        name: of the partition; separates keys of equal members of different partitions in the store.
    """
    members = next(part for part in parts if mesh.rank in part)
    if max(map(len, parts)) == 1:
        alone = Mesh(device=mesh.device, timeout=mesh.timeout, failures=mesh.failures, heartbeat=mesh.heartbeat)
        return replace(alone, platform=mesh.platform, caught=mesh.caught)
    if mesh.gathers is None:  # there are no process groups to make others from
        rank, platform = members.index(mesh.rank), mesh.platform.part(members)
        return Mesh(rank, len(members), mesh.device, timeout=mesh.timeout, platform=platform)
    assert mesh.store is not None
    world = [dist.get_global_rank(mesh.gathers, rank) for rank in members]
    patience = timedelta(seconds=mesh.timeout + 30.0)

    def group(backend: str | None) -> dist.ProcessGroup:
        # Torch names such a group by how many groups this process has, so a rank that is alone makes its own too.
        made: dist.ProcessGroup = dist.new_group(
            world, timeout=patience, backend=backend, use_local_synchronization=True
        )
        return made

    everyone = "-".join(map(str, dist.get_process_group_ranks(mesh.gathers)))
    what = f"the process groups of {name} among ranks {everyone}"
    wait = partial(wait_for_all, mesh.store, mesh.rank, mesh.ranks, mesh.timeout, what)
    roll_call(mesh.store, mesh.rank, mesh.ranks, wait, f"{mesh.lease.name}/") if mesh.lease else wait()
    with naming(mesh.store, mesh.rank, what):
        gathers, reductions, control = group(None), group(None), group("gloo")
    kept = lease(f"{mesh.lease.name if mesh.lease else everyone}/{name}", (gathers, reductions, control))
    if len(members) == 1:
        alone = Mesh(device=mesh.device, timeout=mesh.timeout, failures=mesh.failures, heartbeat=mesh.heartbeat)
        return replace(alone, lease=kept, caught=mesh.caught)
    store = PrefixStore(f"{name}/" + "-".join(map(str, members)), mesh.store)
    rank = members.index(mesh.rank)
    return Mesh(
        rank,
        len(members),
        mesh.device,
        gathers,
        reductions,
        control,
        store,
        mesh.failures,
        mesh.timeout,
        mesh.heartbeat,
        lease=kept,
        caught=mesh.caught,
    )


class MessageGroups:
    """The process groups of messages between the ranks of a mesh.

    [Note: messages in order] NCCL ignores the tags of messages, and those of two ranks in one group are one queue for
    both directions: a message does not begin before the other rank has begun the one before it. So a queue has messages
    of one engine, kind and direction, which both ends start in the order of the schedule. Activations go to the next
    stage, with several chunks from the last stage to the first too ("wraps"), and gradients the other way; weights are
    lent ("loans") at times of their own. gloo finds messages by their tags, so it needs no queues.

    Attributes:
        communicators: that NCCL has made for messages so far: the lease or the mesh, and the two ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._meshes = mesh, dict[str, Mesh]()
        self.communicators: set[tuple[int, str]] = set()

    def separate(self, kinds: Sequence[str]) -> None:
        """Give messages of these kinds ("neighbours", "wraps", "loans") groups of their own; a collective call.

        Raises:
            PlanError: the default group has one communicator for everything (it was made with `device_id`).
        """
        if self._mesh.gathers is not None and _get_default_group().bound_device_id is not None:
            raise PlanError(
                "The process group was made with device_id, so that NCCL has one communicator for each group, in which "
                "messages of a pipeline wait for each other in a circle. Leave device_id out of init_process_group(), "
                "or leave that call to zs.init_mesh()."
            )
        everyone = [list(range(self._mesh.ranks))]
        self._meshes = {kind: part_of(self._mesh, everyone, f"messages: {kind}") for kind in kinds}

    def of(self, ends: tuple[int, int], purpose: Purpose, backward: bool) -> dist.ProcessGroup | None:
        """The group of a message from the first of `ends` to the second."""
        source, destination = ends
        usual = "wraps" if (source > destination) != backward else "neighbours"
        kind = dict.fromkeys(LOANS, "loans").get(purpose, usual)
        mesh = self._meshes.get(kind, self._mesh)
        name = f"{min(ends)}:{max(ends)}{' backward' if backward else ''}"
        self.communicators.add((id(mesh.lease or mesh), name))
        return mesh.reductions if backward else mesh.gathers


def beside(mesh: Mesh, name: str) -> Mesh:
    """The same ranks and process groups, with numbers and waits of collectives under a name of their own."""
    return mesh if mesh.store is None else replace(mesh, store=PrefixStore(f"{name}/", mesh.store))


def wait_for_ranks(mesh: Mesh, what: str) -> None:
    """Wait until all ranks of a mesh call this for the same object.

    Raises:
        CommError: with the ranks that did not come in time.
    """
    if mesh.store is not None and mesh.gathers is not None:
        everyone = "-".join(map(str, dist.get_process_group_ranks(mesh.gathers)))
        wait_for_all(mesh.store, mesh.rank, mesh.ranks, mesh.timeout, f"{what} of ranks {everyone}")


def keep_freed_memory() -> None:
    """Make the C library keep memory that torch frees on the CPU: giving pages back takes new ones in every step.

    Fresh pages cost about nine times as much as used ones. glibc's own settings in the environment take precedence.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and not any(name.startswith("MALLOC_") for name in os.environ):
        libc.mallopt(M_MMAP_THRESHOLD, MOST)
        libc.mallopt(M_TRIM_THRESHOLD, MOST)


def announce_failure(mesh: Mesh, error: BaseException) -> bool:
    """Write this rank's failure into the store; returns whether it is the first to fail."""
    if mesh.failures is None:
        return True
    text = f"rank {mesh.rank} failed: {type(error).__name__}: {error}"
    try:
        return bool(mesh.failures.compare_set("failure", "", text).decode() == text)
    except dist.DistError:  # the store is gone or cannot be reached: announce twice rather than never
        give_up(mesh.failures)
        return True


def _leave(mesh: Mesh) -> None:
    """At the end of the process: announce an uncaught exception, else destroy the process groups in order."""
    error = getattr(sys, "last_value", None)
    if error is not None:
        announce_failure(mesh, error)
        sys.stdout.flush()
        sys.stderr.flush()
        if mesh.rank == 0 and mesh.heartbeat is None and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:
            assert mesh.failures is not None
            with contextlib.suppress(dist.DistError):
                mesh.failures.check(["failure"])  # a store that does not answer need not be kept alive
                time.sleep(HEARD)  # the store ends with this process, and the others read the failure in it
        os._exit(1)  # the end of the process groups would wait for peers that are gone
    elif dist.is_initialized():
        # gloo's threads drop their tensors a little after a result is there, and need Python's lock for it; one that
        # asks for the lock of an interpreter that is ending aborts the process.
        time.sleep(SETTLE)
        dist.destroy_process_group()


def _device(device: str | None) -> torch.device:
    return accelerator.pick(device, _variable("LOCAL_WORLD_SIZE", 1), _variable("LOCAL_RANK", 0))
