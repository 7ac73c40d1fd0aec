"""Every model of the tests' zoo verified under forty plans, and families under those that split layers: no false alarm.

    python benchmarks/verify_zoo.py [--models NAME ...] [--plans NAME ...] [--json [FILE]]

Each model is trained for two steps under each plan, and in one process; `zeroshard.verification` compares them. Plans
of equally many ranks share their processes. A plan that the engine refuses for a model, such as a pipeline of one that
is no chain, is counted apart. The exit status is 1 if anything differed.

With `--json` figures and table are kept as FILE and beside it with the ending .md, by default
benchmarks/results/verify-zoo-DATE.json.
"""

import argparse
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

import torch  # noqa: E402
from ranks import circumstances  # noqa: E402
from verification.zoo_jobs import MODELS, RANKS, SETTINGS, job, plans_of  # noqa: E402

from zeroshard.verification.run import verify_jobs  # noqa: E402

REFUSALS = ("PlanError", "ModelError", "OptimizerError", "BudgetExceeded", "BatchError")


def verify_model(model: str, plans: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What came of each plan, by its name."""
    found: dict[str, dict[str, Any]] = {}
    for ranks in sorted({RANKS[plan] for plan in plans}):
        names = [plan for plan in plans if RANKS[plan] == ranks]
        for plan, verdict in zip(names, verify_jobs([job(model, plan) for plan in names]), strict=True):
            if isinstance(verdict, Exception):
                kind = "refused" if type(verdict).__name__ in REFUSALS else "failed"
                found[plan] = {"kind": kind, "text": f"{type(verdict).__name__}: {verdict}"}
            else:
                worst = max((row.worst, row.what, row.where) for row in verdict.table)
                found[plan] = {"kind": "equal" if verdict.ok else "differs", "text": str(verdict), "worst": worst}
    return found


def run(models: Sequence[str], plans: Sequence[str]) -> dict[str, Any]:
    """Verify, and print a line for each model."""
    began, rows, bad = time.monotonic(), {}, []
    for model in models:
        start = time.monotonic()
        found = verify_model(model, [plan for plan in plans_of(model) if plan in plans])
        kinds = Counter(each["kind"] for each in found.values())
        worst = max((each["worst"] for each in found.values() if "worst" in each), default=(0.0, "", ""))
        rows[model] = {"kinds": dict(kinds), "worst": worst, "seconds": round(time.monotonic() - start, 1)}
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        print(f"{model:<24} {counts:<36} worst {worst[0]:.1e} ({worst[1]})  {rows[model]['seconds']} s", flush=True)
        for plan, each in found.items():
            if each["kind"] in ("differs", "failed"):
                bad.append({"model": model, "plan": plan, "text": each["text"]})
                print(f"--- {model} under {plan}\n{each['text']}", flush=True)
    return {"models": rows, "plans": list(plans), "bad": bad, "seconds": round(time.monotonic() - began, 1)}


def markdown(kept: Mapping[str, Any]) -> str:
    """The table as it is kept."""
    head = f"{kept['cpu']}, {kept['cores']} cores, load {kept['load']:.1f}, {kept['date']}; {kept['seconds']} s."
    lines = [
        head,
        "",
        "| model | equal | refused | differs or failed | worst relative error |",
        "|---|---:|---:|---:|---:|",
    ]
    for model, row in kept["models"].items():
        kinds = row["kinds"]
        bad = kinds.get("differs", 0) + kinds.get("failed", 0)
        lines.append(
            f"| {model} | {kinds.get('equal', 0)} | {kinds.get('refused', 0)} | {bad} | {row['worst'][0]:.1e} |"
        )
    return "\n".join(lines) + "\n"


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="NAME", help="of the zoo")
    parser.add_argument("--plans", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--json", nargs="?", const="", metavar="FILE", help="keep figures there, and a table beside")
    options = parser.parse_args(words)
    if options.json == "":
        options.json = str(RESULTS / f"verify-zoo-{datetime.now(UTC):%Y-%m-%d}.json")
    return options


def main() -> int:
    """Verify, print, keep."""
    options = parse()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*None of the inputs have requires_grad.*")
    kept = {**circumstances(), **run(options.models, options.plans)}
    total = Counter(kind for row in kept["models"].values() for kind in Counter(row["kinds"]).elements())
    print(f"{len(options.models)} models, {sum(total.values())} runs in {kept['seconds']} s: {dict(total)}")
    if options.json:
        path = Path(options.json)
        path.write_text(json.dumps(kept, indent=1) + "\n")
        path.with_suffix(".md").write_text(markdown(kept))
    return bool(kept["bad"])


if __name__ == "__main__":
    sys.exit(main())
