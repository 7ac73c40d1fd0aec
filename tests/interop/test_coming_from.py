"""Both sides of every loop on the page end at the same loss on two ranks, and its other blocks run."""

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interop.network import REAL, Network
from jobs import run_job

ROOT = Path(__file__).parents[2]
DEEPSPEED = (1.900637, 0.472144)  # each rank's last loss of the old side under DeepSpeed 0.19.6
PAGE = (ROOT / "docs" / "coming_from.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def side(diff: str, other: str) -> str:
    """One side of a diff: without the lines that begin with `other`."""
    lines = [line for line in diff.splitlines() if not line.startswith(other)]
    return "\n".join(line[1:] for line in lines) + "\n"


def test_both_sides_of_the_loops_end_at_one_loss(tmp_path: Path) -> None:
    loops = dict(zip(("ddp", "fsdp2", "deepspeed"), blocks("diff"), strict=True))
    for name, diff in loops.items():
        (tmp_path / f"{name}_new.py").write_text(side(diff, "-"))
        old = side(diff, "+")
        compile(old, name, "exec")
        if name != "deepspeed":  # which the suite does not install
            (tmp_path / f"{name}_old.py").write_text(old)
    run_job(ROOT / "tests" / "interop" / "coming_from_runs.py", str(tmp_path))
    first, second = (json.loads((tmp_path / f"losses-{rank}.json").read_text()) for rank in range(2))
    assert first["ddp_new"] != second["ddp_new"]
    for losses, wanted in zip((first, second), DEEPSPEED, strict=True):
        assert losses["ddp_new"] == pytest.approx(losses["ddp_old"], rel=1e-4)
        assert losses["fsdp2_new"] == pytest.approx(losses["fsdp2_old"], rel=1e-4)
        assert losses["deepspeed_new"] == pytest.approx(wanted, rel=1e-4)


def test_weights_of_deepspeed_are_those_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(Network):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("hidden", None)  # blocks speak of models whose buffers are all in the checkpoint

    shutil.copytree(REAL / "stage3", tmp_path / "runs" / "old")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "train", SimpleNamespace(Model=Model))
    found = [code for code in blocks("python") if "from train import Model" in code]
    assert len(found) == 2
    for code in found:
        names: dict[str, Any] = {}
        exec(code, names)
        state, weights = names["engine"].state_dict(), names["weights"]
        assert all(torch.equal(value, weights[name].to(value.dtype)) for name, value in state.items())


def test_every_language_on_the_page_is_run() -> None:
    assert set(re.findall(r"^```(\w+)$", PAGE, re.MULTILINE)) == {"diff", "python"}
