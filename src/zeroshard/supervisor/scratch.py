"""The supervisor's temporary folder. Folders that killed supervisors left behind are removed at the next start."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zeroshard.comm.run_lock import HELD, Owner, release

PREFIX, LIVES = "zeroshard-supervisor-", "lives"  # of the folder's name; the file locked by a running supervisor
YOUNG = 60.0  # seconds: a younger folder may not be locked yet


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for the heartbeats of this supervisor's ranks; at the end, run folders that they locked are released."""
    _sweep(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    with open(folder / LIVES, "w") as lives:
        fcntl.flock(lives, fcntl.LOCK_EX)  # released when this process ends, in any way
        try:
            yield folder
        finally:
            for link in folder.glob(f"*/*{HELD}"):
                release(link.resolve(), Owner.of(os.getpid()))
            shutil.rmtree(folder, ignore_errors=True)


def _sweep(place: Path) -> None:
    """Remove this user's folders without a running supervisor."""
    for path in place.glob(f"{PREFIX}*/{LIVES}"):
        with contextlib.suppress(OSError), path.open("r") as lives:
            facts = os.fstat(lives.fileno())
            if facts.st_uid == os.getuid() and time.time() - facts.st_mtime > YOUNG:
                fcntl.flock(lives, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
