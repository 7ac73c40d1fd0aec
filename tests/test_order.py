"""The suite's own order of files."""

from pathlib import Path
from types import SimpleNamespace

from order import LONGEST, place_of

TESTS = Path(__file__).parent


def test_the_longest_files_exist_and_come_first() -> None:
    assert all((TESTS / name).is_file() for name in LONGEST) and len(set(LONGEST)) == len(LONGEST)
    items = [SimpleNamespace(path=TESTS / name) for name in ("test_a.py", LONGEST[1], "test_b.py", LONGEST[0])]
    items.sort(key=place_of(TESTS))
    assert [item.path for item in items] == [TESTS / name for name in (*LONGEST[:2], "test_a.py", "test_b.py")]
