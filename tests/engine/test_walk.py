"""Files that one training step visits: what a reader of the package opens to follow it.

To print them in the order of first visits: PYTHONPATH=src:tests python tests/engine/test_walk.py PLAN
"""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs

SOURCE = Path(zs.__file__).parent
WIDTH, BLOCKS, ROWS = 32, 4, 4
PLANS: dict[str, tuple[int, int, dict[str, Any]]] = {  # ranks; files at most; plan
    "zero2": (2, 27, {"zero": 2}),
    "zero3": (2, 31, {"zero": 3}),
    "zero3-offload": (2, 35, {"zero": 3, "offload": "optimizer,parameters"}),
    "stages-tensor": (4, 48, {"zero": 1, "pipeline_parallel": 2, "tensor_parallel": 2, "microbatches": 2}),
    "experts": (2, 43, {"zero": 1, "expert_parallel": 2}),
}


class Block(nn.Module):
    """A feed-forward layer, or a mixture of experts, beside a residual connection."""

    def __init__(self, mixture: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mixture = zs.moe.MoE(WIDTH, 4 * WIDTH, 4) if mixture else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        return x + (self.down(torch.relu(self.up(hidden))) if self.mixture is None else self.mixture(hidden))


class Net(nn.Module):
    """Four blocks and a squared error."""

    def __init__(self, mixtures: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(mixtures and n % 2 == 1) for n in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def visited(run: Callable[[], Any]) -> list[str]:
    """Files of the package with a function that runs, in the order of first visits, in threads begun meanwhile too."""
    seen: dict[str, None] = {}

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            seen.setdefault(frame.f_code.co_filename)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    paths = [Path(name) for name in seen]
    return [path.relative_to(SOURCE).as_posix() for path in paths if path.is_relative_to(SOURCE)]


def walk(mesh: zs.Mesh, name: str) -> list[str]:
    """Files that this rank's third step visits, without those that the fourth and fifth do not visit again."""
    torch.manual_seed(0)
    model, x = Net(name == "experts"), torch.randn(ROWS, WIDTH)
    plan = zs.Plan.from_dict({"transport": "network", **PLANS[name][2]})
    engine = zs.Engine(model, lambda ps: torch.optim.AdamW(ps, lr=1e-3), plan, mesh=mesh, example=(x,))

    def step() -> None:
        if "pipeline_parallel" in PLANS[name][2]:
            engine.train_step((x,))
        else:
            engine.backward(engine(x))
            engine.step()

    for _ in range(2):
        step()
    third, *later = [visited(step) for _ in range(3)]
    return [file for file in third if all(file in files for files in later)]


@pytest.mark.parametrize("name", PLANS)
def test_a_step_visits_few_files(pool: Pool, name: str) -> None:
    ranks, most, _ = PLANS[name]
    files = pool.run(walk, ranks, name)[0]
    assert 20 < len(files) <= most, "\n".join(files)


if __name__ == "__main__":
    from engine.test_walk import walk as named  # by the name that workers find it by

    workers = Pool()
    for name in sys.argv[1:] or PLANS:
        files = workers.run(named, PLANS[name][0], name)[0]
        print(f"{name}: {len(files)} files", *files, sep="\n  ")
    workers.stop()
