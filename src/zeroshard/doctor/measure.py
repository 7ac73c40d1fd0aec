"""Measurements of this machine's rates, in well under a minute.

Every quantity has a box of time: it is run until the box is full, and the median of the runs counts. Rates of two
processes together come from `zeroshard.doctor.two_process_probe`, which is started twice and ended at a time limit.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zeroshard.doctor.facts import Facts
from zeroshard.doctor.profile import PAIR, Beside, MachineProfile, Timing, default_path
from zeroshard.platform import accelerator

__all__ = ["Effort", "MachineProfile", "default_path", "measure"]

KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALLEST = 64  # rows of a matrix
CHAIN = 64  # small operations behind one another
GPU_SCALE = 8  # times as many bytes on a GPU, to amortise the launch of a copy
BLOCK = 2**22  # bytes of one write
POLL_SECONDS = 0.05  # between polls of the two processes


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Extent of the measurements.

    Attributes:
        box: seconds for one quantity.
        copy_bytes: size of the copied buffer, far larger than the caches.
        matrix: rows of the largest square matrix; fewer where a smaller one fills a box.
        messages: bytes that one rank sends in each collective.
        disk_bytes: largest size of the file that is written and read.
        limit: seconds after which the two processes are ended.
        pair: whether two processes measure together; without, the profile is of one rank alone.
    """

    box: float = 0.5
    copy_bytes: int = 2**27
    matrix: int = 8192
    messages: tuple[int, ...] = tuple(2**power for power in range(12, 25, 2))
    disk_bytes: int = 2**28
    limit: float = 40.0
    pair: bool = True


def measure(
    effort: Effort, facts: Facts, threads: int, say: Callable[[str], object] = lambda what: None
) -> MachineProfile:
    """Measure this machine; the profile's `problems` name the rates that could not be measured.

    Args:
        facts: of the machine; a file is written, read and removed in `facts.disk`.
        threads: of CPU kernels in each process.
        say: called with the name of each quantity.
    """
    device = torch.device(accelerator.kind() if facts.gpus else "cpu")
    torch.set_num_threads(threads)
    problems: dict[str, str] = {}
    total, overhead = _memory(device, facts)
    say("matrix products")
    flops = {name: matrix_flops(device, dtype, effort.matrix, effort.box) for name, dtype in KINDS.items()}
    say("memory and small operations")
    nbytes = effort.copy_bytes * (GPU_SCALE if facts.gpus else 1)
    bandwidth, small = copy_bandwidth(device, nbytes, effort.box), op_seconds(device, effort.box)
    up, down = host_link(device, effort.copy_bytes, effort.box) if facts.gpus else (None, None)
    say("the disk")
    write, read = _disk(facts, effort, problems)
    say("two processes together")
    pair = _pair(effort, threads, device.type if facts.gpus >= PAIR else "cpu", problems)
    return MachineProfile(
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        machine=accelerator.title(device) or facts.processor,
        kind=device.type,
        torch=torch.__version__,
        threads=threads,
        cores=facts.usable_cores,
        devices=max(1, facts.gpus),
        device_memory=total,
        device_overhead=overhead,
        host_memory=facts.usable_memory,
        shared_memory=facts.shared_memory or 0,
        matrix_flops=flops,
        memory_bandwidth=bandwidth,
        op_seconds=small,
        host_up=up,
        host_down=down,
        disk_write=write,
        disk_read=read,
        problems=problems,
        **pair,
    )


def median_seconds(run: Callable[[], object], box: float, device: torch.device) -> float:
    """The median time of a run, after one to warm up; repeats until the box is full, at least once."""
    accelerator.synchronize(device)
    run()
    accelerator.synchronize(device)
    times: list[float] = []
    end = time.perf_counter() + box
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def matrix_flops(device: torch.device, dtype: torch.dtype, rows: int, box: float) -> float:
    """FLOP/s of the three products of a square linear layer, which kernels for CPUs run at very different rates.

    The best of growing sizes up to `rows`, until one fills the box.
    """
    best, size, share = 0.0, min(SMALLEST, rows), box / 4
    while size <= rows:
        a, weight, gradient = (torch.randn(size, size, device=device).to(dtype) for _ in range(3))
        products = ((a, weight.t()), (gradient, weight), (gradient.t(), a))  # forward, and backward to both sides
        out = torch.empty_like(a)
        times = [median_seconds(partial(torch.mm, *pair, out=out), share / 3, device) for pair in products]
        best = max(best, 6 * size**3 / sum(times))
        if sum(times) > share:
            break
        size *= 2
    return best


def copy_bandwidth(device: torch.device, nbytes: int, box: float) -> float:
    """Bytes/s that a copy within the memory reads and writes, both counted."""
    source = torch.ones(nbytes // 4, device=device)
    into = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: into.copy_(source), box, device)


def op_seconds(device: torch.device, box: float) -> float:
    """Seconds of one small operation, the mean over those of a forward and its backward."""
    x, factor = torch.ones(16, device=device, requires_grad=True), torch.ones(16, device=device)

    def run() -> None:
        y = x
        for _ in range(CHAIN):
            y = y * factor
        y.backward(factor)
        x.grad = None

    return median_seconds(run, box, device) / (2 * CHAIN)


def host_link(device: torch.device, nbytes: int, box: float) -> tuple[float, float]:
    """Bytes/s from page-locked memory to an accelerator, and back."""
    host_copy = accelerator.page_locked(nbytes, torch.uint8, device).fill_(1)
    on_device = torch.ones(nbytes, dtype=torch.uint8, device=device)
    up = nbytes / median_seconds(lambda: on_device.copy_(host_copy, non_blocking=True), box, on_device.device)
    down = nbytes / median_seconds(lambda: host_copy.copy_(on_device, non_blocking=True), box, on_device.device)
    return up, down


def disk_bandwidth(folder: Path, nbytes: int, box: float) -> tuple[float, float]:
    """Bytes/s of a new file written and synced, and of the same file read after it was dropped from the page cache.

    Raises:
        OSError: the folder cannot be written to.
    """
    block = os.urandom(min(BLOCK, nbytes))
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        written, start = 0, time.perf_counter()
        while written < nbytes and time.perf_counter() < start + 2 * box:
            written += file.write(block)
        os.fsync(file.fileno())
        write = written / (time.perf_counter() - start)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        into, read, start = bytearray(len(block)), 0, time.perf_counter()
        while read < written and time.perf_counter() < start + 2 * box:
            read += file.readinto(into)
        return write, read / (time.perf_counter() - start)


def _memory(device: torch.device, facts: Facts) -> tuple[int, int]:
    """The device's memory, and the bytes taken after loading the libraries alone."""
    torch.mm(torch.ones(16, 16, device=device), torch.ones(16, 16, device=device))
    accelerator.synchronize(device)
    total = accelerator.total_memory(device)
    return facts.usable_memory if total is None else total, accelerator.taken_memory(device)


def _disk(facts: Facts, effort: Effort, problems: dict[str, str]) -> tuple[float | None, float | None]:
    nbytes = min(effort.disk_bytes, facts.disk_free // 4)
    try:
        return disk_bandwidth(facts.disk, nbytes, effort.box)
    except (OSError, ZeroDivisionError) as error:
        problems["disk"] = f"a file of {nbytes:,} bytes cannot be written and read in {facts.disk}: {error}"
        return None, None


def _pair(effort: Effort, threads: int, device: str, problems: dict[str, str]) -> dict[str, Any]:
    """The profile's fields measured by two processes at once; empty ones if they failed."""
    unmeasured: dict[str, Any] = {"beside": None, "collectives": {}, "signal": None}
    if not effort.pair:
        return unmeasured
    with tempfile.TemporaryDirectory(prefix="zeroshard-") as folder:
        settings = {**asdict(effort), "threads": threads, "device": device, "folder": folder}
        problem = _run_pair(settings, Path(folder), effort.limit)
        answers = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank-*.json"))]
    if problem is not None or len(answers) < PAIR:
        problems["network"] = f"two processes of this machine cannot work together: {problem or 'one wrote no result'}"
        return unmeasured
    if answers[0]["problem"]:
        problems["shared"] = answers[0]["problem"]
    collectives = {
        transport: {
            operation: tuple(_mean(rows) for rows in zip(mine, theirs[operation], strict=True))
            for operation, mine in operations.items()
        }
        for transport, operations, theirs in (
            (name, found, answers[1]["collectives"][name]) for name, found in answers[0]["collectives"].items()
        )
    }
    signals = [answer["signal"] for answer in answers]
    beside = Beside(*(statistics.mean(answer["beside"][i] for answer in answers) for i in range(2)))
    return {"beside": beside, "collectives": collectives, "signal": _mean(signals) if all(signals) else None}


def _mean(rows: Any) -> Timing:
    nbytes, wall, cpu = zip(*rows, strict=True)
    return Timing(nbytes[0], statistics.mean(wall), statistics.mean(cpu))


def _run_pair(settings: dict[str, Any], folder: Path, limit: float) -> str | None:
    """Run both processes to their end; returns the problem, or None."""
    package = Path(__file__).parents[2]  # import path of the package, installed or not
    logs = [folder / f"log-{rank}" for rank in range(PAIR)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            command = [
                sys.executable,
                "-m",
                "zeroshard.doctor.two_process_probe",
                json.dumps({**settings, "rank": rank}),
            ]
            with log.open("wb") as out:
                processes.append(
                    subprocess.Popen(command, cwd=package, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
                )
        end = time.monotonic() + limit
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            if any(process.returncode for process in processes):
                break
            time.sleep(POLL_SECONDS)
        failed = [log for log, process in zip(logs, processes, strict=True) if process.poll()]
        if failed:
            lines = failed[0].read_text(errors="replace").strip().splitlines()
            return lines[-1] if lines else "one ended without output"
        if any(process.returncode is None for process in processes):
            return f"they were not done after {limit:g} s"
        return None
    except OSError as error:
        return str(error)
    finally:
        for process in processes:
            with suppress(OSError):
                process.kill()
            process.wait()
