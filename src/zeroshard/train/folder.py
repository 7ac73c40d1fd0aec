"""The folder of a run: its options, metrics as JSON lines, memory of one step, summary, checkpoint and report."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zeroshard.comm import Comm
from zeroshard.errors import ConfigError
from zeroshard.ledger import Category, Event
from zeroshard.train.config import TrainConfig
from zeroshard.train.toml_config import dump_toml


class RunFolder:
    """Writes a run's files; only one rank does, the others know the path."""

    def __init__(self, path: Path, writes: bool, tensorboard: bool = False) -> None:
        self.path = path
        self._metrics = (path / "metrics.jsonl").open("a", buffering=1) if writes else None
        self._board = _board(path) if writes and tensorboard else None

    @classmethod
    def create(cls, config: TrainConfig, comm: Comm, writes: bool) -> "RunFolder":
        """A new folder below `config.out`, named by the date, the same on all ranks; one of them `writes` into it.

        Raises:
            ConfigError: it cannot be made.
        """
        names = comm.agree_on(time.strftime("%Y%m%d-%H%M%S"), "name of the run folder")
        problem, path = None, config.out / names[0]
        if comm.mesh.rank == 0:
            try:
                for number in range(1, 1000):
                    try:
                        path.mkdir(parents=True)
                        break
                    except FileExistsError:
                        path = config.out / f"{names[0]}-{number}"
                dump_toml(replace(config), path / "config.toml")
            except OSError as error:
                problem = f"The run folder {path} cannot be made ({error.strerror}); choose another with --out."
        answers = comm.agree_on([str(path), problem], "run folder")
        if answers[0][1]:
            raise ConfigError(answers[0][1])
        return cls(Path(answers[0][0]), writes, config.tensorboard)

    def write_metrics(self, metrics: dict[str, Any]) -> None:
        """Append one line."""
        if self._metrics is not None:
            self._metrics.write(json.dumps(metrics) + "\n")
        if self._board is not None:
            for name, value in metrics.items():
                if isinstance(value, float) and name != "seconds":
                    self._board.add_scalar(name, value, metrics["step"])

    def write_memory(self, events: Sequence[Event], rank: int) -> None:
        """Keep the memory of one step, for the report's picture."""
        if self._metrics is not None:
            rows = [{"t": event.t, "label": event.label, "bytes": event.nbytes} for event in events]
            content = {"rank": rank, "categories": [str(category) for category in Category], "events": rows}
            (self.path / "memory.json").write_text(json.dumps(content))

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Keep what the run came to."""
        if self._metrics is not None:
            self._metrics.close()
            (self.path / "summary.json").write_text(json.dumps(summary, indent=1))
        if self._board is not None:
            self._board.close()


def _board(path: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "--tensorboard needs the package tensorboard; run pip install 'zeroshard[tensorboard]', or leave it out."
        ) from error
    return SummaryWriter(str(path / "tensorboard"))
