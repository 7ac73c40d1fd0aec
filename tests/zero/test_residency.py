"""Who keeps what, typed from 1910.02054, section 5."""

import pytest

from zeroshard.zero import Residency

STAGES = {  # slices of (states, gradients, parameters), and whether updated slices are gathered at once
    0: ((False, False, False), False),
    1: ((True, False, False), True),
    2: ((True, True, False), True),
    3: ((True, True, True), False),
}


@pytest.mark.parametrize("stage", STAGES)
def test_stage(stage: int) -> None:
    slices, publish = STAGES[stage]
    residency = Residency.of_stage(stage)
    assert (residency.slice_states, residency.slice_gradients, residency.slice_parameters) == slices
    assert residency.publish_after_update is publish
