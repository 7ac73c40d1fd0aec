"""`zeroshard checkpoint`: list checkpoints, verify them, describe their content, and compare two."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zeroshard.checkpoint import MANIFEST, Reader
from zeroshard.checkpoint.compare import Comparison, compare
from zeroshard.checkpoint.export import CLASS_OF_DIFFUSERS
from zeroshard.checkpoint.folder import find_checkpoint
from zeroshard.cli.early_options import DiffOptions, InfoOptions, ListOptions, VerifyOptions, read_checkpoint_action
from zeroshard.errors import CheckpointError, DamagedError
from zeroshard.plan import upgraded
from zeroshard.report.plain_table import plain_table
from zeroshard.text import format_bytes

STEP = re.compile(r"step-(\d+)")
ASIDE = re.compile(r".+\.bad(-\d+)?")
LEFT_OVER = re.compile(r".+\.(tmp-[0-9a-f]+|gone-.+)")
DEPTH = 3  # folders from runs/ down to a checkpoint
SHORT = 240  # characters of a fact
ROWS = 24  # of facts that differ
ADAM, HALF = 12, 2  # bytes per parameter: fp32 weights and Adam's two states; 16-bit weights


@dataclass(frozen=True, slots=True)
class Listed:
    """A line of `ls`.

    Attributes:
        nbytes: of all its files.
        age: seconds since it was written.
        state: whole (by the headers and one block of each file), damaged, put aside, or left over.
        problem: the first problem found, or None.
    """

    path: str
    step: int | None
    nbytes: int
    ranks: int | None
    plan: str
    age: float
    state: str
    problem: str | None = None


def run_checkpoint(argv: Sequence[str]) -> None:
    """Run one of the four actions; raises `SystemExit` (1) if `verify` finds damage or `diff` a difference.

    Raises:
        ConfigError: an unknown action. CheckpointError: no checkpoint there, or one that cannot be compared.
    """
    action, options = read_checkpoint_action(argv)
    actions: dict[str, Callable[[Any], bool]] = {"ls": _list, "verify": _verify, "info": _info, "diff": _diff}
    if not actions[action](options):
        sys.exit(1)


def listed(path: Path) -> Listed:
    """The line of `ls` for one checkpoint."""
    try:
        nbytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        age = time.time() - max(file.stat().st_mtime for file in (path, *path.glob(MANIFEST)))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error
    number = STEP.match(path.name)
    step, ranks, plan, problem = int(number[1]) if number else None, None, "", None
    aside, left = ASIDE.fullmatch(path.name), LEFT_OVER.fullmatch(path.name)
    try:
        if not left:
            reader = Reader(path)
            step, ranks, plan = reader.facts["step"], reader.facts["ranks"], in_short(reader.facts.get("plan"))
            problem = next(reader.problems(sample=True), None)
    except CheckpointError as error:
        problem = str(error)
    state = "left over" if left else "put aside" if aside else "damaged" if problem else "whole"
    return Listed(str(path), step, nbytes, ranks, plan, age, state, problem)


def in_short(plan: Any) -> str:
    """A plan in short: ZeRO stage, precision and stages."""
    if not isinstance(plan, dict):
        return ""
    parts = [f"zero {plan.get('zero')}", str(plan.get("precision"))]
    pipeline = upgraded(plan).get("pipeline_parallel", {})
    if pipeline.get("stages", 1) != 1:
        parts.append(f"{pipeline['stages']} stages {pipeline.get('schedule')}")
    return ", ".join(parts)


def _checkpoints(path: Path, depth: int = DEPTH) -> Iterator[Path]:
    """All checkpoints at a path and below it, also damaged and half-written ones."""
    if (path / MANIFEST).exists() or ASIDE.fullmatch(path.name) or LEFT_OVER.fullmatch(path.name):
        yield path
    elif depth:
        for inside in sorted(inside for inside in path.iterdir() if inside.is_dir()):
            yield from _checkpoints(inside, depth - 1)


def _list(options: ListOptions) -> bool:
    lines = [listed(path) for path in _checkpoints(options.path)]
    lines.sort(key=lambda line: (str(Path(line.path).parent), line.step or 0, line.path))
    if options.json:
        print(json.dumps([asdict(line) for line in lines], indent=1))
        return True
    console = Console(highlight=False)
    if not lines:
        console.print(f"There is no checkpoint in {options.path}.", markup=False)
    for folder in dict.fromkeys(Path(line.path).parent for line in lines):
        inside = [line for line in lines if Path(line.path).parent == folder]
        table = plain_table("", ["checkpoint", "plan"], ["ranks", "size", "age"])
        table.add_column("state", no_wrap=True)
        for line in inside:
            size, age = format_bytes(line.nbytes), _age(line.age)
            table.add_row(escape(Path(line.path).name), escape(line.plan), _optional(line.ranks), size, age, line.state)
        _show(console, str(folder), table)
        for line in inside:
            if line.problem:
                console.print(line.problem, markup=False, soft_wrap=True)
    return True


def _verify(options: VerifyOptions) -> bool:
    path = find_checkpoint(options.path)
    facts: dict[str, Any] = {"path": str(path)}
    try:
        reader = Reader(path)
        nbytes = sum(file.nbytes for file in reader.files.values())
        facts |= {"step": reader.facts["step"], "files": len(reader.files), "tensors": len(reader.tensors)}
        facts["nbytes"] = nbytes
        with Console(stderr=True).status(f"Reading {format_bytes(nbytes)}"):
            problems = list(reader.problems())
    except DamagedError as error:
        problems = [str(error)]
    if options.json:
        print(json.dumps({**facts, "problems": problems}, indent=1))
        return not problems
    console = Console(highlight=False)
    for problem in problems:
        console.print(problem, markup=False, soft_wrap=True)
    if problems:
        console.print(f"{path} is damaged: {_many(len(problems), 'problem')}.", markup=False, soft_wrap=True)
    else:
        content = (
            f"{_many(facts['files'], 'file')}, {_many(facts['tensors'], 'tensor')}, {format_bytes(facts['nbytes'])}"
        )
        console.print(f"{path} is whole: step {facts['step']}, {content}.", markup=False, soft_wrap=True)
    return not problems


def contents(reader: Reader) -> dict[str, Any]:
    """The description that `info` prints of a checkpoint."""
    tensors: list[dict[str, Any]] = []
    kinds: dict[str, dict[str, int]] = {}
    for name, entry in reader.tensors.items():
        nbytes = sum(chunk.numel for chunk in entry.chunks) * entry.dtype.itemsize
        dtype = str(entry.dtype).removeprefix("torch.")
        row = {"name": name, "shape": entry.shape, "dtype": dtype, "chunks": len(entry.chunks), "nbytes": nbytes}
        tensors.append(row)
        kind = kinds.setdefault(name.partition(":")[0], {"tensors": 0, "nbytes": 0})
        kind["tensors"] += 1
        kind["nbytes"] += nbytes
    parameters = sum(reader.tensors[f"weight:{name}"].numel for name in reader.names("weight"))
    return {
        "path": str(reader.path),
        "facts": reader.facts,
        "parameters": parameters,
        "nbytes": sum(file.stat().st_size for file in reader.path.iterdir()),
        "fp32_and_adam_nbytes": ADAM * parameters,
        "half_nbytes": HALF * parameters,
        "kinds": kinds,
        "tensors": tensors,
    }


def _info(options: InfoOptions) -> bool:
    found = contents(Reader(find_checkpoint(options.path)))
    if options.json:
        print(json.dumps(found, indent=1))
        return True
    console = Console(highlight=False)
    table = plain_table("", ["fact", "value"])
    for key, value in found["facts"].items():
        table.add_row(escape(key), escape(_described(key, value)))
    _show(console, found["path"], table)
    table = plain_table("", ["name", "shape", "dtype"], ["chunks"])
    for row in found["tensors"]:
        shape = "x".join(map(str, row["shape"])) or "scalar"
        table.add_row(escape(row["name"]), shape, row["dtype"], str(row["chunks"]))
    _show(console, "\nTensors", table)
    table = plain_table("", ["kind"], ["tensors", "bytes", "per parameter"])
    parameters, kinds = found["parameters"], found["kinds"]
    rest = found["nbytes"] - sum(kind["nbytes"] for kind in kinds.values())
    others = {"headers and manifest": {"nbytes": rest}, "all": {"nbytes": found["nbytes"]}}
    for name, kind in {**kinds, **others}.items():
        each = f"{kind['nbytes'] / parameters:,.3f}" if parameters else ""
        table.add_row(escape(name), _optional(kind.get("tensors")), format_bytes(kind["nbytes"]), each)
    _show(console, "\nBytes", table)
    whole, half = format_bytes(found["fp32_and_adam_nbytes"]), format_bytes(found["half_nbytes"])
    text = f"{parameters:,} parameters Ψ: 12Ψ (fp32 and both states of Adam) is {whole}, 2Ψ (16 bits) is {half}."
    console.print(f"\n{text}", markup=False, soft_wrap=True)
    return True


def _diff(options: DiffOptions) -> bool:
    a, b = Reader(find_checkpoint(options.a)), Reader(find_checkpoint(options.b))
    with Console(stderr=True).status("Comparing"):
        found = compare(a, b)
    if options.json:
        print(json.dumps({"a": str(a.path), "b": str(b.path), "equal": found.equal, **asdict(found)}, indent=1))
        return found.equal
    _print_comparison(found, str(a.path), str(b.path))
    return found.equal


def _print_comparison(found: Comparison, a: str, b: str) -> None:
    console = Console(highlight=False)
    console.print(f"a is {a}\nb is {b}", markup=False, soft_wrap=True)
    for title, facts in (("Facts that differ", found.facts), ("Written differently (no difference)", found.layout)):
        if facts:
            table = plain_table("", ["fact", "a", "b"])
            for key, (one, other) in list(facts.items())[:ROWS]:
                table.add_row(escape(key), escape(_shortened(one)), escape(_shortened(other)))
            _show(console, f"\n{title}", table)
            if len(facts) > ROWS:
                console.print(f"and {len(facts) - ROWS:,} more; --json has all")
    if found.different:
        table = plain_table("", ["name", "a", "b"], ["largest difference"])
        for name, difference in found.different.items():
            largest = "" if difference.largest is None else f"{difference.largest:.3g}"
            table.add_row(escape(name), difference.a, difference.b, largest)
        _show(console, "\nTensors that differ", table)
    for side, names in (("a", found.only_a), ("b", found.only_b)):
        for name in names:
            console.print(f"{name} is in {side} only.", markup=False)
    same = "the same state" if found.equal else "different states"
    console.print(f"\nThey hold {same}; {_many(found.same, 'tensor')} equal to the last bit.", markup=False)


def _show(console: Console, title: str, table: Table) -> None:
    """Print a table under its title, which may be wider."""
    console.print(title, markup=False, soft_wrap=True)
    console.print(table)


def _described(key: str, value: Any) -> str:
    """A fact in one or two lines."""
    if key == "optimizer" and isinstance(value.get("groups"), list):
        return _shortened(
            f"{value.get('class')}, {_many(len(value['groups']), 'group')}: {json.dumps(value['groups'])}"
        )
    if key == "plan" and isinstance(value, dict):
        return ", ".join(f"{name}={setting}" for name, setting in value.items() if setting not in (None, [], False))
    if key == "config" and isinstance(value, dict):
        return f"{value.get('model_type', value.get(CLASS_OF_DIFFUSERS))}, {_many(len(value), 'key')}"
    return _shortened(value)


def _shortened(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= SHORT else text[: SHORT - 1] + "…"


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def _optional(value: int | None) -> str:
    return "" if value is None else str(value)


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + "s" * (count != 1)
