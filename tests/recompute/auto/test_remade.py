"""Saved tensors that are made again from others that are saved: the same bits, and what they take is free meanwhile."""

import gc
import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pool import Pool
from recompute.test_recompute import SGD, WIDTH, Stack, batch
from selection import by_default
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import zeroshard as zs
from zeroshard.memory.ledger import Category
from zeroshard.recompute.auto import decision as chain_decision
from zeroshard.recompute.auto import remade
from zeroshard.recompute.auto.meter import BlockMeasures
from zeroshard.recompute.auto.remade import Recipe, costs_of, next_number
from zeroshard.saved.kept import Kept
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig

FORWARDS = (1, 1, 1)


@pytest.fixture(autouse=True)
def small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remade, "SMALLEST", 0)


class Slot:
    held: Any = None


AROUND: Any = SimpleNamespace(hold=Kept, now=itertools.count().__next__)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True) * 1.5


def keep_mask(x: Tensor) -> Tensor:
    return torch.empty_like(x).bernoulli_(0.8)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return weight * normed


WEIGHT, BIAS = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "leaky relu": lambda x: F.leaky_relu(x, 0.2),
    "relu6": F.relu6,
    "softplus": lambda x: F.softplus(x, beta=2.0),
    "square": torch.square,
    "cube": lambda x: x**3,
    "square of relu": lambda x: F.relu(x).square(),
    "product": lambda x: x * (x + 1),
    "quotient": lambda x: x / (x.square() + 1),
    "dropout": lambda x: F.dropout(F.softmax(x, -1), 0.3),
    "masked relu": lambda x: F.relu(x) * keep_mask(x),
    "layer norm": lambda x: F.layer_norm(x, (8,), WEIGHT, BIAS),
    "layer norm without weights": lambda x: F.layer_norm(x, (8,)),
    "layer norm of another epsilon": lambda x: F.layer_norm(x, (8,), WEIGHT, None, 1e-3),
    "rms norm": lambda x: rms_norm(x, WEIGHT),
    "transposed": lambda x: F.gelu(x.transpose(0, 1)).transpose(0, 1),
    "expanded": lambda x: F.gelu(x).unsqueeze(0).expand(2, 4, 8).flatten(0, 1),
}
STAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x + 1,
    "relu": F.relu,
    "clone": lambda x: x.clone(),
    "scaled": lambda x: x * 2,
    "softmax": lambda x: F.softmax(x, -1),
    "matrix product": lambda x: x @ x.T @ x,
    "masked, of what is not saved": lambda x: (x + 1) * keep_mask(x),
}


def costs_of_last(operation: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Any]:
    since = next_number()
    made = operation(x)
    return made, costs_of([(7, made)], since, (1e-6, 1e-5, 1e-3), lambda: 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MADE)
def test_tensors_are_made_from_the_nodes_of_their_operations(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = drawn(4, 8, dtype=dtype)
    made, costs = costs_of_last(MADE[name], x)
    if name == "expanded":  # its copy is made of no saved tensor
        assert costs == ()
        return
    (cost,) = costs
    (recipe,) = cost.recipes
    assert recipe.number == 7 and cost.nbytes == made.untyped_storage().nbytes()
    slot, block = Slot(), SimpleNamespace(made=0.0)
    found = remade.remade(made, recipe, slot, AROUND, block)
    assert found is not None
    again = found.tensor()
    assert torch.equal(again, made) and again.stride() == made.stride() and again.dtype == made.dtype
    assert again.data_ptr() != made.data_ptr() and slot.held.tensor() is again
    assert block.made == 1.0  # from one time of the clock to the next


@pytest.mark.parametrize("name", STAYS)
def test_tensors_whose_nodes_lack_an_input_stay(name: str) -> None:
    torch.manual_seed(0)
    assert costs_of_last(STAYS[name], drawn(4, 8))[1] == ()


def test_what_an_earlier_block_made_stays() -> None:
    made = F.gelu(drawn(4, 8))
    assert costs_of([(0, made)], next_number(), (1e-5,), lambda: 0.0) == ()


def test_a_storage_stays_if_one_of_its_readers_needs_it_as_it_is() -> None:
    since = next_number()
    made = F.gelu(drawn(4, 8))
    assert costs_of([(0, made), (1, made.detach())], since, (1e-5,), lambda: 0.0) == ()
    (cost,) = costs_of([(0, made), (1, made.T)], since, (1e-5,), lambda: 0.0)
    assert [recipe.number for recipe in cost.recipes] == [0, 1]


def test_a_layer_norm_of_another_epsilon_than_measured_is_an_error() -> None:
    made = F.layer_norm(drawn(4, 8), (8,), WEIGHT, None, 1e-3)
    found = remade.remade(made, Recipe(0, "NativeLayerNorm", 1e-5), Slot(), AROUND, SimpleNamespace(made=0.0))
    assert found is not None
    with pytest.raises(RuntimeError, match="another epsilon"):
        found.tensor()


def test_a_tensor_of_another_operation_than_measured_stays() -> None:
    assert remade.remade(F.silu(drawn(4, 8)), Recipe(0, "Gelu"), Slot(), AROUND, SimpleNamespace(made=0.0)) is None


class Block(nn.Module):
    """Norms, attention with dropout, and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = F.dropout(F.softmax(q @ k.transpose(1, 2), -1), 0.1, self.training)
        x = x + self.out(scores @ v)
        h = self.mlp_norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


BLOCKS = 5


def all_made_again(blocks: list[BlockMeasures]) -> list[BlockMeasures]:
    """Making tensors again takes no time, and all else does."""
    found = []
    for block in blocks:
        made = tuple(replace(each, seconds=1e-6 * each.nbytes) for each in block.remade)
        found.append(replace(block, seconds=9.0, again=9.0, tails=(), remade=made))
    return found


def train(plan: dict[str, Any], loss_of: Any = None, forwards: tuple[int, ...] = FORWARDS) -> dict[str, Any]:
    """Weights, the most bytes of each step, decisions, and blocks that were computed again in each step."""
    torch.manual_seed(0)
    engine = zs.Engine(Stack(BLOCKS, Block), SGD, zs.Plan.from_dict(plan))
    torch.manual_seed(1)
    peaks, again = [], [0]
    for step, count in enumerate(forwards):
        with engine.trace(memory=True) as trace:
            losses = [engine(batch(step, rank, 8)) for rank in range(count)]
            (loss_of or (lambda engine, loss: engine.backward(loss)))(engine, torch.stack(losses).sum())
            del losses
            engine.step()
        peaks.append(max(sum(event.nbytes.values()) for event in trace.memory))
        again.append(engine.recomputed)
    later = [after - before for before, after in itertools.pairwise(again)]
    return {"weights": engine.state_dict(), "peaks": peaks, "rows": engine.activation_decisions, "again": later}


def same(found: dict[str, Any], kept: dict[str, Any]) -> bool:
    return all(torch.equal(value, kept["weights"][name]) for name, value in found["weights"].items())


def auto(budget: int | str) -> dict[str, Any]:
    return {"recompute": "auto", "device_memory": budget}


def budget_for_all_made(kept: dict[str, Any], loss_of: Any = None) -> int:
    """Bytes in which every block is kept but for what is made again."""
    saved = sum(row["saved_bytes"] for row in train(auto("1GiB"), loss_of)["rows"])
    return int(kept["peaks"][1]) - saved * 3 // 10


def backward_twice(engine: zs.Engine, loss: Tensor) -> None:
    (loss * 0.5).backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("loss_of", [None, backward_twice], ids=["one backward", "two backwards"])
def test_blocks_keep_less_with_the_same_bits(monkeypatch: pytest.MonkeyPatch, loss_of: Any) -> None:
    monkeypatch.setattr(chain_decision, "alike", all_made_again)
    kept = train({"device_memory": "1GiB"}, loss_of)
    budget = budget_for_all_made(kept, loss_of)
    found = train(auto(budget), loss_of)
    made = [row for row in found["rows"] if "kept but for" in row["action"]]
    assert same(found, kept) and max(found["peaks"][1:]) <= budget
    assert len(made) > BLOCKS // 2 and {row["again"] for row in made} == {0}
    for row in made:
        assert row["action"] == "kept but for results of Mul, NativeLayerNorm, Silu"
        assert row["kept_bytes"] < 0.75 * row["saved_bytes"]
        assert row["measured_kept_bytes"] in (None, row["kept_bytes"])
        assert row["stored_seconds"] > 0 and (row["measured_stored_seconds"] > 0 or loss_of is not None)
    if loss_of is None:
        assert found["again"][1:] == [BLOCKS - len(made) - sum(row["action"] == "kept" for row in found["rows"])] * 2


def test_more_forwards_than_measured_drop_such_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_decision, "alike", all_made_again)
    forwards = (1, 1, 2, 1, 2)
    kept = train({"device_memory": "1GiB"}, None, forwards)
    budget = budget_for_all_made(kept)
    found = train(auto(budget), None, forwards)
    assert same(found, kept) and max(found["peaks"]) <= budget < kept["peaks"][2]


def test_gradients_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def penalised(engine: zs.Engine, loss: Tensor) -> None:
        weights = [p for name, p in engine.model.named_parameters() if "down.weight" in name]
        gradients = torch.autograd.grad(loss, weights, create_graph=True)
        engine.backward(loss + sum(each.square().sum() for each in gradients))

    monkeypatch.setattr(chain_decision, "alike", all_made_again)
    kept = train({"device_memory": "1GiB"}, penalised)
    found = train(auto(budget_for_all_made(kept)), penalised)
    assert same(found, kept) and any("kept but for" in row["action"] for row in found["rows"])


def test_a_node_that_another_backward_has_freed_has_its_block_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(Stack):
        """The gradient of the second loss asks for a tensor whose node the first one's backward has freed."""

        def forward(self, x: Tensor) -> Any:
            return self.blocks[0](self.enter(x))

    class Fork(Block):
        def forward(self, x: Tensor) -> Any:
            h = F.silu(self.gate(self.norm(x)))
            return self.down(h).square().mean(), self.down(h * 1.0).detach(), self.other(h).square().mean()

        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(4 * WIDTH, WIDTH)

    def run(plan: dict[str, Any]) -> list[Tensor]:
        torch.manual_seed(0)
        engine = zs.Engine(Two(1, Fork), SGD, zs.Plan.from_dict(plan))
        found = []
        for step in range(3):
            one, _, two = engine(batch(step, 0, 8))
            one.backward()
            found.append(torch.autograd.grad(two, engine.model.blocks[0].other.weight)[0])
            engine.step()
        return found

    monkeypatch.setattr(chain_decision, "alike", all_made_again)
    kept = run({})
    for budget in range(30_000, 120_000, 10_000):
        try:
            found = run(auto(budget))
        except zs.errors.BudgetExceeded:
            continue
        assert all(map(torch.equal, found, kept))


def train_ranks(mesh: zs.Mesh, plans: list[dict[str, Any]]) -> list[Any]:
    """Weights and actions of each plan; those with a part of the budget of kept blocks favour what is made again."""
    known = chain_decision.alike, remade.SMALLEST
    chain_decision.alike, remade.SMALLEST = all_made_again, 0
    try:
        return [one_rank(mesh, plan) for plan in plans]
    finally:
        chain_decision.alike, remade.SMALLEST = known


def one_rank(mesh: zs.Mesh, plan: dict[str, Any]) -> tuple[dict[str, Tensor], int, set[str]]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(32, 8, 16, 2, 4, 0.1))
    example = torch.zeros(2, 8, dtype=torch.long)
    engine = zs.Engine(model, SGD, zs.Plan.from_dict(plan), mesh=mesh, example=(example, example))
    torch.manual_seed(1 + mesh.rank)
    peaks = []
    for step in range(4):
        tokens = torch.randint(32, (8, 9), generator=torch.Generator().manual_seed(100 * step + engine.data_rank))
        with engine.trace(memory=True) as trace:
            engine.train_step((tokens[:, :-1], tokens[:, 1:]))
        peaks.append(max(sum(event.nbytes.values()) for event in trace.memory))
    actions = {row["action"] for row in engine.activation_decisions}
    return engine.state_dict(), max(peaks[1:]), actions


PLANS: list[dict[str, Any]] = [
    {"zero": 2, "microbatches": 2},
    {"zero": 3, "transport": "network"},
    {"zero": 1, "tensor_parallel": 2},
    {"zero": 1, "tensor_parallel": 2, "tensor_parallel.sequence": False},
    {"zero": 1, "pipeline_parallel": 2, "microbatches": 2, "pipeline_parallel.schedule": "1f1b"},
]


@pytest.mark.parametrize("plan", by_default(PLANS, *PLANS[1:4]), ids=str)
def test_ranks_make_tensors_again_with_the_same_bits(pool: Pool, plan: dict[str, Any]) -> None:
    kept = pool.run(train_ranks, 2, [{**plan, "device_memory": "1GiB"}])
    highest = max(answer[0][1] for answer in kept)
    budgets = [highest * part // 20 for part in (19, 18, 17)]
    answers = pool.run(train_ranks, 2, [{**plan, **auto(budget)} for budget in budgets])
    actions = set[str]()
    for found, (expected,) in zip(answers, kept, strict=True):
        for (weights, peak, did), budget in zip(found, budgets, strict=True):
            assert all(torch.equal(value, expected[0][name]) for name, value in weights.items())
            assert peak <= budget
            actions |= did
    assert any(action.startswith("kept but for results of") for action in actions)


class Failing(Block):
    """Raises in its second forward, once."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        Failing.calls += 1
        if Failing.calls == 2:
            raise ValueError("the block fails")
        return out


@pytest.mark.parametrize("kind", [Block, Failing])
def test_a_measured_graph_is_freed_with_its_loss(kind: type[Block]) -> None:
    """What watches the forward is known to the graph's hooks, and must not hold the graph."""
    Failing.calls = 0
    gc.collect()
    gc.disable()
    try:
        engine = zs.Engine(Stack(3, kind), SGD, zs.Plan.from_dict(auto("1GiB")))
        alive: list[Any] = []
        store = lambda *given: alive.append(StorageWeakRef(given[2].untyped_storage()))  # noqa: E731
        engine.model.blocks[0].up.register_forward_hook(store)
        try:
            engine(batch(0, 0))
        except ValueError:
            assert kind is Failing
        assert alive and all(storage.expired() for storage in alive)
        assert engine.ledger.account(Category.ACTIVATIONS).current == 0
    finally:
        gc.enable()
