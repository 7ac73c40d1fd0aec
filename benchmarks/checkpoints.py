"""The cost of a checkpoint beside torch.save and DCP, in time and bytes; and the time to recover from a killed rank.

    python benchmarks/checkpoints.py [--quick] [--only saves|restarts] [--folder DIR] [--json FILE]

Two processes with one thread each on this machine, over gloo; the same GPT, the same batch, AdamW. Both hold all
engines, so that the ways to save can take turns within seconds: periods of `--every` steps with a save at their start
and periods without one, way after way. Every figure is a median over launches of medians over periods, of the slower
rank.

- exposed: a period with a save less the one without beside it. That is the call, the slowdown of the steps after it by
  the writing, and the wait for a peer that is still saving. `call` is the call alone; `done` is from it to the end of
  the writing. Before the next period, outside of the timing, all writing is finished and its files are removed.
- cpu: user and system time of the save, all threads, per rank.
- bytes: with Ψ parameters in fp32, AdamW's states are 12Ψ: 4Ψ of weights and 8Ψ of moments. With bf16 parameters beside
  fp32 masters, which AdamW's users in bf16 have, those parameters add 2Ψ, so memory holds 14Ψ.
- torch.save: DistributedDataParallel, rank 0 writes model and optimizer, as its users do. It does not sync: `done`
  there means that the kernel has the bytes. DCP and zeroshard sync each file; zeroshard the folders too.
- dcp, dcp-async: FSDP2, whose state_dict is sharded like zeroshard's at stage 3; save and async_save.
- restart: the main job under `zeroshard run` and under `torchrun --max-restarts`; one rank is killed (SIGKILL) at work,
  and the clock stops at the next step that the new processes write down. Both go on from the newest checkpoint.

The exit status is 1 where losses differ by more than 1e-4, since then the engines did not train the same model.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from ranks import LaunchError, answer, circumstances, cpu_seconds, launch

SHAPE = (4096, 256, 64, 4, 4)  # vocabulary, width, tokens, heads, layers: 4.2 million parameters
TOY = (64, 16, 8, 2, 1)
PEERS = ("torch.save", "dcp", "dcp-async")
SUPERVISORS = ("torchrun", "zeroshard run")
TOLERANCE = 1e-4  # relative, between losses
FULL = {"rounds": 3, "pairs": 6, "every": 10, "precisions": "fp32,bf16", "kills": 3}
QUICK = {"rounds": 1, "pairs": 2, "every": 5, "precisions": "fp32", "kills": 1}
JOB = "train --model tiny --sequence 64 --batch-per-rank 2 --steps 100000 --validate-every 0 --sample-tokens 0"
JOB += " --checkpoint-every 10 --device cpu"
SETTLED = 25  # steps before a kill
PATIENCE = 900.0  # seconds that a launch may take, and a job without a step
OLD = 1.5  # seconds after a kill in which lines from before it may still come
Figures = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """One way to save, with the step of the engine that it belongs to.

    Attributes:
        save: writes to a path, and returns a function that waits for the end of the writing.
    """

    name: str
    step: Callable[[], Any]
    save: Callable[[Path], Callable[[], Any]]


class Trial:
    """The engines and their ways to save, on one rank; each engine has a model and a batch of its own, all alike."""

    def __init__(self, precision: str, shape: Sequence[int]) -> None:
        import torch

        import zeroshard as zs

        torch.set_num_threads(1)
        self.shape = shape
        self.precision, self.bf16 = precision, precision == "bf16"
        self.mesh = zs.init_mesh(device="cpu")
        self.ways = [*self._ddp(), *self._fsdp2(), *self._zeroshard(0), *self._zeroshard(3)]
        self.parameters = sum(parameter.numel() for parameter in self._model().parameters())

    def _model(self) -> Any:
        import torch

        from zeroshard.train.gpt import GPT
        from zeroshard.train.sizes import GPTConfig

        vocabulary, width, tokens, heads, layers = self.shape
        torch.manual_seed(0)
        return GPT(GPTConfig(vocabulary, tokens, width, heads, layers))

    def _batch(self) -> tuple[Any, Any]:
        import torch

        vocabulary, _, tokens, *_ = self.shape
        rows = torch.randint(vocabulary, (1, tokens + 1), generator=torch.Generator().manual_seed(1 + self.mesh.rank))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def _ddp(self) -> Iterator[Way]:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        model = self._model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def save(path: Path) -> Callable[[], Any]:
            if self.mesh.rank == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
            return lambda: None

        yield Way("torch.save", self._loop(DistributedDataParallel(model), optimizer, self.bf16), save)

    def _fsdp2(self) -> Iterator[Way]:
        import torch
        from torch.distributed import checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (self.mesh.ranks,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if self.bf16 else MixedPrecisionPolicy()
        model = self._model()
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        group = torch.distributed.new_group(backend="gloo")

        def content() -> dict[str, Any]:
            weights, states = get_state_dict(model, optimizer)
            return {"model": weights, "optimizer": states}

        def save(path: Path) -> Callable[[], Any]:
            dcp.save(content(), checkpoint_id=path)
            return lambda: None

        step = self._loop(model, optimizer, False)
        yield Way("dcp", step, save)
        yield Way(
            "dcp-async", step, lambda path: dcp.async_save(content(), checkpoint_id=path, process_group=group).result
        )

    def _zeroshard(self, stage: int) -> Iterator[Way]:
        import torch

        import zeroshard as zs

        plan = zs.Plan(zero=stage, precision=self.precision, transport="network")
        engine = zs.Engine(self._model(), partial(torch.optim.AdamW, lr=1e-4), plan, mesh=self.mesh)
        batch = self._batch()

        def step() -> Any:
            return engine.train_step(batch).loss

        yield Way(f"zero{stage}", step, lambda path: engine.save(path).wait)
        if stage == 3:
            yield Way(f"zero{stage}-wait", step, lambda path: engine.save(path, wait=True).wait)

    def _loop(self, model: Any, optimizer: Any, autocast: bool) -> Callable[[], Any]:
        import torch

        batch = self._batch()

        def step() -> Any:
            with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
                loss = model(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step


def measure(precision: str, shape: Sequence[int], every: int, pairs: int, folder: Path) -> dict[str, Figures]:
    """One rank of one launch: for each way medians over pairs of periods, all ways in turns."""
    trial = Trial(precision, shape)
    losses: dict[Callable[[], Any], float] = {}  # of the first step of each engine
    for way in trial.ways:
        if way.step not in losses:
            losses[way.step] = float(way.step())
        period(trial, way, 1, folder / way.name)
    names = ("exposed_s", "cpu_s", "call_s", "done_s", "bytes", "step_s")
    figures: dict[str, dict[str, list[float]]] = {way.name: {name: [] for name in names} for way in trial.ways}
    for pair in range(pairs):
        for way in trial.ways:
            order = (None, folder / f"{way.name}-{pair}")
            both = {bool(path): period(trial, way, every, path) for path in (order if pair % 2 else reversed(order))}
            found = {**both[True], "step_s": both[False]["took_s"] / every}
            found["exposed_s"] = both[True]["took_s"] - both[False]["took_s"]
            found["cpu_s"] = both[True]["cpu_s"] - both[False]["cpu_s"]
            for name in names:
                figures[way.name][name].append(found[name])
    medians = {
        way.name: {name: statistics.median(values) for name, values in figures[way.name].items()} for way in trial.ways
    }
    return {way.name: {**medians[way.name], "loss": losses[way.step], "psi": trial.parameters} for way in trial.ways}


def period(trial: Trial, way: Way, steps: int, path: Path | None) -> Figures:
    """Some steps, after a save to `path` if there is one."""
    from torch.distributed import barrier

    barrier()
    figures: Figures = {}
    wait: Callable[[], Any] = bool  # nothing to wait for
    cpu, begin = cpu_seconds(), time.perf_counter()
    if path is not None:
        wait = way.save(path)
        figures["call_s"] = time.perf_counter() - begin
    for _ in range(steps):
        way.step()
    barrier()
    figures["took_s"] = time.perf_counter() - begin
    if path is not None:
        figures["done_s"] = finished(wait, begin, figures)
        barrier()
        figures["bytes"] = sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())
    figures["cpu_s"] = cpu_seconds() - cpu
    barrier()
    if path is not None and trial.mesh.rank == 0:
        path.unlink() if path.is_file() else shutil.rmtree(path)
    return figures


def finished(wait: Callable[[], Any], begin: float, figures: Figures) -> float:
    """Wait for the end of the writing; seconds from the call to it, or to the last step where it was over by then."""
    late = time.perf_counter()
    wait()
    now = time.perf_counter()
    return now - begin if now - late > 1e-3 else max(figures["call_s"], figures["took_s"])


def saves(options: argparse.Namespace, folder: Path) -> list[Figures]:
    """The rows of all ways to save."""
    rows = []
    for precision in options.precisions.split(","):
        rounds: list[dict[str, Figures]] = []
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory(dir=folder) as place:
                words = [
                    "--rank",
                    precision,
                    str(options.every),
                    str(options.pairs),
                    place,
                    *(["--toy"] if options.toy else []),
                ]
                rounds.append(together(launch(__file__, words, 2, timeout=PATIENCE)))
        medians = {
            way: {name: statistics.median(one[way][name] for one in rounds) for name in first}
            for way, first in rounds[0].items()
        }
        for way, figures in medians.items():
            row = {"way": way, "precision": precision, **figures}
            row["bytes_per_parameter"] = figures["bytes"] / figures["psi"]
            row["exposed_per_step_s"] = figures["exposed_s"] / options.every
            row["exposed_s_rounds"] = [one[way]["exposed_s"] for one in rounds]
            row["ratios"] = {
                base: {name: over(figures[name], medians[base][name]) for name in ("exposed_s", "call_s", "cpu_s")}
                for base in PEERS
                if way not in PEERS
            }
            rows.append(row)
    return rows


def over(ours: float, theirs: float) -> float | None:
    """The ratio; None where one of them is a difference below zero, which comes from other load of the machine."""
    return ours / theirs if min(ours, theirs) > 0 else None


def together(ranks: list[dict[str, Figures]]) -> dict[str, Figures]:
    """One launch from the answers of its ranks: the slower rank's times, and means of CPU time and loss."""
    return {
        way: {
            name: (statistics.fmean if name in ("cpu_s", "loss") else max)([rank[way][name] for rank in ranks])
            for name in ranks[0][way]
        }
        for way in ranks[0]
    }


def restarts(options: argparse.Namespace, folder: Path) -> list[Figures]:
    """Seconds from a kill to the next finished step, under both supervisors in turns; a job gives one figure."""
    seconds: dict[str, list[float | None]] = {name: [] for name in SUPERVISORS}
    for _ in range(options.kills):
        for name in SUPERVISORS:
            with tempfile.TemporaryDirectory(dir=folder) as place:
                seconds[name].append(killed(name, Path(place)))
    rows = []
    for name, found in seconds.items():
        came_back = [value for value in found if value is not None]
        middle = statistics.median(came_back) if came_back else None
        rows.append({"supervisor": name, "restart_s": middle, "failed": found.count(None), "restart_s_rounds": found})
    return rows


def killed(supervisor: str, place: Path) -> float | None:
    """Start the main job, kill one rank at work, and time the recovery; None where the job did not recover."""
    command = [sys.executable, "-m", "zeroshard", "run", "--nproc-per-node", "2"]
    command += ["--reports", str(place / "crashes"), "--"]
    if supervisor == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", "5", "-m", "zeroshard"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (place / "words").open("w") as words, contextlib.ExitStack() as stack:
        job = subprocess.Popen(
            [*command, *JOB.split(), "--out", str(place)], stdout=words, stderr=words, env=env, start_new_session=True
        )
        stack.callback(end, job)
        lines = written(place, job)
        for step, _ in lines:
            if step >= SETTLED:
                break
        else:
            raise LaunchError(f"{supervisor} did not start: {(place / 'words').read_text()[-2000:]}")
        workers = busiest(job.pid, 2)
        begin = time.monotonic()
        workers[-1].kill()
        newest = step
        for step, at in lines:
            if step <= newest or at > begin + OLD:
                return at - begin
            newest = step
    return None


def written(place: Path, job: "subprocess.Popen[bytes]") -> Iterator[tuple[int, float]]:
    """(step, time) of the lines of the job's metrics as they come; ends when the job does, or after `PATIENCE`."""
    seen, last = 0, time.monotonic()
    while time.monotonic() < last + PATIENCE:
        ended = job.poll() is not None
        for file in place.glob("*/metrics.jsonl"):
            lines = file.read_text().split("\n")[:-1]
            for line in lines[seen:]:
                last = time.monotonic()
                yield json.loads(line)["step"], last
            seen = len(lines)
        if ended:
            return
        time.sleep(0.01)


def busiest(parent: int, count: int) -> list[psutil.Process]:
    """The descendants with the most CPU time in one second: the ranks, under any launcher."""
    before = {child: sum(child.cpu_times()[:2]) for child in psutil.Process(parent).children(recursive=True)}
    time.sleep(1.0)
    used = {child: sum(child.cpu_times()[:2]) - then for child, then in before.items() if child.is_running()}
    return sorted(used, key=lambda child: -used[child])[:count]


def end(job: "subprocess.Popen[bytes]") -> None:
    """End a job and all its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        everyone = [*psutil.Process(job.pid).children(recursive=True), psutil.Process(job.pid)]
        for process in everyone:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
    job.wait()


def filesystem(folder: Path) -> str:
    """The type of the file system of the checkpoints."""
    kinds = {words[1]: words[2] for words in (line.split() for line in Path("/proc/mounts").read_text().splitlines())}
    return next(kinds[str(place)] for place in (folder, *folder.parents) if str(place) in kinds)


def table(rows: list[Figures], every: int) -> str:
    """For people: one line per way."""
    lines = []
    for row in rows:
        exposed, per_step, call, done, cpu = (
            1e3 * row[f"{name}_s"] for name in ("exposed", "exposed_per_step", "call", "done", "cpu")
        )
        lines.append(
            f"{row['precision']} {row['way']:11} step {row['step_s'] * 1e3:6.1f} ms; a save: exposed {exposed:7.1f} ms "
            f"({per_step:5.1f} per step at one in {every}), call {call:7.1f}, done {done:7.1f}, cpu {cpu:6.1f}; "
            f"{row['bytes']:,.0f} bytes, {row['bytes_per_parameter']:.3f} per parameter"
        )
        for base, ratios in row["ratios"].items():
            shown = (f"{name[:-2]} {'-' if ratio is None else f'{ratio:.2f}'}" for name, ratio in ratios.items())
            lines.append(" " * 17 + f"/ {base:11}" + ", ".join(shown))
    return "\n".join(lines)


def apart(rows: list[Figures]) -> bool:
    """Whether the fp32 losses show that the engines did not train the same model."""
    losses = [row["loss"] for row in rows if row["precision"] == "fp32"]
    return bool(losses) and max(losses) - min(losses) > TOLERANCE * abs(losses[0])


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK}")
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the script out")
    parser.add_argument("--only", choices=("saves", "restarts"), help="one of the two parts; by default both")
    parser.add_argument("--rounds", type=int, help=f"launches; by default {FULL['rounds']}")
    parser.add_argument("--pairs", type=int, help=f"pairs of periods in a launch; by default {FULL['pairs']}")
    parser.add_argument("--every", type=int, help=f"steps of a period; by default {FULL['every']}")
    parser.add_argument("--precisions", help=f"by default {FULL['precisions']}")
    parser.add_argument("--kills", type=int, help=f"jobs of each supervisor; by default {FULL['kills']}")
    parser.add_argument("--folder", help="where to write; by default the folder of temporary files")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def main() -> int:
    """Launch, print, keep; or be one rank."""
    options = parse()
    shape = TOY if options.toy else SHAPE
    if options.rank:
        precision, every, pairs, folder = options.rank
        answer(measure(precision, shape, int(every), int(pairs), Path(folder)))
        return 0
    kept = {**circumstances(), "rounds": options.rounds, "pairs": options.pairs, "every": options.every}
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder = Path(place).resolve()
        kept |= {"filesystem": filesystem(folder), "shape": shape, "job": JOB, "saves": [], "restarts": []}
        print(f"{kept['cpu']}, {kept['cores']} cores, load {kept['load']:.1f}, on {kept['filesystem']}")
        if options.only != "restarts":
            kept["saves"] = saves(options, folder)
            print(table(kept["saves"], options.every), flush=True)
        if options.only != "saves":
            kept["restarts"] = restarts(options, folder)
            for row in kept["restarts"]:
                took = "never" if row["restart_s"] is None else f"{row['restart_s']:.1f} s"
                print(
                    f"{row['supervisor']:14} from the kill to the next step {took}; did not come back: {row['failed']}"
                )
    kept["load_at_end"] = os.getloadavg()[0]
    if options.json:
        Path(options.json).write_text(json.dumps(kept, indent=1) + "\n")
    if apart(kept["saves"]):
        print("the losses differ, so not all trained the same thing", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
