"""The built pages in a browser, where Sphinx and Chromium are installed: nothing is cut off, or loaded from afar."""

import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LOOK = """<body><script>
const pages = PAGES, width = WIDTH, found = [];
async function look() {
  for (const page of pages) {
    const frame = document.createElement("iframe");
    frame.style.width = width + "px";
    frame.src = page;
    document.body.appendChild(frame);
    await new Promise(done => frame.onload = done);
    const d = frame.contentDocument, wide = selector =>
      [...d.querySelectorAll(selector)].filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent);
    const loaded = frame.contentWindow.performance.getEntriesByType("resource").map(entry => entry.name);
    found.push({page, over: d.documentElement.scrollWidth - width, code: wide("pre"),
      elsewhere: loaded.filter(name => !name.startsWith(location.origin)),
      buttons: d.querySelectorAll("button.copybtn").length, blocks: d.querySelectorAll("div.highlight pre").length});
    frame.remove();
  }
  const answer = document.createElement("pre");
  answer.id = "answer";
  answer.textContent = encodeURIComponent(JSON.stringify(found));
  document.body.appendChild(answer);
}
look();
</script></body>"""
pytestmark = [pytest.mark.whole, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")]


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The built pages, and the address at which they are served."""
    for module in ("sphinx", "myst_parser", "furo", "sphinx_copybutton"):
        pytest.importorskip(module)
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", str(ROOT / "docs"), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def seen(site: tuple[Path, str], width: int) -> list[dict[str, Any]]:
    """What a window of a width shows of each page."""
    folder, address = site
    skipped = ("genindex.html", "search.html", "py-modindex.html", "look.html")
    pages = sorted(str(p.relative_to(folder)) for p in folder.rglob("*.html") if p.name not in skipped)
    (folder / "look.html").write_text(LOOK.replace("PAGES", json.dumps(pages)).replace("WIDTH", str(width)))
    words = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=120000"]
    words += [f"--window-size={width + 100},1000", "--dump-dom", f"{address}/look.html"]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True).stdout
    answer = re.search(r'<pre id="answer">(.*?)</pre>', shown)
    assert answer, "the browser did not come to an end"
    found: list[dict[str, Any]] = json.loads(unquote(answer[1]))
    assert len(found) == len(pages) > 40
    return found


@pytest.mark.parametrize("width", [400, 1280])
def test_pages_fit_a_window(site: tuple[Path, str], width: int) -> None:
    for page in seen(site, width):
        assert page["over"] <= 0, f"{page['page']} is {page['over']} pixels wider than {width}"
        assert not page["elsewhere"], f"{page['page']} loads {page['elsewhere']}"
        assert width < 1280 or not page["code"], f"{page['page']} cuts {page['code']} at {width}"
        assert page["buttons"] == page["blocks"], f"{page['page']} has blocks without a button to copy"
