"""Reductions over all rows of a matrix, and updates that reduce in rounds side by side."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.optim.algorithms.row_reductions import Over, Rounds, RowReduction, in_rounds
from zeroshard.optim.algorithms.tensor_optimizer import TensorOptimizer

SIZES = [4, 4, 3]  # rows of each rank
SHARES = torch.tensor(SIZES, dtype=torch.float64) / 11
FOUND: dict[Over, Callable[[Tensor], Tensor]] = {
    Over.MEAN: lambda rows: rows.mean(0),
    Over.MEAN_SQUARE: lambda rows: rows.square().mean(0).sqrt(),
    Over.NORM: lambda rows: torch.linalg.vector_norm(rows, dim=0),
    Over.MAXIMUM: lambda rows: rows.amax(0),
}


@pytest.mark.parametrize("over", Over)
def test_the_total_is_the_reduction_of_all_rows(over: Over) -> None:
    matrix = torch.randn(11, 5, generator=torch.Generator().manual_seed(1))
    runs = matrix.split(SIZES)
    parts = [FOUND[over](run) for run in runs]
    for part in parts:
        answer = RowReduction(over, part).total(torch.stack(parts), SHARES)
        assert answer.dtype == part.dtype and answer.shape == part.shape
        torch.testing.assert_close(answer, FOUND[over](matrix), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("over", Over)
def test_of_one_part_the_total_is_that_part(over: Over) -> None:
    part = torch.tensor([1e-18, 3.0, 1e18])
    assert torch.equal(RowReduction(over, part).total(part.unsqueeze(0), torch.ones(1, dtype=torch.float64)), part)


def counting(name: str, rounds: int, log: list[str]) -> Rounds:
    for number in range(rounds):
        (answer,) = yield [RowReduction(Over.MAXIMUM, torch.tensor(number))]
        log.append(f"{name}{answer.item()}")


def test_updates_ask_together_and_end_when_they_are_done() -> None:
    log: list[str] = []
    asked: list[int] = []

    def answer(asks: Sequence[RowReduction]) -> list[Tensor]:
        asked.append(len(asks))
        return [ask.part + 10 for ask in asks]

    in_rounds([counting("a", 2, log), counting("b", 0, log), counting("c", 1, log)], answer)
    assert (asked, log) == ([2, 1], ["a10", "c10", "a11"])
    in_rounds([], answer)
    assert asked == [2, 1]


@pytest.mark.parametrize("make", [
    partial(zs.optim.Adafactor, beta1=0.5), partial(zs.optim.SM3, lr=0.1), partial(zs.optim.LAMB, lr=0.1),
])  # fmt: skip
def test_rows_side_by_side_are_updated_as_their_matrix(make: Callable[..., TensorOptimizer]) -> None:
    """In one process: the rows of three ranks, each of which asks the others."""
    torch.manual_seed(0)
    matrix, sizes = torch.randn(11, 5, dtype=torch.float64), SIZES
    whole, runs = nn.Parameter(matrix.clone()), [nn.Parameter(run.clone()) for run in matrix.split(sizes)]
    together, optimizer = make([whole]), make(runs)
    group = optimizer.param_groups[0]

    def answer(asks: Sequence[RowReduction]) -> list[Tensor]:
        each = len(asks) // 3  # of a rank
        asked.append([ask.part.numel() for ask in asks[:each]])
        parts = [torch.stack([asks[r * each + n].part.flatten() for r in range(3)]) for n in range(each)]
        return [ask.total(parts[n % each], SHARES) for n, ask in enumerate(asks)]

    for _ in range(3):
        asked: list[list[int]] = []
        whole.grad = torch.randn_like(matrix)
        together.step()
        for run, gradient in zip(runs, whole.grad.split(sizes), strict=True):
            run.grad = gradient.clone()
        with torch.no_grad():
            in_rounds([optimizer._rounds(run, optimizer._state(run, group), group) for run in runs], answer)
        torch.testing.assert_close(torch.cat([*runs]), whole, rtol=1e-12, atol=0)
        assert [*map(sum, asked)] == [*optimizer.reduced_numels(whole.shape, group)]
    for key, state in together.state[whole].items():
        found = [optimizer.state[run][key] for run in runs]
        by_row = key in (optimizer.row_states or ()) or state.shape == whole.shape
        torch.testing.assert_close(torch.cat(found) if by_row else found[0], state, rtol=1e-12, atol=0)
