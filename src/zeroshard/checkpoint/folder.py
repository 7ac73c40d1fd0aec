"""A folder of checkpoints, one per saved step: the committed ones, and the removal of old ones."""

import contextlib
import re
from pathlib import Path

from zeroshard.checkpoint.disk import CheckpointDisk
from zeroshard.checkpoint.manifest import MANIFEST
from zeroshard.checkpoint.reader import Reader
from zeroshard.errors import CheckpointError

STEP = re.compile(r"step-([0-9]{8,})")
LEFT_OVER = re.compile(r"step-[0-9]{8,}\.(tmp|gone)-.*")


def name_of(step: int) -> str:
    """The name of a step's checkpoint; they sort by step."""
    return f"step-{step:08d}"


def committed(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of every checkpoint in a folder that was committed and not put aside, oldest first."""
    if not folder.is_dir():
        return []
    found = ((STEP.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match and (path / MANIFEST).is_file())


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`; of a run folder or a folder of checkpoints, the newest; else `path` itself."""
    if not (path / MANIFEST).exists():
        for folder in (path / "checkpoints", path):
            if found := committed(folder):
                return found[-1][1]
    return path


def put_aside(path: Path, disk: CheckpointDisk | None = None) -> Path:
    """Rename a damaged checkpoint to `NAME.bad`, so that it is no candidate any more; nothing is deleted."""
    for number in range(1000):
        aside = path.with_name(f"{path.name}.bad" + (f"-{number}" if number else ""))
        if not aside.exists():
            break
    (disk or CheckpointDisk()).rename(path, aside)
    return aside


def clear(folder: Path, disk: CheckpointDisk | None = None) -> None:
    """Remove half-written and half-removed checkpoints of a dead run; no run may be writing into the folder."""
    if folder.is_dir():
        for path in folder.iterdir():
            if LEFT_OVER.fullmatch(path.name):
                (disk or CheckpointDisk()).remove(path)


def retain(newest: Path, keep: int, disk: CheckpointDisk) -> None:
    """Remove the oldest checkpoints beside `newest` until `keep` remain, `newest` included.

    Raises:
        CheckpointError: `newest` cannot be read back; nothing was removed.
    """
    for problem in Reader(newest).problems(sample=True):
        raise CheckpointError(problem)
    with contextlib.suppress(OSError):  # a later save removes them
        others = [path for _, path in committed(newest.parent) if path.name != newest.name]
        for path in others[: max(0, len(others) - max(0, keep - 1))]:
            gone = path.with_name(f"{path.name}.gone-{newest.name}")
            disk.rename(path, gone)
            disk.remove(gone)
