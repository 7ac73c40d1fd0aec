import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from zeroshard.report.timeline_figure import (
    FILLS,
    LEFT,
    RIGHT,
    WIDEST,
    Paint,
    Picture,
    _luminance,
    lay_out,
    timeline_svg,
)
from zeroshard.schedule.actions import Action, Kind
from zeroshard.schedule.simulate import Timeline

from .timelines import later, timeline

SVG = "{http://www.w3.org/2000/svg}"
ALL = [("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("pipedream", 1), ("2bw", 1)]


def every() -> list[Timeline]:
    return [timeline(name, v=v, steps=3) for name, v in ALL]


def numbers(picture: Picture) -> list[str]:
    return [label.text for label in picture.labels if isinstance(label.style, Paint)]


def kinds(picture: Picture) -> dict[Kind, int]:
    counts: dict[Kind, int] = {}
    for (paint, _), places in picture.boxes.items():
        counts[paint.kind] = counts.get(paint.kind, 0) + len(places)
    return counts


def test_one_box_per_compute_where_and_as_long_as_it_runs() -> None:
    drawn = timeline("1f1b")
    picture = lay_out([drawn])
    assert kinds(picture) == {Kind.FORWARD: 32, Kind.BACKWARD: 32}
    pixel = 33e-3 / (picture.width - LEFT - RIGHT)
    for rank, track in enumerate(picture.tracks):
        middle = track[1] + track[3] / 2
        places = sorted((x, wide) for at in picture.boxes.values() for x, y, wide in at if y == middle)
        assert len(places) == 16
        for (x, wide), (_, start, end) in zip(places, drawn.spans[rank], strict=True):
            # neighbours are a pixel apart
            assert x == pytest.approx(LEFT + start / pixel, abs=0.51)
            assert x + wide == pytest.approx(LEFT + end / pixel, abs=0.51)
            assert wide < (end - start) / pixel
        assert track[0] == LEFT
        assert track[2] == pytest.approx(33e-3 / pixel)


def test_rows_of_all_ranks_stand_below_each_other_and_inside_the_picture() -> None:
    picture = lay_out(every(), "All")
    assert len(picture.tracks) == 7 * 4
    assert all(above[1] + above[3] < below[1] for above, below in pairwise(picture.tracks))
    assert all(0 <= label.x <= picture.width and 0 < label.y < picture.height for label in picture.labels)
    assert all(y + high < picture.height for _, y, _, high in picture.tracks)


def test_every_box_has_its_microbatch_where_it_fits() -> None:
    assert sorted(numbers(lay_out([timeline("1f1b")]))) == sorted(str(j) for j in range(8) for _ in range(2 * 4))
    assert numbers(lay_out([timeline("1f1b", d=8, m=100)])) == []
    # backwards are twice as wide
    some = lay_out([timeline("1f1b", d=2, m=70)])
    assert set(numbers(some)) == {str(j) for j in range(70)}
    assert {label.style.kind for label in some.labels if isinstance(label.style, Paint) and len(label.text) == 2} == {
        Kind.BACKWARD
    }


def test_versions_of_weights_are_written_where_there_are_several() -> None:
    drawn = timeline("pipedream", steps=2)
    written = numbers(lay_out([drawn]))
    assert written.count("v3") == sum(action.version == 3 for row in drawn.spans for action, _, _ in row) > 0
    assert not any(word.startswith("v") for word in numbers(lay_out([timeline("1f1b")])))


def test_numbers_are_written_in_all_boxes_that_hold_the_longest_one() -> None:
    row = [
        (Action.parse("F0.9@0"), 0.0, 1.0),
        (Action.parse("F0.10@0"), 1.0, 2.0),
        (Action.parse("B0.9@0"), 2.0, 10.0),
        (Action.parse("UPDATE0@0"), 10.0, 120.0),
    ]
    assert numbers(lay_out([Timeline("x", [row])])) == ["9", "10", "9"]
    assert numbers(lay_out([Timeline("x", [[*row, (Action.parse("F0.100@0"), 120.0, 200.0)]])])) == ["9", "100"]


def test_chunks_of_a_rank_have_shades_of_their_own() -> None:
    paints = {paint for paint, _ in lay_out([timeline("interleaved", v=3)]).boxes}
    assert {(paint.chunk, paint.chunks) for paint in paints} == {(0, 3), (1, 3), (2, 3)}
    assert len({paint.fill(dark=False) for paint in paints}) == 6


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("kind", FILLS)
def test_numbers_can_be_read_on_every_shade(kind: Kind, dark: bool) -> None:
    for chunk in range(4):
        paint = Paint(kind, chunk, 4)
        low, high = sorted((_luminance(paint.fill(dark)), _luminance(paint.ink(dark))))
        assert (high + 0.05) / (low + 0.05) >= 4.5  # WCAG 2, level AA


def test_timelines_share_one_axis() -> None:
    both = lay_out([timeline("naive"), timeline("1f1b")])
    assert both.tracks[0][2] / both.tracks[-1][2] == pytest.approx(96 / 33)
    ticks = [float(label.text) for label in both.labels if label.style == "quiet" and label.anchor == "middle"]
    assert ticks == [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]


def test_measured_times_are_drawn_from_their_own_start() -> None:
    drawn = timeline("1f1b")
    here, there = lay_out([drawn]), lay_out([later(drawn, 1024.0)])
    assert numbers(here) == numbers(there)
    for key, places in here.boxes.items():
        for place, other in zip(places, there.boxes[key], strict=True):
            assert place == pytest.approx(other, abs=1e-3)


def test_what_takes_no_time_and_what_is_no_compute_is_left_out() -> None:
    texts = [("F0.0@0", 0, 1), ("SEND_F0.0@0>1", 1, 2), ("B0.0@0", 2, 2), ("UPDATE0@0", 2, 3), ("REDUCE0.0@0", 3, 4)]
    row = [(Action.parse(text), float(start), float(end)) for text, start, end in texts]
    assert kinds(lay_out([Timeline("x", [row])])) == {Kind.FORWARD: 1, Kind.UPDATE: 1, Kind.REDUCE: 1}


def test_the_legend_names_what_is_there_and_nothing_else() -> None:
    labels = [label.text for label in lay_out([timeline("zb-h1")]).labels]
    assert labels[-5:] == [
        *("forward", "backward: input gradient", "backward: weight gradient", "idle", "number: microbatch")
    ]
    labels = [label.text for label in lay_out([timeline("interleaved", v=2)]).labels]
    assert labels[-4:] == ["forward", "backward", "idle", "number: microbatch; fainter: later chunk of the rank"]


def test_units_fit_the_times() -> None:
    for seconds, unit in ((1e-5, "\N{MICRO SIGN}s"), (0.5, "ms"), (9.0, "s")):
        row = [(Action(Kind.FORWARD, 0, 0), 0.0, seconds)]
        assert unit in [label.text for label in lay_out([Timeline("x", [row])]).labels]


def test_the_svg_stands_alone_in_light_and_dark() -> None:
    root = ET.fromstring(timeline_svg(every(), "All <schedules>"))
    assert root.tag == f"{SVG}svg"
    assert root.findtext(f"{SVG}title") == "All <schedules>"
    style = root.findtext(f"{SVG}style") or ""
    light, dark = style.split("@media (prefers-color-scheme:dark)")
    used = {name for element in root.iter() for name in (element.get("class") or "").split()}
    coloured = used - {"box", "title", "name", "tip"}
    for theme in (light, dark):
        assert coloured - set(re.findall(r"\.([\w-]+)", theme)) == set()
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", ET.tostring(root, encoding="unicode"))


def test_the_svg_has_the_boxes_of_one_paint_in_one_path() -> None:
    root = ET.fromstring(timeline_svg([timeline("1f1b")]))
    boxes = {path.get("class"): path.get("d", "") for path in root.iter(f"{SVG}path") if "box" in path.get("class", "")}
    assert {name: data.count("M") for name, data in boxes.items()} == {"box f0of1": 32, "box b0of1": 32}
    tips = [path.findtext(f"{SVG}title") for path in root.iter(f"{SVG}path") if path.get("class") == "tip"]
    assert tips[0] == "F0.0@0: forward, 0 to 1 ms"
    assert len(tips) == 64


def test_a_large_picture_is_small_enough_to_show() -> None:
    picture = timeline_svg([timeline("1f1b", d=16, m=256)])
    root = ET.fromstring(picture)
    assert len(picture) < 25 * 2 * 16 * 256
    assert root.get("width") == f"{WIDEST:g}"
    assert float(root.get("height", "inf")) < 1000
    assert not any(path.get("class") == "tip" for path in root.iter(f"{SVG}path"))


@pytest.mark.parametrize("spans", [[], [[]], [[], []]])
def test_nothing_can_be_drawn(spans: list[list[tuple[Action, float, float]]]) -> None:
    root = ET.fromstring(timeline_svg([Timeline("nothing", spans)]))
    assert "nothing" in [text.text for text in root.iter(f"{SVG}text")]
