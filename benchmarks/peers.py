"""One training step of zeroshard beside DistributedDataParallel, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed.

    python benchmarks/peers.py [--quick] [--deepspeed-python PYTHON] [--json FILE]

Two processes with one thread each on this machine, over gloo or, for zeroshard, shared memory too; the same GPT, the
same batch, AdamW as each engine runs it fastest: with `fused=True`, but for zeroshard, which has a loop of its own
where the user asks for none of torch's. A launch is a fresh pair of processes of one engine, and the engines take turns
(A B C ... A B C ...). Every figure is a median over rounds of medians over steps; ratios are of such medians.

- CPU seconds (user and system, all threads, per rank and step) are steadier than wall time where other work shares the
  cores. With two ranks on two cores they bound the step from below.
- bf16: zeroshard, FSDP2 and DeepSpeed compute with bf16 parameters beside fp32 masters. DistributedDataParallel has no
  masters: its parameters are fp32 and the forward runs under autocast, as its users do; `local` likewise.
- `local` is the lower bound, the plain loop in two processes that do not communicate. Its loss is not compared.
- Wire: all bytes that the loopback device sent per step, headers included, beside the count of zeroshard's comm.
- Start-up: from before the imports to the end of the first step. One launch per Python goes ahead, unmeasured, so that
  DeepSpeed's extensions are built and files are in memory.

The exit status is 1 where fp32 losses differ by more than 1e-4, since then the engines did not train the same model,
where an engine failed, or where one has another torch.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from peer_engines import ENGINES, SHAPES, WARM, Case
from ranks import LaunchError, circumstances, launch, own_loopback

RANKS = 2
TOLERANCE = 1e-4  # relative, between the fp32 losses of the engines
DEEPSPEED_ENV = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
FULL = {"sizes": "25M,100M", "tokens": "64,512", "precisions": "fp32,bf16", "rounds": 5, "steps": 20}
QUICK = {"sizes": "25M", "tokens": "64", "precisions": "fp32", "rounds": 2, "steps": 8}
SUMMED = ("counted_bytes",)  # over the ranks; the loopback device already sees both
SLOWEST = ("step_s", "startup_s", "peak_rss", "base_rss", "pss")  # the worst rank; the others are means over ranks
Row = dict[str, Any]


@dataclass(frozen=True)
class Bar:
    """A target of zeroshard: `ours` at most `limit` times `theirs`, or below it."""

    ours: str
    theirs: str
    figure: str
    limit: float
    strict: bool = False

    def reached(self, ratio: float) -> bool:
        """Whether this ratio of ours to theirs is good enough."""
        return ratio < self.limit if self.strict else ratio <= self.limit


def bars(tokens: int) -> list[Bar]:
    """All targets for a batch of this many tokens per rank."""
    steps = [Bar(f"zero{stage}", peer, "step_s", 1.0) for stage in range(3) for peer in ("ddp", "ddp-zro")]
    steps += [Bar("zero3", "ddp", "step_s", 1.1), Bar("zero3", "fsdp2", "step_s", 0.8)]
    steps += [Bar(f"zero{stage}", f"deepspeed{stage}", "step_s", 0.7) for stage in (1, 2, 3)]
    if tokens == 64:
        steps += [Bar(f"zero{stage}-shared", "ddp", "step_s", 0.85) for stage in range(4)]
    peers = {0: ["ddp"], 1: ["ddp-zro", "deepspeed1"], 2: ["deepspeed2"], 3: ["fsdp2", "deepspeed3"]}
    pairs = [(f"zero{stage}{way}", peer) for way in ("", "-shared") for stage, names in peers.items() for peer in names]
    return steps + [Bar(*pair, figure, 1.0, strict=True) for figure in ("peak_rss", "startup_s") for pair in pairs]


def judge(rows: Sequence[Row], tokens: int) -> list[Row]:
    """The verdicts on the targets that concern these engines. Those in seconds are given by CPU time too."""
    by_name = {row["engine"]: row for row in rows}
    judged = []
    for bar in bars(tokens):
        if bar.ours not in by_name or bar.theirs not in by_name:
            continue
        ours, theirs = by_name[bar.ours], by_name[bar.theirs]
        ratio = ours[bar.figure] / theirs[bar.figure]
        verdict = {**asdict(bar), "ratio": ratio, "reached": bar.reached(ratio)}
        cpu = {"step_s": "cpu_s", "startup_s": "startup_cpu_s"}.get(bar.figure)
        if cpu:
            verdict["cpu_ratio"] = ours[cpu] / theirs[cpu]
            verdict["cpu_reached"] = bar.reached(verdict["cpu_ratio"])
        judged.append(verdict)
    return judged


def combine(ranks: Sequence[Row]) -> Row:
    """One launch from the answers of its ranks."""
    whole: Row = {"parameters": ranks[0]["parameters"], "versions": ranks[0]["versions"]}
    for name in (name for name in ranks[0] if name not in whole):
        values = [rank[name] for rank in ranks]
        if None in values:
            whole[name] = None
        elif name in SUMMED:
            whole[name] = sum(values)
        else:
            whole[name] = max(values) if name in SLOWEST else statistics.fmean(values)
    return whole


def summarise(name: str, case: Case, rounds: Sequence[Row]) -> Row:
    """The row of one engine: medians over rounds, and each round's seconds."""
    engine = ENGINES[name]
    row: Row = {"engine": name, "family": engine.family, "stage": engine.stage, "transport": engine.transport}
    row |= asdict(case)
    for figure, value in rounds[0].items():
        numeric = isinstance(value, (int, float))
        row[figure] = statistics.median(r[figure] for r in rounds) if numeric else value
    for figure in ("step_s", "cpu_s"):
        row[f"{figure}_rounds"] = [r[figure] for r in rounds]
    return row


def turns(case: Case, names: Sequence[str], options: argparse.Namespace) -> tuple[list[Row], dict[str, str]]:
    """Rows of all engines, launched in turns, and the failures by engine."""
    launches: dict[str, list[Row]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    for number in range(options.rounds):
        for name in (name for name in names if name not in failed):
            if sys.stdout.isatty():
                print(f"{case.size} {case.tokens} {case.precision} {number + 1} {name:16}", end="\r", flush=True)
            try:
                launches[name].append(combine(start(name, case, options.steps, options)))
            except LaunchError as error:
                failed[name] = str(error)
    rows = [summarise(name, case, launches[name]) for name in names if name not in failed]
    base = next((row for row in rows if row["engine"] == "ddp"), None)
    for row in rows:
        row["ratio_to_ddp"] = row["step_s"] / base["step_s"] if base else None
        row["cpu_ratio_to_ddp"] = row["cpu_s"] / base["cpu_s"] if base else None
    return rows, failed


def start(
    name: str, case: Case, steps: int, options: argparse.Namespace, more_env: Mapping[str, str] | None = None
) -> list[Row]:
    """One launch of one engine; the answers of its ranks."""
    words = [name, case.size, str(case.tokens), case.precision, str(steps)]
    python, env = sys.executable, more_env
    if ENGINES[name].family == "deepspeed":
        python, env = options.deepspeed_python, {**DEEPSPEED_ENV, **(more_env or {})}
    return launch(Path(__file__).with_name("peer_engines.py"), words, RANKS, python, env, options.timeout)


def cases(sizes: str, tokens: str, precisions: str) -> list[Case]:
    """All combinations of three comma-separated options."""
    parts = (sizes.split(","), map(int, tokens.split(",")), precisions.split(","))
    return [Case(size, count, precision) for size, count, precision in product(*parts)]


def apart(rows: Sequence[Row]) -> str | None:
    """A sentence on the engines whose fp32 losses differ; None where all agree."""
    losses = {row["engine"]: row["loss"] for row in rows if row["engine"] != "local" and row["precision"] == "fp32"}
    middle = statistics.median(losses.values()) if losses else 0.0
    reach = TOLERANCE / 2 * abs(middle)  # so that no two are further apart than the tolerance
    far = [f"{name} {loss:.6f}" for name, loss in losses.items() if not abs(loss - middle) <= reach]
    return f"fp32 losses differ from their median {middle:.6f}: {', '.join(far)}" if far else None


def mixed(rows: Sequence[Row]) -> str | None:
    """A sentence if not all engines run on the same torch, else None."""
    found = {row["versions"]["torch"].partition("+")[0] for row in rows}
    return f"the engines ran on different torch versions, {', '.join(sorted(found))}" if len(found) > 1 else None


def table(rows: Sequence[Row]) -> str:
    """For people: one line per engine."""
    first = rows[0]
    lines = [
        f"\n{first['size']} ({first['parameters']:,} parameters), {first['tokens']} tokens per rank, "
        f"{first['precision']}, {RANKS} ranks",
        f"{'':15}{'step':>9}{'':7}{'CPU':>9}{'':7}{'peak RSS':>9}{'PSS':>7}{'imports':>9}"
        f"{'start-up':>9}{'CPU':>6}{'wire':>9}{'counted':>9}{'faults':>8}{'loss':>10}",
        f"{'':15}{'ms':>9}{'/ DDP':>7}{'ms':>9}{'/ DDP':>7}{'MiB':>9}{'MiB':>7}{'MiB':>9}"
        f"{'s':>9}{'s':>6}{'MB':>9}{'off by':>9}{'':>8}",
    ]
    for row in rows:
        counted, wire = row["counted_bytes"], row["wire_bytes"]
        off = f"{100 * (wire / counted - 1):+.2f} %" if counted and row["transport"] != "shared" else "-"
        ratios = [f"{row[name]:.2f}" if row[name] else "-" for name in ("ratio_to_ddp", "cpu_ratio_to_ddp")]
        lines.append(
            f"{row['engine']:15}{row['step_s'] * 1e3:9.1f}{ratios[0]:>7}{row['cpu_s'] * 1e3:9.1f}{ratios[1]:>7}"
            f"{row['peak_rss'] / 2**20:9.0f}{row['pss'] / 2**20:7.0f}{row['base_rss'] / 2**20:9.0f}"
            f"{row['startup_s']:9.2f}{row['startup_cpu_s']:6.2f}{wire / 1e6:9.1f}{off:>9}"
            f"{row['minor_faults']:8.0f}{row['loss']:10.5f}"
        )
    return "\n".join(lines)


def verdicts(judged: Sequence[Row]) -> str:
    """For people: one line per bar."""
    lines = []
    for bar in judged:
        sign, mark = "<" if bar["strict"] else "<=", "pass" if bar["reached"] else "FAIL"
        line = f"  {mark}  {bar['figure']:9} {bar['ours']} / {bar['theirs']} {sign} {bar['limit']:.2f}"
        line = f"{line:52} {bar['ratio']:.2f}"
        if "cpu_ratio" in bar:
            line += f"   CPU {bar['cpu_ratio']:.2f} {'pass' if bar['cpu_reached'] else 'FAIL'}"
        lines.append(line)
    return "\n".join(["bars", *(lines or ["  none of their engines ran"])])


def available(options: argparse.Namespace) -> list[str]:
    """The engines to launch, in the order of `ENGINES`; under `--quick` only those that a target names."""
    missing = [] if options.deepspeed_python else [name for name in ENGINES if ENGINES[name].family == "deepspeed"]
    barred = {name for bar in bars(64) for name in (bar.ours, bar.theirs)}
    default = (name for name in ENGINES if name not in missing and (name in barred or not options.quick))
    wanted = options.engines.split(",") if options.engines else list(default)
    for name in wanted:
        if name not in ENGINES or name in missing:
            can = ", ".join(known for known in ENGINES if known not in missing)
            sys.exit(f"--engines names {name!r}; here there are {can}. DeepSpeed's need --deepspeed-python PYTHON.")
    return [name for name in ENGINES if name in wanted]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"the engines with bars alone, and {QUICK}")
    parser.add_argument("--sizes", help=f"of {', '.join(SHAPES)}; by default {FULL['sizes']}")
    parser.add_argument("--tokens", help=f"per rank; by default {FULL['tokens']}")
    parser.add_argument("--precisions", help=f"by default {FULL['precisions']}")
    parser.add_argument("--engines", help=f"by default all that can run, of {', '.join(ENGINES)}")
    parser.add_argument("--rounds", type=int, help=f"launches of each engine; by default {FULL['rounds']}")
    parser.add_argument("--steps", type=int, help=f"timed steps, after {WARM} others; by default {FULL['steps']}")
    parser.add_argument("--deepspeed-python", help="a python that has deepspeed (peers_requirements.txt)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that a launch may take")
    parser.add_argument("--json", help="file for the figures, written anew after each group")
    options = parser.parse_args()
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if unknown := set(options.sizes.split(",")) - set(SHAPES):
        parser.error(f"--sizes names {', '.join(unknown)}; there are {', '.join(SHAPES)}")
    return options


def main() -> int:
    """Launch, print, keep."""
    options = parse()
    names = available(options)
    own = own_loopback()
    kept = {**circumstances(), "ranks": RANKS, "rounds": options.rounds, "steps": options.steps, "own_loopback": own}
    print(
        f"{kept['cpu']}, {kept['cores']} cores, load {kept['load']:.1f}, {options.rounds} rounds, {options.steps} steps"
    )
    if not own:
        print("The loopback device is the machine's own here, so bytes on the wire include whatever else uses it.")
    for family in {ENGINES[name].family for name in names}:
        if family in ("deepspeed", "zeroshard"):
            first = next(name for name in names if ENGINES[name].family == family)
            start(first, Case("1M", 8, "fp32"), 1, options)
    kept |= {"rows": [], "bars": [], "failed": []}
    complaints = []
    for case in cases(options.sizes, options.tokens, options.precisions):
        rows, failed = turns(case, names, options)
        complaints += [f"{name} failed. {words}" for name, words in failed.items()]
        judged = judge(rows, case.tokens)
        if rows:
            print(table(rows), verdicts(judged), sep="\n", flush=True)
            complaints += [words for words in (apart(rows), mixed(rows)) if words]
        kept["rows"] += rows
        kept["bars"] += [{**asdict(case), **bar} for bar in judged]
        kept["failed"] += [{**asdict(case), "engine": name} for name in failed]
        if options.json:
            kept["load_at_end"] = os.getloadavg()[0]
            Path(options.json).write_text(json.dumps(kept, indent=1) + "\n")
    print(*complaints, sep="\n", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
