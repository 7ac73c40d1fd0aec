"""The whole list of faults, at full counts: `make soak`, or

    python benchmarks/soak.py [--quick] [--only F1,F8] [--json FILE] [--folder DIR] [--keep]

Each fault is a function below benchmarks/soak/ that makes it, and asserts the outcome: every loss line bit for bit
that of an undisturbed run, no committed checkpoint unreadable, the culprit named, all ranks gone in time. The table of
results is printed, and stored under benchmarks/results/ as JSON and Markdown.

- F1 kills ranks: three times under each plan of tests/resilience/plans_job.py, which have every pair of values of zero,
      offload, schedule, transport and precision, at other moments in each round, and the main job from outside; with
  `--kills 500` at least so many kills, without the main job. F13 kills the supervisor, F15 a rank that reads a
  checkpoint, F17 counts samples meanwhile, F20 does everything for 2,000 steps.
- F8 to F12 and F19 stop ranks, hang them, slow them down, give them NaN, ask them to stop, flip a bit. F9b are those
  that raise, leave and differ.
- F16 cuts the link between two network namespaces. It needs root, and is left out without.
- F21 damages and forges checkpoints, 1,000 or as many as `--forged` says, and counts those that load unnoticed.
- F22 makes ranks differ in 50 fields at random, F23 cuts a link that comes back in time, F24 resumes one run twice at
  once, F25 runs scripts without a guard whose data loaders have processes. F23 needs root, as F16.
- F2 to F7, F14 and F18 are tests of the suite, with more cases.

Seconds depend on the machine; limits on time (15 s, or the timeout and 2 s after a hang) are asserted, so leave the
machine alone meanwhile. The exit status is 1 if any fault was not survived.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ranks import circumstances
from soak import boundaries, forge, hangs, kills, nodes, suites
from soak.job import Unable

RESULTS = Path(__file__).parent / "results"
ALL = {**kills.FAULTS, **hangs.FAULTS, **nodes.FAULTS, **suites.FAULTS, **forge.FAULTS, **boundaries.FAULTS}
FAULTS = {name: ALL[name] for name in sorted(ALL, key=lambda name: (int(name.strip("Fb")), name))}


def what(name: str) -> str:
    """One line on a fault."""
    if name in suites.SUITES:
        file, _, words = suites.SUITES[name]
        return f"{words} (tests/{file})"
    return (FAULTS[name].__doc__ or "").partition(": ")[2].rstrip(".")


def run(name: str, fault: Callable[[Path, bool], dict[str, Any]], folder: Path, quick: bool) -> dict[str, Any]:
    """Make one fault; its row of the table."""
    began = time.monotonic()
    row: dict[str, Any] = {"fault": name, "what": what(name), "result": "pass", "counts": {}}
    folder.mkdir()
    try:
        row["counts"] = fault(folder, quick)
    except Unable as reason:
        row |= {"result": "left out", "why": str(reason)}
    except Exception as error:
        row |= {"result": "FAIL", "why": "".join(traceback.format_exception(error))}
    row["seconds"] = round(time.monotonic() - began, 1)
    return row


def counted(row: dict[str, Any]) -> str:
    """The counts of a fault as text."""
    counts: dict[str, Any] = row["counts"]
    return ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in counts.items())


def shown(row: dict[str, Any]) -> str:
    """A row as text."""
    text = f"{row['fault']:4} {row['result']:8} {row['seconds']:7.1f} s  {row['what']}; {counted(row)}"
    return text if row["result"] == "pass" else f"{text}\n{row['why']}"


def markdown(kept: dict[str, Any]) -> str:
    """The table that is kept."""
    size = "quick" if kept["quick"] else "full"
    lines = [f"# Soak, {kept['date']}, {size}", ""]
    lines += [f"{kept['cpu']}, {kept['cores']} cores, load {kept['load']:.1f} before; {kept['versions']}.", ""]
    lines += ["| Fault | Result | Seconds | What | Counts |", "|---|---|---|---|---|"]
    for row in kept["rows"]:
        said = counted(row) or "".join(row.get("why", "").strip().splitlines()[-1:])
        lines.append(f"| {row['fault']} | {row['result']} | {row['seconds']:.0f} | {row['what']} | {said} |")
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="one small case of each; no table is kept unless asked for"
    )
    parser.add_argument("--only", help=f"some of {','.join(FAULTS)}")
    parser.add_argument("--kills", type=int, help="at least so many of F1, over every pair of values in a plan")
    parser.add_argument("--forged", type=int, help=f"checkpoints of F21; by default {forge.COUNT}, or {forge.QUICK}")
    parser.add_argument("--json", help="file for the table; by default benchmarks/results/soak-DATE.json and .md")
    parser.add_argument("--folder", help="where the jobs run; by default the folder of temporary files")
    parser.add_argument("--keep", action="store_true", help="leave the jobs' folders, also of what passed")
    options = parser.parse_args()
    options.names = options.only.split(",") if options.only else list(FAULTS)
    unknown = set(options.names) - FAULTS.keys()
    if unknown:
        parser.error(f"there is no fault {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    return options


def main() -> int:
    """Make the faults one after the other, print, and keep the table."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the jobs are ended too
    kept = {**circumstances(), "quick": options.quick, "rows": []}
    base = Path(tempfile.mkdtemp(prefix="zeroshard-soak-", dir=options.folder))
    made = {"F1": partial(kills.killed_ranks, kills=options.kills), "F21": partial(forge.forged, count=options.forged)}
    for name in options.names:
        row = run(name, made.get(name, FAULTS[name]), base / name, options.quick)
        kept["rows"].append(row)
        print(shown(row), flush=True)
        if row["result"] != "FAIL" and not options.keep:
            shutil.rmtree(base / name, ignore_errors=True)
    kept["load_at_end"] = os.getloadavg()[0]
    path = Path(options.json) if options.json else RESULTS / f"soak-{kept['date']}.json"
    if options.json or not options.quick:
        path.write_text(json.dumps(kept, indent=1) + "\n")
        path.with_suffix(".md").write_text(markdown(kept))
    failed = [row["fault"] for row in kept["rows"] if row["result"] == "FAIL"]
    print(f"failed: {', '.join(failed)}; see {base}" if failed else "all faults were survived")
    if not failed and not options.keep:
        shutil.rmtree(base, ignore_errors=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
