"""The shrinking batch of an expert (1701.06538, section 3.1): with more ranks it grows again, as counts show."""

from typing import Any

import pytest
from pool import Pool

import zeroshard as zs
from moe.mixed import EXPERTS, batch, engine_of


def computed(mesh: zs.Mesh, experts_ranks: int) -> dict[int, int]:
    """Rows that each expert of this rank computes in the first mixture, in the forward of one step.

    Every rank has the same batch, so that the choices are alike whatever the number of ranks.
    """
    engine = engine_of(mesh, {}, {"expert_parallel": experts_ranks} if experts_ranks > 1 else {})
    layer: Any = engine.model.get_submodule("blocks.0.mixture.experts")
    compute, seen = layer.compute, []

    def counted(rows: Any, counts: Any, gates: Any = None) -> Any:
        seen.append(list(counts))
        return compute(rows, counts, gates)

    layer.compute = counted
    engine.train_step(batch(0, 0))
    if not seen:  # computed without an exchange: all of them are this rank's
        return dict(enumerate(engine.layer_readings["blocks.0.mixture.experts"]["load"]))
    each, more = divmod(EXPERTS, experts_ranks)
    first = mesh.rank * each + min(mesh.rank, more)
    return {first + n: count for n, count in enumerate(seen[0])}


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_expert_computes_the_rows_of_all_ranks(pool: Pool, ranks: int) -> None:
    """An expert of one rank sees k·b/E rows on average, and k·b·d/E with the batches of d ranks."""
    alone = pool.run(computed, 1, 1)[0]
    shared = {expert: rows for found in pool.run(computed, ranks, ranks) for expert, rows in found.items()}
    assert sum(alone.values()) == 2 * batch(0, 0)[:, 1:].numel()
    assert shared == {expert: ranks * rows for expert, rows in alone.items()}
