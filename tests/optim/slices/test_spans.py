"""A torch optimizer on spans of flat slices gives the bits that it gives on the parameters themselves."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zeroshard.memory.ledger import Category, Ledger
from zeroshard.optim import SliceSpan, SpanOptimizer
from zeroshard.optim.slices.spans import JOINED
from zeroshard.units import Index, Unreadable

SHAPES = [torch.Size(shape) for shape in ((3, 5), (7,), (0, 2), (), (4, 4), (9,))]  # 15 + 7 + 0 + 1 + 16 + 9 = 48
GROUPS = [0, 0, 0, 1, 1, 0]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, weight_decay=0.1),
    "AdamW amsgrad": partial(torch.optim.AdamW, amsgrad=True, foreach=True),
    "Adagrad": partial(torch.optim.Adagrad, initial_accumulator_value=0.1, lr_decay=0.01),
    "SGD momentum": partial(torch.optim.SGD, momentum=0.9, dampening=0.1),
    "SGD": torch.optim.SGD,
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.5),
    "NAdam": torch.optim.NAdam,
    "Rprop": torch.optim.Rprop,
}
STEPS = 6
SKIPPED = [set(), {0}, set(), {1, 4}, {0, 1, 2, 3, 4, 5}, {5}]  # parameters without a gradient in each step


def grouped(make: Callable[..., torch.optim.Optimizer], parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of two groups with rates of their own."""
    members = [[p for p, g in zip(parameters, GROUPS, strict=True) if g == group] for group in (0, 1)]
    return make([{"params": members[0], "lr": 0.05}, {"params": members[1], "lr": 0.02}])


def parameters_of(flat: Tensor, index: Index) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(flat[e.offset : e.stop].view(e.shape).clone()) for e in index.entries]


def problem(ranks: int) -> tuple[Index, Tensor, list[Tensor]]:
    """An index, initial values [padded] and a gradient [padded] for each step, zeros in the padding."""
    index = Index.of([(str(n), shape) for n, shape in enumerate(SHAPES)], ranks)
    padded = [torch.zeros(index.padded_numel) for _ in range(STEPS + 1)]
    for tensor in padded:
        tensor[: index.numel] = torch.randn(index.numel)
    return index, padded[0], padded[1:]


def train_plain(
    make: Callable[..., torch.optim.Optimizer], index: Index, flat: Tensor, gradients: list[Tensor]
) -> Tensor:
    """The values [numel] after the steps, by the optimizer on parameters of true shape."""
    parameters = parameters_of(flat, index)
    optimizer = grouped(make, parameters)
    for gradient, skipped in zip(gradients, SKIPPED, strict=True):
        for number, (p, e) in enumerate(zip(parameters, index.entries, strict=True)):
            p.grad = None if number in skipped else gradient[e.offset : e.stop].view(e.shape).clone()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in parameters])


def step_spans(optimizer: SpanOptimizer, index: Index, gradient: Tensor, skipped: set[int], number: int = 0) -> None:
    """Cut the spans where a skipped parameter begins or ends, and step on the others."""
    edges = [edge for n in skipped for edge in (index.entries[n].offset, index.entries[n].stop)]
    optimizer.split(number, edges)

    def gradient_of(span: SliceSpan) -> Tensor | None:
        met = {n for n, _, _ in index.overlaps(span.start, span.stop)} or {len(index.entries) - 1}
        assert met <= skipped or not met & skipped
        return None if met <= skipped else gradient[span.start : span.stop].clone()

    optimizer.step(number, gradient_of)


def spans_of(
    make: Callable[..., torch.optim.Optimizer], index: Index, flat: Tensor, rank: int
) -> tuple[SpanOptimizer, Tensor, Ledger]:
    """The optimizer of one rank's slice, and the slice."""
    start, stop = index.interval(rank)
    owned, ledger = flat[start:stop].clone(), Ledger()
    optimizer = SpanOptimizer(grouped(make, parameters_of(flat, index)), ledger)
    assert optimizer.add(index, GROUPS, owned, start) == 0
    optimizer.install_spans()
    return optimizer, owned, ledger


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_of_a_plain_optimizer(name: str, ranks: int) -> None:
    """With parameters that are skipped in some steps, and slices that cut through parameters."""
    index, flat, gradients = problem(ranks)
    slices = []
    for rank in range(ranks):
        optimizer, owned, _ = spans_of(OPTIMIZERS[name], index, flat, rank)
        for gradient, skipped in zip(gradients, SKIPPED, strict=True):
            step_spans(optimizer, index, gradient, skipped)
            optimizer.account()
        slices.append(owned)
    assert torch.equal(torch.cat(slices)[: index.numel], train_plain(OPTIMIZERS[name], index, flat, gradients))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_splitting_alone_changes_nothing(name: str) -> None:
    index, flat, gradients = problem(1)
    whole, owned, _ = spans_of(OPTIMIZERS[name], index, flat, 0)
    cut, owned_cut, _ = spans_of(OPTIMIZERS[name], index, flat, 0)
    for step, gradient in enumerate(gradients):
        cut.split(0, range(step, 48, 11))
        for optimizer in (whole, cut):
            optimizer.step(0, lambda span, gradient=gradient: gradient[span.start : span.stop].clone())
    assert len(cut.spans(0)) > 20 and len(whole.spans(0)) == 3
    assert torch.equal(owned, owned_cut)


def test_spans_follow_groups_across_parameters() -> None:
    index, flat, _ = problem(1)
    optimizer, owned, _ = spans_of(torch.optim.AdamW, index, flat, 0)
    assert [(s.start, s.stop, s.group) for s in optimizer.spans(0)] == [(0, 22, 0), (22, 39, 1), (39, 48, 0)]
    for span in optimizer.spans(0):
        assert span.tensor.data_ptr() == owned[span.start :].data_ptr()  # in place
    groups = optimizer.optimizer.param_groups
    assert [[len(p) for p in group["params"]] for group in groups] == [[22, 9], [17]]
    assert [group["lr"] for group in groups] == [0.05, 0.02]


def test_padding_goes_with_the_last_parameter() -> None:
    index, flat, _ = problem(7)  # 48 in slices of 7, one element of padding
    optimizer, _, _ = spans_of(torch.optim.AdamW, index, flat, 6)
    assert [(s.start, s.stop, s.group) for s in optimizer.spans(0)] == [(42, 49, 0)]


def test_a_slice_of_padding_alone() -> None:
    """Five elements in slices of two: the last slice holds no parameter."""
    index = Index.of([("a", torch.Size((3,))), ("b", torch.Size((2,)))], ranks=4)
    optimizer = SpanOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1), Ledger())
    owned = torch.zeros(2)
    optimizer.add(index, [0, 0], owned, 6)
    optimizer.install_spans()
    assert [(s.start, s.stop, s.group) for s in optimizer.spans(0)] == [(6, 8, 0)]
    optimizer.step(0, lambda span: torch.zeros(2))
    assert owned.tolist() == [0, 0]


def test_an_empty_flat() -> None:
    optimizer = SpanOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1), Ledger())
    optimizer.add(Index.of([("a", torch.Size((0, 3)))], ranks=2), [0], torch.zeros(0), 0)
    optimizer.install_spans()
    assert optimizer.spans(0) == []
    optimizer.step(0, lambda span: torch.zeros(0))


def test_a_step_on_one_flat_leaves_the_others() -> None:
    index, flat, gradients = problem(1)
    optimizer = SpanOptimizer(grouped(OPTIMIZERS["AdamW"], parameters_of(flat, index)), Ledger())
    owned = [flat.clone(), flat.clone()]
    assert [optimizer.add(index, GROUPS, tensor, 0) for tensor in owned] == [0, 1]
    optimizer.install_spans()
    step_spans(optimizer, index, gradients[0], set(), number=1)
    assert torch.equal(owned[0], flat) and not torch.equal(owned[1], flat)
    assert all(isinstance(span.tensor.grad, Unreadable) for number in (0, 1) for span in optimizer.spans(number))


@pytest.mark.parametrize(
    "name, per_element", [("AdamW", 8), ("AdamW amsgrad", 12), ("Adagrad", 4), ("SGD momentum", 4), ("SGD", 0)]
)
def test_states_are_in_the_ledger(name: str, per_element: int) -> None:
    index, flat, gradients = problem(1)
    optimizer, _, ledger = spans_of(OPTIMIZERS[name], index, flat, 0)
    assert ledger.total() == (per_element * 48 + 3 * 4 if name == "Adagrad" else 0)  # Adagrad makes states at once
    for number in (1, 2, 2, 3):
        optimizer.split(0, range(0, 48, 48 // number))
        step_spans(optimizer, index, gradients[0], set())
        optimizer.account()
        assert ledger.account(Category.OPTIMIZER_STATES).current == per_element * 48
        scalars = 0 if name.startswith("SGD") else 4 * len(optimizer.spans(0))
        assert ledger.account(Category.BUFFERS).current == scalars


def test_a_scheduler_goes_on_working() -> None:
    index, flat, gradients = problem(1)
    torch_optimizer = grouped(torch.optim.SGD, parameters_of(flat, index))
    scheduler = torch.optim.lr_scheduler.StepLR(torch_optimizer, 1, gamma=0.1)
    optimizer, owned = SpanOptimizer(torch_optimizer, Ledger()), flat.clone()
    optimizer.add(index, GROUPS, owned, 0)
    optimizer.install_spans()
    step_spans(optimizer, index, gradients[0], set())
    scheduler.step()
    optimizer.split(0, [5])
    before = owned.clone()
    step_spans(optimizer, index, gradients[1], set())
    rates = torch.cat([torch.full((e.numel,), (0.005, 0.002)[g]) for e, g in zip(index.entries, GROUPS, strict=True)])
    torch.testing.assert_close(owned, before - rates * gradients[1])


@settings(derandomize=True, deadline=None)
@given(st.lists(st.lists(st.integers(-3, 60), max_size=4), max_size=5), st.integers(1, 6))
def test_spans_always_tile_the_slice(cuts: list[list[int]], ranks: int) -> None:
    index, flat, _ = problem(ranks)
    for rank in range(ranks):
        optimizer, owned, _ = spans_of(torch.optim.SGD, index, flat, rank)
        start, stop = index.interval(rank)
        for places in cuts:
            optimizer.split(0, places)
        spans = optimizer.spans(0)
        assert [s.start for s in spans] + [stop] == [start] + [s.stop for s in spans]
        assert all(s.start < s.stop and len(s.tensor) == s.stop - s.start for s in spans)
        assert torch.equal(torch.cat([s.tensor for s in spans]), owned)
        wanted = {place for places in cuts for place in places if start < place < stop}
        assert wanted <= {s.start for s in spans}
        held = list(itertools.chain(*(group["params"] for group in optimizer.optimizer.param_groups)))
        assert {id(p) for p in held} == {id(s.tensor) for s in spans} and len(held) == len(spans)


def test_state_of_every_kind_is_cut() -> None:
    index, flat, gradients = problem(1)
    optimizer, _, _ = spans_of(torch.optim.AdamW, index, flat, 0)
    step_spans(optimizer, index, gradients[0], set())
    span = optimizer.spans(0)[0]
    state: dict[str, Any] = optimizer.optimizer.state[span.tensor]
    state["note"] = ["a word"]
    average = state["exp_avg"].clone()
    optimizer.split(0, [10])
    first, second = (optimizer.optimizer.state[s.tensor] for s in optimizer.spans(0)[:2])
    assert torch.equal(torch.cat([first["exp_avg"], second["exp_avg"]]), average)
    assert first["step"].item() == second["step"].item() == 1 and first["step"] is not second["step"]
    assert first["note"] == second["note"] == ["a word"] and first["note"] is not second["note"]
    assert span.tensor not in optimizer.optimizer.state


def test_joined_steps_are_those_of_one_flat_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroshard.optim.slices.spans.JOINED", 20)
    sizes = [8, 8, 8, 30, 4]  # the third does not fit with the first two, the fourth is more than all may be
    values = [torch.randn(size) for size in sizes]
    gradients = [torch.randn(size) for size in sizes]
    singly, joined = ([v.clone() for v in values] for _ in range(2))
    calls: list[list[int]] = []
    done: list[int] = []
    for joins, flats in ((False, singly), (True, joined)):
        optimizer = SpanOptimizer(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]), Ledger())
        for flat in flats:
            optimizer.add(Index.of([("w", flat.shape)], 1), [0], flat, 0)
        optimizer.install_spans()
        if joins:
            sizes_of = lambda o, *_: calls.append([p.numel() for g in o.param_groups for p in g["params"]])  # noqa: E731
            optimizer.optimizer.register_step_pre_hook(sizes_of)
        for number, gradient in enumerate(gradients):
            if joins:
                optimizer.join(number, lambda span, g=gradient: g, partial(done.append, number))  # type: ignore[misc]
            else:
                optimizer.step(number, lambda span, g=gradient: g)  # type: ignore[misc]
        optimizer.flush()
        optimizer.flush()
    assert calls == [[8, 8], [8], [30], [4]] and done == [0, 1, 2, 3, 4]
    assert all(torch.equal(a, b) for a, b in zip(singly, joined, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(values, joined, strict=True))


def test_steps_are_put_off_alike_on_ranks_whose_slices_are_uneven() -> None:
    """What follows a step may be a collective call, whose order is to be that of all ranks."""
    seen = []
    for rank in range(2):
        log: list[str] = []
        optimizer = SpanOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1), Ledger())
        for flat, large in (("a", 2 * JOINED), ("b", 1)):
            shapes = [(f"{flat}{numel}", torch.Size((numel,))) for numel in (large, 1)]
            index = Index.of(shapes, 2, (0, large, large + 1))
            start, stop = index.interval(rank)
            optimizer.add(index, [0, 0], torch.zeros(stop - start), start)
        optimizer.install_spans()
        for number, flat in enumerate("ab"):
            optimizer.join(number, lambda _: None, partial(log.append, flat))
            seen.append((rank, flat, [*log]))
        optimizer.flush()
        assert log == ["a", "b"]
    assert [log for rank, _, log in seen if rank == 0] == [log for rank, _, log in seen if rank == 1]
