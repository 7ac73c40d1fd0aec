"""Habits of training loops: an engine gives the losses, gradients and weights of a plain loop in one process."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from engine.zoo import OPTIMIZER, WIDTH, Block, values_of
from pool import Pool
from torch import Tensor, nn
from torch.func import jvp, vmap
from torch.nn.utils import parametrizations, parametrize

import zeroshard as zs

STEPS = 2
PLANS: dict[str, dict[str, Any]] = {
    "zero0": {"zero": 0},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2, "transport": "network"},
    "zero2-offload": {"zero": 2, "offload": "optimizer"},
    "zero3": {"zero": 3, "transport": "network"},
    "zero3-offload": {"zero": 3, "offload": "optimizer,parameters"},
}


class Chain(nn.Module):
    """[B, W] -> [B, 1], with blocks that are units of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Any:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def squares(output: Tensor, batch: Any = None) -> Tensor:
    """The mean loss of a chain's output."""
    return (output.float() - 1).square().mean()


class Loop:
    """A plain loop on batches that are given in `parts`, whose mean losses are averaged as over ranks.

    Attributes:
        notes: tensors that a habit records on the way.
        number: of the step.
    """

    number = 0

    def __init__(self, model: nn.Module, parts: int) -> None:
        self.model, self.parts, self.notes = model, parts, list[Tensor]()
        self.call: Callable[..., Any] = model
        self.optimizer = OPTIMIZER(list(model.parameters()))

    def backward(self, loss: Tensor) -> None:
        (loss / self.parts).backward()

    def gathered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train_step(self, x: Any) -> float:
        loss = squares(self.call(x))
        self.backward(loss)
        return loss.item()

    def weights(self) -> dict[str, Any]:
        return values_of(self.model)


class EngineLoop(Loop):
    """The same on one rank of an engine."""

    def __init__(self, mesh: zs.Mesh, model: nn.Module, plan: dict[str, Any]) -> None:
        x = rows(0, 0, 2)
        example = (records(x) if isinstance(model, OfRecords) else x) if "pipeline_parallel" in plan else None
        engine = zs.Engine(model, OPTIMIZER, zs.Plan.from_dict(plan), mesh=mesh, loss=squares, example=example)
        self.engine, self.model, self.parts, self.notes = engine, model, 1, []
        self.call, self.backward, self.gathered = engine, engine.backward, engine.gathered  # type: ignore[method-assign]

    def step(self) -> None:
        if self.engine.steps == self.number:  # else `train_step` has taken it
            self.engine.step()

    def train_step(self, x: Any) -> float:
        loss = self.engine.train_step(x).loss
        return float("nan") if loss is None else float(loss)

    def weights(self) -> dict[str, Any]:
        return self.engine.state_dict()


@dataclass(frozen=True)
class Habit:
    """A way to train.

    Attributes:
        part: trains on one part of the batch of a step, without the update; returns the loss.
        build: makes the model.
        before: changes the model before there is an engine.
        after: changes the loop after.
        between: changes the model before each step.
        plan: settings of the plan besides the stage.
        around: a context around all steps.
        instead: a context around the steps of the plain loop, in the place of settings of the plan.
        rtol: of losses and weights.
    """

    part: Callable[[Loop, Tensor], float]
    build: Callable[[], nn.Module] = Chain
    before: Callable[[nn.Module], Any] = lambda model: None
    after: Callable[[Loop], Any] = lambda loop: None
    between: Callable[[Loop], Any] = lambda loop: None
    plan: dict[str, Any] = field(default_factory=dict)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    instead: Callable[[], AbstractContextManager[Any]] = nullcontext
    rtol: float = 1e-5


def usual(loop: Loop, x: Tensor) -> float:
    """A forward and a backward."""
    loss = squares(loop.call(x))
    loop.backward(loss)
    return loss.item()


def stepped(loop: Loop, x: Tensor) -> float:
    """A step of an engine."""
    return loop.train_step(x)


def run(loop: Loop, habit: Habit, parts: Callable[[int], list[Tensor]]) -> tuple[list[float], Any, list[Tensor]]:
    """Mean losses of all steps, the weights after them, and the notes."""
    habit.after(loop)
    losses, plain = [], not isinstance(loop, EngineLoop)
    with habit.around(), habit.instead() if plain else nullcontext():
        for loop.number in range(STEPS):
            habit.between(loop)
            found = [habit.part(loop, x) for x in parts(loop.number)]
            loop.step()
            losses.append(sum(found) / len(found))
            if plain:
                torch.clear_autocast_cache()  # or torch would go on with casts of old weights
    return losses, loop.weights(), loop.notes


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = HABITS[name].build()
    HABITS[name].before(model)
    return model


def rows(step: int, part: int, parts: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).chunk(parts)[part]


@functools.cache
def alone(name: str, parts: int) -> tuple[list[float], Any, list[Tensor]]:
    """The plain loop."""
    loop = Loop(built(name), parts)
    return run(loop, HABITS[name], lambda step: [rows(step, part, parts) for part in range(parts)])


def on_rank(mesh: zs.Mesh, names: list[str], plan: str) -> list[tuple[list[float], Any, list[Tensor]]]:
    """The same habits on one rank."""
    found = []
    for name in names:
        loop = EngineLoop(mesh, built(name), {**PLANS[plan], **HABITS[name].plan})
        found.append(run(loop, HABITS[name], lambda step: [rows(step, mesh.rank, mesh.ranks)]))
    return found


def check(pool: Pool, names: list[str], plan: str, ranks: int) -> None:
    """Compare losses and weights with a plain loop's, and the notes of all ranks in their order."""
    answers = pool.run(on_rank, ranks, names, plan)
    for number, name in enumerate(names):
        try:
            compare(HABITS[name], alone(name, ranks), [answer[number] for answer in answers])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def compare(habit: Habit, plain: Any, mine: list[Any]) -> None:
    """Compare the answers of all ranks with those of the plain loop."""
    losses, weights, notes = plain
    close = partial(torch.testing.assert_close, rtol=habit.rtol, atol=habit.rtol)
    close(torch.tensor([found[0] for found in mine]).mean(0), torch.tensor(losses))
    for _, found, _ in mine:
        close({name: value.float() for name, value in found.items()}, weights)
    each = len(notes) // (STEPS * len(mine))
    steps = [[found[2][n * each : (n + 1) * each] for found in mine] for n in range(STEPS)]
    close([note for step in steps for rank in step for note in rank], notes)


# Autocasting


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def in_autocast(loop: Loop, x: Tensor) -> float:
    with autocast():
        return loop.train_step(x)


def forward_in_autocast(loop: Loop, x: Tensor) -> float:
    with autocast():
        loss = squares(loop.call(x))
    loop.backward(loss)
    return loss.item()


def edited(loop: Loop) -> None:
    """Change weights of which casts are cached."""
    loop.call(rows(9, 0, 2))
    with loop.gathered(), torch.no_grad():
        loop.model.get_submodule("leave").get_parameter("weight").mul_(0.9)
    if not isinstance(loop, EngineLoop):
        torch.clear_autocast_cache()


# Records


@dataclass
class Inputs:
    """Floating-point tensors at several depths, and others."""

    x: Tensor
    mask: Tensor
    numbers: Tensor
    more: dict[str, Any]


class OfRecords(Chain):
    def forward(self, inputs: Inputs) -> Any:
        kinds = inputs.x.dtype, inputs.more["shift"][0].dtype
        assert kinds == (self.enter.weight.dtype,) * 2
        assert (inputs.mask.dtype, inputs.numbers.dtype) == (torch.bool, torch.int64)
        return super().forward(inputs.x * inputs.mask.unsqueeze(1) + inputs.more["shift"][0])


def records(x: Tensor) -> Inputs:
    return Inputs(x, x[:, 0] > 0, torch.arange(len(x)), {"shift": [x.cos()]})


def with_record(loop: Loop, x: Tensor) -> float:
    inputs = records(x)
    loss = squares(loop.call(inputs))
    loop.backward(loss)
    assert inputs.x is x and inputs.more["shift"][0].dtype == torch.float32
    return loss.item()


def record_by_record(loop: Loop, x: Tensor) -> float:
    return loop.train_step(records(x))


# Compiled in place


def compiled(model: nn.Module) -> None:
    for block in model.get_submodule("blocks").children():
        block.compile(backend="eager", fullgraph=True)


# Hooks of gradients


def hooked(loop: Loop, paths: tuple[str, ...] = ("", "enter", "blocks.0", "blocks.1.up", "leave")) -> None:
    """Note the gradients of outputs and inputs that full backward hooks are given."""
    for path in paths:
        module = loop.model.get_submodule(path)
        module.register_full_backward_hook(lambda module, inputs, outputs: note(loop, *outputs, *inputs))
        module.register_full_backward_pre_hook(lambda module, outputs: note(loop, *outputs))


def of_inputs(loop: Loop, x: Tensor) -> float:
    return usual(loop, x.requires_grad_())


def note(loop: Loop, *gradients: Tensor | None) -> None:
    loop.notes += [torch.zeros(1) if each is None else loop.parts * each.detach().clone() for each in gradients]


def rescaled(loop: Loop) -> None:
    """Full backward hooks that change gradients, and read weights of their modules."""
    inner: Any = loop.model.get_submodule("blocks.1")
    inner.register_full_backward_hook(lambda m, inputs, outputs: (inputs[0] * (1 + m.up.weight.detach().mean()),))
    loop.model.get_submodule("blocks.2").register_full_backward_pre_hook(lambda m, outputs: (2 * outputs[0],))


# Parametrizations


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.triu()


class LowRank(nn.Module):
    """A parametrization with parameters of its own."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(0.1 * torch.randn(rows, 2)), nn.Parameter(0.1 * torch.randn(2, columns))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a @ self.b


def parametrized() -> nn.Module:
    model = Chain()
    blocks: Any = model.blocks
    parametrize.register_parametrization(model.enter, "weight", Symmetric())
    parametrizations.weight_norm(blocks[0].up)
    parametrizations.orthogonal(blocks[1].up)
    parametrize.register_parametrization(blocks[2].down, "weight", LowRank(WIDTH, 17))
    return model


def cached(loop: Loop, x: Tensor) -> float:
    with parametrize.cached():
        return usual(loop, x)


def assigned(loop: Loop) -> None:
    """Set the weight behind a parametrization by its right inverse."""
    enter: Any = loop.model.get_submodule("enter")
    with loop.gathered(), torch.no_grad():
        enter.weight = 0.9 * enter.weight


# Derivatives of higher order, and of the forward


def penalised(loop: Loop, x: Tensor) -> float:
    """A penalty on the gradient of each row."""
    x.requires_grad_()
    output = loop.call(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    loss = squares(output) + slope.square().sum(1).mean()
    loop.backward(loss)
    return loss.item()


def adversarial(loop: Loop, x: Tensor) -> float:
    """A critic's step (Gulrajani et al., 1704.00028): three forwards, each with a backward of its own."""
    real, made = loop.call(x).mean(), -loop.call(x.flip(1)).mean()
    loop.backward(made)
    loop.backward(real)
    between = (0.3 * x + 0.7 * x.flip(1)).requires_grad_()
    (slope,) = torch.autograd.grad(loop.call(between).sum(), between, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    loop.backward(penalty)
    return float(real.item() + made.item() + penalty.item())


class Forces(Chain):
    """The gradient of an energy is made in the forward, and trained on."""

    def forward(self, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        energy = super().forward(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy + force.square().sum(1, keepdim=True)


def along(loop: Loop, x: Tensor) -> float:
    """A derivative of the output along a direction, as in mean flows (2505.13447), trained through both results."""
    output, slope = jvp(loop.call, (x,), (x.cos(),))
    loss = squares(output) + slope.square().mean()
    loop.backward(loss)
    return loss.item()


def twice_along(loop: Loop, x: Tensor) -> float:
    output, slope = jvp(lambda x: jvp(loop.call, (x,), (x.cos(),))[1], (x,), (torch.ones_like(x),))
    loss = squares(output) + slope.square().mean()
    loop.backward(loss)
    return loss.item()


def each_row(loop: Loop, x: Tensor) -> float:
    loss = squares(vmap(lambda row: loop.call(row[None])[0])(x))
    loop.backward(loss)
    return loss.item()


class Mapped(Chain):
    """Transforms inside of the forward, around blocks that are units."""

    def forward(self, x: Tensor) -> Any:
        x = self.enter(x)
        first, *others = self.blocks
        x = vmap(first)(x)
        for block in others:
            x = x + jvp(block, (x,), (x.cos(),))[1]
        return self.leave(x)


# Several losses


class Heads(Chain):
    """A trunk and several heads over one output layer (multi-token prediction: Gloeckle et al., 2404.19737)."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([Block() for _ in range(3)])

    def trunk(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Any:
        hidden = self.trunk(x)
        return {f"loss{n}": (self.leave(head(hidden)) - n).square().mean() for n, head in enumerate(self.heads)}


class Frugal(Heads):
    """The backward of each head runs in the forward, so the logits of one head are there at a time."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.trunk(x)
        cut, total = hidden.detach().requires_grad_(), 0.0
        for n, head in enumerate(self.heads):
            loss = (self.leave(head(cut)) - n).square().mean() / self.parts
            loss.backward()
            total += self.parts * loss.item()
        return hidden, cut.grad, total

    parts = 1


class Supervised(Chain):
    """An auxiliary head at each block (deeply supervised nets: Lee et al., 1409.5185)."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.ModuleList([nn.Linear(WIDTH, 1) for _ in range(3)])

    def forward(self, x: Tensor) -> Any:
        x, outputs = self.enter(x), []
        for block, head in zip(self.blocks, self.aside, strict=True):
            x = block(x)
            outputs.append(head(x))
        return [*outputs, self.leave(x)]


def summed(loop: Loop, x: Tensor) -> float:
    loss = torch.stack(list(loop.call(x).values())).sum()
    loop.backward(loss)
    return loss.item()


def one_by_one(loop: Loop, x: Tensor) -> float:
    """A backward for each loss of one graph."""
    output = loop.call(x)
    losses = list(output.values()) if isinstance(output, dict) else [squares(each) for each in output]
    for n, loss in enumerate(losses):
        (loss / loop.parts).backward(retain_graph=n < len(losses) - 1)
    return float(sum(loss.item() for loss in losses))


def frugal(loop: Loop, x: Tensor) -> float:
    loop.model.parts = loop.parts  # type: ignore[assignment]
    hidden, gradient, total = loop.call(x)
    hidden.backward(gradient)
    return float(total)


def some(loop: Loop, x: Tensor) -> float:
    """The loss of the first auxiliary head alone, so later blocks have no gradient."""
    loss = squares(loop.call(x)[0])
    loop.backward(loss)
    return loss.item()


HABITS: dict[str, Habit] = {
    "autocast around train_step": Habit(in_autocast),
    "autocast around the forward": Habit(forward_in_autocast),
    "autocast around all steps": Habit(usual, around=autocast),
    "autocast around an edit": Habit(usual, between=edited, around=autocast),
    "autocast with recomputation": Habit(stepped, around=autocast, plan={"recompute": "blocks"}),
    "dataclass": Habit(with_record, OfRecords),
    "dataclass in 16 bits": Habit(with_record, OfRecords, plan={"precision": "bf16"}, instead=autocast, rtol=3e-2),
    "full backward hooks": Habit(of_inputs, after=hooked),
    "hooks that change": Habit(usual, after=rescaled),
    "parametrizations": Habit(usual, parametrized),
    "cached parametrizations": Habit(cached, parametrized),
    "assigned parametrizations": Habit(usual, parametrized, between=assigned),
    "gradient penalty": Habit(penalised),
    "gradient penalty with recomputation": Habit(penalised, plan={"recompute": "blocks"}),
    "gradient penalty in one unit": Habit(penalised, plan={"units": ()}),
    "critic": Habit(adversarial),
    "forces": Habit(usual, Forces),
    "jvp": Habit(along),
    "jvp of jvp": Habit(twice_along),
    "jvp with recomputation": Habit(along, plan={"recompute": "sqrt"}),
    "vmap": Habit(each_row),
    "transforms inside": Habit(usual, Mapped),
    "heads": Habit(summed, Heads),
    "heads one by one": Habit(one_by_one, Heads),
    "frugal heads": Habit(frugal, Frugal),
    "deep supervision": Habit(one_by_one, Supervised),
    "one of several losses": Habit(some, Supervised),
}
STAGED = {
    "parametrizations": Habit(stepped, parametrized),
    "hooks that change": Habit(stepped, after=rescaled),
    "compiled before": Habit(stepped, before=compiled, plan={"recompute": "blocks"}),
    "compiled after": Habit(stepped, after=lambda loop: compiled(loop.model)),
    "dataclass": Habit(record_by_record, OfRecords),
    "dataclass in 16 bits": Habit(record_by_record, OfRecords, plan={"precision": "bf16"}, instead=autocast, rtol=3e-2),
    "autocast around all steps": Habit(stepped, around=autocast, rtol=3e-2),
}
HABITS |= {f"{name} in stages": habit for name, habit in STAGED.items()}
SINGLE = [name for name in HABITS if not name.endswith(" in stages")]
EACH = [SINGLE[n::2] for n in range(2)]
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")  # by torch, for jvp


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("names", EACH, ids=["even", "odd"])
def test_habits_train_as_in_one_process(pool: Pool, names: list[str], plan: str) -> None:
    check(pool, names, plan, 2)


@pytest.mark.whole
@pytest.mark.parametrize("plan", PLANS)
def test_habits_on_one_rank(pool: Pool, plan: str) -> None:
    check(pool, SINGLE, plan, 1)


def in_stages(mesh: zs.Mesh, names: list[str], settings: dict[str, Any]) -> list[tuple[list[float], Any]]:
    """Losses and weights of habits in two stages, which share the batch."""
    found = []
    for name in names:
        torch._dynamo.reset()
        loop = EngineLoop(mesh, built(name), {**settings, **HABITS[name].plan})
        losses, weights, _ = run(loop, HABITS[name], lambda step: [rows(step, 0, 1)])
        found.append((losses, weights))
    return found


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # by torch, for graphs
@pytest.mark.parametrize("zero", [0, 3])
def test_habits_in_two_stages(pool: Pool, zero: int) -> None:
    settings = {"pipeline_parallel": 2, "microbatches": 2, "zero": zero, "transport": "network"}
    names = [name for name in HABITS if name not in SINGLE]
    answers = pool.run(in_stages, 2, names, settings)
    for number, name in enumerate(names):
        losses, weights, _ = alone(name, 1)
        compare(HABITS[name], (losses, weights, []), [(*answer[number], []) for answer in answers])
