"""The charting library in reports is the one on record, with its licence, and whole."""

import hashlib
import tomllib
from importlib import resources

from zeroshard.report.page import LIBRARY

FOLDER = resources.files("zeroshard.report").joinpath("vendored")


def test_the_library_is_the_one_on_record() -> None:
    record = tomllib.loads(FOLDER.joinpath("plotly.toml").read_text())
    content = FOLDER.joinpath(record["file"]).read_bytes()
    assert hashlib.sha256(content).hexdigest() == record["sha256"]
    assert f"v{record['version']}".encode() in content[:200]
    assert f"vendored/{record['file']}" == LIBRARY


def test_its_licence_lies_beside_it() -> None:
    text = FOLDER.joinpath("plotly.LICENSE.txt").read_text()
    assert text.startswith("MIT License") and "Plotly" in text


def test_it_can_stand_inside_of_a_page() -> None:
    """A script inside of HTML must not hold the marks that end or nest scripts."""
    content = FOLDER.joinpath("plotly-basic.min.js").read_text(encoding="utf-8").lower()
    assert "</script" not in content and "<!--" not in content
