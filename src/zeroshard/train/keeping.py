"""Checkpoints, data position, loss guard and requests to stop of the main job, with which it can be resumed."""

import bisect
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from zeroshard.data.loader import Loader
from zeroshard.data.training import TrainingData
from zeroshard.engine import Engine
from zeroshard.errors import CheckpointError, ConfigError, DataError, Stopped
from zeroshard.resilience import Checkpoints, Guard, GuardVerdict, resume
from zeroshard.train.config import TrainConfig

CHECKPOINTS = "checkpoints"  # below the run folder
REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
REPEATED = 1.0  # seconds; a second SIGINT within them is the first Ctrl-C, passed on by a launcher
LONG = 2.0  # seconds without an end of the step after which a request to stop is acknowledged


class Keeping:
    """Saves, resumes and stops one run; every rank has one, and all make the same calls.

    Args:
        folder: of the run.
        say: shows a line to the user.
        again: the command that resumes a stopped run, or the options to add to it.

    Attributes:
        cursor: the position in the data.
        asked: the signal by which this process was asked to stop; 0 for none.
        exposed_seconds: seconds that training waited for the newest checkpoint; None once written to the metrics.
    """

    def __init__(
        self,
        config: TrainConfig,
        engine: Engine,
        data: TrainingData,
        folder: Path,
        say: Callable[[str], None],
        again: str,
    ) -> None:
        self._config, self._engine, self._data, self._say, self._again = config, engine, data, say, again
        self._folder = folder / CHECKPOINTS
        self._checkpoints = Checkpoints(engine, self._folder, config.keep)
        self.cursor = Cursor()
        self.asked = 0
        self.exposed_seconds: float | None = None
        self.guard: Guard | None = None
        if config.rollbacks:
            self.guard = Guard(spike=config.spike, patience=config.patience, rollbacks=config.rollbacks)

    def begin(self, continued: bool) -> int:
        """Resume the run, or begin it; returns the number of steps taken before.

        Args:
            continued: whether the run folder is that of a run that was cut off.

        Raises:
            CheckpointError, ConfigError, DataError: a checkpoint that cannot be resumed.
        """
        extra = self._checkpoints.resume() if continued else None
        given = self._config.resume
        if extra is None and given == "auto":
            self._say(self._nothing_to_resume(continued))
        if extra is not None:
            self._say(f"going on from step {extra['step']} of {self._folder.parent}")
        elif isinstance(given, Path) and (given / CHECKPOINTS).is_dir():
            extra = resume(self._engine, given / CHECKPOINTS)
            if extra is None:
                raise CheckpointError(f"{given / CHECKPOINTS} holds no checkpoint; give a folder that does.")
        elif isinstance(given, Path):
            extra = self._engine.load(given)
        elif self._config.weights is not None:
            self._engine.load_weights(self._config.weights)
        if extra is None:
            if self.guard is not None:
                self.save(0, wait=True)  # a rollback needs a checkpoint from the start
            return 0
        _check_data(extra, self._data)
        if extra["step"] >= self._config.steps:
            raise ConfigError(
                f"The checkpoint is at step {extra['step']} and steps is {self._config.steps}; raise steps to go on."
            )
        heartbeat = self._engine.mesh.heartbeat
        if heartbeat is not None:
            heartbeat.committed(extra["step"])
        self._data.load(extra.get("data"))
        self.cursor.load(extra["cursor"])
        if self.guard is not None and extra["guard"] is not None:
            self.guard.load(extra["guard"])
        return int(extra["step"])

    def _nothing_to_resume(self, continued: bool) -> str:
        """Why `resume="auto"` begins at the first step."""
        run = self._folder.parent
        if continued:
            return f"nothing to resume: {run} was cut off before its first checkpoint, so it begins again"
        return (
            f"nothing to resume: {self._config.out} has no unfinished run of this model, data, tokenizer, sequence, "
            f"optimizer and seed; a new run begins in {run}"
        )

    def decide(self, step: int, loss: float, position: int) -> int:
        """Check the loss of a step, equal on all ranks; returns the step at which training goes on.

        Args:
            step: the number of steps taken, this one included.
            position: of the data before the step.

        Raises:
            NonFiniteError: no rollback is left, or there is no checkpoint to go back to.
        """
        if self.guard is None:
            return step
        verdict = self.guard.decide(step, loss, position)
        if verdict is not GuardVerdict.ROLL_BACK:
            return step
        origin, reached = self.guard.origin, self.cursor.position
        assert origin is not None
        chosen = self.guard.choose(self._checkpoints.steps())
        if chosen is None:
            raise self.guard.give_up("there is no checkpoint from before")
        extra = self._checkpoints.back_to(chosen)
        self.guard.rewind(extra["guard"] or Guard().state())
        self._data.load(extra.get("data"))
        self.cursor.rewind(extra["cursor"])
        self.cursor.leave_out(origin.position, reached)
        self._say(
            f"step {step}: loss {loss:.4g}; back to the checkpoint of step {chosen}, leaving out samples "
            f"{origin.position} to {reached}"
        )
        return chosen

    def save_if_due(self, step: int) -> None:
        """Begin a checkpoint where one is due; one that cannot be written is a warning, and training goes on."""
        every = self._config.checkpoint_every
        suspect = self.guard is not None and self.guard.origin is not None  # its checkpoint must not replace a good one
        if self._config.checkpoint and every and step % every == 0 and step < self._config.steps and not suspect:
            try:
                self.save(step)
            except CheckpointError as error:
                self._say(f"warning: {error}")

    def save(self, step: int, wait: bool = False) -> None:
        """Save the state after `step` steps.

        Raises:
            CheckpointError: it cannot be begun, or with `wait`, could not be written.
        """
        extra = {
            "step": step,
            "corpus": self._data.digest,
            "cursor": self.cursor.state(),
            "data": self._data_state(),
            "guard": self.guard.state() if self.guard else None,
        }
        self.exposed_seconds = self._checkpoints.save(extra, wait=wait).exposed_seconds

    def _data_state(self) -> dict[str, Any] | None:
        """The position in the data, merged from all ranks, each of which has the readers whose rows it takes."""
        states = self._engine.world.agree_on(self._data.state(), "position in the data")
        known = [state for state in states if state is not None]
        return Loader.merged(known) if known else None

    def stop(self, step: int, asked: int) -> None:
        """Save and stop.

        Args:
            asked: the signal by which a rank was asked to stop.

        Raises:
            Stopped: always.
        """
        self.asked = asked
        if not self._config.checkpoint:
            raise Stopped(f"Stopped on request after step {step}; nothing was saved (--no-checkpoint).", asked)
        if step not in self._checkpoints.steps():
            self.save(step, wait=True)
        raise Stopped(f"Stopped on request after step {step}, which is saved; go on with: {self._again}", asked)

    def finish(self, step: int) -> None:
        """Save the end of the run, and wait until it is on the disk.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._config.checkpoint and step not in self._checkpoints.steps():
            self.save(step, wait=True)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGTERM, SIGUSR1 and Ctrl-C as requests to stop after the step; a second Ctrl-C ends at once."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may set signal handlers
            return

        reminder = threading.Timer(LONG, self._say, ["stopping when this step is done; Ctrl-C again stops at once"])
        reminder.daemon = True
        heard = [0.0]

        def ask(number: int, frame: FrameType | None) -> None:
            if not self.asked:
                self.asked, heard[0] = number, time.monotonic()
                reminder.start()
            elif number == signal.SIGINT and time.monotonic() - heard[0] > REPEATED:
                raise KeyboardInterrupt

        before = {request: signal.signal(request, ask) for request in REQUESTS}
        try:
            yield
        finally:
            reminder.cancel()
            for request, handler in before.items():
                signal.signal(request, handler)


def _check_data(extra: dict[str, Any], data: TrainingData) -> None:
    """Refuse to resume on other text.

    Raises:
        DataError: the checkpoint saw another corpus.
    """
    if extra.get("corpus") != data.digest:
        raise DataError(
            f"The checkpoint was trained on a corpus with digest {str(extra.get('corpus'))[:12]}, this one has "
            f"{data.digest[:12]}. Give the same data, or start a new run."
        )


class Cursor:
    """Gives the numbers of samples in order, each once, except those left out.

    Attributes:
        position: the next sample; all before it have been taken or left out.
    """

    def __init__(self) -> None:
        self.position = 0
        self._left_out: list[tuple[int, int]] = []  # disjoint, in order

    @property
    def left_out(self) -> list[tuple[int, int]]:
        """The intervals [start, stop) that are left out, disjoint and in order."""
        return list(self._left_out)

    def take(self, rows: int) -> list[int]:
        """The samples of the next global batch, in order: [rows]."""
        samples: list[int] = []
        while len(samples) < rows:
            place = bisect.bisect_right(self._left_out, self.position, key=lambda interval: interval[0])
            if place and self.position < self._left_out[place - 1][1]:
                self.position = self._left_out[place - 1][1]
                continue
            stop = self.position + rows - len(samples)
            if place < len(self._left_out):
                stop = min(stop, self._left_out[place][0])
            samples.extend(range(self.position, stop))
            self.position = stop
        return samples

    def leave_out(self, start: int, stop: int) -> None:
        """Never take the samples [start, stop), from now on."""
        if start >= stop:
            return
        merged: list[tuple[int, int]] = []
        for low, high in sorted([*self._left_out, (start, stop)]):
            if merged and low <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], high)
            else:
                merged.append((low, high))
        self._left_out = merged

    def state(self) -> dict[str, Any]:
        """The position and the intervals left out, in plain JSON values."""
        return {"position": self.position, "left_out": [list(interval) for interval in self._left_out]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a `state` of another process."""
        self.rewind(state)
        self._left_out = [(int(start), int(stop)) for start, stop in state["left_out"]]

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Go back to the position in `state` for a rollback; samples that are left out stay so."""
        self.position = int(state["position"])
