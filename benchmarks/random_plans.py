"""Plans drawn at random from the whole space: each is refused with the way out, or trains like the plain loop.

    python benchmarks/random_plans.py [--count N] [--seed S] [--paper] [--json [FILE]]

Case number S and the N - 1 after it are drawn and checked by `tests/engine/random_plans.py` and its neighbours, on the
worker processes of the tests. A case that fails or hangs is counted, and the next one gets new workers. Each failed
case is printed with its seed, which is enough to repeat it: `--seed SEED --count 1`.

With `--paper` the cases run on a device of paper (tests/paper/) instead: none may have a finding, and all ranks must
launch the operations of each communicator in one order; values are not compared.

With `--json` figures and table are kept as FILE and beside it with the ending .md, by default
benchmarks/results/random-plans-DATE.json. The exit status is 1 if a case failed.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

import torch  # noqa: E402
from engine.random_plans import Case, draw  # noqa: E402
from engine.random_runs import perform  # noqa: E402
from engine.random_verdicts import Verdict, judge, refused  # noqa: E402
from paper.random_runs import on_paper  # noqa: E402
from paper.record import disagreements  # noqa: E402
from pool import Pool  # noqa: E402
from ranks import circumstances  # noqa: E402

KEPT = 2000  # characters of the error of a case
RANK_ERRORS = (AssertionError, OSError, EOFError)  # a rank raised, hung or died


def check(pool: Pool, case: Case) -> Verdict:
    """The verdict on a case, whatever happens in it."""
    verdict = refused(case)
    if verdict is not None:
        return verdict
    with tempfile.TemporaryDirectory(prefix="zeroshard-random-plans-") as folder:
        try:
            answers = [answer[0] for answer in pool.run(perform, case.ranks, [case], folder)]
            if len({answer.get("message") for answer in answers}) > 1:  # ranks waited for one that refused in a step
                pool.stop()
            return judge(case, answers)
        except RANK_ERRORS as error:
            return failed(pool, error)


def failed(pool: Pool, error: Exception) -> Verdict:
    """The verdict on a case that ended in an error of a rank; the pool starts anew."""
    pool.stop()
    words = str(error).replace(f"{ROOT}/", "")
    return Verdict("failed", "", [words[-KEPT:] or type(error).__name__])


def check_on_paper(pool: Pool, case: Case) -> Verdict:
    """The verdict on a case on a device of paper."""
    verdict = refused(case)
    if verdict is not None:
        return verdict
    with tempfile.TemporaryDirectory(prefix="zeroshard-random-plans-") as folder:
        try:
            seen = pool.run(on_paper, case.ranks, case, folder)
        except RANK_ERRORS as error:
            return failed(pool, error)
    findings = [*dict.fromkeys(text for each in seen for text in each.findings)]
    findings += map(str, disagreements([each.launches for each in seen]))
    if findings:
        return Verdict("failed", "", findings)
    if len({each.refused for each in seen}) > 1:  # ranks waited for one that refused in a step
        pool.stop()
    reasons = [each.refused for each in seen if each.refused]
    return Verdict("refused by the engine", reasons[0][:70]) if reasons else Verdict("ran without findings")


def run(first: int, count: int, checked: Callable[[Pool, Case], Verdict] = check) -> dict[str, Any]:
    """Check cases `first` to `first + count - 1`; returns the figures to store."""
    pool, began = Pool(apart=0), time.monotonic()
    kinds: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    failed = []
    try:
        for seed in range(first, first + count):
            case = draw(seed)
            verdict = checked(pool, case)
            kinds[f"{verdict.kind}, compared with {verdict.compared}" if verdict.compared else verdict.kind] += 1
            if verdict.kind.startswith("refused"):
                reasons[f"{verdict.kind}: {verdict.reason}"] += 1
            elif verdict.kind == "failed":
                failed.append({"seed": seed, "case": str(case), "complaints": [c[-KEPT:] for c in verdict.complaints]})
                print(f"seed {seed} failed: {case}", *verdict.complaints, sep="\n  ", flush=True)
            if sys.stdout.isatty():
                print(f"{seed - first + 1} of {count}", end="\r", flush=True)
    finally:
        pool.stop()
    return {
        "first": first,
        "drawn": count,
        "seconds": round(time.monotonic() - began, 1),
        "kinds": dict(kinds.most_common()),
        "refusals": dict(reasons.most_common()),
        "failed": failed,
    }


def lines(kept: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The rows of the table: outcomes and their numbers of cases."""
    rows = [("drawn", kept["drawn"])]
    rows += sorted(kept["kinds"].items())
    return rows + [(f"- {reason}", count) for reason, count in kept["refusals"].items()]


def markdown(kept: Mapping[str, Any]) -> str:
    """The table as it is stored."""
    head = f"{kept['cpu']}, {kept['cores']} cores, load {kept['load']:.1f}, {kept['date']}; {kept['seconds']} s."
    rows = [f"| {name.replace('|', '/')} | {count} |" for name, count in lines(kept)]
    failed = [f"\nSeed {f['seed']} failed: {f['complaints'][0].splitlines()[-1]}" for f in kept["failed"]]
    return "\n".join([head, "", "| cases | number |", "|---|---:|", *rows, *failed]) + "\n"


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="how many cases")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the others follow")
    parser.add_argument("--paper", action="store_true", help="on a device of paper, without comparison of values")
    parser.add_argument("--json", nargs="?", const="", metavar="FILE", help="keep figures there, and a table beside")
    options = parser.parse_args(words)
    if options.count < 1 or options.seed < 0:
        parser.error("--count must be 1 or more, --seed 0 or more")
    if options.json == "":
        kind = "random-plans-paper" if options.paper else "random-plans"
        options.json = str(RESULTS / f"{kind}-{datetime.now(UTC):%Y-%m-%d}.json")
    return options


def main() -> int:
    """Draw, check, print, keep."""
    options = parse()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*None of the inputs have requires_grad.*")
    kept = {**circumstances(), **run(options.seed, options.count, check_on_paper if options.paper else check)}
    width = max(len(str(count)) for _, count in lines(kept))
    print(*(f"{count:{width}}  {name}" for name, count in lines(kept)), sep="\n")
    if options.json:
        path = Path(options.json)
        path.write_text(json.dumps(kept, indent=1) + "\n")
        path.with_suffix(".md").write_text(markdown(kept))
    return bool(kept["failed"])


if __name__ == "__main__":
    sys.exit(main())
