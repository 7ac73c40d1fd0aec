"""Which lines of the package each test runs, in whichever process: for `choose.py`, which says what this is for.

Every process of a run of tests imports this through its `sitecustomize`. A mapped file, shared by the processes of one
pytest worker, tells them which test runs (`numbered_tests.py` writes it); each writes a record for a line that it
comes to for the first time within a test. Only the first calls of a function within a test are followed.
"""

import mmap
import os
import struct
import sys
import threading
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = Path(__file__).parents[1] / "src" / "zeroshard"
FOLDER = "LINES_RUN"  # the environment variable that names the folder of records
WORKER = "PYTEST_XDIST_WORKER"
CALLS = 4  # of a function in a test that are followed
RECORD = struct.Struct("<IHH")  # number of the test, of the file, of the line


@cache
def numbers() -> dict[str, int]:
    """The number of each file of the package."""
    return {str(path): number for number, path in enumerate(sorted(PACKAGE.glob("**/*.py")))}


class Tracer:
    """What `sys.settrace` calls in a process."""

    def __init__(self, folder: Path, worker: str) -> None:
        self._file = os.open(folder / f"{worker}-{os.getpid()}.lines", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        number = os.open(folder / f"{worker}.number", os.O_RDWR | os.O_CREAT)
        os.ftruncate(number, 4)
        self.number = memoryview(mmap.mmap(number, 4)).cast("I")  # of the test that runs
        self._last = 0
        self._calls: dict[CodeType, int] = {}
        self._seen: set[tuple[int, int]] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        file = numbers().get(code.co_filename)
        if file is None or code.co_name == "<module>":
            return None
        if self._last != self.number[0]:
            self._last = self.number[0]
            self._calls.clear()
            self._seen.clear()
        self._calls[code] = self._calls.get(code, 0) + 1
        if self._calls[code] > CALLS:
            return None
        test = self._last

        def line(frame: FrameType, event: str, argument: object) -> Any:
            place = file, frame.f_lineno
            if event == "line" and place not in self._seen:
                self._seen.add(place)
                os.write(self._file, RECORD.pack(test, *place))
            return line

        return line


def begin() -> Tracer:
    """Follow this process and its threads."""
    tracer = Tracer(Path(os.environ[FOLDER]), os.environ.get(WORKER, "main"))
    threading.settrace(tracer)
    sys.settrace(tracer)
    return tracer
