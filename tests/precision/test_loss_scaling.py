"""The loss scale moves as torch's does, and as the paper says with hysteresis and a floor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.errors import NonFiniteError
from zeroshard.precision.loss_scaling import LossScaler


def follow(scaler: LossScaler, steps: str) -> list[float]:
    """The scale after each step: "." went well, "x" overflowed."""
    scales = []
    for step in steps:
        scaler.update(overflow=step == "x")
        scales.append(scaler.scale)
    return scales


@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.booleans(), max_size=40),
    st.sampled_from([(2.0, 0.5), (4.0, 0.25), (1.5, 0.75), (1.0, 1.0)]),
    st.integers(1, 5),
)
def test_moves_as_torch(overflows: list[bool], factors: tuple[float, float], window: int) -> None:
    growth, backoff = factors
    scaler = LossScaler(65536.0, growth=growth, backoff=backoff, window=window, floor=1e-30)
    scale, tracker = torch.tensor(65536.0), torch.tensor(0, dtype=torch.int32)
    for overflow in overflows:
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), growth, backoff, window)
        scaler.update(overflow)
        assert scaler.scale == pytest.approx(scale.item(), rel=1e-5)
        assert scaler.good == tracker.item()


@pytest.mark.parametrize(
    "hysteresis, steps, expected",
    [
        (1, "...x...", [8, 8, 16, 8, 8, 8, 16]),
        (1, "..x...", [8, 8, 4, 4, 4, 8]),
        (2, "xx.xx", [8, 4, 4, 4, 2]),
        (2, "x..x", [8, 8, 8, 4]),  # no full window between the two
        (2, "x...x", [8, 8, 8, 16, 16]),  # a full window makes it patient again
        (3, "xxxxxx", [8, 8, 4, 4, 4, 2]),
    ],
)
def test_hysteresis(hysteresis: int, steps: str, expected: list[float]) -> None:
    assert follow(LossScaler(8.0, window=3, hysteresis=hysteresis), steps) == expected


def test_stops_at_the_floor_and_then_raises() -> None:
    scaler = LossScaler(8.0, floor=3.0)
    assert follow(scaler, "xx") == [4, 3]
    with pytest.raises(NonFiniteError, match="floor of 3"):
        scaler.update(overflow=True)


def test_good_steps_lift_it_off_the_floor() -> None:
    scaler = LossScaler(2.0, floor=1.0, window=2)
    assert follow(scaler, "x..x..") == [1, 1, 2, 1, 1, 2]


def test_the_floor_bears_overflows_within_hysteresis() -> None:
    scaler = LossScaler(1.0, floor=1.0, hysteresis=2)
    scaler.update(overflow=True)
    with pytest.raises(NonFiniteError):
        scaler.update(overflow=True)


def test_a_static_scale_never_moves() -> None:
    scaler = LossScaler(128.0, dynamic=False, window=1)
    assert set(follow(scaler, "..xx" * 10)) == {128}


@settings(derandomize=True, deadline=None)
@given(st.text(".x", max_size=12), st.text(".x", max_size=12), st.integers(1, 3))
def test_goes_on_from_its_state(before: str, after: str, hysteresis: int) -> None:
    first = LossScaler(2.0**20, window=3, hysteresis=hysteresis)
    follow(first, before)
    second = LossScaler(window=3, hysteresis=hysteresis)
    second.load(first.state())
    assert follow(second, after) == follow(first, after)
    assert second.state() == first.state()
