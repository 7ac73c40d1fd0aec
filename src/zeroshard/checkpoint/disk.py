"""The few operations by which a checkpoint gets onto a disk, in one place: each can fail, and tests make each fail."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

BUFFER = 2**20  # bytes of small writes that are collected


class CheckpointDisk:
    """Writes files and folders so that they survive a loss of power once they are synced.

    Every operation first calls `reached` with its name and path, which does nothing here.
    """

    def reached(self, operation: str, path: Path) -> None:
        """An operation is about to begin."""

    def make_folder(self, path: Path) -> None:
        """Make a folder and those above it, whose names are synced; it may be there: every rank asks for it."""
        self.reached("make folder", path)
        made = [folder for folder in path.parents if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in made:
            self.sync_folder(folder.parent)

    @contextlib.contextmanager
    def create(self, path: Path) -> Iterator[BinaryIO]:
        """A new file to write into, closed at the end; it must not be there yet."""
        self.reached("create", path)
        file = path.open("xb", buffering=BUFFER)
        try:
            yield file
            file.close()
        finally:
            with contextlib.suppress(OSError):  # what made the write fail fails again when it is closed
                file.close()

    def write(self, file: BinaryIO, content: bytes | memoryview) -> None:
        """Append to a file."""
        self.reached("write", Path(file.name))
        file.write(content)

    def sync(self, file: BinaryIO) -> None:
        """Bring a file onto the disk."""
        self.reached("flush", Path(file.name))
        file.flush()
        self.reached("sync", Path(file.name))
        os.fsync(file.fileno())

    def sync_folder(self, folder: Path) -> None:
        """Bring the names in a folder onto the disk."""
        self.reached("sync folder", folder)
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, path: Path, to: Path) -> None:
        """Give a folder another name in one step; nothing may be there but an empty folder."""
        self.reached("rename", path)
        path.rename(to)

    def remove(self, folder: Path) -> None:
        """Remove a folder and what is in it; what is gone already is no error."""
        self.reached("remove", folder)
        shutil.rmtree(folder, ignore_errors=True)
