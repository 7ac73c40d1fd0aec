"""Counts of collectives and of copies between tiers."""

import pytest

from zeroshard.traffic import BETWEEN_TIERS, Count, Purpose, seconds_waited


def test_waits_for_other_ranks_are_those_of_collectives_alone() -> None:
    copies = {purpose: Count(seconds=8.0) for purpose in BETWEEN_TIERS}
    assert copies
    of_groups = [{Purpose.CONTROL: Count(seconds=0.5)}, {Purpose.REDUCE_GRADIENTS: Count(seconds=0.25), **copies}]
    assert seconds_waited(of_groups) == pytest.approx(0.75)
    assert seconds_waited([]) == 0
