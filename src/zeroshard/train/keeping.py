"""What lets the main job go on after whatever happens: checkpoints, the data position, a guard, requests to stop."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from zeroshard.engine import Engine
from zeroshard.errors import CheckpointError, ConfigError, DataError, Stopped
from zeroshard.resilience import Checkpoints, Guard, GuardVerdict, resume
from zeroshard.train.config import TrainConfig
from zeroshard.train.corpus import Corpus
from zeroshard.train.cursor import Cursor

CHECKPOINTS = "checkpoints"  # below the run folder
REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
REPEATED = 1.0  # seconds after which a second Ctrl-C is one of its own; a launcher may pass the first one on
LONG = 2.0  # seconds that a request may go unanswered


class Keeping:
    """Keeps one run going; every rank has one, and all do the same.

    Args:
        folder: of the run.
        say: shows people a line.
        again: the command, or what to add to it, that goes on with a run that was stopped.

    Attributes:
        cursor: the position in the data.
        asked: the signal by which this process was asked to stop; 0 for none.
        exposed_seconds: how long training stood still for the checkpoint begun last; None where none was since.
    """

    def __init__(
        self, config: TrainConfig, engine: Engine, corpus: Corpus, folder: Path, say: Callable[[str], None], again: str
    ) -> None:
        self._config, self._engine, self._corpus, self._say, self._again = config, engine, corpus, say, again
        self._folder = folder / CHECKPOINTS
        self._checkpoints = Checkpoints(engine, self._folder, config.keep)
        self.cursor = Cursor()
        self.asked = 0
        self.exposed_seconds: float | None = None
        self.guard: Guard | None = None
        if config.rollbacks:
            self.guard = Guard(spike=config.spike, patience=config.patience, rollbacks=config.rollbacks)

    def begin(self, continued: bool) -> int:
        """The step to go on from.

        Args:
            continued: whether the run folder is that of a run that was cut off.

        Raises:
            CheckpointError, ConfigError, DataError: what cannot be gone on from.
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
                self.save(0, wait=True)  # so that there is always one to go back to
            return 0
        _check_corpus(extra, self._corpus)
        if extra["step"] >= self._config.steps:
            raise ConfigError(
                f"The checkpoint is at step {extra['step']} and steps is {self._config.steps}; raise steps to go on."
            )
        heartbeat = self._engine.mesh.heartbeat
        if heartbeat is not None:
            heartbeat.committed(extra["step"])
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
        """Look at the loss that all ranks know of a step; returns the step that training is at now.

        Args:
            step: the number of steps taken, this one included.
            position: of the data before the step.

        Raises:
            NonFiniteError: the run has gone back too often, or cannot.
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
        suspect = self.guard is not None and self.guard.origin is not None  # it must not push out a good one
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
            "corpus": self._corpus.digest,
            "cursor": self.cursor.state(),
            "guard": self.guard.state() if self.guard else None,
        }
        self.exposed_seconds = self._checkpoints.save(extra, wait=wait).exposed_seconds

    def stop(self, step: int, asked: int) -> None:
        """Save and stop.

        Args:
            asked: the signal by which any rank was asked to.

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
            yield  # only the main thread may listen
            return

        patience = threading.Timer(LONG, self._say, ["stopping when this step is done; Ctrl-C again stops at once"])
        patience.daemon = True
        heard = [0.0]

        def ask(number: int, frame: FrameType | None) -> None:
            if not self.asked:
                self.asked, heard[0] = number, time.monotonic()
                patience.start()
            elif number == signal.SIGINT and time.monotonic() - heard[0] > REPEATED:
                raise KeyboardInterrupt

        before = {request: signal.signal(request, ask) for request in REQUESTS}
        try:
            yield
        finally:
            patience.cancel()
            for request, handler in before.items():
                signal.signal(request, handler)


def _check_corpus(extra: dict[str, Any], corpus: Corpus) -> None:
    """Refuse to resume on other text.

    Raises:
        DataError: the checkpoint saw another corpus.
    """
    if extra.get("corpus") != corpus.digest:
        raise DataError(
            f"The checkpoint was trained on a corpus with digest {str(extra.get('corpus'))[:12]}, this one has "
            f"{corpus.digest[:12]}. Give the same data, or start a new run."
        )
