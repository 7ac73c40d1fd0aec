"""Shared libraries from C++ sources of the package, built once per machine into the user's cache.

[Note: dispatch] A library is built for this machine's processor, with all its instructions (AVX2 or AVX-512 on x86).
The file's name has a digest of source, headers, flags, compiler and processor, so machines with a shared cache and
other instructions use other files.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from zeroshard.comm.mesh import user_cache

LOG = logging.getLogger(__name__)
SOURCES = Path(__file__).parent  # of the package's own kernels
COMPILERS = ("c++", "g++", "clang++")
NATIVE = ("-march=native", "-mcpu=native")  # the second where the first is not known
PATIENCE = 300.0  # seconds


def compiler() -> str | None:
    """The C++ compiler of this machine, if it has one."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def library(source: Path, flags: Sequence[str]) -> ctypes.CDLL:
    """The library of one source file, built if no earlier process has done so.

    Args:
        source: a C++ file with a plain C interface; headers of its own are in its folder.
        flags: of the compiler, besides the one for this machine's processor.

    Raises:
        OSError: there is no C++ compiler, or it fails.
    """
    command = compiler()
    if command is None:
        raise OSError(f"No C++ compiler was found ({', '.join(COMPILERS)}). Install one.")
    headers = sorted(source.parent.glob("*.h"))
    parts = [*(path.read_bytes() for path in (source, *headers)), " ".join(flags).encode(), _target(command).encode()]
    built = _folder() / f"{source.stem}-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"
    if not built.exists():
        with _alone(built):
            if not built.exists():
                LOG.info("compiling the kernel %s into %s, once for this machine", source.stem, built.parent)
                _build(command, source, flags, built)
    try:
        return ctypes.CDLL(str(built))
    except OSError as error:
        raise OSError(f"The kernel {source.stem} cannot be loaded: {error}. Delete {built}.") from error


def _folder() -> Path:
    cache_folder = user_cache() or "~/.cache"
    return Path(cache_folder).expanduser() / "zeroshard"


def _target(compiler: str) -> str:
    """The compiler and this CPU, which determine a kernel's machine code besides source and flags."""
    cpu = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        parts = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
        lines = info.read_text().split("\n\n")[0].splitlines()
        cpu += "\n".join(line for line in lines if line.split("\t")[0].split(":")[0].strip() in parts)
    return f"{Path(compiler).resolve()} {os.path.getmtime(compiler)} {cpu}"


@contextlib.contextmanager
def _alone(built: Path) -> Iterator[None]:
    """Build a library in one process while others wait for it; a lock ends with its process.

    Without file locks, or after `PATIENCE` seconds, each process builds it.
    """
    with contextlib.ExitStack() as inside:
        with contextlib.suppress(OSError):  # `_build` reports a folder that cannot be written
            built.parent.mkdir(parents=True, exist_ok=True)
            lock = inside.enter_context(built.with_suffix(".lock").open("w"))
            until = time.monotonic() + PATIENCE
            while time.monotonic() < until:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.05)
        yield


def _build(compiler: str, source: Path, flags: Sequence[str], built: Path) -> None:
    """Compile into a temporary file, then rename, so that no process reads an incomplete one."""
    try:
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            result = Path(folder) / built.name
            for native in NATIVE:
                command = [compiler, *flags, native, "-o", str(result), str(source)]
                done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
                if done.returncode == 0:
                    result.rename(built)
                    return
    except (OSError, subprocess.SubprocessError) as error:
        raise OSError(f"The kernel {source.stem} could not be built in {built.parent}: {error}.") from error
    raise OSError(f"{compiler} could not build the kernel {source.stem}: {done.stderr.strip()[:500]}")
