"""The cost of a change: the rows of `peers.py` and `overhead.py`, our engines alone, before it and after it.

    python benchmarks/before_after.py REVISION [--quick] [--rows PATTERN] [--pairs N] [--out NAME]

Before is REVISION of this repository, after is the working tree as it is; the package of each is copied into a
temporary folder, which is removed in the end. Both are measured by the benchmarks of the working tree. A pair is one
launch of each, one right after the other, and pairs begin with before and after in turns, so other load of the machine
affects both alike. Each pair gives one ratio, after / before:

- CPU: seconds of user and system time of all threads, the mean over ranks of each rank's median over measured steps.
- Wall: seconds of the slowest rank's median step.

Printed is the median of the ratios, in brackets its distribution-free confidence interval between order statistics: the
narrowest that holds the median with at least 95 % (9 pairs: the second and the second to last, 96.1 %), or from the
least to the largest where there are fewer than 6 pairs. A mark is where the whole interval is on one side of 1.

With `--out NAME` figures and table are kept as benchmarks/results/NAME.json and NAME.md, written anew after each round
of pairs. The exit status is 1 if a launch failed.
"""

import argparse
import fnmatch
import io
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import overhead
import peers
from peer_engines import ENGINES
from ranks import LaunchError, circumstances, launched_path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LEVEL = 0.95
TREES = ("before", "after")
FIGURES = ("cpu", "wall")
OVERHEAD_RANKS = (1, 2)


class Measured(NamedTuple):
    """Seconds of one row in one launch."""

    cpu: float
    wall: float


class Starter(Protocol):
    """Launches some rows together; their figures by name."""

    def __call__(self, more_env: Mapping[str, str]) -> dict[str, Measured]: ...


@dataclass(frozen=True)
class Launch:
    """One launch, and the rows that it measures."""

    rows: tuple[str, ...]
    start: Starter


@dataclass(frozen=True)
class Estimate:
    """The median of some ratios, and the interval that holds the true one with probability `coverage`."""

    median: float
    low: float
    high: float
    coverage: float
    pairs: int

    @property
    def differs(self) -> bool:
        """Whether the interval is on one side of 1."""
        return self.coverage >= LEVEL and not self.low <= 1 <= self.high


def order_statistics(count: int, level: float = LEVEL) -> tuple[int, float]:
    """How many values to leave out at either end of `count` sorted ones, and with which probability the median of the
    distribution lies between those that are left: at least `level`, or else as much as there can be.

    It lies below the value after k left out with the probability of at most k heads in `count` throws.
    """
    left_out, outside = 0, 2 * 0.5**count
    for heads in range(1, (count + 1) // 2):
        more = outside + 2 * math.comb(count, heads) * 0.5**count
        if more > 1 - level:
            break
        left_out, outside = heads, more
    return left_out, 1 - outside


def estimate(ratios: Sequence[float]) -> Estimate:
    """Median and interval of the ratios of pairs."""
    ordered = sorted(ratios)
    left_out, coverage = order_statistics(len(ordered))
    return Estimate(statistics.median(ordered), ordered[left_out], ordered[-1 - left_out], coverage, pairs=len(ordered))


def launches(options: argparse.Namespace) -> list[Launch]:
    """All launches of which some row matches `options.rows`, those of `peers.py` first."""
    found = []
    for case in peers.cases(options.sizes, options.tokens, options.precisions):
        for engine in (engine for engine in ENGINES.values() if engine.family == "zeroshard"):
            row = f"peers/{case.size}/{case.tokens}/{case.precision}/{engine.name}"
            found.append(Launch((row,), partial(start_peer, row, engine.name, case, options)))
    for ranks in OVERHEAD_RANKS:
        for stage in overhead.STAGES:
            found.append(
                Launch(
                    tuple(overhead_row(ranks, stage, units, parameters) for units, parameters in overhead.SHAPES),
                    partial(start_overhead, ranks, stage, options),
                )
            )
    wanted = (Launch(tuple(fnmatch.filter(launch.rows, options.rows)), launch.start) for launch in found)
    return [launch for launch in wanted if launch.rows]


def overhead_row(ranks: int, stage: int, units: int, parameters: int) -> str:
    """The name of one shape's row."""
    return f"overhead/{ranks}/zero{stage}/{units}x{parameters}"


def start_peer(
    row: str, engine: str, case: Any, options: argparse.Namespace, more_env: Mapping[str, str]
) -> dict[str, Measured]:
    """Launch one row of `peers.py`."""
    whole = peers.combine(peers.start(engine, case, options.steps, options, more_env))
    return {row: Measured(whole["cpu_s"], whole["step_s"])}


def start_overhead(
    ranks: int, stage: int, options: argparse.Namespace, more_env: Mapping[str, str]
) -> dict[str, Measured]:
    """Launch the rows of one stage of `overhead.py`."""
    answers = overhead.take(ranks, 2 * options.steps, 3, [str(stage)], more_env)
    measured = {}
    for units, parameters in overhead.SHAPES:
        name = f"{stage} {units} {parameters}"
        cpu = statistics.fmean(answer["cpu_us"][name] for answer in answers)
        wall = max(answer["wall_us"][name] for answer in answers)
        measured[overhead_row(ranks, stage, units, parameters)] = Measured(cpu / 1e6, wall / 1e6)
    return measured


def lay_out(revision: str, folder: Path) -> dict[str, Path]:
    """Copies of both packages in `folder`; the folders from which they are imported."""
    archive = _git("archive", "--format=tar", revision, "src")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder / "before", filter="data")
    shutil.copytree(ROOT / "src", folder / "after" / "src", ignore=shutil.ignore_patterns("__pycache__"))
    sources = {tree: folder / tree / "src" for tree in TREES}
    for tree, source in sources.items():
        told = "import zeroshard; print(zeroshard.__file__)"
        env = {**os.environ, **env_of(source)}
        done = subprocess.run([sys.executable, "-c", told], env=env, cwd=folder, capture_output=True, text=True)
        if not Path(done.stdout.strip()).is_relative_to(source):
            sys.exit(f"The package {tree} is not imported from its copy but from {done.stdout or done.stderr}")
    return sources


def env_of(source: Path) -> dict[str, str]:
    """The environment in which zeroshard is imported from `source`."""
    return {"PYTHONPATH": launched_path(source)}


def measure(
    todo: Sequence[Launch], sources: Mapping[str, Path], first: int, kept: dict[str, dict[str, list[Measured]]]
) -> dict[str, str]:
    """Measure one pair of every launch into `kept[row][tree]`, beginning with tree `first`; returns failures by row."""
    failed = {}
    order = TREES if first % 2 == 0 else TREES[::-1]
    for launch in todo:
        try:
            found = {tree: launch.start(env_of(sources[tree])) for tree in order}
        except LaunchError as error:
            failed |= dict.fromkeys(launch.rows, str(error))
            continue
        for row in launch.rows:
            for tree in TREES:
                kept.setdefault(row, {name: [] for name in TREES})[tree].append(found[tree][row])
    return failed


def compared(row: str, by_tree: Mapping[str, Sequence[Measured]]) -> dict[str, Any]:
    """The row as it is stored: medians of the seconds of each tree, and the estimate from the ratios of pairs."""
    whole: dict[str, Any] = {"row": row}
    for figure in FIGURES:
        values = {tree: [getattr(measured, figure) for measured in by_tree[tree]] for tree in TREES}
        ratios = [after / before for before, after in zip(values["before"], values["after"], strict=True)]
        estimated = estimate(ratios)
        whole[figure] = {
            **{f"{tree}_s": statistics.median(values[tree]) for tree in TREES},
            **{f"{tree}_s_launches": values[tree] for tree in TREES},
            **asdict(estimated),
            "differs": estimated.differs,
        }
    return whole


def lines(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The cells of the table, a heading first."""
    cells = [["row", "pairs", "CPU before, ms", "CPU after / before", "wall before, ms", "wall after / before"]]
    for row in rows:
        cells.append([row["row"], str(row["cpu"]["pairs"])])
        for figure in FIGURES:
            found = row[figure]
            mark = "" if not found["differs"] else " <" if found["median"] < 1 else " >"
            ratio = f"{found['median']:.3f} [{found['low']:.3f}, {found['high']:.3f}]{mark}"
            cells[-1] += [f"{found['before_s'] * 1e3:.3f}", ratio]
    return cells


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table for a terminal."""
    cells = lines(rows)
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def heading(kept: Mapping[str, Any]) -> str:
    """The revisions compared, the machine, and the meaning of the brackets."""
    coverage = sorted({row["cpu"]["coverage"] for row in kept["rows"]})
    brackets = " or ".join(f"{100 * share:.1f} %" for share in coverage)
    return (
        f"{kept['cpu']}, {kept['cores']} cores, load {kept['load']:.1f} to {kept['load_at_end']:.1f}, {kept['date']}. "
        f"Before: {kept['before']}; after: {kept['after']}. Medians of the ratios of pairs, in brackets their "
        f"distribution-free confidence interval ({brackets}); < and > mark one that leaves out 1."
    )


def markdown(kept: Mapping[str, Any]) -> str:
    """The table as a Markdown page."""
    first, *others = (f"| {' | '.join(cells)} |" for cells in lines(kept["rows"]))
    rule = "|" + "---|" * len(lines([])[0])
    failed = [f"Failed: {row}." for row in kept["failed"]]
    return "\n".join([heading(kept), "", first, rule, *others, *(["", *failed] if failed else [])]) + "\n"


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="what came before, as git names it: HEAD~1, a branch, a hash")
    parser.add_argument("--rows", default="*", metavar="PATTERN", help="such as 'peers/25M/64/fp32/*' or '*/zero3*'")
    parser.add_argument("--pairs", type=int, help="pairs of launches; by default 9, or 5 with --quick")
    parser.add_argument("--steps", type=int, help="measured steps of a launch; overhead takes 3 turns of twice as many")
    parser.add_argument("--quick", action="store_true", help=f"of peers.py only {peers.QUICK}, and fewer pairs")
    parser.add_argument("--list", action="store_true", help="only print the names of the rows")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that a launch may take")
    parser.add_argument("--out", metavar="NAME", help="of the files in benchmarks/results")
    options = parser.parse_args(words)
    by_default = {**(peers.QUICK if options.quick else peers.FULL), "pairs": 5 if options.quick else 9}
    for name in ("sizes", "tokens", "precisions", "steps", "pairs"):
        if getattr(options, name, None) is None:
            setattr(options, name, by_default[name])
    if options.pairs < 1:
        parser.error("--pairs must be 1 or more")
    if options.out and Path(options.out).name != options.out:
        parser.error("--out is a name without folder or ending")
    return options


def main() -> int:
    """Lay out, launch in pairs, print, keep."""
    options = parse()
    todo = launches(options)
    if options.list or not todo:
        print(*(row for launch in todo for row in launch.rows), sep="\n")
        return not todo
    names = {"before": _git("rev-parse", "--short", f"{options.revision}^{{commit}}").decode().strip()}
    changed = _git("status", "--porcelain", "--", "src").decode().strip()
    names["after"] = _git("rev-parse", "--short", "HEAD").decode().strip() + (" and changes" if changed else "")
    kept: dict[str, Any] = {**circumstances(), **names, "steps": options.steps}
    by_row: dict[str, dict[str, list[Measured]]] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="zeroshard-before-after-") as folder:
        sources = lay_out(options.revision, Path(folder))
        measure(todo[:1], sources, 0, {})  # unmeasured: bytecode is written, files are in memory
        for number in range(options.pairs):
            failed |= measure(todo, sources, number, by_row)
            todo = [launch for launch in todo if not failed.keys() & set(launch.rows)]
            kept |= {"rows": [compared(row, by_row[row]) for row in by_row], "failed": sorted(failed)}
            kept["load_at_end"] = os.getloadavg()[0]
            if options.out:
                path = RESULTS / f"{options.out}.json"
                path.write_text(json.dumps(kept, indent=1) + "\n")
                path.with_suffix(".md").write_text(markdown(kept))
            if sys.stdout.isatty():
                print(f"pair {number + 1} of {options.pairs}", end="\r", flush=True)
    print(heading(kept), text(kept["rows"]), sep="\n")
    print(*(f"{row} failed. {words}" for row, words in failed.items()), sep="\n", file=sys.stderr)
    return bool(failed)


def _git(*words: str) -> bytes:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True)
    if done.returncode:
        sys.exit(f"git {' '.join(words)}: {done.stderr.decode().strip()}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
