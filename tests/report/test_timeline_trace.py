import json
from collections import Counter
from typing import Any

import pytest

from zeroshard.report.timeline_trace import timeline_trace
from zeroshard.schedule.actions import Kind
from zeroshard.schedule.simulate import Timeline

from .timelines import later, lists, timeline


def events(*timelines: Timeline) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(timeline_trace(timelines))["traceEvents"]
    return found


def test_a_slice_per_action_in_microseconds() -> None:
    slices = [event for event in events(timeline("pipedream", steps=2)) if event["ph"] == "X"]
    assert len(slices) == 4 * 2 * 16
    assert slices[0] == {
        **{"ph": "X", "pid": 0, "tid": 0, "ts": 0, "dur": 1000, "name": "F0.0@0", "cat": "F"},
        "args": {"chunk": 0, "microbatch": 0, "version": 0},
    }
    for event in slices:
        args = event["args"]
        assert event["name"] == f"{event['cat']}{args['chunk']}.{args['microbatch']}@{args['version']}"
    assert {event["args"]["version"] for event in slices} == set(range(16))


@pytest.mark.parametrize("name, v", [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("naive", 2)])
def test_an_arrow_per_message_from_the_slice_that_makes_it_to_the_one_that_takes_it(name: str, v: int) -> None:
    found = events(timeline(name, v=v))
    arrows: dict[str, dict[str, dict[str, Any]]] = {}
    for event in found:
        if event["ph"] in ("s", "f"):
            arrows.setdefault(event["id"], {})[event["ph"]] = event
    sends = [action for row in lists(name, v=v) for action in row if action.kind.startswith("SEND")]
    assert len(arrows) == len(sends)

    def hit(arrow: dict[str, Any]) -> dict[str, Any]:
        return next(
            event["args"] | {"kind": event["cat"]}
            for event in found
            if event["ph"] == "X" and event["tid"] == arrow["tid"] and 0 <= arrow["ts"] - event["ts"] < event["dur"]
        )

    for arrow in arrows.values():
        assert arrow["s"]["ts"] <= arrow["f"]["ts"] + 1e-3
        made, taken = hit(arrow["s"]), hit(arrow["f"])
        assert made["microbatch"] == taken["microbatch"]
        assert made["kind"] == taken["kind"]
        assert taken["chunk"] - made["chunk"] == (1 if made["kind"] == "F" else -1)
        assert arrow["s"]["name"] == ("output" if made["kind"] == Kind.FORWARD else "gradient")


def test_a_process_per_timeline_and_a_thread_per_rank() -> None:
    names = [event for event in events(timeline("1f1b"), timeline("gpipe", d=2)) if event["ph"] == "M"]
    assert [(event["pid"], event["args"]["name"]) for event in names if event["name"] == "process_name"] == [
        *((0, "1f1b"), (1, "gpipe"))
    ]
    assert Counter(event["pid"] for event in names if event["name"] == "thread_name") == {0: 4, 1: 2}


def test_measured_times_start_at_zero() -> None:
    drawn = timeline("1f1b")
    for event, other in zip(events(drawn), events(later(drawn, 1024.0)), strict=True):
        assert other.get("ts", 0) == pytest.approx(event.get("ts", 0), abs=0.01)
        assert other["ph"] == event["ph"]


def test_names_may_hold_anything() -> None:
    assert events(Timeline('a "quoted" \\ name', []))[0]["args"] == {"name": 'a "quoted" \\ name'}
