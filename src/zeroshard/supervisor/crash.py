"""The crash report: one JSON file for each failed attempt."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zeroshard.comm.heartbeat import HeartbeatReading
from zeroshard.supervisor.decision import signal_name
from zeroshard.supervisor.records import Culprit, FailureVerdict, RankState
from zeroshard.version import __version__

NO_STACK = "none: the process did not answer (it had ended, was stopped, or never started)"


def write_report(
    folder: Path,
    command: Sequence[str],
    attempt: int,
    culprit: Culprit,
    verdict: FailureVerdict,
    states: Sequence[RankState],
) -> Path | None:
    """Write a report of a failed attempt; returns its path, or None if it cannot be written."""
    now = datetime.now(UTC)
    report = {
        "zeroshard": __version__,
        "time": now.isoformat(timespec="seconds"),
        "host": platform.node(),
        "command": list(command),
        "attempt": attempt,
        "culprit": {**asdict(culprit), "words": str(culprit)},
        "verdict": asdict(verdict),
        "ranks": [_rank(state) for state in states],
    }
    path = folder / f"{now:%Y-%m-%d-%H%M%S-%f}-attempt-{attempt}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".fresh")  # renamed when complete, so that no reader sees an incomplete file
        unfinished.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)
    except OSError:
        return None
    return path


def _rank(state: RankState) -> dict[str, Any]:
    exit_code = state.exit
    return {
        "rank": state.rank,
        "host": state.host,
        "exit": exit_code if exit_code is None or exit_code >= 0 else signal_name(-exit_code),
        "seconds": round(state.running, 3),
        "seconds_without_heartbeat": round(state.silent, 3),
        "seconds_without_progress": round(state.idle, 3),
        "stopped": state.suspended,
        "heartbeat": _heartbeat(state.heartbeat),
        "error": None if state.failure is None else asdict(state.failure),
        "stack": state.stack or NO_STACK,
    }


def _heartbeat(heartbeat: HeartbeatReading | None) -> dict[str, Any] | None:
    if heartbeat is None:
        return None
    fields = {**asdict(heartbeat), "collective": heartbeat.collective._asdict()}
    return {name: value for name, value in fields.items() if name not in ("since", "alive")}  # reported as ages
