"""Waits left out on purpose, one at a time: how many of them the device of paper reports.

    python benchmarks/paper_mutations.py [--rooms NAME ...] [--most N] [--json [FILE]]

For each wait, event and synchronisation in the rooms that use a device, the plans of `PLANS_OF` are run until one of
them has a finding, or an error. With `--json` the table is kept as FILE and beside it with the ending .md, by default
benchmarks/results/paper-mutations-DATE.json.
"""

import argparse
import json
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from paper.mutants import SOURCE, Mutant, mutants_of, reports  # noqa: E402
from paper.plans import RANKS  # noqa: E402
from pool import Pool  # noqa: E402
from ranks import circumstances  # noqa: E402

HOST = ("users, on the host", "optimizer on the host, two ranks", "everything on the host, two ranks", "delayed update",
        "optimizer on the host, clipped", "without guesses", "guesses in bf16",
        "optimizer on the host, zero 3")  # fmt: skip
FLAT = ("zero 3", "zero 2, two microbatches", "overlapped gather", "users", "zero 0", "groups of two",
        "optimizer on the host, zero 3")  # fmt: skip
CUT = ("1f1b", "interleaved", "2bw", "gpipe", "stages, arena")
SPLIT = ("tensor parallel", "tensor parallel, zero 3, selective")
PLANS_OF: dict[str, tuple[str, ...]] = {  # by the beginning of a file's path
    "memory/transfers.py": HOST,
    "offload/": HOST,
    "saved/offload.py": ("everything on the host, two ranks",),
    "checkpoint/writer.py": ("users", "users, on the host"),
    "zero/": (*FLAT, "everything on the host, two ranks"),
    "parts/weights.py": (*FLAT, "optimizer on the host, clipped"),
    "platform/accelerator.py": (*HOST, "users"),
    "tensor/split/": SPLIT,
    "moe/exchange/exchange.py": ("experts", "experts, zero 3", "experts on two machines"),
    "pipeline/run/": (*CUT, "stages and tensor parallel, whole sequences"),
    "comm/collectives.py": ("zero 3", "1f1b"),
    "comm/pending.py": ("zero 3", "zero 2, two microbatches"),
}


SHARED = "only where ranks of the CPU share memory; tensors of a device never go there"
REASONS: dict[tuple[str, str], str] = {  # of those that no plan reports, by file and function
    ("comm/collectives.py", "Comm.side_by_side"): SHARED,
    ("moe/exchange/exchange.py", "ExpertRanks.delivery"): SHARED,
    ("moe/exchange/exchange.py", "_Shown.__enter__"): SHARED,
    ("comm/pending.py", "InPlace.wait_until_read"): SHARED,
    ("comm/collectives.py", "Comm.break_messages"): "a message that never comes, to end a wait after a hang; not read",
    ("comm/pending.py", "Pending.arrives_within"): "only of ranks without an accelerator",
    (
        "memory/transfers.py",
        "Task.wait_on_host",
    ): "of sums that the host reads as one copy left them; no plan here does, unproven",
    (
        "offload/updates.py",
        "HostSum.settle",
    ): "not needed in a run that left a block out in every second step either; unproven",
    (
        "offload/updates.py",
        "Speculations.undo",
    ): "of memory lent again after a skipped step, before the next update ends; no plan here does, unproven",
    ("parts/weights.py", "Weights.__del__"): "not needed in a run whose model outlived its engine either; unproven",
    ("moe/exchange/exchange.py", "ExpertBuffers.share"): "of experts with buffers; no plan here has any",
    (
        "pipeline/run/messages.py",
        "Messages._drop",
    ): "a later message of the pair, awaited before, seems to cover it; unproven",
    ("comm/pending.py", "Pending.wait"): "the wait of the other branch, under a profiler of torch",
}


def main() -> int:
    """Run, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", nargs="*", default=[], help="beginnings of paths below the package; all by default")
    parser.add_argument("--most", type=int, default=0, help="how many of each room; all by default")
    parser.add_argument("--json", nargs="?", const="", metavar="FILE", help="keep the table there, and as .md beside")
    options = parser.parse_args()
    rows: list[dict[str, str]] = []
    pool = Pool(apart=0)
    try:
        for room, plans in PLANS_OF.items():
            if options.rooms and not any(room.startswith(name) for name in options.rooms):
                continue
            files = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
            mutants = [mutant for file in files if file.startswith(room) for mutant in mutants_of(file)]
            for mutant in mutants[: options.most or None]:
                plan, text = judged(pool, mutant, plans)
                reason = "" if plan else REASONS.get((mutant.file, mutant.function), "not examined")
                rows.append({"wait": str(mutant), "plan": plan, "report": text, "reason": reason})
                print(f"{mutant}\n    {plan or 'not reported'}: {text or reason}", flush=True)
    finally:
        pool.stop()
    found = sum(bool(row["plan"]) for row in rows)
    print(f"{found} of {len(rows)} reported")
    by_an_error = sum(bool(re.match(r"\w+Error\b", row["report"])) for row in rows)
    if options.json is not None:
        default = ROOT / "benchmarks" / "results" / f"paper-mutations-{datetime.now(UTC):%Y-%m-%d}.json"
        path = Path(options.json or default)
        kept = {**circumstances(), "tried": len(rows), "reported": found, "by_an_error": by_an_error, "rows": rows}
        path.write_text(json.dumps(kept, indent=1) + "\n")
        path.with_suffix(".md").write_text(markdown(kept))
    return 0


def markdown(kept: dict[str, Any]) -> str:
    """The table as it is stored."""
    lines = [
        f"{kept['reported']} of {kept['tried']} left-out waits are reported, {kept['by_an_error']} of them by an error",
        f"of the run itself and not by a finding; {kept['date']}.",
        "",
        f"Of the rooms {', '.join(PLANS_OF)}. The other waits of the package (supervisor, doctor, parameter server,",
        "optimizers' own collectives, transport, recomputation) were not tried.",
        "",
        "| wait | plan | finding, or the reason why there is none |",
        "|---|---|---|",
    ]
    for row in kept["rows"]:
        wait, text = (each.replace("|", "/") for each in (row["wait"], row["report"] or row["reason"]))
        lines.append(f"| `{wait}` | {row['plan'] or 'none'} | {text} |")
    return "\n".join(lines) + "\n"


def judged(pool: Pool, mutant: Mutant, plans: tuple[str, ...]) -> tuple[str, str]:
    """The plan under which a mutant was reported, and the report."""
    for plan in plans:
        try:
            answers = pool.run(reports, RANKS[plan], mutant, plan)
        except (AssertionError, OSError, EOFError) as error:
            pool.stop()  # threads of a run that failed may go on
            return plan, str(error).strip().splitlines()[-1][:160]
        if text := next(filter(None, answers), ""):
            return plan, "".join(filter(str.isprintable, text))[:160]
    return "", ""


if __name__ == "__main__":
    sys.exit(main())
