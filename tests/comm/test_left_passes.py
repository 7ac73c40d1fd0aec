"""Counts of the passes that a rank left, and the errors of ranks that left unlike numbers."""

import pytest
from pool import Pool

from zeroshard.comm.collectives import Comm
from zeroshard.comm.disagreement import disagreement
from zeroshard.comm.left_passes import SHOWN, LeftPasses
from zeroshard.comm.mesh import Mesh, beside
from zeroshard.comm.pending import Position
from zeroshard.errors import CommError


class Answers:
    """The errors that all ranks remember."""

    def __init__(self, answers: list[list[str]]) -> None:
        self.answers = answers

    def agree_on(self, value: list[str], label: str) -> list[list[str]]:
        assert value in self.answers
        return self.answers


def test_a_forward_counts_until_a_backward_comes_through_it() -> None:
    passes = LeftPasses(Mesh())
    passes.begin(True, 0)
    passes.begin(True, 0)
    assert passes.left == 2
    passes.reach(1)
    passes.end()
    assert passes.left == 1
    passes.end()  # of a loss without an output
    assert passes.left == 0
    passes.end()
    assert passes.left == 0


def test_forwards_in_evaluation_mode_count_once_one_has_had_a_backward() -> None:
    passes = LeftPasses(Mesh())
    passes.begin(False, 0)
    assert passes.left == 0
    passes.begin(False, 0)
    passes.reach(2)
    passes.end()
    assert passes.left == 1


def test_forwards_before_an_update_stay_counted() -> None:
    passes = LeftPasses(Mesh())
    passes.begin(True, 0)
    passes.begin(True, 1)
    passes.reach(2)
    passes.end()
    assert passes.left == 1


def test_a_backward_that_ends_in_an_error_counts_once_with_its_forward() -> None:
    passes = LeftPasses(Mesh())
    passes.begin(True, 0)
    passes.interrupt()  # before it came to the output
    assert passes.left == 1
    passes.begin(True, 0)
    passes.reach(2)
    passes.interrupt()
    assert passes.left == 2


def test_a_discarded_batch_counts_once() -> None:
    passes = LeftPasses(Mesh())
    for number in range(3):
        for _ in range(number):
            passes.begin(True, 0)
        passes.leave()
        assert passes.left == number + 1


def test_a_failed_step_counts_once_and_keeps_its_error() -> None:
    mesh = Mesh()
    passes, dropped, caught = LeftPasses(mesh), list[int](), mesh.caught

    def step(error: Exception) -> None:
        with passes.train_step(lambda: dropped.append(passes.left), Mesh()):
            passes.begin(True, 0)
            raise error

    passes.begin(True, 0)
    for error in (ValueError("a\nb"), KeyError("later"), CommError("of another rank")):
        with pytest.raises(type(error)):
            step(error)
    assert passes.left == 4
    assert dropped == [2, 3]
    assert caught == ["ValueError: a"]
    passes.restart()
    assert passes.left == 0
    assert not caught


def test_the_error_names_few_ranks_and_little_text() -> None:
    mesh = Mesh()
    passes, caught = LeftPasses(mesh), mesh.caught
    passes.fail(ValueError("x" * 1000))
    assert len(caught[0]) == SHOWN
    told = passes.check([3, 1, 2, 2, 1, 2, 2], Answers([caught, [], ["OSError: disk"], [], [], [], []]), 6)
    assert str(told).startswith(
        "The ranks are at unlike batches: rank 0 left 2 passes without a whole backward (after "
    )
    assert "; rank 2 left 1 pass without a whole backward (after OSError: disk); rank 3 left 1 pass" in str(told)
    assert "backward, and ranks 5, 6 did so too, which rank 1 did not. Step 7 was not taken" in str(told)
    assert caught
    assert passes.check([3] * 7, Answers([]), 6) is None
    assert not caught


def test_a_disagreement_names_the_error_of_each_rank() -> None:
    told = str(disagreement((0, "a gather", []), (1, "a reduction", ["ValueError: bad"])))
    assert "rank 0 waits for 'a gather', rank 1 for 'a reduction'" in told
    assert told.endswith("Rank 1 had gone on after an error in a pass (ValueError: bad).")


def waited(mesh: Mesh) -> list[str]:
    """Rank 0's errors of a wait that is too long: after an error in a pass of rank 1, and when that is forgotten."""
    own = beside(mesh, "noted")
    passes, comm, texts = LeftPasses(own), Comm(own), []
    if own.rank == 1:
        passes.fail(ValueError("sample 17 is empty"))
    for _ in range(2):
        comm.agree(b"", "noted, or forgotten")
        if own.rank == 0:
            with pytest.raises(CommError) as told:
                comm.explain(Position("reduce", 1, "sum activations of x"), expired=True)
            comm.withdraw()
            texts.append(str(told.value))
        comm.agree(b"", "told")
        passes.check([0, 0], Answers([]), 0)
    return texts


def test_a_wait_that_is_too_long_names_the_error_after_which_a_rank_went_on(pool: Pool) -> None:
    (noted, forgotten), _ = pool.run(waited, 2)
    sentence = " Rank 1 had gone on after an error in a pass (ValueError: sample 17 is empty)."
    assert sentence in noted
    assert noted.replace(sentence, "") == forgotten
