"""One rank is killed, one hangs: the reports that follow, and their seconds.

    python benchmarks/gpu/faults.py --ranks N [--device cuda] [--timeout SECONDS] [--json FILE]

1. Under `zeroshard run`: rank 1 kills itself in a step of the first attempt, and stays in an endless loop in one of the
   second; the third trains to its end. A report must name rank 1 both times: after the kill within `AFTER` seconds,
   after the hang within the timeout and `AFTER`.
2. Without a supervisor: rank 1 sleeps in a step. The other ranks must end by themselves. On CPUs each raises a
   `CommError` that names rank 1 within the timeout of its collectives and `AFTER`. On GPUs a wait for a collective is
   queued on the device, where NCCL's watchdog ends the process after `WATCHDOG` seconds.

The exit status is 1 if one of them did not come, or too late.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from ranks import LaunchError, circumstances, keep, launch, run_script

STEP, STEPS = 4, 6
LONGEST = 120.0  # seconds of the supervised job
AFTER = 10.0  # seconds in which all processes must have ended and the report must be there
STARTING = 60.0  # seconds that ranks may take to meet
WATCHDOG = STARTING + 30.0  # of NCCL: the groups' timeout, as mesh_of in comm/mesh.py sets it
Row = dict[str, Any]


def train(job: str, device: str, timeout: float, folder: Path) -> None:
    """A rank that trains a small model; rank 1 makes the job's fault before a step."""
    import torch
    from torch import nn

    import zeroshard as zs

    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = zs.init_mesh(timeout=STARTING, device=device)
    mesh = replace(mesh, timeout=timeout) if job == "alone" else mesh  # else the supervisor's comes first
    layers = [layer for _ in range(4) for layer in (nn.LayerNorm(16), nn.Linear(16, 16))]
    plan = zs.Plan(zero=3, transport="network")
    loss = lambda output, batch: output.square().mean()  # noqa: E731
    engine = zs.Engine(nn.Sequential(*layers), partial(torch.optim.AdamW, lr=1e-2), plan, mesh=mesh, loss=loss)
    try:
        for step in range(1, STEPS + 1):
            if mesh.rank == 1 and step == STEP:
                fault(job, folder)
            x = torch.randn(2, 8, 16, device=mesh.device)
            float(engine.train_step((x,)).loss)
    except zs.errors.CommError as error:
        (folder / f"ended-{mesh.rank}").write_text(f"{type(error).__name__}: {error}")
        raise


def fault(job: str, folder: Path) -> None:
    """Alone: sleep. Supervised: a kill in the first attempt, an endless loop in the second, nothing in the third."""
    from zeroshard.comm.mesh import attempt

    (folder / f"begun-{attempt()}").touch()
    if job == "alone":
        time.sleep(1e6)
    if attempt() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    while attempt() == 1:
        pass


def supervised(ranks: int, device: str, timeout: float, folder: Path) -> Row:
    """A kill and a hang in one job under `zeroshard run`."""
    limits = ["--timeout", f"{timeout:g}", "--start-timeout", "120", "--reports", str(folder / "crashes")]
    job = ["--", str(Path(__file__)), "--rank", "supervised", device, f"{timeout:g}", str(folder)]
    words = ["--supervisor", "run", "--nproc-per-node", str(ranks), *limits, *job]
    code = run_script(__file__, words, folder / "screen.txt", LONGEST)
    screen = (folder / "screen.txt").read_text(errors="replace")
    row: Row = {"exit": code, "problems": []}
    for attempt, (name, limit) in enumerate((("kill", AFTER), ("hang", timeout + AFTER))):
        paths, begun = list((folder / "crashes").glob(f"*attempt-{attempt}.json")), folder / f"begun-{attempt}"
        if not paths or not begun.exists():
            row["problems"].append(f"{name}: no report; the screen: {screen[-1500:]}")
            continue
        culprit = json.loads(paths[0].read_text())["culprit"]
        seconds = paths[0].stat().st_mtime - begun.stat().st_mtime
        row[name] = {"culprit": culprit["words"], "seconds": round(seconds, 2), "limit": limit}
        if culprit["ranks"] != [1] or seconds > limit:
            row["problems"].append(f"{name}: rank 1 must be named within {limit:g} s: {row[name]}")
    if code != 0:
        row["problems"].append(f"the third attempt must end with 0, not {code}; the screen: {screen[-1500:]}")
    return row


def unsupervised(ranks: int, device: str, timeout: float, folder: Path) -> Row:
    """A rank that sleeps, and no supervisor."""
    limit = (WATCHDOG if device == "cuda" else timeout) + AFTER
    words, text = ["--rank", "alone", device, f"{timeout:g}", str(folder)], ""
    try:
        launch(__file__, words, ranks, timeout=2 * STARTING + limit)
    except LaunchError as error:
        text = str(error)[-1500:]
    over, begun = time.time(), folder / "begun-0"
    if not begun.exists():
        return {"problems": [f"no rank came to step {STEP}: {text}"]}
    errors = {path.name: path for path in sorted(folder.glob("ended-*"))}
    first = min((path.stat().st_mtime for path in errors.values()), default=over)
    row: Row = {"seconds": round(first - begun.stat().st_mtime, 2), "limit": limit, "problems": []}
    row["errors"] = {name: path.read_text()[-300:] for name, path in errors.items()}
    if row["seconds"] > limit:
        row["problems"].append(f"no rank ended within {limit:g} s: {text}")
    if device == "cpu" and not (errors and all("rank 1" in error.lower() for error in row["errors"].values())):
        row["problems"].append(f"no error names rank 1: {row['errors']} {text}")
    if not errors:
        row["ends"] = text
    return row


def show(name: str, row: Row) -> None:
    """For people."""
    for fault_name in ("kill", "hang"):
        if fault_name in row:
            found = row[fault_name]
            times = f"after {found['seconds']:.1f} s (limit {found['limit']:g})"
            print(f"{name}, {fault_name}: {times}: {found['culprit']}")
    if "seconds" in row:
        print(f"{name}, hang: the first rank ended after {row['seconds']:.1f} s (limit {row['limit']:g})")
        for rank, words in row["errors"].items():
            print(f"  {rank}: {words}")
    for problem in row["problems"]:
        print(f"FAILED {name}: {problem}")


def main() -> None:
    """Make the faults, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--timeout", type=float, default=20.0)
    parser.add_argument("--json")
    options = parser.parse_args()
    kept: Row = {**circumstances(), "ranks": options.ranks, "device": options.device, "timeout": options.timeout}
    for name, make in (("supervised", supervised), ("unsupervised", unsupervised)):
        folder = Path(tempfile.mkdtemp(prefix="zs-faults-"))
        kept[name] = make(options.ranks, options.device, options.timeout, folder)
        shutil.rmtree(folder, ignore_errors=True)
        keep(kept, options.json)
        show(name, kept[name])
    sys.exit(any(kept[name]["problems"] for name in ("supervised", "unsupervised")))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--supervisor"]:
        from zeroshard.cli.main import main as zeroshard

        zeroshard(sys.argv[2:])
    elif sys.argv[1:2] == ["--rank"]:
        train(sys.argv[2], sys.argv[3], float(sys.argv[4]), Path(sys.argv[5]))
    else:
        main()
