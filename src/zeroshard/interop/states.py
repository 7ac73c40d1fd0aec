"""States of an engine in a folder among the files of another package's checkpoint."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from zeroshard.engine import Engine
from zeroshard.errors import CheckpointError

STATES: Final = "zeroshard"  # the folder of the engine's states inside of such a checkpoint


def save_states(engine: Engine, folder: Path, extra: Mapping[str, Any]) -> None:
    """Write weights, optimizer states, step and `extra` into `folder`, in place of an older version.

    A collective call, which returns when the files are complete. The older version is removed last.

    Raises:
        CheckpointError: as `Engine.save`; or ranks name different folders.
    """
    named = sorted(set(engine.world.agree_on(str(folder), "folder of states")))
    if len(named) > 1:
        raise CheckpointError(
            f"The ranks save into different folders, {named[0]} and {named[1]}, and a checkpoint is one folder that "
            f"all ranks write. Give all ranks the same output folder."
        )
    states = folder / STATES
    fresh = states.with_name(f"{STATES}.new")
    if engine.rank == 0:
        for left in folder.glob(f"{fresh.name}*"):  # by a writing that was cut off
            shutil.rmtree(left, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    engine.world.agree(b"", "begin states")
    engine.save(fresh, extra, wait=True)
    if engine.rank == 0:
        shutil.rmtree(states, ignore_errors=True)
        fresh.rename(states)
    engine.world.agree(b"", "end states")


def load_states(engine: Engine, folder: Path) -> dict[str, Any]:
    """Load the states of `save_states`; returns its `extra`. A collective call.

    Raises:
        CheckpointError: the folder has no states, or those of another model or optimizer.
    """
    if not has_states(folder):
        raise CheckpointError(
            f"{folder} has no folder {STATES!r}, in which the engine's weights and optimizer states are. It was "
            f"written without an engine, or its writing was cut off: take another one, or load its weights alone by "
            f"engine.load_weights(...)."
        )
    return engine.load(folder / STATES)


def has_states(folder: Path) -> bool:
    """Whether `save_states` has completed in `folder`."""
    return (folder / STATES).is_dir()
