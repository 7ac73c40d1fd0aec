"""Traces: times of a rank's actions, copies and tasks, and its memory meanwhile."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from zeroshard.memory.ledger import Event, Ledger
from zeroshard.memory.transfers import TaskSpan
from zeroshard.parts.part import TracedWork
from zeroshard.platform.ranges import profiled
from zeroshard.schedule.run import Interpreter, Timed
from zeroshard.schedule.simulate import TIMES
from zeroshard.traffic import COMPUTE


@dataclass(slots=True, repr=False)
class Trace:
    """Times of a rank's work inside `engine.trace()`; prints as a table of seconds by kind.

    Times are seconds of a clock that the processes of a machine share, but those of `memory`.

    Attributes:
        actions: forwards, backwards and updates of the schedule, as (action, start, end), in the order in which they
            ended.
        tasks: copies and jobs of the host, and the computing between them, where something is offloaded; each has
            `label`, `cause`, `start` and `end`.
        memory: under `memory=True`, every change of the ledger on the device, as `t` (seconds since the trace began),
            `label` and `nbytes` (bytes by category); filled when the trace ends.
    """

    actions: list[Timed] = field(default_factory=list)
    tasks: list[TaskSpan] = field(default_factory=list)
    memory: list[Event] = field(default_factory=list)

    def __repr__(self) -> str:
        spent: defaultdict[str, list[float]] = defaultdict(list)
        for action, start, end in self.actions:
            spent[TIMES[action.kind].replace("_", " ")].append(end - start)
        for task in self.tasks:
            if task.cause != COMPUTE:  # among the actions already
                spent[str(task.cause)].append(task.end - task.start)
        lines = [f"trace of {len(self.actions)} actions and {len(self.tasks)} tasks"]
        width = max(map(len, spent), default=0)
        lines += [f"  {name:<{width}}  {len(each):5,} x  {1e3 * sum(each):10,.2f} ms" for name, each in spent.items()]
        if self.memory:
            most = max(sum(event.nbytes.values()) for event in self.memory)
            lines.append(f"  memory: {len(self.memory):,} changes, at most {most:,} bytes")
        return "\n".join(lines)


@contextmanager
def traced(
    interpreter: Interpreter, background: TracedWork, ledger: Ledger | None, profile: Path | None = None
) -> Iterator[Trace]:
    """Record the actions and tasks inside; a trace inside of another leaves that one complete.

    Args:
        interpreter: of its actions.
        background: work that runs on other threads and streams.
        ledger: whose changes to keep; None to keep none.
        profile: the file of a profile by torch; None for none.
    """
    trace = Trace()
    with ExitStack() as inside:
        inside.enter_context(interpreter.traced(trace.actions))
        inside.enter_context(background.traced(trace.tasks))
        if ledger is not None:
            inside.enter_context(ledger.recorded(trace.memory))
        if profile is not None:
            inside.enter_context(profiled(profile))
        yield trace
