"""What a supervisor knows of a rank, as plain records that also go from node to node as JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from zeroshard.comm.heartbeat import Collective, Failure, HeartbeatReading


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One rank at one moment. Times are seconds before that moment, so that they mean the same on every node.

    Attributes:
        rank: its number in the world.
        host: the machine.
        running: since it was started.
        exit: its exit code, or minus the signal that ended it; None while it lives.
        exited: since its end was seen.
        silent: since its heartbeat.
        idle: since its main thread last did anything that its pulse shows.
        suspended: whether the kernel says that the process is stopped.
        heartbeat: what its pulse said last; None if it has none yet.
        failure: why it stopped, in its own words, with `when` as seconds ago.
        stack: its Python stacks, where they were asked for.
    """

    rank: int
    host: str = ""
    running: float = 0.0
    exit: int | None = None
    exited: float = 0.0
    silent: float = 0.0
    idle: float = 0.0
    suspended: bool = False
    heartbeat: HeartbeatReading | None = None
    failure: Failure | None = None
    stack: str = ""

    @property
    def step(self) -> int:
        """The last step that it finished; -1 for none."""
        return self.heartbeat.step if self.heartbeat else -1

    @property
    def committed(self) -> int:
        """Step of the newest committed checkpoint that it knows of; -1 for none."""
        return self.heartbeat.committed if self.heartbeat else -1

    @property
    def waits(self) -> bool:
        """Whether its main thread waits in a collective."""
        return self.heartbeat is not None and self.heartbeat.waiting

    @property
    def tells(self) -> bool:
        """Whether it says what it does; a script that does not use zeroshard says nothing."""
        return self.heartbeat is not None and bool(
            self.heartbeat.step >= 0 or self.heartbeat.collective.number or self.heartbeat.phase
        )

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RankState":
        """What `as_dict` gave, after a way through JSON."""
        heartbeat, failure = values["heartbeat"], values["failure"]
        if heartbeat is not None:
            heartbeat = HeartbeatReading(**{**heartbeat, "collective": Collective(*heartbeat["collective"])})
        return cls(**{**values, "heartbeat": heartbeat, "failure": None if failure is None else Failure(**failure)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """Who is to blame for the end of an attempt.

    Attributes:
        ranks: the first of them stands for all where one is named.
        kind: "exit", "signal", "left", "silent", "stalled" or "node".
        reason: in words that follow "rank N".
        exit: its exit code or minus its signal; None if it still lived.
        failure: its own words, if it left any.
        follows: whether it may only have followed another rank's end, such as by a connection that broke.
    """

    ranks: tuple[int, ...]
    kind: str
    reason: str
    host: str = ""
    exit: int | None = None
    step: int = -1
    phase: str = ""
    failure: Failure | None = None
    follows: bool = False

    def __str__(self) -> str:
        several = "ranks " + ", ".join(map(str, self.ranks)) if len(self.ranks) > 1 else f"rank {self.ranks[0]}"
        where = [f"on {self.host}"] if self.host else []
        where += [f"after step {self.step}"] if self.step >= 0 else []
        where += [f"in phase '{self.phase}'"] if self.phase else []
        return f"{several} {self.reason}" + (f" ({', '.join(where)})" if where else "")


@dataclass(frozen=True, slots=True)
class FailureVerdict:
    """What follows from the end of an attempt.

    Attributes:
        restart: whether to try again.
        code: the supervisor's exit code otherwise.
        why: in words.
    """

    restart: bool
    code: int
    why: str
