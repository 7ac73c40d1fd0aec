"""Memory that the system refuses is one clear error, whatever limit it is and wherever it is met."""

import errno
import os
import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import copies
from torch import nn

import zeroshard as zs
from zeroshard.comm.mesh import Mesh
from zeroshard.errors import BudgetExceeded
from zeroshard.validation.memory import check_machine, is_refusal

MIB = 2**20
ROOMS = (96, 200, 400, 700)  # MiB above what the process has
PATIENCE = 120.0


class Wide(nn.Module):
    """320 MiB of weights, so 640 MiB of states for Adam, and almost nothing to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(MIB) for _ in range(80))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((part * x).sum() for part in self.parts)


def train(model: nn.Module) -> str:
    """What two steps come to."""
    try:
        engine = zs.Engine(model, partial(torch.optim.AdamW, lr=1e-3), zs.Plan(units=()))
        for _ in range(2):
            engine.backward(engine(torch.ones(())))
            engine.step()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def within_address_space(pipe: Any) -> None:
    """Train once for each limit, each time in a process of its own."""
    model = Wide()
    for room in ROOMS:
        reader, writer = os.pipe()
        if os.fork() == 0:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + room * MIB,) * 2)
            os.write(writer, train(model).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as words:
            pipe.send(words.read())
        os.wait()


def of_several_ranks(pipe: Any) -> None:
    """Join as one of two ranks, with too little address space for gloo's threads."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOMS[0] * MIB,) * 2)
    pipe.send(train(nn.Linear(1, 1)))


def within_cgroup(pipe: Any, procs: str) -> None:
    """Train in a control group."""
    Path(procs).write_text(str(os.getpid()))
    pipe.send(train(Wide()))


def heard(target: Any, *args: Any, count: int = 1) -> list[str]:
    """What a process says."""
    context = copies()
    mine, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args))
    process.start()
    try:
        theirs.close()
        return [mine.recv() for _ in range(count) if mine.poll(PATIENCE)]
    finally:
        process.kill()
        process.join()


def test_limits_of_address_space() -> None:
    said = heard(within_address_space, count=len(ROOMS))
    assert len(said) == len(ROOMS)
    for room, words in zip(ROOMS, said, strict=True):
        assert words.startswith("BudgetExceeded: "), (room, words)
        assert "RLIMIT_AS (ulimit -v) of this process leaves " in words and "Raise that limit or free memory" in words


def test_connections_that_have_no_room() -> None:
    (words,) = heard(of_several_ranks)
    assert words.startswith(
        "BudgetExceeded: The connections of several ranks need 402,653,184 more bytes of address sp"
    )


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of version 2 or 1 that may hold 700 MiB."""
    for top, limit in (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")):
        folder = Path(top) / f"zeroshard-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / limit).exists():  # and not an ordinary folder
                (folder / limit).write_text(str(700 * MIB))
                yield folder
                return
        finally:
            folder.rmdir()
    pytest.skip("this machine lets nobody make a control group with a limit on memory")


def test_the_limit_of_a_control_group(group: Path) -> None:
    (words,) = heard(within_cgroup, str(group / "cgroup.procs"))
    assert words.startswith("BudgetExceeded: The optimizer's states need 671,088,640 more bytes of memory; memory.")
    assert f"of the cgroup /sys/fs/cgroup/{group.relative_to('/sys/fs/cgroup')} leaves" in words


@pytest.mark.parametrize(
    "error, refused",
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 16 bytes."), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("can't start new thread"), True),
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("shape '[2]' is invalid"), False),
    ],
)
def test_what_counts_as_refused(error: Exception, refused: bool) -> None:
    assert is_refusal(error) is refused


def test_what_the_machine_can_never_hold() -> None:
    with pytest.raises(BudgetExceeded, match=r"^The states need 1,152,921,504,606,846,976 more bytes of memory; "):
        check_machine(Mesh(), 2**60, "The states")
