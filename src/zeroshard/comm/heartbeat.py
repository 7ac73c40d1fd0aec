"""The heartbeat of one rank: a small file, mapped into memory, with the rank's step, phase and collective.

The rank writes it as it runs; its supervisor reads it, also after the rank was killed. Times are those of
`time.monotonic`, which all processes of one machine share. Numbers are written whole; a text that is read while it is
written may be cut, which is harmless: decisions need a heartbeat that has not changed for seconds.
"""

import json
import mmap
import os
import struct
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

NBYTES = 512
_BORN, _ALIVE, _MAIN, _PHASE, _COLLECTIVE = (struct.Struct(f) for f in ("8sqq", "d", "d", "64s", "qq48s200s"))
_STEP = struct.Struct("q")
_AT_BORN, _AT_ALIVE, _AT_SINCE, _AT_STEP, _AT_COMMITTED, _AT_PHASE, _AT_COLLECTIVE = 0, 24, 32, 40, 48, 64, 128
_MAGIC = b"zsbeats1"


class Collective(NamedTuple):
    """A collective: its group, its number there (from 1; 0 for none yet), and its name."""

    group: str = ""
    number: int = 0
    label: str = ""


@dataclass(frozen=True, slots=True)
class HeartbeatReading:
    """The contents of a heartbeat when it was read.

    Attributes:
        rank: of the process.
        pid: of the process.
        step: the last finished step, from 1; -1 before the first.
        committed: step of the newest committed checkpoint on this rank; -1 for none.
        phase: present activity, in a few words.
        waiting: whether the main thread waits for `collective`.
        collective: the last one started or waited for.
        since: time of the main thread's last entry (monotonic seconds).
        alive: time of the last beat (monotonic seconds).
    """

    rank: int
    pid: int
    step: int = -1
    committed: int = -1
    phase: str = ""
    waiting: bool = False
    collective: Collective = Collective()
    since: float = 0.0
    alive: float = 0.0


@dataclass(frozen=True, slots=True)
class Failure:
    """The error that stopped a rank, as the rank wrote it.

    Attributes:
        type: the exception's class.
        message: the exception's text.
        first: whether the rank counts itself as the first to fail.
        when: monotonic seconds.
        trace: the traceback as text.
        code: with which the rank is about to exit.
    """

    type: str
    message: str
    first: bool
    when: float
    trace: str = ""
    code: int = 1


class Heartbeat:
    """The writing end, in the rank's own process.

    Args:
        path: the file; made if it does not exist, and otherwise kept with its contents.
        rank: of this process.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            if os.fstat(file.fileno()).st_size != NBYTES:
                file.truncate(NBYTES)
            self._map = mmap.mmap(file.fileno(), NBYTES)
        if bytes(self._map[: len(_MAGIC)]) != _MAGIC:
            for at in (_AT_STEP, _AT_COMMITTED):
                _STEP.pack_into(self._map, at, -1)
            self.beat()
            self._changed()
            _BORN.pack_into(self._map, _AT_BORN, _MAGIC, rank, os.getpid())  # last, as the mark of a complete file

    def beat(self) -> None:
        """Record that the process runs; called by a thread of its own."""
        _ALIVE.pack_into(self._map, _AT_ALIVE, time.monotonic())

    def phase(self, text: str) -> None:
        """Record the main thread's activity; the same activity again counts as progress."""
        _PHASE.pack_into(self._map, _AT_PHASE, text.encode()[: _PHASE.size])
        self._changed()

    def step(self, n: int) -> None:
        """Record that step `n` is finished, counted from 1 over the whole run."""
        _STEP.pack_into(self._map, _AT_STEP, n)
        self._changed()

    def committed(self, n: int) -> None:
        """Record the step of the newest committed checkpoint."""
        _STEP.pack_into(self._map, _AT_COMMITTED, n)
        self._changed()

    def start(self, collective: tuple[str, int, str]) -> None:
        """Record a collective (group, number, label) that was started; the main thread goes on."""
        self._write(0, collective)

    def enter(self, collective: tuple[str, int, str]) -> None:
        """Record that the main thread waits for a collective (group, number, label)."""
        self._write(1, collective)

    def leave(self) -> None:
        """Record the end of the wait."""
        _STEP.pack_into(self._map, _AT_COLLECTIVE, 0)
        self._changed()

    def close(self) -> None:
        """Unmap the file; it stays."""
        self._map.close()

    def _write(self, waiting: int, collective: tuple[str, int, str]) -> None:
        group, number, label = collective
        _COLLECTIVE.pack_into(self._map, _AT_COLLECTIVE, waiting, number, group.encode(), label.encode())
        self._changed()

    def _changed(self) -> None:
        _MAIN.pack_into(self._map, _AT_SINCE, time.monotonic())


def read_heartbeat(path: Path) -> HeartbeatReading | None:
    """The contents of the heartbeat at `path`; None while there is none."""
    try:
        blob = path.read_bytes()
    except OSError:
        return None
    if len(blob) != NBYTES or not blob.startswith(_MAGIC):
        return None
    _, rank, pid = _BORN.unpack_from(blob, _AT_BORN)
    waiting, number, group, label = _COLLECTIVE.unpack_from(blob, _AT_COLLECTIVE)
    return HeartbeatReading(
        rank=rank,
        pid=pid,
        step=_STEP.unpack_from(blob, _AT_STEP)[0],
        committed=_STEP.unpack_from(blob, _AT_COMMITTED)[0],
        phase=_text(_PHASE.unpack_from(blob, _AT_PHASE)[0]),
        waiting=bool(waiting),
        collective=Collective(_text(group), number, _text(label)),
        since=_MAIN.unpack_from(blob, _AT_SINCE)[0],
        alive=_ALIVE.unpack_from(blob, _AT_ALIVE)[0],
    )


def write_failure(path: Path, error: BaseException, first: bool = True, code: int = 1, said: str | None = None) -> None:
    """Write the failure of this rank beside the heartbeat at `path`; a file that cannot be written is skipped.

    Args:
        said: the message in the words of the command line; the error's own by default.
    """
    trace = "".join(traceback.format_exception(error))
    failure = Failure(type(error).__name__, str(error) if said is None else said, first, time.monotonic(), trace, code)
    part = path.with_suffix(".part")
    try:
        part.write_text(json.dumps(asdict(failure)), encoding="utf-8")
        part.rename(path.with_suffix(".failure"))
    except OSError:
        return  # the supervisor's folder is gone, or the disk is full; the exit code remains


def read_failure(path: Path) -> Failure | None:
    """The failure that the rank with the heartbeat at `path` wrote; None if it wrote none."""
    try:
        return Failure(**json.loads(path.with_suffix(".failure").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _text(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode(errors="ignore")
