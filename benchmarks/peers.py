"""One training step of zeroshard beside DistributedDataParallel, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed.

    python benchmarks/peers.py [--quick] [--deepspeed-python PYTHON] [--json FILE]
    python benchmarks/peers.py --device cuda --ranks N [--missing]      # GPUs, over NCCL

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
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from peer_engines import BACKENDS, ENGINES, SHAPES, WARM, Case
from ranks import LaunchError, circumstances, launch, own_loopback

RANKS = 2  # by default
TOLERANCE = 1e-4  # relative, between the fp32 losses of the engines
FULL = {"sizes": "25M,100M", "tokens": "64,512", "precisions": "fp32,bf16", "rounds": 5, "steps": 20}
QUICK = {"sizes": "25M", "tokens": "64", "precisions": "fp32", "rounds": 2, "steps": 8}
SUMMED = ("counted_bytes",)  # over the ranks; the loopback device already sees both
# The worst rank; the others are means over ranks.
SLOWEST = ("step_s", "startup_s", "peak_rss", "base_rss", "pss", "device_peak")
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


def judge(rows: Sequence[Row], case: Case) -> list[Row]:
    """The verdicts on the targets that concern these engines. Those in seconds are given by CPU time too.

    On GPUs there are targets for the time of a step alone.
    """
    by_name = {row["engine"]: row for row in rows}
    judged = []
    for bar in bars(case.tokens):
        if (case.device != "cpu" and bar.figure != "step_s") or bar.ours not in by_name or bar.theirs not in by_name:
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
    words = [name, case.size, str(case.tokens), case.precision, case.device, str(steps)]
    python, env = sys.executable, more_env
    if ENGINES[name].family == "deepspeed":
        own = {"DS_ACCELERATOR": case.device, "DS_BUILD_OPS": "0"}
        python, env = options.deepspeed_python, {**own, **(more_env or {})}
    return launch(Path(__file__).with_name("peer_engines.py"), words, case.ranks, python, env, options.timeout)


def cases(sizes: str, tokens: str, precisions: str, device: str = "cpu", ranks: int = RANKS) -> list[Case]:
    """All combinations of three comma-separated options."""
    parts = (sizes.split(","), map(int, tokens.split(",")), precisions.split(","))
    return [Case(size, count, precision, device, ranks) for size, count, precision in product(*parts)]


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
        f"{first['precision']}, {first['ranks']} ranks on {first['device']}",
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
            + (f"{row['device_peak'] / 2**30:9.2f} GiB of the device" if row["device_peak"] else "")
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
    missing = absent(options)
    barred = {name for bar in bars(64) for name in (bar.ours, bar.theirs)}
    default = (name for name in ENGINES if name not in missing and (name in barred or not options.quick))
    wanted = options.engines.split(",") if options.engines else list(default)
    wanted = [name for name in wanted if not (options.missing and name in missing)]
    for name in wanted:
        if name not in ENGINES or name in missing:
            can = ", ".join(known for known in ENGINES if known not in missing)
            sys.exit(f"--engines names {name!r}; here there are {can}. DeepSpeed's need --deepspeed-python PYTHON.")
    return [name for name in ENGINES if name in wanted]


def absent(options: argparse.Namespace) -> dict[str, str]:
    """The engines that cannot run here, and why."""
    found = {}
    for name, engine in ENGINES.items():
        if engine.family == "deepspeed" and not options.deepspeed_python:
            found[name] = "deepspeed is missing"
        if engine.transport == "shared" and options.device != "cpu":
            found[name] = "GPUs share no memory"
    return found


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
    parser.add_argument(
        "--deepspeed-python",
        default=sys.executable if find_spec("deepspeed") else None,
        help="a python that has deepspeed (peers_requirements.txt); by default this one, if it has",
    )
    parser.add_argument("--device", default="cpu", choices=tuple(BACKENDS), help="cuda needs a GPU for each rank")
    parser.add_argument("--ranks", type=int, default=RANKS, help=f"processes, by default {RANKS}")
    parser.add_argument("--missing", action="store_true", help="leave out engines that are not installed, and say so")
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
    own = options.device == "cpu" and own_loopback()  # NCCL takes no part in a namespace with a loopback device alone
    kept = {**circumstances(), "ranks": options.ranks, "device": options.device, "own_loopback": own}
    kept |= {"rounds": options.rounds, "steps": options.steps}
    print(
        f"{kept['cpu']}, {kept['cores']} cores, load {kept['load']:.1f}, {options.rounds} rounds, {options.steps} steps"
    )
    if not own:
        print("The loopback device is the machine's own here, so bytes on the wire include whatever else uses it.")
    for family in {ENGINES[name].family for name in names}:
        if family in ("deepspeed", "zeroshard"):
            first = next(name for name in names if ENGINES[name].family == family)
            start(first, Case("1M", 8, "fp32", options.device, options.ranks), 1, options)
    asked = options.engines.split(",") if options.engines else list(ENGINES)
    missing = {name: why for name, why in absent(options).items() if name in asked}
    for name, why in missing.items() if options.missing else ():
        print(f"{name}: left out, {why}")
    kept |= {"rows": [], "bars": [], "failed": [], "missing": missing}
    complaints = []
    for case in cases(options.sizes, options.tokens, options.precisions, options.device, options.ranks):
        rows, failed = turns(case, names, options)
        complaints += [f"{name} failed. {words}" for name, words in failed.items()]
        judged = judge(rows, case)
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
