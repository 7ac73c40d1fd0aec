"""Thirty questions of the planner: each searched, searched again from scratch, and its first plan rehearsed whole.

    python benchmarks/plan_questions.py [--only NUMBER ...] [--limit SECONDS] [--once] [--json FILE] [--table FILE]

A question of `tests/planner/questions.py` is searched in one process. A second process, which never saw the first,
searches again, which must give the same plans, and rehearses the first plan: every block and stage where these are at
most 256 blocks times microbatches, and else few. Where the answer is no plan that trains every weight, there must be
ways to copy. With `--once` the second search is left out, and the rehearsal stays.

Seconds of searches and of their progress are CPU seconds without imports (about 5 for torch and transformers), as if
no other program ran; a search that takes more than `--limit` is ended. The first table is that of the command
`zeroshard plan`, by the clock on the wall. Questions from number 30 on are not among the thirty.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

time.perf_counter = time.process_time  # the clock of the search, before it is imported

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

import transformers  # noqa: E402, F401
from planner.questions import MODELS, QUESTIONS, Question, llama  # noqa: E402
from ranks import circumstances, keep  # noqa: E402

from zeroshard.cli.plan import described_task  # noqa: E402
from zeroshard.cli.plan_answer import python_line  # noqa: E402
from zeroshard.cli.plan_options import PlanOptions, precision_for, read_question  # noqa: E402
from zeroshard.doctor.hardware import Machines  # noqa: E402
from zeroshard.planner.predict.predict import predict, way_of  # noqa: E402
from zeroshard.planner.predict.result import Found, Prediction  # noqa: E402
from zeroshard.planner.search.adapted import trained_as  # noqa: E402
from zeroshard.planner.search.search import search  # noqa: E402
from zeroshard.planner.search.text import changes, named  # noqa: E402

TRILLION = {"trillion": llama(25600, 69120, 128, 200, 200, 128256)}
FURTHER = [
    (Question("trillion", "A100-80", 3072, None, True), ("--global-batch", "3072", "--sequence", "2048")),
    (Question("tiny", "A100-80", 1000, None, True), ()),
    (Question("tiny", "RTX3090", 1, None, True), ()),
]
EVERY: list[tuple[Question, Sequence[str]]] = [*((question, ()) for question in QUESTIONS), *FURTHER]
WHOLE = 256  # most blocks times microbatches, or stages, of a rehearsal of every block
COLUMNS = (
    "question",
    "first plan",
    "plans",
    "peak GiB",
    "host GiB",
    "CPU s",
    "first, CPU s",
    "table, s",
    "left / told",
)
COLUMNS += ("second search", "peak when rehearsed anew")


def asked(number: int, folder: Path) -> tuple[PlanOptions, Machines, list[str]]:
    """The options of a question, its machines, and the words of the command."""
    question, more = EVERY[number]
    config, model = {**MODELS, **TRILLION}.get(question.model), question.model
    if config is not None:
        model = str(folder / question.model)
        Path(model).mkdir(exist_ok=True)
        (Path(model) / "config.json").write_text(json.dumps(config))
    words = ["--model", model, "--gpu", question.card, "--gpus", str(question.cards)]
    words += [*(["--host-memory", question.host] if question.host else []), *more]
    options, machines = read_question(words, {})
    assert machines is not None
    return replace(options, precision=precision_for(options, machines)), machines, words


def first(number: int, folder: Path) -> dict[str, Any]:
    """A search, with the CPU seconds of each line of its progress."""
    options, machines, _ = asked(number, folder)
    began, lines, fits = time.process_time(), [], []
    say = lambda text: lines.append((time.process_time() - began, text))  # noqa: E731
    shown = lambda found: fits.append((time.process_time() - began, found.best[0].mode))  # noqa: E731
    task, base = described_task(options, machines.count)
    found = search(task, machines, base, say=say, first=shown)
    spent = time.process_time() - began
    told = [(at, text, spent - at) for at, text in lines if " s left: " in text]
    ratios = [left / max(1.0, float(text.split(" about ")[1].split()[0])) for _, text, left in told]
    confirmed = [at for at, mode in fits if mode != "estimate"]
    row = {"cpu": spent, "first": confirmed[0] if confirmed else None, "lines": lines, "ratios": ratios}
    (folder / "best.json").write_text(json.dumps([one.whole_dict() for one in found.best[:1]]))
    return row | summary(found, EVERY[number][0])


def second(number: int, folder: Path, once: bool) -> dict[str, Any]:
    """The plans of a search from scratch, and the peak of the first plan, rehearsed anew."""
    options, machines, _ = asked(number, folder)
    found: dict[str, Any] = {}
    if not once:
        task, base = described_task(options, machines.count)
        found["again"] = summary(search(task, machines, base), EVERY[number][0])["plans"]
    for stored in json.loads((folder / "best.json").read_text()):
        known = Prediction.from_dict(stored)
        task, _ = described_task(options, machines.count)
        task = trained_as(task, known)
        size = way_of(known.plan).whole(known.plan, sum(stack.depth for stack in task.facts.stacks))
        whole = predict(task, known.plan, machines, known.batch, deep=size <= WHOLE)
        found |= {"fits": whole.fits, "every_block": size <= WHOLE}
        found |= {"share": whole.peak_bytes / known.peak_bytes, "time_share": whole.seconds / known.seconds}
    return found


def summary(found: Found, question: Question) -> dict[str, Any]:
    """The plans of an answer in short, and what is wrong with them by the table of questions."""
    trained = [one for one in found.best if not one.adapters]
    without_disk = any(not one.disk_bytes for one in trained)
    wrong = [] if without_disk is question.fits else [f"fits without a disk: {without_disk}"]
    wrong += [] if all(one.fits for one in found.best) else ["a plan that does not fit is listed"]
    wrong += [] if bool(found.ways) is not bool(trained) else ["ways beside plans, or neither"]
    changed = [bool(changes(one)) for one in found.best]
    wrong += [] if changed == sorted(changed) else ["a plan that changes results comes before one that does not"]
    plans = [
        {"name": named(one), "python": python_line(one.plan), "peak": one.peak_bytes, "host": one.host_needed_bytes}
        | {"disk": one.disk_bytes, "seconds": one.seconds, "tokens_per_second": one.tokens_per_second}
        for one in found.best
    ]
    looked = {"looked_at": found.looked_at, "left_out": found.left_out}
    return {"plans": plans, **looked, "ways": list(found.ways), "failed": wrong}


def table_seconds(words: Sequence[str], folder: Path) -> float | None:
    """Seconds from the command's start to the end of its first table, on which it is ended."""
    env = {**os.environ, "XDG_CACHE_HOME": str(folder), "PYTHONPATH": str(ROOT / "src")}
    command, began = [sys.executable, "-m", "zeroshard", "plan", *words], time.monotonic()
    process = subprocess.Popen(command, env=env, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        found = any(line.startswith("by formulas") for line in process.stderr)
        return time.monotonic() - began if found else None
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def ask(number: int, limit: float, once: bool) -> dict[str, Any]:
    """Ask a question, and confirm its answer."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _, _, words = asked(number, folder)
        row: dict[str, Any] = {"question": EVERY[number][0]._asdict(), "table": table_seconds(words, folder)}
        row |= _in_process(limit, first, number, folder)
        if "plans" not in row:
            return row
        found = _in_process(limit, second, number, folder, once)
    row["failed"] += found.pop("failed", [])
    row["failed"] += [] if found.get("fits", True) else ["the first plan does not fit when it is rehearsed anew"]
    again = found.pop("again", None)
    same = again is None or [one["python"] for one in again] == [one["python"] for one in row["plans"]]
    row["failed"] += [] if same else ["a second search found other plans"]
    return row | found | {"same": None if again is None else same}


def _in_process(limit: float, work: Any, *given: Any) -> dict[str, Any]:
    """The result of a function in a process of its own, which is ended after so many CPU seconds."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_answer, args=(theirs, limit, work, given))
    process.start()
    theirs.close()
    with contextlib.suppress(EOFError):
        result: dict[str, Any] = ours.recv()
        process.join()
        return result
    process.join()
    return {"failed": [f"no answer in {limit:.0f} CPU s" if process.exitcode == -signal.SIGVTALRM else "ended"]}


def _answer(pipe: Any, limit: float, work: Any, given: Sequence[Any]) -> None:
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit)
    try:
        result = work(*given)
    except Exception as error:
        result = {"failed": [f"{type(error).__name__}: {error}"]}
    pipe.send(result)


def row_of(one: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of a question's row."""
    question, plans = one["question"], one.get("plans") or []
    cards = f"{question['model']}, {question['cards']} x {question['card']}"
    cells = [cards + (f", {question['host']} of host memory" if question["host"] else "")]
    best = plans[0] if plans else None
    cells += ["; ".join(one["failed"]) or (best["name"] if best else "none"), str(len(plans))]
    cells += [f"{best[name] / 2**30:,.2f}" for name in ("peak", "host")] if best else ["", ""]
    cells += [f"{one[name]:.1f}" if one.get(name) is not None else "" for name in ("cpu", "first", "table")]
    ratios = one.get("ratios") or ()
    cells.append(f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "")
    cells.append({True: "same", False: "other", None: ""}[one.get("same")])
    share = f"{one['share']:.4f}" if "share" in one else ""
    return (*cells, share + (" (few blocks)" if share and not one["every_block"] else ""))


def lines_of(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A table of Markdown."""
    for cells in (COLUMNS, ["---"] * len(COLUMNS), *map(row_of, rows)):
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", default=range(len(QUESTIONS)), help="numbers, from 0 on")
    parser.add_argument("--limit", type=float, default=300.0, help="CPU seconds of one search")
    parser.add_argument("--once", action="store_true", help="leave out the second search")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--table", help="file for a table of Markdown")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for number in options.only:
        rows.append({"number": number, **ask(number, options.limit, options.once)})
        print(f"{number:2}  {' | '.join(row_of(rows[-1]))}", flush=True)
        keep({**circumstances(), "rows": rows}, options.json)
        if options.table:
            Path(options.table).write_text("\n".join(lines_of(rows)) + "\n")
    if failed := [row["number"] for row in rows if row["failed"]]:
        sys.exit(f"questions that failed: {', '.join(map(str, failed))}")


if __name__ == "__main__":
    main()
