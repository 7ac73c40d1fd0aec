"""The origin of a run: date, machines, command line, versions, git state and seed of each of its starts."""

import platform
import shlex
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from zeroshard.comm.collectives import Comm
from zeroshard.platform.accelerator import is_accelerator, title
from zeroshard.train.config import TrainConfig
from zeroshard.version import __version__

OURS = ("__main__", "zeroshard")  # names of the file that is started
SLOW = 2.0  # seconds after which git is given up


def start_of(config: TrainConfig, comm: Comm, folder: Path, again: str, reports: bool) -> dict[str, Any]:
    """One start of a run, as its folder keeps it; a collective call, which asks every rank for its machine.

    Args:
        folder: the run folder.
        again: the command that resumes the run.
        reports: whether this rank writes the folder; the others get nothing.
    """
    device, hosts = comm.mesh.device, comm.agree_on(platform.node(), "hosts of every rank")
    if not reports:
        return {}
    return {
        "date": datetime.now().astimezone().isoformat(" ", "seconds"),
        "hosts": list(dict.fromkeys(hosts)),
        "device": title(device) if is_accelerator(device) else device.type,
        "command": command_line(),
        "resume": again,
        "folder": str(folder),
        "python": platform.python_version(),
        "zeroshard": __version__,
        "torch": str(torch.__version__),
        "git": git_state(Path()),
        "seed": config.plan.seed,
        "ranks": len(hosts),
    }


def command_line() -> str:
    """The command line of this process, for a shell; empty in a session without one."""
    if not sys.argv or not sys.argv[0]:
        return ""
    program = Path(sys.argv[0])
    return shlex.join(["zeroshard" if program.stem in OURS else str(program), *sys.argv[1:]])


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit, branch and number of changed files of a folder's repository; None outside of one, or without git."""
    try:
        commit, branch = _git(folder, "rev-parse", "HEAD", "--abbrev-ref", "HEAD").split()
        changed = _git(folder, "--no-optional-locks", "status", "--porcelain", "--untracked-files=no").splitlines()
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "branch": "" if branch == "HEAD" else branch, "changed": len(changed)}


def _git(folder: Path, *arguments: str) -> str:
    """The output of git; raises OSError, SubprocessError or ValueError when there is none."""
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=SLOW, check=True)
    return done.stdout
