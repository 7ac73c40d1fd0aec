"""The worker: a process forked from the fork server becomes one rank and runs the user's command."""

import atexit
import faulthandler
import multiprocessing
import os
import random
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing import process
from pathlib import Path

from zeroshard.comm.heartbeat import Heartbeat, write_failure
from zeroshard.supervisor import fork_server

BEAT = 0.5  # seconds between heartbeats
STACKS = ".stacks"  # suffix of a file beside the heartbeat


def work(environment: dict[str, str], command: Sequence[str]) -> None:
    """Run the command as the rank of `environment`, and exit with its code.

    The environment is an argument, because a forked process has the fork server's own.
    """
    fork_server.die_with(fork_server.PID)
    os.setsid()  # a process group of its own; the terminal signals the supervisor alone
    for number in fork_server.DEAF:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the supervisor turns it into SIGTERM
    signal.pthread_sigmask(signal.SIG_UNBLOCK, fork_server.DEAF)
    os.environ.clear()
    os.environ.update(environment)
    _be_main_process()
    path = Path(environment["ZEROSHARD_HEARTBEAT"])
    with open(path.with_suffix(STACKS), "w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR2, stacks, all_threads=True)
        heartbeat = Heartbeat(path, int(environment["RANK"]))
        threading.Thread(target=_beat, args=(heartbeat,), name="zeroshard heartbeat", daemon=True).start()
        _seed_afresh()
        code = _end(path, command)
        faulthandler.disable()
        faulthandler.unregister(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # another signal may be pending
    sys.exit(code)


def run_command(command: Sequence[str]) -> None:
    """Run `train ARGS` as the command line does, or `script.py ARGS` as Python does."""
    if command[0] == "train":
        sys.argv = ["zeroshard", *command]
        runpy.run_module("zeroshard", run_name="__main__", alter_sys=True)
        return
    script = Path(command[0])
    sys.argv = [str(script), *command[1:]]
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")


def _end(path: Path, command: Sequence[str]) -> int:
    """Run the command and then an interpreter's exit handlers; returns the exit code."""
    code = 0
    try:
        run_command(command)
    except SystemExit as end:
        code = _exit_code(end.code)
    except BaseException as error:
        write_failure(path, error)
        _show(error)
        sys.last_value = error  # as the interpreter does; mesh.py reads it to notify the other ranks
        code = 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()  # multiprocessing skips them in a forked process
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _show(error: BaseException) -> None:
    """Print the traceback from the user's first line on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    traceback.print_exception(error.with_traceback(trace or error.__traceback__))


def _exit_code(code: object) -> int:
    """An interpreter's exit code for an argument of `SystemExit`."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _be_main_process() -> None:
    """Reset multiprocessing to its state under `python script.py`: no parent process, no start method chosen.

    With the fork server's start method a script without a main guard would run again in its own children.
    """
    multiprocessing.set_start_method(None, force=True)
    process._parent_process = None  # type: ignore[attr-defined]
    process._current_process = fork_server.MAIN  # type: ignore[attr-defined]
    fork_server.MAIN.name = "MainProcess"  # the fork server has changed it
    sys.modules.pop("__mp_main__", None)


def _seed_afresh() -> None:
    """Seed as a fresh interpreter does; forked workers would all draw the same numbers."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _beat(heartbeat: Heartbeat) -> None:
    while True:
        heartbeat.beat()
        time.sleep(BEAT)
