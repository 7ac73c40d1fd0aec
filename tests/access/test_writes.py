"""Who writes into parameters and gradients, and when: each scenario runs under an engine and as a plain loop.

A scenario is a function of (loop, model, x), where `loop` is the engine, or `Plain`, which does what torch does on the
rows of all ranks. Those of `KEPT` must end with equal weights; those of `REFUSED` in an error of ours, before anything
is lost.
"""

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

import pytest
import torch
from jobs import error_of
from pool import Pool
from selection import by_default
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import zeroshard as zs

WIDTH, ROWS, STEPS = 130, 4, 3  # wide enough that one weight of a block does not count as small
TOLERANCE = 5e-5  # of weights, which move by 1e-2 in a step
PLANS: dict[str, dict[str, Any]] = {
    "0": {"zero": 0, "transport": "network"},
    "1 network": {"zero": 1, "transport": "network"},
    "2 shared": {"zero": 2, "transport": "shared"},
    "3 network": {"zero": 3, "transport": "network"},
    "3 offload": {"zero": 3, "offload": "optimizer,parameters", "transport": "network"},
    "2 offload": {"zero": 2, "offload": "optimizer", "transport": "network"},
}
WHOLE = {"0", "1 network"}  # where whole fp32 parameters without masters are each rank's own
Scenario = Callable[[Any, nn.Module, Callable[[int], Tensor]], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(self.norm(x)))


class Net(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Reader(Block):
    """A block that uses the weight of another unit too, given after the model is made."""

    other: ClassVar[list[nn.Linear]] = []

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + 0.1 * nn.functional.linear(x, self.other[0].weight) if self.other else x


def reading() -> Net:
    net = Net(Reader)
    net.blocks[2].other = [net.blocks[0].up]  # type: ignore[union-attr]
    net.blocks[0].other = [net.blocks[1].up]  # type: ignore[union-attr]
    return net


class Normalising(Block):
    """Puts other memory under its own weight in every forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.up.weight.data = nn.functional.normalize(self.up.weight.data, dim=1)
        return super().forward(x)


def maker(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, weight_decay=0.1)


class Plain:
    """torch's own loop with the methods of an engine that the scenarios use."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, maker(model.parameters())
        self.mesh = None

    def __call__(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x)
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def clip_grad_norm(self, most: float, kind: float = 2.0) -> float:
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), most, kind))

    def clip_grad_value(self, most: float) -> None:
        nn.utils.clip_grad_value_(self.model.parameters(), most)

    @contextmanager
    def gathered(self, writer: int | None = None) -> Iterator[None]:
        yield


def step(loop: Any, *rows: Tensor) -> Tensor:
    """One step of as many microbatches, and its loss."""
    losses = []
    for x in rows:
        loss = loop(x) / len(rows)
        loop.backward(loss)
        losses.append(loss.detach())
    loop.step()
    return torch.stack(losses).sum()


def swap(loop: Any, model: nn.Module, x: Any) -> Any:
    """A moving average takes the weights' place for an evaluation, as most classes for it do: nothing is cloned."""
    with loop.gathered():
        average = {name: p.data.clone() * 0.5 for name, p in model.named_parameters()}
    step(loop, x(0))
    backup = {}
    with loop.gathered():
        for name, p in model.named_parameters():
            backup[name] = p.data
            p.data = average[name]
    with torch.no_grad():
        evaluated = loop(x(0))
    with loop.gathered():
        for name, p in model.named_parameters():
            p.data = backup[name]
    step(loop, x(1))
    return evaluated


def prune(loop: Any, model: nn.Module, x: Any) -> None:
    step(loop, x(0))
    with loop.gathered():
        for p in model.parameters():
            p.data = p.data * (p.data.abs() > 0.05)
    step(loop, x(1))
    with loop.gathered():
        nn.utils.vector_to_parameters(0.9 * nn.utils.parameters_to_vector(model.parameters()), model.parameters())
    step(loop, x(2))


def clamp(loop: Any, model: nn.Module, x: Any) -> None:
    for n in range(STEPS):
        step(loop, x(n))
        with loop.gathered():
            for p in model.parameters():
                p.data.clamp_(-0.02, 0.02)


def one_writer(loop: Any, model: nn.Module, x: Any) -> None:
    step(loop, x(0))
    with loop.gathered(writer=1), torch.no_grad():
        if loop.mesh is None or loop.mesh.rank == 1:
            model.blocks[1].up.weight.mul_(0.5)
            model.head.bias.data = torch.full((1,), 0.25)
    step(loop, x(1))


def write_between(loop: Any, model: nn.Module, x: Any) -> None:
    for n in range(STEPS):
        loop.backward(loop(x(n)))
        with loop.gathered(), torch.no_grad():
            model.blocks[0].up.weight.mul_(0.9)
        loop.step()


def discard(how: Callable[[Any, nn.Module], None], loop: Any, model: nn.Module, x: Any) -> None:
    for n in range(STEPS):
        loop.backward(loop(x(n + 10)))
        how(loop, model)
        loop.backward(loop(x(n)))
        loop.step()


def discard_all(how: Callable[[Any, nn.Module], None], loop: Any, model: nn.Module, x: Any) -> None:
    step(loop, x(0))
    loop.backward(loop(x(1)))
    how(loop, model)
    loop.backward(0.0 * model.head.bias.sum() if loop.mesh is None else 0.0 * loop(x(1)))
    if loop.mesh is None:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
    loop.step()


def drop_one(loop: Any, model: nn.Module, x: Any) -> None:
    for n in range(STEPS):
        loop.backward(loop(x(n)))
        model.blocks[1].up.weight.grad = None
        model.blocks[2].norm.bias.grad = None
        loop.step()


def zero_one(loop: Any, model: nn.Module, x: Any) -> None:
    for n in range(STEPS):
        loop.backward(loop(x(n)))
        model.blocks[1].up.weight.grad.zero_()
        model.blocks[2].norm.bias.grad.zero_()
        loop.step()


def thaw(loop: Any, model: nn.Module, x: Any) -> None:
    """Frozen after the engine is made, trained later."""
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.weight.requires_grad_(False)
    step(loop, x(0))
    model.requires_grad_(True)
    step(loop, x(1))


def clip(kind: float, loop: Any, model: nn.Module, x: Any) -> list[float]:
    norms = []
    for n in range(STEPS):
        loop.backward(loop(x(n)))
        norms.append(loop.clip_grad_norm(1e-2, kind))
        loop.step()
    return norms


def clip_value(loop: Any, model: nn.Module, x: Any) -> None:
    for n in range(STEPS):
        loop.backward(loop(x(n)))
        loop.clip_grad_value(1e-3)
        loop.step()


def frozen_before_backward(loop: Any, model: nn.Module, x: Any) -> None:
    for n in range(STEPS):
        loss = loop(x(n))
        if n == 1:
            model.blocks[0].requires_grad_(False)
        loop.backward(loss)
        loop.step()
        model.requires_grad_(True)


def evaluate(loop: Any, model: nn.Module, x: Any) -> list[Tensor]:
    with torch.no_grad():
        losses = [loop(x(5))]
    for n in range(STEPS):
        step(loop, x(n))
        with torch.no_grad():
            losses.append(loop(x(5)))
    return losses


def nothing(loop: Any, model: nn.Module) -> None:
    pass


def count_operators(loop: Any, model: nn.Module, x: Any) -> None:
    """A mode sees autograd's own adding up, as that into the gradients of small parameters."""
    with FlopCounterMode(display=False) as counter:
        step(loop, x(0), x(1))
    assert counter.get_total_flops() > 0
    step(loop, x(2))


KEPT: dict[str, tuple[Callable[[], nn.Module], Scenario]] = {
    "swap": (Net, swap),
    "prune": (Net, prune),
    "clamp": (Net, clamp),
    "one writer": (Net, one_writer),
    "write between backward and step": (Net, write_between),
    "engine.zero_grad": (Net, partial(discard, lambda loop, model: loop.zero_grad())),
    "optimizer.zero_grad": (Net, partial(discard, lambda loop, model: loop.optimizer.zero_grad())),
    "model.zero_grad": (Net, partial(discard, lambda loop, model: model.zero_grad())),
    "model.zero_grad to zeros": (Net, partial(discard_all, lambda loop, model: model.zero_grad(set_to_none=False))),
    "optimizer.zero_grad to zeros": (
        Net,
        partial(discard_all, lambda loop, model: loop.optimizer.zero_grad(set_to_none=False)),
    ),
    "no zero_grad": (Net, partial(discard, nothing)),
    "drop one gradient": (Net, drop_one),
    "zero one gradient": (Net, zero_one),
    "freeze and thaw": (Net, thaw),
    "frozen between forward and backward": (Net, frozen_before_backward),
    "clip to the largest": (Net, partial(clip, float("inf"))),
    "clip by the sum": (Net, partial(clip, 1.0)),
    "clip to the 2-norm": (Net, partial(clip, 2.0)),
    "clip by value": (Net, clip_value),
    "operators counted": (Net, count_operators),
    "a weight of another unit": (reading, evaluate),
}


def rows(number: int) -> Tensor:
    return torch.randn(2 * ROWS, WIDTH, generator=torch.Generator().manual_seed(number))


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def run_kept(mesh: zs.Mesh, plan: str) -> dict[str, Any]:
    found = {}
    for name, (make, scenario) in KEPT.items():
        model = build(make)
        engine = zs.Engine(model, maker, zs.Plan.from_dict(PLANS[plan]), mesh=mesh)
        mine = slice(mesh.rank * ROWS, (mesh.rank + 1) * ROWS)
        result = scenario(engine, model, lambda n, mine=mine: rows(n)[mine])
        found[name] = result, engine.state_dict()
    return found


def alone(name: str) -> tuple[Any, dict[str, Tensor]]:
    make, scenario = KEPT[name]
    model = build(make)
    return scenario(Plain(model), model, rows), model.state_dict()


def mean_of(results: list[Any]) -> Any:
    """Losses are means over a rank's rows; norms are the same on all ranks."""
    return torch.tensor([torch.as_tensor(r).tolist() for r in results]).mean(0) if results[0] is not None else None


@pytest.mark.parametrize("plan", by_default(["0", "2 shared", "3 network", "3 offload"], "2 shared", "3 network"))
def test_writes_and_discards_do_what_torch_does(pool: Pool, plan: str) -> None:
    found = pool.run(run_kept, 2, plan)
    for name in KEPT:
        wanted, weights = alone(name)
        result = mean_of([rank[name][0] for rank in found])
        if wanted is not None:
            torch.testing.assert_close(result, torch.as_tensor(wanted), rtol=1e-5, atol=1e-6, msg=name)
        for rank in found:
            for key, value in weights.items():
                torch.testing.assert_close(rank[name][1][key], value, rtol=0.0, atol=TOLERANCE, msg=f"{name}: {key}")


# What is refused, or taken over where a rank's whole parameters are the truth


def outside_data(engine: Any, model: nn.Module, x: Any) -> None:
    step(engine, x(0))
    model.head.weight.data = model.head.weight.data * 0.5
    step(engine, x(1))


def outside_clamp(engine: Any, model: nn.Module, x: Any) -> None:
    step(engine, x(0))
    model.blocks[0].norm.weight.data.clamp_(0.0, 0.5)
    step(engine, x(1))


def clamp_before_step(engine: Any, model: nn.Module, x: Any) -> None:
    engine.backward(engine(x(0)))
    model.blocks[0].norm.weight.data[3:5] = 2.0
    engine.step()
    step(engine, x(1))


def normalise(engine: Any, model: nn.Module, x: Any) -> None:
    for n in range(2):
        step(engine, x(n))


MAYBE: dict[str, tuple[Callable[[], nn.Module], Scenario]] = {
    "p.data = values": (Net, outside_data),
    "p.data.clamp_()": (Net, outside_clamp),
    "p.data[...] = values before the step": (Net, clamp_before_step),
    "p.data = values in the forward": (partial(Net, Normalising), normalise),
}


def run_maybe(mesh: zs.Mesh, settings: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, (make, scenario) in MAYBE.items():
        model = build(make)
        engine = zs.Engine(model, maker, zs.Plan.from_dict(settings), mesh=mesh)
        mine = slice(mesh.rank * ROWS, (mesh.rank + 1) * ROWS)
        call = partial(scenario, engine, model, lambda n, mine=mine: rows(n)[mine])
        error = error_of(call)
        found[name] = error, engine.state_dict() if error == "nothing" else None
    return found


@pytest.mark.parametrize("plan", by_default([*PLANS, "bf16"], "1 network", "2 shared", "3 offload", "bf16"))
def test_writes_outside_of_gathered_last_or_are_refused(pool: Pool, plan: str) -> None:
    settings = PLANS.get(plan, {"zero": 1, "precision": "bf16", "transport": "network"})
    for found in pool.run(run_maybe, 2, settings):
        for name, (make, scenario) in MAYBE.items():
            error, weights = found[name]
            if plan not in WHOLE:
                assert error.startswith("PlanError") and "gathered()" in error, (name, error)
                continue
            assert error == "nothing", (name, error)
            model = build(make)
            scenario(Plain(model), model, rows)
            for key, value in model.state_dict().items():
                torch.testing.assert_close(weights[key], value, rtol=0.0, atol=TOLERANCE, msg=f"{name}: {key}")


def unequal(engine: Any, model: nn.Module, x: Any) -> None:
    with engine.gathered(), torch.no_grad():
        if engine.mesh.rank == 0:
            model.head.weight.fill_(1.0)


def unfreeze(engine: Any, model: nn.Module, x: Any) -> None:
    engine.backward(engine(x(0)))
    model.requires_grad_(True)
    engine.backward(engine(x(1)))


def add_group(engine: Any, model: nn.Module, x: Any) -> None:
    engine.optimizer.add_param_group({"params": list(model.head.parameters())})


def set_gradient(engine: Any, model: nn.Module, x: Any) -> None:
    engine.backward(engine(x(0)))
    model.head.weight.grad = torch.ones(1, WIDTH)
    engine.step()


def new_head(engine: Any, model: nn.Module, x: Any) -> None:
    model.head = nn.Linear(WIDTH, 1)
    step(engine, x(0))


def other_shape(engine: Any, model: nn.Module, x: Any) -> None:
    with engine.gathered():
        model.head.weight.data = torch.ones(2, WIDTH)
    step(engine, x(0))


def to_double(engine: Any, model: nn.Module, x: Any) -> None:
    model.to("cpu")  # changes nothing
    model.to(torch.float64)


def writer_nowhere(engine: Any, model: nn.Module, x: Any) -> None:
    with engine.gathered(writer=2):
        pass


def step_inside(engine: Any, model: nn.Module, x: Any) -> None:
    with engine.gathered():
        step(engine, x(0))


def clip_spans(engine: Any, model: nn.Module, x: Any) -> None:
    engine.backward(engine(x(0)))
    nn.utils.clip_grad_norm_([p for group in engine.optimizer.param_groups for p in group["params"]], 1.0)


def maximize_later(engine: Any, model: nn.Module, x: Any) -> None:
    engine.optimizer.param_groups[0]["maximize"] = True
    step(engine, x(0))


class Gathering(Block):
    engine: ClassVar[list[Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        with self.engine[0].gathered():
            return super().forward(x)


def gather_inside(engine: Any, model: nn.Module, x: Any) -> None:
    Gathering.engine = [engine]
    try:
        engine(x(0))
    finally:
        Gathering.engine = []


def frozen_block() -> Net:
    net = Net()
    net.blocks[1].requires_grad_(False)
    return net


REFUSED: dict[str, tuple[Callable[[], nn.Module], Scenario, tuple[str, ...]]] = {
    "unequal writes": (Net, unequal, ("PlanError", "head.weight", "0 and 1", "gathered(writer=0)")),
    "unfreeze": (frozen_block, unfreeze, ("PlanError", "blocks.1.up.weight", "between two backwards of one step")),
    "add_param_group": (Net, add_group, ("OptimizerError", "requires_grad_(False)")),
    "p.grad = values": (Net, set_gradient, ("PlanError", "head.weight", "by hand", "register_hook")),
    "a new layer": (Net, new_head, ("PlanError", "head.weight", "after the engine was made")),
    "another shape": (Net, other_shape, ("PlanError", "head.weight", "engine.rebuild()")),
    "another dtype": (Net, to_double, ("PlanError", "float64", "Plan(precision=...)")),
    "a step inside": (Net, step_inside, ("PlanError", "inside `with engine.gathered():`", "after the block")),
    "clipping the optimizer's parameters": (Net, clip_spans, ("PlanError", "engine.clip_grad_norm(max_norm")),
    "no such writer": (Net, writer_nowhere, ("PlanError", "writer=2", "0 to 1")),
}


REFUSED_OFFLOADED: dict[str, tuple[Scenario, tuple[str, ...]]] = {
    "maximize set later": (maximize_later, ("OptimizerError", "maximize=True")),
}


def run_refused_offloaded() -> dict[str, str]:
    found = {}
    for name, (scenario, _) in REFUSED_OFFLOADED.items():
        model = build(Net)
        engine = zs.Engine(model, maker, zs.Plan(zero=1, offload="optimizer"), mesh=zs.Mesh())
        found[name] = error_of(partial(scenario, engine, model, rows))
    return found


def test_what_the_hosts_adam_would_ignore_is_refused() -> None:
    found = run_refused_offloaded()
    for name, (_, texts) in REFUSED_OFFLOADED.items():
        assert all(text in found[name] for text in texts), (name, found[name])


def clear_states(loop: Any, model: nn.Module) -> None:
    for n in range(4):
        step(loop, rows(n))
        if n == 1:
            loop.optimizer.state.clear()


def test_states_that_are_cleared_begin_at_zero_below_the_device_too() -> None:
    plain, model = build(Net), build(Net)
    engine = zs.Engine(model, maker, zs.Plan(zero=1, offload="optimizer"), mesh=zs.Mesh())
    clear_states(Plain(plain), plain)
    clear_states(engine, model)
    for key, value in engine.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[key], rtol=0.0, atol=TOLERANCE)


def test_parameters_over_common_memory_are_refused() -> None:
    model, memory = nn.Module(), torch.ones(8)
    model.a, model.b, model.c = (nn.Parameter(memory[s]) for s in (slice(0, 4), slice(4, 8), slice(3, 5)))
    with pytest.raises(zs.errors.ModelError, match="'a' and 'c' are parameters over the same memory"):
        zs.Engine(model, maker, mesh=zs.Mesh())


def run_refused(mesh: zs.Mesh, plan: str) -> dict[str, str]:
    found = {}
    for name, (make, scenario, _) in REFUSED.items():
        model = build(make)
        engine = zs.Engine(model, lambda ps: torch.optim.SGD(ps, lr=0.1), zs.Plan.from_dict(PLANS[plan]), mesh=mesh)
        found[name] = error_of(lambda: scenario(engine, model, rows))  # noqa: B023
    if PLANS[plan]["zero"] == 3:
        model = build(partial(Net, Gathering))
        engine = zs.Engine(model, maker, zs.Plan.from_dict(PLANS[plan]), mesh=mesh)
        found["gathered in a forward"] = error_of(partial(gather_inside, engine, model, rows))
    return found


@pytest.mark.parametrize("plan", ["0", "2 shared", "3 network"])
def test_what_would_be_lost_is_refused_on_every_rank(pool: Pool, plan: str) -> None:
    for found in pool.run(run_refused, 2, plan):
        for name, (_, _, texts) in REFUSED.items():
            assert all(text in found[name] for text in texts), (name, found[name])
        inside = found.get("gathered in a forward", "PlanError engine.gathered() forward")
        assert all(text in inside for text in ("PlanError", "engine.gathered()", "forward"))


# Modules that cast their own weights


class Router(nn.Module):
    """As the routers of Switch Transformers and NLLB-MoE: computes in fp32 whatever the model does."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.classifier = self.classifier.to(torch.float32)
        return torch.softmax(self.classifier(x.float()), -1).to(x.dtype)


class Routed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.router(x))


def run_router(mesh: zs.Mesh, settings: dict[str, Any]) -> Any:
    model = build(partial(Net, Routed))
    engine = zs.Engine(model, maker, zs.Plan.from_dict(settings), mesh=mesh)
    mine = slice(mesh.rank * ROWS, (mesh.rank + 1) * ROWS)
    with pytest.warns(UserWarning, match="router.classifier.*fp32_modules"):
        losses = [float(step(engine, rows(0)[mine], rows(1)[mine])) for _ in range(6)]
    with torch.no_grad():
        losses.append(float(engine(rows(0)[mine])))
    weights = engine.state_dict()
    return losses, weights, {p.dtype for p in model.parameters()}


@pytest.mark.parametrize("zero", by_default(range(4), 0, 3))
def test_modules_that_cast_their_weights_train_under_bf16(pool: Pool, zero: int) -> None:
    plans = [
        {"zero": zero, "precision": "bf16", "transport": t} for t in ("network", "shared") if zero or t == "network"
    ]
    plain = build(partial(Net, Routed))
    loop = Plain(plain)
    wanted = [float(step(loop, rows(0), rows(1))) for _ in range(6)]
    for settings in plans:
        found = pool.run(run_router, 2, settings)
        losses = torch.tensor([rank[0] for rank in found]).mean(0)[:6]
        torch.testing.assert_close(losses, torch.tensor(wanted), rtol=0.03, atol=0.0)
        name = "blocks.1.router.classifier.weight"
        for _, weights, dtypes in found:
            assert dtypes == {torch.bfloat16}
            assert (weights[name].float() - plain.state_dict()[name]).abs().mean() < 1e-3  # they moved by 0.017


# Copies of watched parameters


def run_copies(mesh: zs.Mesh, zero: int) -> Any:
    model = build(Net)
    engine = zs.Engine(model, maker, zs.Plan(zero=zero), mesh=mesh)
    step(engine, rows(0))
    with engine.gathered():
        file = io.BytesIO()
        torch.save(model, file)
        copied = copy.deepcopy(model)
        text = repr(model.head.bias)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), copied.parameters(), strict=True))
    saved.half()
    kinds = {type(p) for p in copied.parameters()}
    copied.head.weight.data.fill_(7.0)
    copied(rows(1)).backward()
    return kinds == {nn.Parameter}, text.startswith("Parameter containing:\ntensor("), float(step(engine, rows(1)))


@pytest.mark.parametrize("zero", [0, 3])
def test_copies_of_the_model_are_plain(pool: Pool, zero: int) -> None:
    for plain, readable, loss in pool.run(run_copies, 2, zero):
        assert plain and readable and loss < 10


SENT: dict[str, Callable[[nn.Module], Any]] = {  # torch.multiprocessing moves the memory of tensors that it sends
    "model": ForkingPickler.dumps,
    "parameter": lambda model: ForkingPickler.dumps(next(model.parameters())),
    "state dict": lambda model: ForkingPickler.dumps(model.state_dict()),
    "share_memory": nn.Module.share_memory,
}


def run_sent(mesh: zs.Mesh, way: str) -> tuple[str, Any]:
    model = build(Net)
    engine = zs.Engine(model, maker, zs.Plan(zero=2), mesh=mesh)
    step(engine, rows(0))
    kept = SENT[way](model)
    error = error_of(partial(step, engine, rows(1)))
    del kept
    return error, engine.state_dict() if error == "nothing" else None


@pytest.mark.parametrize("way", SENT)
def test_memory_that_ranks_share_does_not_move_in_silence(pool: Pool, way: str) -> None:
    [(_, plain)] = pool.run(run_sent, 1, way)
    for error, weights in pool.run(run_sent, 2, way):
        if way in ("model", "parameter"):
            assert all(torch.allclose(weights[name], plain[name], atol=TOLERANCE) for name in plain), error
        else:
            assert "no longer in the memory that all ranks share" in error and "engine.state_dict()" in error
