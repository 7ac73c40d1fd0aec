"""Every script under `benchmarks/` runs to its end in toy size, with every rank that it starts; and so do examples.

A figure whose script fails is no longer measured. Timings mean nothing here, and none is compared. Scripts leave out
peers that are not installed, and rows that need a GPU. All processes are copies of one that has imported torch.
"""

import contextlib
import functools
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import shlex
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pool import copies, free_port

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
PATIENCE = 240.0  # seconds that a script may take
GRACE, POLL = 2.0, 0.02  # seconds between the first rank's failure and the end of the others; between looks at them
IMPORTED = [
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.mixtral.modeling_mixtral",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch.profiler",
    "zeroshard.train.run",
    "zeroshard.verification.run",
]
TOY = {  # words behind the name of each script; KEPT is a file for its figures
    "asynchronous.py": "--rounds 1 --seconds 0.2 --factors 1 --step-ms 5 --json KEPT",
    "before_after.py": "HEAD --rows overhead/1/zero0/8x1 --pairs 1 --steps 1",
    "checkpoints.py": "--toy --only saves --rounds 1 --pairs 1 --every 1 --precisions fp32 --json KEPT",
    "compiled.py": "--width 16 --blocks 2 --rows 1 --sequence 8 --steps 1 --backend eager --json KEPT",
    "data.py": "--bytes 2e6 --rounds 1 --seconds 0.2 --json KEPT",
    "estimates.py": "--quick --rounds 1 --only 'schedule 1f1b' --json KEPT",
    "first_minutes.py": "--here --path loop --json KEPT",
    "gist.py": "losses --steps 2 --width 16 --layers 1 --json KEPT",
    "gpu/all.py": "--cpu --out . --json KEPT",
    "gpu/several.py": "--cpu --out . --json KEPT",
    "host_adam.py": "--elements 4096 --rounds 2 --threads 1 --no-compile --json KEPT",
    "linear_cross_entropy.py": "--toy --rounds 2 --json KEPT",
    "loading.py": "--shape toy --ranks 1 --ways ours --rounds 1 --json KEPT",
    "moe.py": "--toy --rounds 2 --json KEPT",
    "moe_quality.py": "--seeds 1 --steps 4",
    "offload.py": "--sizes 1M --tokens 1 --rounds 1 --steps 1 --engines compute,memory-1,offload-1 --json KEPT",
    "optimizers.py": "--toy --json KEPT",
    "overhead.py": "--ranks 1 --rounds 1 --steps 1 --json KEPT",
    "plan_questions.py": "--only 32 --limit 60 --once --json KEPT",
    "partition.py": "--models AlexNet --devices 4 --json KEPT",
    "partition_graphs.py": "--models AlexNet GNMT --json KEPT",
    "peers.py": "--sizes 1M --tokens 8 --precisions fp32 --rounds 1 --steps 1 --engines fsdp2,zero2-shared --json KEPT",
    "pipelines.py": "--rounds 1 --steps 2 --width 16 --tokens 8 --layers 2 --microbatches 2 --json KEPT",
    "predictions.py": "--part times --part fits --toy --first 1 --rounds 1 --steps 1 --plans 1 --json KEPT",
    "paper_mutations.py": "--files checkpoint --plans users",
    "random_plans.py": "--count 2 --json KEPT",
    "recompute.py": "--layers 2 --width 16 --rows 1 --context 8 --steps 2 --json KEPT",
    "recompute_auto.py": "--layers 2 --width 16 --rows 1 --context 8 --steps 2 --budgets 1 --json KEPT",
    "recompute_means.py": "--layers 2 --widths 16 --rows 1 --context 8 --steps 2 --engines 1 --budgets 1 --json KEPT",
    "rng.py": "--sizes tiny --batches 1 --steps 2 --json KEPT",
    "soak.py": "--only F21 --forged 2 --quick --json KEPT",
    "startup.py": "--part scripts --pairs 1 --size 1M --scripts zero3-shared",
    "tensor.py": "--rounds 1 --shapes 64 --kinds single alone ours dtensor --json KEPT",
    "pipeline_families.py": "--families t5 --json KEPT",
    "tensor_families.py": "--families llama --json KEPT",
    "verify_bugs.py": "--bugs dropped_microbatch",
    "verify_zoo.py": "--models Plain --plans zero2-m2 --json KEPT",
}
ON_TWO_RANKS = {  # scripts that others start, which take no part in a toy run of those; and a line that they print
    "startup_ddp.py": ("tiny 8 1", "RESULT"),
    "soak/culprit.py": (". raise", "bad luck"),
    "soak/inject.py": (
        "slow 1 0 -- train --steps 1 --sequence 8 --batch-per-rank 1 --validation-rows 2 --sample-tokens 0 "
        "--no-checkpoint",
        "report ",
    ),
}
STARTED_BY = {
    "peer_engines.py": "peers.py",
    "gpu/facts.py": "gpu/slices.py",
    **{f"gpu/{name}.py": "gpu/all.py" for name in ("suite", "machine", "single", "offload", "predicted")},
    **{f"gpu/{name}.py": "gpu/several.py" for name in ("links", "parity", "overlap", "faults")},
}
BARRED = {"tensor.py"}  # which ends with 1 where a time is above its bar


class Copies:
    """A process that has imported what scripts need, and runs each in a copy of itself."""

    def __init__(self) -> None:
        self._pipe, there = copies().Pipe()
        self._process = copies().Process(target=_serve, args=(there,))
        self._process.start()

    def run(self, script: Path, words: str, folder: Path, ranks: int = 0) -> tuple[int, str]:
        """Exit code and output of a script that starts in a folder of its own, or of so many ranks of it."""
        self._pipe.send((str(script), shlex.split(words), str(folder), ranks))
        assert self._pipe.poll(PATIENCE), f"{script.name} is not done after {PATIENCE:.0f} s"
        return self._pipe.recv(), (folder / "output.txt").read_text()

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


@pytest.fixture(scope="module")
def started() -> Iterator[Copies]:
    found = Copies()
    yield found
    found.stop()


@pytest.mark.parametrize("script", TOY)
def test_a_script_runs_to_its_end_in_toy_size(started: Copies, script: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    code, output = started.run(BENCHMARKS / script, TOY[script].replace("KEPT", str(kept)), tmp_path)
    assert code == 0 or (script in BARRED and "Traceback" not in output), output
    assert kept.exists() == ("KEPT" in TOY[script]), output
    assert not kept.exists() or json.loads(kept.read_text()), output


@pytest.mark.parametrize("script", ON_TWO_RANKS)
def test_a_script_runs_that_others_start(started: Copies, script: str, tmp_path: Path) -> None:
    words, printed = ON_TWO_RANKS[script]
    _, output = started.run(BENCHMARKS / script, words, tmp_path, ranks=2)
    assert printed in output and ("Traceback" in output) == (printed == "bad luck"), output


def test_unmodified_hugging_face_gpt2(started: Copies, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    _, output = started.run(ROOT / "examples" / "huggingface_gpt2.py", "", tmp_path, ranks=2)
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in output.splitlines() if "loss " in line]
    assert losses[-1] < losses[0] < 5.5, output


def test_every_script_is_among_them() -> None:
    found = [path for path in BENCHMARKS.glob("**/*.py") if "__main__" in path.read_text()]
    names = sorted(path.relative_to(BENCHMARKS).as_posix() for path in found)
    assert names == sorted({*TOY, *ON_TWO_RANKS, *STARTED_BY})
    assert all(name in (BENCHMARKS / other).read_text() for name, other in STARTED_BY.items())
    tested = "".join((ROOT / "tests" / name).read_text() for name in ("test_examples.py", "test_scripts.py"))
    assert all(f'"{path.name}"' in tested for path in (ROOT / "examples").glob("*.py"))


def _serve(pipe: Any) -> None:
    """Run what is asked for, one after the other."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path[:0] = [str(BENCHMARKS), str(ROOT / "src")]
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    importlib.import_module("ranks").launch = launch
    importlib.import_module("ranks").run_script = run_script
    corpus = importlib.import_module("zeroshard.data.corpus")
    corpus.standard_library_corpus = functools.cache(corpus.standard_library_corpus)
    corpus.standard_library_corpus()
    fork: Any = multiprocessing.get_context("fork")
    fork.set_forkserver_preload = lambda names: None
    multiprocessing.get_context = lambda kind=None: fork  # so that a script's own processes are copies too
    gc.freeze()  # what is imported is not looked through again in every copy
    while True:
        process = fork.Process(target=_script, args=pipe.recv())
        process.start()
        process.join()
        pipe.send(process.exitcode)


def _script(script: str, words: list[str], folder: str, ranks: int) -> None:
    os.chdir(folder)
    if not ranks:
        _become(script, words, "output.txt")
    Path("output.txt").write_text("".join(_texts(script, words, ranks, {}, PATIENCE)))


def _become(script: str, words: list[str], output: str) -> None:
    """Run a script as the interpreter would, with its output in a file, and end the process."""
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv, sys.path[0] = [script, *words], str(Path(script).parent)
    code: Any = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        print(error.code if isinstance(error.code, str) else "")
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def launch(
    script: str | Path,
    words: Sequence[str],
    ranks: int,
    python: str = sys.executable,
    more_env: Mapping[str, str] | None = None,
    timeout: float = 900.0,
) -> list[dict[str, Any]]:
    """As `ranks.launch`, with processes that are copies of this one."""
    from ranks import MARK, LaunchError

    texts = _texts(str(script), list(words), ranks, more_env or {}, timeout)
    if any(MARK not in text for text in texts):
        raise LaunchError("\n".join([f"no answer from {' '.join(words)}", *texts]))
    return [json.loads(text.rpartition(MARK)[2].splitlines()[0]) for text in texts]


def run_script(
    script: str | Path, words: Sequence[str], output: Path, timeout: float, more_env: Mapping[str, str] | None = None
) -> int | None:
    """As `ranks.run_script`, in a copy of this process."""
    process = multiprocessing.Process(target=_apart, args=(str(script), list(words), str(output), more_env or {}))
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        return None
    return process.exitcode


def _apart(script: str, words: list[str], output: str, more_env: Mapping[str, str]) -> None:
    os.environ |= more_env
    _become(script, words, output)


def _texts(script: str, words: list[str], ranks: int, more_env: Mapping[str, str], timeout: float) -> list[str]:
    """What the ranks of a script print."""
    with free_port() as port:
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        job |= {"LOCAL_WORLD_SIZE": str(ranks), **more_env}
        processes = [
            multiprocessing.Process(target=_rank, args=(rank, job, script, words), daemon=True) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + timeout
        while any(process.is_alive() for process in processes) and time.monotonic() < end:
            if any(process.exitcode for process in processes):
                end = min(end, time.monotonic() + GRACE)
            time.sleep(POLL)
        for process in processes:
            process.kill()
            process.join()
    return [Path(f"rank-{rank}.txt").read_text() for rank in range(ranks)]


def _rank(rank: int, job: Mapping[str, str], script: str, words: list[str]) -> None:
    os.environ |= {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    _become(script, words, f"rank-{rank}.txt")
