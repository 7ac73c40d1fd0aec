"""Timelines of a pipeline as a PNG, in the geometry and the light colours of the SVG."""

import io
from collections.abc import Sequence
from functools import cache

from PIL import Image, ImageDraw, ImageFont

from zeroshard.report.timeline_figure import INK, PAGE, QUIET, TRACK, Labels, lay_out
from zeroshard.schedule.simulate import Timeline

SCALE = 2  # pixels of the image per pixel of the layout
FINER = 3  # columns per pixel in which boxes are drawn before they are blended, since some are thinner than a pixel
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}

_PLAIN = {0xB5: "u", 0x2013: "-", 0x2212: "-", 0xD7: "x"}  # characters that Pillow's own font lacks


def timeline_png(timelines: Sequence[Timeline], title: str = "") -> bytes:
    """The timelines as a PNG file."""
    picture = lay_out(timelines, title)
    width, height = round(picture.width * SCALE), round(picture.height * SCALE)
    wide = Image.new("RGB", (width * FINER, height), PAGE[0])
    rectangle = ImageDraw.Draw(wide).rectangle
    across = SCALE * FINER

    def fill(x: float, y: float, w: float, h: float, colour: str) -> None:
        left, right = round(x * across), round((x + w) * across)
        rectangle((left, round(y * SCALE), max(left, right - 1), round((y + h) * SCALE) - 1), colour)

    for track in picture.tracks:
        fill(*track, TRACK[0])
    for (paint, high), places in picture.boxes.items():
        colour = paint.fill(dark=False)
        for x, y, w in places:
            fill(x, y - high / 2, w, high, colour)
    for x, y, w, h, swatch in picture.swatches:
        fill(x, y, w, h, TRACK[0] if swatch is None else swatch.fill(dark=False))
    image = wide.reduce((FINER, 1))
    draw = ImageDraw.Draw(image)
    for line in picture.lines:
        draw.line([round(at * SCALE) for at in line], QUIET[0], SCALE)
    for label in picture.labels:
        _write(draw, label)
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=4)
    return file.getvalue()


def _write(draw: ImageDraw.ImageDraw, label: Labels) -> None:
    if isinstance(label.style, str):
        colour = QUIET[0] if label.style == "quiet" else INK[0]
    else:
        colour = label.style.ink(dark=False)
    at, anchor = (label.x * SCALE, label.y * SCALE), _ANCHORS[label.anchor]
    bold = 0.4 if label.style in ("title", "name") else 0  # Pillow's own font has one weight
    draw.text(at, label.text.translate(_PLAIN), colour, _font(label.size), anchor, stroke_width=bold)


@cache
def _font(size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size * SCALE)
