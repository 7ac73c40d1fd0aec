"""The live view of a run: a bar in a terminal, plain lines elsewhere."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.progress import Progress as RichProgress
from rich.progress import ProgressColumn, Task
from rich.text import Text as RichText

from zeroshard.engine import Engine

LINES_EVERY = 10.0  # seconds between lines where there is no terminal
BAR = 20  # characters


class Exposed:
    """Costs of offload on this rank: seconds waited by cause, and speculative updates taken and undone."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._speculation_counts = (0, 0)
        self._steps = 0

    def step(self) -> dict[str, Any]:
        """The costs of the last step, for its metrics; empty without offload."""
        if not self._engine.plan.offloading.kinds:
            return {}
        seconds = {str(cause): seconds for cause, seconds in self._engine.exposed.items()}
        for cause, part in seconds.items():
            self._seconds[cause] += part
        self._steps += 1
        counts, before = self._engine.speculation_counts, self._speculation_counts
        self._speculation_counts = (counts.taken, counts.undone)
        taken, undone = (now - then for now, then in zip(self._speculation_counts, before, strict=True))
        return {"exposed_seconds": seconds, "guesses_taken": taken, "guesses_undone": undone}

    def summary(self) -> dict[str, Any]:
        """The costs summed over all steps."""
        if not self._steps:
            return {}
        taken, undone = self._speculation_counts
        return {"exposed_seconds": dict(self._seconds), "guesses_taken": taken, "guesses_undone": undone}

    def __str__(self) -> str:
        """One line on all steps; empty without offload."""
        if not self._steps:
            return ""
        taken, undone = self._speculation_counts
        updates = f"; speculative updates: {taken:,} taken, {undone:,} undone" if taken or undone else ""
        return f"exposed {exposed_text(self._seconds)} in {self._steps:,} steps{updates}"


def exposed_text(seconds: Mapping[str, float], most: int | None = None) -> str:
    """Exposed seconds in all, and of at most `most` causes, the longest first; less than 1 % is not shown."""
    total = sum(seconds.values())
    longest = sorted(seconds.items(), key=lambda item: -item[1])[:most]
    shown = [f"{cause} {_short(part)}" for cause, part in longest if part >= 0.01 * total > 0]
    return f"{_short(total)} ({', '.join(shown)})" if shown else _short(total)


def _short(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


class Progress:
    """Shows step, remaining time, loss, speed, gradient norm and memory of a run in one updated line.

    In a terminal that is too narrow for all, the last are left out first: step, remaining time and loss always stay.
    """

    def __init__(self, steps: int, shown: bool) -> None:
        self._steps, self._shown = steps, shown
        self._console = Console(highlight=False)
        self._bar: RichProgress | None = None
        self._next_line = 0.0
        self._speed: float | None = None
        self._began: tuple[int, float] | None = None
        if shown and self._console.is_terminal:
            self._bar = RichProgress(_Line(), console=self._console)
            self._task = self._bar.add_task("", total=steps, parts=["starting"])

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def header(self, lines: Mapping[str, str]) -> None:
        """Show model, data, plan and run folder, a line each."""
        if self._shown:
            for name, text in lines.items():
                self._console.print(f"{name:<7}{text}", soft_wrap=True, markup=False)

    def step(self, metrics: dict[str, Any], ledger_bytes: int, skipped: int) -> None:
        """Show one step's metrics."""
        if not self._shown:
            return
        rate, step = metrics["tokens_per_s"], metrics["step"]
        self._speed = rate if self._speed is None else 0.9 * self._speed + 0.1 * rate
        parts = [f"step {step}/{self._steps}", f"  ETA {self._remaining(step)}"]
        parts += [f"  loss {metrics['bits_per_byte']:.3f}", " bits/byte"]
        parts += [f"  skipped {skipped}"] if skipped else []
        parts.append(f"  {self._speed:,.0f} tokens/s")
        parts += [f"  MFU {metrics['mfu']:.0%}"] if "mfu" in metrics else []
        parts.append(f"  |grad| {metrics['grad_norm']:.2f}")
        parts += [f"  memory {ledger_bytes / 2**20:.1f} MiB", f"  RSS {metrics['rss_bytes'] / 2**20:.0f} MiB"]
        if "exposed_seconds" in metrics:
            parts.append(f"  exposed {exposed_text(metrics['exposed_seconds'], 2)}")
        if self._bar is not None:
            self._bar.update(self._task, completed=step, parts=parts)
        elif time.monotonic() >= self._next_line or step == self._steps:
            self._next_line = time.monotonic() + LINES_EVERY
            self._console.print("".join(parts), soft_wrap=True, markup=False)

    def note(self, text: str) -> None:
        """Show a line about the run."""
        if self._shown:
            self._console.print(f"zeroshard: {text}", soft_wrap=True, markup=False)

    def validation(self, step: int, bits_per_byte: float) -> None:
        """Show one validation."""
        if self._shown:
            self._console.print(
                f"step {step}/{self._steps}  validation {bits_per_byte:.3f} bits/byte",
                soft_wrap=True,
            )

    def _remaining(self, step: int) -> str:
        """Hours, minutes and seconds to the last step, at the speed since the first that was shown."""
        now = time.monotonic()
        if self._began is None or step <= self._began[0]:
            self._began = (step, now)
            return "-:--"
        first, when = self._began
        left = round((now - when) / (step - first) * (self._steps - step))
        hours, minutes = divmod(left // 60, 60)
        return f"{hours}:{minutes:02}:{left % 60:02}" if hours else f"{minutes}:{left % 60:02}"


class _Line(ProgressColumn):
    """The parts of a step that fit into the width, and a bar if there is room."""

    max_refresh = 0.2

    def render(self, task: Task) -> RenderableType:
        return _Fitting(task.fields["parts"], task.completed / task.total if task.total else 0.0)


@dataclass(frozen=True, slots=True)
class _Fitting:
    """Parts of a line, the most important first; shown as far as they fit into the console's width.

    Attributes:
        done: share of the steps, for the bar.
    """

    parts: Sequence[str]
    done: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield RichText(fitting(self.parts, options.max_width, self.done), no_wrap=True, overflow="crop")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)


def fitting(parts: Sequence[str], width: int, done: float) -> str:
    """The first parts that fit into `width` characters, and a bar if all parts and the bar fit."""
    line, *others = parts
    for part in others:
        if len(line) + len(part) > width:
            break
        line += part
    else:
        room = min(BAR, width - len(line) - 2)
        if room >= BAR // 2 and others:
            full = round(done * room)
            line += "  " + "━" * full + "╌" * (room - full)
    return line
