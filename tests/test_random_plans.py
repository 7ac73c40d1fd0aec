"""`benchmarks/random_plans.py` counts what came of each case, and goes on after one that fails or hangs."""

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
        yield import_module("random_plans")
    finally:
        sys.path.remove(str(BENCHMARKS))


class Broken:
    """A pool whose workers die or hang in turns."""

    def __init__(self, apart: int = 2) -> None:
        self.calls = self.stops = 0

    def run(self, *args: Any) -> Any:
        self.calls += 1
        raise [AssertionError("rank 0 did not answer within 90 s"), ConnectionResetError()][self.calls % 2]

    def stop(self) -> None:
        self.stops += 1


def test_failing_and_hanging_cases_are_counted_with_their_seeds(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pools: list[Broken] = []
    monkeypatch.setattr(bench, "Pool", lambda apart: pools.append(Broken()) or pools[-1])
    kept = bench.run(5, 12)
    kinds = kept["kinds"]
    assert kept["drawn"] == 12 == sum(kinds.values()) and kinds["failed"] == len(kept["failed"]) == pools[0].calls > 1
    assert pools[0].stops == pools[0].calls + 1
    assert sum(kept["refusals"].values()) == kinds["refused"]
    seeds = [failed["seed"] for failed in kept["failed"]]
    printed = capsys.readouterr().out
    assert all(f"seed {seed} failed: Case(seed={seed}, " in printed for seed in seeds)
    text = bench.markdown({**bench.circumstances(), **kept})
    assert "| drawn | 12 |" in text and f"| failed | {len(seeds)} |" in text
    assert f"Seed {seeds[0]} failed: ConnectionResetError" in text
    assert f"Seed {seeds[1]} failed: rank 0 did not answer" in text


def test_the_command_line(bench: Any) -> None:
    assert (bench.parse([]).count, bench.parse([]).seed, bench.parse([]).json) == (100, 0, None)
    assert Path(bench.parse(["--json"]).json).parent == bench.RESULTS
    assert bench.parse(["--json", "x.json"]).json == "x.json"
    with pytest.raises(SystemExit):
        bench.parse(["--count", "0"])
