"""One rank of one launch of `peers.py`: train the GPT with one engine, and answer with time, traffic and memory.

`ENGINES` holds all that can be launched; each family has one function here that makes its step.
"""

import time

BEGIN = time.perf_counter()  # before any import that costs something

import contextlib  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from functools import partial  # noqa: E402
from importlib import import_module  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from ranks import answer, cpu_seconds, loopback_bytes  # noqa: E402

WARM = 3  # steps before the timed ones
ADAM: dict[str, Any] = {"lr": 2e-5, "fused": True}
SHAPES = {  # vocabulary, W, H, layers
    "25M": (12_288, 512, 8, 6),
    "100M": (16_384, 768, 12, 12),
    "350M": (50_304, 1024, 16, 20),
    "1.3B": (50_304, 2048, 16, 24),
    "1M": (256, 128, 2, 5),
}
CONTEXT = 2048  # most tokens of a row


@dataclass(frozen=True)
class Engine:
    """One way to train.

    Attributes:
        name: as on the command line.
        family: a key of `FAMILIES`.
        stage: of ZeRO, where the family has stages by number.
        transport: for zeroshard, the plan's field of this name.
        reshard: for FSDP2, whether gathered parameters are freed after the forward.
    """

    name: str
    family: str
    stage: int | None = None
    transport: str | None = None
    reshard: bool = True


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("local", "local"),
        Engine("ddp", "ddp"),
        Engine("ddp-zro", "ddp"),
        Engine("fsdp2", "fsdp2"),
        Engine("fsdp2-keep", "fsdp2", reshard=False),
        *(Engine(f"deepspeed{stage}", "deepspeed", stage) for stage in range(4)),
        *(Engine(f"zero{stage}", "zeroshard", stage, "network") for stage in range(4)),
        *(Engine(f"zero{stage}-shared", "zeroshard", stage, "shared") for stage in range(4)),
    )
}


@dataclass(frozen=True)
class Case:
    """The training job: a key of `SHAPES`, tokens per rank, "fp32" or "bf16", the type of the device, and the ranks."""

    size: str
    tokens: int
    precision: str
    device: str = "cpu"
    ranks: int = 2

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of a rank, and tokens of a row."""
        length = min(self.tokens, CONTEXT)
        return self.tokens // length, length


class Trial:
    """The model, the batch and the clocks of this rank.

    Made after the imports of the engine, so that `base_rss` is their memory.
    """

    def __init__(self, case: Case) -> None:
        self.base_rss = _resident()
        import torch

        gpt: Any = import_module("zeroshard.train.gpt")  # revisions define its names in other modules

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.bf16 = case.precision == "bf16"
        self.cuda = case.device == "cuda"
        self.device = torch.device(case.device, torch.cuda.current_device()) if self.cuda else torch.device("cpu")
        vocabulary, width, heads, layers = SHAPES[case.size]
        count, length = case.rows
        self.model = gpt.GPT(gpt.GPTConfig(vocabulary, length, width, heads, layers)).to(self.device)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        mine = torch.Generator().manual_seed(1 + int(os.environ["RANK"]))
        rows = torch.randint(vocabulary, (count, length + 1), generator=mine).to(self.device)
        self.batch = (rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        self.adam: Callable[..., Any] = partial(torch.optim.AdamW, **ADAM)
        self.counted: Callable[[], int | None] = lambda: None

    def finish(self) -> None:
        """Wait for the device, so that a clock sees whole steps."""
        import torch

        if self.cuda:
            torch.cuda.synchronize()

    def loop(self, model: Any, optimizer: Any) -> Callable[[], Any]:
        """A step of torch's plain loop; bf16 by autocast, because nothing here keeps fp32 masters."""
        import torch

        def step() -> Any:
            with torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else contextlib.nullcontext():
                loss = model(*self.batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step


BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
Made = tuple[Trial, Callable[[], Any]]  # and the step, which returns this rank's loss


def make_local(engine: Engine, case: Case) -> Made:
    """The plain loop without communication."""
    import torch  # noqa: F401

    trial = Trial(case)
    return trial, trial.loop(trial.model, trial.adam(trial.model.parameters()))


def make_ddp(engine: Engine, case: Case) -> Made:
    """DistributedDataParallel, with AdamW whole or by ZeroRedundancyOptimizer."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    optimizer_class: Any = torch.optim.AdamW
    if engine.name == "ddp-zro":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer_class = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)
    torch.distributed.init_process_group(BACKENDS[case.device])
    trial = Trial(case)
    optimizer = optimizer_class(trial.model.parameters(), **ADAM)
    return trial, trial.loop(DistributedDataParallel(trial.model), optimizer)


def make_fsdp2(engine: Engine, case: Case) -> Made:
    """FSDP2: `fully_shard` on every block and on the root."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(case.device, (int(os.environ["WORLD_SIZE"]),))
    trial = Trial(case)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if trial.bf16 else MixedPrecisionPolicy()
    for module in (*trial.model.blocks, trial.model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=engine.reshard)
    step = trial.loop(trial.model, trial.adam(trial.model.parameters()))
    trial.bf16 = False  # the policy casts, not autocast
    return trial, step


def make_deepspeed(engine: Engine, case: Case) -> Made:
    """DeepSpeed with the same fused AdamW, no clipping, otherwise its own defaults."""
    import deepspeed  # type: ignore[import-not-found]

    deepspeed.init_distributed(BACKENDS[case.device], verbose=False)
    trial = Trial(case)
    config = {
        "train_micro_batch_size_per_gpu": case.rows[0],
        "zero_optimization": {"stage": engine.stage},
        "bf16": {"enabled": trial.bf16},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    optimizer = trial.adam(trial.model.parameters())
    wrapped, *_ = deepspeed.initialize(model=trial.model, optimizer=optimizer, config=config)

    def step() -> Any:
        loss = wrapped(*trial.batch)
        wrapped.backward(loss)
        wrapped.step()
        return loss.detach()

    return trial, step


def make_zeroshard(engine: Engine, case: Case) -> Made:
    """zeroshard, whose own loop runs where none of torch's is asked for."""
    import torch

    import zeroshard as zs

    settings: dict[str, Any] = {"zero": engine.stage, "precision": case.precision, "transport": engine.transport}
    mesh = zs.init_mesh(device=case.device)
    ours = zs.Engine  # imported here, before the trial looks at memory
    trial = Trial(case)
    fused = {"fused": True} if trial.cuda else {}
    made = ours(trial.model, partial(torch.optim.AdamW, lr=ADAM["lr"], **fused), zs.Plan(**settings), mesh=mesh)
    trial.counted = lambda: sum(row.sent_bytes for row in made.traffic())
    return trial, lambda: made.train_step(trial.batch).loss


FAMILIES = {
    "local": make_local,
    "ddp": make_ddp,
    "fsdp2": make_fsdp2,
    "deepspeed": make_deepspeed,
    "zeroshard": make_zeroshard,
}


def measure(engine: Engine, case: Case, steps: int) -> dict[str, Any]:
    """Train, and return this rank's figures: seconds, bytes sent and page faults per step, memory in bytes."""
    if case.device == "cuda":
        import torch

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    trial, step = FAMILIES[engine.family](engine, case)
    step()
    trial.finish()
    startup = {"startup_s": time.perf_counter() - BEGIN, "startup_cpu_s": cpu_seconds()}
    for _ in range(WARM - 1):
        step()
    sent = _loopback()
    walls, cpus, faults = [], [], []
    for _ in range(steps):
        cpu, fault, wall = cpu_seconds(), _minor_faults(), time.perf_counter()
        step()
        trial.finish()
        walls.append(time.perf_counter() - wall)
        cpus.append(cpu_seconds() - cpu)
        faults.append(_minor_faults() - fault)
    sent = _loopback() - sent
    memory = {"base_rss": trial.base_rss, "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    memory["pss"] = _proportional()  # while both ranks still hold the shared memory
    memory["device_peak"] = _device_peak() if trial.cuda else None
    wire = {"wire_bytes": sent / steps, "counted_bytes": trial.counted()}
    _barrier()
    medians: dict[str, list[Any]] = {"step_s": walls, "cpu_s": cpus, "minor_faults": faults}
    figures = {name: statistics.median(values) for name, values in medians.items()}
    figures["loss"] = float(step())  # its forward sees the weights that the timed steps left
    return {**figures, **startup, **memory, **wire, "parameters": trial.parameters, "versions": _versions()}


def _loopback() -> int:
    """Bytes sent over the loopback device when all ranks are between two steps."""
    _barrier()
    sent = loopback_bytes()
    _barrier()
    return sent


def _barrier() -> None:
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def _device_peak() -> int:
    """Most bytes that torch allocated on the device since the start of the process."""
    import torch

    return torch.cuda.max_memory_allocated()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _proportional() -> int:
    """Bytes of this process in memory, of shared pages its share."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _minor_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _versions() -> dict[str, str]:
    known = {name: sys.modules.get(name) for name in ("torch", "zeroshard", "deepspeed")}
    return {name: str(module.__version__) for name, module in known.items() if module is not None}


def main() -> None:
    """Arguments: engine, size, tokens, precision, device, steps."""
    name, size, tokens, precision, device, steps = sys.argv[1:]
    answer(measure(ENGINES[name], Case(size, int(tokens), precision, device), int(steps)))
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized() and ENGINES[name].family != "zeroshard":
        distributed.destroy_process_group()  # zeroshard does so itself


if __name__ == "__main__":
    main()
