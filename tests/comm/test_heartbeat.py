"""A heartbeat holds what was written into it, to other processes too, and survives a kill."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zeroshard.comm.heartbeat import (
    Collective,
    Heartbeat,
    HeartbeatReading,
    read_failure,
    read_heartbeat,
    write_failure,
)


def test_nothing_there(tmp_path: Path) -> None:
    assert read_heartbeat(tmp_path / "none") is None
    (tmp_path / "half").write_bytes(b"zsbeats1" + bytes(100))
    assert read_heartbeat(tmp_path / "half") is None
    (tmp_path / "unborn").write_bytes(bytes(512))  # the file is there before the rank has written its name
    assert read_heartbeat(tmp_path / "unborn") is None


def test_every_field(tmp_path: Path) -> None:
    before = time.monotonic()
    heartbeat = Heartbeat(tmp_path / "p", 3)
    fresh = read_heartbeat(tmp_path / "p")
    assert fresh is not None
    assert before <= fresh.since <= time.monotonic() and before <= fresh.alive <= time.monotonic()
    assert fresh == HeartbeatReading(rank=3, pid=os.getpid(), since=fresh.since, alive=fresh.alive)
    heartbeat.phase("validation")
    heartbeat.step(17)
    heartbeat.committed(10)
    heartbeat.start(("gather", 4, "block.1"))
    heartbeat.enter(("gather", 3, "block.0"))
    heartbeat.beat()
    found = read_heartbeat(tmp_path / "p")
    assert found is not None and found.since > fresh.since and found.alive > fresh.alive
    where = Collective("gather", 3, "block.0")
    assert found == HeartbeatReading(3, os.getpid(), 17, 10, "validation", True, where, found.since, found.alive)
    heartbeat.leave()
    left = read_heartbeat(tmp_path / "p")
    assert left is not None and (left.waiting, left.collective) == (False, where) and left.since > found.since
    heartbeat.close()


def test_opened_again_it_keeps_what_it_says(tmp_path: Path) -> None:
    first = Heartbeat(tmp_path / "p", 1)
    first.step(5)
    second = Heartbeat(tmp_path / "p", 1)
    second.committed(4)
    first.phase("saving")
    found = read_heartbeat(tmp_path / "p")
    assert found is not None and (found.step, found.committed, found.phase) == (5, 4, "saving")


@pytest.mark.parametrize("text, kept", [("x" * 100, "x" * 64), ("", ""), ("é" * 40, "é" * 32), ("a\0b", "a")])
def test_long_and_strange_texts_are_cut(tmp_path: Path, text: str, kept: str) -> None:
    heartbeat = Heartbeat(tmp_path / "p", 0)
    heartbeat.phase(text)
    heartbeat.start((text, 1, text * 9))
    found = read_heartbeat(tmp_path / "p")
    assert found is not None and found.phase == kept and found.rank == 0
    assert found.collective.number == 1 and len(found.collective.label.encode()) <= 200


def test_a_killed_process_leaves_its_heartbeat(tmp_path: Path) -> None:
    body = (
        "import sys, time; from pathlib import Path; from zeroshard.comm.heartbeat import Heartbeat\n"
        "p = Heartbeat(Path(sys.argv[1]), 2); p.step(9); p.enter(('reduce', 7, 'head')); print('up', flush=True)\n"
        "time.sleep(60)"
    )
    source = str(Path(__file__).parents[2] / "src")
    command = [sys.executable, "-c", body, str(tmp_path / "p")]
    environment = {**os.environ, "PYTHONPATH": source}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGKILL)
    found = read_heartbeat(tmp_path / "p")
    assert found is not None and (found.rank, found.pid, found.step) == (2, process.pid, 9)
    assert found.waiting and found.collective == ("reduce", 7, "head")


def test_last_words(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.heartbeat"
    assert read_failure(path) is None
    try:
        raise ValueError("seven\nlines")
    except ValueError as error:
        write_failure(path, error, first=False)
    words = read_failure(path)
    assert words is not None and (words.type, words.message, words.first) == ("ValueError", "seven\nlines", False)
    assert "test_heartbeat.py" in words.trace and words.when <= time.monotonic()
    path.with_suffix(".failure").write_text("{")
    assert read_failure(path) is None
    write_failure(tmp_path / "gone" / "rank-0.heartbeat", ValueError())  # the supervisor's folder is gone: no error
