"""The live view of a run: a bar in a terminal, plain lines elsewhere."""

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

LINES_EVERY = 10.0  # seconds between lines where there is no terminal


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
