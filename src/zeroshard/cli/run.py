"""The command `zeroshard run`: a job under a supervisor."""

import logging
import math
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zeroshard.errors import ConfigError
from zeroshard.train.option_values import check_least
from zeroshard.train.options import parse

if TYPE_CHECKING:
    from zeroshard.supervisor import Job

WAY_OUT = "write `zeroshard run [OPTIONS] -- train ...` or `zeroshard run [OPTIONS] -- script.py ...`"

CROWDED = 2  # processes per core above which a warning is printed


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Run a job on this machine under a supervisor: `zeroshard run [OPTIONS] -- train ...` or `-- script.py ...`.

    The supervisor starts one process per rank, notices when one dies, hangs or falls silent, names the culprit in a
    report, and starts all again from the last checkpoint. SIGTERM, SIGUSR1 and Ctrl-C let the job save and end with
    exit code 75. Start one supervisor on each node; under torchrun it looks after the one rank that torchrun started.
    """

    nproc_per_node: int | None = None
    """Processes on this node; by default one for each GPU, or one."""
    nnodes: int | None = None
    """Nodes; by default PET_NNODES or SLURM_NNODES, or one."""
    node_rank: int | None = None
    """Number of this node; by default PET_NODE_RANK, JOB_COMPLETION_INDEX or SLURM_NODEID."""
    master_addr: str | None = None
    """Address of node 0; by default PET_MASTER_ADDR, MASTER_ADDR or the head of SLURM's list."""
    master_port: int | None = None
    """Port of node 0's supervisor, where there are several nodes; by default PET_MASTER_PORT, MASTER_PORT or 29500."""
    max_restarts: int = 3
    """Restarts without a newer checkpoint in between."""
    timeout: float = 60.0
    """Seconds without a heartbeat of a rank, or without progress of any; longer than the longest step."""
    start_timeout: float = 600.0
    """Seconds without progress of any rank before the first step, and that nodes wait for each other."""
    linger: float = 10.0
    """Seconds that ranks may go on without progress when another has ended with exit code 0."""
    grace: float = 30.0
    """Seconds from a request to stop to the end, in which ranks save."""
    reports: Path = Path("runs/crashes")
    """Folder of the crash reports."""

    def __post_init__(self) -> None:
        check_least(self, {"nproc_per_node": 1, "nnodes": 1, "max_restarts": 0})
        for name, least in {"timeout": 2.0, "start_timeout": 2.0, "linger": 0.0, "grace": 0.0}.items():
            if not least <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be {least:g} seconds or more.")


def run_supervised(argv: Sequence[str]) -> None:
    """Run the command after `--` under a supervisor and exit with its code (see docs/supervisor.md).

    Raises:
        ConfigError: no command that can be supervised, or contradictory options of the nodes.
    """
    cut = argv.index("--") if "--" in argv else len(argv)
    options, command = parse(RunOptions, argv[:cut], "zeroshard run"), argv[cut + 1 :]
    check_command(command)
    from zeroshard.supervisor import Job, Limits, find_place, set_threads

    place = find_place(
        nproc_per_node=options.nproc_per_node,
        nnodes=options.nnodes,
        node_rank=options.node_rank,
        master_addr=options.master_addr,
        master_port=options.master_port,
    )
    warn_of_few_cores(place.processes, "--nproc-per-node")
    set_threads(place.processes)
    job = Job(
        command=tuple(command),
        place=place,
        limits=Limits(options.timeout, options.start_timeout, options.linger),
        max_restarts=options.max_restarts,
        grace=options.grace,
        reports=options.reports,
    )
    sys.exit(_supervised(job))


def run_ranks(ranks: int, argv: Sequence[str]) -> None:
    """Train on `ranks` processes of this machine, and exit with their code.

    They are started once, without a time limit besides the timeout of their collectives.
    """
    from zeroshard.supervisor import Job, Limits, Node, set_threads

    warn_of_few_cores(ranks, "--ranks")
    set_threads(ranks)
    limits, place = Limits(timeout=math.inf, linger=math.inf), Node(processes=ranks)
    job = Job(command=("train", *argv), place=place, limits=limits, max_restarts=0, grace=math.inf, reports=None)
    sys.exit(_supervised(job))


class _Lines(logging.Handler):
    """Shows the log of the supervisor on stderr, behind all that was printed before."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line."""
        sys.stdout.flush()
        print(f"zeroshard: {record.getMessage()}", file=sys.stderr, flush=True)


def _supervised(job: "Job") -> int:
    """The exit code of a job whose supervisor logs to the terminal."""
    from zeroshard.supervisor import supervise

    log, lines = logging.getLogger("zeroshard.supervisor"), _Lines()
    log.addHandler(lines)
    try:
        return supervise(job)
    finally:
        log.removeHandler(lines)


def warn_of_few_cores(processes: int, option: str) -> None:
    """Print a warning where many more processes are started than there are cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if processes > CROWDED * cores:
        print(
            f"zeroshard: warning: {processes} processes share {cores} core{'s' * (cores > 1)}: each gets "
            f"{cores / processes:.0%} of one, and takes about 300 MiB of memory besides the model; {option} {cores} "
            f"gives each its own.",
            file=sys.stderr,
            flush=True,
        )


def resuming(start: Sequence[str], job: Sequence[str], threads: str | None = None) -> str:
    """The shell command that resumes a run: the same options, and `--resume auto`.

    Args:
        start: the command that started the program, up to and with `train`.
        job: the options of the job.
        threads: the value of OMP_NUM_THREADS; None if it was not set.
    """
    before = ["", *job][: len(job)]
    kept = [w for b, w in zip(before, job, strict=True) if b != "--resume" and w.partition("=")[0] != "--resume"]
    return f"OMP_NUM_THREADS={threads} " * (threads is not None) + shlex.join([*start, *kept, "--resume", "auto"])


def program() -> list[str]:
    """The shell command that started this program."""
    script = Path(sys.argv[0])
    if script.name != "__main__.py":
        return [script.name] if shutil.which(script.name) == str(script) else [str(script)]
    python = next((name for name in ("python", "python3") if shutil.which(name) == sys.executable), sys.executable)
    return [python, "-m", "zeroshard"]


def check_command(command: Sequence[str]) -> None:
    """Refuse a command that a worker cannot run.

    Raises:
        ConfigError: no command, another one than train, or a script that does not exist.
    """
    if not command:
        raise ConfigError(f"There is nothing to run; {WAY_OUT}.")
    if command[0] == "train":
        return
    if not command[0].endswith(".py"):
        raise ConfigError(f"{command[0]!r} cannot be supervised; {WAY_OUT}.")
    if not Path(command[0]).is_file():
        raise ConfigError(f"There is no script {command[0]}; {WAY_OUT}.")
