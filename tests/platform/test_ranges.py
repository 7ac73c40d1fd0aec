"""The ranges that a profiler sees, of every technique that waits, sends or computes again; none without a profiler."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.platform import ranges

WIDTH = 8


def model(experts: bool = False) -> nn.Module:
    """Four blocks, of which experts have the two in the middle."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    if experts:
        blocks[1:3] = [zs.moe.MoE(WIDTH, 16, 4, router="gshard") for _ in range(2)]
    return nn.Sequential(*blocks)


def loss(output: Tensor, batch: Any) -> Tensor:
    """A loss."""
    return output.square().mean()


def ranges_seen(mesh: zs.Mesh, plan: dict[str, Any], folder: Path) -> set[str]:
    """The names of this rank's ranges in its third step."""
    make = lambda parameters: torch.optim.AdamW(parameters, 1e-3)  # noqa: E731
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(mesh.rank))
    stages = plan.get("pipeline_parallel", 1) > 1
    x = torch.ones(4, WIDTH) if stages else x
    engine = zs.Engine(
        model("expert_parallel" in plan), make, zs.Plan(**plan), mesh=mesh, loss=loss, example=x if stages else None
    )
    for _ in range(2):
        engine.train_step(x)
    with engine.trace(profile=str(folder)):
        engine.train_step(x)
    events = json.loads((folder / f"rank{mesh.rank}.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::addmm" for event in events)
    return {name for event in events if (name := str(event.get("name"))).startswith(ranges.PREFIX)}


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (
            {"zero": 3, "transport": "network"},
            ("gather 1[float32]", "wait for gather 1[float32]", "reduce 1[float32]", "update step 2"),
        ),
        (
            {"pipeline_parallel": 2, "microbatches": 2},
            (
                "forward F0.0@0",
                "backward B0.1@0",
                "send input of F1.0",
                "wait for receive gradient for B0.0",
                "update UPDATE0@0",
            ),
        ),
        (
            {"expert_parallel": 2, "transport": "network"},
            ("exchange gates of 1.experts", "wait for exchange gradient of gates of 1.experts"),
        ),
        ({"zero": 3, "recompute": "blocks"}, ("recompute 0", "recompute 1")),
        ({"pipeline_parallel": 2, "microbatches": 2, "recompute": "blocks"}, ("recompute ",)),
        (
            {"zero": 1, "offload": "optimizer", "precision": "bf16"},
            (
                "offload gradients down of 1[bfloat16]",
                "offload update of 1[bfloat16]",
                "wait for offload parameters up of 1[bfloat16]",
            ),
        ),
    ],
    ids=["zero3", "pipeline", "experts", "recompute", "chunks", "offload"],
)
def test_a_profile_has_the_ranges_of_a_technique(
    pool: Pool, tmp_path: Path, plan: dict[str, Any], expected: tuple[str, ...]
) -> None:
    names, _ = pool.run(ranges_seen, 2, plan, tmp_path)
    missing = [name for name in expected if not any(each.startswith(ranges.PREFIX + name) for each in names)]
    assert not missing, "\n".join(sorted(names))


def test_without_a_profiler_no_range_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "named", lambda *words: pytest.fail(f"a range was made: {words}"))
    engine = zs.Engine(model(), torch.optim.AdamW, zs.Plan(zero=3, recompute="blocks", offload="optimizer"), loss=loss)
    engine.train_step(torch.ones(4, WIDTH))
    engine.train_step(torch.ones(4, WIDTH))
