"""From the start of a process to the end of its first step: zeroshard beside DistributedDataParallel.

    python benchmarks/startup.py [--pairs N] [--size 25M] [--model tiny] [--part scripts|commands] [--out NAME]

Scripts are those of `peers.py`: two ranks with one thread each, the same GPT and batch, from before the imports to the
end of the first step; CPU is the mean over ranks. Commands are `zeroshard train --ranks 2` beside a script with the
same model, text, batch and optimizer (`startup_ddp.py`), under torchrun and in two plain processes, from the command to
the end of the first step; CPU is user and system time of every process of the job, launchers included.

In each round all are launched once, one right after the other, in an order that turns round by round; a ratio is the
median over rounds of ours by the base in the same round, in brackets its interval as in `before_after.py`. One round
goes ahead, unmeasured, so that files are in memory. With `--out NAME` the figures are kept as
benchmarks/results/NAME.json.
"""

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import peers
import psutil
from before_after import RESULTS, Measured, estimate
from peer_engines import Case
from ranks import LaunchError, circumstances, launch, launched_path

HERE = Path(__file__).parent
SCRIPTS = ("zero0", "zero1-shared", "zero3", "zero3-shared")
TOKENS, SEQUENCE, ROWS = 64, 256, 4
LAST = "step 1/"  # begins the line after the first step
Launch = Callable[[], Measured]


def script(name: str, options: argparse.Namespace) -> Measured:
    """One launch of an engine of `peers.py`."""
    whole = peers.combine(peers.start(name, Case(options.size, TOKENS, "fp32"), 1, options))
    return Measured(whole["startup_cpu_s"], whole["startup_s"])


def command(words: list[str], sizes: set[str]) -> Measured:
    """One launch of a command, until it prints the line of its first step.

    Args:
        sizes: gets the number of parameters that the job prints.
    """
    threads = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env = {**os.environ, **threads, "PYTHONPATH": launched_path(HERE.parent / "src")}
    began, said = time.perf_counter(), ""
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process,
        ended(psutil.Process(process.pid)) as tree,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(LAST):
                return Measured(cpu_seconds(tree), time.perf_counter() - began)
            sizes |= set(re.findall(r"([\d,]+) parameters", line))
            said += line
    raise LaunchError(f"no first step from {' '.join(words)}: {said[-2000:]}")


def plain_ranks(words: list[str], sizes: set[str]) -> Measured:
    """One launch of a script in processes that nothing but this one starts."""
    answers = launch(words[0], words[1:], peers.RANKS)
    sizes |= {answer["parameters"] for answer in answers}
    return Measured(sum(answer["cpu_s"] for answer in answers), max(answer["wall_s"] for answer in answers))


@contextlib.contextmanager
def ended(tree: psutil.Process) -> Iterator[psutil.Process]:
    """End a process and all that it started, in the end."""
    try:
        yield tree
    finally:
        for process in [*tree.children(recursive=True), tree]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def cpu_seconds(tree: psutil.Process) -> float:
    """User and system time so far of a process and all that it started, those that have ended included."""
    total = 0.0
    for process in [tree, *tree.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])  # of itself, then of children that it has waited for
    return total


def commands(options: argparse.Namespace, folder: str, sizes: set[str]) -> dict[str, Launch]:
    """The jobs that train the built-in model on the standard library, the base first."""
    job = [str(HERE / "startup_ddp.py"), options.model, str(SEQUENCE), str(ROWS)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(peers.RANKS), "--standalone"]
    train = [sys.executable, "-m", "zeroshard", "train", "--ranks", str(peers.RANKS), "--model", options.model]
    train += ["--sequence", str(SEQUENCE), "--batch-per-rank", str(ROWS), "--no-checkpoint", "--out", folder]
    return {
        "torchrun ddp": partial(command, [*torchrun, *job], sizes),
        "plain ddp": partial(plain_ranks, job, sizes),
        "zeroshard train": partial(command, [*train, "--device", "cpu"], sizes),
        "zeroshard train --zero 0": partial(
            command, [*train, "--device", "cpu", "--zero", "0", "--transport", "network"], sizes
        ),
    }


def rounds(launches: Mapping[str, Launch], pairs: int) -> dict[str, list[Measured]]:
    """Every launch once per round."""
    found: dict[str, list[Measured]] = {name: [] for name in launches}
    names = list(launches)
    for number in range(-1, pairs):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            measured = launches[name]()
            if number >= 0:
                found[name].append(measured)
    return found


def judge(found: Mapping[str, list[Measured]], base: str) -> dict[str, Any]:
    """Medians of each launch, and of its ratios to the base."""
    rows: dict[str, Any] = {}
    for name in found:
        rows[name] = {"base": base}
        for figure in Measured._fields:
            own, others = ([getattr(each, figure) for each in found[which]] for which in (name, base))
            ratio = estimate([one / other for one, other in zip(own, others, strict=True)])
            rows[name][figure] = {"seconds": statistics.median(own), "rounds": own, "ratio": asdict(ratio)}
    return rows


def table(title: str, rows: Mapping[str, Any]) -> str:
    """For people: one line per launch."""
    lines = [f"\n{title}", f"{'':28}{'CPU s':>8}{'/ base':>26}{'wall s':>9}{'/ base':>26}"]
    for name, row in rows.items():
        line = f"{name:28}"
        for figure in Measured._fields:
            ratio = row[figure]["ratio"]
            interval = f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
            line += f"{row[figure]['seconds']:{8 + (figure == 'wall')}.2f}{interval:>26}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--size", default="25M", help="of the scripts' model")
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS), help="beside ddp")
    parser.add_argument("--model", default="tiny", help="of the commands")
    parser.add_argument("--part", choices=("scripts", "commands"), help="only one of the two")
    parser.add_argument("--out", help="keep the figures under this name")
    options = parser.parse_args()
    options.timeout = 600.0
    kept: dict[str, Any] = {**circumstances(), "pairs": options.pairs, "size": options.size, "model": options.model}
    if options.part != "commands":
        launches = {name: partial(script, name, options) for name in ("ddp", *options.scripts)}
        kept["scripts"] = judge(rounds(launches, options.pairs), "ddp")
        print(table(f"scripts, {options.size}: / ddp", kept["scripts"]), flush=True)
    if options.part != "scripts":
        sizes: set[str] = set()
        with tempfile.TemporaryDirectory() as folder:
            found = rounds(commands(options, folder, sizes), options.pairs)
        if len(sizes) != 1:
            sys.exit(f"the jobs trained different models, of {', '.join(sorted(sizes))} parameters")
        for base in ("torchrun ddp", "plain ddp"):
            kept[f"commands / {base}"] = judge(found, base)
            print(table(f"commands, {options.model}: / {base}", kept[f"commands / {base}"]), flush=True)
    if options.out:
        (RESULTS / f"{options.out}.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
