"""Sketches tell how far apart two tensors of different processes are."""

import math

import pytest
import torch

from zeroshard.verification.sketch import distance, ratio, sketch


@pytest.mark.parametrize("shape", [(), (3,), (1024,), (7, 1025), (5000, 3)])
def test_the_same_values_have_the_same_sketch(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape)
    assert distance(sketch(values), sketch(values.clone())) == 0
    assert sketch(values)[:2] == (values.numel(), pytest.approx(float(values.double().norm())))


@pytest.mark.parametrize("error", [1e-6, 1e-3, 0.5])
def test_the_distance_is_near_the_norm_of_the_difference(error: float) -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        values, noise = (torch.randn(3000, generator=generator, dtype=torch.float64) for _ in range(2))
        apart = distance(sketch(values + error * noise), sketch(values))
        assert error / 3 < apart < 3 * error


def test_one_wrong_element_and_two_that_changed_places_show() -> None:
    values = torch.randn(100_000)
    wrong, moved = values.clone(), values.clone()
    wrong[77_777] += 1
    moved[[5, 90_000]] = moved[[90_000, 5]]
    assert distance(sketch(wrong), sketch(values)) > 1e-3
    assert distance(sketch(moved), sketch(values)) > 1e-4


def test_sizes_zeros_and_values_that_are_not_finite() -> None:
    zeros, ones, bad = torch.zeros(4), torch.ones(4), torch.full((4,), math.nan)
    assert distance(sketch(torch.zeros(5)), sketch(zeros)) == math.inf
    assert distance(sketch(zeros), sketch(zeros)) == 0
    assert distance(sketch(ones), sketch(zeros)) == math.inf
    assert distance(sketch(bad), sketch(bad)) == 0
    assert distance(sketch(bad), sketch(ones)) == math.inf


def test_a_factor_is_found() -> None:
    values = torch.randn(50)
    assert ratio(sketch(3 * values), sketch(values)) == pytest.approx(3)
    assert distance(sketch(3 * values), sketch(values), 3.0) < 1e-6
    assert math.isnan(ratio(sketch(values), sketch(torch.zeros(50))))
