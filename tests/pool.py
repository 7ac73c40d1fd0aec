"""One pool of worker processes that serves every multi-rank test.

A test sends a function of its own module, which runs on the first `ranks` workers with that many ranks' mesh; the
results come back in rank order. A worker that hangs or dies is replaced with the whole pool, and the test fails.
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WORLD = 4
SIZES = (2, 3, 4)
TIMEOUT = 20.0  # seconds that a collective may wait inside a test
PATIENCE = 240.0  # seconds that a whole test function may take on a machine that is busy with other things
GROUPS = 1000  # most process groups that one test makes: their names are not used again
STARTING = 240.0  # seconds that the workers may take to start
# What copies need not import again; torch imports its compiler where the first optimizer is made, in 1.5 s.
IMPORTED = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "pytest",
    "zeroshard",
    "zeroshard.engine",
    "zeroshard.train.run",
    "short_timings",
]
IMPORTED += ["transformers.models.llama.modeling_llama"]  # where there is transformers, by most tests of models


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Within, a rank that waits says where it is after a fifth of a second; the verdicts on it are the same."""
    from zeroshard.comm import collectives as comm
    from zeroshard.comm import hang_detector as watch

    kept = watch.PATIENCE
    comm.PATIENCE = watch.PATIENCE = 0.2
    try:
        yield
    finally:
        comm.PATIENCE = watch.PATIENCE = kept


def copies() -> Any:
    """The context of multiprocessing whose processes are copies of one that has imported torch and zeroshard."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """A port of 127.0.0.1 that the system gives to nobody else meanwhile; whoever is told of it may listen there."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


class WorkerError(AssertionError):
    """A worker raised; the message holds every rank's traceback."""

    def __init__(self, errors: dict[int, tuple[str, str, str]]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"--- rank {rank}\n{trace}" for rank, (_, _, trace) in errors.items()))


class Pool:
    """The workers, started on first use: `world` of them, which work together in groups of `sizes`.

    The first `apart` begin as interpreters of their own, unlike even in the order of a set of words, as in a real job;
    the others, and all after a failure, as copies of one process that has imported torch, in an eighth of the time.
    """

    def __init__(self, world: int = WORLD, sizes: tuple[int, ...] = SIZES, apart: int = 1) -> None:
        self._world, self._sizes, self._apart = world, sizes, apart
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._calls = 0

    def run(self, function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
        """Results of `function(mesh, *args)` on `ranks` ranks.

        Raises:
            WorkerError: with every rank's traceback, if any rank raised.
        """
        if not self._processes:
            self._start()
        self._calls += 1
        call = (self._calls, function.__module__, function.__qualname__, ranks, args)
        for pipe in self._pipes[:ranks]:
            pipe.send(call)
        answers: dict[int, Any] = {}
        for rank, pipe in enumerate(self._pipes[:ranks]):
            if not pipe.poll(PATIENCE):
                self.stop()
                raise AssertionError(f"rank {rank} did not answer within {PATIENCE:.0f} s")
            try:
                answers[rank] = pipe.recv()
            except EOFError:
                answers[rank] = (False, ("EOFError", "the worker died", "the worker died"))
        errors = {rank: answer for rank, (good, answer) in answers.items() if not good}
        if errors:
            if ranks > 1:
                self.stop()  # collectives may be left half done
                self._apart = 0
            raise WorkerError(errors)
        return [answers[rank][1] for rank in range(ranks)]

    def stop(self) -> None:
        """End all workers."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        with free_port() as port:
            for rank in range(self._world):
                context: Any = multiprocessing.get_context("spawn") if rank < self._apart else copies()
                here, there = context.Pipe()
                place = (rank, self._world, self._sizes, port)
                process = context.Process(target=_work, args=(place, there, [str(Path(__file__).parent)]), daemon=True)
                process.start()
                there.close()
                self._processes.append(process)
                self._pipes.append(here)
            for rank, pipe in enumerate(self._pipes):
                if not pipe.poll(STARTING):
                    self.stop()
                    raise AssertionError(f"rank {rank} has not started within {STARTING:.0f} s")
                assert pipe.recv() == "ready"


_ENDED: list[Any] = []  # groups of past tests, which somebody may still hold
LOOK = 0.2  # seconds between looks at whether anybody does
MANY = 6  # such groups, before garbage is collected for their sake


def _free_ended() -> None:
    """Free the groups of past tests, whose threads would wake up a hundred times a second, in a thread.

    gloo waits meanwhile for what is under way in a group, and tests leave things half done.
    """
    while True:
        time.sleep(LOOK)
        for place in reversed(range(len(_ENDED))):
            if sys.getrefcount(_ENDED[place]) == 2:  # the list's, and that of the call
                del _ENDED[place]


class _Names(dict[Any, str]):
    """Names of torch's groups. It names a group of some of the ranks by how many there are: those, and `more`."""

    more = 0

    def __len__(self) -> int:
        return super().__len__() + self.more


def _start_groups_afresh(names: _Names, kept: set[Any], number: int) -> None:
    """End the groups that the last test made, and let torch name new ones alike on all workers and unlike before."""
    import torch.distributed as dist

    from zeroshard.comm import process_groups as leases

    for group in [group for group in names if isinstance(group, dist.ProcessGroup) and group not in kept]:
        dist.destroy_process_group(group)
        _ENDED.append(group)
    for lease in [lease for lease, groups in leases._GROUPS.items() if not any(map(leases.is_open, groups))]:
        del leases._GROUPS[lease]
    if len(_ENDED) > MANY:
        gc.collect()  # engines of past tests, which hold their meshes in rings
        gc.freeze()  # what is left are imports, which the next collection need not look through
    names.more += max(0, GROUPS * number - len(names))  # workers are in groups of different numbers


def _share_a_device() -> None:
    """Let all groups of this process share a device of gloo, whose thread wakes up a hundred times a second."""
    import torch.distributed.distributed_c10d as c10d

    group = c10d.ProcessGroupGloo
    device = group.create_default_device()

    class OfOneDevice(group):  # type: ignore[misc, valid-type]
        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            options = group._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = OfOneDevice  # type: ignore[misc]


def _work(place: tuple[int, int, tuple[int, ...], int], pipe: Any, path: list[str]) -> None:
    rank, world, sizes, port = place
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path[:0] = path
    import torch
    import torch.distributed as dist
    from plain_adam import adam_as_in_engines

    from zeroshard.comm.mesh import Mesh, mesh_of

    torch.set_num_threads(1)
    adam_as_in_engines()
    _share_a_device()
    torch.manual_seed(1000 + rank)  # tests that need equal random numbers on all ranks must ask for them
    names = dist.distributed_c10d._pg_names = _Names()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    meshes = {1: Mesh(timeout=TIMEOUT)}
    for size in sizes:
        meshes[size] = mesh_of(list(range(size)), torch.device("cpu"), TIMEOUT)
    kept = set(names)
    threading.Thread(target=_free_ended, name="free groups", daemon=True).start()
    gc.freeze()  # what is imported is not looked through again and again
    pipe.send("ready")
    last = ""
    while True:
        try:
            number, module, name, ranks, args = pipe.recv()
        except EOFError:
            return
        _start_groups_afresh(names, kept, number)
        try:
            target: Any = importlib.import_module(module)
            if module != last:
                last = module
                gc.collect()
                gc.freeze()  # imports of this module and of models that its tests need
            for part in name.split("."):
                target = getattr(target, part)
            pipe.send((True, target(meshes[ranks], *args)))
        except BaseException as error:
            pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))
