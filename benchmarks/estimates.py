"""The error of predictions of the peak of memory: ours, DeepSpeed's, accelerate's, torch's trackers, Megatron's.

    python benchmarks/estimates.py [--quick] [--deepspeed-python PYTHON] [--json FILE] [--markdown FILE]

Every run is real: one or two processes over gloo on this machine's CPUs, a small model, a few steps. Its peak is that
of all bytes that torch's allocator gave out, from before the model was made, on each rank. Each predictor is called by
its own interface, and compared twice: with the bytes that it claims to estimate, and with the whole peak.

- zeroshard: `rehearse` runs the engine of each rank on tensors without values ("fake"), or, for models of transformers,
  on real ones with two and three layers, from which the depth of the run follows ("shallow-real").
- MemTracker and FSDPMemTracker follow their own engines, the plain loop and FSDP2, on tensors without values.
- Megatron's formulas count only states (18 bytes per parameter, or 6 + 12/N) and activations (table 2 of 2205.05198);
  they are compared with our runs at stages 0 and 1.
- DeepSpeed's estimates are of model states in 16-bit training, of its engine; they are compared with its own runs and
  ours. accelerate's are of weights, gradients and optimizer states, for any batch; the command itself takes names
  from a hub, so its functions are called on the model. Neither counts activations.

The exit status is 1 where ours misses a target: 0.1 % of the peak of our models in fp32, 1 % in bf16 and of models of
transformers in the shallow-real mode. Predictors that are not installed are printed as absent.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ranks import DEEPSPEED_ENV, LaunchError, answer, circumstances, launch

BARS = {"fp32": 0.001, "bf16": 0.01}  # of our own models without values
SHALLOW_BAR = 0.01
Row = dict[str, Any]


def runs(quick: bool) -> list[Any]:
    """The runs to measure."""
    from estimates.runs import TALL, WIDE, Run

    ours = [Run(precision=kind, plan={"zero": stage}) for kind in ("fp32", "bf16") for stage in range(4)]
    families = ("gpt2", "llama", "qwen2", "qwen3", "mixtral") if find_spec("transformers") else ()
    theirs = [
        Run(ranks=1, model=family, shape=TALL, precision=kind, plan={"zero": 2}, recompute=again)
        for family in families
        for kind, again in (("fp32", False), ("bf16", True))
    ]
    staged = {"zero": 1, "pipeline_parallel": 2, "microbatches": 4, "pipeline_parallel.balance": "parameters"}
    others = [
        Run(plan={"zero": 1, "microbatches": 2}, optimizer="sgd"),
        Run(precision="bf16", plan={"zero": 3, "microbatches": 2, "clip_norm": 1.0}),
        Run(shape=WIDE, precision="bf16", plan={"zero": 2}),
        Run(shape=WIDE, plan={"zero": 3}),
        Run(ranks=1, precision="bf16", plan={"zero": 0}),
        *(
            Run(plan={**staged, "pipeline_parallel.schedule": name})
            for name in ("gpipe", "1f1b", "zb-h1", "pipedream", "2bw")
        ),
    ]
    peers = [
        Run(engine=engine, ranks=ranks, precision=kind)
        for engine, ranks in (("plain", 1), ("ddp", 2), ("fsdp2", 2))
        for kind in ("fp32", "bf16")
    ]
    peers += [Run(engine="plain", ranks=1, shape=WIDE), Run(engine="fsdp2", shape=WIDE)]
    peers += [Run(engine="plain", ranks=1, model=f, recompute=c) for f in families[:2] for c in (False, True)]
    peers += [Run(engine="deepspeed", precision="bf16", plan={"zero": stage}) for stage in (2, 3)]
    if quick:
        return [*ours[1:8:3], *theirs[4:5], others[6], peers[0], peers[4]]
    return ours + others + theirs + peers


def measured(run: Any, options: argparse.Namespace) -> Row:
    """The peak of each rank and the model states of the first.

    It is the lowest of all launches, and of all ranks where all do the same; `heard_bytes` has each launch.

    Raises:
        LaunchError: the run failed.
    """
    python, env = sys.executable, {}
    if run.engine == "deepspeed":
        python, env = options.deepspeed_python, DEEPSPEED_ENV
    words = ["--rank", json.dumps(asdict(run))]
    found = [launch(__file__, words, run.ranks, python, env, 300.0) for _ in range(options.rounds)]
    heard = [[rank["peak"] for rank in ranks] for ranks in found]
    peaks = [min(column) for column in zip(*heard, strict=True)]
    if "pipeline_parallel" not in run.plan:
        peaks = [min(peaks)] * run.ranks
    return {"peak_bytes": peaks, "states_bytes": found[0][0]["states"], "heard_bytes": heard}


def predictions(run: Any, options: argparse.Namespace) -> list[Row]:
    """The predictions of all predictors that apply to a run."""
    from estimates.predictors import DEEPSPEED, PREDICTORS, NotApplicable

    said: list[Row] = []
    for predictor in PREDICTORS.values():
        row: Row = {"name": predictor.name, "says": predictor.says, "claim": predictor.claim}
        try:
            said.append({**row, "nbytes": predictor.ask(run)})
        except NotApplicable:
            pass
        except Exception as error:  # a failure of one predictor is a result too
            said.append({**row, "nbytes": None, "why": f"{type(error).__name__}: {error}"[:200]})
    if run.precision == "bf16" and run.plan.get("zero") in (2, 3) and run.engine in ("zeroshard", "deepspeed"):
        row = {"name": DEEPSPEED.name, "says": DEEPSPEED.says, "claim": DEEPSPEED.claim}
        said.append({**row, **_deepspeed(run, options)})
    return said


def _deepspeed(run: Any, options: argparse.Namespace) -> Row:
    """DeepSpeed's estimate, asked in the Python that has it."""
    from estimates.predictors import sizes

    if not options.deepspeed_python:
        return {"nbytes": None, "why": "absent: give --deepspeed-python"}
    words = ["--deepspeed-estimate", json.dumps([asdict(run), *sizes(run)])]
    (found,) = launch(__file__, words, 1, options.deepspeed_python, DEEPSPEED_ENV, 300.0)
    return {"nbytes": found["nbytes"]}


def compare(run: Any, options: argparse.Namespace) -> list[Row]:
    """The rows of one run: one per prediction, or one that says why there is none."""
    base: Row = {"run": str(run), **asdict(run)}
    if run.engine == "deepspeed" and not options.deepspeed_python:
        return [{**base, "name": "DeepSpeed's estimate", "why": "absent: give --deepspeed-python"}]
    try:
        base |= measured(run, options)
    except LaunchError as error:
        return [{**base, "name": run.engine, "why": f"the run failed: {str(error)[-300:]}"}]
    peaks, states = base["peak_bytes"], base["states_bytes"]
    rows = []
    for one in predictions(run, options):
        row = {**base, **one}
        if one["nbytes"] is not None:
            row["off_peak"] = worst(one["nbytes"], peaks)
            row["off_claim"] = row["off_peak"] if one["claim"] == "peak" else worst(one["nbytes"], [states])
        rows.append(row)
    return rows


def worst(said: Sequence[int], true: Sequence[int]) -> float | None:
    """The relative error that is farthest from 0, over the ranks; None without a prediction."""
    if not all(true):
        return None
    pairs = [(said[min(rank, len(said) - 1)], peak) for rank, peak in enumerate(true)]
    return max((one / peak - 1 for one, peak in pairs), key=abs)


def bar(row: Row) -> float | None:
    """The largest error allowed for ours in this run."""
    if row["name"] == "zeroshard, shallow-real":
        return SHALLOW_BAR
    return BARS[row["precision"]] if row["name"] == "zeroshard, fake" and row["model"] == "gpt" else None


def missed(rows: Sequence[Row]) -> list[str]:
    """Our predictions that miss their target or are absent."""
    judged = [(row, bar(row)) for row in rows]
    return [
        f"{row['run']}: {row['name']} {row.get('why') or format(row['off_peak'], '+.3%')}"
        for row, limit in judged
        if limit is not None and ("off_peak" not in row or abs(row["off_peak"]) > limit)
    ]


def summary(rows: Sequence[Row]) -> list[Row]:
    """Each predictor over all its runs: how many, the median and the worst error."""
    lines = []
    for name, model in sorted(
        {(row["name"], row["model"] == "gpt") for row in rows}, key=lambda one: (one[0], -one[1])
    ):
        mine = [row for row in rows if row["name"] == name and (row["model"] == "gpt") == model]
        line: Row = {"name": name, "models": "our GPT" if model else "transformers", "asked": len(mine)}
        for which in ("off_claim", "off_peak"):
            errors = sorted((row[which] for row in mine if row.get(which) is not None), key=abs)
            line["failed"] = sum("off_peak" not in row for row in mine)
            line[f"{which}_median"] = statistics.median(errors) if errors else None
            line[f"{which}_worst"] = errors[-1] if errors else None
        lines.append(line)
    return lines


def percent(value: float | None) -> str:
    """A share as text in percent."""
    return "-" if value is None else f"{value:+.2%}" if abs(value) >= 0.0005 else f"{value:+.4%}"


def text(row: Row) -> str:
    """One line on a prediction."""
    if "off_peak" not in row:
        return f"  {row['name']:24} {row['why']}"
    said = max(row["nbytes"]) / 2**20
    return f"  {row['name']:24}{said:9.2f} MiB  {percent(row['off_claim']):>10} {percent(row['off_peak']):>10}"


def markdown(kept: Row) -> str:
    """The result as a Markdown page."""
    head = f"{kept['cpu']}, {kept['cores']} cores, load {kept['load']:.1f}; {kept['versions']}."
    lines = [f"# Predictions of the peak of memory, {kept['date']}", "", head, ""]
    lines += ["Errors against what each says that it estimates, and against the whole peak of the run.", ""]
    lines += ["| Predictor | Models | Runs | Failed | Claim, median | Claim, worst | Peak, median | Peak, worst |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for row in kept["summary"]:
        figures = [percent(row[f"off_{a}_{b}"]) for a in ("claim", "peak") for b in ("median", "worst")]
        lines.append(f"| {row['name']} | {row['models']} | {row['asked']} | {row['failed']} | {' | '.join(figures)} |")
    lines += ["", "| Run | Peak, MiB | States, MiB | Predictor | Says, MiB | Against its claim | Against the peak |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in kept["rows"]:
        peak = f"{max(row['peak_bytes']) / 2**20:.2f}" if "peak_bytes" in row else "-"
        states = f"{row['states_bytes'] / 2**20:.2f}" if row.get("states_bytes") else "-"
        said = f"{max(row['nbytes']) / 2**20:.2f}" if row.get("nbytes") else row["why"].replace("|", "/")[:60]
        off = f"{percent(row.get('off_claim'))} | {percent(row.get('off_peak'))}"
        lines.append(f"| {row['run']} | {peak} | {states} | {row['name']} | {said} | {off} |")
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="some of the runs, launched once")
    parser.add_argument("--only", default="", help="runs whose line has this in it")
    parser.add_argument("--rounds", type=int, help="launches of each run; by default 2")
    parser.add_argument("--deepspeed-python", help="a python that has deepspeed (peers_requirements.txt)")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--markdown", help="file for the table")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--deepspeed-estimate", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 2)
    return options


def be_launched(options: argparse.Namespace) -> None:
    """One rank of a run, or DeepSpeed's estimate."""
    from estimates.predictors import deepspeed_formula
    from estimates.runs import Run, measure

    if options.rank:
        answer(measure(Run(**json.loads(options.rank))))
        return
    fields, parameters, largest = json.loads(options.deepspeed_estimate)
    answer({"nbytes": deepspeed_formula(Run(**fields), parameters, largest)})


def main() -> int:
    """Launch, predict, print, store; or run as a launched process."""
    options = parse()
    if options.rank or options.deepspeed_estimate:
        be_launched(options)
        return 0
    kept: Row = {**circumstances(), "rounds": options.rounds, "rows": []}
    print(f"{kept['cpu']}, {kept['cores']} cores, load {kept['load']:.1f}")
    print(f"  {'':24}{'says':>13}  {'its claim':>10} {'the peak':>10}")
    for run in (run for run in runs(options.quick) if options.only in str(run)):
        rows = compare(run, options)
        kept["rows"] += rows
        peaks = ", ".join(f"{peak:,}" for peak in rows[0].get("peak_bytes", ())) if rows else "nobody was asked"
        print(f"{run}: {peaks}", *map(text, rows), sep="\n", flush=True)
        kept |= {"summary": summary(kept["rows"]), "load_at_end": os.getloadavg()[0]}
        if options.json:
            Path(options.json).write_text(json.dumps(kept, indent=1) + "\n")
        if options.markdown:
            Path(options.markdown).write_text(markdown(kept))
    complaints = missed(kept["rows"])
    print(*complaints, sep="\n", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
