"""Stage 3 over the network: three units are gathered at once, whatever the family, the plan and the ranks."""

from typing import Any

import pytest
import torch
from alive import Units, blocks_of
from pool import Pool
from promises.families import NAMES, batch, build

import zeroshard as zs

pytest.importorskip("transformers")
MOST = 3  # the root, the unit that computes, and the next one
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (2, {}),
    "recomputed": (2, {"recompute": "blocks"}),
    "bf16": (2, {"precision": "bf16"}),
    "accumulated": (2, {"microbatches": 2, "recompute": "blocks", "precision": "bf16"}),
    "four": (4, {}),
    "groups": (4, {"shard_group": 2, "precision": "bf16"}),
    "tensor": (4, {"tensor_parallel": 2}),
}
SPLIT = ("llama", "gpt2", "bert", "t5")  # families for tensor ranks
SHOWN = {  # by default
    "plain": ("llama", "gpt-neox", "convolution", "bart"),
    "recomputed": ("gpt2", "olmo2"),
    "bf16": ("mixtral", "vit"),
    "accumulated": ("opt", "t5"),
    "four": ("cohere", "mixer"),
    "groups": ("bert",),
    "tensor": ("llama",),
}


def gathered(mesh: zs.Mesh, names: tuple[str, ...], settings: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Units gathered at once in two steps of each family, in forward and backward."""
    found = {}
    for name in names:
        plan = zs.Plan(zero=3, transport="network", **settings)
        engine = zs.Engine(build(name), lambda p: torch.optim.SGD(p, lr=0.01), plan, mesh=mesh)
        blocks = blocks_of(engine.model)
        with Units(blocks) as units:
            for _ in range(2):
                engine.train_step(batch(name, 2 * plan.microbatches))
        found[name] = units.forward, units.backward
        assert len(blocks) > 5
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_three_units_at_once(pool: Pool, plan: str, whole: bool) -> None:
    ranks, settings = PLANS[plan]
    names = (SPLIT if plan == "tensor" else NAMES) if whole else SHOWN[plan]
    for first in range(0, len(names), 5):  # within what a launch may take
        for found in pool.run(gathered, ranks, names[first : first + 5], settings):
            assert {name: pair for name, pair in found.items() if not 1 < max(pair) <= MOST} == {}
