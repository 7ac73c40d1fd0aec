"""Cuts by predicted times: one run of each layer gives the cut of several."""

from collections import Counter
from unittest.mock import patch

from planner.rehearsed import task

import zeroshard as zs
from zeroshard.doctor.hardware import Machines
from zeroshard.pipeline import stage
from zeroshard.pipeline.partition import measure
from zeroshard.planner.predict.rehearse import rehearse


def cut() -> tuple[tuple[str, ...], set[int]]:
    """The first layers of later stages, and how often each layer was run."""
    runs: Counter[str] = Counter()
    once = measure._Measurement._once

    def counted(measurement: measure._Measurement) -> tuple[object, float, float]:
        runs[measurement._layer.name] += 1
        return once(measurement)

    plan = zs.Plan(zero=0, microbatches=2, pipeline_parallel=2)
    with patch.object(measure._Measurement, "_once", counted):
        found = rehearse(task(rows=4), plan, 0, 2, 4, Machines.of("A100-80", 2))
    return found.split, set(runs.values())


def test_one_run_of_each_layer_gives_the_cut_of_several() -> None:
    split, runs = cut()
    assert runs == {1 + 1} and len(split) == 1  # one to warm up
    with patch.object(stage, "measure", lambda *words: measure.measure(*words[:-2], measure.REPEATS, words[-1])):
        assert cut() == (split, {1 + measure.REPEATS})
