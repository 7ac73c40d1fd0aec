"""Loggers of a run's metrics beside its folder: TensorBoard, Weights & Biases, MLflow, trackio, or code of one's own.

A logger is any object with `log(values, step)` and `close()`. What one writes lies in the run folder, or on the server
that its own environment variables name. A logger that fails while the run goes on is left out with a warning.
"""

import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from zeroshard.errors import ConfigError, ModelError
from zeroshard.train.named_models import code_named

PROJECT = "zeroshard"  # the project, or experiment, among whose runs a tracker lists this one


class Logger(Protocol):
    """Takes the metrics of steps."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take the numbers of one step, by names such as `loss` and `experts/layers.1.mlp/load`."""

    def close(self) -> None:
        """Write everything taken so far; no more comes."""


Maker = Callable[[Path, Mapping[str, Any]], Logger]


class TensorBoardLogger:
    """Event files in the folder `tensorboard` of the run."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WandbLogger:
    """A run of Weights & Biases with the name of the run folder, continued where a run is resumed."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        import wandb

        named = {"project": PROJECT, "name": folder.name, "id": folder.name, "resume": "allow"}
        self._run: Any = wandb.init(dir=str(folder), config=dict(settings), **named)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log one row."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MLflowLogger:
    """A run of MLflow with the name of the run folder, continued where a run is resumed.

    Without a tracking server of the user's it lies in the database `mlflow.db` of the run folder.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        if not mlflow.is_tracking_uri_set():
            mlflow.set_tracking_uri(f"sqlite:///{(folder / 'mlflow.db').resolve()}")
        mlflow.set_experiment(PROJECT)
        kept = folder / "mlflow_run.txt"
        self._run = mlflow.start_run(kept.read_text() if kept.exists() else None, run_name=folder.name)
        if not kept.exists():
            kept.write_text(self._run.info.run_id)
            mlflow.log_params({name: str(value)[:500] for name, value in settings.items()})

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log metrics."""
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


class TrackioLogger:
    """A run of trackio with the name of the run folder, continued where a run is resumed."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        import trackio

        self._trackio: Any = trackio
        config = {
            name: value if isinstance(value, (str, int, float)) else str(value) for name, value in settings.items()
        }
        trackio.init(project=PROJECT, name=folder.name, resume="allow", config=config)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log one row."""
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._trackio.finish()


MAKERS: Mapping[str, Maker] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MLflowLogger,
    "trackio": TrackioLogger,
}  # by the name of the package, which is that of the extra too


def check_loggers(names: Sequence[str]) -> None:
    """Refuse names of no logger, and packages that are not installed, without importing them.

    Raises:
        ConfigError: with the way out.
    """
    for name in names:
        if name not in MAKERS and code_named(name) is None:
            known = ", ".join(MAKERS)
            raise ConfigError(f"loggers has {name!r}; give {known}, or a class of your own as mine.py:Logger.")
        if name in MAKERS and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"loggers has {name!r}, whose package is not installed; run pip install 'zeroshard[{name}]', or "
                f"leave it out."
            )


class Loggers:
    """The loggers of one run.

    Args:
        folder: of the run.
        settings: options of the run, by name.

    Raises:
        ConfigError: one of them cannot be made.
    """

    def __init__(self, names: Sequence[str], folder: Path, settings: Mapping[str, Any]) -> None:
        from zeroshard.train.own_code import imported  # imports torch, which the check of names does without

        self._each: dict[str, Logger] = {}
        for name in names:
            try:
                self._each[name] = (MAKERS.get(name) or imported(name))(folder, settings)
            except ModelError as error:
                raise ConfigError(f"loggers: {error}") from error
            except Exception as error:
                raise ConfigError(
                    f"The logger {name} does not start ({type(error).__name__}: {error}); set it up, or leave it out."
                ) from error

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Give the numbers of a step to every logger."""
        for name, logger in list(self._each.items()):
            self._try(name, lambda logger=logger: logger.log(values, step))  # type: ignore[misc]

    def close(self) -> None:
        """Close every logger."""
        for name, logger in list(self._each.items()):
            self._try(name, logger.close)
        self._each.clear()

    def _try(self, name: str, call: Callable[[], None]) -> None:
        """Call a logger; one that fails is left out from here on, and the run goes on."""
        try:
            call()
        except Exception as error:
            del self._each[name]
            warnings.warn(f"The logger {name} failed ({type(error).__name__}: {error}) and is left out.", stacklevel=2)
