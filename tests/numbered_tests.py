"""A plugin of pytest that numbers the tests for `lines_run.py`, and notes the seconds that each takes."""

import os
import sys
from pathlib import Path
from typing import Any

from lines_run import FOLDER, WORKER, begin


class OfTests:
    """The tests of one worker of pytest."""

    def __init__(self) -> None:
        self._tracer = begin()
        self._times = (Path(os.environ[FOLDER]) / f"{os.environ[WORKER]}.times").open("a", buffering=1)
        self._seconds = 0.0

    def pytest_runtest_logstart(self) -> None:
        """Tell all processes of the worker that another test runs."""
        self._tracer.number[0] += 1
        self._seconds = 0.0
        sys.settrace(self._tracer)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add the time of setting up, of the test, or of tearing down."""
        self._seconds += report.duration

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Write the test's number, seconds and id."""
        self._times.write(f"{self._tracer.number[0]}\t{self._seconds:.3f}\t{nodeid}\n")


def pytest_configure(config: Any) -> None:
    """Number the tests where they run."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(OfTests())
