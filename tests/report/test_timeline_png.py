import io

import pytest
from PIL import Image

from zeroshard.report.timeline_figure import PAGE, TRACK, lay_out
from zeroshard.report.timeline_png import SCALE, timeline_png
from zeroshard.schedule.actions import Action, Kind
from zeroshard.schedule.simulate import Timeline

from .timelines import timeline


def colour_at(image: Image.Image, x: float, y: float) -> str:
    pixel = image.getpixel((round(x * SCALE), round(y * SCALE)))
    assert isinstance(pixel, tuple)
    return "#" + "".join(f"{round(part):02x}" for part in pixel)


@pytest.mark.parametrize("name, v", [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)])
def test_the_png_shows_what_was_laid_out(name: str, v: int) -> None:
    timelines = [timeline(name, v=v)]
    picture = lay_out(timelines)
    image = Image.open(io.BytesIO(timeline_png(timelines)))
    assert image.format == "PNG"
    assert image.size == (round(picture.width * SCALE), round(picture.height * SCALE))
    for (paint, height), places in picture.boxes.items():
        for x, y, wide in places:
            for corner in ((x + 1.5, y - height / 2 + 1.5), (x + wide - 1.5, y + height / 2 - 1.5)):
                assert colour_at(image, *corner) == paint.fill(dark=False)
    x, y, wide, height = picture.tracks[-1]
    assert colour_at(image, x + 2, y + height / 2) == TRACK[0]  # the last rank waits for the first forward
    assert colour_at(image, 2, 2) == PAGE[0]


def test_letters_that_the_font_lacks_are_written_otherwise() -> None:
    row = [(Action(Kind.FORWARD, 0, 0), 0.0, 1e-6)]
    plain, other = (timeline_png([Timeline(name, [row])]) for name in ("4 us - x", "4 \N{MICRO SIGN}s \N{EN DASH} ×"))
    assert plain == other
