"""Answers on the disk, each by all that it depends on: the question, and the versions of the packages.

Read without torch. Answers are JSON; the oldest are removed.
"""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from zeroshard.version import __version__

KEPT = 200  # answers
PACKAGES = ("torch", "transformers", "peft")  # on which answers depend
ROOT = Path(__file__).parents[2]  # of this package


def key_of(question: object) -> str:
    """A name for the answer to a question, under these versions.

    Args:
        question: of values with equal texts (`repr`) where they are equal.
    """
    return hashlib.sha256(repr((question, _version())).encode()).hexdigest()[:32]


def read_answer(path: Path) -> dict[str, Any] | None:
    """The answer in a file; None without one that can be read."""
    try:
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return kept


def write_answer(path: Path, answer: Mapping[str, Any]) -> None:
    """Write an answer, and remove the oldest ones; a folder that cannot be written is no error."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}.new")
        new.write_text(json.dumps(answer), encoding="utf-8")
        new.replace(path)
        for old in sorted(path.parent.glob("*.json"), key=lambda one: one.stat().st_mtime)[:-KEPT]:
            old.unlink()


def _version() -> tuple[Any, ...]:
    """The versions of the packages, and of every file of this one."""
    sources = (path for path in ROOT.rglob("*.*") if path.suffix in (".py", ".toml", ".j2", ".css", ".js"))
    files = sorted((str(path), path.stat().st_mtime_ns) for path in sources)
    found = []
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found.append((name, importlib.metadata.version(name)))
    return (__version__, *found, hashlib.sha256(repr(files).encode()).hexdigest())
