"""The cost of zeroshard's Python per unit and per parameter: CPU time of its step less that of a loop without it.

    python benchmarks/overhead.py [--profile STAGE] [--json FILE]

The model is U units of P vectors of 8 elements, so there is hardly any compute, and time that grows with U or P is
overhead. Two loops are subtracted: `plain` is torch's own with fused AdamW, whose update and `zero_grad` touch every
parameter; `flat` keeps all parameters and all gradients in one tensor each, so that only autograd's C++ depends on P.
On 2 ranks the loops do not communicate, so the cost of collectives counts per unit. Microseconds per unit and per
parameter are the least squares fit of "fixed + U units + U P parameters" to medians over steps of CPU time of all
threads.

The target: after subtracting `flat`, at most 0.5 us per parameter, less than one call of torch from Python takes.
"""

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ranks import answer, circumstances, launch

STAGES = (0, 2, 3)
SHAPES = [(8, 1), (8, 4), (8, 16), (8, 64), (2, 4), (4, 4), (16, 4)]  # units, parameters in each
ELEMENTS = 8
KINDS = ("plain", "flat", *map(str, STAGES))
PER_PARAMETER = 0.5  # microseconds, the bar
Step = Callable[[], Any]


def make_model(units: int, parameters: int) -> Any:
    """`units` units of `parameters` vectors; the loss is a sum over all."""
    import torch
    from torch import nn

    class Unit(nn.Module):
        """Some vectors, used in one operation."""

        def __init__(self) -> None:
            super().__init__()
            for number in range(parameters):
                self.register_parameter(f"vector{number}", nn.Parameter(torch.ones(ELEMENTS)))

        def forward(self, x: Any) -> Any:
            return x + torch.cat(tuple(self._parameters.values())).square().sum()  # type: ignore[arg-type]

    class Units(nn.Module):
        """One after the other."""

        def __init__(self) -> None:
            super().__init__()
            self.units = nn.ModuleList([Unit() for _ in range(units)])

        def forward(self, x: Any) -> Any:
            for unit in self.units:
                x = unit(x)
            return x.sum()

    return Units()


def make_step(kind: str, units: int, parameters: int, mesh: Any) -> Step:
    """One training step: "plain", "flat", or zeroshard at a stage by its number."""
    import torch

    import zeroshard as zs

    model, x = make_model(units, parameters), torch.zeros(1)
    adam: Callable[..., Any] = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    if kind.isdecimal():
        engine = zs.Engine(model, adam, zs.Plan(zero=int(kind)), mesh=mesh)  # type: ignore[arg-type]
        return lambda: engine.train_step((x,))
    flat = torch.ones(units * parameters * ELEMENTS, requires_grad=kind == "flat")
    if kind == "flat":
        flat.grad = torch.zeros_like(flat)
        for number, parameter in enumerate(model.parameters()):
            here = slice(number * ELEMENTS, (number + 1) * ELEMENTS)
            parameter.data, parameter.grad = flat.data[here], flat.grad[here]
    optimizer = adam([flat] if kind == "flat" else model.parameters())

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=kind == "plain")

    return step


def measure(steps: int, rounds: int, kinds: Sequence[str]) -> dict[str, dict[str, float]]:
    """CPU and wall microseconds per step by "kind units parameters"; all take turns in this process."""
    import torch

    import zeroshard as zs

    torch.set_num_threads(1)
    mesh = zs.init_mesh(device="cpu")
    loops = {f"{kind} {u} {p}": make_step(kind, u, p, mesh) for u, p in SHAPES for kind in kinds}
    for step in loops.values():
        for _ in range(3):
            step()
    cpu: dict[str, list[float]] = {name: [] for name in loops}
    wall: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, step in loops.items():
            for _ in range(steps):
                began, start = time.perf_counter(), time.process_time()
                step()
                cpu[name].append(time.process_time() - start)
                wall[name].append(time.perf_counter() - began)
    figures = {"cpu_us": cpu, "wall_us": wall}
    return {
        figure: {name: statistics.median(seconds) * 1e6 for name, seconds in by_name.items()}
        for figure, by_name in figures.items()
    }


def take(
    ranks: int, steps: int, rounds: int, kinds: Sequence[str] = KINDS, more_env: Mapping[str, str] | None = None
) -> list[dict[str, dict[str, float]]]:
    """One launch; the figures of each rank."""
    words = ["--launched", ",".join(kinds), "--steps", str(steps), "--rounds", str(rounds)]
    return launch(__file__, words, ranks, more_env=more_env)


def fit(extra: dict[tuple[int, int], float]) -> dict[str, float]:
    """Microseconds fixed, per unit and per parameter, of the extra time by (units, parameters in each)."""
    import torch

    rows = torch.tensor([[1.0, u, u * p] for u, p in extra], dtype=torch.float64)
    times = torch.tensor(list(extra.values()), dtype=torch.float64)[:, None]
    fixed, unit, parameter = torch.linalg.lstsq(rows, times).solution[:, 0].tolist()
    return {"fixed_us": fixed, "unit_us": unit, "parameter_us": parameter}


def profile(stage: int, steps: int) -> None:
    """Print where Python's time goes in the largest of the models, one rank."""
    import torch

    import zeroshard as zs

    torch.set_num_threads(1)
    units, parameters = max(SHAPES, key=lambda shape: shape[0] * shape[1])
    step = make_step(str(stage), units, parameters, zs.init_mesh(device="cpu"))
    for _ in range(3):
        step()
    with cProfile.Profile() as watch:
        for _ in range(steps):
            step()
    print(f"zero={stage}, {units} units of {parameters} parameters, {steps} steps")
    pstats.Stats(watch).strip_dirs().sort_stats("tottime").print_stats(20)


def report(ranks: int, taken: dict[str, float]) -> list[dict[str, Any]]:
    """Print and return one row per stage and subtracted loop."""
    rows = []
    for stage in STAGES:
        for base in ("plain", "flat"):
            extra = {(u, p): taken[f"{stage} {u} {p}"] - taken[f"{base} {u} {p}"] for u, p in SHAPES}
            fitted = fit(extra)
            passed = "" if base == "plain" else "pass" if fitted["parameter_us"] <= PER_PARAMETER else "FAIL"
            print(f"{ranks:5} {stage:5}  {base:5}", *(f"{value:9.2f}" for value in fitted.values()), "", passed)
            by_shape = {f"{u} x {p}": value for (u, p), value in extra.items()}
            rows.append({"ranks": ranks, "stage": stage, "less": base, **fitted, "extra_us": by_shape})
    return rows


def main() -> None:
    """Launch with 1 and with 2 ranks, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2", help="how many ranks, one launch for each")
    parser.add_argument("--rounds", type=int, default=5, help="turns that each loop takes")
    parser.add_argument("--steps", type=int, default=40, help="steps per turn")
    parser.add_argument("--profile", type=int, choices=range(4), metavar="STAGE", help="only print where time goes")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--launched", metavar="KINDS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launched:
        answer(measure(options.steps, options.rounds, options.launched.split(",")))
        return
    if options.profile is not None:
        profile(options.profile, options.steps)
        return
    kept = circumstances()
    print(f"{kept['cpu']}, {kept['cores']} cores, load {kept['load']:.1f}; CPU microseconds per step")
    print("ranks stage  less      fixed  per unit  per parameter")
    rows = []
    for ranks in map(int, options.ranks.split(",")):
        taken = take(ranks, options.steps, options.rounds)[0]["cpu_us"]
        rows += [{**row, "taken_us": taken} for row in report(ranks, taken)]
    if options.json:
        Path(options.json).write_text(json.dumps({**kept, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
