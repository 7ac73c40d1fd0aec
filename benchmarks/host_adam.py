"""One AdamW step on the host: the kernel against memory itself, against its fallbacks, and against its peers.

    python benchmarks/host_adam.py [--quick] [--elements N] [--deepspeed-python PYTHON] [--threads N] [--json FILE]

Every row takes a bf16 gradient of n elements to new bf16 parameters (the last two from gradients as their system holds
them: fp32 for DeepSpeed, which sends them so). All rows run in one process, in a new random order each round, so that
other load of the machine affects all alike. Rows with fp32 states share them, and their gradient if it has the same
type: where pages lie changes a row by a fifth and more. A row's figure is CPU time of the process per element, the
lower quartile over rounds, since other processes can only add to it; a ratio is the median of the rounds' own ratios,
since the bandwidth of a shared machine comes and goes.

    traffic        the bytes of an update with fp32 states, and no arithmetic
    c++            the kernel
    torch          the same update in torch's operations, without a compiler
    compile        the same update by torch.compile, whose sums and products may be fused
    c++ bf16, 8bit, split   moments in bf16, in 8 bits; master weights as bf16 and remainder
    fused          torch's fused AdamW, with the cast of the gradient before and of the parameters after it
    deepspeed      its own sequence: grad.mul_, DeepSpeedCPUAdam, copy to bf16
    memory         an update in memory: the kernel with gradients in fp32 and no 16-bit parameters
    fused memory   torch's fused AdamW alone

DeepSpeed takes part if this Python can import it or, with --deepspeed-python, another one with the same torch
(peers_requirements.txt), which then runs all rows. It builds an extension at its first start, which takes minutes.
"""

import argparse
import ctypes
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from operator import truediv
from pathlib import Path
from typing import Any

from ranks import answer, circumstances, launch

Row = Callable[[], Any]
GROUP = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
FACTOR = 0.5
BARS = [  # row, peer's row, the least ratio of times "their" / "our" with AVX-512, that with AVX2, and its meaning
    ("c++", "traffic", 0.95, 0.90, "speed of the same traffic without arithmetic"),
    ("c++", "deepspeed", 1.5, 1.4, "times as fast as DeepSpeed's sequence"),
    ("c++", "fused", 1.7, 1.5, "times as fast as torch's fused AdamW and two casts"),
    ("memory", "fused memory", 1.0, 1.0, "times as fast as torch's fused AdamW in memory"),
    ("c++", "compile", 1.0, 1.0, "times as fast as torch.compile's loop"),
]


def our_rows(n: int, threads: int, gradient: Any, out: Any, full: Any, in_fp32: Any) -> dict[str, Row]:
    """zeroshard's; `full` are the states, which all rows with fp32 states share, `in_fp32` a gradient in fp32."""
    import torch

    from zeroshard.optim.host import adam
    from zeroshard.optim.host.adam import adam_update, describe, using
    from zeroshard.optim.host.states import Blockwise, HostStates, Scalars, StateSplit

    scalars = Scalars.of(GROUP, 5, decoupled=True)
    small = HostStates(torch.randn(n), full.exp_avg.bfloat16(), full.exp_avg_sq.bfloat16())
    codes = HostStates(small.master, Blockwise.encode(full.exp_avg, True), Blockwise.encode(full.exp_avg_sq, False))
    halves = HostStates(StateSplit.of(small.master), full.exp_avg, full.exp_avg_sq)

    def row(states: HostStates, name: str = "c++", into: Any = out, given: Any = gradient) -> Row:
        def update() -> None:
            with using(name):
                adam_update(given, FACTOR, scalars, states, states, into, threads)

        return update

    def traffic() -> None:
        update = describe(gradient, 0.0, scalars, full, full, out)  # values stay as they are
        adam.library().zeroshard_traffic(ctypes.byref(update), threads)

    return {
        "traffic": traffic,
        "c++": row(full),
        "torch": row(full, "torch"),
        "compile": compiled_row(full, scalars, gradient, out),
        "c++ bf16": row(small),
        "c++ 8bit": row(codes),
        "c++ split": row(halves, into=None),
        "memory": row(full, into=None, given=in_fp32),
    }


def compiled_row(states: Any, scalars: Any, gradient: Any, out: Any) -> Row:
    """The update of `tiled.py` as torch.compile makes it; its C++ wrapper, since the other one holds the GIL."""
    import torch

    def adam(gradient: Any, p: Any, m: Any, v: Any, out: Any) -> None:
        g = gradient.float() * FACTOR
        new_m = m + (g - m) * scalars.weight1
        new_v = v * scalars.beta2 + g * scalars.weight2 * g
        new_p = p * scalars.decay - new_m * scalars.step_size / (new_v.sqrt() + scalars.eps)
        for into, values in ((m, new_m), (v, new_v), (p, new_p), (out, new_p)):
            into.copy_(values)

    made = torch.compile(adam, fullgraph=True, options={"cpp_wrapper": True})
    return lambda: made(gradient, states.master, states.exp_avg, states.exp_avg_sq, out)


def peer_rows(n: int, gradient: Any, out: Any, full: Any, in_fp32: Any) -> dict[str, Row]:
    """torch's fused AdamW and, where it is installed, DeepSpeed's; the arguments as for `our_rows`."""
    import torch

    parameter = torch.nn.Parameter(full.master)
    parameter.grad = in_fp32
    moments = {"exp_avg": full.exp_avg, "exp_avg_sq": full.exp_avg_sq}

    def row(optimizer: torch.optim.Optimizer, step: Any, prepare: Callable[[torch.Tensor], Any]) -> Row:
        optimizer.state[parameter] = {"step": step, **moments}

        def update() -> None:
            with torch.no_grad():
                prepare(in_fp32)
                optimizer.step()
                out.copy_(parameter)

        return update

    fused = torch.optim.AdamW([parameter], fused=True, **GROUP)  # type: ignore[arg-type]
    rows = {"fused": row(fused, torch.tensor(4.0), lambda grad: grad.copy_(gradient)), "fused memory": fused.step}
    if find_spec("deepspeed") is not None:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        signs = [-1.0]  # keeps the gradient's size through all rounds; the operation is the same
        theirs = DeepSpeedCPUAdam([parameter], adamw_mode=True, **GROUP)
        rows["deepspeed"] = row(theirs, 4, lambda grad: grad.mul_(signs[0]))
    return rows


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of CPU and of wall clock per element, row by row."""
    import torch

    from zeroshard.optim.host.states import HostStates

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    n = options.elements
    gradient, out = torch.randn(n).bfloat16(), torch.empty(n, dtype=torch.bfloat16)
    full, in_fp32 = HostStates(*(torch.rand(n) * 1e-6 for _ in range(3))), torch.randn(n)
    rows = {**our_rows(n, options.threads, gradient, out, full, in_fp32), **peer_rows(n, gradient, out, full, in_fp32)}
    if options.no_compile:
        del rows["compile"]
    for row in rows.values():  # builds, compiles, touches pages
        row()
    cpu: dict[str, list[float]] = {name: [] for name in rows}
    wall: dict[str, list[float]] = {name: [] for name in rows}
    order, shuffle = list(rows), random.Random(0)
    for _ in range(options.rounds):
        shuffle.shuffle(order)
        for name in order:
            clock, start = time.perf_counter(), time.process_time()
            rows[name]()
            cpu[name].append((time.process_time() - start) / n)
            wall[name].append((time.perf_counter() - clock) / n)
    return {"elements": n, "threads": options.threads, "torch": torch.__version__, "cpu": cpu, "wall": wall}


def summary(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Median and lower quartile in nanoseconds per element."""
    return {
        name: {"median": 1e9 * statistics.median(row), "p25": 1e9 * sorted(row)[len(row) // 4]}
        for name, row in times.items()
    }


def torch_capability() -> str:
    """The vector instructions of this machine, as torch names them."""
    import torch

    return str(torch.backends.cpu.get_cpu_capability())


def main() -> None:
    """Measure, print, compare with the bars."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer elements and rounds")
    parser.add_argument("--elements", type=int, help="instead of 33,554,432; 134,217,728 need 6 GB")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="turns of each row; by default 25, or 9 with --quick")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile's loop out, slow to build")
    parser.add_argument("--deepspeed-python", help="a Python that has DeepSpeed and the same torch")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.rounds = options.rounds or (9 if options.quick else 25)
    options.elements = options.elements or (2**22 if options.quick else 2**25)
    if options.measure:
        answer(measure(options))
        return
    words = ["--measure", "--threads", str(options.threads), "--elements", str(options.elements)]
    words += ["--rounds", str(options.rounds), *(["--no-compile"] if options.no_compile else [])]
    python = options.deepspeed_python or sys.executable
    kept = circumstances() | {"vectors": torch_capability()}
    threads = {name: str(options.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    (found,) = launch(__file__, words, 1, python, {**threads, "DS_ACCELERATOR": "cpu"}, timeout=3600.0)
    if found["torch"].partition("+")[0] != kept["versions"]["torch"].partition("+")[0]:
        sys.exit(f"{python} has torch {found['torch']}, this Python {kept['versions']['torch']}; they must be the same")
    rows = {clock: summary(found[clock]) for clock in ("cpu", "wall")}
    print(f"{kept['cpu']}, {kept['cores']} cores, load {kept['load']:.1f}, {found['elements']:,} elements", end="")
    print(f", {found['threads']} threads: nanoseconds of CPU per element (of wall clock)")
    for name, row in rows["cpu"].items():
        wall = rows["wall"][name]
        print(f"  {name:12} {row['p25']:7.3f}, median {row['median']:7.3f} ({wall['p25']:.3f}, {wall['median']:.3f})")
    bars = []
    for ours, theirs, wide, narrow, words_of in BARS:
        least = wide if "avx512" in torch_capability().lower() else narrow
        if ours in rows["cpu"] and theirs in rows["cpu"]:
            ratio = statistics.median(map(truediv, found["cpu"][theirs], found["cpu"][ours]))
            bars.append({"ours": ours, "theirs": theirs, "ratio": ratio, "least": least, "reached": ratio >= least})
            print(f"  {ours}: {ratio:.2f} {words_of}; at least {least:.2f}: {'yes' if ratio >= least else 'NO'}")
    if options.json:
        kept |= {"elements": found["elements"], "threads": found["threads"]}
        Path(options.json).write_text(json.dumps({**kept, "ns": rows, "bars": bars}, indent=1) + "\n")


if __name__ == "__main__":
    main()
