"""The mean over parts is the loss of the whole batch, or the verification fails and says how parts weigh in it."""

from dataclasses import replace

import pytest
import torch
from engine import models
from torch import nn
from verification import stateful
from verification.jobs import Padded, Words, data, job, padded, summed

from zeroshard.verification.job import VerificationJob
from zeroshard.verification.plain import Plain
from zeroshard.verification.whole_batch import WholeBatch, of_whole_batch


def made(kind: type[nn.Module], ranks: int = 2, microbatches: int = 2) -> VerificationJob:
    return replace(job("Five", ranks, microbatches=microbatches), factory=kind)


def of(job: VerificationJob, step: int = 0) -> WholeBatch:
    found = of_whole_batch(Plain(job), step)
    assert found is not None
    return found


@pytest.mark.parametrize("kind", [models.TiedFive, stateful.Counts, stateful.CountsInBuffer])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_mean_over_even_parts_is_that_of_the_whole(kind: type[nn.Module], microbatches: int) -> None:
    found = of(made(kind, microbatches=microbatches))
    assert found.equal and found.error < 1e-5 and found.loss == pytest.approx(found.mean, rel=1e-6)


@pytest.mark.parametrize("kind", [Padded, stateful.Weighted, stateful.Masked])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (1, 2), (2, 2)])
def test_unlike_counts_are_told_by_the_weights_of_parts(kind: type[nn.Module], ranks: int, microbatches: int) -> None:
    this = replace(made(kind, ranks, microbatches), batch=padded if kind is Padded else data)
    for step in range(2):
        found, tokens = of(this, step), this.batch(step)[0]
        of_rows = {
            Padded: (tokens[:, 1:] != 0).sum(1).float(),
            stateful.Weighted: tokens[:, 0] + 0.1,
            stateful.Masked: (tokens[:, 1:] <= 8).sum(1).float(),
        }[kind]
        shares = torch.stack([part.sum() for part in of_rows.chunk(this.parts)]) / of_rows.sum() * this.parts
        assert not found.equal and found.weights == pytest.approx(shares.tolist(), rel=1e-4)
        assert "unlike numbers of tokens" in found.cause and f"{shares[0]:.3g}" in found.cause


def test_a_sum_over_rows_is_no_mean() -> None:
    found = of(made(stateful.Added))
    assert not found.equal and found.weights == pytest.approx([4.0] * 4, rel=1e-5)
    assert "4 times a mean over parts" in found.cause


def test_sums_and_counts_are_those_of_the_whole_and_a_mean_with_a_count_is_not() -> None:
    this = replace(made(Words), loss=summed, batch=padded)
    assert of(this).equal
    found = of(replace(this, loss=stateful.mean_of_rows))
    assert not found.equal and found.weights is not None and "return (sum, count)" in found.cause


@pytest.mark.parametrize("kind", [stateful.Normalized, stateful.Averages])
def test_rows_that_act_on_each_other_are_no_unlike_counts(kind: type[nn.Module]) -> None:
    found = of(made(kind))
    assert not found.equal and found.weights is None and "act on each other" in found.note


def test_a_model_for_one_size_of_batches_is_not_compared() -> None:
    class Sized(models.Five):
        def forward(self, tokens: torch.Tensor, step: int = 0) -> torch.Tensor:
            return super().forward(tokens.view(4, 6), step)

    assert of_whole_batch(Plain(made(Sized)), 0) is None
