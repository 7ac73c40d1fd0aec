"""A run of the main job goes on after whatever ended it, as if nothing had: one process, in this one."""

import errno
import json
import math
import os
import random
import re
import signal
import threading
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from zeroshard.checkpoint import CheckpointDisk, committed
from zeroshard.comm.mesh import Mesh
from zeroshard.comm.run_lock import Owner
from zeroshard.data.corpus import Batches
from zeroshard.engine import Engine
from zeroshard.errors import ConfigError, DataError, NonFiniteError, Stopped
from zeroshard.pipeline.policy import Pipeline
from zeroshard.plan import Plan
from zeroshard.train.config import TrainConfig
from zeroshard.train.folder import LOCK
from zeroshard.train.keeping import Cursor
from zeroshard.train.run import Run, run

PLAN = Plan(clip_norm=1.0, units=())


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """Twelve steps on a small text, a checkpoint after every third."""
    return config_in(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, set[float]]:
    """The losses of those twelve steps in a run that nothing disturbs."""
    return whole_run(config_in(tmp_path_factory.mktemp("undisturbed")))


def config_in(folder: Path) -> TrainConfig:
    text = folder / "text"
    text.mkdir()
    for number in range(3):
        (text / f"{number}.txt").write_text("".join(f"line {n} of file {number}: {n * n}\n" for n in range(300)))
    options: dict[str, Any] = {"sequence": 16, "batch_per_rank": 2, "steps": 12, "warmup_steps": 2, "dropout": 0.1}
    options |= {"validate_every": 0, "validation_rows": 2, "sample_tokens": 0, "checkpoint_every": 3}
    return TrainConfig(plan=PLAN, data=(text,), out=folder / "runs", **options)


def losses(folder: Path) -> dict[int, set[float]]:
    """Every loss that was ever logged, by step."""
    found: dict[int, set[float]] = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        if "loss" in line:
            found.setdefault(line["step"], set()).add(line["loss"])
    return found


def whole_run(config: TrainConfig) -> dict[int, set[float]]:
    """The losses of a run that nothing disturbs."""
    done = run(replace(config, out=config.out / "whole", resume="never"), Mesh())
    assert done is not None
    return losses(done[1])


def die_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the next run die in a step."""
    step = Run._step

    def dying(self: Run, at: int, samples: list[int]) -> Any:
        if at == number:
            raise KeyboardInterrupt
        return step(self, at, samples)

    monkeypatch.setattr(Run, "_step", dying)


def died(config: TrainConfig, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    with monkeypatch.context() as patch:
        die_at(patch, number)
        with pytest.raises(KeyboardInterrupt):
            run(config, Mesh())
    for thread in threading.enumerate():  # the process lives on, so what it is writing comes to its end
        if thread.name.startswith("zeroshard saves"):
            thread.join()


def newest(config: TrainConfig) -> Path:
    return max(path for path in config.out.iterdir() if path.name != "whole")


def test_a_run_that_another_process_works_at_is_refused(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    died(config, monkeypatch, 5)
    folder = newest(config)
    other = Owner.of(os.getppid())
    (folder / LOCK).write_text(json.dumps(asdict(other)))
    with pytest.raises(ConfigError, match=re.escape(f"{folder} is held by process {os.getppid()} of {other.user}")):
        run(replace(config, resume="auto"), Mesh())
    (folder / LOCK).write_text(json.dumps(asdict(replace(other, started=0.0))))  # its number is another process's now
    assert run(replace(config, resume="auto"), Mesh()) is not None
    assert (folder / "summary.json").exists() and (folder / LOCK).read_text() == ""


def test_auto_goes_on_in_the_same_folder_bit_for_bit(
    config: TrainConfig,
    undisturbed: dict[int, set[float]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = replace(config, resume="auto")
    died(config, monkeypatch, 2)  # before any checkpoint
    assert "nothing to resume:" in (said := capsys.readouterr().out) and "has no unfinished run of this model" in said
    died(config, monkeypatch, 5)
    assert "was cut off before its first checkpoint, so it begins again" in capsys.readouterr().out
    died(config, monkeypatch, 7)
    folder = newest(config)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "lo')  # a line that was cut off
    done = run(config, Mesh())
    assert done is not None and done[1] == folder
    assert "nothing to resume" not in capsys.readouterr().out
    text = (folder / "metrics.jsonl").read_text().replace('{"step": 99, "lo\n', "")
    (folder / "metrics.jsonl").write_text(text)
    assert losses(folder) == undisturbed
    assert [step for step, _ in committed(folder / "checkpoints")] == [9, 12]  # the newest two
    done = run(config, Mesh())  # the first is finished, so this is another
    assert done is not None and done[1] != folder


def test_never_starts_anew_and_the_next_attempt_of_a_job_goes_on(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    died(config, monkeypatch, 5)
    first = newest(config)
    monkeypatch.setenv("ZEROSHARD_JOB", "b")
    died(config, monkeypatch, 5)
    second = newest(config)
    assert second != first
    monkeypatch.setenv("ZEROSHARD_ATTEMPT", "1")
    done = run(config, Mesh())
    assert done is not None and done[1] == second
    assert not (first / "summary.json").exists()


def test_a_damaged_checkpoint_is_put_aside_and_said_so(
    config: TrainConfig,
    undisturbed: dict[int, set[float]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = replace(config, resume="auto")
    died(config, monkeypatch, 8)
    _, (_, newer) = committed(newest(config) / "checkpoints")
    shard = next(newer.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-5000] ^= 4
    shard.write_bytes(bytes(content))
    assert run(config, Mesh()) is not None
    output = capsys.readouterr().out.replace("\n", "")
    assert f"{shard} is damaged in" in output and "step-00000006.bad" in output
    assert "going on from step 3" in output
    assert losses(newest(config)) == undisturbed
    assert newer.with_name("step-00000006.bad").is_dir()


def test_a_request_to_stop_is_saved_and_goes_on(
    config: TrainConfig, undisturbed: dict[int, set[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Run._step
    config = replace(config, resume="auto")

    def asked(self: Run, at: int, samples: list[int]) -> Any:
        if at == 3:
            signal.raise_signal(signal.SIGUSR1)
        return step(self, at, samples)

    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_step", asked)
        with pytest.raises(Stopped, match="after step 4, which is saved; go on with: --resume auto"):
            run(config, Mesh())
    assert signal.getsignal(signal.SIGTERM) == before
    assert run(config, Mesh()) is not None
    found = losses(newest(config))
    assert found == undisturbed


def test_a_full_disk_is_a_warning(
    config: TrainConfig,
    undisturbed: dict[int, set[float]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = {"step-00000003", "step-00000006"}

    def reached(self: CheckpointDisk, operation: str, path: Path) -> None:
        if operation == "flush" and path.parent.name.split(".")[0] in full:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(CheckpointDisk, "reached", reached)
    done = run(config, Mesh())
    assert done is not None
    output = capsys.readouterr().out.replace("\n", " ")
    assert output.count("No space left on device") == 2 and "warning: The checkpoint" in output
    found = {path.name for path in (done[1] / "checkpoints").iterdir()}
    assert found == {"step-00000009", "step-00000012"}
    assert losses(done[1]) == undisturbed


def poison(monkeypatch: pytest.MonkeyPatch, samples: set[int], loss: float) -> None:
    """Let the loss of steps that see one of these samples be another; the weights take the gradient of it."""
    step, train_step = Run._step, Engine.train_step
    seen: list[int] = []

    def watching(self: Run, at: int, mine: list[int]) -> Any:
        seen[:] = mine
        return step(self, at, mine)

    def poisoned(self: Engine, batch: Any) -> Any:
        result = train_step(self, batch)
        return replace(result, loss=result.loss * 0 + loss) if samples & set(seen) else result

    monkeypatch.setattr(Run, "_step", watching)
    monkeypatch.setattr(Engine, "train_step", poisoned)


@pytest.mark.parametrize("loss", [math.nan, 1e6])
def test_a_bad_loss_goes_back_and_leaves_the_batch_out(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], loss: float
) -> None:
    config = replace(config, rollbacks=2, spike=10.0, steps=20, resume="auto", keep=3)
    poison(monkeypatch, {33}, loss)  # in step 17
    expected = whole_run(config)
    capsys.readouterr()
    died(config, monkeypatch, 18)
    assert run(config, Mesh()) is not None  # goes back again, to the same end
    output = capsys.readouterr().out.replace("\n", " ")
    assert output.count("leaving out samples 32 to 34") >= 1
    found = losses(newest(config))
    assert str(found) == str(expected)  # NaN is not itself
    assert len(found) == 20


def test_a_loss_that_stays_bad_ends_the_run(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(config, rollbacks=2)
    poison(monkeypatch, set(range(8, 10_000)), math.nan)
    with pytest.raises(NonFiniteError, match=r"the run has gone back 2 times.*look at the data from sample 8 on"):
        run(config, Mesh())


def test_what_cannot_be_gone_on_from(config: TrainConfig, tmp_path: Path) -> None:
    done = run(replace(config, steps=3), Mesh())
    assert done is not None
    with pytest.raises(ConfigError, match="is at step 3 and steps is 3; raise steps"):
        run(replace(config, steps=3, resume=done[1]), Mesh())
    other = tmp_path / "other"
    other.mkdir()
    for number in range(3):
        (other / f"{number}.txt").write_text(f"another text {number}\n" * 100)
    with pytest.raises(DataError, match="Give the same data, or start a new run"):
        run(replace(config, data=(other,), resume=done[1]), Mesh())
    for wrong, message in (
        ({"spike": 3.0}, "spike=3.0 has no effect without rollbacks; set rollbacks"),
        ({"spike": 0.5, "rollbacks": 1}, "spike is 0.5; it must be more than 1"),
        ({"rollbacks": 1, "checkpoint": False}, "needs checkpoints to go back to"),
        ({"rollbacks": 1, "patience": 2}, "set nonfinite='skip'"),
        (
            {"rollbacks": 1, "plan": Plan(pipeline_parallel=Pipeline(2, schedule="2bw"), microbatches=2)},
            "do not combine",
        ),
        ({"keep": 0}, "keep is 0; it must be 1 or more"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(config, **wrong)


SEQUENCE, WINDOWS = 10, 97  # a prime, so that no batch divides an epoch


def make() -> Batches:
    """A text of numbers, each once: a row's first token tells which window it is."""
    batches = Batches(torch.arange((WINDOWS + 1) * SEQUENCE + 3, dtype=torch.int32), SEQUENCE, seed=5)
    assert batches.windows_per_epoch == WINDOWS
    return batches


def starts(batches: Batches, samples: list[int], data_ranks: int) -> list[int]:
    """First tokens of a global batch, put together from its lanes."""
    return [int(row[0]) for data_rank in range(data_ranks) for row in batches.rows(samples, data_rank, data_ranks)]


def test_the_order_depends_on_the_seed_and_the_position_alone() -> None:
    whole = [starts(make(), [sample], 1)[0] for sample in range(3 * WINDOWS)]
    for data_ranks, size in ((1, 7), (2, 3), (3, 1), (4, 5)):
        batches, cursor, seen = make(), Cursor(), []
        while cursor.position < 2 * WINDOWS:
            seen += starts(batches, cursor.take(data_ranks * size), data_ranks)
        assert seen == whole[: len(seen)]
    other = Batches(torch.arange((WINDOWS + 1) * SEQUENCE + 3, dtype=torch.int32), SEQUENCE, seed=6)
    assert [starts(other, [sample], 1)[0] for sample in range(WINDOWS)] != whole[:WINDOWS]


@pytest.mark.parametrize("seed", range(8))
def test_epochs_are_exact_over_kills_and_changes_of_the_world_and_the_batch(seed: int) -> None:
    """Kills at any step; what was done after the last checkpoint is done again, perhaps by another number of ranks."""
    draw = random.Random(seed)
    kept = json.dumps(Cursor().state())
    safe: list[int] = []  # first tokens that the surviving line of the run has seen
    wasted = 0
    while len(safe) < 4 * WINDOWS:
        data_ranks, size, every = draw.randint(1, 4), draw.randint(1, 6), draw.randint(1, 3)
        batches, cursor, since = make(), Cursor(), []  # a new process
        cursor.load(json.loads(kept))
        for step in range(1, draw.randint(1, 12)):
            since += starts(batches, cursor.take(data_ranks * size), data_ranks)
            if step % every == 0:
                safe, since, kept = safe + since, [], json.dumps(cursor.state())
        wasted += len(since)
    assert wasted
    for epoch in range(4):
        counts = Counter(safe[epoch * WINDOWS : (epoch + 1) * WINDOWS])
        first = min(counts)
        assert counts == Counter(range(first, first + WINDOWS * SEQUENCE, SEQUENCE))


@pytest.mark.parametrize("seed", range(8))
def test_left_out_samples_are_missing_and_no_others(seed: int) -> None:
    draw = random.Random(seed)
    cursor, gone, taken = Cursor(), set(), []
    for _ in range(40):
        if draw.random() < 0.5:
            start = cursor.position + draw.randint(-5, 30)
            stop = start + draw.randint(-2, 12)
            cursor.leave_out(start, stop)
            gone |= set(range(max(start, cursor.position), stop))
        again = Cursor()
        again.load(json.loads(json.dumps(cursor.state())))
        rows = draw.randint(1, 9)
        samples = cursor.take(rows)
        assert samples == again.take(rows) and len(samples) == rows
        assert again.state() == cursor.state()
        taken += samples
    assert taken == [sample for sample in range(cursor.position) if sample not in gone]


def test_going_back_leaves_out_the_bad_batches_and_takes_the_rest_again() -> None:
    cursor = Cursor()
    cursor.take(4)
    kept = cursor.state()
    good = cursor.take(4)
    before = cursor.position
    bad = cursor.take(4)
    after = cursor.position
    cursor.leave_out(before, after)
    cursor.rewind(kept)
    assert cursor.take(4) == good
    assert cursor.take(4) == [sample + 4 for sample in bad]
    assert cursor.left_out == [(8, 12)]


def test_intervals_are_kept_disjoint_and_in_order() -> None:
    cursor = Cursor()
    for start, stop in ((20, 30), (5, 8), (8, 10), (25, 40), (1, 1), (3, 2)):
        cursor.leave_out(start, stop)
    assert cursor.left_out == [(5, 10), (20, 40)]
    assert cursor.take(8) == [0, 1, 2, 3, 4, 10, 11, 12]
    assert cursor.take(10) == [*range(13, 20), 40, 41, 42]
