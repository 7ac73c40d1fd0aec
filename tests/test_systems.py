"""The page of systems: 42 rows, whose files, tests, pages and notes exist, and whose notes stand in the code once."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "zeroshard"
PAGE = (ROOT / "docs" / "systems.md").read_text()
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if re.match(r"\| [A-E]\d+ ", line)]
COUNTS = {"A": 7, "B": 10, "C": 4, "D": 6, "E": 15}


def test_the_page_has_every_system_once() -> None:
    wanted = [f"{letter}{number}" for letter, count in COUNTS.items() for number in range(1, count + 1)]
    assert [row[0].partition(" ")[0] for row in ROWS] == wanted


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].partition(" ")[0])
def test_a_row_leads_to_files_and_notes(row: list[str]) -> None:
    source, test, page = ([quoted.strip("`") for quoted in re.findall(r"`[^`]+`", cell)] for cell in row[1:4])
    assert (SOURCE / source[0]).is_file()
    assert (ROOT / test[0]).is_file() and "def test_" in (ROOT / test[0]).read_text()
    assert (ROOT / page[0]).is_file()
    for note in source[1:]:
        assert f"{note} " in (SOURCE / source[0]).read_text(), note


def test_a_spread_system_has_one_note() -> None:
    texts = [path.read_text() for path in SOURCE.rglob("*.py")]
    for note in re.findall(r"\[Note: [^\]]+\]", PAGE):
        begins = sum(len(re.findall(rf"^ *{re.escape(note)} [A-Z]", text, re.MULTILINE)) for text in texts)
        assert begins == 1, note
