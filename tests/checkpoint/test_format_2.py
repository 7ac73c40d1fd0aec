"""Checkpoints of format 2, whose chunks are ranges of flattened tensors; `format-2/` is a genuine one.

Two ranks wrote it at stage 3 of ZeRO, after two steps of `Convolved` with AdamW; without random numbers, to be small.
"""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoint.faults import content, raw
from pool import Pool
from safetensors.torch import load_file
from torch import nn

import zeroshard as zs
from zeroshard.checkpoint import Reader
from zeroshard.cli.main import main

HERE = Path(__file__).parent / "format-2"


class Convolved(nn.Module):
    """A scalar, a tensor of three dimensions that two ranks share, tied parameters, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.conv = nn.Conv1d(5, 4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.ones(()))
        self.out = nn.Linear(5, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.conv(self.embed(tokens).transpose(1, 2)))
        return self.out(nn.functional.pad(hidden.transpose(1, 2) * self.scale, (0, 1))).square().mean()


def loaded(mesh: zs.Mesh, zero: int, again: str) -> dict[str, torch.Tensor]:
    """The state dict after loading the checkpoint, which is saved again."""
    torch.manual_seed(3)
    engine = zs.Engine(Convolved(), partial(torch.optim.AdamW, lr=1e-2), zs.Plan(zero=zero), mesh=mesh)
    assert engine.load(HERE) == {"seen": 2} and engine.steps == 2
    engine.save(again, {"seen": 2}, wait=True)
    return engine.state_dict()


def test_the_reader_gives_what_plain_safetensors_gives() -> None:
    reader, wanted = Reader(HERE), content(HERE)
    assert list(reader.problems()) == []
    assert len(wanted) == 21 and len(reader.tensors["weight:conv.weight"].chunks) == 2
    for name, [(shape, dtype, values), *_] in wanted.items():
        assert reader.shape(name) == shape
        into = torch.empty(reader.tensors[name].numel, dtype=dtype)
        if name.startswith("buffer:"):
            into = reader.whole(name)
        else:
            reader.read(name, into, 0)
        assert (into.dtype, raw(into)) == (dtype, values)


@pytest.mark.parametrize("ranks, zero", [(1, 0), (3, 3)])
def test_an_engine_loads_it(pool: Pool, tmp_path: Path, ranks: int, zero: int) -> None:
    """And saves the same tensors in the format of today."""
    for state in pool.run(loaded, ranks, zero, str(tmp_path / "again")):
        held = content(HERE)
        for name, values in state.items():
            kind = "buffer" if name.startswith("norm.") and not name.endswith(("weight", "bias")) else "weight"
            first = held[f"{kind}:{name.replace('out.', 'embed.')}"][0]
            assert (tuple(values.shape), values.dtype, raw(values)) == first
    again = content(tmp_path / "again")
    assert {name: parts[0] for name, parts in again.items() if not name.startswith("rng:")} == {
        name: parts[0] for name, parts in held.items()
    }


def test_commands_read_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(HERE, tmp_path / "a")
    main(["checkpoint", "verify", str(tmp_path / "a")])
    main(["checkpoint", "info", str(tmp_path / "a")])
    assert "conv.weight" in capsys.readouterr().out
    main(["checkpoint", "diff", str(tmp_path / "a"), str(HERE)])
    main(["export", str(tmp_path / "a"), "--out", str(tmp_path / "w")])
    exported = load_file(tmp_path / "w" / "model.safetensors")
    weights = {name.partition(":")[2]: part for name, [part, *_] in content(HERE).items() if name[0] in "wb"}
    weights["out.weight"] = weights["embed.weight"]
    assert {name: (tuple(v.shape), v.dtype, raw(v)) for name, v in exported.items()} == weights
