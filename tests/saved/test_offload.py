"""Activations on the host: the same gradients bit for bit, the bytes that move, and what others got wrong."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from pool import Pool
from saved.bench import Bench
from task_runners import Latest, Shuffled
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from zeroshard.errors import BudgetExceeded, OffloadError
from zeroshard.memory import HostMemory, in_pages
from zeroshard.memory.ledger import Category
from zeroshard.memory.transfers import Eager, Task, TaskRunner
from zeroshard.saved.kept import CountedTensor
from zeroshard.traffic import Purpose

Tensors = list[torch.Tensor]
EXECUTORS: list[Any] = [Eager, Latest, *((lambda seed=seed: Shuffled(seed)) for seed in range(10))]
IDS = ["eager", "latest", *map(str, range(10))]
every_executor = pytest.mark.parametrize("executor", EXECUTORS, ids=IDS)
some_executors = pytest.mark.parametrize("executor", EXECUTORS[:5], ids=IDS[:5])


class Attention(nn.Module):
    """A transformer block; q, k and v are cut out of one product, and transposed."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + F.dropout(self.out(mixed), 0.1)
        return x + self.mlp(self.second(x))


class Views(nn.Module):
    """Saves tensors with gaps, transposed, expanded, overlapping, in place and in another dtype, and skips layers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.wide(x)
        even, odd = wide[..., ::2], wide[..., 1::2]
        product = torch.relu_(even * odd.sigmoid()) @ (wide.transpose(-1, -2) @ wide)[..., :16, :16]
        windows = x.unfold(-1, 8, 4).exp().mean((-1, -2), keepdim=True)[..., 0].expand_as(x)
        low = self.back(product).bfloat16()
        return (low * low.sin()).float() * windows * windows + x.cos() * odd.exp()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.inside, self.after = nn.Linear(16, 16), Attention(), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: Any = checkpoint(self.inside, self.before(x).tanh(), use_reentrant=False)
        return self.after(y).tanh()


def mlp() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2))))


def conv() -> nn.Module:
    cut = nn.Unflatten(-1, (1, 4, 4))
    first, second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
    layers = (nn.Flatten(0, 1), cut, first, nn.BatchNorm2d(4), nn.ReLU(True), nn.MaxPool2d(2), second, nn.ReLU())
    return nn.Sequential(*layers, nn.Dropout2d(0.3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp, "attention": Attention, "conv": conv, "views": Views, "checkpointed": Checkpointed
}  # fmt: skip


def gradients(model: nn.Module, bench: Bench | None, reverse: bool) -> Tensors:
    """Of two graphs that live at a time, as in a pipeline, whose backwards go in either order."""
    inputs = [torch.randn(4, 8, 16, requires_grad=True) for _ in range(2)]
    torch.manual_seed(1)
    losses = []
    for x in inputs:
        with bench.saving(model) if bench else torch.enable_grad():
            losses.append(model(x).square().mean())
    torch.manual_seed(2)
    while losses:
        losses.pop(-1 if reverse else 0).backward()
    return [leaf.grad for leaf in (*inputs, *model.parameters()) if leaf.grad is not None]


@cache
def torchs_own(name: str, reverse: bool) -> Tensors:
    torch.manual_seed(0)
    return gradients(MODELS[name](), None, reverse)


def same(some: Tensors, others: Tensors) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


@every_executor
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_torch_bit_for_bit(name: str, executor: Callable[[], TaskRunner]) -> None:
    for reverse, window in ((False, 1), (True, 3)):
        bench = Bench(executor, window=window)
        torch.manual_seed(0)
        assert same(gradients(MODELS[name](), bench, reverse), torchs_own(name, reverse))
        assert bench.link.calls() > (4, 4)
        assert bench.nothing_is_left()


@some_executors
def test_a_tensor_comes_back_as_it_was(executor: Callable[[], TaskRunner]) -> None:
    base = torch.randn(12, 40, requires_grad=True).mul(1)
    integers = torch.randint(100, (500,))
    views: Tensors = [
        base[3:],
        base[1:9],
        base,
        base.t(),
        base[:, 4:20],
        base[::2, ::3],
        base[1].expand(7, 40),
        base[2, 5:7],
    ]
    views += [base.unfold(0, 4, 1), base.view(3, 4, 2, 20).permute(3, 1, 0, 2), base.detach().view(torch.int16)]
    views += [integers, integers[::2], integers > 50, torch.zeros(0, 5)]
    views += [base.detach().view(torch.int64)[:, 1:11], base.flatten()[33:]]
    complexes = torch.complex(base.detach(), base.detach().square())
    views += [complexes, complexes.conj(), complexes.conj().imag, complexes.real]
    bench = Bench(executor)
    wanted = [view.detach().clone() for view in views]
    handles = [bench.store.pack(view) for view in views]
    for n in torch.randperm(len(views)).tolist() * 2:
        back = bench.store.unpack(handles[n])
        assert back.dtype == views[n].dtype and back.stride() == views[n].stride()
        assert torch.equal(back, wanted[n])
        assert back.data_ptr() % 64 == views[n].data_ptr() % 64
    del handles
    assert bench.nothing_is_left()


def test_what_shares_bytes_goes_down_and_up_once() -> None:
    bench = Bench()
    x = torch.randn(64, 64, requires_grad=True)
    with bench.saving():
        y = x * 2
        loss = sum((part * y.t()[:64] @ y).sum() for part in (y, y.view(8, 8, 64).view(64, 64)))
    bench.store.settle()
    assert bench.held() == 3 * y.nbytes  # y itself, and two products
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    down, up = bench.link.calls()
    assert (down, up) == (3, 3)
    qkv = torch.randn(64, 192, requires_grad=True) * 1
    handles = [bench.store.pack(part) for part in qkv.chunk(3, -1)]
    bench.store.settle()
    assert bench.held() == qkv.nbytes and bench.link.calls() == (down + 1, up)
    assert all(map(torch.equal, map(bench.store.unpack, handles), qkv.chunk(3, -1)))
    assert bench.link.calls() == (down + 1, up + 1)


def test_a_part_of_the_data_takes_only_its_own_bytes_along() -> None:
    bench, data = Bench(), torch.randn(1000, 64)
    column, rows, few = (bench.store.pack(part) for part in (data[:, 3], data[100:200], data[7, :5]))
    assert bench.held() == 100 * 64 * 4
    parts = (data[:, 3], data[100:200], data[7, :5])
    assert all(map(torch.equal, map(bench.store.unpack, (column, rows, few)), parts))


def test_small_ones_and_those_without_bytes_of_their_own_stay() -> None:
    bench = Bench(smallest=4096)
    sparse = torch.eye(100).to_sparse()
    for tensor in (torch.randn(1023), sparse, torch.randn(1).expand(100, 100)):
        assert bench.store.unpack(bench.store.pack(tensor)) is not None
    assert bench.link.calls() == (0, 0)
    bench.store.pack(torch.randn(1024))
    assert bench.link.calls() == (1, 0)


@some_executors
def test_an_address_that_is_given_out_again_is_another_tensor(executor: Callable[[], TaskRunner]) -> None:
    bench = Bench(executor, window=1)
    handles = [bench.store.pack(torch.full((100,), float(n))) for n in range(50)]
    assert [bench.store.unpack(handle)[0].item() for handle in reversed(handles)] == [*reversed(range(50))]


@some_executors
def test_a_source_lives_until_its_copy_is_done_and_few_are_under_way(executor: Callable[[], TaskRunner]) -> None:
    bench = Bench(executor, window=3)
    handles = []
    for n in range(20):
        handles.append(bench.store.pack(torch.full((100,), float(n))))  # which nobody else holds
        assert len(bench.link.flying) <= 3
    for n in reversed(range(20)):
        assert bench.store.unpack(handles.pop())[0].item() == n
        assert len(bench.link.flying) <= 6
    assert bench.nothing_is_left()


@some_executors
def test_a_change_in_place_is_never_silent(executor: Callable[[], TaskRunner]) -> None:
    for changed_when, settled in (("under way", False), ("under way", True), ("after", True)):
        bench = Bench(executor)
        x = torch.randn(200, requires_grad=True)
        y = x * 3
        with bench.saving():
            z = y.sin()
        if changed_when == "after":
            bench.store.settle()
            y.zero_()
            z.sum().backward()
            assert torch.equal(x.grad, (x * 3).cos() * 3)  # where torch itself would refuse
            continue
        y.view(10, 20)[0, 0] = 7
        if settled:
            bench.store.settle()
        with pytest.raises(OffloadError, match=r"shape \(200,\).*changed in place.*clone"):
            z.sum().backward()
        del z
        assert bench.nothing_is_left()


def test_a_change_of_one_that_stayed_is_found_too_and_a_saved_version_is_not_an_older_one() -> None:
    bench = Bench()
    x = torch.randn(20, requires_grad=True)
    y = x * 3
    with bench.saving():
        z = y.sin()
    y.zero_()
    with pytest.raises(OffloadError, match=r"shape \(20,\)"):
        z.sum().backward()
    work = torch.zeros(100)
    before = bench.store.pack(work)
    bench.store.settle()
    after = bench.store.pack(work.add_(1))
    assert [bench.store.unpack(handle)[0].item() for handle in (after, before)] == [1, 0]


@some_executors
def test_a_graph_may_be_read_twice_and_differentiated_twice(executor: Callable[[], TaskRunner]) -> None:
    found = []
    for bench in (None, Bench(executor)):
        torch.manual_seed(0)
        model, x = mlp(), torch.randn(8, 16, requires_grad=True)
        with bench.saving(model) if bench else torch.enable_grad():
            loss = model(x).square().sum()
            slope, *_ = torch.autograd.grad(loss, x, create_graph=True)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        slope.square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
        if bench:
            del loss, slope
            gc.collect()
            assert bench.nothing_is_left()
    assert same(*found)


def test_a_graph_that_is_thrown_away_gives_all_back() -> None:
    bench, model = Bench(Eager), mlp()
    x = torch.randn(8, 16, requires_grad=True)
    with bench.saving(model):
        loss = model(x).exp().sum()
    bench.store.settle()
    assert bench.held() > 0
    del loss
    assert bench.held() == 0  # at once: nothing was under way
    with bench.saving(model):
        loss = model(x).exp().sum()
        loss.backward(retain_graph=True)  # and some have come up
    del loss
    assert bench.nothing_is_left()


def test_memory_is_not_given_back_while_a_copy_is_under_way() -> None:
    bench = Bench(Latest)
    for settled in (False, True):  # on the way down, on the way up
        tensors = [torch.full((100,), float(n)) for n in range(2)]
        handles = [bench.store.pack(tensor) for tensor in tensors]
        if settled:
            bench.store.settle()
            bench.store.unpack(handles.pop())
        handles.clear()
        assert bench.held() == (400 if settled else 800)
        assert bench.nothing_is_left()


def test_a_graph_may_be_dropped_while_the_store_is_at_work() -> None:
    handles: list[Any] = []

    class Dropping(Eager):
        def begin(self, task: Task) -> None:
            handles.clear()  # as the garbage collector would, anywhere
            super().begin(task)

    bench = Bench(Dropping)
    handles += [bench.store.pack(torch.ones(100)), bench.store.pack(torch.ones(100))]
    assert bench.held() == 800
    bench.store.settle()
    last = bench.store.pack(torch.ones(200))
    assert not handles and bench.held() == 800
    assert bench.store.unpack(last).sum().item() == 200


@pytest.mark.parametrize("width", [4, 400])
def test_an_output_that_its_own_graph_saves_is_freed_with_it(width: int) -> None:
    bench = Bench(smallest=1024)
    with bench.saving():
        y = torch.randn(width, requires_grad=True).exp()
    bench.store.settle()
    storage = StorageWeakRef(y.untyped_storage())
    del y
    assert storage.expired()


def test_copies_begin_before_they_are_asked_for_and_none_twice() -> None:
    bench = Bench(window=2)
    tensors = [torch.full((100,), float(n)) for n in range(10)]
    handles = [bench.store.pack(tensor) for tensor in tensors]
    bench.store.settle()
    for done in range(1, 11):
        bench.store.unpack(handles.pop())
        assert bench.link.calls() == (10, min(10, done + 2))


def test_in_a_plain_forward_and_backward_each_activation_comes_up_once_at_most() -> None:
    for model in (mlp(), Attention()):
        bench = Bench(window=2)
        gradients(model, bench, reverse=True)
        down, up = bench.link.calls()
        assert down - 4 <= up <= down  # the last of a forward may not have left


def test_what_came_up_for_nobody_is_let_go() -> None:
    bench = Bench(window=2)
    early = [bench.store.pack(torch.full((100,), float(n))) for n in range(4)]
    late = [bench.store.pack(torch.full((100,), float(n))) for n in range(4, 40)]
    bench.store.settle()
    bench.store.unpack(late[0])  # brings up two early ones, which are not wanted now
    for n in reversed(range(20, 40)):
        assert bench.store.unpack(late[n - 4])[0].item() == n
    assert bench.link.calls()[1] == 3 + 20 + 2  # and two others in their place, before they were asked for
    assert [bench.store.unpack(handle)[0].item() for handle in early] == [0, 1, 2, 3]


def test_failures_keep_what_is_still_right() -> None:
    class Torn(Latest):
        fails = False

        def begin(self, task: Task) -> None:
            if self.fails:
                task.work = lambda: (_ for _ in ()).throw(OffloadError("torn"))

    bench = Bench(Torn)
    torn = bench.link.executor
    assert isinstance(torn, Torn)
    torn.fails = True
    handle = bench.store.pack(torch.ones(100))
    with pytest.raises(OffloadError, match="torn"):
        bench.store.settle()
    assert bench.store.unpack(handle).sum().item() == 100  # its source never left
    torn.fails = False
    handle = bench.store.pack(torch.ones(100))
    bench.store.settle()
    torn.fails = True
    with pytest.raises(OffloadError, match="torn"):
        bench.store.unpack(handle)
    torn.fails = False
    assert bench.store.unpack(handle).sum().item() == 100
    del handle
    bench.ledger.budgets["host"] = 300
    with pytest.raises(BudgetExceeded):
        bench.store.pack(torch.ones(100))
    gc.collect()  # an error holds the frames that it came through
    assert bench.nothing_is_left()


def peak_of(watched: Any) -> int:
    """The highest sum of all that torch's allocator gave out and took back."""
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def test_the_peak_of_the_device_falls_by_what_was_moved() -> None:
    peaks, moved = {}, {}
    x = torch.randn(2048, 32)
    for depth in (6, 16):
        model = nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(32, 32), nn.Tanh())))
        bench = Bench(Eager, smallest=2**14)
        for store in (None, bench):
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
                with store.saving(model) if store else torch.enable_grad():
                    loss = model(x).sum()
                loss.backward()
                del loss
            peaks[depth, store is None] = peak_of(watched)
        moved[depth] = bench.link.counts[Purpose.ACTIVATIONS_DOWN].nbytes
        assert moved[depth] == (depth + 1) * x.nbytes  # each tanh, and the input, which is there anyway
        assert bench.nothing_is_left()
    assert peaks[16, False] < 6 * x.nbytes < 17 * x.nbytes < peaks[16, True]
    falls = {depth: peaks[depth, True] - peaks[depth, False] for depth in moved}
    assert abs((falls[16] - falls[6]) - (moved[16] - moved[6])) < x.nbytes // 10  # the gradients of small weights


def test_a_recorded_step_sees_what_is_on_the_device_and_the_hosts_pool_is_used_again() -> None:
    bench, model = Bench(Eager, 1024, host=lambda ledger: HostMemory(ledger, torch.device("cpu"))), mlp()
    device, below = (bench.ledger.account(Category.ACTIVATIONS, tier) for tier in ("device", "host"))
    x = torch.randn(100, 16)
    for recorded in (True, False, True):
        with bench.ledger.recorded([]) if recorded else nullcontext():
            bench.ledger.reset_peaks()
            with bench.saving(model):
                loss = model(x).sum()
            assert bench.held() == 12 * in_pages(x.nbytes) == bench.ledger.total("host")
            loss.backward()
            del loss
            assert bench.nothing_is_left()
            assert (device.current, below.current, bench.ledger.total("host")) == (0, 0, 12 * in_pages(x.nbytes))
            assert 2 * x.nbytes <= device.peak <= 4 * x.nbytes if recorded else not device.peak


def test_within_a_budget_of_the_device_fewer_are_under_way() -> None:
    for room, fits in ((7, True), (3, True), (1, True), (0.5, False)):
        bench, x = Bench(window=3), torch.randn(64, 64)
        bench.ledger.budgets["device"] = int(room * x.nbytes)
        handles = []
        try:
            handles += [bench.store.pack(x + n) for n in range(8)]
            assert all(torch.equal(bench.store.unpack(handles.pop()), x + n) for n in reversed(range(8)))
        except BudgetExceeded:
            assert not fits
        assert bench.ledger.account(Category.ACTIVATIONS).peak == min(4, int(room)) * x.nbytes
        assert bench.nothing_is_left() and not bench.ledger.total()


def test_within_a_budget_what_is_wanted_now_takes_the_place_of_what_was_thought_to_be_next() -> None:
    bench, x = Bench(), torch.randn(64, 64)
    handles = [bench.store.pack(x + n) for n in range(8)]
    bench.store.settle()
    bench.ledger.budgets["device"] = 3 * x.nbytes
    assert torch.equal(bench.store.unpack(handles[7]), x + 7)
    assert bench.ledger.account(Category.ACTIVATIONS).current == 3 * x.nbytes
    assert torch.equal(bench.store.unpack(handles[0]), x)


def test_within_a_budget_what_stays_takes_the_room_of_copies_under_way() -> None:
    bench, x = Bench(), torch.randn(64, 64)
    bench.ledger.budgets["device"] = 2 * x.nbytes
    handles = [bench.store.pack(x + n) for n in range(3)]
    bench.ledger.take(Category.ACTIVATIONS, 2 * x.nbytes, "what a block computes again")
    bench.ledger.give(Category.ACTIVATIONS, 2 * x.nbytes, "what a block computes again")
    assert torch.equal(bench.store.unpack(handles[2]), x + 2)
    assert bench.ledger.account(Category.ACTIVATIONS).current == 2 * x.nbytes  # with the one that was fetched ahead
    bench.ledger.take(Category.ACTIVATIONS, x.nbytes, "what a block computes again")
    bench.ledger.give(Category.ACTIVATIONS, x.nbytes, "what a block computes again")
    assert all(torch.equal(bench.store.unpack(handles.pop()), x + n) for n in (2, 1, 0))
    assert bench.nothing_is_left() and not bench.ledger.total()


def test_a_copy_that_a_recomputation_holds_counts_once() -> None:
    bench, x = Bench(), torch.randn(64, 64)
    bench.ledger.budgets["device"] = 2**30
    handle, current = bench.store.pack(x + 1), lambda: bench.ledger.account(Category.ACTIVATIONS).current
    bench.store.settle()
    assert current() == 0
    held = CountedTensor(bench.store.unpack(handle), None, bench.ledger.saved)
    assert current() == x.nbytes
    bench.store.settle()  # drops its copy, which lives on
    assert current() == x.nbytes
    del held
    assert current() == 0
    del handle
    assert bench.nothing_is_left()


class Probing(nn.Module):
    """A block that keeps what a probe makes of its inputs, which no backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.probe = nn.Linear(64, 64), nn.Linear(64, 4)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.probe(x))
        return torch.tanh(self.linear(x))


class Squares(nn.Module):
    """A chain with its loss."""

    def __init__(self, blocks: nn.Sequential) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


def train_probing(mesh: zs.Mesh, plan: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    trained = Squares(nn.Sequential(*(Probing() for _ in range(4))))
    cut = {"pipeline_parallel": 2, "microbatches": 4, "pipeline_parallel.split": ("blocks.2",), **plan}
    data = [torch.randn(1024, 64, generator=torch.Generator().manual_seed(step)) for step in range(3)]
    sgd = partial(torch.optim.SGD, lr=1.0)
    engine = zs.Engine(trained, sgd, zs.Plan.from_dict(cut), mesh=mesh, example=data[0][:256])
    for batch in data:
        engine.train_step(batch)
    return engine.state_dict()


@pytest.mark.parametrize("recompute", ["off", "blocks", "sqrt"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_messages_may_arrive_where_a_graph_that_is_kept_had_its_input(
    pool: Pool, schedule: str, recompute: str
) -> None:
    plan = {"pipeline_parallel.schedule": schedule, "activations.recompute": recompute}
    kept, moved = (pool.run(train_probing, 2, {**plan, **more})[0] for more in ({}, {"offload": "activations"}))
    assert all(torch.equal(kept[name], moved[name]) for name in kept)
