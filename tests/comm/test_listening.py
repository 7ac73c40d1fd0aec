"""What a job on one machine opens for others to connect to: on the loopback address, and nowhere else."""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

SOURCE = str(Path(__file__).parents[2] / "src")
PATIENCE = 150.0  # seconds after which a test gives up
LISTENS = "0A"  # in /proc/net/tcp
ELSEWHERE = "127.0.0.2"  # stands for the address of the machine in its network
RENAMED = "import os, socket, sys; socket.sethostname(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])"


def listeners(pid: int) -> set[str]:
    """The addresses at which a process listens."""
    held = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            held.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and f"socket:[{words[9]}]" in held:
                found.add(words[1].partition(":")[0])
    return found


def test_a_job_on_one_machine_listens_on_the_loopback_address_alone(tmp_path: Path) -> None:
    """On a machine whose name means another address, where gloo would listen by itself."""
    renamed = ["unshare", "-ru", sys.executable, "-c", RENAMED, ELSEWHERE]
    if subprocess.run([*renamed, "/bin/true"], capture_output=True).returncode != 0:
        pytest.skip("this machine gives a user no name of its own for it (unshare -ru)")
    words = ["run", "--nproc-per-node", "2", "--reports", str(tmp_path / "crashes"), "--", __file__, str(tmp_path)]
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "GLOO_SOCKET_IFNAME")}
    job = subprocess.Popen(
        [*renamed, sys.executable, "-m", "zeroshard", *words],
        env={**clean, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"},
    )
    try:
        deadline = time.monotonic() + PATIENCE
        while not all((tmp_path / f"{rank}").exists() for rank in (0, 1)):
            assert job.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        processes = [job.pid, *(child.pid for child in psutil.Process(job.pid).children(recursive=True))]
        found = {pid: listeners(pid) for pid in processes}
        (tmp_path / "seen").touch()
        assert job.wait(PATIENCE) == 0
    finally:
        job.kill()
        job.wait()
    assert len([pid for pid in found if found[pid]]) >= 3, "the supervisor's store and the gloo of two ranks"
    assert set().union(*found.values()) == {"0100007F"}  # 127.0.0.1


def main(folder: Path) -> None:
    """A rank that trains in both ways and lets itself be looked at."""
    import torch
    from torch import nn

    import zeroshard as zs
    from zeroshard.parameter_server import AsynchronousTrainer

    mesh, sgd = zs.init_mesh(), partial(torch.optim.SGD, lr=0.1)
    engine = zs.Engine(nn.Linear(2, 2), sgd, zs.Plan(transport="network"), mesh=mesh)
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    model = nn.Linear(2, 2)
    trainer = AsynchronousTrainer(model, sgd, mesh=mesh)
    model(torch.ones(1, 2)).sum().backward()
    trainer.step()
    (folder / f"{mesh.rank}").touch()
    deadline = time.monotonic() + PATIENCE
    while not (folder / "seen").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    trainer.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
