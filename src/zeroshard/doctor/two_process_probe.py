"""Measurements of two processes at once: the engine's own collectives by size, and rates while both compute.

Started by `zeroshard.doctor.measure` as `python -m zeroshard.doctor.two_process_probe SETTINGS`; the answer is a file.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.comm.collectives import Comm, Purpose
from zeroshard.comm.mesh import SETTLE, Mesh, keep_freed_memory, mesh_of, stay_inside
from zeroshard.doctor.measure import copy_bandwidth, matrix_flops
from zeroshard.doctor.profile import PAIR
from zeroshard.platform import accelerator

SHARE = 5  # a collective of one size takes a fifth of a box
FEWEST, MOST = 3, 200  # runs
MATRIX = 1024  # rows
LABEL = "measurement"
Row = tuple[int, float, float]
Run = Callable[[int], None]


def main(settings: str) -> None:
    """Measure as one of two ranks, and write `rank-R.json` into the folder that the settings (JSON) name."""
    task = json.loads(settings)
    rank, folder, device = task["rank"], Path(task["folder"]), task["device"]
    torch.set_num_threads(task["threads"])
    keep_freed_memory()
    own_device = accelerator.pick(device, PAIR, rank)
    accelerator.select(own_device)
    stay_inside()
    patience = timedelta(seconds=task["limit"])
    backend = accelerator.backend(own_device)
    dist.init_process_group(backend, f"file://{folder}/store", rank=rank, world_size=PAIR, timeout=patience)
    mesh = mesh_of(list(range(PAIR)), own_device, task["limit"])
    answer = json.dumps(measure_pair(mesh, task["messages"], task["box"], task["copy_bytes"], task["matrix"]))
    (folder / f"rank-{rank}.json").write_text(answer)
    time.sleep(SETTLE)
    dist.destroy_process_group()


def measure_pair(mesh: Mesh, messages: list[int], box: float, copy_bytes: int, matrix: int) -> dict[str, Any]:
    """Measure as one of two ranks; a collective call.

    Args:
        messages: bytes that a rank sends, ascending.
        box: seconds for each of the two rates; a collective of one size has a fifth.
        copy_bytes: size of the copied buffer.
        matrix: rows of the largest square matrix.
    """
    network = Comm(mesh)
    collectives = {"network": _timings(network, messages, box / SHARE)}
    shared, signal, problem = Comm(mesh), None, None
    if not accelerator.is_accelerator(mesh.device):
        problem = shared.share(2 * PAIR * messages[-1] + PAIR * messages[-1])
        if problem is None:
            collectives["shared"] = _timings(shared, messages, box / SHARE)
            signal = _signal(shared, box / SHARE)
    network.agree_on(None, "both cores at work")
    rows = matrix if accelerator.is_accelerator(mesh.device) else min(matrix, MATRIX)
    flops = matrix_flops(mesh.device, torch.float32, rows, box)
    network.agree_on(None, "both copy")
    copies = copy_bandwidth(mesh.device, copy_bytes, box)
    return {"collectives": collectives, "signal": signal, "problem": problem, "beside": [flops, copies]}


def _timings(comm: Comm, messages: list[int], box: float) -> dict[str, list[Row]]:
    """Times of every operation by size; messages of pipelines never go through shared memory."""
    largest = messages[-1] // 4
    runs = {"gather": _gathering(comm, largest), "exchange": _exchanging(comm, largest)}
    rows = {operation: [_timed(comm, run, nbytes, box) for nbytes in messages] for operation, run in runs.items()}
    if comm.shared is None:
        round_trips = [_timed(comm, _sending(comm, largest), nbytes, box) for nbytes in messages]
        rows["send"] = [(nbytes, wall / 2, cpu / 2) for nbytes, wall, cpu in round_trips]
    return rows


def _gathering(comm: Comm, largest: int) -> Run:
    full = torch.empty(PAIR * largest, device=comm.mesh.device)
    mine = comm.buffer(largest, torch.float32)

    def gather(size: int) -> None:
        comm.gather(full[: PAIR * size], mine[:size], Purpose.GATHER_PARAMETERS, LABEL).wait()

    return gather


def _exchanging(comm: Comm, largest: int) -> Run:
    """An exchange with the sum over the ranks, as the engine reduces gradients."""
    mine = comm.buffer(PAIR * largest, torch.float32)
    scratch, mean = torch.empty(PAIR * largest, device=mine.device), torch.empty(largest, device=mine.device)

    def exchange(size: int) -> None:
        under_way = comm.exchange(mine[: PAIR * size], lambda numel: scratch[:numel], LABEL)
        under_way.wait()
        torch.add(*under_way.copies, out=mean[:size]).mul_(1 / PAIR)
        under_way.done()
        under_way.wait_until_read()

    return exchange


def _sending(comm: Comm, largest: int) -> Run:
    """A message to the other rank and one back."""
    rank, tensor = comm.mesh.rank, torch.zeros(largest, device=comm.mesh.device)

    def send(size: int) -> None:
        for source in range(PAIR):
            operation = comm.send if rank == source else comm.receive
            operation(tensor[:size], 1 - rank, Purpose.SEND_ACTIVATIONS, LABEL).wait()

    return send


def _signal(comm: Comm, box: float) -> Row:
    """A gather in memory that both ranks map, which copies nothing."""
    assert comm.shared is not None
    common = comm.shared.memory.common(PAIR, torch.float32)
    own = common[comm.mesh.rank : comm.mesh.rank + 1]
    return _timed(comm, lambda size: comm.gather(common, own, Purpose.GATHER_PARAMETERS, "common").wait(), 4, box)


def _timed(comm: Comm, run: Run, nbytes: int, box: float) -> Row:
    """(bytes, seconds by the clock, seconds of CPU time of this process); rank 0 sets the number of runs."""
    size = max(1, nbytes // 4)

    def once() -> float:
        start = time.perf_counter()
        run(size)
        accelerator.synchronize(comm.mesh.device)
        return time.perf_counter() - start

    fastest = max(1e-9, min(once() for _ in range(FEWEST)))  # the first runs warm up
    runs = max(FEWEST, min(MOST, int(comm.agree_on(box / fastest, "how many runs")[0])))
    cpu = time.process_time()
    walls = [once() for _ in range(runs)]
    return nbytes, statistics.median(walls), (time.process_time() - cpu) / runs


if __name__ == "__main__":
    main(sys.argv[1])
