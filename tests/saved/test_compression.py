"""Compressed activations: lossless codes change no bit of a run, a backward reads lossy ones, and all are counted."""

import copy
import gc
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine.zoo import ZOO
from engine.zoo import train as train_in_zoo
from pool import Pool
from selection import by_default
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import zeroshard as zs
from zeroshard.errors import PlanError
from zeroshard.memory.ledger import Category, Ledger
from zeroshard.recompute.policy import LOSSY
from zeroshard.saved.codes.lossy import lossy_of
from zeroshard.saved.compression import Allowed, CompressedStore
from zeroshard.saved.gist import GistMode
from zeroshard.saved.savers import Savers

LOSSLESS = (("binarize",), ("sparse",), ("binarize", "sparse", "inplace"))
BF16 = {"zero": 3, "precision": "bf16", "fp32_modules": ["BatchNorm2d"]}
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class Images(nn.Module):
    """ReLUs and max-pools as modules and as functions; windows that overlap, with padding; dropout, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2))
        self.third = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2, ceil_mode=True))
        self.last = nn.Linear(16 * 2 * 2, 10)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = F.max_pool2d(self.first(x), 2)
        x = x + F.relu(self.second(x))
        return F.cross_entropy(self.last(self.third(x).flatten(1)), target)


class Tokens(nn.Module):
    """A block of a transformer with a ReLU, or its square."""

    def __init__(self, square: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down, self.square = nn.Linear(32, 128), nn.Linear(128, 32), square

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (part.view(b, t, 2, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + F.dropout(self.out(mixed), 0.1, self.training)
        y = F.relu(self.up(x))
        return x + self.down(y.square() if self.square else y)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.leave = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.blocks = nn.ModuleList([Tokens(square=bool(n % 2)) for n in range(4)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.leave(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


MODELS = {"images": Images, "transformer": Transformer}


def batch(name: str, step: int, rank: int) -> tuple[Tensor, ...]:
    """Of rounded numbers, so that windows have several greatest ones."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    if name == "transformer":
        return (torch.randint(64, (8, 32), generator=generator),)
    x = torch.randn(32, 3, 20, 20, generator=generator).mul(2).round().div(2)
    return x, torch.randint(10, (32,), generator=generator)


def train(mesh: zs.Mesh | None, name: str, plan: dict[str, Any], steps: int = 3) -> tuple[list[Any], dict[str, Tensor]]:
    """Losses and norms, and the weights in the end."""
    torch.manual_seed(0)
    if name == "images":
        plan = {"units": ("first", "second", "third"), **plan}
    elif "fp32_modules" in plan:
        plan = {**plan, "fp32_modules": ["LayerNorm"]}  # it has no batch norm
    engine = zs.Engine(MODELS[name](), SGD, zs.Plan.from_dict(plan), mesh=mesh, example=batch(name, 0, 0))
    torch.manual_seed(1 + engine.rank)
    seen = []
    for step in range(steps):
        result = engine.train_step(batch(name, step, engine.data_rank))
        seen.append((None if result.loss is None else result.loss.item(), result.grad_norm))
    return seen, engine.state_dict()


def train_each(mesh: zs.Mesh, name: str, plan: dict[str, Any], ways: Any) -> list[tuple[list[Any], dict[str, Tensor]]]:
    return [train(mesh, name, {**plan, "activations.compress": way}) for way in ((), *ways)]


def all_alike(runs: list[tuple[list[Any], dict[str, Tensor]]]) -> bool:
    (losses, weights), *others = runs
    return all(
        found == losses and all(torch.equal(value, weights[key]) for key, value in state.items())
        for found, state in others
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("plan", [{"zero": 0}, {"zero": 1}, {"zero": 2, "microbatches": 2},
                                  {"zero": 3, "transport": "network"}, BF16,
                                  {"zero": 2, "offload": "activations"}], ids=str)  # fmt: skip
def test_lossless_codes_change_no_bit(pool: Pool, name: str, plan: dict[str, Any]) -> None:
    for runs in pool.run(train_each, 2, name, plan, LOSSLESS):
        assert all_alike(runs)


@pytest.mark.parametrize("recompute", ["blocks", "sqrt", "selective"])
@pytest.mark.parametrize("name", MODELS)
def test_lossless_codes_in_blocks_that_are_computed_again(pool: Pool, name: str, recompute: str) -> None:
    plan = {"zero": 3, "transport": "network", "recompute": recompute}
    for runs in pool.run(train_each, 2, name, plan, LOSSLESS[1:]):
        assert all_alike(runs)


@pytest.mark.parametrize("schedule", by_default(["gpipe", "1f1b", "zb-h1", "pipedream"], "1f1b", "zb-h1"))
def test_lossless_codes_in_stages(pool: Pool, schedule: str) -> None:
    settings = {"stages": 2, "schedule": schedule, "split": ("blocks.2",)}
    plan = {"zero": 1, "pipeline_parallel": settings, "microbatches": 4}
    for runs in pool.run(train_each, 2, "transformer", plan, LOSSLESS[1:]):
        assert all_alike(runs)


def train_zoo(mesh: zs.Mesh, names: list[str], ways: Any) -> list[bool]:
    """Whether each model of the zoo trains alike under all `ways`."""
    alike = []
    for name in names:
        runs = []
        for way in ((), *ways):
            torch._dynamo.reset()
            runs.append(train_in_zoo(mesh, ZOO[name], zero=3, transport="network", **{"activations.compress": way}))
        alike.append(all_alike(runs))
    return alike


def test_models_as_people_write_them(pool: Pool, whole: bool) -> None:
    shown = ("records", "recurrent", "thrifty-reentrant", "adapted", "convolutions")
    names = [name for name in (ZOO if whole else shown) if name != "fickle"]
    for alike in pool.run(train_zoo, 2, names, [("binarize", "sparse", "inplace")]):
        assert alike == [True] * len(names)


# What follows has neither engine nor ranks: a store behind autograd's hooks, and the mode around a function.


class Bench:
    """A store that takes small tensors too, and its mode."""

    def __init__(self, *compress: str, smallest: int = 64, key: Any = lambda: 7) -> None:
        self.ledger = Ledger(budgets={"device": 2**30})
        self.lossy = next((lossy_of(name, key) for name in compress if name in LOSSY), None)
        self.store = CompressedStore(
            Allowed("binarize" in compress, "sparse" in compress, self.lossy), self.ledger, smallest
        )
        self.mode = GistMode(self.store, "binarize" in compress, smallest)
        self.packed: list[Any] = []

    def saving(self) -> saved_tensors_hooks:
        savers = Savers([self.store])

        def pack(tensor: Tensor) -> Any:
            self.packed.append(savers.pack(tensor))
            return self.packed[-1]

        return saved_tensors_hooks(pack, savers.unpack)

    def held(self) -> int:
        return self.ledger.account(Category.ACTIVATIONS).current

    def gradients(self, function: Any, *inputs: Tensor) -> list[Tensor]:
        """Of a function's output, weighted by its elements' numbers."""
        leaves = [each.detach().requires_grad_() for each in inputs]
        with self.mode, self.saving():
            output = function(*(leaf * 1 for leaf in leaves))
        torch.autograd.backward(output, weights_like(output))
        return [leaf.grad for leaf in leaves if leaf.grad is not None]


def weights_like(output: Tensor) -> Tensor:
    return torch.arange(output.numel(), dtype=output.dtype).sub_(output.numel() // 2).sin().view(output.shape)


def plain(function: Any, *inputs: Tensor) -> list[Tensor]:
    leaves = [each.detach().requires_grad_() for each in inputs]
    output = function(*(leaf * 1 for leaf in leaves))
    torch.autograd.backward(output, weights_like(output))
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def same_bits(found: list[Tensor], expected: list[Tensor]) -> bool:
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return all(
        a.dtype == b.dtype and a.stride() == b.stride()
        and torch.equal(a.contiguous().view(words[a.itemsize]), b.contiguous().view(words[b.itemsize]))
        for a, b in zip(found, expected, strict=True)
    )  # fmt: skip


WINDOWS: list[dict[str, Any]] = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (4, 4), "stride": 1, "padding": 2},
    {"kernel_size": (2, 3), "stride": (3, 1), "padding": (1, 0)},
    {"kernel_size": 2, "dilation": 3, "stride": 1},
    {"kernel_size": (3, 2), "dilation": (2, 1), "padding": 1, "ceil_mode": True},
    {"kernel_size": 3, "stride": 2, "ceil_mode": True},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_positions_in_windows(window: dict[str, Any], dtype: torch.dtype) -> None:
    """With several greatest values in a window, NaN, infinities and negative zeros; in both memory formats."""
    x = torch.randn(3, 4, 11, 13).mul(2).round().to(dtype)
    x[0, 0, 2:4, 3], x[1, 1, 5, 5], x[2, 2] = math.nan, math.inf, -math.inf
    for each in (x, x.to(memory_format=torch.channels_last), x[0]):
        pool, bench = partial(F.max_pool2d, **window), Bench("binarize")
        assert same_bits(bench.gradients(pool, each), plain(pool, each))
        saved = sum(each.saved.nbytes for each in bench.packed if each.saved.numel() > 1)
        assert saved == math.ceil(pool(each).numel() / 2)


@pytest.mark.parametrize("window", [{"kernel_size": 5}, {"kernel_size": (3, 6)}])
def test_windows_of_more_than_sixteen_elements_are_left_to_torch(window: dict[str, Any]) -> None:
    x, bench = torch.randn(2, 2, 12, 12), Bench("binarize")
    assert same_bits(bench.gradients(partial(F.max_pool2d, **window), x), plain(partial(F.max_pool2d, **window), x))
    assert any(handle.saved.dtype is torch.int64 for handle in bench.packed)


def double(x: Tensor) -> Tensor:
    """The gradient of a gradient through a ReLU and a pool."""
    y = F.max_pool2d(F.relu(x), 2).pow(3).sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    return first * x


RELUS: dict[str, Any] = {
    "function": F.relu,
    "module": nn.ReLU(),
    "of torch": torch.relu,
    "method": Tensor.relu,
    "in place": lambda x: F.relu(x, inplace=True),
    "method in place": lambda x: (x + 0).relu_(),
    "in place on a view": lambda x: (x + 0)[1:].relu_(),
    "keywords": lambda x: F.relu(input=x),
    "twice": lambda x: F.relu(F.relu(x) - 1),
    "double backward": double,
    "expanded": lambda x: F.relu(x[:, :1].expand(-1, 5, -1, -1)),
    "transposed": lambda x: F.relu(x.transpose(1, 3)),
    "channels last": lambda x: F.relu(x.to(memory_format=torch.channels_last)),
    "squared": lambda x: F.relu(x).square(),
    "before a pool": lambda x: F.max_pool2d(F.relu(x), 3, 2, 1),
    "clamped": lambda x: x.clamp(min=0),
    "in a transform": lambda x: torch.func.vmap(F.relu)(x),
}


@pytest.mark.parametrize("kind", RELUS)
def test_relus_of_every_kind(kind: str) -> None:
    x = torch.randn(4, 6, 8, 8)
    x[0, 0, 0, :5] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0])
    for way in (("binarize",), ("sparse",), ("binarize", "sparse")):
        assert same_bits(Bench(*way).gradients(RELUS[kind], x), plain(RELUS[kind], x)), way


def test_a_relu_before_a_pool_keeps_a_bit_and_the_pool_half_a_byte() -> None:
    x = torch.randn(2, 3, 16, 16)
    bench = Bench("binarize")
    bench.gradients(lambda y: F.max_pool2d(F.relu(y), 2), x)
    sizes = [each.saved.nbytes for each in bench.packed if each.saved.numel() > 1]
    assert sorted(sizes) == [x.numel() // 4 // 2, x.numel() // 8]


@pytest.mark.parametrize("zeros", [0.1, 0.19, 0.22, 0.5, 0.9])
def test_sparse_values_are_counted_from_a_fifth_of_zeros_on(zeros: float) -> None:
    """A value and its column take five bytes; below break-even the tensor stays as it is."""
    x = torch.ones(100, 256)
    x.view(-1)[torch.randperm(25600)[: int(25600 * zeros)]] = 0
    leaf, weight = x.clone().requires_grad_(), torch.randn(256, 8, requires_grad=True)
    bench = Bench("sparse")
    with bench.mode, bench.saving():
        y = leaf * 1
        loss = (y @ weight).square().sum()
    sparse = 5 * (25600 - int(25600 * zeros)) + 4 * 101
    found = bench.store.kept
    assert found == (sparse if sparse < x.nbytes else 0)
    assert bench.held() == found
    loss.backward()
    assert torch.equal(weight.grad, x.t() @ (2 * (x @ weight.detach())))
    del loss, y
    bench.packed.clear()
    gc.collect()
    bench.store.settle()
    assert bench.held() == 0


def test_the_value_of_a_relu_is_kept_once_for_itself_and_the_next_layer() -> None:
    """The layer saves [rows, columns] of what the ReLU saved as [B, T, columns]: one region, stored and read once."""
    up, down, x = nn.Linear(16, 64), nn.Linear(64, 16), torch.randn(4, 32, 16)
    bench = Bench("sparse")
    with bench.mode, bench.saving():
        y = down(F.relu(up(x)))
    active = int((up(x) > 0).sum())
    assert bench.store.kept == 5 * active + 4 * (4 * 32 * 64 // 256 + 1) == bench.held()
    y.sum().backward()
    expected = nn.Linear(16, 64)
    expected.load_state_dict(up.state_dict())
    down.weight.grad, first = None, up.weight.grad
    down(F.relu(expected(x))).sum().backward()
    assert torch.equal(first, expected.weight.grad)


def test_views_of_one_product_are_stored_and_read_once() -> None:
    """q, k and v of one product, one of them transposed, and other values behind the same address."""
    source = torch.randn(64, 96, requires_grad=True)
    bench = Bench("sparse", "fp16")
    with bench.saving():
        product = source * 1
        q, k, v = product.chunk(3, -1)
        y = q * k + v.square() + (q.t() @ k).sum()
    assert bench.store.kept == 2 * product.numel()
    whole = bench.lossy.decode(bench.lossy.encode(product.detach().flatten()), product.numel()).view(64, 96)
    y.sum().backward()
    a, b, c = whole.chunk(3, -1)
    expected = torch.cat([b + 2048 * b.sum(1, keepdim=True), a + 2048 * a.sum(1, keepdim=True), 2 * c], 1)
    torch.testing.assert_close(source.grad, expected, rtol=1e-5, atol=1e-3)


def test_what_a_backward_has_read_makes_room_for_other_tensors() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    bench = Bench("sparse")
    with bench.saving():
        output = F.relu(x * 1).square().sum()
    output.backward()
    bench.packed.clear()
    assert bench.held() == x.nbytes  # as long as nobody asks for room
    bench.ledger.budgets["device"] = x.nbytes
    bench.ledger.take(Category.ACTIVATIONS, x.nbytes, "the next block")


def test_what_is_left_as_it_is() -> None:
    bench = Bench("binarize", "sparse", "fp8")
    weight, data = nn.Parameter(torch.zeros(64, 64)), torch.zeros(64, 64)
    leaf = torch.zeros(64, 64, requires_grad=True)
    whole = torch.zeros(64, 64, dtype=torch.int64)
    results = {
        "weight": weight, "data": data, "leaf": leaf, "integers": whole, "complex": leaf * 1j,
        "small": leaf[:2, :2] * 1, "sparse layout": (leaf * 1).to_sparse(),
    }  # fmt: skip
    for name, tensor in results.items():
        assert bench.store.pack(tensor) is None, name
    assert bench.store.pack(leaf * 1) is not None
    wide = (leaf.double() + 1) * 1.5
    assert bench.store.pack(wide) is None  # lossy codes leave fp64 alone, and none of it is zero


class Weighted(torch.autograd.Function):
    """A function of a user's that saves its input, its output, something between, and a mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        between = x.exp()
        y = between * x
        ctx.save_for_backward(x, y, between, x > 0)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x, y, between, mask = ctx.saved_tensors
        return gradients[0] * (between + y) * torch.where(mask, 1, 2) + 0 * x


def test_what_a_users_function_saves() -> None:
    """Without loss all is as it was; with it, input and output get codes, and what is between does not."""
    x = torch.randn(40, 40)
    apply: Any = Weighted.apply
    assert same_bits(Bench("binarize", "sparse").gradients(apply, x), plain(apply, x))
    bench = Bench("binarize", "fp16")
    found = bench.gradients(apply, x)[0]
    y = bench.lossy.decode(bench.lossy.encode((x.exp() * x).flatten()), x.numel()).view(x.shape)
    assert torch.equal(found, weights_like(x) * (x.exp() + y) * torch.where(x > 0, 1, 2))
    assert bench.store.kept == 2 * 2 * x.numel() + x.numel() // 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOSSY)
def test_a_backward_reads_the_codes_and_the_forward_does_not(name: str, dtype: torch.dtype) -> None:
    x, weight = torch.randn(40, 64).to(dtype), torch.randn(64, 24).to(dtype).requires_grad_()
    bench, leaf = Bench(name), x.clone().requires_grad_()
    with bench.mode, bench.saving():
        y = leaf * 1 @ weight
    assert torch.equal(y, x @ weight)
    y.backward(torch.ones_like(y))
    code = lossy_of(name, lambda: 7)
    read = code.decode(code.encode(x.float().flatten()), x.numel()).view(x.shape).to(dtype)
    smaller = code.nbytes(x.numel()) < x.nbytes
    assert smaller or (name == "fp16" and dtype.itemsize == 2)
    assert torch.equal(weight.grad, (read if smaller else x).t() @ torch.ones_like(y))
    assert bench.store.kept == (code.nbytes(x.numel()) if smaller else 0)


@pytest.mark.parametrize("name", ["fp16", "fp10", "fp8", "int4"])
def test_values_that_are_not_zero_get_codes_too(name: str) -> None:
    """Of the sparse form and the dense codes, the smaller one is kept."""
    weight = torch.randn(64, 24, requires_grad=True)
    for zeros in (0.0, 0.3, 0.55, 0.8, 0.9):
        x = torch.randn(80, 64)
        x.view(-1)[torch.randperm(x.numel())[: int(x.numel() * zeros)]] = 0
        bench, leaf = Bench("sparse", name), x.clone().requires_grad_()
        with bench.saving():
            y = leaf * 1 @ weight
        found, code = int((x != 0).sum()), lossy_of(name, lambda: 7)
        sparse = code.nbytes(found) + found + 4 * 21
        assert bench.store.kept == min(code.nbytes(x.numel()), sparse)
        weight.grad = None
        y.backward(torch.ones_like(y))
        read = x.clone()
        if sparse < code.nbytes(x.numel()):
            read[x != 0] = code.decode(code.encode(x[x != 0]), found)
        else:
            read = code.decode(code.encode(x.flatten()), x.numel()).view(x.shape)
        assert torch.equal(weight.grad, read.t() @ torch.ones_like(y))


def test_attention_and_losses_are_kept_exactly() -> None:
    q, k, v = (torch.randn(2, 2, 16, 8) for _ in range(3))
    attention = partial(F.scaled_dot_product_attention, is_causal=True)
    assert same_bits(Bench("int2").gradients(attention, q, k, v), plain(attention, q, k, v))
    target = torch.randint(50, (40,))
    loss = lambda logits: F.cross_entropy(logits, target, reduction="none")  # noqa: E731
    logits = torch.randn(40, 50)
    assert same_bits(Bench("int2").gradients(loss, logits), plain(loss, logits))


def test_factors_of_dropout_take_a_bit() -> None:
    x, bench = torch.randn(64, 64, requires_grad=True), Bench("binarize")
    with bench.saving():
        y = F.dropout(x * 1, 0.3)
    assert bench.store.kept == 64 * 64 // 8 + 4
    y.sum().backward()
    assert torch.equal(x.grad, torch.where(y.detach() != 0, torch.tensor(1 / 0.7), 0.0))


def test_rounding_at_random_repeats_with_the_key_and_differs_between_steps() -> None:
    x = torch.randn(40, 64)
    key = [1]
    bench = Bench("int2", key=lambda: key[0])
    square = torch.square
    first, second = bench.gradients(square, x)[0], bench.gradients(square, x)[0]
    bench.store.settle()
    assert torch.equal(bench.gradients(square, x)[0], first) and not torch.equal(first, second)
    bench.store.settle()
    key[0] = 2
    assert not torch.equal(bench.gradients(square, x)[0], first)


def test_a_tensor_that_is_read_is_counted_while_a_backward_holds_it() -> None:
    bench, x = Bench("fp8"), torch.randn(64, 64, requires_grad=True)
    peak = bench.ledger.account(Category.ACTIVATIONS)
    with bench.saving():
        y = (x * 1).square()
    assert (bench.held(), peak.peak) == (4096, 4096)
    y.sum().backward()
    assert peak.peak == 4096 + x.nbytes
    del y
    bench.packed.clear()
    bench.store.settle()
    assert bench.held() == 0


def counted(compress: tuple[str, ...], model: nn.Module, *inputs: Tensor) -> int:
    """Bytes of activations on the ledger after a forward."""
    policy = zs.Activations(compress=compress)
    engine = zs.Engine(copy.deepcopy(model), SGD, zs.Plan(zero=0, activations=policy, device_memory="1GiB"))
    output = engine(*inputs)
    assert output is not None
    return engine.ledger.account(Category.ACTIVATIONS).current


def test_bytes_on_the_ledger_are_those_of_the_formula() -> None:
    """conv, ReLU, pool, conv: without codes x, y, y again as the pool's input (one tensor), indices and the pooled."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3))
    x = torch.randn(16, 3, 32, 32)
    y = 16 * 8 * 32 * 32
    pooled = y // 4
    found = {way: counted(way, model, x) for way in ((), ("binarize",), ("binarize", "fp16"), ("fp16",), ("fp8",))}
    assert found[()] == x.nbytes + 4 * y + (8 + 4) * pooled
    assert found["binarize",] == x.nbytes + y // 8 + pooled // 2 + 4 * pooled
    assert found["binarize", "fp16"] == x.nbytes + y // 8 + pooled // 2 + 2 * pooled
    assert found["fp16",] == x.nbytes + 2 * y + (8 + 2) * pooled
    assert found["fp8",] == x.nbytes + y + (8 + 1) * pooled
    with torch.no_grad():
        zeros = int((model[2](model[1](model[0](x))) == 0).sum())
    sparse = 5 * (pooled - zeros) + 4 * (pooled // 256 + 1)
    assert counted(("binarize", "sparse"), model, x) == x.nbytes + y // 8 + pooled // 2 + min(sparse, 4 * pooled)


def test_a_model_is_copied_and_stored_without_the_codes() -> None:
    model = Images()
    before = {name: type(module) for name, module in model.named_modules()}
    engine = zs.Engine(model, SGD, zs.Plan(activations=zs.Activations(compress=("binarize", "inplace"))))
    engine.train_step(batch("images", 0, 0))
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert all("forward" not in vars(module) for module in model.modules())
    assert model.state_dict().keys() == Images().state_dict().keys()
    other = copy.deepcopy(model)
    other(*batch("images", 0, 0)).backward()
    assert torch.overrides._get_current_function_mode_stack() == []


def test_an_error_in_a_forward_leaves_no_mode_behind() -> None:
    engine = zs.Engine(Images(), SGD, zs.Plan(activations=zs.Activations(compress=("binarize",))))
    with pytest.raises(RuntimeError):
        engine(torch.zeros(2, 5, 20, 20), torch.zeros(2, dtype=torch.int64))
    assert torch.overrides._get_current_function_mode_stack() == []
    engine.train_step(batch("images", 0, 0))


def linears(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), *layers)


class ByHand(nn.Module):
    """Calls the layers of a sequence by itself, and reads what one returned later."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(nn.ReLU(), *linears(nn.ReLU()))

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for layer in self.layers:
            found.append(x := layer(x))
        return x.square().mean() + found[0].square().mean()


class SharedRelu(nn.Module):
    """Calls the ReLU of a sequence once more, on what it reads later."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.last = nn.ReLU(), nn.Linear(64, 64)
        self.layers = linears(self.relu)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.layers(x))
        return (self.relu(x) + 0.5 * x).square().mean()


class Watched(nn.Module):
    """A hook sees what enters the ReLU, and the loss has it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.seen = linears(nn.ReLU()), []
        self.layers[1].register_forward_pre_hook(lambda relu, args: self.seen.append(args[0]))

    def forward(self, x: Tensor) -> Tensor:
        loss = self.layers(x).square().mean() + self.seen[-1].square().mean()
        self.seen.clear()
        return loss


class TanhLinear(nn.Linear):
    """Saves its output."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.tanh(super().forward(input))


class OwnLinear(nn.Module):
    """A ReLU behind a layer of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(TanhLinear(64, 64), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize("kind", [ByHand, SharedRelu, Watched, OwnLinear])
def test_relus_leave_inputs_that_something_reads(kind: type[nn.Module]) -> None:
    found = []
    for compress in ((), ("binarize", "inplace")):
        torch.manual_seed(0)
        engine = zs.Engine(kind(), SGD, zs.Plan(activations=zs.Activations(compress=compress)))
        losses = []
        for step in range(3):
            loss = engine(torch.randn(128, 64, generator=torch.Generator().manual_seed(step)))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found.append((losses, engine.state_dict()))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


def test_relus_write_over_inputs_that_nothing_needs() -> None:
    """Behind a convolution in a sequence; not where somebody hooks it, or where the layer saves its output."""
    seen: list[Tensor] = []
    plan = zs.Plan(activations=zs.Activations(compress=("binarize", "inplace")))
    x = torch.randn(8, 3, 24, 24)
    for layers, overwritten in (
        ([nn.Conv2d(3, 8, 3), nn.ReLU()], True),
        ([nn.Conv2d(3, 8, 3), nn.Sigmoid(), nn.ReLU()], False),
        ([nn.Conv2d(3, 8, 3), nn.Identity(), nn.ReLU()], False),
    ):
        model = nn.Sequential(*layers)
        engine = zs.Engine(model, SGD, plan)
        output = engine(x)
        assert (type(output.grad_fn).__name__ == "ReluBitsInPlaceBackward") == overwritten
        engine.backward(output.square().mean())
        engine.step()
    hooked = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    hooked[0].register_forward_hook(lambda module, args, output: seen.append(output))
    engine = zs.Engine(hooked, SGD, plan)
    assert engine(x).data_ptr() != seen[0].data_ptr()
    assert (seen[0] < 0).any()


@pytest.mark.parametrize(
    ("compress", "message"),
    [
        (("fp8", "int4"), r"'fp8' and 'int4', and a value gets one code"),
        (("inplace",), r"lacks 'binarize'"),
        (("zip",), r"'zip'; it must be one of 'binarize', 'sparse'"),
        ("fp8", r"must be a tuple of names, such as \('fp8',\)"),
    ],
)
def test_settings_that_are_refused(compress: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        zs.Plan(activations={"compress": compress})
