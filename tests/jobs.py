"""Jobs of several ranks: scripts that run with what torchrun tells them, without the cost of new interpreters."""

import atexit
import contextlib
import io
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pool import copies, free_port

ROOT = Path(__file__).parents[1]
PATIENCE = 240.0  # seconds that a job may take


def error_of(call: Callable[[], Any]) -> str:
    """The class and message of what it raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def run_job(script: Path, *words: str, ranks: int = 2) -> str:
    """What a script with `words` behind its name prints, rank after rank.

    Raises:
        AssertionError: with the traceback of a rank, if one failed.
    """
    context, answers = copies(), []
    pipes = [context.Pipe() for _ in range(ranks)]
    with free_port() as port:
        processes = [
            context.Process(target=_rank, args=((rank, ranks, port), [str(script), *words], pipes[rank][1]))
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            for rank, (pipe, _) in enumerate(pipes):
                assert pipe.poll(PATIENCE), f"rank {rank} of {script.name} is not done after {PATIENCE:.0f} s"
                answers.append(pipe.recv())
        finally:
            for process in processes:
                process.kill()
                process.join()
    for rank, (good, text) in enumerate(answers):
        assert good, f"rank {rank} of {script.name}:\n{text}"
    return "".join(text for _, text in answers)


def _rank(place: tuple[int, int, int], words: list[str], pipe: Any) -> None:
    rank, ranks, port = place
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
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
