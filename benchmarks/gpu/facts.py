"""The machine of a measurement as JSON: cards, their memory, versions, the host. Started by `slices.py`.

It is a process of its own because a process that asks CUDA keeps half a GB of every card that it asks about.
"""

import os
import platform
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from ranks import answer, circumstances

ASKED = ("torch", "transformers", "deepspeed", "numpy", "pytest")
TESTED = (2, 13)  # of torch, as pyproject.toml says


def facts(device: str) -> dict[str, Any]:
    """Names and numbers to be stored with every figure."""
    import psutil
    import torch

    found: dict[str, Any] = {**circumstances(), "python": platform.python_version()}
    found["versions"] |= {name: version_of(name) for name in ASKED}
    found["host_bytes"] = psutil.virtual_memory().total
    found["revision"] = told(["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=7"])
    found["cards"], found["card_bytes"] = [], 0
    found["older_torch"] = tuple(map(int, torch.__version__.split(".")[:2])) < TESTED
    if device == "cuda" and torch.cuda.is_available():
        found["cards"] = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        found["card_bytes"] = min(
            torch.cuda.get_device_properties(number).total_memory for number in range(torch.cuda.device_count())
        )
        found["versions"] |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        found["driver"] = told(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).partition("\n")[0]
    return found


def version_of(name: str) -> str:
    """The version of an installed package; "missing" without it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "found, without a version" if find_spec(name) else "missing"


def told(command: list[str]) -> str:
    """The output of a command; empty where it does not run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    answer(facts(sys.argv[1]))
