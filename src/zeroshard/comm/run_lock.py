"""The lock of a run folder: a file in it names a process, and holds for as long as that process lives.

A rank names the process that would restart it, so that no other run takes the folder between two attempts. Only on its
own machine can a process be checked, by its id and its start time, because ids are used again.
"""

import contextlib
import fcntl
import getpass
import json
import os
import shlex
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import psutil

from zeroshard.errors import ConfigError

HELD = ".lock"  # suffix of a link beside a rank's heartbeat, to the lock that it took
SLACK = 30.0  # seconds by which two readings of one process's start may differ, where the clock was set meanwhile


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that works in a folder.

    Attributes:
        started: start of the process, in seconds since 1970.
        job: id of a cluster's job, which may start again on other machines but never runs twice at a time; or empty.
        requeued: number of those starts.
    """

    user: str
    pid: int
    host: str
    started: float
    job: str = ""
    requeued: int = 0

    @classmethod
    def of(cls, pid: int, job: str = "", requeued: int = 0) -> "Owner":
        """The owner for a living process of this machine."""
        return cls(_user(), pid, socket.gethostname(), _started(pid) or 0.0, job, requeued)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        return f"process {self.pid} of {self.user} on {self.host}, which started at {since}"

    def is_same(self, other: "Owner") -> bool:
        """Whether both are one process."""
        return (self.host, self.pid) == (other.host, other.pid) and abs(self.started - other.started) <= SLACK

    def is_gone(self, seen_by: "Owner") -> bool:
        """Whether the process has certainly ended."""
        if self.job and self.job == seen_by.job and self.requeued < seen_by.requeued:
            return True
        if self.host != seen_by.host:
            return False
        try:
            started = _started(self.pid)
        except psutil.AccessDenied:  # it lives, under another user
            return False
        return started is None or abs(self.started - started) > SLACK


def hold(path: Path, mine: Owner) -> None:
    """Record `mine` as the owner, unless another process that may live is the owner.

    Raises:
        ConfigError: another process holds the lock.
        OSError: the file cannot be written.
    """
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # so that reading and writing are one operation
        except BlockingIOError:
            raise ConfigError(f"{path.parent} is taken by another run at this moment; {OTHER_RUN}.") from None
        except OSError:
            pass  # a file system without locks: two that start in the same instant are not distinguished
        other = _read(file)
        if other is not None and not other.is_same(mine) and not other.is_gone(mine):
            way_out = OTHER_RUN
            if other.host != mine.host:
                way_out = (
                    f"{mine.host} cannot see whether it lives: if that run is gone, remove the file with "
                    f"`rm {shlex.quote(str(path))}`; else {OTHER_RUN}"
                )
            raise ConfigError(f"{path.parent} is held by {other}; {way_out}.")
        file.truncate(0)
        file.write(json.dumps(asdict(mine)))


def release(path: Path, mine: Owner) -> None:
    """Empty the lock, if `mine` holds it."""
    with contextlib.suppress(OSError), path.open("r+", encoding="utf-8") as file:
        other = _read(file)
        if other is not None and other.is_same(mine):
            file.truncate(0)


OTHER_RUN = "wait for it, stop it, or start a run of its own with --resume never"


def _read(file: TextIO) -> Owner | None:
    """The owner in a file; None for an empty file, and for one that was cut off."""
    file.seek(0)
    try:
        fields = json.loads(file.read())
        texts, numbers = (fields["user"], fields["host"], fields["job"]), (fields["pid"], fields["requeued"])
        if all(type(w) is str for w in texts) and all(type(w) is int for w in numbers):
            return Owner(**{**fields, "started": float(fields["started"])})
    except (ValueError, TypeError, KeyError):
        pass
    return None


def _started(pid: int) -> float | None:
    """The start of a process of this machine; None if there is none."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())
