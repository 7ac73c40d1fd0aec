"""The share of communication that computation hides, from ranges and kernels in a profiler's trace.

    python benchmarks/gpu/overlap.py --ranks N [--device cuda] [--toy] [--json FILE]

Each plan trains the built-in GPT; `engine.trace(profile=...)` records two steps of every rank after three others. With
U(X) the union of the time intervals X of one rank, and |U| its length:

- **On GPUs**, C are the kernels whose name contains "nccl", and K all other kernels (copies between host and device are
  neither). Hidden is |U(C) ∩ U(K)| / |U(C)|. A kernel of NCCL also runs while it waits for the slowest rank, so a rank
  that is ahead shows more communication. The rows by action name each kernel after the range `zeroshard::...` of the
  thread inside which it was launched.
- **On CPUs**, where a backend's threads are no kernels, F are the flights: from the begin of a range
  `zeroshard::gather X` (or reduce, send, receive, ...) to the end of `zeroshard::wait for gather X`; W are these waits
  and the ranges of the starts, in which the main thread does nothing else. Hidden is 1 - |U(F) ∩ U(W)| / |U(F)|.
"""

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from ranks import LaunchError, answer, circumstances, keep, launch

PREFIX, WAIT = "zeroshard::", "wait for "
COLLECTIVES = ("gather", "reduce", "exchange", "send", "receive", "join", "ask")  # first words of actions
PLANS: dict[str, dict[str, Any]] = {
    "zero2": {"zero": 2, "transport": "network"},
    "zero2, overlapped gathers": {"zero": 2, "transport": "network", "overlap_gather": True},
    "zero3": {"zero": 3, "transport": "network"},
    "zero3, 4 microbatches": {"zero": 3, "transport": "network", "microbatches": 4},
    "stages, 1f1b": {"zero": 0, "pipeline_parallel": 2, "microbatches": 8},
    "stages, zb-h1": {"zero": 0, "pipeline_parallel": 2, "microbatches": 8, "pipeline_parallel.schedule": "zb-h1"},
    "tensor": {"zero": 0, "tensor_parallel": 2, "transport": "network"},
}
TOYS = ("zero3",)
SHAPE, TOY_SHAPE = (32_768, 1024, 2048, 16, 12), (64, 16, 32, 2, 4)  # vocabulary, context, width, heads, layers
ROWS, STEPS, WARM = 8, 2, 3
Spans = list[tuple[float, float]]
Row = dict[str, Any]


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """Intervals without overlap, ascending."""
    merged: Spans = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def length(spans: Spans) -> float:
    """The length of a union."""
    return sum(end - begin for begin, end in spans)


def common(one: Spans, other: Spans) -> float:
    """The length of the intersection of two unions."""
    total, place = 0.0, 0
    for begin, end in one:
        while place < len(other) and other[place][1] <= begin:
            place += 1
        at = place
        while at < len(other) and other[at][0] < end:
            total += min(end, other[at][1]) - max(begin, other[at][0])
            at += 1
    return total


def span(event: Row) -> tuple[float, float]:
    """Begin and end of an event, in microseconds."""
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0))


def hidden(events: Sequence[Row]) -> Row:
    """Seconds of communication of one rank, and the hidden share, by the definition above; None without any."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    ranges = [event for event in events if str(event.get("name", "")).startswith(PREFIX) and event.get("ph") == "X"]
    ranges = [event for event in ranges if event.get("cat") != "gpu_user_annotation"]
    if kernels:
        return of_kernels(kernels, ranges, events)
    return of_ranges(ranges)


def of_kernels(kernels: Sequence[Row], ranges: Sequence[Row], events: Sequence[Row]) -> Row:
    """The figures of a GPU."""
    talk = [event for event in kernels if "nccl" in event["name"].lower()]
    work = union(span(event) for event in kernels if "nccl" not in event["name"].lower())
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    by_action: defaultdict[str, Spans] = defaultdict(list)
    for event in talk:
        start = launches.get(event.get("args", {}).get("correlation"))
        by_action[action_around(start, ranges)].append(span(event))
    return figures({"all": [span(event) for event in talk], **by_action}, lambda spans: common(spans, work))


def action_around(start: Row | None, ranges: Sequence[Row]) -> str:
    """The first word of the innermost range of a thread that is open at a launch; "outside" for none."""
    if start is None:
        return "outside"
    around = [each for each in ranges if each["tid"] == start["tid"] and span(each)[0] <= start["ts"] <= span(each)[1]]
    inner = max(around, key=lambda each: float(each["ts"]), default=None)
    return "outside" if inner is None else inner["name"].removeprefix(PREFIX).removeprefix(WAIT).split(" ")[0]


def of_ranges(ranges: Sequence[Row]) -> Row:
    """The figures of a CPU."""
    starts: defaultdict[str, list[Row]] = defaultdict(list)
    flights: defaultdict[str, Spans] = defaultdict(list)
    idle: Spans = []
    for event in sorted(ranges, key=lambda event: float(event["ts"])):
        name = event["name"].removeprefix(PREFIX)
        action = name.removeprefix(WAIT)
        if action.split(" ")[0] not in COLLECTIVES:
            continue
        idle.append(span(event))
        if name == action:
            starts[action].append(event)
        elif starts[action]:
            flights[action.split(" ")[0]].append((span(starts[action].pop(0))[0], span(event)[1]))
    waits = union(idle)
    every = [flight for several in flights.values() for flight in several]
    return figures({"all": every, **flights}, lambda spans: length(spans) - common(spans, waits))


def figures(by_action: Row, covered: Any) -> Row:
    """Seconds and hidden share of each action, of which "all" is one."""
    found = {}
    for action, spans in by_action.items():
        merged = union(spans)
        if merged:
            found[action] = {"seconds": length(merged) / 1e6, "hidden": covered(merged) / length(merged)}
    return found


def rank_part(plan_name: str, device: str, toy: bool, folder: str) -> None:
    """One rank: train, record, read its own trace."""
    import torch

    import zeroshard as zs
    from zeroshard.train.gpt import GPT
    from zeroshard.train.sizes import GPTConfig

    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = zs.init_mesh(device=device)
    config = GPTConfig(*(TOY_SHAPE if toy else SHAPE))
    precision = "fp32" if device == "cpu" else "bf16"
    settings = {"pipeline_parallel.balance": "parameters", "precision": precision, **PLANS[plan_name]}
    if "pipeline_parallel" not in settings:
        del settings["pipeline_parallel.balance"]
    rows = torch.randint(config.vocabulary, (ROWS, config.context + 1)).to(mesh.device)
    batch = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    fused = {"fused": True} if device != "cpu" else {}
    adam = partial(torch.optim.AdamW, lr=1e-4, **fused)
    example = tuple(part[:1] for part in batch) if "pipeline_parallel" in settings else None
    engine = zs.Engine(GPT(config), adam, zs.Plan.from_dict(settings), mesh=mesh, example=example)
    for _ in range(WARM):
        engine.train_step(batch)
    with engine.trace(profile=folder):
        for _ in range(STEPS):
            engine.train_step(batch)
    trace = json.loads((Path(folder) / f"rank{mesh.rank}.json").read_text())
    answer({"figures": hidden(trace["traceEvents"])})


def main() -> None:
    """Launch each plan, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--launched", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launched:
        plan, device, toy, folder = options.launched
        rank_part(plan, device, toy == "toy", folder)
        return
    kept: Row = {**circumstances(), "ranks": options.ranks, "device": options.device, "rows": [], "failed": {}}
    for plan in TOYS if options.toy else PLANS:
        with tempfile.TemporaryDirectory(prefix="zeroshard-overlap-") as folder:
            words = ["--launched", plan, options.device, "toy" if options.toy else "full", folder]
            try:
                answers = launch(__file__, words, options.ranks, timeout=float(os.environ.get("SLICE_SECONDS", 240)))
            except LaunchError as error:
                kept["failed"][plan] = str(error)[-1500:]
                print(f"{plan}: failed: {error}")
                continue
        for rank, found in enumerate(answers):
            kept["rows"].append({"plan": plan, "rank": rank, **found})
        show(plan, [found["figures"] for found in answers])
        keep(kept, options.json)
    keep(kept, options.json)
    sys.exit(bool(kept["failed"]))


def show(plan: str, ranks: Sequence[Row]) -> None:
    """For people: of each action the range over the ranks."""
    print(f"{plan}:" if any(ranks) else f"{plan}: no communication was found in the trace")
    for action in dict.fromkeys(action for found in ranks for action in found):
        mine = [found[action] for found in ranks if action in found]
        shares, seconds = [each["hidden"] for each in mine], [each["seconds"] / STEPS for each in mine]
        print(f"  {action:10} {1e3 * min(seconds):9.3f} to {1e3 * max(seconds):9.3f} ms per step, hidden "
              f"{100 * min(shares):5.1f} to {100 * max(shares):5.1f} %")  # fmt: skip


if __name__ == "__main__":
    main()
