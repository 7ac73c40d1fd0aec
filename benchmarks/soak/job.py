"""A job under `zeroshard run`, watched and disturbed from outside."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from zeroshard.checkpoint import Reader, committed
from zeroshard.comm.heartbeat import HeartbeatReading, read_heartbeat

ROOT = Path(__file__).parents[2]
INJECT = Path(__file__).with_name("inject.py")
TRAIN = "--model tiny --sequence 16 --batch-per-rank 2 --warmup-steps 5 --dropout 0.1 --validate-every 0"
TRAIN += " --validation-rows 4 --sample-tokens 0 --device cpu --checkpoint-every 5"
PATIENCE = 900.0  # seconds that one wait may take on a busy machine
POLL = 0.02


class Unable(Exception):
    """A fault that cannot be made on this machine, with the reason."""


def write_text(folder: Path) -> Path:
    """A small text to train on, the same every time."""
    folder.mkdir(parents=True)
    for number in range(3):
        lines = [f"line {n} of file {number}: {n * n} {n % 7}\n" for n in range(600)]
        (folder / f"{number}.txt").write_text("".join(lines))
    return folder


class Job:
    """One supervisor with its ranks, in a folder of its own; a context that ends all processes.

    Args:
        folder: for its runs, its screen, its crash reports and its temporary files.
        words: `train` or a script, with their options.
        options: of `zeroshard run`.
        ranks: on this node.
        prefix: words before the command, such as `ip netns exec NAME`.
        more: environment.
    """

    def __init__(
        self,
        folder: Path,
        words: Sequence[str],
        options: Sequence[str] = (),
        ranks: int = 2,
        prefix: Sequence[str] = (),
        more: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._temporary = Path(tempfile.mkdtemp(prefix="zs-"))  # short, because paths of sockets have a limit
        self._screen = folder / f"screen-{time.time_ns():x}"
        self._known = set((folder / "crashes").glob("*.json"))
        command = [*prefix, sys.executable, "-m", "zeroshard", "run", "--nproc-per-node", str(ranks)]
        command += ["--reports", str(folder / "crashes"), *options, "--", *words]
        clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        clean |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(self._temporary), "PYTHONPATH": str(ROOT / "src")}
        with self._screen.open("w") as screen:
            self.process = subprocess.Popen(
                command, stdout=screen, stderr=screen, env=clean | dict(more or {}), start_new_session=True
            )

    def __enter__(self) -> "Job":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()
        shutil.rmtree(self._temporary, ignore_errors=True)
        if error is not None and not isinstance(error, Unable):
            error.add_note("\n".join(self.screen[-15:]))

    @property
    def screen(self) -> list[str]:
        """The printed lines, without empty ones."""
        return [line for line in self._screen.read_text(errors="replace").splitlines() if line.strip()]

    @property
    def reports(self) -> list[dict[str, Any]]:
        """The crash reports of this supervisor, in order."""
        paths = sorted(set((self.folder / "crashes").glob("*.json")) - self._known)
        return [json.loads(path.read_text()) for path in paths]

    @property
    def ranks(self) -> dict[int, HeartbeatReading]:
        """The running ranks, by the heartbeats of the newest attempt."""
        attempts = {int(path.name[8:]): path for path in self._temporary.glob("zeroshard-*/attempt-*")}
        if not attempts:
            return {}
        readings = [read_heartbeat(path) for path in attempts[max(attempts)].glob("rank-*.heartbeat")]
        return {found.rank: found for found in readings if found is not None and psutil.pid_exists(found.pid)}

    @property
    def family(self) -> list[psutil.Process]:
        """All processes that the supervisor has started."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def step(self) -> int:
        """The last step that any rank finished in the newest attempt; -1 for none."""
        return max((reading.step for reading in self.ranks.values()), default=-1)

    def until(self, reached: Callable[[], Any], what: str) -> None:
        """Wait until something is true, or the job has ended; it must come true within `PATIENCE`."""
        deadline = time.monotonic() + PATIENCE
        while not reached():
            assert time.monotonic() < deadline, f"{what} did not come within {PATIENCE:.0f} s"
            if self.process.poll() is not None:
                assert reached(), f"the job ended with {self.process.returncode} before {what}"
                return
            time.sleep(POLL)

    def send(self, rank: int, number: int) -> bool:
        """Send a signal to a rank; whether it was there."""
        reading = self.ranks.get(rank)
        with contextlib.suppress(ProcessLookupError):
            if reading is not None:
                os.kill(reading.pid, number)
                return True
        return False

    def wait(self) -> int:
        """The exit code."""
        return self.process.wait(PATIENCE)

    def seconds_to_stop(self, began: float, pids: Sequence[int]) -> float:
        """Wait until some processes are gone; seconds since `began` (monotonic)."""
        while any(map(_runs, pids)):
            assert time.monotonic() - began < PATIENCE, f"processes {pids} do not end"
            time.sleep(POLL)
        return time.monotonic() - began


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def train(folder: Path, *options: str, fault: Sequence[str] = ()) -> list[str]:
    """The words of the main job on the small text, with a fault put into it or none."""
    text = folder / "text"
    if not text.exists():
        write_text(text)
    words = ["train", "--data", str(text), "--out", str(folder / "runs"), *TRAIN.split(), *options]
    return [str(INJECT), *fault, "--", *words] if fault else words


def newest_run(folder: Path) -> Path:
    """The newest run of a folder."""
    return max((folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """All whole lines of the metrics of the newest run of a folder."""
    found = []
    for line in (newest_run(folder) / "metrics.jsonl").read_text().splitlines():
        with contextlib.suppress(ValueError):  # a line that was cut off when its process died
            found.append(json.loads(line))
    return found


def losses(folder: Path) -> dict[int, set[str]]:
    """Every loss and norm that was ever logged in the newest run of a folder, by step, as text."""
    found: dict[int, set[str]] = defaultdict(set)
    for line in metrics(folder):
        if "loss" in line:
            found[line["step"]].add(f"{line['loss']} {line['grad_norm']} {line['skipped']}")
        elif "validation_loss" in line:
            found[-line["step"]].add(str(line["validation_loss"]))
    return dict(found)


def check_same(folder: Path, reference: dict[int, set[str]]) -> int:
    """Every line of the newest run is that of the reference; returns how many there are."""
    found = losses(folder)
    wrong = {step: (lines, reference.get(step)) for step, lines in found.items() if lines != reference.get(step)}
    assert not wrong, f"{len(wrong)} steps differ; the first: {min(wrong.items())}"
    missing = reference.keys() - found.keys()
    assert not missing, f"steps {sorted(missing)[:5]} are missing"
    return len(metrics(folder))


def check_whole(folder: Path) -> int:
    """Every committed checkpoint below a folder can be read, and none was put aside; returns how many there are."""
    paths = [path for place in folder.rglob("checkpoints*") for _, path in committed(place)]
    paths += [path for place in folder.rglob("checkpoints/*") if place.is_dir() for _, path in committed(place)]
    problems = [problem for path in paths for problem in Reader(path).problems()]
    assert not problems, problems[0]
    assert not list(folder.rglob("step-*.bad*")), "a checkpoint was put aside"
    return len(paths)


_REFERENCES: dict[tuple[str, ...], dict[int, set[str]]] = {}


def reference_of(folder: Path, *options: str) -> dict[int, set[str]]:
    """The lines of the main job with some options when nothing disturbs it; made once."""
    if options not in _REFERENCES:
        with Job(folder, train(folder, *options), ("--max-restarts", "0")) as job:
            assert job.wait() == 0, "the undisturbed job failed"
        found = losses(folder)
        assert all(len(lines) == 1 for lines in found.values())
        _REFERENCES[options] = found
    return _REFERENCES[options]


def stop_signal(job: Job, number: int = signal.SIGTERM) -> int:
    """Ask the supervisor to stop; the exit code."""
    job.process.send_signal(number)
    return job.wait()
