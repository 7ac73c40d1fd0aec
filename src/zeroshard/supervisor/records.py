"""Plain records of rank states, culprits and verdicts, which also go from node to node as JSON."""

from dataclasses import dataclass
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
        idle: since its main thread last changed the heartbeat.
        suspended: whether the kernel reports the process as stopped.
        heartbeat: its last reading; None before the first.
        failure: as the rank wrote it, with `when` as seconds ago.
        stack: its Python stacks, if they were requested.
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
        """The rank's last finished step; -1 for none."""
        return self.heartbeat.step if self.heartbeat else -1

    @property
    def committed(self) -> int:
        """Step of the newest committed checkpoint by the rank's heartbeat; -1 for none."""
        return self.heartbeat.committed if self.heartbeat else -1

    @property
    def waits(self) -> bool:
        """Whether its main thread waits in a collective."""
        return self.heartbeat is not None and self.heartbeat.waiting

    @property
    def tells(self) -> bool:
        """Whether the heartbeat shows progress; a script that does not use zeroshard only beats."""
        return self.heartbeat is not None and bool(
            self.heartbeat.step >= 0 or self.heartbeat.collective.number or self.heartbeat.phase
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RankState":
        """The state from the values of its fields, as `asdict` gives them."""
        heartbeat, failure = values["heartbeat"], values["failure"]
        if heartbeat is not None:
            heartbeat = HeartbeatReading(**{**heartbeat, "collective": Collective(*heartbeat["collective"])})
        return cls(**{**values, "heartbeat": heartbeat, "failure": None if failure is None else Failure(**failure)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """The ranks at fault for the end of an attempt.

    Attributes:
        ranks: their numbers; host, exit, step and phase are those of the first.
        kind: "exit", "signal", "left", "silent", "stalled" or "node".
        reason: the predicate of "rank N".
        exit: the exit code, or minus the signal; None if the rank still ran.
        failure: as the rank wrote it, if it did.
        follows: whether it may be the echo of another rank's end, such as a broken connection.
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

    @property
    def code(self) -> int | None:
        """The exit code, or the one that the rank wrote down before it ended."""
        return self.failure.code if self.exit is None and self.failure is not None else self.exit

    def __str__(self) -> str:
        ranks = "ranks " + ", ".join(map(str, self.ranks)) if len(self.ranks) > 1 else f"rank {self.ranks[0]}"
        where = [f"on {self.host}"] if self.host else []
        where += [f"after step {self.step}"] if self.step >= 0 else []
        where += [f"in phase '{self.phase}'"] if self.phase else []
        return f"{ranks} {self.reason}" + (f" ({', '.join(where)})" if where else "")


@dataclass(frozen=True, slots=True)
class FailureVerdict:
    """The decision after the end of an attempt.

    Attributes:
        restart: whether to restart.
        code: the supervisor's exit code otherwise.
        why: the reason, for people.
    """

    restart: bool
    code: int
    why: str
