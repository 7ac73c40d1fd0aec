"""A stranger's first minutes: from a clone to a report on screen, and from pip to a trained loop by the quickstart.

    python benchmarks/first_minutes.py [--path clone|loop] [--here] [--json FILE]

`clone` makes a clone of this repository, runs `make train` in it (which makes an environment, installs, and trains on
two processes), and opens the report in a Chromium, where there is one. `loop` makes an environment, installs this
repository by `pip install git+...`, runs `zeroshard doctor`, takes `train.py` from `docs/quickstart.md` and starts it
with the page's own command. Every step prints its seconds; each path has a bar of five minutes. The time to download
torch depends on the network: it is part of the step "install". Committed files alone are used.

On a machine with other work the seconds say little: beside each stand the CPU seconds of the step and of all that it
started, which over the number of cores are the least that a quiet machine takes.

`--here` installs nothing and takes few steps, in this interpreter's environment; it tries the script.
"""

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from ranks import circumstances, keep, launched_path

ROOT = Path(__file__).parents[1]
BAR = 300.0  # seconds
POLL = 0.2  # seconds between two readings of CPU time; processes that live shorter are missed
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SECTION = re.compile(r"^## Your own loop\n.*?```python\n(.*?)```\n.*?```sh\n(.*?)\n```", re.MULTILINE | re.DOTALL)


class Steps:
    """Commands that run one after the other, each timed, by the clock and by the CPU time of all its processes."""

    def __init__(self, folder: Path, **variables: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self.folder, self.env = folder, inherited | variables
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}

    def run(self, name: str, words: Sequence[str], folder: Path | None = None) -> str:
        """What a command prints; the script ends with its output where it fails."""
        began, busy = time.perf_counter(), {}
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                words, cwd=folder or self.folder, env=self.env, stdout=output, stderr=subprocess.STDOUT
            )
            tree = psutil.Process(process.pid)
            while process.poll() is None:
                busy |= _cpu_seconds(tree)
                time.sleep(POLL)
            output.seek(0)
            said = output.read()
        self.seconds[name], self.cpu_seconds[name] = time.perf_counter() - began, sum(busy.values())
        spent = f"{self.seconds[name]:8.1f} s {self.cpu_seconds[name]:8.1f} CPU s"
        print(f"{spent}  {name}: {' '.join(map(str, words))}", flush=True)
        if process.returncode:
            sys.exit(f"{name} failed:\n{said[-3000:]}")
        return said


def _cpu_seconds(tree: psutil.Process) -> dict[int, float]:
    """User and system time so far of a process and of all that it started and that still run, by process."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [tree, *tree.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                found[process.pid] = sum(process.cpu_times()[:2])
    return found


def quickstart() -> tuple[str, str]:
    """The script of the section "Your own loop", and the command that starts it."""
    found = SECTION.search((ROOT / "docs" / "quickstart.md").read_text())
    assert found, "docs/quickstart.md has no such section"
    return found[1], found[2]


def clone(folder: Path, here: bool) -> Steps:
    """Clone, train by make, and open the report."""
    if here:
        steps = Steps(folder, PYTHONPATH=launched_path(ROOT / "src"), OMP_NUM_THREADS="1")
        few = "--steps 2 --sequence 16 --batch-per-rank 1 --validation-rows 2 --sample-tokens 0 --no-checkpoint"
        steps.run("train", [sys.executable, "-m", "zeroshard", "train", *few.split()])
        (report,) = folder.glob("runs/*/report.html")
    else:
        steps, copy = Steps(folder), folder / "zeroshard"
        steps.run("clone", ["git", "clone", "--quiet", str(ROOT), str(copy)])
        steps.run("make train: environment and install", ["make", f"PYTHON={sys.executable}", ".venv/.installed"], copy)
        steps.run("make train: train", ["make", f"PYTHON={sys.executable}", "train"], copy)
        (report,) = copy.glob("runs/*/report.html")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser and not here:
        picture = folder / "report.png"
        words = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
        steps.run("open the report", [*words, f"--screenshot={picture}", report.as_uri()])
        assert picture.stat().st_size > 10_000, "the report is empty"
    return steps


def loop(folder: Path, here: bool) -> Steps:
    """Install by pip, check the machine, and train the quickstart's own loop."""
    script, command = quickstart()
    (folder / "train.py").write_text(script)
    if here:
        steps = Steps(folder, PYTHONPATH=launched_path(ROOT / "src"), OMP_NUM_THREADS="1")
        said = steps.run("train.py", [sys.executable, "train.py"])
    else:
        tools = folder / "own" / "bin"
        steps = Steps(folder, PATH=f"{tools}{os.pathsep}{os.environ['PATH']}")
        steps.run("environment", [sys.executable, "-m", "venv", str(tools.parent)])
        constraints = ["--constraint", str(ROOT / "constraints.txt")]
        steps.run("install", [str(tools / "pip"), "install", "--quiet", *constraints, f"git+file://{ROOT}"])
        steps.run("doctor", ["zeroshard", "doctor", "--out", "machine.json"])
        said = steps.run("train.py", command.split())
    assert re.search(r"^step 20: loss \d", said, re.MULTILINE), said
    return steps


PATHS: dict[str, Callable[[Path, bool], Steps]] = {"clone": clone, "loop": loop}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", choices=PATHS, help="only one of the two")
    parser.add_argument("--here", action="store_true", help="install nothing, and take few steps")
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    kept: dict[str, Any] = {**circumstances(), "here": options.here, "paths": {}}
    late = []
    for name in [options.path] if options.path else PATHS:
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            steps = PATHS[name](Path(folder), options.here)
        whole, busy = sum(steps.seconds.values()), sum(steps.cpu_seconds.values())
        print(f"{whole:8.1f} s {busy:8.1f} CPU s, of {BAR:.0f} s", flush=True)
        kept["paths"][name] = {"seconds": steps.seconds, "cpu_seconds": steps.cpu_seconds}
        kept["paths"][name] |= {"whole": whole, "cpu_whole": busy, "bar": BAR}
        late += [name] * (whole > BAR)
    keep(kept, options.json)
    if late:
        sys.exit(f"more than {BAR:.0f} s: {', '.join(late)}")


if __name__ == "__main__":
    main()
