"""The folder of a run: its options, metrics as JSON lines, memory of one step, summary, checkpoints and report."""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TextIO

from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import Mesh, attempt, job, owner
from zeroshard.comm.run_lock import HELD, Owner, hold, release
from zeroshard.data.files import parse_sources
from zeroshard.errors import ConfigError
from zeroshard.memory.ledger import Category, Event
from zeroshard.planning.adapters import RANK
from zeroshard.planning.settings import flat
from zeroshard.train.config import TrainConfig
from zeroshard.train.loggers import Loggers
from zeroshard.train.toml_config import dump_toml

LOCK = "run.lock"  # names the process that works in the folder
STAMP = len("20261122-170000")  # characters of the date in a run folder's name
STARTS = "starts.json"  # date, machines, command line, versions and git state of each start
MOST_MEMORIES = 64  # ranks that write their memory over the recorded step
SAME = "run.json"  # options that must be equal to resume the run
EARLIER = {"pretrained": True, "truncate": False, "columns": [], "adapters": None, "adapter_rank": RANK}  # without them


class RunFolder:
    """Writes a run's files, on one rank; on the other ranks only the path.

    Attributes:
        continued: whether the folder is that of a run that was cut off.
        split: that run's cuts between stages, reused because newly measured layer times might move them.
        peak_bytes: the most that the ledger held on the device in the recorded step; None before it.
    """

    def __init__(self, path: Path, continued: bool, split: Sequence[str]) -> None:
        self.path, self.continued, self.split = path, continued, tuple(split)
        self.peak_bytes: int | None = None
        self._metrics: TextIO | None = None
        self._loggers: Loggers | None = None
        self._owner: Owner | None = None  # on the rank that holds the lock
        self._above: list[Path] = []  # folders that were made for this one, the innermost first

    @classmethod
    def create(cls, config: TrainConfig, comm: Comm) -> "RunFolder":
        """The folder of the run to resume, or a new one in `config.out`, named by the date; the same on all ranks.

        After a failure the next attempt resumes its job's own run; with `resume="auto"` any start resumes the newest
        unfinished run.

        Raises:
            ConfigError: it cannot be made, or another run works in it.
        """
        names = comm.agree_on(time.strftime("%Y%m%d-%H%M%S"), "name of the run folder")
        problem, path, found = "", config.out / names[0], None
        above = [folder for folder in path.parents if not folder.exists()]
        if comm.mesh.rank == 0:
            try:
                found = unfinished(config)
                path = found or _new_folder(path)
                _lock(path, comm.mesh)
                if found is None:
                    dump_toml(replace(config), path / "config.toml")
                    _replace(path / SAME, {"job": job(), "ranks": comm.mesh.ranks, **_identity(config)})
            except ConfigError as error:
                problem = str(error)
            except OSError as error:
                problem = f"The run folder {path} cannot be made ({error.strerror}); choose another with --out."
        splits = json.loads((found / SAME).read_text()).get("split", {}) if found else {}
        fields = [str(path), problem, found is not None, splits.get(_cut_settings(config), ())]
        path, problem, continued, split = comm.agree_on(fields, "run folder")[0]
        if problem:
            raise ConfigError(problem)
        folder = cls(Path(path), continued, split)
        folder._owner = owner() if comm.mesh.rank == 0 else None
        folder._above = above
        return folder

    def open(self, config: TrainConfig, split: Sequence[str], start: Mapping[str, Any]) -> None:
        """Open the files, on the rank that writes them.

        Args:
            split: the layers at which the model was cut.
            start: the origin of this start, which is kept beside those of earlier ones.
        """
        self._metrics = _appending(self.path / "metrics.jsonl")
        self._loggers = Loggers(config.loggers, self.path, _settings(config))
        kept = json.loads((self.path / SAME).read_text())
        splits = {**kept.get("split", {}), _cut_settings(config): list(split)}
        _replace(self.path / SAME, {**kept, "split": splits})
        before = json.loads((self.path / STARTS).read_text())["starts"] if (self.path / STARTS).exists() else []
        _replace(self.path / STARTS, {"starts": [*before, start]})

    def write_metrics(self, metrics: dict[str, Any]) -> None:
        """Append one line of metrics."""
        if self._metrics is not None:
            self._metrics.write(json.dumps(metrics) + "\n")
        if self._loggers is not None:
            self._loggers.log(dict(_scalars(metrics)), metrics["step"])

    def write_memory(self, events: Sequence[Event], places: Sequence[tuple[str, str]], rank: int) -> None:
        """Write the memory of one step, for the report's charts; each rank that sees the folder writes its own.

        Args:
            places: phase and layer of every event; empty texts outside of layers.
        """
        self.peak_bytes = max((sum(event.nbytes.values()) for event in events), default=None)
        if self._metrics is None and not (rank < MOST_MEMORIES and self.path.is_dir()):
            return
        rows = [
            {
                "t": event.t,
                "label": event.label,
                "bytes": event.nbytes,
                **({"phase": phase, "layer": layer} if layer else {}),
            }
            for event, (phase, layer) in zip(events, places, strict=True)
        ]
        content = {"rank": rank, "categories": [str(category) for category in Category], "events": rows}
        name = f"memory-rank{rank}.json" if self._metrics is None else "memory.json"
        (self.path / name).write_text(json.dumps(content))

    def write_prediction(self, content: dict[str, Any]) -> None:
        """Write the prediction, later with the measurements."""
        if self._metrics is not None:
            _replace(self.path / "prediction.json", content)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the results of the run."""
        if self._metrics is not None:
            (self.path / "summary.json").write_text(json.dumps(summary, indent=1))

    def close(self, over: bool) -> None:
        """Close the files, and release the lock if the run is over and not just this attempt of a supervised job."""
        if self._owner is not None and (over or self._owner.pid == os.getpid()):
            release(self.path / LOCK, self._owner)
        if self._metrics is not None:
            self._metrics.close()
        if self._loggers is not None:
            self._loggers.close()

    def discard_unless_begun(self) -> None:
        """Remove the folder after a start that failed before its first step, on the rank that made it."""
        self.close(over=False)
        metrics = self.path / "metrics.jsonl"
        begun = self.continued or (metrics.exists() and metrics.stat().st_size > 0)
        if self._owner is None or begun:
            return
        with contextlib.suppress(OSError):  # it holds more, such as a checkpoint or the files of a logger
            for name in ("metrics.jsonl", "config.toml", SAME, STARTS, "prediction.json", LOCK):
                (self.path / name).unlink(missing_ok=True)
            for folder in (self.path, *self._above):
                folder.rmdir()


def _scalars(metrics: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    """The floats of a line of metrics, those inside of tables by their paths."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{above}{name}/")
        elif isinstance(value, float) and name != "seconds":
            yield above + name, value


def _new_folder(path: Path) -> Path:
    """Make the folder, with a number behind its name where the name is taken.

    Raises:
        OSError: it cannot be made.
    """
    for number in range(1, 1000):
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            path = path.with_name(f"{path.name[:STAMP]}-{number}")
    return path


def _lock(path: Path, mesh: Mesh) -> None:
    """Lock a run folder; a link to the lock lets the supervisor release it when no attempt follows.

    Raises:
        ConfigError: another run works in it.
        OSError: it cannot be written.
    """
    hold(path / LOCK, owner())
    if mesh.heartbeat is not None:
        link = mesh.heartbeat.path.with_suffix(HELD)
        link.unlink(missing_ok=True)
        link.symlink_to((path / LOCK).resolve())


def _identity(config: TrainConfig) -> dict[str, Any]:
    """The options by which a later start recognises a run as its own."""
    named = parse_sources(config.data)
    data = [f"{path.resolve()}{'' if weight is None else f':{weight}'}" for path, weight in named]
    names = ("model", "pretrained", "tokenizer", "sequence", "optimizer", "truncate", "adapters", "adapter_rank")
    given = {name: getattr(config, name) for name in names}
    return {"data": data, "seed": config.plan.seed, "columns": list(config.columns), **given}


def _settings(config: TrainConfig) -> dict[str, Any]:
    """The options of a run by their names, those of its plan too, for loggers."""
    options = {field.name: getattr(config, field.name) for field in fields(config) if field.name != "plan"}
    return {**options, **dict(flat(config.plan.as_dict()))}


def _cut_settings(config: TrainConfig) -> str:
    """The settings that decide where a model is cut, besides the measured times of its layers."""
    plan = config.plan
    return json.dumps([plan.pipeline.stages, plan.pipeline.virtual_stages, plan.pipeline.balance, plan.pipeline.split])


def unfinished(config: TrainConfig) -> Path | None:
    """The newest run in `config.out` that this start resumes, or None."""
    automatic = config.resume == "auto"
    if not (automatic or attempt()) or not config.out.is_dir():
        return None
    for path in sorted(config.out.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            kept = {**EARLIER, **json.loads((path / SAME).read_text())}
        except (OSError, ValueError):
            continue
        mine = {"job": kept.get("job") if automatic else job(), **_identity(config)}
        if kept | mine == kept and not (path / "summary.json").exists():
            return path
    return None


def _replace(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    fresh = path.with_suffix(".fresh")
    fresh.write_text(json.dumps(content))
    fresh.replace(path)


def _appending(path: Path) -> TextIO:
    """Open a file to append lines; a last line that a dying process cut off is ended first."""
    cut = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
    file = path.open("a", buffering=1)
    if cut:
        file.write("\n")
    return file
