"""CPU load: processes that keep the other cores, caches and the memory busy while one rank's step is timed alone."""

import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

WIDTH, COPIED = 256, 2**21  # of the matrices; elements of a copy, larger than the caches


@contextmanager
def busy_cpus(count: int) -> Iterator[None]:
    """Inside, `count` processes compute as a rank does: matrix products and copies, one thread each."""
    with ExitStack() as stack:
        for _ in range(count):
            argv = [sys.executable, "-m", "zeroshard.doctor.cpu_load"]
            process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()  # the process has begun
        yield


def work() -> None:
    """Compute until the parent closes standard input."""
    torch.set_num_threads(1)
    a, b = torch.randn(4 * WIDTH, WIDTH), torch.randn(WIDTH, 4 * WIDTH)
    source, into = torch.zeros(COPIED), torch.zeros(COPIED)
    print("begun", flush=True)
    with torch.no_grad():
        while not select.select([sys.stdin], [], [], 0)[0]:  # the parent holds it open
            for _ in range(8):
                (a @ b).relu_()
            into.copy_(source).add_(1.0)


if __name__ == "__main__":
    work()
