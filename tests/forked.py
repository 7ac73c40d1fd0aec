"""Forks the ranks of jobs from one process that has imported torch and zeroshard; `Forks` of jobs.py talks to it.

Every line of standard input is a job: source, words, ranks, port, a folder, and seconds after which a rank is killed.
Each rank runs the source as `python -c` does, to the end of the interpreter, with its standard error in a file of the
folder; the answer is a line with the exit codes.
"""

import json
import os
import signal
import sys

import torch._dynamo

import zeroshard.parameter_server  # noqa: F401


def next_rank() -> tuple[str, list[str]]:
    """In a copy of this process, the source and the words of its rank; ends this process when there are no more."""
    for line in sys.stdin:
        job = json.loads(line)
        copies = []
        for rank in range(job["ranks"]):
            copies.append(os.fork())
            if not copies[-1]:
                settle(job, rank)
                return job["source"], job["words"]
        codes = [os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) for copy in copies]
        print(json.dumps(codes), flush=True)
    sys.exit()


def settle(job: dict[str, object], rank: int) -> None:
    """Make this copy a rank of a job."""
    file = os.open(f"{job['folder']}/{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number, other in enumerate((nothing, nothing, file)):
        os.dup2(other, number)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["ranks"])}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"])}
    signal.alarm(int(str(job["seconds"])))


if __name__ == "__main__":
    torch.set_num_threads(1)
    source, words = next_rank()
    sys.argv = ["-c", *words]
    exec(compile(source, "<job>", "exec"), {"__name__": "__main__"})
