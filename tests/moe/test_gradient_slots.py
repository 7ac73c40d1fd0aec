"""Gradients of experts, written in the engine's flat buffers: the same numbers, and no other tensor of their size."""

from functools import partial
from typing import Any

import pytest
import torch
from inside import gradients_of
from pool import Pool
from selection import by_default
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from moe.large_tensors import made_by
from moe.routings import TopRouter
from zeroshard.autograd.gradient_slot import Lent, offer_slot, slot_of
from zeroshard.errors import PlanError
from zeroshard.step.backward import Backward
from zeroshard.zero.gradients import BufferedGradients, GradientState, state_of

WIDTH, E = 48, 8  # stacks of more elements than small parameters have


class Net(nn.Module):
    """Calls its mixture `calls` times; `recompute` is that of the first call."""

    def __init__(self, calls: int = 1, recompute: str = "", penalty: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mixture = zs.moe.MoE(WIDTH, 2 * WIDTH, E, router=TopRouter(WIDTH, E, 2), expert=zs.moe.SWIGLU)
        self.last = nn.Linear(WIDTH, 1)
        self.calls, self.recompute, self.penalty = calls, recompute, penalty

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for call in range(self.calls):
            if self.recompute and not call:
                x = x + checkpoint(self.mixture, x, use_reentrant=self.recompute == "re-entrant")
            else:
                x = x + self.mixture(x)
        loss: Tensor = self.last(x).square().mean()
        return loss + self.penalty * self.mixture.experts.up.square().mean() if self.penalty else loss


def train(plan: zs.Plan, mesh: Any = None, microbatches: int = 1, **options: Any) -> list[float]:
    """Losses and norms of three steps."""
    engine = zs.Engine(Net(**options), partial(torch.optim.AdamW, lr=1e-2), plan, mesh=mesh)
    rank = 0 if mesh is None else mesh.rank
    found = []
    for step in range(3):
        for microbatch in range(microbatches):
            generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
            loss = engine(torch.randn(2, 10, WIDTH, generator=generator))
            engine.backward(loss)
            found.append(loss.item())
        found.append(float(engine.step().grad_norm))
    return found


Both = tuple[list[float], list[float], int]


def both(plan: zs.Plan, mesh: Any = None, microbatches: int = 1, **options: Any) -> Both:
    """`train` with and without slots, and how many were lent."""
    lent: list[Lent | None] = []
    lend = Backward.lend

    def counted(*args: Any) -> Lent | None:
        lent.append(lend(*args))
        return lent[-1]

    try:
        Backward.lend = counted  # type: ignore[method-assign]
        found = train(plan, mesh, microbatches, **options)
        Backward.lend = lambda *args: None  # type: ignore[method-assign]
        return found, train(plan, mesh, microbatches, **options), sum(each is not None for each in lent)
    finally:
        Backward.lend = lend  # type: ignore[method-assign]


PLANS = {
    "plain": zs.Plan(),
    "zero 2": zs.Plan(zero=2),
    "zero 3": zs.Plan(zero=3),
    "offload": zs.Plan(zero=3, offload="optimizer"),
    "bf16": zs.Plan(precision="bf16"),
}
CALLS: dict[str, dict[str, Any]] = {
    "once": {},
    "twice": {"calls": 2},
    "with a gradient of another use": {"penalty": 0.1},
    "recomputed": {"recompute": "not re-entrant"},
    "recomputed re-entrantly": {"recompute": "re-entrant"},
    "twice and with another use": {"calls": 2, "penalty": 0.1},
    "twice, once recomputed": {"calls": 2, "recompute": "not re-entrant"},
}


@pytest.mark.filterwarnings("ignore:Updates on the host:UserWarning")
@pytest.mark.thinned
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_slots_change_no_bit(plan: str, microbatches: int) -> None:
    found, expected, lent = both(PLANS[plan], microbatches=microbatches)
    assert found == expected
    assert lent >= (2 if plan == "bf16" else 6)  # sums over microbatches are wider than gradients there


@pytest.mark.thinned
@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_slots_change_nothing_however_the_layer_is_called(calls: str, microbatches: int) -> None:
    """Sums of several uses may be made in another order."""
    found, expected, lent = both(zs.Plan(), microbatches=microbatches, **CALLS[calls])
    assert found == pytest.approx(expected, rel=2e-5) and lent >= 6


def on_ranks(mesh: zs.Mesh, zero: int) -> Both:
    return both(zs.Plan(zero=zero), mesh, microbatches=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("zero", by_default([0, 1, 2, 3], 1, 3))
def test_slots_change_no_bit_on_several_ranks(pool: Pool, zero: int) -> None:
    for found, expected, lent in pool.run(on_ranks, 2, zero):
        assert found == expected and lent >= 6


def test_no_tensor_of_the_size_of_a_stack_is_made() -> None:
    net = Net()
    engine = zs.Engine(net, partial(torch.optim.SGD, lr=0.1), zs.Plan())
    x, size = torch.randn(4, WIDTH), net.mixture.experts.down.nbytes
    for _ in range(2):
        loss = engine(x)
        assert made_by(lambda loss=loss: engine.backward(loss), size) == 0  # type: ignore[misc]
        engine.step()


def test_hooks_of_users_see_and_change_gradients() -> None:
    net = Net()
    engine = zs.Engine(net, partial(torch.optim.SGD, lr=0.1), zs.Plan())
    seen: list[float] = []
    net.mixture.experts.up.register_hook(lambda g: seen.append(float(g.norm())) or 0 * g)  # type: ignore[func-returns-value]
    before = net.mixture.experts.up.detach().clone()
    engine.backward(engine(torch.randn(9, WIDTH)))
    engine.step()
    assert seen[0] > 0 and torch.equal(net.mixture.experts.up, before)


def test_a_layer_inside_and_outside_of_a_re_entrant_recomputation_trains_as_without() -> None:
    found = train(zs.Plan(), calls=2, recompute="re-entrant")
    assert found == pytest.approx(train(zs.Plan(), calls=2), rel=2e-5)


def test_a_gradient_that_is_still_being_made_is_not_sent() -> None:
    engine = zs.Engine(Net(), partial(torch.optim.SGD, lr=0.1), zs.Plan())
    name = "mixture.experts"
    gradients = next(g for g in gradients_of(engine) if g.flat.index.entries[0].name.startswith(name))
    assert isinstance(gradients, BufferedGradients)
    assert gradients.lend(0) is not None and gradients.lend(0) is None
    assert state_of(gradients, 0) is GradientState.LENT
    with pytest.raises(PlanError, match=r"'mixture.experts.*' is made by two backwards.*use_reentrant=False"):
        gradients.buffer.refuse_lent()
    gradients.buffer.begin()
    gradients.buffer.refuse_lent()


def test_slots_go_with_their_parameters() -> None:
    class Slot:
        def lend(self, parameter: Tensor) -> Lent | None:
            return None

    parameter, slot = nn.Parameter(torch.zeros(2)), Slot()
    assert slot_of(parameter) is None
    offer_slot(parameter, slot)
    assert slot_of(parameter) is slot and slot_of(nn.Parameter(torch.zeros(2))) is None
    assert not vars(parameter)
