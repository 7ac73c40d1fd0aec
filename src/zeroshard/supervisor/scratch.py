"""The supervisor's temporary folder. What a killed supervisor left behind goes with the next start."""

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

PREFIX, LIVES = "zeroshard-supervisor-", "lives"  # of the folder; the file in it that a supervisor locks while it lives
YOUNG = 60.0  # seconds in which a supervisor has locked the folder that it has made


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for the pulses of this supervisor's ranks; in the end, run folders that they locked are free again."""
    _sweep(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    with open(folder / LIVES, "w") as lives:
        fcntl.flock(lives, fcntl.LOCK_EX)  # until this process ends, however it does
        try:
            yield folder
        finally:
            for link in folder.glob(f"*/*{HELD}"):
                release(link.resolve(), Owner.of(os.getpid()))
            shutil.rmtree(folder, ignore_errors=True)


def _sweep(place: Path) -> None:
    """Remove this user's folders that no supervisor holds any more."""
    for path in place.glob(f"{PREFIX}*/{LIVES}"):
        with contextlib.suppress(OSError), path.open("r") as lives:
            facts = os.fstat(lives.fileno())
            if facts.st_uid == os.getuid() and time.time() - facts.st_mtime > YOUNG:
                fcntl.flock(lives, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
