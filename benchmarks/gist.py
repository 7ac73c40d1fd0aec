"""Bytes saved for backward, and time, of compressed activations beside plain ones: Gist's networks, a language model.

Networks are trained here for a few steps on images of ten patterns under noise, since ReLUs of an untrained network
have few zeros; images and batches are smaller than theirs too. The
paper (ISCA 2018) gives up to 2x and 1.8x on average, about 1.4x without loss, and 4 % of time, on GPUs, with trained
networks and against a framework that saves other tensors than torch does: its ratios are no bar for these.

Bytes are those on the ledger after a forward, less the batch. Time is CPU seconds of forward and backward, in turns.

The language model is the built-in GPT on the standard library's sources; its last losses are means of the last tenth.

Run it with: python benchmarks/gist.py networks --steps 30, python benchmarks/gist.py losses --steps 300
"""

import argparse
import gc
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from networks import NETWORKS
from ranks import circumstances
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.data.corpus import standard_library_corpus
from zeroshard.memory.ledger import Category
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig

CLASSES = 10
LOSSLESS = ("binarize", "sparse", "inplace")
WAYS: dict[str, tuple[str, ...]] = {
    "off": (), "binarize": ("binarize",), "lossless": LOSSLESS, "fp16": (*LOSSLESS, "fp16"),
    "fp10": (*LOSSLESS, "fp10"), "fp8": (*LOSSLESS, "fp8"), "int4": (*LOSSLESS, "int4"), "int2": (*LOSSLESS, "int2"),
}  # fmt: skip
TIMED = ("off", "lossless", "fp8")
LOSSY = ("fp16", "fp10", "fp8", "e4m3", "int8", "int4", "int2")


def images(side: int, rows: int, step: int) -> tuple[Tensor, Tensor]:
    """Patterns of ten classes under noise."""
    patterns = torch.randn(CLASSES, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + step)
    target = torch.randint(CLASSES, (rows,), generator=generator)
    clear = nn.functional.interpolate(patterns[target], size=(side, side), mode="bilinear")
    return clear + 0.5 * torch.randn(clear.shape, generator=generator), target


def engine_of(model: nn.Module, way: tuple[str, ...], rate: float, budget: str | None = None) -> zs.Engine:
    """An engine that trains a model."""
    policy = zs.Activations(compress=way)
    return zs.Engine(
        model, partial(torch.optim.SGD, lr=rate), zs.Plan(zero=0, activations=policy, device_memory=budget)
    )


def made(name: str) -> nn.Module:
    """A network with its weights."""
    build, side, _ = NETWORKS[name]
    torch.manual_seed(0)
    model = build(CLASSES).eval()
    with torch.no_grad():
        model(*images(side, 2, 0))  # the layers behind the features learn their widths
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight)
    return model.train()


def zeros_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    """The part of zeros in all outputs of ReLUs as modules."""
    zeros = total = 0

    def count(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal zeros, total
        zeros, total = zeros + int((output == 0).sum()), total + output.numel()

    hooks = [each.register_forward_hook(count) for each in model.modules() if isinstance(each, nn.ReLU)]
    with torch.no_grad():
        model(*batch)
    for hook in hooks:
        hook.remove()
    return zeros / total


def measured(name: str, steps: int, turns: int) -> dict[str, Any]:
    """Bytes of each way after some training, and the time of a few."""
    _, side, rows = NETWORKS[name]
    engine = engine_of(made(name), (), 1e-3)
    losses = [engine.train_step(images(side, rows, step)).loss.item() for step in range(steps)]
    weights, batch = engine.state_dict(), images(side, rows, steps)
    del engine
    again = made(name)
    again.load_state_dict(weights)
    found: dict[str, Any] = {"side": side, "batch": rows, "steps": steps, "zeros": round(zeros_of(again, batch), 3)}
    found |= {"loss before": round(losses[0], 3), "loss after": round(statistics.mean(losses[-3:]), 3), "bytes": {}}
    engines: dict[str, zs.Engine] = {}
    for way, names in WAYS.items():
        model = made(name)
        model.load_state_dict(weights)
        engine = engine_of(model, names, 0.0, "64GiB")
        loss = engine(*batch)
        found["bytes"][way] = engine.ledger.account(Category.ACTIVATIONS).current - batch[0].nbytes
        del loss
        if way in TIMED:
            engines[way] = engine
        gc.collect()
    seconds: dict[str, list[float]] = {way: [] for way in TIMED}
    for turn in range(turns):
        for way in TIMED[:: 1 if turn % 2 else -1]:
            start = time.process_time()
            engines[way].backward(engines[way](*batch))
            seconds[way].append(time.process_time() - start)
            engines[way].step()
    base = found["bytes"]["off"]
    found["ratios"] = {way: round(base / nbytes, 3) for way, nbytes in found["bytes"].items()}
    found["time"] = {
        way: round(statistics.median(a / b for a, b in zip(seconds[way], seconds["off"], strict=True)), 3)
        for way in TIMED[1:]
    } if turns else {}  # fmt: skip
    return found


def losses(steps: int, width: int, layers: int) -> dict[str, Any]:
    """The last losses of a language model under each lossy code, and its saved bytes."""
    text = torch.frombuffer(bytearray(standard_library_corpus().train), dtype=torch.uint8)
    context, rows = 128, 16
    found: dict[str, Any] = {"steps": steps, "width": width, "layers": layers, "context": context, "rows": rows}
    for way in ("off", *LOSSY):
        torch.manual_seed(0)
        model = GPT(GPTConfig(256, context, width, 4, layers))
        policy = zs.Activations(compress=() if way == "off" else (way,))
        plan = zs.Plan(zero=0, activations=policy, device_memory="64GiB", clip_norm=1.0)
        engine = zs.Engine(model, partial(torch.optim.AdamW, lr=2e-3), plan)
        generator, seen = torch.Generator().manual_seed(1), []
        for _ in range(steps):
            starts = torch.randint(len(text) - context - 1, (rows,), generator=generator)
            batch = torch.stack([text[s : s + context + 1] for s in starts.tolist()]).long()
            loss = engine(batch[:, :-1], batch[:, 1:])
            held = engine.ledger.account(Category.ACTIVATIONS).current
            engine.backward(loss)
            engine.step()
            seen.append(loss.item())
        last = statistics.mean(seen[-steps // 10 :])
        base = found.get("off", {"loss": last, "bytes": held})
        found[way] = {"loss": round(last, 5), "worse": round(last / base["loss"] - 1, 5), "bytes": held,
                      "ratio": round(base["bytes"] / held, 3)}  # fmt: skip
        print(way, found[way], flush=True)
    return found


def main() -> None:
    """Print the figures, and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("networks", "losses"))
    parser.add_argument("--only", choices=NETWORKS, help="one network")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--turns", type=int, default=7, help="timed steps of each way")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the figures, to which they are added")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    if options.what == "losses":
        found["losses"] = losses(options.steps, options.width, options.layers)
    else:
        found["networks"] = {}
        for name in [options.only] if options.only else NETWORKS:
            found["networks"][name] = one = measured(name, options.steps, options.turns)
            print(name, json.dumps(one), flush=True)
    if options.json:
        kept = json.loads(options.json.read_text()) if options.json.exists() else {"circumstances": circumstances()}
        for part, figures in found.items():
            kept.setdefault(part, {}).update(figures)
        options.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
