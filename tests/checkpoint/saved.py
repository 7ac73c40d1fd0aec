"""Small checkpoints that several test files read: one run saved by two ranks, and the same state saved by one."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zeroshard as zs


class Normed(nn.Module):
    """Tied parameters, buffers that are kept and one that is not, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 10)
        self.norm = nn.BatchNorm1d(10)
        self.up = nn.Linear(10, 10).requires_grad_(False)
        self.register_buffer("mask", torch.ones(4), persistent=False)
        self.head = nn.Linear(10, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.up(self.norm(self.embed(tokens)))).square().mean()


def engine(mesh: zs.Mesh, **plan: Any) -> zs.Engine:
    """An engine around a new model."""
    torch.manual_seed(3)
    adamw = partial(torch.optim.AdamW, lr=1e-2)
    model = Normed()
    return zs.Engine(model, lambda ps: adamw([p for p in ps if p.requires_grad]), zs.Plan.from_dict(plan), mesh=mesh)


def save_run(mesh: zs.Mesh, run: str) -> dict[str, torch.Tensor]:
    """Save steps 1 and 2 of a run; the last state dict."""
    torch.manual_seed(mesh.rank)
    here = engine(mesh, zero=3)
    for _ in range(2):
        here.backward(here(torch.arange(8) + mesh.rank))
        here.step()
        here.save(Path(run) / "checkpoints" / f"step-{here.steps:08d}", {"seen": here.steps}, wait=True)
    return here.state_dict()


def save_again(path: Path, again: Path) -> None:
    """Load a checkpoint on one rank under another plan, and save it."""
    here = engine(zs.Mesh(), zero=0)
    here.save(again, here.load(path), wait=True)


def damage(folder: Path, kind: str = "weight") -> str:
    """Change one bit of the first tensor of a kind in each file; the last file's name."""
    for file in sorted(folder.glob("*.safetensors")):
        content = bytearray(file.read_bytes())
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        place = next(row["data_offsets"][0] for key, row in header.items() if key.startswith(f"{kind}:"))
        content[start + place] ^= 1
        file.write_bytes(bytes(content))
    return file.name
