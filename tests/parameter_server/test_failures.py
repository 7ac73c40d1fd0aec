"""A worker or a server that ends too early is an error on all others within seconds, and says why."""

from collections.abc import Iterator

import pytest
from jobs import Forks

SECONDS = 120  # to start, to fail and to end; a collective may wait for 300
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


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Starts the runs, in which one rank ends early."""
    started = Forks(tmp_path_factory.mktemp("errors"))
    yield started
    started.stop()


def launch(forks: Forks, port: int, ranks: int, where: int, how: str) -> list[tuple[int, str]]:
    """Exit code and standard error of each rank of a run in which rank `where` ends early."""
    return forks.run(PROGRAM, str(where), how, ranks=ranks, port=port, seconds=SECONDS)


def test_a_worker_dies_and_the_others_who_wait_for_it_stop(forks: Forks, port: int) -> None:
    *others, (code, _) = launch(forks, port, 3, 2, "dies")
    assert code == 3
    for code, error in others:
        assert code == 1
        assert "worker 2 is gone before its finish()" in error.strip().splitlines()[-1]


def test_the_rank_with_the_server_dies_and_the_worker_stops(forks: Forks, port: int) -> None:
    (code, _), (other, error) = launch(forks, port, 2, 0, "dies")
    assert (code, other) == (3, 1)
    assert "CommError: Rank 1 stopped in" in error


def test_the_rank_with_the_server_raises_and_ends_as_any_python_does(forks: Forks, port: int) -> None:
    """Its threads do not abort the interpreter, and the worker quotes it."""
    answers = launch(forks, port, 2, 0, "raises")
    assert [code for code, _ in answers] == [1, 1]
    assert "ValueError: out of luck" in answers[0][1]
    assert "ValueError: out of luck" in answers[1][1]


def test_a_rank_that_forgets_to_finish_is_told_of(forks: Forks, port: int) -> None:
    (code, error), (other, _) = launch(forks, port, 2, 1, "leaves")
    assert (code, other) == (1, 0)
    assert "rank 1 failed: CommError: the process ended before its finish()" in error
