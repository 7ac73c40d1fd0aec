"""A few of the soak's damaged and forged checkpoints, with the judge shown to be able to say no."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from zeroshard.engine.state import State
from zeroshard.parts.part import Part

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


def imported() -> Any:
    """The module, with `benchmarks/` on the path meanwhile: some of its modules have names of folders of tests."""
    sys.path.append(BENCHMARKS)
    try:
        return import_module("soak.forge")
    finally:
        sys.path.remove(BENCHMARKS)


forge = imported()


def test_none_is_loaded_as_something_that_it_is_not(tmp_path: Path) -> None:
    counts = forge.forged(tmp_path, True)
    assert counts["made"] == forge.QUICK and counts["silent"] == 0
    assert {change.__name__ for change in forge.KINDS} == {key.split()[0] for key in counts} - {"made", "silent"}


def test_a_loader_that_believes_everything_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that leaves a parameter as it was."""
    load = State._load_weights

    def lazily(self: State, part: Part, *reader: Any) -> None:
        load(self, part, *reader)
        part.updater.values[:1] = 0

    monkeypatch.setattr(State, "_load_weights", lazily)
    with pytest.raises(AssertionError, match="silent"):
        forge.forged(tmp_path, True)
