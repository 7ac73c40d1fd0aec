"""Loggers of a run, with a logger of the user's own; those of packages where they are installed."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from zeroshard import ConfigError
from zeroshard.train.config import TrainConfig
from zeroshard.train.loggers import Loggers, check_loggers

OWN = """
class Logger:
    def __init__(self, folder, settings):
        self.path, self.rows, self.settings = folder / "own.json", [], settings
    def log(self, values, step):
        if step == self.settings.get("breaks_at"):
            raise OSError("the disk is full")
        self.rows.append([step, dict(values)])
    def close(self):
        import json
        self.path.write_text(json.dumps(self.rows))
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a logger in a file of the user."""
    (tmp_path / "mine_logger.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine_logger", raising=False)
    return f"{tmp_path / 'mine_logger.py'}:Logger"


def test_a_logger_of_the_user_gets_every_step(own: str, tmp_path: Path) -> None:
    loggers = Loggers([own], tmp_path, {})
    loggers.log({"loss": 2.0}, 1)
    loggers.log({"loss": 1.0, "experts/a/load": 3.0}, 2)
    loggers.close()
    rows = json.loads((tmp_path / "own.json").read_text())
    assert rows == [[1, {"loss": 2.0}], [2, {"loss": 1.0, "experts/a/load": 3.0}]]


def test_a_logger_that_fails_is_left_out_with_a_warning(own: str, tmp_path: Path) -> None:
    loggers = Loggers([own], tmp_path, {"breaks_at": 2})
    loggers.log({"loss": 2.0}, 1)
    with pytest.warns(UserWarning, match=r"mine_logger.py:Logger failed \(OSError: the disk is full\) and is left out"):
        loggers.log({"loss": 1.0}, 2)
    loggers.log({"loss": 0.5}, 3)
    loggers.close()
    assert not (tmp_path / "own.json").exists()


def test_wrong_names_and_missing_packages_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="loggers has 'comet'; give tensorboard, wandb, mlflow, trackio"):
        TrainConfig(loggers=("comet",))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'wandb', whose package is not installed; run pip install .*\[wandb"):
        check_loggers(["wandb"])


def test_a_logger_that_does_not_start_refuses_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ModuleType("trackio")
    monkeypatch.setitem(sys.modules, "trackio", broken)  # without the function that makes a run
    with pytest.raises(ConfigError, match="The logger trackio does not start"):
        Loggers(["trackio"], tmp_path, {})
    with pytest.raises(ConfigError, match=r"loggers: .*none\.py, which does not exist"):
        Loggers([f"{tmp_path / 'none.py'}:Logger"], tmp_path, {})


def test_a_stored_run_that_wrote_tensorboard_events_still_does() -> None:
    stored = TrainConfig.stored({"tensorboard": True, "plan": {}})
    assert stored["loggers"] == ["tensorboard"] and "tensorboard" not in stored
    assert "loggers" not in TrainConfig.stored({"tensorboard": False, "plan": {}})


@pytest.mark.filterwarnings("ignore")  # their own
@pytest.mark.parametrize("package", ["wandb", "mlflow", "trackio"])
def test_trackers_take_a_run_and_its_resumption(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    pytest.importorskip(package)
    for first in (1, 3):
        loggers = Loggers([package], tmp_path, {"steps": 4, "data": ("a",)})
        loggers.log({"loss": 1.0 / first}, first)
        loggers.close()
    if package == "mlflow":
        import mlflow

        run = mlflow.search_runs(experiment_names=["zeroshard"], output_format="list")[0]
        history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
        assert [(point.step, point.value) for point in history] == [(1, 1.0), (3, 1.0 / 3)]
    else:
        assert any(path.is_file() for path in tmp_path.rglob("*") if package == "wandb" or path.suffix == ".db")
