"""What the process that forks the workers has loaded, so that a worker starts in milliseconds.

The supervisor has it imported there. It settles that process then: it dies with the supervisor, and a signal to the
supervisor's group does not touch it, because the supervisor decides what the workers are told. Nothing happens where
another process imports this module.
"""

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal

VARIABLE = "ZEROSHARD_NURSERY"  # names the supervisor's process to the one that it starts
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
    """Let the kernel send this process a signal when its parent, which is process `parent`, ends; now if it has."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def _settle() -> None:
    die_with(int(os.environ[VARIABLE]))
    os.setsid()
    for number in (*DEAF, signal.SIGUSR2):  # the last until a worker can write its stacks
        signal.signal(number, signal.SIG_IGN)
    for name in LOADED:
        with contextlib.suppress(ImportError):  # the worker meets it again, where somebody hears it
            importlib.import_module(name)


if os.environ.get(VARIABLE) == str(os.getppid()):
    _settle()
MAIN = multiprocessing.current_process()  # as a process sees itself that no other has forked
PID = os.getpid()  # of the process that forks, as its children see it
