"""The supervisor with real processes: what it notices, whom it names, and what it leaves behind."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

SOURCE = str(Path(__file__).parents[2] / "src")
PATIENCE = 120.0  # seconds that anything here may take on a machine that is busy with other things
HEAD = """
import os, signal, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["ZEROSHARD_ATTEMPT"])
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # whole lines, also where two ranks write at once
"""


class Supervisor:
    """`zeroshard run` on a script, in a process of its own."""

    def __init__(self, folder: Path, body: str, *options: str, ranks: int = 2) -> None:
        folder.mkdir(exist_ok=True)
        self.reports, script = folder / "crashes", folder / "job.py"
        script.write_text(HEAD + body)
        words = ["run", "--nproc-per-node", str(ranks), "--reports", str(self.reports), *options, "--", str(script)]
        clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "zeroshard", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**clean, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"},
        )

    def lines(self, count: int) -> list[str]:
        """The next lines that the ranks print."""
        out: IO[str] | None = self.process.stdout
        assert out is not None
        return [out.readline().strip() for _ in range(count)]

    def end(self) -> tuple[int, str, list[str]]:
        """The exit code, what else was printed, and the lines of stderr."""
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, err.splitlines()

    def failures(self) -> list[dict[str, Any]]:
        """The crash reports, in order."""
        return [json.loads(path.read_text()) for path in sorted(self.reports.glob("*.json"))]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Supervisor]]:
    """Starts supervisors, and leaves none behind."""
    started: list[Supervisor] = []

    def begin(body: str, *options: str, ranks: int = 2) -> Supervisor:
        started.append(Supervisor(tmp_path / str(len(started)), body, *options, ranks=ranks))
        return started[-1]

    yield begin
    for supervisor in started:
        with contextlib.suppress(ProcessLookupError):
            supervisor.process.kill()
        supervisor.process.communicate()


FAULTS = """
from zeroshard import init_mesh
from zeroshard.comm.collectives import Comm

def spin_forever():
    while True:
        pass

mesh = init_mesh(timeout=60.0)
assert mesh.heartbeat is not None
mesh.heartbeat.step(attempt)
mesh.heartbeat.phase("faults")
comm = Comm(mesh)
comm.agree(b"", "beginning")
if rank == 1:
    match attempt:
        case 0: os.kill(os.getpid(), signal.SIGKILL)
        case 1: os.kill(os.getpid(), signal.SIGSTOP)
        case 2: spin_forever()
words = comm.agree(str(attempt).encode(), "the word")
say(f"rank {rank} done {words}")
"""


ABORTED = """
import ctypes
from functools import partial

import torch
import zeroshard as zs

torch.manual_seed(0)
mesh = zs.init_mesh(timeout=60.0)
engine = zs.Engine(torch.nn.Linear(4, 1), partial(torch.optim.Adam, lr=0.1), zs.Plan(zero=1), mesh=mesh)
checkpoint = os.path.join(os.path.dirname(__file__), "checkpoint")
if attempt:
    engine.load(checkpoint)
began = engine.steps
while engine.steps < 4:
    loss = engine(torch.full((2, 4), 1.0 + engine.steps)).mean()
    engine.backward(loss)
    engine.step()
    if engine.steps == 2 and attempt == 0:
        engine.save(checkpoint, wait=True)
    if engine.steps == 3 and attempt == 0 and rank == 0:
        mesh.heartbeat.phase("loading data")
        time.sleep(600)
    if engine.steps == 3 and attempt == 0:
        time.sleep(0.5)  # rank 0 stops first
        mesh.heartbeat.start(("gather", 99, "gather parameters of the root"))  # as between GPUs: the host goes on
        time.sleep(3.0)
        os.write(2, b"[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=99, OpType=ALLGATHER)\\n")
        libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
        libc.pthread_create(ctypes.byref(thread), None, libc.abort, None)  # in a thread without Python, as the watchdog
        time.sleep(600)
say(rank, began, engine.steps, loss.item())
"""


SAME_ERROR = "if rank == 1:\n    raise ValueError('bad luck')\ntime.sleep(600)\n"


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Supervisor]]:
    """Two jobs that nobody talks to, which mostly wait: they go on beside the other tests, and theirs come last."""
    folder = tmp_path_factory.mktemp("alone")
    started = {
        "faults": Supervisor(folder / "faults", FAULTS, "--timeout", "5"),
        "same error": Supervisor(folder / "same error", SAME_ERROR),
        "aborted": Supervisor(folder / "aborted", ABORTED),
    }
    yield started
    for supervisor in started.values():
        with contextlib.suppress(ProcessLookupError):
            supervisor.process.kill()
        supervisor.process.communicate()


STOPPING = """
def save(number, frame):
    say("saved")
    sys.exit(75)

signal.signal(signal.SIGTERM, save)
say("ready")
time.sleep(600)
"""


def test_a_request_to_stop_reaches_the_ranks_and_ends_with_75(start: Callable[..., Supervisor]) -> None:
    supervisor = start(STOPPING)
    assert supervisor.lines(2) == ["ready", "ready"]
    supervisor.process.send_signal(signal.SIGUSR1)
    code, out, err = supervisor.end()
    assert (code, out.split(), err) == (75, ["saved", "saved"], []) and not supervisor.failures()


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def test_a_request_to_stop_while_the_ranks_start_is_not_lost(start: Callable[..., Supervisor]) -> None:
    supervisor = start("time.sleep(60)", "--grace", "1", ranks=1)
    begun = time.monotonic()
    while not catches(supervisor.process.pid, signal.SIGTERM) and time.monotonic() < begun + PATIENCE:
        time.sleep(0.02)
    supervisor.process.send_signal(signal.SIGTERM)  # the fork server imports torch meanwhile
    assert supervisor.end()[0] == 143  # and not 75, of ranks that were killed


def lives(process: psutil.Process) -> bool:
    """Whether a process is there, and more than an entry that its new parent has not read."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_no_orphan_outlives_the_supervisor(start: Callable[..., Supervisor]) -> None:
    supervisor = start("say(os.getpid(), os.getppid())\ntime.sleep(600)\n")
    family = {psutil.Process(int(word)) for line in supervisor.lines(2) for word in line.split()}
    assert len(family) == 3  # two ranks and the process that forks them
    supervisor.process.kill()
    deadline = time.monotonic() + PATIENCE
    while any(map(lives, family)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


WITHOUT_A_GUARD = """
import multiprocessing
from functools import partial

import torch
import zeroshard as zs
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(4, 4)
engine = zs.Engine(model, partial(torch.optim.AdamW, lr=1e-3), zs.Plan(zero=2))
for (x,) in DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2, num_workers=1):
    engine.backward(engine(x).square().mean())
    engine.step()
process, parent = multiprocessing.current_process(), multiprocessing.parent_process()
say(rank, engine.steps, multiprocessing.get_start_method(), process.name, parent, "__mp_main__" in sys.modules)
"""
CHOOSING = """
import multiprocessing

def twice(x):
    return 2 * x

if __name__ == "__main__":
    multiprocessing.set_start_method(("spawn", "forkserver")[rank])
    with multiprocessing.Pool(1) as pool:
        say(pool.map(twice, [rank]))
"""


def test_a_script_without_a_guard_may_load_data_in_processes(start: Callable[..., Supervisor]) -> None:
    """As under Python, its children are forked where that is the default, and do not run the script again."""
    code, out, err = start(WITHOUT_A_GUARD).end()
    default = multiprocessing.get_all_start_methods()[0]
    assert (code, err) == (0, [])
    assert sorted(out.splitlines()) == [f"{rank} 4 {default} MainProcess None False" for rank in (0, 1)]


@pytest.mark.whole
def test_a_script_may_choose_how_its_children_start(start: Callable[..., Supervisor]) -> None:
    """Each rank another way."""
    code, out, err = start(CHOOSING).end()
    assert (code, err, sorted(out.splitlines())) == (0, [], ["[0]", "[2]"])


NODES = """
from zeroshard import init_mesh
from zeroshard.comm.collectives import Comm

mesh = init_mesh(timeout=60.0)
comm = Comm(mesh)
comm.agree(b"", "beginning")
if rank == 1 and attempt == 0:
    os._exit(3)
say(rank, mesh.ranks, [w.decode() for w in comm.agree(os.environ["LOCAL_RANK"].encode(), "place")])
"""


@pytest.mark.whole
def test_two_nodes_restart_together(port: int, start: Callable[..., Supervisor]) -> None:
    place = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port))
    first, second = (start(NODES, *place, "--node-rank", str(node), ranks=1) for node in (0, 1))
    code, out, err = first.end()
    assert (code, out) == (0, "0 2 ['0', '0']\n"), err
    assert second.end()[:2] == (0, "1 2 ['0', '0']\n")
    (report,) = first.failures()
    assert report["culprit"]["ranks"] == [1] and report["culprit"]["reason"] == "ended with exit code 3"
    assert not second.failures() and len([line for line in err if line.startswith("zeroshard: ")]) == 1


@pytest.mark.whole
def test_a_node_that_loses_node_0_ends(port: int, start: Callable[..., Supervisor]) -> None:
    place = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port))
    body = "say(os.getpid())\ntime.sleep(600)\n"
    first, second = (start(body, *place, "--node-rank", str(node), ranks=1) for node in (0, 1))
    rank = psutil.Process(int(second.lines(1)[0]))
    began = time.monotonic()
    first.process.kill()
    code, _, err = second.end()
    assert code == 1 and "lost node 0's supervisor" in err[-1], (code, err, time.monotonic() - began)
    assert not rank.is_running()


def test_a_rank_that_nccls_watchdog_aborts_is_restarted_from_the_checkpoint(alone: dict[str, Supervisor]) -> None:
    supervisor = alone["aborted"]
    code, out, err = supervisor.end()
    assert code == 0, err
    lines = sorted(line.split() for line in out.splitlines())
    assert [line[:3] for line in lines] == [["0", "2", "4"], ["1", "2", "4"]] and lines[0][3] == lines[1][3]
    (report,) = supervisor.failures()
    culprit = report["culprit"]
    assert (culprit["ranks"], culprit["phase"], report["verdict"]["restart"]) == ([0], "loading data", True)
    assert (
        "rank 1 was killed by SIGABRT, as by NCCL's watchdog, in 'gather parameters of the root'" in culprit["reason"]
    )
    assert [rank["exit"] for rank in report["ranks"]][1] == "SIGABRT"
    assert "Fatal Python error: Aborted" in report["ranks"][1]["stack"]
    assert any("Watchdog caught" in line for line in err) and any("restart 1 of 3" in line for line in err)


def test_the_same_error_twice_ends_the_job(alone: dict[str, Supervisor]) -> None:
    supervisor = alone["same error"]
    code, out, err = supervisor.end()
    assert (code, out) == (1, "")
    assert [report["attempt"] for report in supervisor.failures()] == [0, 1]
    assert "rank 1 raised ValueError: bad luck" in err[-1] and "the same step failed twice" in err[-1]
    assert str(max(supervisor.reports.iterdir())) in err[-1]
    assert err.count("ValueError: bad luck") == 2  # one traceback each time


def test_a_kill_a_stop_and_an_endless_loop_are_named_and_survived(alone: dict[str, Supervisor]) -> None:
    supervisor = alone["faults"]
    code, out, err = supervisor.end()
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"rank {rank} done [b'3', b'3']" for rank in (0, 1)]
    killed, stopped, looped = supervisor.failures()
    for attempt, report in enumerate((killed, stopped, looped)):
        assert report["attempt"] == attempt and report["culprit"]["ranks"] == [1] and report["verdict"]["restart"]
        assert [r["rank"] for r in report["ranks"]] == [0, 1]
        assert report["culprit"]["step"] == attempt and report["culprit"]["phase"] == "faults"
        assert sum(report["culprit"]["words"] in line for line in err) == 1
    assert killed["culprit"]["kind"] == "signal" and killed["ranks"][1]["exit"] == "SIGKILL"
    assert killed["ranks"][0]["error"]["type"] == "CommError"  # the echo is in the report, and is not blamed
    assert stopped["culprit"]["kind"] == "silent" and "the process is stopped" in stopped["culprit"]["reason"]
    assert looped["culprit"]["kind"] == "stalled"
    assert "spin_forever" in looped["ranks"][1]["stack"] and "in agree" in looped["ranks"][0]["stack"]
    assert looped["ranks"][0]["heartbeat"]["collective"] == {"group": "control", "number": 2, "label": "the word"}
    assert looped["ranks"][0]["heartbeat"]["waiting"] and not looped["ranks"][1]["heartbeat"]["waiting"]
