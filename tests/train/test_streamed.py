"""Runs of the main job on streamed records: killed and resumed bit for bit, on other ranks, after rollbacks, masked."""

import json
import math
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pool import Pool

from zeroshard.comm.mesh import Mesh
from zeroshard.data import sources
from zeroshard.engine import Engine
from zeroshard.errors import DataError
from zeroshard.plan import Plan
from zeroshard.train.config import TrainConfig
from zeroshard.train.run import Run, run

STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of text, and of prompts with completions."""
    path, draw = tmp_path_factory.mktemp("records"), random.Random(0)
    texts = [{"text": f"record {n} " + "x" * draw.randrange(60)} for n in range(300)]
    pairs = [{"prompt": "q" * draw.randrange(1, 12), "completion": f"a{n}" * draw.randrange(1, 4)} for n in range(300)]
    for name, rows in (("text", texts), ("pairs", pairs)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(data: Path, out: Path, **options: Any) -> TrainConfig:
    usual: dict[str, Any] = {"sequence": 32, "batch_per_rank": 4, "steps": STEPS, "warmup_steps": 2}
    usual |= {"validate_every": 0, "validation_rows": 2, "sample_tokens": 0, "checkpoint_every": 2, "dropout": 0.0}
    usual |= {"plan": Plan(clip_norm=1.0, units=()), "final_learning_rate": 1.0}
    return TrainConfig(data=(data,), out=out, **{**usual, **options})


def losses(folder: Path) -> dict[int, float]:
    """The last loss of each step in a run folder."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def run_on(mesh: Mesh, config: TrainConfig) -> str:
    done = run(config, mesh)
    return "" if done is None else str(done[1])


def trained(config: TrainConfig) -> Path:
    return Path(run_on(Mesh(), config))


@pytest.fixture(params=[pytest.param(1 << 20, marks=pytest.mark.whole), 128], ids=["one reader", "several readers"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK", request.param)


@pytest.mark.usefixtures("_blocks")
def test_a_run_that_dies_at_random_moments_goes_on_bit_for_bit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five times, each resume from the checkpoint of a resumed run."""
    config = config_of(folder / "text.jsonl", tmp_path / "runs", resume="auto")
    whole = losses(trained(replace(config, out=tmp_path / "whole", resume="never")))
    assert whole[STEPS] < whole[1]
    draw, step = random.Random(1), Run._step
    moments = sorted(draw.sample(range(2, STEPS), 5))
    for moment in moments:

        def dying(self: Run, at: int, samples: list[int], moment: int = moment) -> Any:
            if at == moment:
                raise KeyboardInterrupt
            return step(self, at, samples)

        with monkeypatch.context() as patch:
            patch.setattr(Run, "_step", dying)
            with pytest.raises(KeyboardInterrupt):
                run(config, Mesh())
        for thread in threading.enumerate():  # the process lives on, so what it is writing comes to its end
            if thread.name.startswith("zeroshard saves"):
                thread.join()
    assert losses(trained(config)) == whole


def test_a_run_goes_on_at_the_same_sample_on_other_ranks(folder: Path, tmp_path: Path, pool: Pool) -> None:
    """Prompts are masked, so ranks have different counts of tokens; from one rank to two, to four."""
    config = config_of(folder / "pairs.jsonl", tmp_path / "whole")
    whole = losses(trained(config))
    before = trained(config_of(folder / "pairs.jsonl", tmp_path / "1", steps=4))
    found = losses(before)
    for ranks, steps in ((2, 8), (4, STEPS)):
        options = {"batch_per_rank": 4 // ranks, "steps": steps, "resume": before}
        options |= {"validate_every": 2, "validation_rows": 1}  # fewer than ranks: each has one all the same
        plan = Plan(zero=3, clip_norm=1.0, units=())
        going_on = config_of(folder / "pairs.jsonl", tmp_path / str(ranks), plan=plan, **options)
        before = Path(pool.run(run_on, ranks, going_on)[0])
        found |= losses(before)
    assert found == pytest.approx(whole, rel=1e-5)
    with pytest.raises(DataError, match="Give the same data, or start a new run"):
        trained(config_of(folder / "text.jsonl", tmp_path / "other", resume=before))


def test_a_rollback_leaves_samples_out(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch of step 6 has a bad loss; the steps after it are those of a run that never saw it."""
    step, train_step, seen = Run._step, Engine.train_step, []

    def watching(self: Run, at: int, samples: list[int]) -> Any:
        seen.append(samples)
        return step(self, at, samples)

    def poisoned(self: Engine, batch: Any) -> Any:
        result = train_step(self, batch)
        return replace(result, loss=result.loss * math.nan) if 22 in seen[-1] else result

    monkeypatch.setattr(Run, "_step", watching)
    monkeypatch.setattr(Engine, "train_step", poisoned)
    config = config_of(folder / "text.jsonl", tmp_path / "runs", rollbacks=1, keep=3)
    found = losses(trained(config))
    assert seen.count([20, 21, 22, 23]) == 1 and seen.count([16, 17, 18, 19]) == 2
    assert seen[-1] == [48, 49, 50, 51] and all(math.isfinite(loss) for loss in found.values())


@pytest.mark.parametrize("name", ["few.jsonl", "few.txt"])
def test_too_few_rows_that_are_held_out_are_refused_before_the_first_step(tmp_path: Path, name: str) -> None:
    lines = ['{"text": "a short record"}\n' if name.endswith("jsonl") else "a line of text\n" for _ in range(60)]
    (tmp_path / name).write_text("".join(lines))
    with pytest.raises(DataError, match=r"held out|validation"):
        trained(config_of(tmp_path / name, tmp_path / "runs", sequence=64))
    (folder,) = (tmp_path / "runs").iterdir() if (tmp_path / "runs").exists() else [tmp_path]
    assert not (folder / "metrics.jsonl").exists() or not losses(folder)
