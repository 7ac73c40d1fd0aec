"""Every page of the documentation in a headless Chromium, narrow and wide, light and dark: whole, legible, quiet."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from browser import SCREENS, started

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
HEAD = "<!DOCTYPE html><meta charset='utf-8'><meta name='color-scheme' content='light dark'>"
GENERATED = {"genindex.html", "py-modindex.html", "search.html"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built documentation."""
    for package in ("sphinx", "furo", "myst_parser", "sphinx_copybutton"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("docs")
    words = ["-q", "-b", "html", "-d", str(folder / "trees"), str(ROOT / "docs"), str(folder / "html")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *words], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


@pytest.mark.whole
def test_every_page_is_whole_and_legible_on_every_screen(built: Path) -> None:
    """No request elsewhere, no error, no cut text, no overlap, contrast of text 4.5 : 1 and of lines 3 : 1."""
    pages = [page for page in sorted(built.rglob("*.html")) if page.name not in GENERATED]
    assert len(pages) > 30
    found: dict[str, list[str]] = {}
    with started() as browser:
        for page in pages:
            browser.show(*SCREENS[0])
            found.setdefault(str(page.relative_to(built)), []).extend(browser.open(page, own=built))
            for width, dark in SCREENS:
                browser.show(width, dark)
                browser.evaluate("new Promise((done) => setTimeout(done, 60))")
                where = f"{page.relative_to(built)}, {width} pixels, {'dark' if dark else 'light'}"
                found.setdefault(where, []).extend(browser.findings())
    assert {where: each for where, each in found.items() if each} == {}


@pytest.mark.whole
@pytest.mark.parametrize("picture", sorted(PICTURES.glob("*.svg")), ids=lambda path: path.stem)
def test_a_picture_is_whole_and_legible(picture: Path, tmp_path: Path) -> None:
    """No text over another, contrast of text 4.5 : 1 and of lines 3 : 1 (rules and frames left out)."""
    page = tmp_path / "picture.html"
    page.write_text(f"{HEAD}<figure class='picture'>{picture.read_text()}</figure>")
    with started() as browser:
        for dark in (False, True):
            browser.show(1280, dark)
            assert (browser.open(page), browser.findings(), dark) == ([], [], dark)
