"""Words of pages and messages: no phrase that puzzles readers, and no claim that something never ran once it has."""

import dataclasses
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from test_docs import PAGES, RESULTS, ROOT, each_page, prose

import zeroshard as zs

PUZZLES = (
    "plan that is chosen",
    "usually that is no moment",
    "tokens are what is scarce",
    "lie one behind the other",
    "mend that",
    "which stands for other things",
    "has come to exist meanwhile",
    "a rank or an expert without tokens stops nothing",
    "name one that can.",
    "name a file that can.",
    "let it be alike",
    "host/owner",
)
COMPARED = re.compile(r"\b(?:small|large|slow|fast|time|speed|ratio)\b[^.|]{0,40}\bbeside\b")
SOURCES = [*sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "src").rglob("*.j2"))]


BETWEEN_STRINGS = re.compile(r"""["']\s*\n\s*[rf]*["']""")  # of a text that is written in several lines


@cache
def words_of(path: Path) -> str:
    """The text of a file in small letters, with strings of several lines and spaces put together."""
    return " ".join(BETWEEN_STRINGS.sub("", path.read_text()).split()).lower()


@pytest.mark.parametrize("phrase", PUZZLES)
def test_no_page_and_no_message_has_a_phrase_that_puzzles(phrase: str) -> None:
    for path in (*PAGES, *SOURCES):
        assert phrase not in words_of(path), f"{path.relative_to(ROOT)} has {phrase!r}"


@each_page
def test_measures_are_compared_with_others_and_not_beside_them(page: Path) -> None:
    found = COMPARED.search(" ".join(prose(page).split()))
    assert not found, f"{page.name}: {found and found[0]!r}; write 'compared with'"


def results(*globs: str) -> Callable[[], list[str]]:
    """A function that lists the files of results that would end a claim."""
    return lambda: [path.name for glob in globs for path in RESULTS.glob(glob)]


def in_tests(word: str) -> Callable[[], list[str]]:
    """A function that lists the tests that have a word."""
    return lambda: [
        path.name
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if path.name != Path(__file__).name and word in path.read_text()
    ]


CLAIMS: dict[str, Callable[[], list[str]]] = {  # what would end each claim; nothing, as long as it holds
    "nccl": results("gpus-*", "*nccl*"),  # several GPUs have never run
    "cards": results("cards-*"),  # models of 8 billion parameters and more were not trained on cards of a page
    "gpu-doctor": results("doctor-gpu*", "gpus-*"),
    "gpu-supervisor": results("supervisor-gpu*", "gpus-*"),
    "gpu-asynchronous": results("asynchronous-gpu*", "gpus-*"),
    "context": lambda: [field.name for field in dataclasses.fields(zs.Plan) if "context" in field.name],
    "sync-batch-norm": in_tests("SyncBatchNorm("),
}
CLAIMED = re.compile(
    r"\bnever[ *\n]{1,4}run\b|\b(?:have|has) not run on|not tested|not been (?:tested|trained)|\buntested\b|"
    r"not here yet:|None has (?:run|a time)|No model of this size",
    re.IGNORECASE,
)


@each_page
def test_what_is_said_to_have_never_run_is_marked_with_its_claim(page: Path) -> None:
    """`<!-- claim: nccl -->` in the same paragraph, item or row."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*- )|\n(?=\|)", prose(page)):
        if page.name != "CONTRIBUTING.md" and CLAIMED.search(paragraph):
            marks = re.findall(r"<!-- claim: ([\w-]+) -->", paragraph)
            assert marks, f"{page.name}: mark the claim in {paragraph!r}"
            assert set(marks) <= CLAIMS.keys(), f"{page.name} marks {marks}"


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_that_is_marked_still_holds(claim: str) -> None:
    pages = [page.name for page in PAGES if f"<!-- claim: {claim} -->" in page.read_text()]
    assert pages, f"no page claims {claim}: take it off the list"
    assert not CLAIMS[claim](), f"{pages} claim what {CLAIMS[claim]()} ended"
