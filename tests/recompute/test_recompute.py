"""Recomputed blocks: gradients are those of kept ones, bit for bit, under every plan, and what is kept is counted."""

import copy
import gc
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from engine.zoo import ZOO
from engine.zoo import train as train_in_zoo
from pipeline import pipelines
from pool import Pool
from selection import by_default
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from zeroshard.errors import PlanError
from zeroshard.memory.ledger import Category
from zeroshard.recompute.policy import Activations
from zeroshard.recompute.recomputation import by_square_root
from zeroshard.traffic import Purpose

POLICIES = ("blocks", "sqrt", "selective")
WIDTH, ROWS, TOKENS = 16, 4, 6
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Attention(nn.Module):
    """Attention and an MLP: dropout as modules and as functions, statistics of a batch norm, a counter."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.batch_norm = nn.LayerNorm(width), nn.BatchNorm1d(width)
        self.qkv, self.out, self.dropout = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)
        self.register_buffer("calls", torch.zeros(()))
        self.forwards, self.runs = 0, list[None]()  # of which a number counts no recomputations

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        self.forwards += 1
        self.runs.append(None)
        self.calls += 1
        b, t, d = x.shape
        q, k, v = (part.view(b, t, 2, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.dropout(self.out(mixed)) * (self.calls / 8)
        h = self.batch_norm(x.flatten(0, 1)).view(b, t, d)
        return x + F.dropout(self.down(F.gelu(self.up(h))), 0.1, self.training)


class Stack(nn.Module):
    """Blocks, and a loss that the model returns."""

    def __init__(self, blocks: int = 5, kind: Any = Attention) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([kind() for _ in range(blocks)])
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x).square().mean()


def batch(step: int, rank: int, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, TOKENS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def train(mesh: zs.Mesh, plan: dict[str, Any], steps: int = 3, blocks: int = 5) -> dict[str, Any]:
    """What a run leaves behind: losses, norms, weights and buffers, counts."""
    torch.manual_seed(0)
    model = Stack(blocks)
    engine = zs.Engine(model, SGD, zs.Plan.from_dict(plan), mesh=mesh, example=(batch(0, 0),))
    torch.manual_seed(1 + mesh.rank)
    seen: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(steps):
        result = engine.train_step((batch(step, engine.data_rank),))
        seen["losses"].append(None if result.loss is None else result.loss.item())
        seen["norms"].append(result.grad_norm)
    seen["random"] = torch.rand(3).tolist()
    seen["weights"] = engine.state_dict()
    seen["recomputed"] = engine.recomputed
    seen["forwards"] = sum(getattr(block, "forwards", 0) for block in model.blocks)
    seen["runs"] = sum(len(getattr(block, "runs", ())) for block in model.blocks)
    seen["traffic"] = [(row.purpose, row.measured_elements) for row in engine.traffic()]
    return seen


def same(found: dict[str, Any], expected: dict[str, Any], *names: str) -> bool:
    """Whether two runs agree in everything that recomputation must not change."""
    keys = ("losses", "norms", "random", *names)
    assert found["weights"].keys() == expected["weights"].keys()
    equal = all(torch.equal(value, expected["weights"][name]) for name, value in found["weights"].items())
    return equal and repr([found[key] for key in keys]) == repr([expected[key] for key in keys])


PLANS: list[dict[str, Any]] = [{"zero": 0}, {"zero": 1}, {"zero": 2, "microbatches": 2}, {"zero": 3},
                               {"zero": 3, "transport": "network"}]  # fmt: skip


@pytest.mark.parametrize("rng", ["fast", "exact"])
@pytest.mark.parametrize("plan", by_default(PLANS, {"zero": 0}, PLANS[2], PLANS[4]), ids=str)
def test_dropout_statistics_and_gathers_are_those_of_kept_blocks(pool: Pool, plan: dict[str, Any], rng: str) -> None:
    expected = pool.run(train, 2, {**plan, "rng": rng})
    for policy in POLICIES:
        answers = pool.run(train, 2, {**plan, "rng": rng, "recompute": policy})
        for found, kept in zip(answers, expected, strict=True):
            assert same(found, kept, "traffic"), policy
            microbatches = 3 * plan.get("microbatches", 1)
            again = microbatches * (2 if policy == "sqrt" else 5)  # of segments of 2 and 3 the last is kept
            assert (kept["recomputed"], found["recomputed"]) == (0, again)
            assert (kept["runs"], found["runs"]) == (5 * microbatches, 5 * microbatches + again)
            assert kept["forwards"] == found["forwards"] == 5 * microbatches


def train_zoo(mesh: zs.Mesh, name: str, plans: list[dict[str, Any]]) -> list[Any]:
    """Losses and weights of a model of the zoo under each plan."""
    seen = []
    for plan in plans:
        torch._dynamo.reset()  # or it counts the blocks of all runs together
        seen.append(train_in_zoo(mesh, ZOO[name], **plan))
    return seen


SHOWN = ("records", "recurrent", "fickle", "thrifty-reentrant", "adapted", "compiled-wrapped", "convolutions")


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("name", by_default(ZOO, *SHOWN))
def test_models_as_people_write_them(pool: Pool, name: str, zero: int) -> None:
    plan: dict[str, Any] = {"zero": zero, "transport": "network"} | ({"units": ()} if name == "fickle" else {})
    for kept, *others in pool.run(train_zoo, 2, name, [{**plan, "recompute": each} for each in ("off", *POLICIES)]):
        for losses, weights in others:
            assert losses == kept[0]
            assert all(torch.equal(value, kept[1][key]) for key, value in weights.items())


SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"pipeline_parallel.schedule": "gpipe"},
    "interleaved": {"pipeline_parallel.schedule": "interleaved", "pipeline_parallel.virtual_stages": 2},
    "zb-h1": {"pipeline_parallel.schedule": "zb-h1"},
    "pipedream": {"pipeline_parallel.schedule": "pipedream"},
    "2bw": {"pipeline_parallel.schedule": "2bw"},
}


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("schedule", by_default(SCHEDULES, "interleaved", "zb-h1"))
def test_schedules_of_stages(pool: Pool, schedule: str, zero: int) -> None:
    if zero == 3 and schedule in ("pipedream", "2bw"):
        pytest.skip("refused: older versions of the weights are kept whole")
    ranks = 2 if zero == 1 else 4
    plan = {"zero": zero, "pipeline_parallel": 2, "microbatches": 4, **SCHEDULES[schedule]}
    kept = pool.run(pipelines.train, ranks, "TiedFive", {**plan, "recompute": "off"}, 3, 16)
    for policy in POLICIES:
        answers = pool.run(pipelines.train, ranks, "TiedFive", {**plan, "recompute": policy}, 3, 16)
        for found, expected in zip(answers, kept, strict=True):
            assert found[0] == expected[0], policy
            assert all(torch.equal(value, expected[1][name]) for name, value in found[1].items()), policy


class Frozen(Attention):
    """Its first half does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv.requires_grad_(False)
        self.norm.requires_grad_(False)


class Several(nn.Module):
    """Takes and gives records of tensors; some of them pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, state: Any) -> Any:
        if isinstance(state, Tensor):
            state = {"x": state, "sum": (state * 0.5, state.detach())}
        x, (total, first) = state["x"], state["sum"]
        x = torch.tanh(self.first(x)) + self.second(first)
        return {"x": x, "sum": (total + x, first)}


class Recorded(Stack):
    """Blocks that hand each other records; the frame adds between them, and writes into what they return."""

    def __init__(self, blocks: int = 5, kind: Any = Several) -> None:
        super().__init__(blocks, kind)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = self.enter(x)
        for number, block in enumerate(self.blocks):
            state = block(state)
            if number == 1:
                state = {**state, "x": state["x"] + 1}
            if number == 2:
                state["x"] += 1
        return self.leave(state["sum"][0]).square().mean()


class Square(torch.autograd.Function):
    """Saves its input, its output, and a tensor of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x * x
        ctx.save_for_backward(x, result, x.sign())
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x, result, sign = ctx.saved_tensors
        return 2 * gradients[0] * result.sqrt() * sign + 0 * x


class Custom(nn.Module):
    """A custom function, tied views, operations in place, a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h.add_(1).relu_()
        even, odd = h[..., ::2], h[..., 1::2]
        y = torch.cat([Square.apply(even), even.t() if even.dim() == 2 else odd.sigmoid()], -1)
        return x + self.linear(y).mul_(0.1) + self.linear.weight.t()[0]


def trained(
    model: nn.Module, recompute: str | None, steps: int = 2, x: Any = batch, **plan: Any
) -> tuple[Any, zs.Engine]:
    """Gradients and losses in one process."""
    engine = zs.Engine(copy.deepcopy(model), SGD, zs.Plan(zero=0, recompute=recompute, **plan))
    seen: list[Tensor] = []
    for parameter in engine.model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: seen.append(gradient.clone()))
    torch.manual_seed(5)
    for step in range(2):
        loss = engine(x(step, 0))
        seen.append(loss.detach())
        engine.backward(loss)
        engine.step()
    seen += engine.state_dict().values()
    return seen, engine


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "model", [partial(Stack, 5, Frozen), Recorded, partial(Stack, 4, Custom)], ids=["frozen", "records", "custom"]
)
def test_gradients_of_blocks_of_every_kind(model: Any, policy: str) -> None:
    torch.manual_seed(0)
    made = model()
    (kept, _), (found, engine) = trained(made, "off"), trained(made, policy)
    assert len(kept) == len(found) and all(map(torch.equal, found, kept))
    assert engine.recomputed == 2 * (2 if policy == "sqrt" else len(made.blocks))


class Overwriting(nn.Module):
    """Writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5).add_(self.linear(x.detach().clone()))


class Differentiating(nn.Module):
    """Its output is a gradient that it computes in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        energy = torch.tanh(self.linear(x)).square().sum()
        return x - torch.autograd.grad(energy, x, create_graph=True)[0]


class Inside(nn.Module):
    """Recomputes its own middle."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.forwards = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), 0

    def middle(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return F.dropout(torch.tanh(self.up(x)), 0.2)

    def forward(self, x: Tensor) -> Tensor:
        middle: Any = checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return x + self.down(middle)


class InsideReentrant(Inside):
    reentrant = True


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [Overwriting, Differentiating, Inside, InsideReentrant])
def test_blocks_that_cannot_be_computed_again_or_do_it_themselves_are_left_alone(kind: Any, policy: str) -> None:
    torch.manual_seed(0)
    model = Stack(3, kind)
    (kept, before), (found, engine) = trained(model, "off"), trained(model, policy)
    assert len(kept) == len(found) and all(map(torch.equal, found, kept))
    assert engine.recomputed == 0
    counts = [[getattr(b, "forwards", 0) for b in each.model.blocks] for each in (before, engine)]
    assert counts[0] == counts[1]  # nothing is recomputed twice


class Around(Stack):
    """Recomputes pairs of its blocks, or the whole stack, by itself."""

    def __init__(self, reentrant: bool, whole: bool) -> None:
        super().__init__(4)
        self.reentrant, self.whole = reentrant, whole

    def pair(self, x: Tensor, first: int) -> Tensor:
        for block in self.blocks[first : first + (4 if self.whole else 2)]:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for first in (0,) if self.whole else (0, 2):
            x = checkpoint(partial(self.pair, first=first), x, use_reentrant=self.reentrant)
        return self.leave(x).square().mean()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_the_model_recomputes_is_not_recomputed_twice(reentrant: bool, whole: bool) -> None:
    torch.manual_seed(0)
    model = Around(reentrant, whole).eval()  # torch's way counts statistics twice
    for block in model.blocks:
        block.calls = torch.ones(())
        block.forward = partial(_without_counter, block)
    for policy in POLICIES:
        (kept, before), (found, engine) = trained(model, "off"), trained(model, policy)
        assert len(kept) == len(found) and all(map(torch.equal, found, kept))
        assert engine.recomputed == 0
        counts = [[block.forwards for block in each.model.blocks] for each in (before, engine)]
        assert counts[0] == counts[1]


def _without_counter(block: Attention, x: Tensor) -> Tensor:
    y: Tensor = Attention.forward(block, x)
    block.calls = torch.ones(())
    return y


@pytest.mark.parametrize("policy", POLICIES)
def test_backwards_of_many_forms(policy: str) -> None:
    """A retained graph, a part of a graph, gradients of gradients, a graph that is dropped, two graphs at a time."""
    torch.manual_seed(0)
    made = Stack(4, Custom)
    grads = []
    for recompute in ("off", policy):
        engine = zs.Engine(copy.deepcopy(made), SGD, zs.Plan(zero=0, recompute=recompute))
        x = batch(0, 0).requires_grad_()
        losses = [engine(x), engine(x + 1)]
        engine(x)
        gc.collect()
        (first,) = torch.autograd.grad(losses[0], x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, retain_graph=True)
        losses[1].backward(retain_graph=True)
        losses[1].backward()
        losses[0].backward()
        engine.step()
        grads.append([first.detach(), second, x.grad, *engine.state_dict().values()])
    assert all(map(torch.equal, *grads))


class Changing(nn.Module):
    """Computes another thing each time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), list[None]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(None)
        return (
            torch.tanh(self.linear(x)) if len(self.calls) % 2 else torch.sigmoid(self.linear(x)[:, :3]).repeat(1, 2, 1)
        )


class Turned(Stack):
    """Sets its blocks to training before they run, and to evaluation after."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            block.train()
            x = block(x)
            block.eval()
        return self.leave(x).square().mean()


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_are_computed_again_in_the_mode_that_they_ran_in(policy: str) -> None:
    torch.manual_seed(0)
    model = Turned(4)
    kept, found = trained(model, "off")[0], trained(model, policy)
    assert len(kept) == len(found[0]) and all(map(torch.equal, kept, found[0]))
    assert not any(block.training for block in found[1].model.blocks)


def test_a_block_that_computes_something_else_is_an_error() -> None:
    engine = zs.Engine(Stack(2, Changing), SGD, zs.Plan(recompute="blocks"))
    with pytest.raises(PlanError, match=r"computed other tensors in its recomputation.*shape.*recompute='off'"):
        engine(batch(0, 0)).backward()


def test_a_model_is_copied_and_stored_without_the_recomputation(tmp_path: Any) -> None:
    engine = zs.Engine(Stack(2, Custom), SGD, zs.Plan(zero=0, recompute="sqrt"))
    again = copy.deepcopy(engine.model)
    again(batch(0, 0)).backward()
    assert engine.recomputed == 0
    torch.save(engine.model.blocks[0], tmp_path / "block")
    block = torch.load(tmp_path / "block", weights_only=False)
    block(batch(0, 0)).sum().backward()
    assert engine.recomputed == 0


@pytest.mark.parametrize("count", range(1, 40))
def test_square_roots_cut_evenly(count: int) -> None:
    lengths = by_square_root(count)
    assert sum(lengths) == count and max(lengths) - min(lengths) <= 1
    assert abs(len(lengths) - count**0.5) <= 0.5


class Calm(nn.Module):
    """A residual block, of which hundreds may follow each other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * self.down(torch.tanh(self.up(x)))


def measured(layers: int, recompute: str) -> tuple[int, int]:
    """The highest bytes of activations in a step, and forwards of blocks that were computed again in it."""
    torch.manual_seed(0)
    engine = zs.Engine(Stack(layers, Calm), SGD, zs.Plan(zero=0, recompute=recompute, device_memory="1GiB"))
    for step in range(2):
        before = engine.recomputed
        engine.ledger.reset_peaks()
        engine.train_step((batch(step, 0),))
    return engine.ledger.account(Category.ACTIVATIONS).peak, engine.recomputed - before


def test_activations_grow_as_the_square_root_of_the_layers_with_less_than_one_forward_more() -> None:
    counts = (16, 64, 256)
    roots, again = zip(*(measured(count, "sqrt") for count in counts), strict=True)
    kept, none = zip(*(measured(count, "off") for count in counts), strict=True)
    assert again == (16 - 4, 64 - 8, 256 - 16) and none == (0, 0, 0)  # the last segment is kept
    first, second = roots[1] - roots[0], roots[2] - roots[1]
    assert second == pytest.approx(2 * first, rel=0.02)  # 8 - 4 and 16 - 8 times as much as a layer
    assert kept[2] - kept[1] == pytest.approx(4 * (kept[1] - kept[0]), rel=0.02)
    assert roots[2] < kept[2] / 6


def test_one_block_at_a_time_holds_the_inputs_and_one_block() -> None:
    (more, _), (fewer, _), (one, _), (two, _) = (
        measured(64, "blocks"), measured(32, "blocks"), measured(1, "off"), measured(2, "off")
    )  # fmt: skip
    entering = batch(0, 0).nbytes
    assert more - fewer == 32 * entering
    assert measured(1, "blocks")[0] <= one + entering and two > one + entering


def test_activations_are_counted_and_let_go() -> None:
    engine = zs.Engine(Stack(9), SGD, zs.Plan(recompute="sqrt", device_memory="1GiB"))
    for step in range(3):
        engine.train_step((batch(step, 0),))
        assert engine.ledger.account(Category.ACTIVATIONS).current == 0
    loss = engine(batch(9, 0))
    assert engine.ledger.account(Category.ACTIVATIONS).current > 0
    buffers = engine.ledger.account(Category.BUFFERS).current
    del loss
    gc.collect()
    assert engine.ledger.account(Category.ACTIVATIONS).current == 0
    assert engine.ledger.account(Category.BUFFERS).current < buffers  # copies for the recomputation


@pytest.mark.parametrize("policy", POLICIES)
def test_inputs_of_segments_go_to_the_host_with_offloaded_activations(policy: str) -> None:
    torch.manual_seed(0)
    model = Stack(4)
    x = partial(batch, rows=64)
    (kept, _), (found, engine) = trained(model, "off", x=x), trained(model, policy, x=x, offload="activations")
    assert all(map(torch.equal, found, kept))
    assert engine.recomputed == (4 if policy == "sqrt" else 8)
    moved = {row.purpose: row.measured_elements for row in engine.traffic()}
    assert moved[Purpose.ACTIVATIONS_DOWN] > 0


@pytest.mark.parametrize("operations", [("attention",), ("norms",), ("activations",), ()])
def test_operations_that_are_not_recomputed_give_the_same(operations: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    made = Stack(3)
    policy = Activations("selective", operations=operations)
    kept, _ = trained(made, "off")
    engine_plan = {"activations": policy}
    found, engine = trained(made, None, **engine_plan)
    assert all(map(torch.equal, found, kept)) and engine.recomputed == 6


class Counting(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def test_selective_recomputes_the_chosen_classes_and_no_product_with_weights() -> None:
    """Of a block's own operations; one that is computed again is counted twice as often as without recomputation."""
    torch.manual_seed(0)
    counted = {}
    for name, policy in {
        "off": Activations("off"),
        "all": Activations("selective"),
        "norms": Activations("selective", operations=("norms",)),
    }.items():
        engine = zs.Engine(Stack(3), SGD, zs.Plan(zero=0, activations=policy))
        engine.train_step((batch(0, 0),))
        with Counting() as mode:
            engine.train_step((batch(1, 0),))
        counted[name] = mode.counts
    assert counted["all"]["addmm"] == counted["norms"]["addmm"] == counted["off"]["addmm"]
    assert counted["all"]["native_layer_norm"] == 2 * counted["off"]["native_layer_norm"] > 0
    assert counted["norms"]["native_layer_norm"] == 2 * counted["off"]["native_layer_norm"]
    assert counted["all"]["gelu"] == 2 * counted["off"]["gelu"] > 0
    assert counted["norms"]["gelu"] == counted["off"]["gelu"]


def test_the_short_form_and_stored_plans_of_earlier_versions() -> None:
    assert zs.Plan(recompute="sqrt") == zs.Plan(activations="sqrt") == zs.Plan(activations=Activations("sqrt"))
    assert zs.Plan(recompute="off", activations="off").activations == "off"
    assert zs.Plan.from_dict(zs.Plan(recompute="selective").as_dict()).saving.recompute == "selective"
    for earlier, now in {"auto": "schedule", "chunk": "blocks", "off": "off"}.items():
        assert (
            zs.Plan.from_dict({"recompute": earlier, "pipeline_parallel": 2, "timeout": 300.0}).saving.recompute == now
        )
    with pytest.raises(PlanError, match=r"recompute='sqrt' and activations='blocks' contradict each other.*Leave one"):
        zs.Plan(recompute="sqrt", activations="blocks")
    plan = zs.Plan(recompute="blocks").with_settings({"recompute": "off"})
    assert plan.saving.recompute == "off"
