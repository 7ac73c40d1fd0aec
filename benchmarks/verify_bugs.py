"""Published bugs, each put into the engine of all ranks: what `zs.verify` says of it, and in how many seconds.

    python benchmarks/verify_bugs.py [--bugs NAME ...] [--screens]

The bugs are those of `tests/verification/injected.py`. Each is verified from the start of its processes on; the plain
loop in this process has no bug. The exit status is 1 if one was not named by its module within 60 seconds.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from verification.injected import BUGS  # noqa: E402
from verification.test_injected import CASES  # noqa: E402

from zeroshard.verification.run import verify_jobs  # noqa: E402

LIMIT = 60.0  # seconds
ENTERED: list[AbstractContextManager[None]] = []  # which undo themselves when they are freed


def broken(bug: str, factory: Callable[[], nn.Module]) -> nn.Module:
    """The model, on a rank under the plan in an engine that has the bug from here on."""
    if dist.is_initialized():
        ENTERED.append(BUGS[bug](dist.get_rank()))
        ENTERED[-1].__enter__()
    return factory()


def main() -> int:
    """Verify each, and print a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bugs", nargs="+", choices=list(BUGS), default=list(BUGS), metavar="NAME")
    parser.add_argument("--screens", action="store_true", help="print each screen")
    options = parser.parse_args()
    named = 0
    for bug in options.bugs:
        job, module, _, _ = CASES[bug]
        began = time.monotonic()
        (found,) = verify_jobs([replace(job, factory=partial(broken, bug, job.factory))])
        seconds = time.monotonic() - began
        if isinstance(found, Exception):
            raise found
        assert found.first is not None, f"{bug} was not found:\n{found}"
        named += found.first.module.startswith(module) and seconds <= LIMIT
        print(f"{bug:<28} {seconds:5.1f} s  {found.first.module:<16} {found.first.collective or '-'}", flush=True)
        if options.screens:
            print(f"\n{replace(found, seconds=seconds)}\n")
    print(f"{named} of {len(options.bugs)} named by module within {LIMIT:.0f} s")
    return int(named < len(options.bugs))


if __name__ == "__main__":
    sys.exit(main())
