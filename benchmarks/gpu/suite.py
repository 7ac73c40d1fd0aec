"""`tests/engine/test_cuda.py` as a slice: counts by outcome, and the tests that failed.

    python benchmarks/gpu/suite.py [--cpu] [--json FILE] [words of pytest]

Several processes share the tests where pytest-xdist is installed. The exit status is pytest's, and 1 if no test passed;
under `--cpu`, where every test is skipped for want of a GPU, that is expected.
"""

import argparse
import os
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.append(str(Path(__file__).parents[1]))
from facts import TESTED
from ranks import keep

ROOT = Path(__file__).resolve().parents[2]
QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # where a caller has imported plugins already
PROCESSES = 8  # at most, that share one GPU; each keeps about half a GB of it


class Outcomes:
    """A plugin of pytest that keeps outcomes and failures."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: list[dict[str, str]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a test once: by its call, or by its set-up where that was skipped or failed."""
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.failed:
            self.failed.append({"test": report.nodeid, "why": report.longreprtext[-2000:]})


def main() -> int:
    """Run, print, keep."""
    import pytest
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    options, words = parser.parse_known_args()
    os.chdir(ROOT)
    outcomes = Outcomes()
    command = ["tests/engine/test_cuda.py", "-q", "-p", "no:cacheprovider", *QUIET, *words]
    cores = min(PROCESSES, os.cpu_count() or 1)
    if find_spec("xdist") and "--cpu" not in words:
        command += [f"--numprocesses={cores}"]
    if tuple(map(int, torch.__version__.split(".")[:2])) < TESTED:
        command += ["-o", "filterwarnings=default"]  # an older torch's own code warns
    code = int(pytest.main([word for word in command if word != "--cpu"], plugins=[outcomes]))
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.counts.items())) or "no test ran")
    for each in outcomes.failed:
        print(f"FAILED {each['test']}\n{each['why'].splitlines()[-1] if each['why'] else ''}")
    keep({"counts": outcomes.counts, "failed": outcomes.failed}, options.json)
    return code or int("--cpu" not in words and not outcomes.counts["passed"])


if __name__ == "__main__":
    sys.exit(main())
