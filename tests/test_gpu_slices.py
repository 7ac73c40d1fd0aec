"""The parts of the GPUs' slices that need no GPU: the choice of slices and plans, and the arithmetic of figures."""

import argparse
import importlib
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
GPU = ROOT / "benchmarks" / "gpu"
FACTS: dict[str, Any] = {
    "cards": ["H200"],
    "card_bytes": 150e9,
    "versions": {"torch": "2.13.0", "deepspeed": "missing", "transformers": "5.23.0"},
}


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, Any]]:
    """The scripts as modules; names and paths that they bring are gone afterwards."""
    before, path = set(sys.modules), list(sys.path)
    sys.path[:0] = [str(GPU), str(GPU.parent), str(ROOT / "docs")]
    names = ("slices", "all", "several", "parity", "overlap", "suite")
    yield {name: importlib.import_module(name) for name in names}
    sys.path[:] = path
    for name in {*names, "ranks", "facts", "combines"} - before:
        sys.modules.pop(name, None)


def options(**more: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"slice": None, "again": False, "cpu": False, "json": None, **more})


def test_slices_that_are_done_on_this_card_are_skipped(modules: dict[str, Any], tmp_path: Path) -> None:
    slices, several = modules["slices"], modules["all"].SLICES
    folder, card = slices.Folder(tmp_path), slices.card_of(FACTS)
    for each, status, on in zip(
        several, ("done", "failed", "timed out", "done"), (card,) * 3 + ("1 x V100",), strict=False
    ):
        folder.write(each.name, {"status": status, "card": on})
        folder.figures(each.name).write_text("{}")
    order = [each.name for each in slices.chosen(several, folder, FACTS, options())]
    names = [each.name for each in several]
    assert order == [*names[3:], *names[1:3]], "those of another card and those without a result come first"
    assert not folder.figures(names[3]).exists(), "figures of another card are forgotten"
    assert names[0] in [each.name for each in slices.chosen(several, folder, FACTS, options(again=True))]
    assert [each.name for each in slices.chosen(several, folder, FACTS, options(slice=["speed"]))] == ["speed"]


def test_every_slice_ends_within_four_minutes_and_is_left_out_for_a_reason(modules: dict[str, Any]) -> None:
    eight = {**FACTS, "cards": ["H200"] * 8}
    every = {each.name: each for module in ("all", "several") for each in modules[module].slices(eight, False)}
    assert all(each.expected <= each.limit <= 240 for each in every.values())
    assert {
        f"{kind}-{ranks}" for kind in ("links", "parity", "overlap", "faults", "peers") for ranks in (2, 4, 8)
    } < set(every)
    assert every["parity-4"].left_out(FACTS, False) == "needs 4 GPUs, and there are 1"
    assert every["peers-offload"].left_out(FACTS, False) == "deepspeed is missing"
    assert "135 GB" in str(every["speed-7B"].left_out({**FACTS, "card_bytes": 80e9}, False))
    assert every["speed-7B"].left_out({**FACTS, "versions": {"transformers": "5"}}, True) == "has no toy size"


@pytest.mark.parametrize(
    "left, code, status", [(1000.0, 0, "done"), (1000.0, 1, "failed"), (1000.0, None, "timed out"), (9.0, 0, None)]
)
def test_a_slice_runs_within_its_budget(
    modules: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: float, code: Any, status: Any
) -> None:
    slices, limits = modules["slices"], []

    def run_script(script: Path, words: list[str], output: Path, limit: float, more: Any) -> Any:
        output.write_text("a line\n")
        limits.append(limit)
        return code

    monkeypatch.setattr(slices, "run_script", run_script)
    each, folder = modules["all"].SLICES[0], slices.Folder(tmp_path)
    facts = {**FACTS, "cpu": "a CPU", "cores": 2, "revision": "0", "python": "3", "older_torch": True}
    good = slices.attempt(each, folder, facts, options(), slices.time.monotonic() + left)
    record = folder.record(each.name)
    assert good == (code == 0) and (record and record["status"]) == status
    assert limits == ([] if status is None else [240.0])
    page = slices.page("Title", modules["all"].SLICES, folder, facts, False)
    assert "older than the one" in page and ("a line" in page) == (status is not None)


def test_a_script_that_is_not_done_is_started_again_while_it_gets_on(
    modules: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices, remaining = modules["slices"], [30, 10, 10, 0]

    def run_script(script: Path, words: list[str], output: Path, limit: float, more: Any) -> int:
        output.write_text("")
        Path(words[-1]).write_text(f'{{"remaining": {remaining.pop(0)}}}')
        return int(slices.PART)

    monkeypatch.setattr(slices, "run_script", run_script)
    each, folder = modules["several"].parity(2), slices.Folder(tmp_path)
    assert not slices.attempt(each, folder, {**FACTS, "cards": ["H200"] * 2}, options(), math.inf)
    assert remaining == [0], "the third call did nothing"


def test_parity_has_every_plan_of_the_page(modules: dict[str, Any]) -> None:
    parity = modules["parity"]
    rows = re.findall(r"^\| ([\w-]+) \| (.*) \|$", (ROOT / "docs" / "combines.md").read_text(), re.M)
    cells = [cell for _, row in rows for cell in row.split(" | ") if re.fullmatch(r"[0-3]( [0-3])*", cell.strip())]
    every = parity.cases()
    assert len(every) == sum(len(cell.split()) for cell in cells) == len({case.name for case in every}) > 500
    fit = {case.name: [case.ranks(most) for most in (2, 4, 8)] for case in every}
    assert all(max(ranks) >= 2 for ranks in fit.values()), "each runs somewhere on eight"
    assert (
        fit["uneven+tensor zero1"] == [0, 0, 6]
        and fit["1f1b+experts zero0"] == [0, 4, 8]
        and fit["bf16 zero3"] == [2, 4, 8]
    )


@pytest.mark.parametrize(
    "loss, weights, verdict",
    [(1e-6, 1e-6, "same"), (1e-4, 1e-6, "failed"), (1e-6, 1e-2, "failed"), (math.inf, 0.0, "failed")],
)
def test_parity_judges_losses_and_weights(modules: dict[str, Any], loss: float, weights: float, verdict: str) -> None:
    parity = modules["parity"]
    case = parity.Case(("tensor",), 0)
    answers = [
        {"losses": [(0, 2.0 * (1 + loss))] * parity.STEPS, "wanted": [2.0] * parity.STEPS, "weights": weights},
        {"losses": [(0, None)] * parity.STEPS, "wanted": [2.0] * parity.STEPS, "weights": 0.0},
    ]
    assert parity.together(case, answers)["verdict"] == verdict
    assert parity.together(case, [{"refused": "PlanError"}] * 2)["verdict"] == "refused"
    assert parity.together(case, [{"refused": "PlanError"}, answers[0]])["verdict"] == "failed", "not all ranks refused"


def test_a_missing_update_is_far_from_the_bar(modules: dict[str, Any]) -> None:
    parity = modules["parity"]
    losses, weights, start = parity.plain("Five", False)
    assert parity.moved_apart(weights, weights, start) == 0.0 and parity.moved_apart(
        start, weights, start
    ) == pytest.approx(1.0)
    late, _, _ = parity.plain("Five", True)
    assert parity.apart(late, losses) > 100 * parity.BARS["fp32"][0]


def event(name: str, begin: float, end: float, kind: str, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": begin, "dur": end - begin, "cat": kind, "tid": 1, **more}


def test_hidden_communication_of_a_gpu(modules: dict[str, Any]) -> None:
    found = modules["overlap"].hidden([
        event("zeroshard::gather blocks.1", 0, 10, "user_annotation"),
        event("zeroshard::gather blocks.1", 100, 140, "gpu_user_annotation"),
        event("zeroshard::reduce blocks.0", 20, 30, "user_annotation"),
        event("cudaLaunchKernel", 5, 6, "cuda_runtime", args={"correlation": 1}),
        event("cudaLaunchKernel", 25, 26, "cuda_runtime", args={"correlation": 2}),
        event("ncclDevKernel_AllGather", 100, 140, "kernel", args={"correlation": 1}, tid=7),
        event("ncclDevKernel_SendRecv", 130, 160, "kernel", args={"correlation": 2}, tid=8),
        event("gemm", 90, 110, "kernel", args={"correlation": 3}, tid=9),
        event("gemm", 150, 170, "kernel", args={"correlation": 4}, tid=9),
        event("Memcpy HtoD", 110, 150, "gpu_memcpy"),
    ])  # fmt: skip
    assert found["all"] == {"seconds": pytest.approx(60e-6), "hidden": pytest.approx(20 / 60)}
    assert found["gather"] == {"seconds": pytest.approx(40e-6), "hidden": pytest.approx(10 / 40)}
    assert found["reduce"] == {"seconds": pytest.approx(30e-6), "hidden": pytest.approx(10 / 30)}


def test_hidden_communication_of_a_cpu(modules: dict[str, Any]) -> None:
    found = modules["overlap"].hidden([
        event("zeroshard::gather blocks.1", 0, 5, "user_annotation"),
        event("zeroshard::forward blocks.0", 5, 80, "user_annotation"),
        event("zeroshard::wait for gather blocks.1", 80, 100, "user_annotation"),
        event("aten::mm", 5, 80, "cpu_op"),
    ])  # fmt: skip
    figures = {"seconds": pytest.approx(100e-6), "hidden": pytest.approx(0.75)}
    assert found == {"all": figures, "gather": figures}
    assert modules["overlap"].hidden([event("aten::mm", 0, 1, "cpu_op")]) == {}
