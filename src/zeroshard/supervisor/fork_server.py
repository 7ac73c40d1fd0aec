"""The fork server, with all modules loaded, so that its forked workers start in milliseconds.

The supervisor lets multiprocessing's fork server import this module. The import sets that process up: it dies with the
supervisor, and signals to the supervisor's group do not reach it, because the supervisor signals the workers itself. In
any other process the import has no effect.
"""

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal

from zeroshard.platform.imports import kept_imports

VARIABLE = "ZEROSHARD_FORK_SERVER"  # the environment variable with the supervisor's process id
LOADED = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "zeroshard",
    "zeroshard.cli.rank",
    "zeroshard.supervisor.worker",
)
DEAF = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1  # as in linux/prctl.h


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Request a signal from the kernel when process `parent`, the parent of this one, ends; now if it has."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def _settle() -> None:
    die_with(int(os.environ[VARIABLE]))
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, DEAF)  # signals to a worker stay pending until it is ready
    for number in (*DEAF, signal.SIGUSR2):  # SIGUSR2 is ignored until a worker can write its stacks
        signal.signal(number, signal.SIG_IGN)
    with kept_imports():
        for name in LOADED:
            with contextlib.suppress(ImportError):  # the worker imports it again, and reports the error
                importlib.import_module(name)


if os.environ.get(VARIABLE) == str(os.getppid()):
    _settle()
MAIN = multiprocessing.current_process()  # as in a process that was not forked
PID = os.getpid()  # of the fork server, also in the processes that it forks
