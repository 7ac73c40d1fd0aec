"""Cases of the second generator of plans; `--whole` draws many."""

import pytest
from engine.odd_plans import differences, draw, perform
from pool import Pool
from selection import by_default


@pytest.mark.parametrize("seed", by_default(range(200), 2, 5))
def test_an_odd_plan_trains_as_a_plain_loop(pool: Pool, seed: int) -> None:
    case = draw(seed, (2, 2, 4, 3)[seed % 4])
    assert not list(differences(case, pool.run(perform, case.ranks, case))), case
