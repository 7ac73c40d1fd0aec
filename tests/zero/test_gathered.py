"""Units that are gathered at once, counted at every operation of a step by the storages that have bytes."""

from typing import Any

import pytest
import torch
from inside import parts_of
from pool import Pool
from torch.utils._python_dispatch import TorchDispatchMode
from zero.gathered_models import MODELS, WORDS

import zeroshard as zs

MOST = 3  # the root, the unit that computes, and the next one
TWICE = {"cycled", "doubled"}  # models that call their blocks twice gather them as often
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "recomputed": (2, {"recompute": "blocks"}),
    "selective": (2, {"recompute": "selective"}),
    "accumulated": (2, {"microbatches": 2}),
    "once a step": (2, {"microbatches": 2, "reduce_every": "step"}),
    "bf16": (2, {"precision": "bf16"}),
    "fp16": (2, {"precision": "fp16"}),
    "four ranks": (4, {}),
    "groups": (4, {"shard_group": 2}),
    "tensor": (4, {"tensor_parallel": 2}),
}


class AtEachOperation(TorchDispatchMode):
    """The largest number of units with bytes in the forward and in the backward, each with its storages."""

    def __init__(self, units: list[list[torch.UntypedStorage]]) -> None:
        super().__init__()
        self._units = units
        self.most = {"forward": 0, "backward": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        where = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
        gathered = sum(any(storage.nbytes() for storage in unit) for unit in self._units)
        self.most[where] = max(self.most[where], gathered)
        return func(*args, **(kwargs or {}))


def gathered(
    mesh: zs.Mesh, names: list[str], settings: dict[str, Any]
) -> dict[str, tuple[dict[str, int], dict[str, tuple[float, float]]]]:
    """Two steps of each model: how many units are gathered at once, and by purpose what is planned and sent."""
    found = {}
    for name in names:
        torch.manual_seed(0)
        plan = zs.Plan(zero=3, transport="network", **settings)
        engine = zs.Engine(MODELS[name](), lambda ps: torch.optim.SGD(ps, lr=0.01), plan, mesh=mesh)
        of_units = parts_of(engine).of_units
        batch = torch.randint(WORDS, (4 * plan.microbatches, 6))
        with AtEachOperation([[part.weights.full.untyped_storage() for part in parts] for parts in of_units]) as watch:
            for _ in range(2):
                engine.train_step(batch)
        purposes = ("gather parameters", "reduce gradients")
        rows = {row.purpose: (row.planned_elements, row.measured_elements) for row in engine.traffic()}
        found[name] = watch.most, {purpose: rows[purpose] for purpose in purposes}
    return found


def test_three_units_are_gathered_at_once_whatever_the_model(pool: Pool) -> None:
    for found in pool.run(gathered, 2, list(MODELS), {}):
        for name, (most, wire) in found.items():
            assert most == {"forward": MOST, "backward": 2 if name == "doubled" else MOST}, name
            assert name in TWICE or all(planned == measured for planned, measured in wire.values()), name


@pytest.mark.parametrize("setting", SETTINGS)
def test_three_units_are_gathered_at_once_whatever_the_plan(pool: Pool, setting: str) -> None:
    ranks, settings = SETTINGS[setting]
    names = ["attending"] if "tensor_parallel" in settings else ["pre-norm", "spare"]
    for found in pool.run(gathered, ranks, names, settings):
        for most, wire in found.values():
            assert most == {"forward": MOST, "backward": MOST}
            assert all(planned == measured for planned, measured in wire.values())


@pytest.mark.parametrize("settings", [{}, {"microbatches": 2}, {"offload": "optimizer,parameters"}], ids=str)
def test_a_segment_of_blocks_is_gathered_block_by_block(pool: Pool, settings: dict[str, Any]) -> None:
    for found in pool.run(gathered, 2, ["twelve blocks"], {"recompute": "sqrt", **settings}):
        most, wire = found["twelve blocks"]
        assert most == {"forward": MOST, "backward": MOST}
        assert all(planned == measured for planned, measured in wire.values())
