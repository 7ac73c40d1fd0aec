"""How a rank of the main job leaves: its exit code, its last words, and what its supervisor reads."""

import os
from pathlib import Path
from typing import Any

import pytest

from zeroshard.cli.rank import leave
from zeroshard.comm.heartbeat import read_failure
from zeroshard.comm.mesh import Mesh
from zeroshard.errors import ConfigError, NonFiniteError, Stopped


class Left(BaseException):
    """The process would have ended here."""


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def leave_process(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(os, "_exit", leave_process)
    monkeypatch.setenv("ZEROSHARD_HEARTBEAT", str(tmp_path / "rank-0.heartbeat"))
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.delenv("RANK", raising=False)


@pytest.mark.parametrize(
    "error, code, words",
    [
        (
            Stopped("Stopped at step 7; the checkpoint is in runs/a."),
            75,
            "zeroshard: Stopped at step 7; the checkpoint",
        ),
        (ConfigError("no such option"), 2, "zeroshard: ConfigError: no such option"),
        (NonFiniteError("nan"), 1, "zeroshard: NonFiniteError: nan"),
        (KeyError("bad"), 1, "KeyError: 'bad'"),
    ],
)
@pytest.mark.parametrize("mesh", [None, Mesh()])
def test_leaving(
    error: Exception, code: int, words: str, mesh: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(Left) as left:
        leave(error, mesh)
    assert left.value.args == (code,)
    said = capsys.readouterr().err
    assert said.startswith(words)
    found = read_failure(tmp_path / "rank-0.heartbeat")
    if isinstance(error, Stopped):
        assert found is None and said.count("\n") == 1
    else:
        assert found is not None and (found.type, found.message) == (type(error).__name__, str(error)) and found.first
