"""The formulas of the first table: thirty questions, and rehearsals of the same plans."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from planner.questions import MODELS, QUESTIONS, Question, llama

from zeroshard.cli.plan import described_task
from zeroshard.cli.plan_first import print_first_table
from zeroshard.cli.plan_options import ROWS, PlanOptions, described_machines
from zeroshard.doctor.hardware import Machines
from zeroshard.plan import Plan
from zeroshard.planner.formulas import AdapterSize, ModelBlock, ModelShape, StepSize, first_rows
from zeroshard.planner.predict.predict import predict
from zeroshard.planner.search.adapted import trained_as, with_adapters
from zeroshard.planner.search.search import search
from zeroshard.planner.search.text import changes
from zeroshard.planning.adapters import AdapterName, Adapters
from zeroshard.train.family import gpt_task
from zeroshard.train.model_shape import shape_of
from zeroshard.train.sizes import SIZES, GPTConfig

STEP = StepSize(rows=4, sequence=1024, width=2)


def machines_of(question: Question, folder: Path) -> tuple[PlanOptions, Machines]:
    model = question.model
    if model in MODELS:
        model = str(folder)
        (folder / "config.json").write_text(json.dumps(MODELS[question.model]))
    options = PlanOptions(model=model, gpu=question.card, gpus=question.cards, host_memory=question.host)
    return options, described_machines(options, folder)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: f"{q.model}-{q.cards}x{q.card}-{q.host}")
def test_the_first_table_answers_thirty_questions(question: Question, tmp_path: Path) -> None:
    options, machines = machines_of(question, tmp_path)
    shape = shape_of(options.model)
    assert shape is not None
    first, *others = first_rows(shape, STEP, machines)
    assert first.likely is question.fits
    assert all(first.tokens_per_second >= other.tokens_per_second for other in others if other.likely)


@pytest.mark.parametrize("width", [16, 256, 4096])
def test_the_first_table_shows_bytes_of_models_of_any_size(
    width: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = llama(width, 2 * width, 2, 2, 2, 8 * width)
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = PlanOptions(model=str(tmp_path), gpu="A100-80", gpus=1, precision="bf16", sequence=32)
    machines, shape = described_machines(options, tmp_path), shape_of(str(tmp_path))
    assert shape is not None
    print_first_table(options, machines)
    lines = [line.split() for line in capsys.readouterr().err.splitlines() if " likely " in line]
    rows = first_rows(shape, StepSize(rows=ROWS, sequence=32, width=2), machines)
    shown = [float(words[-3].replace(",", "")) for words in lines]
    peaks = [row.peak / 2**30 for row in rows if row.likely]
    assert shown
    assert shown == pytest.approx(peaks[: len(shown)], rel=0.051)


@pytest.mark.whole
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: f"{q.model}-{q.cards}x{q.card}-{q.host}")
def test_searches_give_the_same_answers_and_rehearsals_from_scratch_confirm_them(
    question: Question, tmp_path: Path
) -> None:
    options, machines = machines_of(question, tmp_path)
    options = replace(options, precision="bf16")
    task, base = described_task(options, machines.count)
    found = search(task, machines, base)
    of_all_weights = [one for one in found.best if not one.adapters]
    without_disk = [one for one in of_all_weights if one.plan.offloading.disk is None]
    assert bool(without_disk) is question.fits
    assert bool(found.ways) is not bool(of_all_weights)
    assert found.best[0].adapters or not changes(found.best[0])
    changed = [bool(changes(one)) for one in found.best]
    assert changed == sorted(changed)  # plans with which training gets other numbers come after those without
    for one in found.best[:2]:
        again, _ = described_task(options, machines.count)
        assert predict(trained_as(again, one), one.plan, machines, one.batch).fits


@pytest.mark.parametrize("settings", [{"zero": 0}, {"zero": 0, "recompute": "blocks"}, {"zero": 3}])
def test_peaks_are_within_ten_percent_of_rehearsed_ones(settings: dict[str, object]) -> None:
    ranks = 4 if settings["zero"] == 3 else 1
    config = GPTConfig(vocabulary=4096, context=256, width=512, heads=8, layers=8)
    each = 12 * 512**2 + 2 * 512
    shape = ModelShape((ModelBlock(8, each, each, 19.1 * 512, 2 * 512),), 4096 * 512 + 512, 512, 4096, chunks=True)
    machines = Machines.of("A100-80", ranks)
    rehearsed = predict(gpt_task(config, ranks), Plan(precision="bf16", **settings), machines, 1)  # type: ignore[arg-type]
    wanted = f"zero {settings['zero']}" + (", recompute" if "recompute" in settings else "") + ", 1 row"
    row = next(row for row in first_rows(shape, StepSize(1, 256, 2), machines) if row.plan == wanted)
    assert row.peak == pytest.approx(rehearsed.peak_bytes, rel=0.1)


@pytest.mark.parametrize(("name", "width"), [("lora", 2.0), ("qlora", 0.516)])
def test_peaks_of_adapters_are_within_ten_percent_of_rehearsed_ones(name: AdapterName, width: float) -> None:
    config = GPTConfig(vocabulary=4096, context=256, width=512, heads=8, layers=8)
    each, machines = 12 * 512**2 + 2 * 512, Machines.of("A100-80", 1)
    block = ModelBlock(8, each, each, 19.1 * 512, attention=1024, sides=16 * 512)
    shape = ModelShape((block,), 4096 * 512 + 512, 512, 4096, chunks=True)
    rehearsed = predict(
        with_adapters(gpt_task(config, 1), Adapters(name, 16)), Plan(precision="bf16", zero=0), machines, 1
    )
    step = StepSize(1, 256, 2, AdapterSize(16, width))
    row = next(row for row in first_rows(shape, step, machines) if row.plan == "zero 0, 1 row")
    assert row.peak == pytest.approx(rehearsed.peak_bytes, rel=0.1)


def test_the_shape_of_a_built_in_size_is_the_one_that_was_counted() -> None:
    shape = shape_of("gpt2")
    assert shape is not None and shape.blocks[0].kept == pytest.approx(19.1 * SIZES["gpt2"].width)
