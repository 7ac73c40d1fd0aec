"""Runs with and without offload, under executors that choose when copies and host jobs really happen."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from engine.models import batch, build
from task_runners import Latest, Shuffled
from torch import Tensor

import zeroshard as zs
from zeroshard.memory.transfers import Eager, TaskRunner, ThreadRunner
from zeroshard.platform import real

EXECUTORS: dict[str, Callable[[torch.device, float], TaskRunner]] = {
    "eager": lambda device, timeout: Eager(),
    "latest": lambda device, timeout: Latest(),
    "shuffled": lambda device, timeout: Shuffled(5),
    "worker": ThreadRunner,
}
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


@contextmanager
def executing(name: str) -> Iterator[None]:
    """Let engines that are made inside use an executor."""
    before, real.executor_of = real.executor_of, EXECUTORS[name]
    try:
        yield
    finally:
        real.executor_of = before


def in_memory(plan: zs.Plan) -> zs.Plan:
    """The plan without offload."""
    return replace(plan, offload="")


def take_steps(
    engine: zs.Engine, steps: int, first: int = 0, spikes: tuple[int, ...] = (), rows: int = 8
) -> list[tuple[float, str]]:
    """Loss and gradient norm of each step; of a spike the loss is multiplied by 1000, and of a negative one by inf."""
    found = []
    for step in range(first, first + steps):
        inputs = batch(step, engine.data_rank, engine.data_ranks, rows), step
        if step in spikes or -step in spikes:
            loss = engine(*inputs)
            engine.backward(loss * (1e3 if step in spikes else torch.inf))
            result = replace(engine.step(), loss=loss.detach())
        else:
            result = engine.train_step(inputs)
        assert result.loss is not None
        found.append((result.loss.item(), repr(result.grad_norm)))
    return found


def run(
    plan: zs.Plan, model: str = "Plain", steps: int = 6, optimizer: Any = ADAMW, mesh: zs.Mesh | None = None, **how: Any
) -> tuple[list[tuple[float, str]], dict[str, Tensor]]:
    """Losses and norms of a training, and its final weights."""
    engine = zs.Engine(build(model, seed=0), lambda ps: optimizer([p for p in ps if p.requires_grad]), plan, mesh=mesh)
    return take_steps(engine, steps, **how), engine.state_dict()


# Of a plan in memory, which executors do not touch: once for all of them, and for all ways of offload equal in memory.
once = functools.cache(run)


def assert_same(found: Any, wanted: Any) -> None:
    """Losses, norms and weights equal bit for bit."""
    assert found[0] == wanted[0]
    assert found[1].keys() == wanted[1].keys()
    for name, weight in wanted[1].items():
        assert torch.equal(found[1][name], weight), name
