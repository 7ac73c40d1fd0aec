"""Optimizers: CPU time of a step and bytes of states, beside torch's, transformers', bitsandbytes' and torchao's.

    python benchmarks/optimizers.py [--quick] [--rounds N] [--threads N] [--json FILE]

Times are CPU seconds of the process; in each round all variants run in a new random order. Four parts:

    updates   one step of each optimizer over the shapes of a small GPT with gradients given: ns and bytes per parameter
    training  whole steps of the built-in GPT, forward, backward and update: ratios to AdamW (fused) of the same round.
              Adafactor's batch is small, where an update weighs most; Muon's has 32 tokens per row of a matrix's side
    adafactor Adafactor's update of one matrix, in memory (fp32) and as offloaded (gradients in bf16 times a factor, new
              weights in bf16), by the kernel and by torch's operations, beside torch.optim.Adafactor and Adam's kernel;
              lower quartiles, since other processes can only add to a time
    muon      Muon's updates of a matrix beside their products alone: by blocks as it computes them, and whole

Peers that are not installed are left out. To add them without their dependencies (torch is there):
    pip install --no-deps --target DIR bitsandbytes torchao, and PYTHONPATH=DIR.
"""

import argparse
import dataclasses
import json
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from ranks import circumstances
from torch import Tensor, nn

from zeroshard import optim
from zeroshard.optim.algorithms.muon import QUINTIC, symmetric_product
from zeroshard.optim.algorithms.tensor_optimizer import Fused
from zeroshard.optim.host import adafactor as host_adafactor
from zeroshard.optim.host.adam import adam_update
from zeroshard.optim.host.states import HostStates, Scalars
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig

WIDTH = 256
BLOCK = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (WIDTH,), (WIDTH,)]
BARS = {"Adafactor": 1.1, "Muon": 1.2, "products": 1.1}

SLOW = ("torch Muon and AdamW", "torchao AdamW8bit, eager")  # seconds for a step on CPUs, so measured once

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
OURS: dict[str, Make] = {
    "Adafactor": optim.Adafactor,
    "SM3": optim.SM3,
    "SM3 without momentum": partial(optim.SM3, momentum=0.0),
    "AdamW8bit": optim.AdamW8bit,
    "LAMB": optim.LAMB,
    "Muon": optim.Muon,
    "Shampoo, sides to 512": partial(optim.Shampoo, interval=10, max_side=512),
    "SOAP, sides to 512": partial(optim.SOAP, interval=10, max_side=512),
}


def peers() -> dict[str, Make]:
    """Optimizers of other packages that are installed."""
    found: dict[str, Make] = {
        "torch AdamW, fused": partial(torch.optim.AdamW, fused=True),
        "torch AdamW, foreach": partial(torch.optim.AdamW, foreach=True),
        "torch Adafactor": torch.optim.Adafactor,
        "torch Muon and AdamW": _torch_muon,
    }
    try:
        from transformers.optimization import Adafactor

        found["transformers Adafactor"] = Adafactor
    except ImportError:
        print("transformers is not installed")
    try:
        from bitsandbytes.optim import AdamW8bit

        found["bitsandbytes AdamW8bit"] = AdamW8bit
    except ImportError:
        print("bitsandbytes is not installed")
    try:
        from torchao.optim import AdamW8bit as Compiled

        found["torchao AdamW8bit, eager"] = Compiled  # its compilation takes minutes of CPU time
    except ImportError:
        print("torchao is not installed")
    return found


class _Both(torch.optim.Optimizer):
    """torch's Muon for matrices and its AdamW for the rest, as its documentation advises."""

    def __init__(self, params: Iterable[Any]) -> None:
        own = list(params)
        self.parts = [
            torch.optim.Muon([p for p in own if p.dim() == 2]),
            torch.optim.AdamW([p for p in own if p.dim() != 2], fused=True),
        ]
        super().__init__(own, {})
        self.state = {p: s for part in self.parts for p, s in part.state.items()}  # type: ignore[assignment]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()
        self.state = {p: s for part in self.parts for p, s in part.state.items()}  # type: ignore[assignment]


def _torch_muon(params: Iterable[Any]) -> torch.optim.Optimizer:
    return _Both(params)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all states; tensors of torchao count their codes and scales."""
    total = 0
    for states in optimizer.state.values():
        for value in states.values():
            inner = [getattr(value, name) for name in ("codes", "scale") if hasattr(value, name)]
            total += sum(v.nbytes for v in inner or [value] if isinstance(v, Tensor))
    return total


def interleaved(
    runs: dict[str, Callable[[], object]], rounds: int, order: random.Random, warm: int = 1
) -> dict[str, list[float]]:
    """CPU seconds of each run in each round, after rounds to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + warm):
        for name in order.sample(list(runs), len(runs)):
            start = time.process_time()
            runs[name]()
            if number >= warm:
                seconds[name].append(time.process_time() - start)
    return seconds


def updates(layers: int, width: int, rounds: int, order: random.Random) -> list[dict[str, Any]]:
    """One step of every optimizer over the shapes of a GPT, its embedding included."""
    made: dict[str, torch.optim.Optimizer] = {}
    for name, make in {**peers(), **OURS}.items():
        torch.manual_seed(0)
        block = [tuple(side * width // WIDTH for side in shape) for shape in BLOCK]
        parameters = [nn.Parameter(torch.randn(s) * 0.02) for s in [(8 * width, width), *block * layers]]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter) * 1e-3
        try:
            made[name] = make(parameters)
            made[name].step()
        except Exception as error:  # a peer may refuse this machine
            print(f"{name} does not run here: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
            made.pop(name, None)
    numel = sum(p.numel() for p in parameters)
    steps: dict[str, Callable[[], object]] = {name: optimizer.step for name, optimizer in made.items()}
    slow = {name: steps.pop(name) for name in SLOW if name in steps}
    seconds = interleaved(steps, rounds, order) | interleaved(slow, 1, order, warm=0)
    rows = []
    for name, optimizer in made.items():
        ns = [1e9 * s / numel for s in seconds[name]]
        row = {"optimizer": name, "ns_per_parameter": round(statistics.median(ns), 2), "least": round(min(ns), 2)}
        row["most"] = round(max(ns), 2)  # with the roots and the bases that are computed every ten steps
        rows.append({**row, "state_bytes_per_parameter": round(state_bytes(optimizer) / numel, 3)})
        print(f"  {name:26} {row['ns_per_parameter']:8.2f} ns  {rows[-1]['state_bytes_per_parameter']:7.3f} bytes")
    return rows


def training(
    config: GPTConfig, tokens: int, makers: dict[str, Make], rounds: int, order: random.Random
) -> dict[str, Any]:
    """Whole steps of the built-in GPT: medians, and of the ratios to AdamW in the same round."""
    runs = {}
    for name, make in {"AdamW": partial(torch.optim.AdamW, fused=True), **makers}.items():
        torch.manual_seed(0)
        model = GPT(config)
        given = optim.muon_groups(model) if name == "Muon" else model.parameters()
        batch = torch.randint(config.vocabulary, (max(1, tokens // config.context), min(tokens, config.context)))
        runs[name] = partial(_train, model, make(given), batch)  # type: ignore[arg-type]
    seconds = interleaved(runs, rounds, order)
    ratios = {n: [a / b for a, b in zip(seconds[n], seconds["AdamW"], strict=True)] for n in runs}
    table = {
        name: {
            "cpu_seconds": round(statistics.median(seconds[name]), 4),
            "ratio": round(statistics.median(ratios[name]), 3),
            "quartiles": [round(q, 3) for q in statistics.quantiles(ratios[name], n=4)[::2]],
        }
        for name in runs
    }
    numel = sum(p.numel() for p in model.parameters())
    for name, row in table.items():
        print(f"  {tokens} tokens, {numel:,} parameters: {name:10} {row['cpu_seconds']:8.3f} s  {row['ratio']:.3f}")
    return {"tokens": tokens, "width": config.width, "parameters": numel, "steps": table}


def _train(model: GPT, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    model(batch, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def adafactor(shape: tuple[int, int], rounds: int, order: random.Random) -> dict[str, Any]:
    """Nanoseconds per element of Adafactor's update of one matrix; all rows share its weights and gradients."""
    weights, gradient = torch.randn(shape) * 0.02, torch.randn(shape) * 1e-3
    halves, scratch, out = gradient.bfloat16(), torch.empty(shape), torch.empty(weights.numel(), dtype=torch.bfloat16)
    parameter = nn.Parameter(weights)
    parameter.grad_dtype = None
    own, theirs = optim.Adafactor([parameter]), torch.optim.Adafactor([parameter])
    scalars = Scalars.of({"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}, 5, decoupled=True)
    states = HostStates(weights.view(-1), *torch.zeros(2, weights.numel()))

    def step(optimizer: torch.optim.Optimizer, given: Tensor = gradient) -> None:
        parameter.grad = given
        optimizer.step()

    def fused() -> None:
        with patch.object(own, "fused", Fused(0.5, {parameter: out})):
            step(own, halves)

    def by_torch() -> None:
        with patch.object(host_adafactor, "library", lambda: None):
            step(own)

    def offloaded_by_torch() -> None:
        scratch.copy_(halves).mul_(0.5)
        with patch.object(host_adafactor, "library", lambda: None):
            step(own, scratch)
        out.copy_(weights.view(-1))

    runs: dict[str, Callable[[], object]] = {
        "kernel": partial(step, own),
        "torch's operations": by_torch,
        "torch.optim.Adafactor": partial(step, theirs),
        "Adam's kernel": lambda: adam_update(gradient.view(-1), 1.0, scalars, states, states),
        "offloaded, kernel": fused,
        "offloaded, torch's operations": offloaded_by_torch,
        "offloaded, Adam's kernel": lambda: adam_update(halves.view(-1), 0.5, scalars, states, states, out),
    }
    seconds = interleaved(runs, rounds, order)
    ns = {name: round(1e9 * sorted(row)[len(row) // 4] / weights.numel(), 3) for name, row in seconds.items()}
    faster = {
        where + "kernel": round(
            statistics.median(
                [a / b for a, b in zip(seconds[f"{where}torch's operations"], seconds[f"{where}kernel"], strict=True)]
            ),
            2,
        )
        for where in ("", "offloaded, ")
    }
    print(f"  {shape}: {ns} ns, times as fast as torch's operations: {faster}", flush=True)
    return {"shape": shape, "ns": ns, "times_as_fast": faster}


def muon(shape: tuple[int, int], rounds: int, order: random.Random) -> dict[str, Any]:
    """Muon's whole update of one matrix beside its products alone."""
    rows, columns = min(shape), max(shape)
    parameter = nn.Parameter(torch.randn(shape) * 0.02)
    parameter.grad = torch.randn(shape)
    start = torch.randn(rows, columns)
    start /= start.norm()
    gram, polynomial = torch.empty(rows, rows), torch.empty(rows, rows)
    buffers = [torch.empty(rows, columns) for _ in range(2)]

    def whole() -> None:
        x = start
        for step in range(5):
            torch.mm(x, x.T, out=gram)
            torch.mm(gram, gram, out=polynomial)
            x = torch.mm(polynomial, x, out=buffers[step % 2])

    def by_blocks() -> None:
        x = start
        for step in range(5):
            symmetric_product(x, gram)
            symmetric_product(gram, polynomial, gram, *QUINTIC[1:])
            x = torch.mm(polynomial, x, out=buffers[step % 2])

    runs: dict[str, Callable[[], object]] = {"update": optim.Muon([parameter]).step, "whole products": whole}
    runs["products by blocks"] = by_blocks
    seconds = interleaved(runs, rounds, order)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {
        f"by {name}": round(
            statistics.median([a / b for a, b in zip(seconds["update"], seconds[name], strict=True)]), 3
        )
        for name in list(runs)[1:]
    }
    print(f"  {shape}: {1e3 * medians['update']:.1f} ms, {ratios}")
    return {"shape": shape, "cpu_seconds": {n: round(s, 5) for n, s in medians.items()}, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds and small sizes")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to try the script out")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="keep the figures in this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    torch.compiler.set_stance("force_eager")
    few = options.quick or options.toy
    order, rounds = random.Random(options.seed), 3 if few else options.rounds
    result: dict[str, Any] = {**circumstances(), "threads": options.threads, "rounds": rounds}
    print("updates", flush=True)
    width = 16 if options.toy else WIDTH
    result["updates"] = updates(1 if few else 4, width, rounds, order)
    print("training", flush=True)
    small = GPTConfig(vocabulary=8 * width, context=width, width=width, heads=4, layers=2)
    result["training"] = [
        training(small, tokens, {"Adafactor": optim.Adafactor, "SM3": optim.SM3}, rounds, order)
        for tokens in (width, 4 * width)
    ]
    layers = dataclasses.replace(small, vocabulary=256)
    tokens = (8 if few else 32) * width
    result["training"].append(training(layers, tokens, {"Muon": optim.Muon}, rounds, order))
    print("adafactor", flush=True)
    large = [(width, width)] if few else [(256, 1024), (4096, 4096), (50257, 768), (4096, 8192)]
    result["adafactor"] = [adafactor(shape, rounds, order) for shape in large]
    print("muon", flush=True)
    shapes = [(width, 4 * width)] if few else [(256, 256), (256, 1024), (512, 512), (2048, 512)]
    result["muon"] = [muon(shape, rounds, order) for shape in shapes]
    found = {
        "Adafactor": [row["steps"]["Adafactor"]["ratio"] for row in result["training"][:-1]],
        "Muon": [result["training"][-1]["steps"]["Muon"]["ratio"]],
        "products": [row["by products by blocks"] for row in result["muon"]],
    }
    result["bars"] = {n: {"found": f, "most": BARS[n], "reached": max(f) <= BARS[n]} for n, f in found.items()}
    print(json.dumps(result["bars"]))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
