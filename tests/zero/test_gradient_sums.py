"""Sums of 16-bit gradients over microbatches: in fp32, in buffers that the formula knows."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from inside import parts_of
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs

ROWS, WIDTH = 32, 8
ONCE, EACH = "step", "microbatch"
STAGES = {"pipeline_parallel": 2, "pipeline_parallel.balance": "parameters"}
HOST = {"offload": "optimizer", "offload.speculate": False}


class Normed(nn.Module):
    """No block begins with a layer whose weight gradient `zb-h1` leaves for later."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        block = lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())  # noqa: E731
        self.blocks = nn.ModuleList([block() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def data() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def engine_of(mesh: zs.Mesh, plan: dict[str, Any]) -> zs.Engine:
    make = partial(torch.optim.SGD, lr=1.0)
    return zs.Engine(Normed(), make, zs.Plan.from_dict({"precision": "bf16", **plan}), mesh=mesh, example=data()[:2])


def gradients(mesh: zs.Mesh, plans: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """What one step with a learning rate of 1 takes from the master weights of this rank, under each plan."""
    found = []
    for plan in plans:
        engine = engine_of(mesh, plan)
        masters = {
            entry.name: part.flat.view(part.updater.values, number)
            for part in parts_of(engine).all
            for number, entry in enumerate(part.flat.index.entries)
        }
        before = {name: value.clone() for name, value in masters.items()}
        engine.train_step(data())
        found.append({name: before[name] - value for name, value in masters.items()})
    return found


def test_no_sum_over_microbatches_is_rounded_to_16_bits(pool: Pool) -> None:
    """The plain sum is of the same 16-bit gradients, in fp64; bf16 would be off by 2^-9, four hundred times as much."""
    plans = [
        {**STAGES, "zero": 0, "microbatches": 4, "pipeline_parallel.schedule": schedule, "reduce_every": every}
        for schedule, every in product(("1f1b", "zb-h1"), (ONCE, EACH))
    ]
    model = Normed().bfloat16()
    wanted = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for part in data().chunk(4):
        model.zero_grad()
        model(part.bfloat16()).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            wanted[name] += p.grad.double() / 4
    for plan, first, last in zip(plans, *pool.run(gradients, 2, plans), strict=True):
        found = first | last
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert (found[name] - value).abs().max() < 5e-6 * value.abs().max(), (plan, name)


def bytes_of(mesh: zs.Mesh, plan: dict[str, Any], checkpoint: str = "", saves: bool = False) -> tuple[int, int | None]:
    """Measured and planned bytes of gradients after two steps of a plan, which go on from a checkpoint or make one."""
    engine = engine_of(mesh, plan)
    if checkpoint and not saves:
        engine.load(checkpoint)
    for _ in range(2):
        engine.train_step(data().chunk(engine.data_ranks)[engine.data_rank])
    if saves:
        engine.save(checkpoint, wait=True)
    row = next(row for row in engine.memory() if row.category == "gradients")
    return row.measured_bytes, None if row.planned_bytes is None else int(row.planned_bytes + row.padding_bytes)


def all_bytes_of(mesh: zs.Mesh, plans: list[dict[str, Any]]) -> list[tuple[int, int | None]]:
    return [bytes_of(mesh, plan) for plan in plans]


def test_bytes_of_gradients_are_those_of_the_formula(pool: Pool) -> None:
    """Sums before a reduction are planned where microbatches meet in one: with a single one of them, nothing is wide.

    A stage has half of 4 x 88 elements: in bf16, beside them or in their place in fp32, and the slice of the sum.
    """
    half = 2 * (2 * WIDTH + WIDTH * WIDTH + WIDTH)
    whole, wide, own = 2 * half, 4 * half, 4 * half // 2
    wanted = {
        (0, 1, EACH, "zb-h1"): whole,
        (0, 4, ONCE, "zb-h1"): wide,
        (0, 4, EACH, "zb-h1"): wide + own,
        (0, 4, EACH, "1f1b"): whole + own,
        (1, 4, EACH, "zb-h1"): wide + own,
        (2, 1, ONCE, "zb-h1"): whole // 2,
        (2, 4, ONCE, "zb-h1"): own,
        (2, 4, EACH, "1f1b"): own,
    }
    names = "zero", "microbatches", "reduce_every", "pipeline_parallel.schedule"
    plans = [{**STAGES, **dict(zip(names, values, strict=True)), "transport": "network"} for values in wanted]
    for answers in pool.run(all_bytes_of, 4, plans):
        assert answers == [(nbytes, nbytes) for nbytes in wanted.values()]


GOING_ON: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one microbatch": ({"zero": 0, "microbatches": 2}, {"zero": 0}),
    "several": ({"zero": 2, "microbatches": 2, **HOST}, {"zero": 0, "microbatches": 2}),
    "slices": ({"zero": 0, "microbatches": 2}, {"zero": 2, "microbatches": 2}),
}


def go_on(mesh: zs.Mesh, folder: str) -> list[tuple[int, int | None]]:
    found = []
    for name, (before, after) in GOING_ON.items():
        bytes_of(mesh, before, f"{folder}/{name}", saves=True)
        found.append(bytes_of(mesh, after, f"{folder}/{name}"))
    return found


def test_a_run_that_goes_on_under_another_plan_has_its_buffers(pool: Pool, tmp_path: Path) -> None:
    """On as many ranks, which take over what an earlier run had come to need beyond its plan."""
    numel = 4 * (2 * WIDTH + WIDTH * WIDTH + WIDTH)
    wanted = [(nbytes, nbytes) for nbytes in (2 * numel, 4 * numel, 4 * numel // 2)]
    assert pool.run(go_on, 2, str(tmp_path)) == [wanted] * 2
