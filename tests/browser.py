"""Headless Chromium for tests of pages, driven over its DevTools pipe: sizes, colour schemes, findings, screenshots.

The pipe (`--remote-debugging-pipe`) needs no port and no package: messages are JSON, ended by a zero byte, read by the
browser from file 3 and written to file 4. A test is skipped without a Chromium; the variable `ZEROSHARD_CHROMIUM` names
one that is not on the path.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SWITCHES = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions", "--mute-audio"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb", "--remote-debugging-pipe"),
)
PROBE = Path(__file__).with_name("browser_probe.js")
SCREENS = [(width, dark) for width in (1280, 400) for dark in (False, True)]  # on which pages are looked at
DEADLINE = 60.0  # seconds for one answer


def chromium() -> str | None:
    """The path of a Chromium, or None."""
    found = (shutil.which(name) for name in (os.environ.get("ZEROSHARD_CHROMIUM", ""), *NAMES) if name)
    return next((path for path in found if path), None)


class Browser:
    """One page of a headless browser."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._buffer, self._number = write, read, b"", 0
        self._events: list[dict[str, Any]] = []
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol; raises RuntimeError when the browser refuses it."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def show(self, width: int, dark: bool, height: int = 900) -> None:
        """Set the size of the window and the colour scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, page: Path, own: Path | None = None) -> list[str]:
        """Load a page, scroll through it so that everything is drawn; returns its requests and its errors.

        Args:
            own: the page, or a folder, whose files are no requests; by default the page.
        """
        self._events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        self._wait_for("Page.loadEventFired")
        self.settle()
        return self.complaints(own or page)

    def settle(self) -> None:
        """Scroll through the page and wait until it is drawn."""
        self.evaluate(
            """(async () => {
              const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 30)));
              for (let y = 0; y < document.documentElement.scrollHeight; y += innerHeight) {
                scrollTo(0, y);
                await frame();
              }
              scrollTo(0, 0);
              await frame();
              await frame();
            })()"""
        )

    def evaluate(self, expression: str) -> Any:
        """The value of an expression or of its promise; raises RuntimeError for an exception."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def findings(self) -> list[str]:
        """Cut and overlapping texts, texts and lines without contrast, and a page that is wider than the window."""
        found: list[str] = self.evaluate(PROBE.read_text())
        return found

    def complaints(self, own: Path) -> list[str]:
        """Requests beside those for `own`, exceptions, and errors on the console since the page was loaded."""
        found, mine = [], own.resolve().as_uri() + "/" * own.is_dir()
        for event in self._events:
            method, parameters = event.get("method"), event.get("params", {})
            if method == "Network.requestWillBeSent":
                url = parameters["request"]["url"]
                if not url.startswith((mine, "data:", "blob:")):
                    found.append(f"request: {url}")
            elif method == "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                found.append(f"exception: {details.get('exception', {}).get('description', details['text'])}")
            elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
                found.append(f"console: {parameters['entry']['text']}")
            elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
                found.append(f"console: {[one.get('value', one.get('description')) for one in parameters['args']]}")
        return found

    def screenshot(self, path: Path, whole: bool = True) -> None:
        """Write the page, or the part in view, as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"clip": {**size, "scale": 1}, "captureBeyondViewport": True} if whole else {}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **clip)["data"]))

    def _wait_for(self, method: str) -> None:
        while not any(event.get("method") == method for event in self._events):
            self._events.append(self._next())

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE
        while b"\0" not in self._buffer:
            ready = select.poll()  # `select.select` takes no file with a number above 1023
            ready.register(self._read, select.POLLIN)
            if not ready.poll(1000 * max(0.0, deadline - time.monotonic())):
                raise RuntimeError(f"the browser did not answer within {DEADLINE:.0f} s")
            received = os.read(self._read, 1 << 20)
            if not received:
                raise RuntimeError("the browser has ended")
            self._buffer += received
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


@contextmanager
def started() -> Iterator[Browser]:
    """A browser for as long as the context runs; the test is skipped where there is none."""
    path = chromium()
    if path is None:
        pytest.skip("no Chromium on the path, and none named by ZEROSHARD_CHROMIUM")
    to_browser, from_browser = os.pipe(), os.pipe()
    profile = tempfile.mkdtemp(prefix="zeroshard-chromium-")
    # a shell puts the two files under their numbers, 3 and 4
    read_fd, write_fd = to_browser[0], from_browser[1]
    script = f'exec "$@" 3<&{read_fd} 4>&{write_fd}'
    words = ["bash", "-c", script, "chromium", path, *SWITCHES, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        words, pass_fds=(read_fd, write_fd), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(read_fd)
    os.close(write_fd)
    try:
        yield Browser(to_browser[1], from_browser[0])
    finally:
        os.close(to_browser[1])  # the browser ends with its pipe
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(from_browser[0])
        shutil.rmtree(profile, ignore_errors=True)
