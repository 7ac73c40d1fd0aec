"""The live view of a run: a bar in a terminal, plain lines elsewhere."""

import time
from collections import defaultdict
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from zeroshard.engine import Engine

LINES_EVERY = 10.0  # seconds between lines where there is no terminal


class Exposed:
    """What offload costs a run on this rank: how long it stood still, by cause, and how its guesses went."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._guesses = (0, 0)
        self._steps = 0

    def step(self) -> dict[str, Any]:
        """What the metrics of the step just made say of it; nothing where nothing is offloaded."""
        if not self._engine.plan.offloads:
            return {}
        seconds = {str(cause): seconds for cause, seconds in self._engine.exposed.items()}
        for cause, part in seconds.items():
            self._seconds[cause] += part
        self._steps += 1
        guesses = self._engine.guesses
        before, self._guesses = self._guesses, (guesses.taken, guesses.undone)
        taken, undone = (now - then for now, then in zip(self._guesses, before, strict=True))
        return {"exposed_seconds": seconds, "guesses_taken": taken, "guesses_undone": undone}

    def summary(self) -> dict[str, Any]:
        """Likewise of all steps together."""
        if not self._steps:
            return {}
        taken, undone = self._guesses
        return {"exposed_seconds": dict(self._seconds), "guesses_taken": taken, "guesses_undone": undone}

    def __str__(self) -> str:
        """One line on all steps; empty where nothing is offloaded."""
        if not self._steps:
            return ""
        taken, undone = self._guesses
        guesses = f"; guessed updates: {taken:,} taken, {undone:,} undone" if taken or undone else ""
        return f"exposed {in_words(self._seconds)} in {self._steps:,} steps{guesses}"


def in_words(seconds: Mapping[str, float], most: int | None = None) -> str:
    """Exposed seconds in all, and of at most so many causes, the longest first; less than 1 % is not shown."""
    total = sum(seconds.values())
    longest = sorted(seconds.items(), key=lambda item: -item[1])[:most]
    shown = [f"{cause} {_short(part)}" for cause, part in longest if part >= 0.01 * total > 0]
    return f"{_short(total)} ({', '.join(shown)})" if shown else _short(total)


def _short(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


class Progress:
    """Shows loss, tokens per second, gradient norm and memory as a run goes on."""

    def __init__(self, steps: int, shown: bool) -> None:
        self._steps, self._shown = steps, shown
        self._console = Console(highlight=False)
        self._bar: RichProgress | None = None
        self._next_line = 0.0
        self._speed: float | None = None
        if shown and self._console.is_terminal:
            columns = [
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
            ]
            self._bar = RichProgress(*columns, console=self._console)
            self._task = self._bar.add_task("", total=steps)

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, metrics: dict[str, Any], ledger_bytes: int, skipped: int) -> None:
        """Show one step."""
        if not self._shown:
            return
        rate = metrics["tokens_per_s"]
        self._speed = rate if self._speed is None else 0.9 * self._speed + 0.1 * rate
        text = (
            f"{metrics['bits_per_byte']:.3f} bits/byte  {self._speed:,.0f} tokens/s  |grad| "
            f"{metrics['grad_norm']:.2f}  "
            f"memory {ledger_bytes / 2**20:.1f} MiB (process {metrics['rss_bytes'] / 2**20:.0f})"
        )
        text += f"  skipped {skipped}" if skipped else ""
        text += f"  exposed {in_words(metrics['exposed_seconds'], 2)}" if "exposed_seconds" in metrics else ""
        if self._bar is not None:
            self._bar.update(self._task, completed=metrics["step"], description=text)
        elif time.monotonic() >= self._next_line or metrics["step"] == self._steps:
            self._next_line = time.monotonic() + LINES_EVERY
            self._console.print(f"step {metrics['step']:>5}/{self._steps}  {text}", soft_wrap=True)

    def note(self, text: str) -> None:
        """Show a line about the run."""
        if self._shown:
            self._console.print(f"zeroshard: {text}", soft_wrap=True, markup=False)

    def validation(self, step: int, bits_per_byte: float) -> None:
        """Show one validation."""
        if self._shown:
            self._console.print(
                f"step {step:>5}/{self._steps}  validation {bits_per_byte:.3f} bits/byte", soft_wrap=True
            )
