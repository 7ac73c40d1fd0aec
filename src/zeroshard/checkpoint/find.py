"""Which checkpoint a person means who names a run."""

from pathlib import Path

from zeroshard.checkpoint.folder import committed
from zeroshard.checkpoint.manifest import MANIFEST


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`; of a run folder or a folder of checkpoints, the newest; else `path` itself."""
    if not (path / MANIFEST).exists():
        for folder in (path / "checkpoints", path):
            if found := committed(folder):
                return found[-1][1]
    return path
