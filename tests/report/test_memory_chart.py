import pytest

from zeroshard.report.chart import Chart, Trace
from zeroshard.report.memory_chart import memory_chart, phases_chart, ranks_chart
from zeroshard.report.run_records import MemoryEvent, MemoryStep

MIB = 2**20


def _step(
    sizes: list[tuple[float, float, float]], places: tuple[tuple[str, str], ...] = (), rank: int = 0
) -> MemoryStep:
    events = [
        MemoryEvent(i / 1000, f"event {i}", nbytes, *(reversed(places[i]) if places else ("", "")))
        for i, nbytes in enumerate(sizes)
    ]
    return MemoryStep(rank, ("parameters", "gradients", "activations"), tuple(events))


def _named(chart: Chart, name: str) -> Trace:
    (found,) = [trace for trace in chart.traces if trace["name"] == name]
    return found


def test_categories_stack_to_the_total_in_units_of_the_peak() -> None:
    chart = memory_chart(_step([(50 * MIB, 20 * MIB, 30 * MIB), (50 * MIB, 0, 0)]))
    stacked = [trace for trace in chart.traces if trace.get("stackgroup")]
    assert [(trace["name"], trace["y"]) for trace in stacked] == [
        ("parameters", [50, 50, 50]), ("gradients", [20, 0, 0]), ("activations", [30, 0, 0]),
    ]  # fmt: skip
    assert _named(chart, "total")["y"] == [100, 50, 50]  # the last height holds to the end of the axis
    assert chart.layout["yaxis"]["title"]["text"] == "MiB on this rank"
    assert len({trace["fillcolor"] for trace in stacked}) == 3


def test_the_peak_is_marked_and_named() -> None:
    chart = memory_chart(_step([(MIB, 0, 0), (MIB, 2 * MIB, 3 * MIB), (MIB, 0, 0)]))
    assert "peak 6.00 MiB at 1.00 ms (event 1)" in chart.caption
    peak = _named(chart, "peak")
    assert (peak["x"], peak["y"], peak["text"]) == ([1], [6], ["6.00 MiB, event 1"])


def test_the_readings_name_the_event_and_its_change() -> None:
    chart = memory_chart(_step([(MIB, 0, 0), (MIB, 2 * MIB, 0), (MIB, 0, 0)]))
    assert _named(chart, "total")["text"] == ["event 0 (0 B)", "event 1 (+2.00 MiB)", "event 2 (−2.00 MiB)", ""]


def test_budget_and_capacity_are_lines_and_far_ones_hidden() -> None:
    chart = memory_chart(_step([(MIB, 0, 0), (MIB, 3 * MIB, 0)]), budget=6 * MIB, capacity=1024 * MIB)
    budget, capacity = (_named(chart, name) for name in ("budget, 6.00 MiB", "capacity of the device, 1.00 GiB"))
    assert (budget["y"], budget["visible"], capacity["visible"]) == ([6, 6], True, "legendonly")
    assert not [trace for trace in memory_chart(_step([(MIB, 0, 0)])).traces if "budget" in trace["name"]]


def test_layers_are_bars_below_the_curve_in_a_row_for_each_phase() -> None:
    places = (("", ""), ("forward", "h.0"), ("forward", "h.0"), ("forward", "h.1"), ("backward", "h.1"), ("", ""))
    chart = memory_chart(_step([(MIB, 0, n * MIB) for n in (0, 1, 2, 3, 2, 0)], places))
    forward, backward = (_named(chart, phase) for phase in ("forward", "backward"))
    assert (forward["text"], forward["base"], forward["x"]) == (["h.0", "h.1"], [1, 3], [2, 1])
    assert (backward["text"], backward["base"], backward["x"]) == (["h.1"], [4], [1])
    assert "forward h.1: event 3" in chart.caption and chart.layout["xaxis"]["anchor"] == "y2"
    assert "strip" not in memory_chart(_step([(MIB, 0, 0)])).caption


def test_a_thousand_events_keep_the_peak() -> None:
    chart = memory_chart(_step([(MIB, 0, (99 if n == 777 else n % 7) * MIB) for n in range(5000)]))
    total = _named(chart, "total")
    assert max(total["y"]) == 100 and len(total["y"]) <= 4 * 250 + 1


def test_all_ranks_are_lines_over_the_same_step() -> None:
    chart = ranks_chart([_step([(MIB, 0, 0), (2 * MIB, 0, 0)]), _step([(4 * MIB, 0, 0), (MIB, 0, 0)], rank=3)])
    assert chart is not None and [trace["name"] for trace in chart.traces] == ["rank 0", "rank 3"]
    assert "the highest peak is 4.00 MiB, on rank 3, the lowest 2.00 MiB" in chart.caption
    assert ranks_chart([_step([(MIB, 0, 0)])]) is None


def test_phases_are_stacked_bars() -> None:
    phases = {"forward": {"parameters": MIB, "activations": 2 * MIB}, "update": {"parameters": MIB}}
    chart = phases_chart(phases, ["parameters", "activations"])
    assert [(trace["x"], trace["y"]) for trace in chart.traces] == [
        (["forward", "update"], [1, 1]), (["forward", "update"], [2, 0]),
    ]  # fmt: skip
    assert chart.layout["barmode"] == "stack"


@pytest.mark.parametrize("sizes", [[(0, 0, 0)], [(0.0, 0.0, 0.0), (5.0, 0.0, 0.0)]])
def test_one_event_and_bytes_below_a_unit_are_drawn(sizes: list[tuple[float, float, float]]) -> None:
    chart = memory_chart(_step(sizes))
    assert chart.layout["yaxis"]["title"]["text"] == "B on this rank" and _named(chart, "peak")["x"]
