"""The checkpoints of one run: what is kept, what is found again, and what a resumed run goes on with."""

import gc
import logging
import random
import time
import warnings
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inside import savings_of
from pool import Pool, WorkerError
from torch import nn

import zeroshard as zs
from zeroshard.checkpoint import Reader, write, writer
from zeroshard.engine import state
from zeroshard.errors import CheckpointError, DamagedError

EVERY, LAST = 3, 12


class Model(nn.Module):
    """Two layers with dropout between them; returns the loss."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up = nn.Linear(4, width)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(torch.tanh(self.up(x)))).square().mean()


def made(mesh: zs.Mesh, width: int = 6) -> zs.Engine:
    """A new engine, and random numbers that have nothing to do with any run before."""
    torch.manual_seed(5)
    engine = zs.Engine(Model(width), partial(torch.optim.AdamW, lr=0.1), zs.Plan(zero=2), mesh=mesh)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(40 + mesh.rank)
    return engine


def trained(mesh: zs.Mesh, folder: str, last: int = LAST, keep: int = 2) -> list[tuple[Any, ...]]:
    """Go on to step `last`, saving every third; of each step its loss, learning rate and random numbers."""
    engine = made(mesh)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(engine.optimizer, max_lr=0.2, total_steps=LAST)
    checkpoints = zs.Checkpoints(engine, folder, keep=keep)
    extra = checkpoints.resume()
    if extra is not None:
        scheduler.load_state_dict(extra["scheduler"])
    seen, saving = [], None
    while engine.steps < last:
        drawn = (random.gauss(0, 1), float(np.random.randn()), float(torch.randn(())))
        x = torch.tensor(drawn) @ torch.ones(3, 4) + torch.randn(8, 4)
        loss, rate = engine(x), scheduler.get_last_lr()
        engine.backward(loss)
        engine.step()
        scheduler.step()
        seen.append((engine.steps, float(loss.detach()), rate, drawn))
        if engine.steps % EVERY == 0:
            saving = checkpoints.save({"scheduler": scheduler.state_dict()})
    if saving is not None:
        saving.wait()
    return seen


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_goes_on_bit_for_bit(pool: Pool, tmp_path: Path, ranks: int) -> None:
    """The scheduler and Python's, numpy's and torch's random numbers included, with the kept halves of normal pairs."""
    whole = pool.run(trained, ranks, str(tmp_path / "whole"))
    cut = pool.run(trained, ranks, str(tmp_path / "cut"), 8)
    rest = pool.run(trained, ranks, str(tmp_path / "cut"))
    for all_steps, first, second in zip(whole, cut, rest, strict=True):
        assert first == all_steps[:8] and second == all_steps[6:]
        assert len({drawn for *_, drawn in all_steps}) == LAST
    assert len({tuple(loss for _, loss, *_ in steps) for steps in whole}) == ranks, "ranks draw different numbers"


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_are_kept(pool: Pool, tmp_path: Path, keep: int) -> None:
    pool.run(trained, 2, str(tmp_path), LAST, keep)
    newest = [f"step-{step:08d}" for step in range(LAST, 0, -EVERY)][:keep]
    assert sorted(path.name for path in tmp_path.iterdir()) == newest[::-1]


def found(mesh: zs.Mesh, folder: str, width: int = 6) -> tuple[int, list[str], str, str]:
    """Resume: the step, the warnings, and the error with its class."""
    engine, kind, problem = made(mesh, width), "", ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            zs.Checkpoints(engine, folder).resume()
        except CheckpointError as error:
            kind, problem = type(error).__name__, str(error)
    return engine.steps, [str(warning.message) for warning in caught], kind, problem


def damage(shard: Path) -> None:
    """Flip a bit of the last tensor."""
    content = bytearray(shard.read_bytes())
    content[-1] ^= 64
    shard.write_bytes(content)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_damaged_one_is_put_aside_and_the_one_before_is_taken(pool: Pool, tmp_path: Path, ranks: int) -> None:
    pool.run(trained, ranks, str(tmp_path), LAST, 3)
    names = [f"rank-{rank:05d}-of-{ranks:05d}.safetensors" for rank in range(ranks)]
    damage(tmp_path / "step-00000012" / names[-1])
    for step, (warning,), kind, _ in pool.run(found, ranks, str(tmp_path)):
        assert (step, kind) == (9, "")
        assert names[-1] in warning and "is damaged in 'rng:" in warning
        assert warning.endswith("It is now step-00000012.bad; trying the one before.")
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000006", "step-00000009", "step-00000012.bad"}
    for step in (6, 9):
        damage(tmp_path / f"step-{step:08d}" / names[0])
    for _, two, kind, problem in pool.run(found, ranks, str(tmp_path)):
        assert len(two) == 2 and kind == "DamagedError"
        assert f"None of the 2 checkpoints in {tmp_path} is whole; the last: {tmp_path}/step-00000006/rank-" in problem
    assert {path.suffix for path in tmp_path.iterdir()} == {".bad"}
    assert [steps[0][0] for steps in pool.run(trained, ranks, str(tmp_path))] == [1] * ranks  # nothing is left: anew


def test_one_of_another_model_is_an_error_and_stays(pool: Pool, tmp_path: Path) -> None:
    pool.run(trained, 2, str(tmp_path), EVERY)
    for step, told, kind, problem in pool.run(found, 2, str(tmp_path), 7):
        assert (step, told, kind) == (0, [], "CheckpointError")
        assert "is of another model: 'down.weight' is (1, 6) there and (1, 7) here" in problem
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def back(mesh: zs.Mesh, folder: str) -> tuple[list[int], bool]:
    """Four checkpoints, and back to the second; whether the weights are those that it was saved with."""
    engine = made(mesh)
    checkpoints = zs.Checkpoints(engine, folder, keep=9)
    weights = {}
    for step in range(1, 5):
        engine.backward(engine(torch.ones(2, 4)))
        engine.step()
        checkpoints.save({"step": step}, wait=step != 4)  # the last is still under way
        weights[step] = engine.state_dict()
    assert checkpoints.steps() == [1, 2, 3] or checkpoints.steps() == [1, 2, 3, 4]
    assert checkpoints.back_to(2) == {"step": 2} and engine.steps == 2
    now = engine.state_dict()
    same = all(torch.equal(now[name], value) for name, value in weights[2].items())
    with pytest.raises(CheckpointError, match="is no checkpoint: there is no such folder"):
        checkpoints.back_to(7)
    return checkpoints.steps(), same


def test_back_to_a_step(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(back, 2, str(tmp_path)) == [([1, 2], True)] * 2
    names = {f"step-{step:08d}" for step in (1, 2)} | {f"step-{step:08d}.bad" for step in (3, 4)}
    assert {path.name for path in tmp_path.iterdir()} == names


def refused(mesh: zs.Mesh, folder: str) -> list[str]:
    """What cannot be: the same step twice, and keeping nothing."""
    engine, problems = made(mesh), []
    checkpoints = zs.Checkpoints(engine, folder)
    checkpoints.save(wait=True)
    for wrong in (checkpoints.save, lambda: zs.Checkpoints(engine, folder, keep=0)):
        with pytest.raises(CheckpointError) as caught:
            wrong()
        assert type(caught.value) is not DamagedError
        problems.append(str(caught.value))
    return problems


def test_what_is_refused(pool: Pool, tmp_path: Path) -> None:
    for twice, nothing in pool.run(refused, 2, str(tmp_path)):
        assert "exists already, and checkpoints are never overwritten" in twice
        assert nothing == "keep is 0; it must be 1 or more, or nothing would be left to go on from."
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]


def test_what_a_dead_run_left_half_written_is_cleared(pool: Pool, tmp_path: Path) -> None:
    left_over = ("step-00000003.tmp-18a", "step-00000001.gone-step-00000003")
    others = ("step-00000002.bad", "step-2.tmp-1", "notes", "step-00000002")
    for name in (*left_over, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("content")
    for step, told, kind, _ in pool.run(found, 2, str(tmp_path)):
        assert (step, told, kind) == (0, [], "")  # a folder without a manifest is no checkpoint
    assert {path.name for path in tmp_path.iterdir()} == set(others)


def test_a_rank_that_fails_to_save_is_no_silent_loss(pool: Pool, tmp_path: Path) -> None:
    """What cannot be saved is refused on all ranks, though only one has it."""
    with pytest.raises(WorkerError, match="must be plain values"):
        pool.run(no_json, 2, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def no_json(mesh: zs.Mesh, folder: str) -> None:
    """Rank 1 alone gives what cannot be saved."""
    zs.Checkpoints(made(mesh), folder).save({"losses": {1.0}} if mesh.rank else {})


def engines_in_turn(mesh: zs.Mesh, folder: str) -> tuple[int, list[int], bool]:
    """Each engine is dropped while its checkpoint is written, slowly; the next one looks for it at once."""

    def slow(*args: Any) -> None:
        time.sleep(0.2)
        write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "write", slow)
        made(mesh).save(f"{folder}/alone", {"found": 7})
        found = made(mesh).load(f"{folder}/alone")["found"]
        made(mesh).save(f"{folder}/weights")
        made(mesh).load_weights(f"{folder}/weights")
        zs.Checkpoints(made(mesh), f"{folder}/run").save()
        steps = zs.Checkpoints(made(mesh), f"{folder}/run").steps()  # which clears what is half written
        last = made(mesh).save(f"{folder}/last")
        gc.collect()
        writer._finish(
            weakref.ref(savings_of(made(mesh)))
        )  # at the end of a process: of an engine that is gone by then
    return found, steps, last.done


def test_other_engines_and_the_end_of_the_process_wait_for_what_is_still_written(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(engines_in_turn, 2, str(tmp_path)) == [(7, [0], True)] * 2
    assert (tmp_path / "last").is_dir()


def test_a_checkpoint_that_another_process_writes_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.tmp-18a").mkdir()
    with pytest.raises(CheckpointError, match=r"no such folder. c.tmp-18a beside it is still being written, or its wr"):
        Reader(tmp_path / "c")


def test_the_log_names_what_was_written_and_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = made(zs.Mesh())
    checkpoints = zs.Checkpoints(engine, tmp_path)
    with caplog.at_level(logging.INFO, "zeroshard"):
        checkpoints.save(wait=True)
        checkpoints.resume()
    path = tmp_path / "step-00000000"
    assert [(record.name, record.getMessage()) for record in caplog.records] == [
        ("zeroshard.checkpoint.commit", f"wrote the checkpoint {path}"),
        ("zeroshard.resilience.checkpoints", f"going on from {path} on rank 0"),
    ]
