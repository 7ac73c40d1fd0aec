"""The step context: fields that have another value inside of a `with` block."""

import pytest

from zeroshard.step.context import WeightGradients, Within, context


def failing() -> None:
    with Within(weight_gradients=None):
        assert (context.weight_gradients, context.penalty_weight) == (None, 2.0)
        raise ValueError("inside")


def test_within_gives_one_field_a_value_and_its_former_one_back() -> None:
    store = WeightGradients()
    with Within(weight_gradients=store), Within(penalty_weight=2.0):
        with pytest.raises(ValueError, match="inside"):
            failing()
        assert context.weight_gradients is store
    assert (context.weight_gradients, context.penalty_weight, context.kept) == (None, 1.0, None)
    with pytest.raises(AttributeError, match="penalty"):
        Within(penalty=2.0).__enter__()
