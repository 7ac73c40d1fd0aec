"""Jobs of several ranks: scripts that run with what torchrun tells them, without the cost of new interpreters."""

import atexit
import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pool import copies, free_port

ROOT = Path(__file__).parents[1]
PATIENCE = 240.0  # seconds that a job may take
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}  # by which lightning knows that torchrun started the ranks


def error_of(call: Callable[[], Any]) -> str:
    """The class and message of what it raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def run_job(script: Path, *words: str, ranks: int = 2, patience: float = PATIENCE, **variables: str) -> str:
    """What a script with `words` behind its name and `variables` in its environment prints, rank after rank.

    Raises:
        AssertionError: with the traceback of a rank, if one failed.
    """
    context, answers = copies(), []
    pipes = [context.Pipe() for _ in range(ranks)]
    with free_port() as port:
        processes = [
            context.Process(target=_rank, args=((rank, ranks, port), [str(script), *words], variables, pipes[rank][1]))
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            for rank, (pipe, _) in enumerate(pipes):
                assert pipe.poll(patience), f"rank {rank} of {script.name} is not done after {patience:.0f} s"
                answers.append(pipe.recv())
        finally:
            for process in processes:
                process.kill()
                process.join()
    for rank, (good, text) in enumerate(answers):
        assert good, f"rank {rank} of {script.name}:\n{text}"
    return "".join(text for _, text in answers)


class Forks:
    """A process that forks the ranks of one job after the other.

    Unlike those of `run_job` they end as an interpreter ends, and may fail.

    Args:
        folder: where standard errors are written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        start = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("forked.py"))]
        clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        self._process = subprocess.Popen(
            start,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**clean, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        )

    def run(self, source: str, *words: str, ranks: int, port: int, seconds: int) -> list[tuple[int, str]]:
        """Exit code and standard error of each rank; one that takes longer than `seconds` is killed by SIGALRM."""
        job = {"source": source, "words": words, "ranks": ranks, "port": port, "seconds": seconds}
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None
        print(json.dumps({**job, "folder": str(self._folder)}), file=requests, flush=True)
        codes = json.loads(answers.readline())
        return [(code, (self._folder / f"{rank}").read_text()) for rank, code in enumerate(codes)]

    def stop(self) -> None:
        """End the process."""
        self._process.communicate()


def _rank(place: tuple[int, int, int], words: list[str], variables: dict[str, str], pipe: Any) -> None:
    rank, ranks, port = place
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"} | variables
    sys.path.insert(0, str(ROOT / "src"))
    sys.argv = words
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_path(words[0], run_name="__main__")
            atexit._run_exitfuncs()  # which multiprocessing leaves out
        pipe.send((True, output.getvalue()))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
