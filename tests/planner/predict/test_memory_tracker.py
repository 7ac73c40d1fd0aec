"""The tracker's peaks: against all that torch allocates in small forwards and backwards, without a dispatch mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from planner.rehearsed import peak_of
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from zeroshard.planner.predict.memory_tracker import Tracker
from zeroshard.planner.predict.torch_internals import Results, fakes
from zeroshard.planner.predict.workspaces import beside_results

ROWS, WIDTH = 64, 256
Function = Callable[[Tensor], Tensor]
KEPT: list[Tensor] = []


class Double(torch.autograd.Function):
    """Twice the input; its gradient is a sum of two new tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1.5 + gradient * 0.5


class Keep(torch.autograd.Function):
    """The input; its gradient is held for ever."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        KEPT.append(gradient * 1)
        return KEPT[-1]


def rows(step: int = 1) -> Tensor:
    return torch.arange(0, ROWS, step)


def chain(x: Tensor) -> Tensor:
    """States of a recurrence, as Mamba has them: each reads one row."""
    state = torch.zeros(WIDTH)
    total = torch.zeros(())
    for row in range(8):
        state = torch.tanh(state + x[row])
        total = total + state.sum()
    return total


def residual(x: Tensor) -> Tensor:
    for _ in range(3):
        x = x + x.sin()
    return x * x.cos()


def tied(x: Tensor) -> Tensor:
    weight = x[:WIDTH] * 1
    return nn.functional.linear(nn.functional.linear(x, weight[:32].T[:, :32].T).tanh(), weight[:, :32])


def hooked(x: Tensor) -> Tensor:
    y = x.sin()
    y.register_hook(lambda gradient: None)
    x.register_hook(lambda gradient: None)
    return y + x.cos() + x.exp()


def recomputed(x: Tensor) -> Tensor:
    inside: Tensor = checkpoint(lambda y: y.exp() * y.cos() + y.sin(), x, use_reentrant=False)
    return inside + x.tanh()


def double(x: Tensor) -> Tensor:
    twice: Tensor = Double.apply(x)  # type: ignore[no-untyped-call]
    return twice


def keep(x: Tensor) -> Tensor:
    same: Tensor = Keep.apply(x)  # type: ignore[no-untyped-call]
    return same


def dense(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An input that is not contiguous, with a weight and a bias."""
    return x.view(8, -1, WIDTH).transpose(0, 1), x.new_ones(8 * WIDTH, WIDTH), x.new_ones(8 * WIDTH)


def product_and_row(x: Tensor) -> Tensor:
    turned, weight, bias = dense(x)
    return (turned @ weight.T) + bias


SUMS: dict[str, Function] = {
    "one": lambda x: x.sin(),
    "two": lambda x: x.sin() + x.cos(),
    "three": lambda x: x.sin() + x.cos() * x.exp(),
    "itself": lambda x: (x + x).sin(),
    "square": lambda x: (x * x).sin(),
    "residual": residual,
    "rows": chain,
    "view": lambda x: x.sin().sum() + (x.view(-1).exp() * 2).sum() + x.T.cos().sum(),
    "halves": lambda x: (torch.cat([half.sin() for half in x.chunk(2)]) + x).exp(),
    "broadcast": lambda x: x.sum() + x.sin().sum() + x.mean(0).sum(),
    "kept": lambda x: x.sin() + keep(x) * x.cos(),
    "own function": lambda x: x.sin() + double(x) * double(x.cos()),
    "hooks": hooked,
    "recomputed": recomputed,
    "tied": tied,
}
FORMULAS: dict[str, Function] = {
    "linear": lambda x: nn.functional.linear(*dense(x)),
    "product and row": product_and_row,
    "layer that is left out of few steps": lambda x: x if torch.rand([]) < 1e-9 else x.exp().sin(),
    "atan2": lambda x: torch.atan2(x, x.sin()),
    "hypot": lambda x: torch.hypot(x, x.sin()) * x.cos(),
    "norm": lambda x: torch.linalg.vector_norm(x * 2, dim=-1, ord=3),
    "gather": lambda x: (x * 1).gather(1, (torch.arange(WIDTH) // 2).expand(ROWS, -1)),
    "index": lambda x: (x * 1)[rows(2)],
    "index_select": lambda x: (x * 1).index_select(0, rows()),
    "index_put": lambda x: (x * 1).index_put((rows(2),), x.sin()[::2] * 2),
    "topk": lambda x: (x * 1).topk(8).values,
    "max": lambda x: (x * 1).max(1).values,
    "cummax": lambda x: (x * 1).cummax(1).values,
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(0, torch.arange(ROWS)[:, None].expand(-1, WIDTH), x * 1),
}


def steps(f: Function, dtype: torch.dtype) -> None:
    x = torch.ones(ROWS, WIDTH, dtype=dtype, requires_grad=True)
    out = f(x * 1)
    (out.float() * 2).sum().backward()
    KEPT.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", [*SUMS, *FORMULAS])
def test_gradients_take_the_memory_that_they_take_in_a_run(name: str, dtype: torch.dtype) -> None:
    f = (SUMS | FORMULAS)[name]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        steps(f, dtype)
    with fakes() as mode:
        tracker = Tracker(answers=True, results=Results(mode), beside=beside_results)
        with tracker, tracker.resizing():
            steps(f, dtype)
    assert tracker.peak.nbytes == pytest.approx(peak_of(watched), rel=0.002)


LEAST = 1024  # bytes that count; single numbers have other places in a run


@pytest.mark.parametrize("name", SUMS)
def test_gradients_are_summed_in_as_many_new_tensors_as_in_a_run(name: str) -> None:
    """All bytes that are ever allocated: peaks depend on few of the sums."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        steps(SUMS[name], torch.float32)
    sizes, changes = allocations(watched), [0]
    with fakes() as mode:
        tracker = Tracker(answers=True, results=Results(mode))
        with tracker, tracker.resizing(), tracker.listing(lambda: changes.append(tracker.current - sum(changes))):
            steps(SUMS[name], torch.float32)
    assert sum(change for change in changes if change >= LEAST) == sum(size for size in sizes if size >= LEAST)


def allocations(watched: Any) -> list[int]:
    """Bytes of each allocation that the profiler saw."""
    sizes: list[int] = []
    pending = list(watched.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        if event.name == "[memory]":
            sizes.append(event.extra_fields.alloc_size)
        pending += event.children
    return sizes
