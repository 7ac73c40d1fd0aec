"""The disk operations of a checkpoint in one file: each can fail, and tests make each fail."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

BUFFER = 2**20  # bytes of the buffer for small writes


class CheckpointDisk:
    """Writes files and folders so that they survive a loss of power once they are synced.

    Every operation first calls `reached` with its name and path; tests override it.
    """

    def reached(self, operation: str, path: Path) -> None:
        """Called at the start of every operation."""

    def make_folder(self, path: Path) -> None:
        """Make a folder and its missing parents, and sync their names; all ranks call it, so the folder may exist."""
        self.reached("make folder", path)
        made = [folder for folder in path.parents if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in made:
            self.sync_folder(folder.parent)

    @contextlib.contextmanager
    def create(self, path: Path) -> Iterator[BinaryIO]:
        """A new file to write into, closed at the end; it must not exist yet."""
        self.reached("create", path)
        file = path.open("xb", buffering=BUFFER)
        try:
            yield file
            file.close()
        finally:
            with contextlib.suppress(OSError):  # the cause of a failed write makes the close fail too
                file.close()

    def write(self, file: BinaryIO, content: bytes | memoryview) -> None:
        """Append to a file."""
        self.reached("write", Path(file.name))
        file.write(content)

    def sync(self, file: BinaryIO) -> None:
        """Flush and sync a file."""
        self.reached("flush", Path(file.name))
        file.flush()
        self.reached("sync", Path(file.name))
        os.fsync(file.fileno())

    def sync_folder(self, folder: Path) -> None:
        """Sync the names in a folder."""
        self.reached("sync folder", folder)
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, path: Path, to: Path) -> None:
        """Rename a folder in one step; only an empty folder may have the new name."""
        self.reached("rename", path)
        path.rename(to)

    def remove(self, folder: Path) -> None:
        """Remove a folder and its content; files that are gone already are no error."""
        self.reached("remove", folder)
        shutil.rmtree(folder, ignore_errors=True)
