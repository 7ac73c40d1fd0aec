"""The line of a step keeps what matters at every width."""

import io
import re

import pytest
from rich.console import Console

from zeroshard.train.progress import Progress, fitting

METRICS = {"step": 123, "bits_per_byte": 2.3456, "tokens_per_s": 12345.0, "grad_norm": 1.25, "rss_bytes": 398 * 2**20}


def shown(width: int, terminal: bool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of a console of so many columns after a header, some steps and a note."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=width, highlight=False, color_system=None)
    monkeypatch.setattr("zeroshard.train.progress.Console", lambda **options: console)
    progress = Progress(10_000, shown=True)
    progress.header({"model": "tiny, 1 parameter", "data": "x[/red]", "run": "runs/1"})
    with progress:
        for step in (122, 123):
            progress.step({**METRICS, "step": step}, 11 * 2**20, skipped=0)
        progress.note("a note on x[/red]")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140, 200])
def test_step_remaining_time_and_loss_stay_at_every_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(width, terminal=True, monkeypatch=monkeypatch)
    assert lines[:3] == ["model  tiny, 1 parameter", "data   x[/red]", "run    runs/1"]
    assert "zeroshard: a note on x[/red]" in lines
    last = lines[-1]
    assert re.match(r"step 123/10000  ETA [\d:-]+  loss 2\.346", last) and len(last) <= width
    assert ("RSS 398 MiB" in last) == (width >= 140) and ("╌" in last) == (width >= 140)
    assert not any("(process" in line for line in lines)


def test_plain_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(80, terminal=False, monkeypatch=monkeypatch)
    assert lines[3].startswith(
        "step 122/10000  ETA -:--  loss 2.346 bits/byte  12,345 tokens/s  |grad| 1.25  memory 11.0 "
    )
    assert lines[3].endswith("RSS 398 MiB") and len(lines) == 5


def test_parts_are_left_out_from_the_end() -> None:
    parts = ["step 1/4", "  ETA 0:09", "  7.9 bits/byte", "  9 tokens/s"]
    assert fitting(parts, 200, 0.5).endswith("9 tokens/s  " + "━" * 10 + "╌" * 10)
    assert fitting(parts, 45, 0.5) == "step 1/4  ETA 0:09  7.9 bits/byte  9 tokens/s"
    assert fitting(parts, 44, 0.5) == "step 1/4  ETA 0:09  7.9 bits/byte"
    assert fitting(["starting"], 80, 0.0) == "starting"
