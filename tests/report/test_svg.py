import re
import xml.etree.ElementTree as ET

from zeroshard.report.scales import covering_axis, fitted_axis
from zeroshard.report.svg import NARROW, WIDE, Canvas, band_path, crosses_path, dots_path, line_path


def _numbers(words: str) -> list[float]:
    return [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", words)]


def test_a_canvas_is_an_image_with_an_escaped_title() -> None:
    canvas = Canvas(WIDE, "a < b & c")
    canvas.text((1, 2), "<script>", "tick")
    markup = str(canvas.to_markup())
    root = ET.fromstring(markup)
    assert root.get("role") == "img"
    assert root[0].tag == "title"
    assert root[0].text == "a < b & c"
    assert "<script>" not in markup


def test_axes_label_every_tick_inside_the_drawing() -> None:
    x, y = fitted_axis("step", 1, 600, NARROW.x_ticks), covering_axis("loss", 2, 8)
    canvas = Canvas(NARROW, "axes")
    canvas.axes(x, y)
    texts = {text.text: text for text in canvas.root.iter("text")}
    assert {label for _, label in (*x.ticks, *y.ticks)} | {"step", "loss"} == set(texts)
    assert all(0 <= float(text.get("x", "-1")) <= NARROW.width for text in texts.values())
    assert all(0 <= float(text.get("y", "-1")) <= NARROW.height for text in texts.values())


def test_lines_and_dots() -> None:
    assert line_path([(0, 1), (2.04, 3.06)]) == "M0 1L2 3.1"
    assert line_path([(4, 5)]) == dots_path([(4, 5)]) == "M4 5h0"
    assert line_path([]) == ""
    assert crosses_path([(10, 10)]) == "M7 7l6 6m-6 0l6 -6"


def test_a_band_encloses_the_area_between_its_edges() -> None:
    # 10 wide and 4 high, then 20 wide and 7 high
    path = band_path([0, 10, 30], lower=[100, 90], upper=[96, 83])
    x, y = _numbers(path.split("V")[0])
    area = 0.0
    for command, value in re.findall(r"([VH])([\d.]+)", path):
        if command == "V":
            y = float(value)
        else:
            area += (float(value) - x) * -y
            x = float(value)
    assert area == 10 * 4 + 20 * 7
