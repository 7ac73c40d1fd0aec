"""A measurement in slices: each a script in a process of its own under a time limit, its result on disk at once.

`all.py` and `several.py` each hold a list of slices and call `main`. A folder keeps for each slice NAME.json (status,
date, versions, card, command, figures, printed lines), and for all of them page.md and all.json, which are written anew
after every slice. A slice that is done on this card is skipped from then on, so a second call goes on where the first
ended; one that failed is tried again after those that were never tried.
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent
sys.path[:0] = [str(BENCHMARKS), str(ROOT / "src")]
from ranks import keep, launch, run_script  # noqa: E402

MOST = 240.0  # seconds of one slice
PART = 75  # exit code of a script that is not done, and goes on when it is started again
SPARE = 5.0  # seconds of a budget that are left for the last page
SHOWN = 80  # lines of a slice's output on the page
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Slice:
    """One part of a measurement.

    Attributes:
        name: on the command line and of its files.
        question: that it answers.
        script: below benchmarks/.
        words: of the script; KEPT is the file for its figures, FOLDER that of all results.
        toy: the words under `--cpu`; None where it cannot run there.
        expected: seconds; with less left of a budget it is not begun.
        limit: seconds after which it is ended.
        cards: GPUs that it needs; 0 where it needs none.
        card_gb: GB that one card must have.
        needs: a package without which it is left out.
        variables: of its environment.
    """

    name: str
    question: str
    script: str
    words: str
    toy: str | None
    expected: float
    limit: float = MOST
    cards: int = 1
    card_gb: float = 0.0
    needs: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def left_out(self, facts: Row, cpu: bool) -> str | None:
        """Why it cannot run on this machine; None if it can."""
        if self.needs is not None and facts["versions"].get(self.needs, "missing") == "missing":
            return f"{self.needs} is missing"
        if cpu:
            return "has no toy size" if self.toy is None else None
        if len(facts["cards"]) < self.cards:
            return f"needs {self.cards} GPUs, and there are {len(facts['cards'])}"
        if self.cards and facts["card_bytes"] < 1e9 * self.card_gb:
            return f"needs a GPU with {self.card_gb:g} GB, and this one has {facts['card_bytes'] / 1e9:.0f}"
        return None


class Folder:
    """The results in a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def record(self, name: str) -> Row | None:
        """The record of a slice; None if it never ran."""
        file = self.path / f"{name}.json"
        found: Row | None = json.loads(file.read_text()) if file.exists() else None
        return found

    def figures(self, name: str) -> Path:
        """The file into which the slice's script writes its figures."""
        return self.path / f"{name}.figures.json"

    def write(self, name: str, record: Row) -> None:
        """Store a record, by one rename."""
        fresh = self.path / f"{name}.fresh"
        keep(record, str(fresh))
        fresh.replace(self.path / f"{name}.json")

    def forget(self, name: str) -> None:
        """Remove a slice's results."""
        for file in (self.path / f"{name}.json", self.figures(name)):
            file.unlink(missing_ok=True)


def card_of(facts: Row) -> str:
    """The cards of a machine as text."""
    cards = facts["cards"]
    return f"{len(cards)} x {cards[0]}" if cards else "CPU"


def run(each: Slice, folder: Folder, facts: Row, options: argparse.Namespace, limit: float) -> Row:
    """Run one slice; its record, which is stored."""
    kept, printed = folder.figures(each.name), folder.path / f"{each.name}.txt"
    text = (each.toy if options.cpu else each.words) or ""
    words = [word.replace("KEPT", str(kept)).replace("FOLDER", str(folder.path)) for word in shlex.split(text)]
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "SLICE_SECONDS": f"{limit:.0f}", **each.variables}
    began = time.monotonic()
    code = run_script(BENCHMARKS / each.script, words, printed, limit, variables)
    status = {None: "timed out", 0: "done", PART: "part"}.get(code, "failed")
    record = {
        "slice": each.name,
        "question": each.question,
        "status": status,
        "exit": code,
        "seconds": round(time.monotonic() - began, 1),
        "limit": limit,
        "when": time.strftime("%Y-%m-%d %H:%M"),
        "card": card_of(facts),
        "command": shlex.join([each.script, *words]),
        "facts": facts,
        "figures": _figures(kept),
        "printed": printed.read_text(errors="replace").splitlines(),
    }
    folder.write(each.name, record)
    printed.unlink()
    return record


def _figures(kept: Path) -> Any:
    """The figures that a script wrote, also one that failed or was ended later."""
    try:
        return json.loads(kept.read_text())
    except (OSError, ValueError):
        return None


def chosen(slices: Sequence[Slice], folder: Folder, facts: Row, options: argparse.Namespace) -> list[Slice]:
    """The slices to run, in order: those without a result on this card, then those that failed."""
    fresh, failed = [], []
    for each in slices:
        if options.slice and each.name not in options.slice:
            continue
        if options.again:
            folder.forget(each.name)
        record = folder.record(each.name)
        if record is None or record["card"] != card_of(facts):
            folder.forget(each.name)
            fresh.append(each)
        elif record["status"] != "done":
            failed.append(each)
    return fresh + failed


def page(title: str, slices: Sequence[Slice], folder: Folder, facts: Row, cpu: bool) -> str:
    """For people: one line per slice, and what each printed."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    lines = [f"# {title}", "", f"{card_of(facts)}, {facts['cpu']}, {facts['cores']} cores", ""]
    lines += [f"Revision {facts['revision'] or 'unknown'}, Python {facts['python']}, {versions}", ""]
    if cpu:
        lines += ["**Toy sizes on the CPU: no figure on this page means anything.**", ""]
    if facts["older_torch"]:
        lines += ["**This torch is older than the one that the package asks for.**", ""]
    lines += ["| Slice | Result | Seconds | When | Card | Question |", "|---|---|---:|---|---|---|"]
    told = []
    for each in slices:
        record, reason = folder.record(each.name), each.left_out(facts, cpu)
        if record is None:
            lines.append(f"| {each.name} | {reason or 'not yet run'} | | | | {each.question} |")
            continue
        row = (record["status"], f"{record['seconds']:.0f}", record["when"], record["card"], each.question)
        lines.append(f"| {each.name} | {' | '.join(row)} |")
        shown = record["printed"][-SHOWN:]
        told += ["", f"## {each.name}: {record['status']}", "", f"`{record['command']}`", "", "```text", *shown, "```"]
    return "\n".join([*lines, *told, ""])


def store(title: str, slices: Sequence[Slice], folder: Folder, facts: Row, options: argparse.Namespace) -> None:
    """Write page and JSON of all slices."""
    (folder.path / "page.md").write_text(page(title, slices, folder, facts, options.cpu))
    records = [folder.record(each.name) for each in slices]
    for file in (str(folder.path / "all.json"), options.json):
        keep({"facts": facts, "slices": [record for record in records if record]}, file)


def parse(about: str | None, name: str) -> argparse.Namespace:
    """The command line of both lists."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the slices, their results so far, and end")
    parser.add_argument("--slice", action="append", metavar="NAME", help="run this one alone; may be repeated")
    parser.add_argument("--again", action="store_true", help="run slices that are done too, and forget their results")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="begin no slice that would end later")
    parser.add_argument("--cpu", action="store_true", help="try every slice without a GPU, in toy size")
    parser.add_argument("--out", type=Path, help=f"folder of the results; by default runs/{name}, or runs/{name}-cpu")
    parser.add_argument("--json", help="file for the figures of all slices, beside all.json in the folder")
    options = parser.parse_args()
    options.out = options.out or ROOT / "runs" / (f"{name}-cpu" if options.cpu else name)
    return options


def main(about: str | None, name: str, title: str, of: Callable[[Row, bool], Sequence[Slice]]) -> int:
    """Run slices; the exit status is 1 if one of this call failed or was ended.

    Args:
        about: text of `--help`; name: of the default folder; title: of the page.
        of: the slices for the facts of a machine, under `--cpu` or not.
    """
    began = time.monotonic()
    options = parse(about, name)
    facts = launch(BENCHMARKS / "gpu/facts.py", ["cpu" if options.cpu else "cuda"], 1)[0]
    slices, folder = of(facts, options.cpu), Folder(options.out)
    if unknown := set(options.slice or ()) - {each.name for each in slices}:
        sys.exit(f"--slice names {', '.join(sorted(unknown))}; here are {', '.join(each.name for each in slices)}.")
    if options.list:
        for each in slices:
            record = folder.record(each.name)
            state = record["status"] if record else each.left_out(facts, options.cpu) or "not yet run"
            times = f"about {each.expected:.0f} s, at most {each.limit:.0f}"
            print(f"{each.name:18} {state:12} {times:26} {each.question}")
        return 0
    end = began + options.budget - SPARE if options.budget else float("inf")
    good = True
    for each in chosen(slices, folder, facts, options):
        good = attempt(each, folder, facts, options, end) and good
        store(title, slices, folder, facts, options)
    print(page(title, slices, folder, facts, options.cpu), f"\nResults: {folder.path}", sep="")
    return 0 if good else 1


def attempt(each: Slice, folder: Folder, facts: Row, options: argparse.Namespace, end: float) -> bool:
    """Run a slice until it is done, if it can run and its time suffices; False if it failed or was ended."""
    reason = each.left_out(facts, options.cpu)
    while reason is None:
        left = end - time.monotonic()
        if left < each.expected:
            reason = f"not begun: {left:.0f} s are left of the budget, and it takes about {each.expected:.0f}"
            break
        before = _remaining(folder.record(each.name))
        record = run(each, folder, facts, options, min(each.limit, left))
        print(f"{each.name}: {record['status']} after {record['seconds']:.0f} s", file=sys.stderr, flush=True)
        if record["status"] != "part" or not _remaining(record) < before:
            return bool(record["status"] == "done")
    print(f"{each.name}: {reason}", file=sys.stderr, flush=True)
    return True


def _remaining(record: Row | None) -> float:
    """How much a script has still to do, by its own count."""
    figures = (record or {}).get("figures") or {}
    return float(figures.get("remaining", float("inf")))
