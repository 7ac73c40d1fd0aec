"""Loading a pretrained model: zs.from_pretrained beside one reading of the files, and from_pretrained on every rank.

    python benchmarks/loading.py [--shape 1.5B] [--ranks 1,2,4] [--dtype bfloat16] [--rounds 3] [--json FILE]

The benchmark writes a checkpoint of Qwen2's shape in bf16 into a temporary folder, in shards with an index, and removes
it at the end. A launch is fresh processes with one thread each, which import the model's code before their clocks
start; the files are in the page cache. Ways to load, in turns:

- `read`: each of N processes reads the bytes of 1/N of the tensors into new memory, in the dtype of the model.
- `ours`: zs.from_pretrained under Plan(zero=3), with torch.optim.SGD, which has no states. Gradients, and fp32 masters
  of parameters in the files' dtype, get their memory with the first step, in which they are written.
- `theirs`: AutoModelForCausalLM.from_pretrained of transformers, whole on every process, with its values copied out of
  the mapped files, as the first update would copy them.
- `sharded`: the same with `DistributedConfig(fsdp_size=N)`, in slices of FSDP2 while it reads; from 2 ranks on.

Figures are medians over rounds: the wall time of the slowest process, and of all of them the CPU seconds and the pages
that they took (minor faults). The peak of the processes' proportional set sizes (PSS, from /proc/self/smaps_rollup),
summed at each time over the processes and without their sum before the load, comes from launches of their own, since
sampling takes time; pages of shared memory count once, those too that no process has mapped yet, as the kernel fills
them without. Bars: memory at most the states that the engine keeps (parameters, gradients and, of 16-bit parameters,
fp32 masters, a slice of each on every rank), the largest tensor and 64 MiB; time at most 1.1 of `read`, 0.5 of `theirs`
and that of `sharded`. The exit status is 1 if memory is above its bar; times depend on other work on the machine.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ranks import answer, circumstances, cpu_seconds, keep, launch

SHAPES: dict[str, dict[str, int]] = {  # of Qwen2's configuration
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151936},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151936},
    "toy": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 512},
}  # fmt: skip
WAYS = ("read", "ours", "theirs", "sharded")
SLACK = 64 * 2**20  # bytes beside slices and the largest tensor
EVERY = 0.02  # seconds between samples of the set size
Samples = list[tuple[float, int]]


def main() -> int:
    """Measure all ways; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5B")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--dtype", default="bfloat16", help="of the loaded model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default=",".join(WAYS), help="those that are measured")
    parser.add_argument("--json", help="a file for the figures")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--sampled", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        answer(load(options.way, Path(options.folder), options.dtype, options.sampled))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        sizes = write(Path(folder), SHAPES[options.shape], options.dtype)
        words = ["--folder", folder, "--dtype", options.dtype]
        cases = [(int(ranks), way) for ranks in options.ranks.split(",") for way in options.ways.split(",")]
        cases = [(ranks, way) for ranks, way in cases if ranks > 1 or way != "sharded"]
        rows = measured(cases, words, options.rounds)
    bar = sizes["states"] + sizes["largest"] + SLACK
    files, states = sizes["files"] / 1e6, sizes["states"] / 1e6
    print(f"{options.shape}, {options.dtype}: files {files:,.0f} MB, states {states:,.0f} MB, bar {bar / 1e6:,.0f} MB")
    for row in rows:
        print(
            "{ranks} ranks  {way:7} {wall:8.2f} s  {cpu:8.2f} CPU s  {faults:9,.0f} faults  peak {peak:8.1f} MB".format(
                **row
            )
        )
    over = [row for row in rows if row["way"] == "ours" and row["peak"] * 1e6 > bar]
    keep({"circumstances": circumstances(), "shape": options.shape, "dtype": options.dtype, **sizes, "rows": rows},
         options.json)  # fmt: skip
    return int(bool(over))


def measured(cases: list[tuple[int, str]], words: list[str], rounds: int) -> list[dict[str, Any]]:
    """One row for each number of ranks and way to load."""
    times: dict[tuple[int, str], list[tuple[float, float, int]]] = {case: [] for case in cases}
    for _ in range(rounds):
        for ranks, way in cases:
            answers = launch(__file__, ["--way", way, *words], ranks)
            wall, cpu = max(each["wall"] for each in answers), sum(each["cpu"] for each in answers)
            times[ranks, way].append((wall, cpu, sum(each["faults"] for each in answers)))
    rows = []
    for ranks, way in cases:
        answers = launch(__file__, ["--way", way, "--sampled", *words], ranks)
        wall, cpu, faults = (statistics.median(column) for column in zip(*times[ranks, way], strict=True))
        peak = peak_of([each["samples"] for each in answers]) / 1e6
        rows.append({"ranks": ranks, "way": way, "wall": wall, "cpu": cpu, "faults": faults, "peak": peak})
    return rows


def peak_of(of_ranks: list[Samples]) -> int:
    """The largest sum of set sizes over processes, less the sum of their first ones."""
    latest = {rank: samples[0][1] for rank, samples in enumerate(of_ranks)}
    before = peak = sum(latest.values())
    for _, rank, nbytes in sorted((at, rank, n) for rank, samples in enumerate(of_ranks) for at, n in samples):
        latest[rank] = nbytes
        peak = max(peak, sum(latest.values()))
    return peak - before


def write(folder: Path, shape: dict[str, int], dtype: str) -> dict[str, int]:
    """Write a checkpoint in shards; returns the bytes of files, of an engine's states, and of the largest tensor."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**shape, tie_word_embeddings=True, max_position_embeddings=2048)
    config.architectures = ["Qwen2ForCausalLM"]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    where: dict[str, str] = {}
    for first in range(0, len(shapes), 64):
        part = dict(list(shapes.items())[first : first + 64])
        file = f"model-{first:05}.safetensors"
        tensors = {name: torch.empty(each, dtype=torch.bfloat16).normal_() for name, each in part.items()}
        save_file(tensors, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    numels = [each.numel() for each in shapes.values()]
    size = getattr(torch, dtype).itemsize
    masters = 4 if size < 4 else 0
    return {"files": files, "states": (2 * size + masters) * sum(numels), "largest": size * max(numels)}


def load(way: str, folder: Path, dtype: str, sampled: bool) -> dict[str, Any]:
    """In a launched process: load once; wall time, CPU seconds, and samples of the set size."""
    import torch
    import transformers
    from torch.distributed.tensor import DTensor
    from transformers import Qwen2ForCausalLM  # imported before the clock starts
    from transformers.distributed import DistributedConfig

    import zeroshard as zs
    from zeroshard.checkpoint.weights import Shards, files_of

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind, rank, ranks = getattr(torch, dtype), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mesh, from_pretrained = zs.init_mesh(), zs.from_pretrained

    def read() -> Any:
        """The bytes of every N-th tensor."""
        shards = Shards(folder, files_of(folder))
        return [shards.whole(name).to(kind) for name in sorted(shards.shapes)[rank::ranks]]

    def ours() -> Any:
        return from_pretrained(folder, partial(torch.optim.SGD, lr=0.1), zs.Plan(zero=3), mesh=mesh, dtype=kind)

    def theirs(**settings: Any) -> Any:
        model = Qwen2ForCausalLM.from_pretrained(folder, dtype=kind, **settings)
        for parameter in model.parameters():
            if isinstance(parameter, DTensor):  # whose `data` cannot be replaced: its slice would stay in the file
                parameter._local_tensor = parameter._local_tensor.clone()
            else:
                parameter.data = parameter.data.clone()
        return model

    def sharded() -> Any:
        return theirs(distributed_config=DistributedConfig(fsdp_size=ranks))

    chosen: Callable[[], Any] = {"read": read, "ours": ours, "sharded": sharded, "theirs": theirs}[way]
    samples: Samples = []
    with sampling(samples) if sampled else sampling(None):
        began, busy, taken = time.perf_counter(), cpu_seconds(), faults()
        kept = chosen()
        wall, cpu, pages = time.perf_counter() - began, cpu_seconds() - busy, faults() - taken
    del kept
    return {"wall": wall, "cpu": cpu, "faults": pages, "samples": samples}


def faults() -> int:
    """Pages that this process has taken so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@contextmanager
def sampling(samples: Samples | None) -> Iterator[None]:
    """Append the time and this process's proportional set size now and then, in a thread."""
    if samples is None:
        yield
        return
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(EVERY):
            samples.append((time.monotonic(), set_size()))

    samples.append((time.monotonic(), set_size()))
    thread = threading.Thread(target=sample)
    thread.start()
    yield
    samples.append((time.monotonic(), set_size()))
    ended.set()
    thread.join()


def set_size() -> int:
    """The proportional set size of this process in bytes, with its share of the files of shared memory.

    Their pages count once in the sum over ranks, those too that no process has mapped yet.
    """
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    sizes = {words[0]: 1024 * int(words[1]) for line in lines if len(words := line.split()) == 3}
    files = {(each.st_dev, each.st_ino): 512 * each.st_blocks for each in map(os.stat, shared_files())}
    shared = sum(files.values()) // int(os.environ["WORLD_SIZE"])
    return sizes["Pss:"] - (sizes["Pss_Shmem:"] if files else 0) + shared


def shared_files() -> Iterator[str]:
    """The open files without a name in /dev/shm, which all ranks have open."""
    for place in map(str, Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # closed meanwhile
            if os.readlink(place).startswith("/dev/shm/") and not os.stat(place).st_nlink:
                yield place


if __name__ == "__main__":
    sys.exit(main())
