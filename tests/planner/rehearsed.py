"""A run and its rehearsal, side by side: what the tests of the planner compare."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import zeroshard as zs
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.step import backward
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig

SHAPE = GPTConfig(vocabulary=256, context=64, width=64, heads=2, layers=4)
OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "fused": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-3),
}


def gpt(shape: GPTConfig = SHAPE) -> nn.Module:
    """A small built-in model, on the meta device."""
    with torch.device("meta"):
        return GPT(shape)


class Pair(nn.Module):
    """An encoder and a decoder that share an embedding; the encoder's output enters each block of the decoder."""

    def __init__(self, shape: GPTConfig = SHAPE) -> None:
        super().__init__()
        sizes = shape.width, shape.heads, 2 * shape.width, 0.0
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.encoder = nn.ModuleList([nn.TransformerEncoderLayer(*sizes, batch_first=True) for _ in range(2)])
        self.decoder = nn.ModuleList([nn.TransformerDecoderLayer(*sizes, batch_first=True) for _ in range(2)])

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy."""
        memory = self.embed(tokens)
        for block in self.encoder:
            memory = block(memory)
        hidden = self.embed(targets.roll(1, 1))
        for block in self.decoder:
            hidden = block(hidden, memory)
        logits = nn.functional.linear(hidden, self.embed.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def pair() -> nn.Module:
    """A small encoder with a decoder, on the meta device."""
    with torch.device("meta"):
        return Pair()


class Around(nn.Module):
    """The outputs of the first blocks enter the last ones, as in a U-Net."""

    def __init__(self, shape: GPTConfig = SHAPE) -> None:
        super().__init__()
        sizes = shape.width, shape.heads, 2 * shape.width, 0.0
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(*sizes, batch_first=True) for _ in range(4)])

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy."""
        first = self.blocks[0](self.embed(tokens))
        second = self.blocks[1](first)
        hidden = self.blocks[3](self.blocks[2](second) + second) + first
        logits = nn.functional.linear(hidden, self.embed.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def around() -> nn.Module:
    """A small model with skips, on the meta device."""
    with torch.device("meta"):
        return Around()


class Kinds(nn.Module):
    """An embedding that returns integers beside the hidden states: those that count, and kinds of tokens."""

    def __init__(self, shape: GPTConfig) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(shape.vocabulary, shape.width))

    def reset_parameters(self) -> None:
        """Small random values."""
        nn.init.normal_(self.table, std=0.02)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The hidden states, and both integers."""
        return self.table[tokens], (tokens > 3).long(), tokens % 2


class Late(nn.Module):
    """What counts is read by the loss alone, and the kinds after the second block and after the last."""

    def __init__(self, shape: GPTConfig = SHAPE) -> None:
        super().__init__()
        sizes = shape.width, shape.heads, 2 * shape.width, 0.0
        self.embed = Kinds(shape)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(*sizes, batch_first=True) for _ in range(4)])
        self.head = nn.Linear(shape.width, shape.vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy of the tokens that count."""
        hidden, counts, kinds = self.embed(tokens)
        hidden = self.blocks[1](self.blocks[0](hidden)) * (1 + kinds[..., None])
        hidden = self.blocks[3](self.blocks[2](hidden)) * (1 + kinds[..., None])
        losses = nn.functional.cross_entropy(self.head(hidden).transpose(1, 2), targets, reduction="none")
        return (losses * counts).mean()


def late() -> nn.Module:
    """A small model with values without a gradient that few stages read, on the meta device."""
    with torch.device("meta"):
        return Late()


def tokens(rows: int, shape: GPTConfig = SHAPE) -> dict[str, Tensor]:
    """So many rows of text."""
    drawn = torch.randint(shape.vocabulary, (rows, shape.context))
    return {"tokens": drawn, "targets": drawn}


def task(optimizer: str = "adamw", rows: int = 8, build: Callable[[], nn.Module] = gpt) -> TrainingTask:
    """The job of the tests."""
    return TrainingTask(build, tokens, OPTIMIZERS[optimizer], rows, SHAPE.context)


def punctual() -> AbstractContextManager[object]:
    """No rank is late inside: at stage 3 the others take one buffer more when one is."""
    return patch.object(backward, "GRACE", 60.0)


def run(
    mesh: zs.Mesh,
    plan: dict[str, Any],
    optimizer: str,
    rows: int,
    steps: int = 3,
    build: Callable[[], nn.Module] = gpt,
) -> dict[str, Any]:
    """Train for real; the ledger's bytes, the traffic, the peak of torch's allocations, and the communicators."""
    wanted = zs.Plan.from_dict(plan)
    torch.manual_seed(0)  # parts and stages of one model need one batch
    with punctual(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        batch, example = tokens(rows), tokens(max(1, rows // wanted.microbatches))
        job = task(optimizer, build=build)
        model = job.build()
        engine = zs.Engine(model, OPTIMIZERS[optimizer], wanted, mesh=mesh, example=example)
        for _ in range(steps):
            engine.train_step(batch)
        states, wire = engine.ledger.snapshot(), wire_of(engine)
        communicators = engine.communicators
        engine.flush()
    return {"states": states, "wire": wire, "peak": peak_of(watched), "communicators": communicators}


def wire_of(engine: zs.Engine) -> dict[str, tuple[int, int, int]]:
    """Elements, bytes and calls of the last step by purpose."""
    return {row.purpose: (row.measured_elements, row.measured_bytes, row.calls) for row in engine.traffic()}


def run_peak(job: TrainingTask, plan: zs.Plan, rows: int) -> int:
    """The peak of torch's allocations while an engine is made and takes three steps on one rank."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        engine = zs.Engine(job.build(), job.optimizer, plan, mesh=zs.Mesh())
        batch = job.batch(rows)
        for _ in range(3):
            engine.train_step(batch)
    return peak_of(watched)


def peak_of(watched: Any) -> int:
    """The highest sum of all allocations that the profiler saw, and of the frees of what was allocated so."""
    found: list[tuple[int, int, int]] = []
    pending = list(watched.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        if event.name == "[memory]":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        pending += event.children
    highest = 0
    held: dict[int, int] = {}
    total = 0
    for _, place, change in sorted(found, key=lambda one: one[0]):
        if change < 0:
            total -= held.pop(place, 0)
        else:  # an address that is given out again was freed in between, by a thread that the profiler does not hear
            total += change - held.get(place, 0)
            held[place] = change
        highest = max(highest, total)
    return highest
