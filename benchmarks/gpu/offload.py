"""One GPU and its host: bandwidths, and models whose optimizer states or parameters live in host memory. See METHOD.md.

    python benchmarks/gpu/offload.py [--models 1.4B,7B,13B,20B] [--tokens 8192,16384] [--layers N] [--largest]
        [--planned] [--json FILE]

First it measures rates: pinned copies down, up and both at once, and reads and updates of the host's own memory. Then
it trains the GPT of train/gpt.py with checkpointed blocks in bf16, every launch a process of its own: tokens per
second, MFU, seconds exposed by cause, and peaks of device and host. DeepSpeed's ZeRO-2 with its optimizer on the CPU
runs in turn with it where it is installed. `--largest` tries deeper models until one does not fit; `--planned` trains
the one model that the planner says is the deepest that fits. Without a GPU it prints that it did not run, and exits
with status 0; `--cpu` tries the script out on a tiny model. The exit status is 1 if no model was trained.
"""

import argparse
import contextlib
import json
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from ranks import LaunchError, answer, circumstances, keep, launch

SHAPES = {"1.4B": (2048, 16, 24), "7B": (4096, 32, 32), "13B": (5120, 40, 40), "20B": (6144, 48, 44), "try": (64, 2, 2)}
VOCABULARY, CONTEXT = 50304, 2048
ENGINES = {
    "memory": {"zero": 2},
    "optimizer": {"zero": 2, "offload": "optimizer"},
    "after-norm": {"zero": 2, "offload": "optimizer", "offload.speculate": False},
    "share": {"zero": 2, "offload": "optimizer"},  # with the smallest fraction offloaded that fits
    "8-bit share": {"zero": 2, "offload": "optimizer", "offload.moments": "8bit"},  # likewise
    "parameters": {"zero": 3, "offload": "optimizer,parameters"},
    "deepspeed": {},
}
DEVICE_RESERVE, HOST_RESERVE = 12e9, 10e9  # bytes for activations and workspace; for this process and others
STATES = 14  # bytes per parameter that stays on the device: fp32 masters and moments, and its gradient
WARM = 3
Row = dict[str, Any]


def probe(device: str, nbytes: int, times: int = 5) -> Row:
    """GB/s of pinned copies and of the host's memory: medians of `times` passes over `nbytes`."""
    import torch

    from zeroshard.optim.host.adam import adam_update
    from zeroshard.optim.host.states import HostStates, Scalars

    cuda = device == "cuda"
    hosts = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=cuda).fill_(1) for _ in range(2)]
    devices = [torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream() if cuda else None for _ in range(2)]

    def copy(*lanes: int) -> None:
        for lane in lanes:
            into, source = (hosts, devices) if lane == 0 else (devices, hosts)
            with torch.cuda.stream(streams[lane]) if cuda else contextlib.nullcontext():
                into[lane].copy_(source[lane], non_blocking=True)

    def rate(work: Callable[[], Any], moved: float) -> float:
        seconds = []
        for _ in range(times + 1):
            _synchronise(device)
            start = time.perf_counter()
            work()
            _synchronise(device)
            seconds.append(time.perf_counter() - start)
        return moved / statistics.median(seconds[1:]) / 1e9

    floats = hosts[0].view(torch.float32)
    n = nbytes // 16
    states = HostStates(*(torch.zeros(n) for _ in range(3)))
    gradient, out = torch.ones(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.bfloat16)
    group = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    scalars = Scalars.of(group, 1, True)
    return {
        "down_gb_s": rate(partial(copy, 0), nbytes),
        "up_gb_s": rate(partial(copy, 1), nbytes),
        "both_gb_s": rate(partial(copy, 0, 1), 2 * nbytes),
        "host_read_gb_s": rate(floats.sum, nbytes),
        "host_update_gb_s": rate(lambda: adam_update(gradient, 1.0, scalars, states, states, out), 28 * n),
        "host_weights_gb_s": rate(lambda: adam_update(gradient, 1.0, scalars, states, None, out), 16 * n),
        "threads": torch.get_num_threads(),
    }


def make_model(name: str, layers: int | None) -> Any:
    """The GPT on the meta device; its blocks compute their forward again in the backward."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from zeroshard.train.gpt import GPT
    from zeroshard.train.sizes import GPTConfig

    width, heads, depth = SHAPES[name]
    with torch.device("meta"):
        model = GPT(GPTConfig(VOCABULARY, CONTEXT, width, heads, layers or depth))
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return model


def flops_per_token(model: Any) -> float:
    """FLOPs of forward and backward without recomputation: 6 per weight, and 12 L T W for attention, half masked."""
    weights: int = sum(parameter.numel() for parameter in model.parameters())
    return 6.0 * weights + 12.0 * model.config.layers * CONTEXT * model.config.width / 2


def share_that_fits(parameters: int, device: str) -> float:
    """The smallest fraction of the parameters whose states must be offloaded for the others' to fit on the device."""
    import torch

    room = torch.cuda.mem_get_info()[1] if device == "cuda" else 1e9
    left = room - DEVICE_RESERVE - 2 * parameters  # the bf16 weights stay
    return min(1.0, max(0.01, 1 - left / (STATES * parameters)))


def make_step(engine_name: str, model: Any, batch: Any, device: str) -> tuple[Any, Callable[[], Any], Row]:
    """The engine, its step, and the settings of its plan."""
    import torch

    settings: Row = {**ENGINES[engine_name]}
    if engine_name == "deepspeed":
        return _deepspeed(model, batch, device)
    import zeroshard as zs

    if engine_name.endswith("share"):
        settings["offload.fraction"] = share_that_fits(sum(p.numel() for p in model.parameters()), device)
    adam = partial(torch.optim.AdamW, lr=1e-5)
    engine = zs.Engine(
        model, adam, zs.Plan.from_dict({"precision": "bf16", **settings}), mesh=zs.init_mesh(device=device)
    )
    return engine, lambda: engine.train_step(batch).loss, settings


def _deepspeed(model: Any, batch: Any, device: str) -> tuple[Any, Callable[[], Any], Row]:
    """Stage 2 with its own Adam on the CPU, page-locked memory, otherwise its defaults."""
    import deepspeed  # type: ignore[import-not-found]

    model = model.to_empty(device=device)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    config = {"train_micro_batch_size_per_gpu": len(batch[0]), "zero_optimization": zero, "bf16": {"enabled": True}}
    config |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}, "steps_per_print": 10**9}
    engine, *_ = deepspeed.initialize(model=model, config=config)

    def step() -> Any:
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return engine, step, zero


def measure(engine_name: str, name: str, tokens: int, steps: int, layers: int | None, device: str) -> Row:
    """The figures of one launch."""
    import torch

    model = make_model(name, layers)
    parameters, flops = sum(p.numel() for p in model.parameters()), flops_per_token(model) * tokens
    time_length = min(CONTEXT, tokens)
    rows = torch.randint(VOCABULARY, (tokens // time_length, time_length + 1), device=device)
    batch = (rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
    engine, step, settings = make_step(engine_name, model, batch, device)
    seconds, exposed, loss = [], [], math.nan
    for number in range(WARM + steps):
        if number == WARM and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        _synchronise(device)
        start = time.perf_counter()
        loss = float(step())  # updates may go on beside the next step
        seconds.append(time.perf_counter() - start)
        exposed.append(dict(getattr(engine, "exposed", {})))
    causes = {cause for each in exposed[WARM:] for cause in each}
    row: Row = {"step_s": statistics.fmean(seconds[WARM:]), "tokens": tokens, "parameters": parameters, "loss": loss}
    row["exposed_s"] = {c: statistics.fmean(each.get(c, 0.0) for each in exposed[WARM:]) for c in sorted(causes)}
    row["device_peak"] = torch.cuda.max_memory_allocated() if device == "cuda" else None
    row["host_peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    row["host_ledger"] = engine.ledger.total("host") if engine_name != "deepspeed" else None
    return {**row, "flops": flops, "settings": {key: str(value) for key, value in settings.items()}}


def _synchronise(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def show(row: Row, peak_flops: float) -> None:
    """Add figures derived from the measured ones, and print a line."""
    row["tokens_per_s"], row["mfu"] = row["tokens"] / row["step_s"], row["flops"] / row["step_s"] / peak_flops
    peaks = [row[name] for name in ("device_peak", "host_peak")]
    memory = " ".join("-" if peak is None else f"{peak / 2**30:.1f}" for peak in peaks)
    causes = ", ".join(f"{cause} {seconds:.3f}" for cause, seconds in row["exposed_s"].items())
    print(
        f"{row['model']:5} {row['parameters'] / 1e9:6.2f} B {row['engine']:11} {row['tokens']:6} tokens"
        f" {row['tokens_per_s']:9,.0f}/s  MFU {100 * row['mfu']:5.1f} %  device and host GiB {memory}"
        f"  exposed s: {causes or 'none'}",
        flush=True,
    )


def planned(engine: str, tokens: int, device: str) -> int:
    """Layers of the deepest model of the 20 B's width that fits into device and host by the planner; 0 for none.

    The search begins where 16 bytes of each parameter that is not on the device fill the host, and goes down by
    sixteenths: a rehearsal takes seconds. Copies of a checkpoint do not count, since none is written here.
    """
    import torch

    import zeroshard as zs
    from zeroshard.planner.predict.predict import predict
    from zeroshard.planner.predict.rehearse import TrainingTask
    from zeroshard.planner.search.this_machine import free_memory, local_machines

    time_length, room = min(CONTEXT, tokens), free_memory() - HOST_RESERVE
    name, most = ("try", 2) if device == "cpu" else ("20B", 160)
    machines = local_machines(1, device)

    def batch(count: int) -> Any:
        rows = torch.randint(VOCABULARY, (count, time_length))
        return rows, rows

    def fraction(layers: int) -> tuple[int, float]:
        parameters = sum(parameter.numel() for parameter in make_model(name, layers).parameters())
        return parameters, share_that_fits(parameters, device) if engine.endswith("share") else 1.0

    def fits(layers: int) -> bool:
        settings = {**ENGINES[engine], "precision": "bf16", "offload.fraction": fraction(layers)[1]}
        task = TrainingTask(
            partial(make_model, name, layers), batch, partial(torch.optim.AdamW, lr=1e-5), tokens // time_length,
            time_length,
        )  # fmt: skip
        found = predict(task, zs.Plan.from_dict(settings), machines, tokens // time_length)
        return "device" not in found.full and sum(found.host.values()) <= room

    layers = max((n for n in range(1, most + 1) if 16 * math.prod(fraction(n)) <= room), default=0)
    while layers and not fits(layers):
        layers -= max(1, layers // 16)
    return layers


def attempts(options: argparse.Namespace, engines: list[str]) -> Iterator[tuple[str, str, int, int | None]]:
    """(engine, model, tokens, layers) of every launch; engines take turns."""
    for model in options.models.split(","):
        for tokens in map(int, options.tokens.split(",")):
            for engine in engines:
                yield engine, model, tokens, options.layers


def largest(engine: str, run: Callable[[str, str, int, int | None], Row | None]) -> Row | None:
    """The deepest model of the 20 B's width that trains, to four layers."""
    fits, low, high = None, 0, 160
    while high - low > 4:
        middle = (low + high) // 2
        row = run(engine, "20B", CONTEXT, middle)
        low, high, fits = (middle, high, row) if row else (low, middle, fits)
    return fits


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="by default 1.4B,7B,13B,20B")
    parser.add_argument("--tokens", help="of a step, a multiple of 2048; by default 8192,16384")
    parser.add_argument("--layers", type=int, help="in the place of each model's own: for what a host cannot hold")
    parser.add_argument("--engines", help=f"by default all of {', '.join(ENGINES)}")
    parser.add_argument("--steps", type=int, default=5, help=f"timed steps, after {WARM} others")
    parser.add_argument("--largest", action="store_true", help="also search for the largest model of each engine")
    parser.add_argument("--planned", action="store_true", help="train only the deepest model that fits by the planner")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="dense bf16 of the GPU, for MFU (H100, H200)")
    parser.add_argument("--cpu", action="store_true", help="try the script out without a GPU")
    parser.add_argument("--json", help="file for the figures, written anew after each launch")
    parser.add_argument("--launched", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.models = options.models or ("try" if options.cpu else "1.4B,7B,13B,20B")
    options.tokens = options.tokens or ("8" if options.cpu else "8192,16384")
    return options


def main() -> None:
    """Probe, launch, print, keep."""
    options = parse()
    if options.launched:
        engine, model, tokens, steps, layers, device = options.launched
        found = probe(device, 2**30 if device == "cuda" else 2**24) if engine == "probe" else None
        answer(found or measure(engine, model, int(tokens), int(steps), int(layers) or None, device))
        return
    import torch

    if not options.cpu and not torch.cuda.is_available():
        print("did not run: there is no CUDA GPU here")
        return
    device = "cpu" if options.cpu else "cuda"
    all_cores = str(torch.get_num_threads())  # one process: the host's update may use all cores
    threads = {"OMP_NUM_THREADS": all_cores, "MKL_NUM_THREADS": all_cores}  # torch takes the smaller of the two
    kept: Row = {**circumstances(), "device": torch.cuda.get_device_name() if not options.cpu else "cpu", "rows": []}

    def run(engine: str, model: str, tokens: int, layers: int | None) -> Row | None:
        words = ["--launched", engine, model, str(tokens), str(options.steps), str(layers or 0), device]
        try:
            row = {"engine": engine, "model": model, **launch(__file__, words, 1, more_env=threads, timeout=3600)[0]}
        except LaunchError as error:
            lines = [line for line in str(error).splitlines() if "Error" in line or "Exceeded" in line]
            print(f"{model} {engine} {tokens} tokens: did not run: {lines[-1] if lines else error}", flush=True)
            kept.setdefault("failed", []).append({"engine": engine, "model": model, "tokens": tokens, "layers": layers})
            keep(kept, options.json)
            return None
        if engine != "probe":
            show(row, options.peak_tflops * 1e12)
        kept["rows"].append(row)
        keep(kept, options.json)
        return row

    print(json.dumps(run("probe", "try", 0, None)))
    wanted = options.engines.split(",") if options.engines else list(ENGINES)
    engines = [name for name in wanted if name != "deepspeed" or find_spec("deepspeed")]
    if options.planned:
        for engine, tokens in [(engine, int(options.tokens.split(",")[0])) for engine in engines]:
            layers = planned(engine, tokens, device)
            print(f"{engine}: the planner says that {layers} layers of the 20 B's width fit", flush=True)
            if layers:
                run(engine, options.models if options.cpu else "20B", tokens, layers)
        sys.exit(nothing(kept))
    for attempt in attempts(options, engines):
        run(*attempt)
    for engine in engines if options.largest else []:
        row = largest(engine, run)
        print(f"largest with {engine}: {row['parameters'] / 1e9:.1f} B" if row else f"{engine}: none was trained")
    sys.exit(nothing(kept))


def nothing(kept: Row) -> bool:
    """Whether no model was trained, which is a failure."""
    return all(row["engine"] == "probe" for row in kept["rows"])


if __name__ == "__main__":
    main()
