"""Write `left_out.txt`: slow tests that run no line of the package which those that stay do not run.

    python tests/choose.py [FOLDER]

A test stays that takes less than a second, and so do the fastest of each file and those of `STAYING`. Of the others as
many stay, by a greedy choice of the most lines for the seconds, as leave out no line that the tests run, in whichever
process. Tests that the list has already are not run, and stay in it: with an empty list the choice starts anew. FOLDER
keeps the records of the run, which takes an hour on 2 cores, or two from an empty list; where it has some, of a part of
the tests too, they are read instead.
"""

import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path

import lines_run
from selection import LEFT_OUT, listed

TESTS = Path(__file__).parent
SLOW = 1.0  # seconds from which a test can be left out
# Tests that stay, since they show another thing than that lines run: what is counted from outside, the numbers of
# earlier revisions, and files outside of the package.
STAYING = (
    "tests/promises/",
    "tests/engine/test_golden.py",
    "tests/test_docs",
    "tests/test_english.py",
    "tests/test_house.py",
    "tests/test_wheel.py",
)


@dataclass(frozen=True)
class Run:
    """A test as it ran: its seconds, and the lines of the package, as the bits of a number."""

    seconds: float
    lines: int


def main() -> None:
    """Run the tests, unless there are records, and write the list."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else made)
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.glob("*.times")):
            run(folder)
        runs = read(folder)
    left = slow_without_lines(runs)
    spent, saved = sum(each.seconds for each in runs.values()), sum(runs[name].seconds for name in left)
    LEFT_OUT.write_text("".join(f"{name}\n" for name in sorted(left | listed())))
    print(f"{len(left)} more of {len(runs)} tests are left out: {saved:,.0f} of {spent:,.0f} s")


def run(folder: Path) -> None:
    """Run the tests that are not listed, with records of lines in all processes."""
    start = folder / "start"
    start.mkdir()
    (start / "sitecustomize.py").write_text("import lines_run\n\nlines_run.begin()\n")
    paths = [str(start), str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), lines_run.FOLDER: str(folder)}
    words = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "numbered_tests",
        "--numprocesses=2",
        "--dist=loadfile",
        "--no-loadscope-reorder",
    ]
    subprocess.run([sys.executable, *words], cwd=TESTS.parent, env=environment)


def read(folder: Path) -> dict[str, Run]:
    """The runs of all tests, by their ids."""
    names: dict[tuple[str, int], tuple[float, str]] = {}
    for times in folder.glob("*.times"):
        for text in times.read_text().splitlines():
            number, seconds, name = text.split("\t", 2)
            names[times.stem, int(number)] = float(seconds), name
    bits: dict[tuple[int, int], int] = {}
    lines: defaultdict[tuple[str, int], bytearray] = defaultdict(bytearray)
    for records in folder.glob("*.lines"):
        worker, content = records.stem.rpartition("-")[0], records.read_bytes()
        content = content[: len(content) - len(content) % lines_run.RECORD.size]  # a process may end as it writes
        for number, *place in lines_run.RECORD.iter_unpack(content):
            byte, bit = divmod(bits.setdefault((place[0], place[1]), len(bits)), 8)
            found = lines[worker, number]
            found.extend(bytes(max(0, byte + 1 - len(found))))
            found[byte] |= 1 << bit
    return {name: Run(seconds, int.from_bytes(lines[test], "little")) for test, (seconds, name) in names.items()}


def slow_without_lines(runs: Mapping[str, Run]) -> set[str]:
    """The ids of slow tests that show no line of their own."""
    files: defaultdict[str, list[str]] = defaultdict(list)
    for name in runs:
        files[name.partition("::")[0]].append(name)
    kept = {name for name, each in runs.items() if each.seconds < SLOW or name.startswith(STAYING)}
    kept |= {min(names, key=lambda name: runs[name].seconds) for names in files.values()}
    left = dict(sorted((name, runs[name]) for name in runs.keys() - kept))
    missing = lines_of(left.values()) & ~lines_of(runs[name] for name in kept)
    while missing:
        best = max(left, key=lambda name: (missing & left[name].lines).bit_count() / left[name].seconds)
        missing &= ~left.pop(best).lines
    return set(left)


def lines_of(runs: Iterable[Run]) -> int:
    """The lines that any of them runs."""
    return reduce(or_, (each.lines for each in runs), 0)


if __name__ == "__main__":
    main()
