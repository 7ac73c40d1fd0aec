"""Step time of our GPipe and 1F1B against torch.distributed.pipelining's, in turns, and our simulation of it.

    python benchmarks/pipelines.py [--rounds 5] [--steps 12] [--stages 2] [--microbatches 8] [--json FILE]

One gloo process with one thread per stage on this machine; the same untied GPT, split after the same blocks, the same
microbatches, fused AdamW on each stage, nothing recomputed. torch leaves the update to its caller, so its step ends
with the optimizer's and zero_grad. For ours the timeline of some steps is compared with the simulator, fed with the
median times of its own actions. CPU time is that of all ranks in a step. Ratios are of medians over rounds; those of
CPU time are given for each round too. Both must reach the same loss.
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import time
from functools import partial
from typing import Any

from ranks import answer, circumstances, cpu_seconds, launch

SCHEDULES = ("gpipe", "1f1b")


def measure(engine_name: str, schedule: str, arguments: argparse.Namespace) -> None:
    """One rank of one launch; the last one has the loss."""
    import torch
    from torch import nn

    from zeroshard.comm.mesh import init_mesh
    from zeroshard.train.gpt import GPT
    from zeroshard.train.sizes import SIZES

    torch.set_num_threads(1)
    mesh = init_mesh()
    torch.manual_seed(0)
    shape = dataclasses.replace(
        SIZES["tiny"], context=arguments.tokens, width=arguments.width, heads=4, layers=arguments.layers
    )
    model = GPT(shape)
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    rows = torch.randint(256, (arguments.microbatches * arguments.rows, arguments.tokens + 1))
    batch = (rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
    make = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    step = (_ours if engine_name == "ours" else _torchs)(model, make, mesh, batch, schedule, arguments)
    walls, cpus, loss = [], [], 0.0
    for number in range(arguments.steps + 3):
        before, start = cpu_seconds(), time.perf_counter()
        loss = step()
        if number >= 3:
            walls.append(time.perf_counter() - start)
            cpus.append(cpu_seconds() - before)
    figures = {"step_s": statistics.median(walls), "cpus": cpus, "loss": loss}
    if engine_name == "ours":
        figures |= _forecast(step)
    torch.distributed.barrier()
    answer(figures)


def _ours(model: Any, make: Any, mesh: Any, batch: Any, schedule: str, arguments: argparse.Namespace) -> Any:
    import zeroshard as zs

    split = tuple(f"blocks.{n * arguments.layers // mesh.ranks}" for n in range(1, mesh.ranks))
    plan = zs.Plan(
        pipeline_parallel=zs.Pipeline(mesh.ranks, schedule=schedule, split=split),
        microbatches=arguments.microbatches,
        recompute="off",
        zero=0,
    )
    example = tuple(part[: arguments.rows] for part in batch)
    engine = zs.Engine(model, make, plan, mesh=mesh, example=example)

    def step() -> float:
        result = engine.train_step(batch)
        assert result.loss is not None
        return result.loss.item()

    step.engine = engine  # type: ignore[attr-defined]
    return step


def _forecast(step: Any) -> dict[str, float]:
    """The measured timelines of some steps, and their simulation from the same times."""
    from zeroshard.schedule import Action
    from zeroshard.schedule.simulate import simulate
    from zeroshard.train.trace import costs_of

    engine, measured, simulated = step.engine, [], []
    for _ in range(5):
        engine.world.agree(b"", "start of a timeline")
        with engine.trace() as trace:
            step()
        mine = [[str(action), start, end] for action, start, end in trace.actions]
        everyone = [[(Action.parse(t), a, b) for t, a, b in rank] for rank in engine.world.agree_on(mine, "timeline")]
        measured.append(max(r[-1][2] for r in everyone) - min(r[0][1] for r in everyone))
        lists, layout = engine.pipeline.stretch(1), engine.pipeline.layout
        simulated.append(simulate(lists, layout, costs_of(everyone, engine.pipeline)).makespan)
    errors = [simulation / took - 1 for took, simulation in zip(measured, simulated, strict=True)]
    return {"timeline_s": statistics.median(measured), "forecast_error": statistics.median(errors)}


def _torchs(model: Any, make: Any, mesh: Any, batch: Any, schedule: str, arguments: argparse.Namespace) -> Any:
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
    from torch.nn import functional as F

    first, last = mesh.rank * arguments.layers // mesh.ranks, (mesh.rank + 1) * arguments.layers // mesh.ranks

    class Part(nn.Module):
        """The layers of one stage."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = model.embedding if mesh.rank == 0 else None
            self.blocks = model.blocks[first:last]
            self.norm = model.norm if mesh.rank == mesh.ranks - 1 else None
            self.head = model.head if mesh.rank == mesh.ranks - 1 else None

        def forward(self, x: Any) -> Any:
            x = x if self.embedding is None else self.embedding(x)
            for block in self.blocks:
                x = block(x)
            return x if self.head is None else self.head(self.norm(x))

    def loss_of(logits: Any, targets: Any) -> Any:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    part = Part()
    stage = PipelineStage(part, mesh.rank, mesh.ranks, mesh.device)
    kind = ScheduleGPipe if schedule == "gpipe" else Schedule1F1B
    runtime = kind(stage, arguments.microbatches, loss_fn=loss_of)
    optimizer = make(part.parameters())

    def step() -> float:
        losses: list[Any] = []
        if mesh.rank == 0:
            runtime.step(batch[0])
        elif mesh.rank == mesh.ranks - 1:
            runtime.step(target=batch[1], losses=losses)
        else:
            runtime.step()
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if losses else 0.0

    return step


def take(engine_name: str, schedule: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One process per stage; the figures of the last, which has the loss, and the CPU seconds of all in a step."""
    words = ["--engine", engine_name, "--schedule", schedule]
    for name in ("steps", "microbatches", "rows", "tokens", "width", "layers"):
        words += [f"--{name}", str(getattr(arguments, name))]
    answers = launch(__file__, words, arguments.stages)
    figures = answers[-1]
    figures["cpu_s"] = statistics.median(map(sum, zip(*(each.pop("cpus") for each in answers), strict=True)))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"rounds": 5, "steps": 12, "stages": 2, "microbatches": 8}
    defaults |= {"rows": 1, "tokens": 256, "width": 256, "layers": 8}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json")
    parser.add_argument("--engine", choices=("ours", "torch"), help=argparse.SUPPRESS)
    parser.add_argument("--schedule", choices=SCHEDULES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        measure(arguments.engine, arguments.schedule, arguments)
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, {arguments.stages} ranks, {arguments.rounds} rounds")
    rows = []
    turns = [(engine, schedule) for schedule in SCHEDULES for engine in ("ours", "torch")]
    rounds = [{turn: take(*turn, arguments) for turn in turns} for _ in range(arguments.rounds)]
    for schedule in SCHEDULES:
        losses = {round_[engine, schedule]["loss"] for round_ in rounds for engine in ("ours", "torch")}
        assert max(losses) - min(losses) < 1e-4 * max(losses), losses
        medians: dict[str, Any] = {"schedule": schedule}
        for engine in ("ours", "torch"):
            for key in rounds[0][engine, schedule]:
                medians[f"{engine}_{key}"] = statistics.median(round_[engine, schedule][key] for round_ in rounds)
        pairs = [(round_["ours", schedule]["step_s"], round_["torch", schedule]["step_s"]) for round_ in rounds]
        medians["ratio"] = medians["ours_step_s"] / medians["torch_step_s"]
        medians["ratios"] = [ours / theirs for ours, theirs in pairs]
        medians["cpu_ratio"] = medians["ours_cpu_s"] / medians["torch_cpu_s"]
        pairs = [(round_["ours", schedule]["cpu_s"], round_["torch", schedule]["cpu_s"]) for round_ in rounds]
        medians["cpu_ratios"] = [ours / theirs for ours, theirs in pairs]
        rows.append(medians)
        print(
            f"{schedule:6} ours {medians['ours_step_s'] * 1e3:7.1f} ms  torch {medians['torch_step_s'] * 1e3:7.1f} ms  "
            f"ratio {medians['ratio']:.3f} ({min(medians['ratios']):.3f} to {max(medians['ratios']):.3f})  "
            f"CPU {medians['cpu_ratio']:.3f} ({min(medians['cpu_ratios']):.3f} to {max(medians['cpu_ratios']):.3f})  "
            f"forecast {medians['ours_forecast_error'] * 100:+.1f} %"
        )
    if arguments.json:
        shape = {name: getattr(arguments, name) for name in defaults}
        with open(arguments.json, "w") as out:
            json.dump({**circumstances(), **shape, "rows": rows}, out, indent=1)


if __name__ == "__main__":
    main()
