"""The exchange of rows beside one process that has all of them: bit for bit, whatever goes where."""

import re
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.comm.collectives import Comm
from zeroshard.moe.exchange import technique
from zeroshard.moe.exchange.exchange import Delivery, shared_out
from zeroshard.moe.experts.experts import ExpertModules, Experts
from zeroshard.moe.policy import ExpertParallel
from zeroshard.moe.routing.record import Routing
from zeroshard.parts.place import Axis
from zeroshard.traffic import Purpose

WIDTH, HIDDEN, CHOICES = 8, 12, 2
TOKENS = {  # of each rank, and the experts that they may choose
    "even": ((6, 6, 6, 6), range(6)),
    "a rank without tokens": ((9, 0, 4, 1), range(6)),
    "all on one rank": ((3, 5, 2, 4), range(2)),
    "one expert": ((3, 5, 2, 4), (5,)),
    "starved": ((7, 5, 3, 4), (0, 2, 3)),
    "no tokens": ((0, 0, 0, 0), range(6)),
}


def experts(modules: bool) -> nn.Module:
    """Six experts."""
    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))  # noqa: E731
    return nn.Sequential(ExpertModules(make, 6) if modules else Experts(WIDTH, HIDDEN, 6, "gelu", bias=True))


def tokens(case: str) -> tuple[Tensor, Routing, Tensor]:
    """Tokens of all ranks, their routing with some choices that have no place, and the gradient of their outputs."""
    sizes, allowed = TOKENS[case]
    random, total = torch.Generator().manual_seed(3), sum(sizes)
    chosen = torch.stack(
        [torch.randperm(len(allowed), generator=random)[:CHOICES] for _ in range(total)] or [torch.zeros(CHOICES)]
    )[:total]
    if chosen.shape[1] < CHOICES:
        chosen = chosen.expand(total, CHOICES)
    chosen = torch.tensor(allowed)[chosen.long()]
    kept = torch.rand(total, CHOICES, generator=random) < 0.9
    gates = torch.rand(total, CHOICES, generator=random)
    counts = torch.bincount(chosen.flatten(), minlength=6)
    x, gradient = (torch.randn(total, WIDTH, generator=random) for _ in range(2))
    return x, Routing(chosen, gates, kept, counts), gradient


def rows_of(case: str, rank: int | None) -> slice:
    """The tokens of a rank; of all for None."""
    sizes = TOKENS[case][0]
    return slice(None) if rank is None else slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def compute(model: Any, case: str, rank: int | None) -> dict[str, Tensor]:
    """Outputs and gradients of a rank's tokens."""
    x, routing, gradient = tokens(case)
    own = rows_of(case, rank)
    x, gates = x[own].requires_grad_(), routing.gates[own].requires_grad_()
    assert routing.kept is not None
    output = model[0](x, Routing(routing.experts[own], gates, routing.kept[own], routing.counts))
    output.backward(gradient[own])
    return {"output": output.detach(), "x": x.grad, "gates": gates.grad} | {
        name: p.grad for name, p in model.named_parameters()
    }


def exchange(
    mesh: zs.Mesh, cases: Sequence[str], modules: bool, transport: str, machines: int
) -> list[tuple[dict[str, Tensor], dict[str, tuple[int, int]]]]:
    """What one rank computes in each case, and what it sent (elements, and bytes over the network)."""
    found = []
    axis = Axis("experts", (tuple(range(mesh.ranks)),), Comm(mesh))
    policy = ExpertParallel(mesh.ranks, two_level=machines > 1)
    with patch.object(technique, "machine", lambda: [str(mesh.rank * machines // mesh.ranks)]):
        model = experts(modules)
        technique.ExpertTechnique(policy, transport).cut(model, {"experts": axis})
    for case in cases:
        axis.comm.reset()
        model.zero_grad()
        computed = compute(model, case, mesh.rank)
        found.append((computed, {str(p): (c.elements, c.sent_nbytes) for p, c in axis.comm.counts.items()}))
    return found


@pytest.mark.parametrize("modules", [False, True], ids=["stacked", "modules"])
@pytest.mark.parametrize("how", ["network", "shared", "two levels"])
def test_rows_are_computed_as_by_one_process(pool: Pool, modules: bool, how: str) -> None:
    machines = 2 if how == "two levels" else 1
    transport = "shared" if how == "shared" else "network"
    answers = pool.run(exchange, 4, list(TOKENS), modules, transport, machines)
    for number, case in enumerate(TOKENS):
        wanted = compute(experts(modules), case, None)
        held = shared_out(6, 4)
        assert held == [(0, 2), (2, 4), (4, 5), (5, 6)]
        for rank, (found, counts) in enumerate(answer[number] for answer in answers):
            for name in ("output", "x", "gates"):
                assert torch.equal(found[name], wanted[name][rows_of(case, rank)]), (case, rank, name)
            first, stop = held[rank]
            for name, gradient in wanted.items():
                if name in ("output", "x", "gates"):
                    continue
                own = (
                    gradient[first:stop]
                    if not modules
                    else gradient[: len(gradient) * (first <= int(name.split(".")[2]) < stop)]
                )
                assert found[name] is not None and torch.equal(found[name], own), (case, rank, name)
            rows = elements(case, rank, machines)
            assert counts[str(Purpose.EXCHANGE_TOKENS)][0] == rows, (case, rank)
            assert counts[str(Purpose.EXCHANGE_TOKENS)][1] == (0 if how == "shared" else 4 * rows)


def elements(case: str, rank: int, machines: int) -> int:
    """Elements that a rank sends to others, forward and backward, by hand from the choices."""
    _, routing, _ = tokens(case)
    assert routing.kept is not None
    table = [
        [int(((routing.experts[own] == expert) & routing.kept[own]).sum()) for expert in range(6)]
        for own in (rows_of(case, source) for source in range(4))
    ]
    held = shared_out(6, 4)
    rows = [[sum(row[first:stop]) for first, stop in held] for row in table]
    if machines == 1:
        out = sum(rows[rank][other] for other in range(4) if other != rank)
        back = sum(rows[other][rank] for other in range(4) if other != rank)
        return (out + back) * (2 * WIDTH + 1)  # gates go there, and their gradients back
    return total_of(rows, rank) * (2 * WIDTH + 1)


def total_of(rows: Sequence[Sequence[int]], rank: int) -> int:
    """Rows that a rank of two machines of two sends, there and back: first inside, then across; and the reverse."""
    neighbour, beyond = rank ^ 1, rank ^ 2
    there = rows[rank][neighbour] + rows[rank][beyond ^ 1]  # by the neighbour, which has their place
    there += rows[rank][beyond] + rows[neighbour][beyond]  # with those that the neighbour sent here
    back = rows[beyond][rank] + rows[beyond ^ 1][rank]  # across, to the place where they came from
    back += rows[neighbour][rank] + rows[neighbour][beyond]  # then to the neighbour, also what came across
    return there + back


def test_experts_are_shared_out_as_evenly_as_they_divide() -> None:
    assert shared_out(60, 8) == [(0, 8), (8, 16), (16, 24), (24, 32), (32, 39), (39, 46), (46, 53), (53, 60)]
    delivery = Delivery([[1, 2, 0], [3, 0, 4]], shared_out(3, 2), 1)
    assert (delivery.sends, delivery.receives, delivery.local) == ([3, 4], [0, 4], [4])


def plans(mesh: zs.Mesh, settings: Mapping[str, Any], model: str) -> str:
    """The error of an engine."""
    made = {
        "dense": lambda: nn.Linear(4, 4),
        "two experts": lambda: nn.Sequential(Experts(4, 4, 2)),
        "scalars": lambda: nn.Sequential(ExpertModules(Scaled, 4)),
    }[model]()
    try:
        zs.Engine(made, lambda p: torch.optim.SGD(p, lr=0.1), zs.Plan.from_dict(settings), mesh=mesh)
    except zs.errors.ZeroshardError as error:
        return str(error)
    return ""


class Scaled(nn.Module):
    """An expert with a parameter of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize(
    "ranks, settings, model, said",
    [
        (3, {"expert_parallel": 3}, "two experts", "is more than the 2 experts of '0'.*tensor_parallel"),
        (2, {"expert_parallel": 2}, "dense", "none was found in Linear.*zs.moe.MoE"),
        (3, {"expert_parallel": 2}, "two experts", "3 ranks do not divide among expert_parallel=2"),
        (2, {"expert_parallel": 2}, "scalars", "'scale' of the experts of '0' is a scalar"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_out_is_refused(
    pool: Pool, ranks: int, settings: dict[str, Any], model: str, said: str
) -> None:
    for text in pool.run(plans, ranks, settings, model):
        assert re.search(said, text), text


def uneven(mesh: zs.Mesh) -> str:
    """The error of machines with unlike numbers of ranks."""
    axis = Axis("experts", (tuple(range(mesh.ranks)),), Comm(mesh))
    with patch.object(technique, "machine", lambda: [str(mesh.rank // 2)]):
        try:
            technique.ExpertTechnique(ExpertParallel(3, True)).cut(experts(False), {"experts": axis})
        except zs.PlanError as error:
            return str(error)
    return ""


def test_two_levels_need_machines_alike(pool: Pool) -> None:
    for text in pool.run(uneven, 3):
        assert "equally many ranks of a group on each machine, and there are 2, 1" in text


def test_settings_that_do_not_combine_are_refused() -> None:
    with pytest.raises(zs.PlanError, match="set expert_parallel to 2 or more"):
        zs.Plan(expert_parallel=zs.ExpertParallel(two_level=True))
    assert repr(zs.Plan(expert_parallel=zs.ExpertParallel(2))) == "Plan(expert_parallel=2)"
