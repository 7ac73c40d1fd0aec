"""Causes: coefficients of contributions, slices in other places, stale values, rounding."""

import pytest
import torch
from verification.jobs import job

from zeroshard.verification import causes
from zeroshard.verification.causes import fitted

JOB = job("Five", 2, zero=2, microbatches=2)
PIECES = [torch.randn(40, generator=torch.Generator().manual_seed(10 + k)) for k in range(4)]


@pytest.mark.parametrize(
    "weights", [(1.0, 1.0, 1.0, 1.0), (0.0, 1.0, 0.0, 1.0), (2.0, 2.0, 0.0, 0.0), (0.5, 0.5, 1, 2)]
)
def test_coefficients_of_contributions(weights: tuple[float, ...]) -> None:
    found, rest = fitted(sum(w * piece for w, piece in zip(weights, PIECES, strict=True)), PIECES)  # type: ignore[arg-type]
    assert found == pytest.approx(weights, abs=1e-5) and rest < 1e-5


def test_what_is_no_sum_of_contributions_leaves_a_rest() -> None:
    assert fitted(torch.randn(40), PIECES)[1] > 0.5
    assert fitted(PIECES[0], [PIECES[0], 2 * PIECES[0]])[0] is None
    assert fitted(PIECES[0], [PIECES[0], torch.zeros(40)])[0] is None


@pytest.mark.parametrize("weights, text", [
    ((0.0, 1.0, 0.0, 1.0), "the contribution of microbatch 0 of data ranks 0, 1 is missing"),
    ((2.0, 2.0, 0.0, 0.0), "the contribution of data rank 1 is missing, and the others count 2 times"),
    ((0.5, 0.5, 0.5, 0.5), "it is 0.5 times the mean"),
    ((0.8, 0.8, 1.2, 1.2), "the parts have the weights 0.8, 0.8, 1.2, 1.2"),
])  # fmt: skip
def test_coefficients_in_words(weights: tuple[float, ...], text: str) -> None:
    cause = causes._of_coefficients(JOB, weights, "reduce gradients of blocks.1")
    assert cause is not None and text in cause.text
    assert (cause.collective is None) == ("microbatch" in text)


def test_good_coefficients_explain_nothing() -> None:
    assert causes._of_coefficients(JOB, (1.0, 1.001, 1.0, 0.999), None) is None


def test_rounding_on_the_wire() -> None:
    rounded = sum((piece.bfloat16().float() for piece in PIECES[1:2]), PIECES[0].bfloat16().float())
    cause = causes.of_dtype(rounded, PIECES[0] + PIECES[1], PIECES[:2], "reduce")
    assert cause is not None and "rounded to bf16" in cause.text and cause.collective == "reduce"
    assert causes.of_dtype(1.01 * PIECES[0], PIECES[0], PIECES[:1], None) is None


def test_a_weight_that_is_stale_in_all_or_some_of_its_elements() -> None:
    old, new = torch.randn(6, 5), torch.randn(6, 5)
    half = torch.cat([new[:3], old[3:]])
    found = [causes.of_weight(each, new, [(-1, old)], JOB) for each in (old, half, torch.cat([new[:3], -new[3:]]))]
    assert [cause and cause.text for cause in found] == [
        "it is still that of the start",
        "elements 15 to 30 of 30 are wrong: they are still those of the start",
        "elements 15 to 30 of 30 are wrong",
    ]
