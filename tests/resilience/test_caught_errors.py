"""Errors that the loop of one rank catches: the ranks are at unlike batches, and each says so and steps no more."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine.plain import MAKERS, branches, close, copy_of, data, mean_gradients, take_step
from pool import TIMEOUT, Pool, impatient
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.comm.mesh import mesh_of

PLANS: dict[str, dict[str, Any]] = {
    "0-network": {"zero": 0, "transport": "network"},
    "0-shared": {"zero": 0, "transport": "shared"},
    "1-network": {"zero": 1, "transport": "network"},
    "2-network": {"zero": 2, "transport": "network"},
    "2-shared": {"zero": 2, "transport": "shared"},
    "3-network": {"zero": 3, "transport": "network"},
    "3-shared": {"zero": 3, "transport": "shared"},
}
BATCHES = 4
HIT = 1  # the batch and the rank of the error


class Refused(ValueError):
    """The error of a bad sample."""


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise Refused("sample 17 is empty")


class Trouble:
    """Raises at one place of a step while it is `on`."""

    def __init__(self, model: Any, place: str) -> None:
        self.on, self.place = False, place
        model.branches["a"].register_forward_pre_hook(lambda module, args: self.at("forward"))
        model.branches["a"].register_forward_hook(self._bad_backward)
        model.get_parameter("branches.a.up.weight").register_hook(lambda gradient: self.at("hook"))

    def at(self, place: str) -> None:
        if self.on and place == self.place:
            raise Refused("sample 17 is empty")

    def _bad_backward(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return BadBackward.apply(output) if self.on and self.place == "function" else None


def loss_of(output: Tensor, batch: Any) -> Tensor:
    return output


@impatient()
def swallow(mesh: zs.Mesh, names: list[str], place: str) -> list[tuple[str, int]]:
    """A loop that catches the errors of its own batches, under some plans; on groups of its own, since it may hang."""
    found = []
    for name in names:
        both = mesh_of([0, 1], torch.device("cpu"), TIMEOUT)
        if mesh.rank > 1:
            continue
        assert both.store is not None
        store = dist.PrefixStore(f"swallow/{name}/{place}", both.store)
        model = branches(torch.float32)
        plan = zs.Plan(**PLANS[name])
        engine = zs.Engine(model, MAKERS["adamw"], plan, mesh=replace(both, store=store, failures=store), loss=loss_of)
        if place == "in-evaluation-mode":
            engine.eval()
        trouble = Trouble(model, "forward" if place in ("train-step", "in-evaluation-mode") else place)
        told = ""
        for number in range(BATCHES):
            trouble.on = both.rank == number == HIT
            x = data(number, both.rank, 0, torch.float32)
            try:
                if place == "train-step":
                    engine.train_step({"x": x, "route": "ab"})
                    continue
                loss = engine(x, "ab")
                trouble.at("between")
                engine.backward(loss)
                trouble.at("before-step")
                engine.step()
            except Refused:
                continue
            except zs.CommError as error:
                told = str(error)
                break
        found.append((told, engine.steps))
    return found


# By the place of the error: plans, words of the message, and whether it names the error.
WAY_OUT = "let all ranks call engine.discard_batch() for the same batch"
CASES: dict[str, tuple[list[str], str, bool]] = {
    "forward": ([name for name in PLANS if name != "3-network"], WAY_OUT, True),
    "between": (["0-network", "2-shared"], WAY_OUT, False),
    "in-evaluation-mode": (["1-network"], WAY_OUT, True),
    "train-step": (["0-network", "3-shared"], WAY_OUT, True),
    "hook": (["0-network", "2-shared", "3-network"], "equally often", True),
    "function": (["2-network", "3-shared"], "equally often", True),
    "before-step": (["2-network", "0-shared", "3-network"], "equally often", False),
}


@pytest.mark.parametrize("place", CASES)
def test_an_error_that_one_rank_catches_is_an_error_of_all(pool: Pool, place: str) -> None:
    """No step is taken with gradients of unlike batches, whatever the stage and the transport."""
    names, words, named = CASES[place]
    one, other = pool.run(swallow, 4, names, place)[:2]
    for name, *both in zip(names, one, other, strict=True):
        for told, steps in both:
            assert words in told and steps == HIT, (name, steps, told)
            assert ("Refused: sample 17 is empty" in told) == named, (name, told)
            assert "ank 1 left 1 pass" in told or words != WAY_OUT, (name, told)


def test_an_error_in_a_forward_over_gathers_is_named(pool: Pool) -> None:
    """Under stage 3 over the network, passes are compared as they begin."""
    for [(told, steps)] in pool.run(swallow, 4, ["3-network"], "forward")[:2]:
        assert "begins pass" in told and "Rank 1 had gone on" in told and "Refused: sample 17 is empty" in told, told
        assert steps == HIT


# Loops that are right: what each rank trains in each step, or leaves


def evaluates(engine: zs.Engine, step: int, rank: int) -> None:
    """More on one rank: without gradients, in evaluation mode with them, and with an error."""
    for number in range(step + 2 * rank):
        x = data(step, rank, 10 + number)
        with torch.no_grad():
            engine(x, "a")
            with pytest.raises(KeyError):
                engine(x, "z")
        engine.eval()
        engine(x, "ab")
        engine.train()
    train(engine, step, rank)


def train(engine: zs.Engine, step: int, rank: int) -> None:
    engine.backward(engine(data(step, rank, 0), "ab"))
    engine.step()


def leaves_together(engine: zs.Engine, step: int, rank: int) -> None:
    """An error on one rank, which all are told of: they leave the batch."""
    x = data(step, rank, 5)
    if rank == step:
        with pytest.raises(KeyError):
            engine(x, "z")
    else:
        engine(x, "ab")
    engine.zero_grad()
    train(engine, step, rank)


def discards_together(engine: zs.Engine, step: int, rank: int) -> None:
    """An error before one rank's forward, where the other has made several and has gradients."""
    with engine.no_sync():
        engine.backward(engine(data(step, rank, 5), "ab"))
    for _ in range(0 if rank == step else 2):
        engine(data(step, rank, 6), "ab")
    engine.discard_batch()
    train(engine, step, rank)


def several_forwards(engine: zs.Engine, step: int, rank: int) -> None:
    """Two forwards and one backward, an output that trains nothing, and a local backward."""
    x = data(step, rank, 0)
    with engine.no_sync():
        engine.backward(engine(x, "ab") / 4)
    teacher = engine(x, "a").detach()
    losses = [engine(x, "ab") for _ in range(2)]
    engine.backward(losses[0] / 4 + losses[1] / 2 + 0 * teacher)
    engine.step()


def without_an_output(engine: zs.Engine, step: int, rank: int) -> None:
    """One rank's loss leaves the output out, and its gradients are zeros."""
    x = data(step, rank, 0)
    output = engine(x, "ab")
    used = [p for name, p in engine.model.named_parameters() if not name.startswith(("branches.c", "branches.d"))]
    nothing = torch.stack([parameter.sum() for parameter in used]).sum() * 0
    engine.backward(nothing if rank == step % 2 else output)
    engine.step()


def joined(engine: zs.Engine, step: int, rank: int) -> None:
    """Uneven batches, with a forward beside that trains nothing."""
    with engine.join():
        for _ in range(1 if rank == step % 2 else 0):
            x = data(step, rank, 0)
            engine(x, "a")
            engine.backward(engine(x, "ab"))
            engine.step()


LOOPS: dict[str, Callable[[zs.Engine, int, int], None]] = {
    function.__name__: function
    for function in (evaluates, leaves_together, discards_together, several_forwards, without_an_output, joined)
}
STEPS = 3


def run_loops(mesh: zs.Mesh, names: list[str], plan: dict[str, Any]) -> dict[str, Any]:
    """Weights after each loop."""
    weights = {}
    for name in names:
        engine = zs.Engine(branches(), MAKERS["momentum"], zs.Plan(**plan), mesh=mesh)
        for step in range(STEPS):
            LOOPS[name](engine, step, mesh.rank)
        weights[name] = copy_of(engine.state_dict())
        assert engine.steps == STEPS
    return weights


def weights_by_hand(name: str) -> dict[str, Tensor]:
    model = branches()
    optimizer = MAKERS["momentum"](model.parameters())
    for step in range(STEPS):
        ranks = [step % 2] if name == "joined" else [0, 1]
        losses = [[model(data(step, rank, 0), "ab")] for rank in ranks]
        if name == "without_an_output":
            losses[step % 2] = [loss * 0 for loss in losses[step % 2]]
        take_step(model, optimizer, mean_gradients(model, losses))
    return copy_of(model.state_dict())


@pytest.mark.parametrize("plan", [PLANS["0-network"], PLANS["2-shared"]], ids=["0-network", "2-shared"])
def test_loops_that_leave_no_batch_alone_train_as_before(pool: Pool, plan: dict[str, Any]) -> None:
    for found in pool.run(run_loops, 2, list(LOOPS), plan):
        for name, weights in found.items():
            for key, value in weights_by_hand(name).items():
                close(weights[key], value, f"{name}, {key}", 1e-9, 1e-12)


def meet_again(mesh: zs.Mesh) -> tuple[list[str], dict[str, Tensor]]:
    """Each rank leaves a batch of its own; they are at the same batch again after the second."""
    engine = zs.Engine(branches(), MAKERS["momentum"], zs.Plan(zero=1), mesh=mesh)
    log = []
    for number in range(5):
        try:
            engine.backward(engine(data(number, mesh.rank, 0), "z" if number == 2 - mesh.rank else "ab"))
            engine.step()
            log.append("step")
        except KeyError:
            log.append("left")
        except zs.CommError as error:
            log.append(str(error))
    return log, copy_of(engine.state_dict())


def discards_alone(mesh: zs.Mesh) -> tuple[list[str], int]:
    """One rank discards a batch by itself, and then both a batch after the error of the step."""
    engine = zs.Engine(branches(), MAKERS["momentum"], zs.Plan(zero=1), mesh=mesh)
    log = []
    for number in range(3 + mesh.rank):
        if number == mesh.rank == 1:
            engine.discard_batch()
            log.append("discarded")
            continue
        try:
            train(engine, number, mesh.rank)
            log.append("step")
        except zs.CommError as error:
            log.append(str(error).partition("which")[0])
            if mesh.rank == 0:
                engine.discard_batch()
    return log, engine.steps


def test_a_batch_that_one_rank_discards_is_missed(pool: Pool) -> None:
    (one, *steps), (other, *others) = pool.run(discards_alone, 2)
    told = "The ranks are at unlike batches: rank 1 left 1 pass without a whole backward, "
    assert one == ["step", told, "step"]
    assert other == ["step", "discarded", told, "step"]
    assert steps == others == [2]


def loads(mesh: zs.Mesh, folder: str) -> tuple[bool, int]:
    """One rank leaves a batch; after the error both load the checkpoint before it."""
    engine = zs.Engine(branches(), MAKERS["momentum"], zs.Plan(zero=2), mesh=mesh)
    train(engine, 0, mesh.rank)
    engine.save(folder, wait=True)
    if mesh.rank:
        engine(data(1, mesh.rank, 0), "ab")
    refused = False
    try:
        train(engine, 1, mesh.rank)
    except zs.CommError as error:
        refused = "unlike batches" in str(error)
    engine.load(folder)
    train(engine, 1, mesh.rank)
    return refused, engine.steps


def test_ranks_that_load_a_checkpoint_go_on(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(loads, 2, str(tmp_path / "checkpoint")) == [(True, 2)] * 2


def test_ranks_that_left_equally_many_batches_go_on(pool: Pool) -> None:
    """The gradients of refused steps are gone."""
    (one, weights), (other, _) = pool.run(meet_again, 2)
    told = one[1]
    assert "rank 1 left 1 pass without a whole backward (after KeyError: 'z'), which rank 0 did not. Step 2 was" in told
    assert one == ["step", told, "left", "step", "step"]
    assert other == ["step", "left", told, "step", "step"]
    model = branches()
    optimizer = MAKERS["momentum"](model.parameters())
    for number in (0, 3, 4):
        losses = [[model(data(number, rank, 0), "ab")] for rank in (0, 1)]
        take_step(model, optimizer, mean_gradients(model, losses))
    for key, value in model.state_dict().items():
        close(weights[key], value, key, 1e-9, 1e-12)
