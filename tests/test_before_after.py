"""The statistics of `benchmarks/before_after.py`, and which rows it launches."""

import itertools
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield import_module("before_after")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("count", range(1, 12))
def test_coverage_of_the_interval_is_that_of_all_orders_above_and_below_the_median(bench: Any, count: int) -> None:
    left_out, coverage = bench.order_statistics(count)
    inside = [
        left_out < sum(below) < count - left_out  # the median lies between the values that are left
        for below in itertools.product((0, 1), repeat=count)
    ]
    assert coverage == pytest.approx(sum(inside) / len(inside))
    if count >= 6:
        assert coverage >= 0.95
    else:
        assert left_out == 0


def test_the_interval_is_the_narrowest_that_suffices(bench: Any) -> None:
    assert bench.order_statistics(9) == (1, pytest.approx(0.9609375))  # tables: 2nd and 8th of 9
    assert bench.order_statistics(17) == (4, pytest.approx(0.951, abs=1e-3))  # 5th and 13th of 17


def test_estimates_of_ratios(bench: Any) -> None:
    found = bench.estimate([1.05, 0.9, 1.1, 1.2, 1.15, 1.3, 1.02, 1.07, 9.0])
    assert (found.median, found.low, found.high, found.pairs) == (1.1, 1.02, 1.3, 9)
    assert found.differs
    assert not bench.estimate([1.2, 1.3, 1.4]).differs  # three pairs show nothing with 95 %


def test_ratios_are_those_of_pairs(bench: Any) -> None:
    by_tree = {
        "before": [bench.Measured(1.0, 2.0), bench.Measured(10.0, 20.0)],
        "after": [bench.Measured(2.0, 2.0), bench.Measured(30.0, 10.0)],
    }
    row = bench.compared("a", by_tree)
    assert row["cpu"]["median"] == 2.5
    assert (row["wall"]["low"], row["wall"]["high"]) == (0.5, 1.0)
    assert "2.500 [2.000, 3.000]" in bench.text([row])


def test_rows_are_those_of_both_benchmarks(bench: Any) -> None:
    def rows(*words: str) -> list[str]:
        return [row for launch in bench.launches(bench.parse(["HEAD", *words])) for row in launch.rows]

    every = rows()
    assert len(every) == len(set(every)) == 2 * 2 * 2 * 8 + 2 * 3 * 7
    assert "peers/100M/512/bf16/zero3-shared" in every and "overhead/2/zero0/8x64" in every
    assert not [row for row in every if "ddp" in row or "deepspeed" in row or "fsdp" in row]
    assert rows("--quick", "--rows", "peers/*/zero?") == [f"peers/25M/64/fp32/zero{stage}" for stage in range(4)]
    assert rows("--rows", "overhead/1/zero2/8x1") == ["overhead/1/zero2/8x1"]
    assert not rows("--rows", "nothing")


def test_trees_take_turns_and_a_failed_row_is_named(bench: Any) -> None:
    order: list[str] = []

    def good(more_env: dict[str, str]) -> dict[str, Any]:
        order.append(Path(more_env["PYTHONPATH"].partition(":")[0]).name)
        return {"a": bench.Measured(1.0, 1.0)}

    def bad(more_env: dict[str, str]) -> dict[str, Any]:
        raise bench.LaunchError("no answer")

    todo = [bench.Launch(("a",), good), bench.Launch(("b", "c"), bad)]
    kept: dict[str, Any] = {}
    sources = {tree: Path(tree) for tree in bench.TREES}
    for number in range(3):
        assert bench.measure(todo, sources, number, kept) == {"b": "no answer", "c": "no answer"}
    assert order == ["before", "after", "after", "before", "before", "after"]
    assert list(kept) == ["a"] and [len(kept["a"][tree]) for tree in bench.TREES] == [3, 3]
