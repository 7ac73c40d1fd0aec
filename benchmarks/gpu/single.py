"""One GPU: tokens per second and peak memory of zeroshard at one rank beside the plain PyTorch loop. See METHOD.md.

    python benchmarks/gpu/single.py [--models gpt2-xl,llama-7b] [--rounds 3] [--steps 10] [--json FILE]
    python benchmarks/gpu/single.py --predict H200 [--json FILE]

Both compute in bf16 and keep fp32 master weights; both update with fused AdamW. The loop has one optimizer per layer,
so that only one layer's gradients exist in fp32 at a time. The launches take turns. Targets: 98 % of the loop's tokens
per second, and a peak within 3 % of the prediction, which `--predict` prints on any machine, and of the ledger's count
in the same step. Needs `transformers` (the extra `hf`); models
come from their configuration with random weights, nothing is downloaded. Without a GPU it prints that it did not run,
and exits with status 0; `--cpu` only tries the script out, on tiny models.
"""

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from ranks import LaunchError, answer, circumstances, keep, launch

ENGINES = ("loop", "zero0", "zero1", "zero2", "zero3")
MODELS = {
    "gpt2-xl": (8, 1024),
    "llama-7b": (2, 2048),
    "gpt2-try": (2, 16),
    "llama-try": (2, 16),
}  # rows, tokens per row
TRIES = ("gpt2-try", "llama-try")
WARM = 3
SPEED, MEMORY = 0.98, 0.03  # the bars
Row = dict[str, Any]


def make_model(name: str, device: str) -> Any:
    """A causal language model in bf16 with random weights."""
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    no_drop: dict[str, Any] = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    configs = {
        "gpt2-xl": lambda: GPT2Config(n_embd=1600, n_layer=48, n_head=25, **no_drop),
        "llama-7b": lambda: LlamaConfig(),  # its defaults are the 7 B shape
        "gpt2-try": lambda: GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=128, n_positions=32, **no_drop),
        "llama-try": lambda: LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=128
        ),
    }
    config: Any = configs[name]()
    config.use_cache = False
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


class Loop:
    """The plain loop, with fp32 masters by hand."""

    def __init__(self, model: Any, make_optimizer: Any) -> None:
        import torch

        layers: dict[str, list[Any]] = {}
        for name, parameter in model.named_parameters():
            number = next((word for word in name.split(".") if word.isdecimal()), "rest")
            layers.setdefault(number, []).append(parameter)
        self.model, self.layers = model, list(layers.values())
        self.masters = [[p.detach().to(torch.float32, copy=True) for p in layer] for layer in self.layers]
        self.optimizers = [make_optimizer(masters) for masters in self.masters]

    def step(self, batch: dict[str, Any]) -> Any:
        """Forward, backward, update; the loss."""
        import torch

        loss = self.model(**batch).loss
        loss.backward()
        for layer, masters, optimizer in zip(self.layers, self.masters, self.optimizers, strict=True):
            for parameter, master in zip(layer, masters, strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                torch._foreach_copy_(layer, masters)
        return loss.detach()


def measure(engine_name: str, model_name: str, steps: int, device: str) -> Row:
    """The figures of one launch."""
    import torch

    import zeroshard as zs

    model, (rows, tokens) = make_model(model_name, device), MODELS[model_name]
    words = torch.randint(model.config.vocab_size, (rows, tokens), device=device)
    batch, parameters = {"input_ids": words, "labels": words}, sum(p.numel() for p in model.parameters())
    flops = flops_per_token(model, tokens) * rows * tokens
    make = partial(torch.optim.AdamW, lr=1e-5, fused=True)
    engine = None
    if engine_name == "loop":
        loop = Loop(model, make)
        step = partial(loop.step, batch)
    else:
        engine = zs.Engine(model, make, plan_of(engine_name), mesh=zs.init_mesh(device=device))
        step = partial(_ours, engine, batch)
    for _ in range(WARM):
        step()
    memory = _memory(step, engine, device)
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        loss = float(step())  # waits for the GPU
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    row = {"device": name, "step_s": statistics.median(seconds), "tokens": rows * tokens, "flops": flops, "loss": loss}
    return {**row, **memory, "parameters": parameters}


def _ours(engine: Any, batch: dict[str, Any]) -> Any:
    return engine.train_step(batch).loss


def _memory(step: Any, engine: Any, device: str) -> Row:
    """Peak bytes that torch allocated in one plain step and, from the ledger, in one that it records."""
    import torch

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step()
    row: Row = {"peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None, "ledger_bytes": None}
    if engine is None:
        step()
    else:
        with engine.trace(memory=True) as trace:
            step()
        row["ledger_bytes"] = max(sum(event.nbytes.values()) for event in trace.memory)
    return row


def flops_per_token(model: Any, tokens: int) -> float:
    """Forward and backward: 6 per weight that multiplies, and 12 L T W for attention, half of it masked."""
    config = model.config
    weights: int = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    if config.tie_word_embeddings:
        weights += model.get_input_embeddings().weight.numel()
    return 6.0 * weights + 12.0 * config.num_hidden_layers * tokens * config.hidden_size / 2


def task_of(model_name: str) -> Any:
    """The job of a model, for the planner."""
    import torch

    from zeroshard.planner.predict.rehearse import TrainingTask

    rows, tokens = MODELS[model_name]
    make = partial(torch.optim.AdamW, lr=1e-5, fused=True)
    words = {"gpt2-xl": 50257, "llama-7b": 32000}.get(model_name, 128)

    def batch(count: int) -> dict[str, Any]:
        drawn = torch.randint(words, (count, tokens))
        return {"input_ids": drawn, "labels": drawn}

    return TrainingTask(partial(make_model, model_name, "cpu"), batch, make, rows, tokens, model_name, values=True)


def plan_of(engine_name: str) -> Any:
    """The plan of one of our engines."""
    import zeroshard as zs

    return zs.Plan(zero=int(engine_name[-1]), precision="bf16")  # type: ignore[arg-type]


def predict(model_name: str, engine_name: str, gpu: str) -> Row:
    """The peak that the planner foresees, by a rehearsal that needs no GPU."""
    from zeroshard.doctor.hardware import Machines
    from zeroshard.planner.predict.predict import predict as predicted

    found = predicted(task_of(model_name), plan_of(engine_name), Machines.of(gpu, 1), MODELS[model_name][0])
    return {"model": model_name, "engine": engine_name, "predicted_bytes": found.peak_bytes, "notes": found.notes}


def summarise(model: str, launches: dict[str, list[Row]], peak_flops: float) -> list[Row]:
    """Print and return one row per engine: medians over rounds, beside the loop."""
    rows: list[Row] = []
    for engine, several in launches.items():
        row = {"model": model, "engine": engine, **several[-1]}
        row["step_s_rounds"] = [launched["step_s"] for launched in several]
        row["step_s"] = statistics.median(row["step_s_rounds"])
        row["tokens_per_s"], row["mfu"] = row["tokens"] / row["step_s"], row["flops"] / row["step_s"] / peak_flops
        base = rows[0] if rows else row
        row["ratio_to_loop"] = row["tokens_per_s"] / base["tokens_per_s"]
        peak, counted = row["peak_bytes"], row["ledger_bytes"]
        row["ledger_error"] = counted / peak - 1 if peak and counted else None
        marks = "" if row is base else "pass" if row["ratio_to_loop"] >= SPEED else "FAIL"
        text = f"{model:10} {engine:6} {row['tokens_per_s']:10,.0f} tokens/s {row['ratio_to_loop']:6.3f} {marks:4}"
        text += f"  MFU {100 * row['mfu']:5.1f} %  loss {row['loss']:.4f}"
        if peak:
            text += f"  peak {peak / 2**30:7.2f} GiB"
        if row["ledger_error"] is not None:
            within = "pass" if abs(row["ledger_error"]) <= MEMORY else "FAIL"
            text += f"  ledger {100 * row['ledger_error']:+.1f} % {within}"
        print(text, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    """Launch in turns, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="by default gpt2-xl,llama-7b")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help=f"timed steps, after {WARM} others")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="dense bf16 of the GPU, for MFU (H100, H200)")
    parser.add_argument("--predict", metavar="GPU", help="only predict the peaks, for a GPU by its name in the planner")
    parser.add_argument("--cpu", action="store_true", help="try the script out without a GPU")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--launched", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launched:
        engine, model, steps, device = options.launched
        answer(measure(engine, model, int(steps), device))
        return
    if not options.cpu and not options.predict and not _has_gpu():
        print("did not run: there is no CUDA GPU here")
        return
    device, models = ("cpu", TRIES) if options.cpu else ("cuda", ("gpt2-xl", "llama-7b"))
    kept: Row = {**circumstances(), "rows": []}
    failed = False
    for model in options.models.split(",") if options.models else models:
        if options.predict:
            for engine in (name for name in options.engines.split(",") if name != "loop"):
                row = predict(model, engine, options.predict)
                print(f"{model:10} {engine:6} predicted peak {row['predicted_bytes'] / 2**30:7.2f} GiB", flush=True)
                kept["rows"].append(row)
            keep(kept, options.json)
            continue
        launches: dict[str, list[Row]] = {engine: [] for engine in options.engines.split(",")}
        for _ in range(options.rounds):
            for engine in list(launches):
                try:
                    words = ["--launched", engine, model, str(options.steps), device]
                    launches[engine] += launch(__file__, words, 1)
                except LaunchError as error:
                    failed = True
                    del launches[engine]
                    print(f"{model} {engine} failed: {error}", file=sys.stderr)
        kept["rows"] += summarise(model, launches, options.peak_tflops * 1e12)
        keep(kept, options.json)
    sys.exit(failed)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    main()
