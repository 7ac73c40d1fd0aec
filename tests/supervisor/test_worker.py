"""A worker runs a script as Python would."""

import random
import sys
from pathlib import Path

import pytest

from zeroshard.supervisor import fork_server, worker


@pytest.fixture(autouse=True)
def own_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker may change, because the process is its own."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("atexit._run_exitfuncs", lambda: None)


@pytest.mark.parametrize(
    "body, code, words",
    [
        ("import helper; print(__name__, sys.argv[1:], helper.x)", 0, "__main__ ['a', '--b'] 5"),
        ("sys.exit()", 0, ""),
        ("sys.exit(75)", 75, ""),
        ("sys.exit(256 + 3)", 3, ""),
        ("sys.exit('no data')", 1, "no data"),
        ("raise ValueError('bad')", 1, "ValueError: bad"),
    ],
)
def test_a_script(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], body: str, code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    (tmp_path / "helper.py").write_text("x = 5")
    script = tmp_path / "job.py"
    script.write_text(f"import sys\n{body}\n")
    assert worker._end(tmp_path / "rank-0.heartbeat", [str(script), "a", "--b"]) == code
    out, err = capfd.readouterr()
    assert words in out + err
    assert (tmp_path / "rank-0.failure").exists() == ("ValueError" in words)
    if "ValueError" in words:
        assert "worker.py" not in err and "runpy" not in err and f'"{script}", line 2' in err
    sys.modules.pop("helper", None)


def test_random_numbers_are_not_those_of_the_fork_server() -> None:
    state = random.getstate()
    worker._seed_afresh()
    assert random.getstate() != state


def test_the_fork_server_settles_nowhere_else() -> None:
    """Imported here it must not have tied this process to its parent."""
    import ctypes

    found = ctypes.c_int(-1)
    assert ctypes.CDLL(None).prctl(2, ctypes.byref(found), 0, 0, 0) == 0  # PR_GET_PDEATHSIG
    assert found.value == 0 and fork_server.PID > 0
