"""Waits left out on purpose, one at a time: how many of them the device of paper reports.

    python benchmarks/paper_mutations.py [--files PATH ...] [--plans NAME ...] [--jobs N] [--json [FILE]]

For each wait, event and synchronisation that orders something on a device, those of `PLANS_TRIED` that reach it are run
until one of them has a finding. A run that fails by an error counts apart, if no plan has a finding. With `--json` the
table is kept as FILE and beside it with the ending .md, by default benchmarks/results/paper-mutations-DATE.json.
"""

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from paper.mutants import SOURCE, Mutant, mutants_of, reached_by, reports  # noqa: E402
from paper.plans import RANKS  # noqa: E402
from pool import Pool  # noqa: E402
from ranks import circumstances  # noqa: E402

MOST = 6  # plans under which a mutant is tried
PLANS_TRIED = (  # in this order, those that reach a wait
    "zero 3", "zero 2, two microbatches", "optimizer on the host, zero 3", "everything on the host, two ranks",
    "optimizer on the host, clipped", "tensor parallel", "1f1b", "experts", "users", "users, on the host",
    "by hand, clipped by value", "a block left out, bf16", "skipped step", "model that outlives its engine",
    "delayed update", "without guesses", "guesses in bf16", "parameters on the host", "zero 0", "overlapped gather",
    "groups of two", "tensor parallel, muon", "tensor parallel, adafactor", "tensor parallel, loss in chunks",
    "inputs of blocks divided", "tensor parallel, zero 3, selective", "gpipe", "interleaved", "2bw",
    "stages, arena", "messages as large as tied weights", "experts, zero 3",
    "experts on two machines", "stages and tensor parallel, whole sequences", "a copy after a copy",
    "under a profiler", "experts with buffers", "losses over the global batch", "adafactor of cut matrices",
)  # fmt: skip
NO_DEVICE: dict[str, str] = {  # by the beginning of a file's path: no tensor of a device depends on these
    "doctor/": "of a measurement",
    "train/forecast.py": "ends an interval that is measured",
    "pipeline/partition/measure.py": "ends an interval that is measured",
    "recompute/auto/forwards.py": "ends an interval that is measured",
    "supervisor/": "for processes",
    "parameter_server/": "for messages between tensors of hosts",
    "platform/rehearsed.py": "of a rehearsal, whose tensors have no memory",
    "platform/transport.py": "of gloo and of memory that ranks share; NCCL's tensors never go there",
    "platform/shared_operands.py": "of memory that ranks share; NCCL's tensors never go there",
    "comm/hang_detector.py": "of the thread that looks for hangs, by a clock",
}
SHARED = "only where ranks of the CPU share memory; tensors of a device never go there"
NO_DEVICE_IN: dict[tuple[str, str], str] = {  # the same, by file and the beginning of function and call
    ("comm/collectives.py", "Comm.side_by_side"): SHARED,
    ("moe/exchange/exchange.py", "ExpertRanks.delivery: shown"): SHARED,
    ("moe/exchange/exchange.py", "_Shown.__enter__"): SHARED,
    ("recompute/shards.py", "CheckpointPartition.whole: shown"): SHARED,
    ("comm/pending.py", "InPlace.wait_until_read"): SHARED,
    ("comm/pending.py", "Pending.arrives_within"): "only of ranks without an accelerator",
    ("comm/collectives.py", "Comm.break_messages"): "for a message that never comes, to end a wait after a hang",
    ("memory/transfers.py", "ThreadRunner.finish: accelerator.record"): "ends an interval that is measured",
    ("engine/engine.py", "Engine.load"): "for files that a thread writes",
    ("engine/state.py", "State.save"): "for files that a thread writes",
}
REASONS: dict[tuple[str, str], str] = {  # of those that no plan reports, in the same way
    ("parts/weights.py", "Weights.__del__"): "parameters that outlive their engine wait before they are read; unproven",
    ("pipeline/run/messages.py", "Messages._drop"): "an operation left unfinished keeps its tensor; of tied weights' "
    "buffers, which the next message of the same ranks covers here; unproven",
}


def main() -> int:
    """Run, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="*", default=[], help="beginnings of paths below the package; all by default")
    parser.add_argument("--plans", nargs="*", default=PLANS_TRIED, help="names of plans; by default PLANS_TRIED")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--json", nargs="?", const="", metavar="FILE", help="keep the table there, and as .md beside")
    options = parser.parse_args()
    files = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
    wanted = [file for file in files if not options.files or file.startswith(tuple(options.files))]
    every = [mutant for file in wanted for mutant in mutants_of(file)]
    mutants = [mutant for mutant in every if not no_device(mutant)]
    rows = [{"wait": str(mutant), "plan": "", "report": "", "reason": no_device(mutant)} for mutant in every]
    rows = [row for row in rows if row["reason"]]
    for row in rows:
        print(f"{row['wait']}\n    not tried: {row['reason']}")
    with Workers(options.jobs) as workers:
        functions = functions_of(mutants)
        reached = dict(zip(options.plans, workers.map(partial(reached_of, functions), options.plans), strict=True))
        plans = [[plan for plan in options.plans if place_of(mutant) in reached[plan]] for mutant in mutants]
        rows += workers.map(judged, mutants, plans)
    kept = {**circumstances(), **counts(rows, len(mutants)), "rows": rows}
    print(summary(kept))
    if options.json is not None:
        default = ROOT / "benchmarks" / "results" / f"paper-mutations-{datetime.now(UTC):%Y-%m-%d}.json"
        path = Path(options.json or default)
        path.write_text(json.dumps(kept, indent=1) + "\n")
        path.with_suffix(".md").write_text(markdown(kept))
    return 0


def counts(rows: Sequence[Mapping[str, str]], tried: int) -> dict[str, int]:
    """How many waits there are, were tried, were reported, and were reported by an error."""
    reported = [row for row in rows if row["plan"]]
    errors = [row for row in reported if re.match(r"\w+(Error|Exceeded)\b", row["report"])]
    return {"waits": len(rows), "tried": tried, "reported": len(reported), "by_an_error": len(errors)}


def summary(kept: Mapping[str, Any]) -> str:
    """The counts in words."""
    return (
        f"{kept['reported']} of {kept['tried']} left-out waits are reported, {kept['by_an_error']} of them by an error "
        f"of the run itself and not by a finding.\n{kept['waits'] - kept['tried']} more calls of these names order "
        f"nothing on a device, and were not tried."
    )


def markdown(kept: Mapping[str, Any]) -> str:
    """The table as it is stored."""
    head = [f"{kept['date']}. {summary(kept)}", "", "| wait | plan | finding, or the reason why there is none |"]
    lines = [*head, "|---|---|---|"]
    for row in kept["rows"]:
        wait, text = (each.replace("|", "/") for each in (row["wait"], row["report"] or row["reason"]))
        lines.append(f"| `{wait}` | {row['plan'] or 'none'} | {text} |")
    return "\n".join(lines) + "\n"


def reason_of(mutant: Mutant, reasons: Mapping[tuple[str, str], str]) -> str:
    """The reason for a mutant, by its file and the beginning of its function and call."""
    said = f"{mutant.function}: {mutant.text}"
    return next((text for (file, start), text in reasons.items() if mutant.file == file and said.startswith(start)), "")


def no_device(mutant: Mutant) -> str:
    """Why no tensor of a device depends on a wait; empty if one does."""
    room = next((text for start, text in NO_DEVICE.items() if mutant.file.startswith(start)), "")
    return room or reason_of(mutant, NO_DEVICE_IN)


def place_of(mutant: Mutant) -> tuple[str, int, int]:
    """As in `reached_by`."""
    return mutant.file, mutant.line, mutant.column


class Workers:
    """Pools of worker processes, each used by one thread at a time."""

    def __init__(self, jobs: int) -> None:
        self._pools = [Pool(apart=0) for _ in range(jobs)]
        self._free: SimpleQueue[Pool] = SimpleQueue()
        for pool in self._pools:
            self._free.put(pool)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        for pool in self._pools:
            pool.stop()

    def map(self, function: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
        """The results of function(pool, one of each), in order."""

        def call(*each: Any) -> Any:
            pool = self._free.get()
            try:
                return function(pool, *each)
            finally:
                self._free.put(pool)

        with ThreadPoolExecutor(len(self._pools)) as threads:
            return list(threads.map(call, *arguments))


def functions_of(mutants: Sequence[Mutant]) -> dict[str, list[str]]:
    """The functions around them, by file."""
    functions: dict[str, dict[str, None]] = defaultdict(dict)
    for mutant in mutants:
        functions[mutant.file][mutant.function] = None
    return {file: list(each) for file, each in functions.items()}


def reached_of(functions: dict[str, list[str]], pool: Pool, plan: str) -> set[tuple[str, int, int]]:
    """The waits that a plan reaches on any rank."""
    return set.union(*pool.run(reached_by, RANKS[plan], functions, plan))


def judged(pool: Pool, mutant: Mutant, reaching: Sequence[str]) -> dict[str, str]:
    """The row of a mutant: the plan under which it was reported, a finding rather than an error."""
    row = {"wait": str(mutant), "plan": "", "report": "", "reason": ""}
    for plan in reaching[:MOST]:
        try:
            answers = pool.run(reports, RANKS[plan], mutant, plan)
        except (AssertionError, OSError, EOFError) as error:
            pool.stop()  # threads of a run that failed may go on
            row |= {"plan": plan, "report": (str(error).strip().splitlines() or [type(error).__name__])[-1][:160]}
            continue
        if text := next(filter(None, answers), ""):
            row |= {"plan": plan, "report": "".join(filter(str.isprintable, text))[:160]}
            break
    if not row["plan"]:
        row["reason"] = reason_of(mutant, REASONS) or f"not examined; {len(reaching)} plans reach it"
    print(f"{mutant}\n    {row['plan'] or 'not reported'}: {row['report'] or row['reason']}", flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
