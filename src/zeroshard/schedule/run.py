"""The interpreter: carries out one rank's list, action by action, for any number of stages.

A step, whatever the plan:

    actions = orders -> pipeline -> lower -> verify     once for each rank; of a stream, for each step
    for action in actions:                              `Interpreter.run`
        handlers[action.kind](action)

        RECV_F / SEND_F, RECV_B / SEND_B                a message between stages      pipeline.run.messages
        GATHER / FREE                                   weights of a chunk            zero
        F, B, I, W                                      the model, or autograd        step, pipeline.run.executor
        REDUCE                                          gradients over replicas       step.backward
        UPDATE                                          agree, decide, apply          step.sequence
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from zeroshard.platform import ranges
from zeroshard.schedule.actions import Action, Kind, Schedule

Handler = Callable[[Action], None]
Key = tuple[int, int]  # chunk, microbatch
Timed = tuple[Action, float, float]  # an action with its start and end in seconds of the clock


class Interpreter:
    """Runs actions with a handler for each kind.

    Args:
        now: seconds of the clock.

    Attributes:
        now: as given.
        spans: lists to which computes and updates that have run are added, one for each trace under way.
    """

    def __init__(self, handlers: Mapping[Kind, Handler], now: Callable[[], float]) -> None:
        self._handlers, self.now = handlers, now
        self.spans: tuple[list[Timed], ...] = ()

    def run(self, actions: Schedule) -> None:
        """Carry out actions in order."""
        for action in actions:
            if ranges.profiler._is_profiler_enabled:
                with ranges.named(action.kind.name.lower().replace("_", " "), action):
                    self._handlers[action.kind](action)
            else:
                self._handlers[action.kind](action)

    def note(self, action: Action, start: float) -> None:
        """Enter an action that has run since `start`, which excludes the time for which its handler waited."""
        if self.spans:
            span = (action, start, self.now())
            for spans in self.spans:
                spans.append(span)

    @contextmanager
    def traced(self, spans: list[Timed]) -> Iterator[None]:
        """Add the actions that run inside to `spans`, as (action, start, end) in seconds of the clock."""
        self.spans = (*self.spans, spans)
        try:
            yield
        finally:
            self.spans = tuple(other for other in self.spans if other is not spans)


def key_of(action: Action) -> Key:
    """The chunk and the microbatch of an action that has one."""
    assert action.microbatch is not None
    return action.chunk, action.microbatch


def peer_of(action: Action) -> int:
    """The rank at the other end of a message."""
    assert action.peer is not None
    return action.peer
