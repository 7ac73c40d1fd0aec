"""Timelines for the tests of their drawings."""

from zeroshard.schedule.actions import Schedule
from zeroshard.schedule.layout import Layout
from zeroshard.schedule.pipeline import PipelineSchedule
from zeroshard.schedule.simulate import Costs, Timeline, simulate


def lists(name: str, d: int = 4, m: int = 8, v: int = 1, steps: int = 1) -> list[Schedule]:
    return PipelineSchedule(name, Layout.equal(d, v), m).stretch(steps)


def timeline(name: str, d: int = 4, m: int = 8, v: int = 1, steps: int = 1) -> Timeline:
    """Forward 1 ms, backward 2 ms."""
    layout = Layout.equal(d, v)
    simulation = simulate(lists(name, d, m, v, steps), layout, Costs.uniform(layout, 1e-3, 2e-3))
    return Timeline(name, simulation.spans, ("a note",))


def later(timeline: Timeline, seconds: float) -> Timeline:
    """The same, on a clock that started earlier."""
    spans = [[(action, start + seconds, end + seconds) for action, start, end in row] for row in timeline.spans]
    return Timeline(timeline.name, spans, timeline.notes)
