"""A worker or a server that ends too early is an error on all others within seconds, and says why."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 60  # to start, to fail and to end; a collective may wait for 300
PROGRAM = """
import os, sys
from functools import partial
import torch
import zeroshard as zs

torch.set_num_threads(1)
where, how = int(sys.argv[1]), sys.argv[2]
model = torch.nn.Linear(3, 1)
trainer = zs.AsynchronousTrainer(model, partial(torch.optim.SGD, lr=0.1), staleness=0)
for number in range(1000):
    model(torch.ones(3)).sum().backward()
    if number == 2 and trainer.mesh.rank == where:
        if how == "dies":
            os._exit(3)
        if how == "raises":
            raise ValueError("out of luck")
        sys.exit(0)
    trainer.step()
"""


def launch(port: int, ranks: int, where: int, how: str) -> list[tuple[int, str]]:
    """Exit code and standard error of each rank of a run in which rank `where` ends early."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(where), how],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **place, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        errors = [process.communicate(timeout=SECONDS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


def test_a_worker_dies_and_the_others_who_wait_for_it_stop(port: int) -> None:
    *others, (code, _) = launch(port, 3, 2, "dies")
    assert code == 3
    for code, error in others:
        assert code == 1
        assert "worker 2 is gone before its finish()" in error.strip().splitlines()[-1]


def test_the_rank_with_the_server_dies_and_the_worker_stops(port: int) -> None:
    (code, _), (other, error) = launch(port, 2, 0, "dies")
    assert (code, other) == (3, 1)
    assert "CommError: Rank 1 stopped in" in error


def test_the_rank_with_the_server_raises_and_ends_as_any_python_does(port: int) -> None:
    """Its threads do not abort the interpreter, and the worker quotes it."""
    answers = launch(port, 2, 0, "raises")
    assert [code for code, _ in answers] == [1, 1]
    assert "ValueError: out of luck" in answers[0][1]
    assert "ValueError: out of luck" in answers[1][1]


def test_a_rank_that_forgets_to_finish_is_told_of(port: int) -> None:
    (code, error), (other, _) = launch(port, 2, 1, "leaves")
    assert (code, other) == (1, 0)
    assert "rank 1 failed: CommError: the process ended before its finish()" in error
