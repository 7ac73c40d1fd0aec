"""Kept results of searches: the same question needs no search, and each part of a question makes another one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from predictions import AT_PEAK, GIB, later, piped, prediction, refusal

import zeroshard as zs
from zeroshard.doctor.hardware import Machines
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.planner.predict.result import MOST_ACTIONS, Found, Prediction, Refusal
from zeroshard.planner.search import answers, kept
from zeroshard.planner.search.kept import search_once

TASK = TrainingTask(lambda: None, lambda rows: None, lambda model: None, 8, 16, "net", identity="a net")  # type: ignore[arg-type, return-value]
MACHINES = Machines.of("A100-80", 8)
BASE = zs.Plan(precision="bf16")
LARGE = prediction(zs.Plan(), memory={"activations": 30 * GIB}, phases={"forward": AT_PEAK})
REFUSED = (refusal(zs.Plan(zero=1), "80 GiB"), Refusal(LARGE.plan, 4, "It needs more.", "Buy more.", LARGE))
PLANS = (prediction(notes=("a", "b")), later(piped(), 1), later(prediction(zs.Plan(zero=1)), 2))
FOUND = Found(PLANS[:2], REFUSED, 42, 3.2, ("a way",), PLANS[2:])


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tasks that were searched, with answers of a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tasks: list[Any] = []
    monkeypatch.setattr(kept, "search", lambda task, *_, **__: tasks.append(task) or FOUND)
    return tasks


def test_a_kept_result_is_the_whole_result(asked: list[Any]) -> None:
    assert search_once(TASK, MACHINES, BASE) is FOUND
    heard: list[str] = []
    again = search_once(TASK, MACHINES, BASE, top=2, say=heard.append)
    assert again == replace(FOUND, kept=True) and len(asked) == 1 and heard
    assert again.best[0].peak_bytes == FOUND.best[0].peak_bytes and again.best[1].spans == FOUND.best[1].spans
    wide, narrow = (search_once(TASK, MACHINES, BASE, top=top) for top in (5, 1))
    assert (len(wide.best), len(wide.others), len(narrow.best), len(narrow.others)) == (3, 0, 1, 2)
    assert search_once(TASK, MACHINES, BASE, fresh=True) is FOUND and len(asked) == 2


def test_each_part_of_a_question_makes_another(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [{"identity": "another net"}, {"rows": 16}, {"adapters": "LoRA of rank 8"}, {"others": {"adafactor": ()}}]
    questions: list[tuple[Any, ...]] = [(replace(TASK, **changed), MACHINES, BASE) for changed in tasks]
    questions += [(TASK, Machines.of("A100-80", 4), BASE), (TASK, MACHINES, replace(BASE, clip_norm=1.0))]
    questions += [(TASK, replace(MACHINES, host_memory=GIB), BASE), (TASK, MACHINES, BASE, 5, print, True)]
    for question in [(TASK, MACHINES, BASE), *questions, *questions]:
        search_once(*question)
    assert len(asked) == 1 + len(questions)
    monkeypatch.setattr(answers, "__version__", "0.0.0")
    search_once(TASK, MACHINES, BASE)
    assert len(asked) == 2 + len(questions)


def test_a_task_without_an_identity_is_always_searched(asked: list[Any], tmp_path: Path) -> None:
    for _ in range(2):
        search_once(replace(TASK, identity=""), MACHINES, BASE)
    assert len(asked) == 2 and not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"best": []}', '{"best": 3, "others": []}'])
def test_a_damaged_answer_is_searched_again(asked: list[Any], tmp_path: Path, damage: str) -> None:
    search_once(TASK, MACHINES, BASE)
    (file,) = tmp_path.rglob("search-*.json")
    file.write_text(damage)
    assert search_once(TASK, MACHINES, BASE) is FOUND
    assert search_once(TASK, MACHINES, BASE).kept and len(asked) == 2


def test_the_oldest_answers_are_removed(asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "KEPT", 2)
    for rows in (8, 16, 24):
        search_once(replace(TASK, rows=rows), MACHINES, BASE)
    assert len(list(tmp_path.rglob("search-*.json"))) == 2


def test_a_long_timeline_is_kept_of_the_best_alone() -> None:
    (row, *_) = piped().spans
    long = replace(piped(), spans=(row * (MOST_ACTIONS // len(row) + 1),))
    stored = Found((long,), (Refusal(long.plan, 4, "a", "b", long),), 1, 1.0, (), (long,)).as_dict()
    again = Found.from_dict(stored)
    assert again.best[0] == long and again.others[0].spans == ()
    assert again.refused[0].prediction is not None and again.refused[0].prediction.spans == ()


def test_a_prediction_without_curves_comes_back_from_its_summary() -> None:
    assert Prediction.from_dict(PLANS[1].as_dict()) == replace(PLANS[1], events=(), spans=())
