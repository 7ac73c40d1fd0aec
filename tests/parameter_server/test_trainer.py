"""Asynchronous training follows its equation, keeps its bound, and counts its staleness.

Where the order of the updates matters, it is forced: a worker takes its step when a key in the store says that it is
its turn. Which weights its gradient is taken at follows from the order alone.
"""

import argparse
import threading
import time
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine.models import MODELS, OPTIMIZERS, batch, build
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.comm.collectives import Purpose
from zeroshard.comm.mesh import mesh_of
from zeroshard.errors import CommError, NonFiniteError, PlanError
from zeroshard.memory.ledger import Category
from zeroshard.parameter_server import Staleness
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig

MORE_OPTIMIZERS = {
    **OPTIMIZERS,
    "plain": partial(torch.optim.SGD, lr=0.1),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),  # its states need whole tensors
}


def turns(mesh: zs.Mesh, name: str, script: str) -> Iterator[int]:
    """The numbers of this worker's updates in `script`, which has a digit for the worker of each update.

    Each number is yielded twice: when its gradient may be computed, and when it is the worker's turn to step.
    """
    store = mesh.store and dist.PrefixStore(f"turns/{name}", mesh.store)
    for number in (number for number, worker in enumerate(script) if int(worker) == mesh.rank):
        yield number
        if store is not None and number > 0:
            store.wait([str(number)], timedelta(seconds=20))
        yield number
        if store is not None:
            store.set(str(number + 1), "")


def train(mesh: zs.Mesh, name: str, script: str, model_name: str, optimizer: str) -> Any:
    """A run in a forced order: what each step said, the staleness of all, the final weights, what was sent."""
    model = build(model_name, seed=mesh.rank)  # other ranks start elsewhere, so rank 0's weights must win
    trainer = zs.AsynchronousTrainer(model, MORE_OPTIMIZERS[optimizer], mesh=mesh)
    steps = []
    turn = turns(mesh, name, script)
    for number in turn:
        model(batch(number, 0, 1), number).backward()
        assert next(turn) == number
        steps.append(trainer.step())
    staleness = trainer.finish()
    assert trainer.finish() is staleness
    sent = {purpose: count.elements for purpose, count in trainer.traffic.items()}
    return steps, staleness, model.state_dict(), sent


def emulated(script: str, model_name: str, optimizer: str) -> tuple[list[int], dict[str, Tensor]]:
    """The same in one process that knows nothing of servers: staleness of each update, final weights.

    The gradient is taken at the weights of the worker's last update; "plain" is w(t+1) = w(t) - lr g(w(t - staleness)).
    """
    model = build(model_name)
    trained = [p for p in model.parameters() if p.requires_grad]
    make = MORE_OPTIMIZERS[optimizer]
    torch_optimizer = None if optimizer == "plain" else make(trained)
    held = {worker: (0, deepcopy(model)) for worker in script}
    staleness = []
    for number, worker in enumerate(script):
        version, stale = held[worker]
        staleness.append(number - version)
        stale(batch(number, 0, 1), number).backward()
        for weight, at in zip(trained, (p for p in stale.parameters() if p.requires_grad), strict=True):
            weight.grad = at.grad
            if torch_optimizer is None and at.grad is not None:
                weight.data = weight.data - 0.1 * at.grad
        if torch_optimizer is not None:
            torch_optimizer.step()
        held[worker] = (number + 1, deepcopy(model))
        held[worker][1].zero_grad()
    return staleness, {key: value.detach() for key, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "model, optimizer",
    [*((model, "adamw") for model in MODELS), *(("Sometimes", name) for name in MORE_OPTIMIZERS if name != "adamw")],
)
def test_one_worker_is_a_plain_loop_to_the_bit(model: str, optimizer: str) -> None:
    steps, staleness, weights, _ = train(zs.Mesh(), "alone", "0" * 10, model, optimizer)
    plain = build(model)
    torch_optimizer = MORE_OPTIMIZERS[optimizer](p for p in plain.parameters() if p.requires_grad)
    for number in range(10):
        torch_optimizer.zero_grad()
        plain(batch(number, 0, 1), number).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
        assert steps[number].grad_norm == norm.item()
        torch_optimizer.step()
    for key, value in plain.state_dict().items():
        assert torch.equal(weights[key], value)
    assert staleness.by_worker == (Counter({0: 10}),)


CASES = [
    ("01101001" * 2, "Plain", "plain"),
    ("0001" * 4, "Sometimes", "adamw"),
    ("111101" * 2, "Tied", "sgd"),
    ("0111" * 3, "TwoDtypes", "adagrad"),
    ("0012012" * 2, "Frozen", "adafactor"),
    ("0123321022", "Plain", "plain"),
    ("11111", "Tiny", "adamw"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case))
def test_workers_follow_the_equation(pool: Pool, case: tuple[str, str, str]) -> None:
    script, model, _ = case
    ranks = max(2, int(max(script)) + 1)
    answers = pool.run(train, ranks, "-".join(case), *case)
    staleness, expected = emulated(*case)
    by_worker = tuple(
        Counter(s for s, w in zip(staleness, script, strict=True) if int(w) == rank) for rank in range(ranks)
    )
    trained = sum(p.numel() for p in build(model).parameters() if p.requires_grad)
    for rank, (steps, told, weights, sent) in enumerate(answers):
        mine = [number for number, worker in enumerate(script) if int(worker) == rank]
        assert [step.staleness for step in steps] == [staleness[number] for number in mine]
        assert [step.version for step in steps] == [number + 1 for number in mine]
        assert [step.step for step in steps] == list(range(1, len(mine) + 1))
        assert told.by_worker == by_worker
        for key, value in weights.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-6, atol=1e-6)
            assert torch.equal(value, answers[0][2][key])
        away = sum(worker != "0" for worker in script) + ranks - 1  # weights also go with each farewell
        assert sent.get(Purpose.LEND_WEIGHTS, 0) == (away * trained if rank == 0 else 0)
        assert sent.get(Purpose.REPAY_GRADIENTS, 0) == (len(mine) * trained if rank > 0 else 0)


def test_a_histogram_has_a_row_for_each_doubling() -> None:
    staleness = Staleness((Counter({0: 5, 1: 1, 4: 1}), Counter({2: 3, 3: 1, 7: 1, 8: 1})))
    assert staleness.histogram == {0: 5, 1: 1, 2: 3, 3: 1, 4: 1, 7: 1, 8: 1}
    assert staleness.mean == 29 / 13
    assert str(staleness).splitlines() == [
        "staleness  worker 0    worker 1",
        "0          5           0",
        "1          1           0",
        "2 to 3     0           4",
        "4 to 7     1           1",
        "8 to 15    0           1",
        "mean 2.23 over 13 updates",
    ]
    assert Staleness((Counter(),)).mean == 0


def ahead(mesh: zs.Mesh, bound: int | None, steps: int) -> Any:
    """Worker 0 takes a step only when worker 1 has gone as far as it can; both as `AsynchronousStep`s."""
    model = build("Plain")
    trainer = zs.AsynchronousTrainer(model, MORE_OPTIMIZERS["plain"], staleness=bound, mesh=mesh)
    results = []
    for number in range(steps):
        far = steps if bound is None else min(steps, number + bound + 1)
        if trainer.server is not None:
            while trainer.server.clocks[1] < far:
                time.sleep(0.001)
        model(batch(number, mesh.rank, 2)).backward()
        assert trainer.server is None or trainer.server.clocks[1] == far
        results.append(trainer.step())
    return results, trainer.finish().by_worker


@pytest.mark.parametrize("bound", [0, 1, 3, None])
def test_a_fast_worker_is_ahead_by_the_bound_and_no_more(pool: Pool, bound: int | None) -> None:
    steps = 8
    (slow, told), (fast, _) = pool.run(ahead, 2, bound, steps)
    if bound is None:
        assert [step.lead for step in fast] == list(range(1, steps + 1)), "it never waits"
        assert [step.staleness for step in slow] == [steps] + [0] * (steps - 1)
    else:
        assert [step.lead for step in fast[:bound]] == list(range(1, bound + 1))
        assert max(step.lead for step in fast) == bound
        assert slow[0].staleness == bound + 1
        assert max(step.staleness for step in (*slow, *fast)) <= 2 * bound + 1
    assert told == tuple(Counter(step.staleness for step in steps) for steps in (slow, fast))


def ragged(mesh: zs.Mesh, bound: int | None, steps: tuple[int, ...]) -> Any:
    model = build("Plain", seed=mesh.rank)
    trainer = zs.AsynchronousTrainer(model, MORE_OPTIMIZERS["adamw"], staleness=bound, mesh=mesh)
    for number in range(steps[mesh.rank]):
        model(batch(number, mesh.rank, mesh.ranks)).backward()
        trainer.step()
    return trainer.finish().by_worker, model.state_dict()


@pytest.mark.parametrize("bound", [0, 2, None])
@pytest.mark.parametrize("steps", [(2, 9), (9, 2), (0, 4), (3, 0, 7)])
def test_workers_may_take_different_numbers_of_steps(pool: Pool, bound: int | None, steps: tuple[int, ...]) -> None:
    answers = pool.run(ragged, len(steps), bound, steps)
    for told, weights in answers:
        assert [counts.total() for counts in told] == list(steps)
        for key, value in weights.items():
            assert torch.equal(value, answers[0][1][key])


TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
ROWS, CONTEXT = 4, 32


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocabulary=256, context=CONTEXT, width=32, heads=2, layers=1))


def windows(number: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Inputs and targets [rows, CONTEXT] of the text's first nine tenths."""
    starts = torch.randint(len(TEXT) * 9 // 10 - CONTEXT, (rows,), generator=torch.Generator().manual_seed(number))
    tokens = TEXT[starts[:, None] + torch.arange(CONTEXT + 1)]
    return tokens[:, :-1], tokens[:, 1:]


def held_out(model: nn.Module) -> float:
    """Loss on the text's last tenth."""
    last = TEXT[len(TEXT) * 9 // 10 :]
    last = last[: len(last) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    with torch.no_grad():
        return float(model(last[:, :-1], last[:, 1:]))


def on_text(mesh: zs.Mesh, script: str) -> float:
    model = gpt()
    trainer = zs.AsynchronousTrainer(model, partial(torch.optim.AdamW, lr=3e-3), mesh=mesh)
    turn = turns(mesh, "text", script)
    for number in turn:
        model(*windows(number)).backward()
        next(turn)
        trainer.step()
    assert trainer.finish().histogram.keys() == {0, 1, 4}
    return held_out(model)


def test_the_loss_on_real_text_is_near_that_of_synchronous_training(pool: Pool) -> None:
    """One worker four times as fast as the other; against steps on two workers' batches, as many samples in all."""
    script = "00001" * 50
    losses = pool.run(on_text, 2, script)
    model = gpt()
    before = held_out(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for number in range(0, len(script), 2):
        optimizer.zero_grad()
        model(*map(torch.cat, zip(windows(number), windows(number + 1), strict=True))).backward()
        optimizer.step()
    synchronous = held_out(model)
    assert losses[0] == losses[1]
    assert before > 5.3
    assert synchronous < 2.6
    assert losses[0] < 1.02 * synchronous


def test_a_gradient_that_is_not_finite_is_dropped() -> None:
    model = build("Plain")
    trainer = zs.AsynchronousTrainer(model, MORE_OPTIMIZERS["sgd"], mesh=zs.Mesh())
    before = deepcopy(model.state_dict())
    (model(batch(0, 0, 1)) * float("inf")).backward()
    with pytest.raises(NonFiniteError, match=r"gradient of embed\.weight .* dropped"):
        trainer.step()
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    model(batch(0, 0, 1)).backward()
    assert trainer.step().version == 1


def test_what_cannot_be_done_is_refused() -> None:
    factory, mesh = MORE_OPTIMIZERS["sgd"], zs.Mesh()
    model = build("Plain")
    for bound in (-1, 1.5):
        with pytest.raises(PlanError, match=f"staleness is {bound}; it must be 0 or more"):
            zs.AsynchronousTrainer(model, factory, staleness=bound, mesh=mesh)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"ready SGD, .* pass a function"):
        zs.AsynchronousTrainer(model, factory(model.parameters()), mesh=mesh)
    with pytest.raises(PlanError, match="no trainable parameter"):
        zs.AsynchronousTrainer(nn.ReLU(), factory, mesh=mesh)
    with torch.device("meta"), pytest.raises(PlanError, match=r"^weight is on the meta device"):
        zs.AsynchronousTrainer(nn.Linear(2, 2), factory, mesh=mesh)
    sparse = nn.Embedding(3, 2, sparse=True)
    trainer = zs.AsynchronousTrainer(sparse, factory, mesh=mesh)
    sparse(torch.tensor([1])).sum().backward()
    with pytest.raises(PlanError, match="gradient of weight is sparse"):
        trainer.step()
    trainer = zs.AsynchronousTrainer(model, factory, mesh=mesh)
    with pytest.raises(PlanError, match="No parameter has a gradient"):
        trainer.step()
    trainer.finish()
    model(batch(0, 0, 1)).backward()
    with pytest.raises(PlanError, match="was finished"):
        trainer.step()


def apart(mesh: zs.Mesh, what: str) -> str:
    """The error of ranks that do not bring the same."""
    torch.manual_seed(0)
    model = nn.Linear(2, 3 + (mesh.rank if what == "model" else 0))
    model.bias.requires_grad_(what != "frozen" or mesh.rank == 0)
    bound = mesh.rank if what == "staleness" else None
    with pytest.raises(PlanError) as caught:
        zs.AsynchronousTrainer(model, MORE_OPTIMIZERS["sgd"], staleness=bound, mesh=mesh)
    return str(caught.value)


@pytest.mark.parametrize(
    "what, found",
    [
        ("model", ["['weight', [3, 2], 'torch.float32']", "['weight', [4, 2], 'torch.float32']"]),
        ("frozen", ["['weight', 'bias']", "['weight']"]),
        ("staleness", ["['staleness', 0, '']", "['staleness', 1, '']"]),
    ],
)
def test_ranks_that_bring_different_things_are_told(pool: Pool, what: str, found: list[str]) -> None:
    for rank, message in enumerate(pool.run(apart, 2, what)):
        assert f"Rank {rank} has" in message
        assert all(words in message for words in found)


def broken_optimizer(mesh: zs.Mesh) -> str:
    """The server's optimizer fails at worker 1's gradient."""
    model = build("Tiny")

    def refuse(*_: Any) -> None:
        if mesh.rank == 0 and threading.current_thread() is not threading.main_thread():
            raise ArithmeticError("no such root")

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = MORE_OPTIMIZERS["sgd"](parameters)
        optimizer.register_step_pre_hook(refuse)
        return optimizer

    trainer = zs.AsynchronousTrainer(model, make, staleness=0, mesh=mesh)

    def two_steps() -> None:
        for number in range(2):
            model(batch(number, 0, 1)).backward()
            trainer.step()

    with pytest.raises(CommError) as caught:
        two_steps()
    return str(caught.value)


def test_an_error_of_the_server_reaches_every_worker(pool: Pool) -> None:
    for message in pool.run(broken_optimizer, 2):
        assert message == "The parameter server has stopped: ArithmeticError: no such root"


def silent(mesh: zs.Mesh) -> str | None:
    """Worker 1 takes no step for longer than the timeout; on groups of their own, which do not survive it."""
    both = mesh_of([0, 1], torch.device("cpu"), 4.0)
    if mesh.rank > 1:
        return None
    both = replace(both, store=dist.PrefixStore("silent", both.store), failures=dist.PrefixStore("silent", both.store))
    trainer = zs.AsynchronousTrainer(build("Tiny"), MORE_OPTIMIZERS["sgd"], mesh=both)
    if mesh.rank == 1:
        return "no step"
    with pytest.raises(CommError) as caught:
        trainer.finish()
    return str(caught.value)


def test_a_worker_that_is_silent_too_long_is_named(pool: Pool) -> None:
    message = pool.run(silent, 4)[0]
    assert "worker 1 is gone before its finish()" in message
    assert "waited 4 s" in message


def counted(mesh: zs.Mesh) -> Any:
    model = build("Frozen")
    trainer = zs.AsynchronousTrainer(model, MORE_OPTIMIZERS["sgd"], mesh=mesh)
    model(batch(0, 0, 1)).backward()
    trainer.step()
    trainer.finish()
    kinds = (Category.MASTER_WEIGHTS, Category.OPTIMIZER_STATES, Category.BUFFERS)
    host = {kind: trainer.ledger.account(kind, "host").current for kind in kinds}
    return host, trainer.ledger.snapshot()["parameters"]


def test_the_ledger_holds_what_server_and_wires_take(pool: Pool) -> None:
    model = build("Frozen")
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    whole = sum(p.nbytes for p in model.parameters())
    for rank, (host, parameters) in enumerate(pool.run(counted, 3)):
        assert parameters == whole
        assert host[Category.MASTER_WEIGHTS] == (trained if rank == 0 else 0)
        assert host[Category.OPTIMIZER_STATES] == (trained if rank == 0 else 0)  # momentum
        assert host[Category.BUFFERS] == (3 * trained if rank == 0 else trained)
