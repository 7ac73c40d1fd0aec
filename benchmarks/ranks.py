"""Code shared by the benchmarks: processes in lockstep on this machine, its loopback device, its clocks, its name.

Torch is not imported here, so the launching process stays small and a launched process can time its own imports.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

DEEPSPEED_ENV = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}  # of its processes on CPUs
GRACE = 5.0  # seconds between the first failure and the end of the other ranks
MARK = "RESULT "  # begins the one line by which a launched process answers
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1


class LaunchError(RuntimeError):
    """A launched process that gave no answer, because it failed or was not done in time, with the end of its words."""


def launch(
    script: str | Path,
    words: Sequence[str],
    ranks: int,
    python: str = sys.executable,
    more_env: Mapping[str, str] | None = None,
    timeout: float = 900.0,
) -> list[dict[str, Any]]:
    """Run `script` in `ranks` processes with one thread each and return their answers, in rank order.

    They get the environment that torchrun gives; torchrun itself is left out, because it takes CPU time and a core's
    cache from the ranks.

    Raises:
        LaunchError: a process failed, or took more than `timeout` seconds.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)}
    env |= {"LOCAL_WORLD_SIZE": str(ranks), "PYTHONPATH": _source(), "PYTHONWARNINGS": "ignore", **(more_env or {})}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode, so start-up is counted with it
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the ranks are ended too
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        processes = []
        for rank, output in enumerate(outputs):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [python, str(script), *words]
            process = subprocess.Popen(command, env=env | place, stdout=output, stderr=subprocess.STDOUT)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        _await(processes, timeout)
        texts = []
        for output in outputs:
            output.seek(0)
            texts.append(output.read())
    silent = [f"rank {rank}: {text[-2000:]}" for rank, text in enumerate(texts) if MARK not in text]
    if silent:
        raise LaunchError("\n".join([f"no answer from {' '.join(words)}", *silent]))
    return [json.loads(text.rpartition(MARK)[2].splitlines()[0]) for text in texts]


def run_script(
    script: str | Path, words: Sequence[str], output: Path, timeout: float, more_env: Mapping[str, str] | None = None
) -> int | None:
    """Run a script in a process of its own, its output in a file; its exit code, or None if it was ended by `timeout`.

    All processes that it has left in its group are ended too.
    """
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, str(script), *words],
            env={**os.environ, **(more_env or {})},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answer(result: Mapping[str, Any]) -> None:
    """Print, in a launched process, the figures for the launching one."""
    print(f"\n{MARK}{json.dumps(result)}", flush=True)


def keep(figures: Mapping[str, Any], path: str | None) -> None:
    """Write the figures, if there is a file for them."""
    if path:
        Path(path).write_text(json.dumps(figures, indent=1) + "\n")


def _await(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> None:
    """Wait until all are done or the time is up; after a failure the others get a few seconds more."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return
        if any(codes):
            deadline = min(deadline, time.monotonic() + GRACE)
        time.sleep(0.05)


def launched_path(source: Path) -> str:
    """PYTHONPATH for processes that import zeroshard from the folder `source`."""
    inherited = os.environ.get("PYTHONPATH")
    return str(source) if not inherited else f"{source}{os.pathsep}{inherited}"


def own_loopback() -> bool:
    """Give this process, and all it launches, a loopback device of its own, so that its byte count is theirs alone.

    Returns False where the kernel does not allow that, and the machine's own device stays.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWNET) != 0:
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
            return False
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))
    return True


def loopback_bytes() -> int:
    """Bytes sent so far over the loopback device, all processes and all headers."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    fields = next(line.partition(":")[2] for line in lines if line.strip().startswith("lo:")).split()
    return int(fields[8])  # eight fields of what was received come first


def cpu_seconds() -> float:
    """User and system time of this process so far, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def circumstances() -> dict[str, Any]:
    """The machine, its load, the versions and the time, to be stored with the figures."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    versions = {}
    for name in ("torch", "zeroshard"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    cpu = models[0] if models else "unknown"
    cores, load = os.cpu_count(), os.getloadavg()[0]
    return {"date": time.strftime("%Y-%m-%d"), "cpu": cpu, "cores": cores, "load": load, "versions": versions}


def _source() -> str:
    """The folder from which zeroshard is imported here, also for a Python that has not installed it."""
    spec = find_spec("zeroshard")
    if spec is None or spec.origin is None:
        sys.exit("zeroshard is not installed in this Python; start the benchmark with the environment's own python")
    return launched_path(Path(spec.origin).parents[1])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
