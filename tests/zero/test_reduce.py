"""Reductions of several flats at once."""

from functools import partial
from unittest.mock import patch

import torch
from inside import gradients_of
from pool import Pool
from torch import nn

import zeroshard as zs
from zeroshard.comm.pending import Exchange


def read(mesh: zs.Mesh) -> tuple[int, list[str]]:
    """How many reductions there are, and the order in which this rank says that it has read the others' gradients."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    plan = zs.Plan(zero=1, transport="shared", units=("0", "1", "2"))
    engine = zs.Engine(model, partial(torch.optim.SGD, lr=0.1), plan, mesh=mesh)
    reductions = [gradients.reduction for gradients in gradients_of(engine)]
    done, said = Exchange.done, list[str]()

    def heard(self: Exchange) -> None:
        said.append(self._place.label)
        done(self)

    with patch.object(Exchange, "done", heard):
        for reduction in reductions:
            reduction.start()
        for reduction in reductions[:: -1 if mesh.rank else 1]:
            reduction.finish()
        for reduction in reductions:
            reduction.release()
    return len(reductions), said


def test_gradients_in_shared_memory_are_read_in_the_order_of_starts(pool: Pool) -> None:
    """Ranks may need their buffers in unlike orders, and a signal that one was read does not say which."""
    (number, first), (_, second) = pool.run(read, 2)
    assert first == second and len(first) == number == 3
