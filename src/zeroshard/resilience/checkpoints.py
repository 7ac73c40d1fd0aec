"""The checkpoints of one run: saved by step, the newest kept, and after a failure the newest good one found again."""

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeroshard.checkpoint import Saving, clear, committed, name_of, put_aside
from zeroshard.checkpoint.writer import finish_all
from zeroshard.engine import Engine
from zeroshard.errors import CheckpointError, CheckpointWarning, DamagedError
from zeroshard.resilience.loaders import StatefulLoader, check_loader, restore, with_loader

LOG = logging.getLogger(__name__)


class Checkpoints:
    """A folder of checkpoints such as `step-00000100`, named by the engine's step, in a loop such as::

        checkpoints = zs.Checkpoints(engine, "runs/a", keep=3)
        extra = checkpoints.resume()                       # None in a new run
        ...
        if engine.steps % 100 == 0:
            checkpoints.save({"epoch": epoch})

    No file names the newest: it is the one with the highest step whose content verifies. Made by all
    ranks together, as all its methods are called.

    Args:
        keep: number of checkpoints that stay; older ones are removed when a newer one was written and read back.
        loader: of the data, with `state_dict` and `load_state_dict`, as torchdata's StatefulDataLoader has them; it is
            saved and resumed with the engine.

    Raises:
        CheckpointError: `keep` is less than 1, or a loader without a state.
    """

    def __init__(self, engine: Engine, folder: str | Path, keep: int = 2, loader: StatefulLoader | None = None) -> None:
        if isinstance(folder, Engine):
            raise CheckpointError(
                f"Checkpoints was given an engine as its folder and {engine!r} as its engine; write "
                f"Checkpoints(engine, folder)."
            )
        if Path(folder).is_file():
            raise CheckpointError(f"The folder of the checkpoints, {folder}, is a file; name a folder.")
        if loader is not None:
            check_loader(loader)
        if keep < 1:
            raise CheckpointError(f"keep is {keep}; it must be 1 or more, or nothing would be left to go on from.")
        self.engine, self.folder, self.keep, self.loader = engine, Path(folder), keep, loader
        finish_all()  # an earlier engine's half-written checkpoint would be removed
        if engine.world.mesh.rank == 0:
            clear(self.folder)
        engine.world.agree(b"", "checkpoints are cleared")

    def save(self, extra: Mapping[str, Any] | None = None, *, wait: bool = False) -> Saving:
        """Save this step's checkpoint while training goes on; see `Engine.save`.

        Raises:
            CheckpointError: it is there already, or cannot be begun; with `wait`, also if writing it failed.
        """
        if self.loader is not None:
            extra = with_loader(self.engine, self.loader, extra or {})
        return self.engine.save(self.folder / name_of(self.engine.steps), extra, keep=self.keep, wait=wait)

    def steps(self) -> list[int]:
        """The steps of all checkpoints, oldest first, after waiting for those that this process is writing."""
        return _steps(self.engine, self.folder)

    def resume(self) -> dict[str, Any] | None:
        """Go on from the newest good checkpoint; returns its `extra`, or None if there is no checkpoint.

        A damaged one is renamed to `NAME.bad`, with a `CheckpointWarning`, and the one before it is taken.

        Raises:
            DamagedError: all are damaged. CheckpointError: the newest is of another model or optimizer, or has no state
                of the loader.
        """
        extra = resume(self.engine, self.folder)
        return None if extra is None else restore(self.engine, self.loader, extra)

    def back_to(self, step: int) -> dict[str, Any]:
        """Go back to the checkpoint of `step`; later ones are renamed.

        Raises:
            CheckpointError: it is not there, or cannot be read.
        """
        self.engine.flush()
        steps = self.steps()
        for later in (other for other in steps if other > step and step in steps):
            _put_aside(self.engine, self.folder / name_of(later))
        return restore(self.engine, self.loader, self.engine.load(self.folder / name_of(step)))


def resume(engine: Engine, folder: Path) -> dict[str, Any] | None:
    """Go on from the newest good checkpoint of any folder; see `Checkpoints.resume`."""
    steps, problem = _steps(engine, folder), ""
    for step in reversed(steps):
        path = folder / name_of(step)
        try:
            extra = engine.load(path)
            LOG.info("going on from %s on rank %d", path, engine.rank)
            return extra
        except DamagedError as error:
            problem = str(error)
            aside = _put_aside(engine, path)
            warnings.warn(f"{problem} It is now {aside}; trying the one before.", CheckpointWarning, stacklevel=3)
    if steps:
        raise DamagedError(f"None of the {len(steps)} checkpoints in {folder} is whole; the last: {problem}")
    return None


def _steps(engine: Engine, folder: Path) -> list[int]:
    """The steps of all committed checkpoints, oldest first, as rank 0 sees them."""
    finish_all()
    found: list[int] = engine.world.agree_on([step for step, _ in committed(folder)], "checkpoints")[0]
    return found


def _put_aside(engine: Engine, path: Path) -> str:
    """Rename a checkpoint on rank 0; returns its new name, or the reason for the failure."""
    name = ""
    if engine.world.mesh.rank == 0:
        try:
            name = put_aside(path).name
        except OSError as error:
            name = f"still there ({error.strerror})"
    return str(engine.world.agree_on(name, "a checkpoint is put aside")[0])
