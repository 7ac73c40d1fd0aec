"""Waits left out on purpose, one at a time: how many of them the device of paper reports.

    python benchmarks/paper_mutations.py [--rooms NAME ...] [--write]

For each wait, event and synchronisation in the rooms that use a device, the plans of `PLANS_OF` are run on two ranks
until one of them has a finding (or an error). With `--write` the table is kept in benchmarks/results/.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from paper.mutants import SOURCE, Mutant, mutants_of, reports  # noqa: E402
from paper.plans import RANKS  # noqa: E402
from pool import Pool  # noqa: E402

HOST = ("users, on the host", "optimizer on the host, two ranks", "everything on the host, two ranks", "delayed update",
        "optimizer on the host, clipped", "without guesses", "guesses in bf16")  # fmt: skip
FLAT = ("zero 3", "zero 2, two microbatches", "overlapped gather", "users")
CUT = ("1f1b", "interleaved", "2bw")
SPLIT = ("tensor parallel", "tensor parallel, zero 3, selective")
PLANS_OF: dict[str, tuple[str, ...]] = {  # by the beginning of a file's path
    "memory/transfers.py": HOST,
    "offload/": HOST,
    "saved/offload.py": ("everything on the host, two ranks",),
    "checkpoint/writer.py": ("users", "users, on the host"),
    "zero/": (*FLAT, "everything on the host, two ranks"),
    "parts/weights.py": (*FLAT, "optimizer on the host, two ranks"),
    "platform/accelerator.py": (*HOST, "users"),
    "tensor/split/": SPLIT,
    "moe/exchange/exchange.py": ("experts", "experts, zero 3", "experts on two machines"),
    "pipeline/run/": (*CUT, "stages and tensor parallel"),
    "comm/collectives.py": ("zero 3", "1f1b"),
    "comm/pending.py": ("zero 3", "zero 2, two microbatches"),
}


def main() -> int:
    """Run, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", nargs="*", default=[], help="beginnings of paths below the package; all by default")
    parser.add_argument("--most", type=int, default=0, help="how many of each room; all by default")
    parser.add_argument("--write", action="store_true", help="keep the table")
    options = parser.parse_args()
    rows: list[tuple[Mutant, str, str]] = []
    pool = Pool(apart=0)
    try:
        for room, plans in PLANS_OF.items():
            if options.rooms and not any(room.startswith(name) for name in options.rooms):
                continue
            files = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
            mutants = [mutant for file in files if file.startswith(room) for mutant in mutants_of(file)]
            for mutant in mutants[: options.most or None]:
                rows.append((mutant, *judged(pool, mutant, plans)))
                print(f"{mutant}\n    {rows[-1][1] or 'not reported'}: {rows[-1][2]}", flush=True)
    finally:
        pool.stop()
    found = sum(bool(plan) for _, plan, _ in rows)
    print(f"{found} of {len(rows)} reported")
    if options.write:
        lines = [
            f"{found} of {len(rows)} left-out waits are reported.",
            "",
            "| wait | plan | finding |",
            "|---|---|---|",
        ]
        lines += [f"| `{mutant}` | {plan or 'none'} | {text.replace('|', '/')} |" for mutant, plan, text in rows]
        (ROOT / "benchmarks" / "results" / "paper-mutations.md").write_text("\n".join(lines) + "\n")
    return 0


def judged(pool: Pool, mutant: Mutant, plans: tuple[str, ...]) -> tuple[str, str]:
    """The plan under which a mutant was reported, and the report."""
    for plan in plans:
        try:
            answers = pool.run(reports, RANKS[plan], mutant, plan)
        except AssertionError as error:
            return plan, str(error).strip().splitlines()[-1][:200]
        if text := next(filter(None, answers), ""):
            return plan, text[:200]
    return "", ""


if __name__ == "__main__":
    sys.exit(main())
