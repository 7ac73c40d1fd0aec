"""Builders of run folders for the report's tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CATEGORIES = ["parameters", "gradients", "activations"]


def training_line(step: int, bits_per_byte: float | None, **fields: Any) -> str:
    values = {"step": step, "loss": 1.0, "bits_per_byte": bits_per_byte, "grad_norm": 1.0, "tokens_per_s": 100.0}
    return json.dumps({**values, "skipped": False, "seconds": step / 2, "rss_bytes": 2**20, **fields})


def validation_line(step: int, bits_per_byte: float) -> str:
    values = {"step": step, "validation_loss": 1.0, "validation_bits_per_byte": bits_per_byte, "seconds": step / 2}
    return json.dumps(values)


def summary(**fields: Any) -> dict[str, Any]:
    values = {
        "title": "A small run",
        "train_bits_per_byte": 2.5,
        "validation_bits_per_byte": 2.75,
        "sample": "def f():\n    return 1\n",
        "world_size": 2,
        "parameters": 1_234_567,
        "seconds": 75.0,
        "zeroshard": "0.1.0",
        "torch": "2.13.0",
        "corpus": {"name": "stdlib", "files": 3, "train_bytes": 2048, "validation_bytes": 512, "digest": "abc123"},
        "plan": {"zero": 2, "precision": "bf16", "offload": None, "betas": [0.9, 0.95]},
        "memory": [
            memory_row("parameters", 2048, 0, 2048),
            memory_row("gradients", 1000.5, 23.5, 1024),
            memory_row("activations", None, None, 4096),
        ],
        "traffic": [
            traffic_row("reduce gradients", 1_000_000, 1_000_256),
            traffic_row("agree on overflow", None, 1),
        ],
    }
    return {**values, **fields}


def memory_row(
    category: str, planned: float | None, padding: float | None, measured: int, tier: str | None = None
) -> dict[str, Any]:
    held = {"measured_bytes": measured, "peak_bytes": measured, **({"tier": tier} if tier else {})}
    return {"category": category, "planned_bytes": planned, "padding_bytes": padding, **held}


def traffic_row(purpose: str, planned: float | None, measured: int) -> dict[str, Any]:
    sent = {"measured_elements": measured, "measured_bytes": 2 * measured, "calls": 3}
    return {"purpose": purpose, "planned_elements": planned, **sent}


def memory(events: Sequence[tuple[float, str, tuple[int, ...]]]) -> dict[str, Any]:
    rows = [{"t": t, "label": label, "bytes": dict(zip(CATEGORIES, n, strict=True))} for t, label, n in events]
    return {"rank": 0, "categories": CATEGORIES, "events": rows}


def timelines(version: int = 0, **fields: Any) -> dict[str, Any]:
    """One microbatch through two stages: measured in 5 ms, simulated in 4."""
    drawn = []
    for name, gap in (("as measured", 1e-3), ("as simulated", 0.0)):
        first = [[f"F0.0@{version}", 0.0, 1e-3], [f"B0.0@{version}", gap + 3e-3, gap + 4e-3]]
        last = [[f"F1.0@{version}", gap + 1e-3, gap + 2e-3], [f"B1.0@{version}", gap + 2e-3, gap + 3e-3]]
        drawn.append({"name": name, "notes": ["a note"], "spans": [first, last]})
    return {"measured_seconds": 5e-3, "simulated_seconds": 4e-3, "timelines": drawn, **fields}


def write_run(
    folder: Path,
    metrics: list[str],
    summary: dict[str, Any] | None = None,
    memory: dict[str, Any] | None = None,
    timeline: dict[str, Any] | None = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in metrics), encoding="utf-8")
    for name, values in (("summary.json", summary), ("memory.json", memory), ("timeline.json", timeline)):
        if values is not None:
            (folder / name).write_text(json.dumps(values), encoding="utf-8")
    return folder
