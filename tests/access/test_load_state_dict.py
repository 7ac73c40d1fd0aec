"""A state dict of one engine goes into another, under any plan, and behaves there as users of `nn.Module` expect."""

from typing import Any

import pytest
import torch
from checkpoint.test_load_weights import masters
from engine.models import OPTIMIZERS, batch, build
from pool import Pool, WorkerError
from torch import nn

import zeroshard as zs
from zeroshard.errors import CheckpointError, PlanError

PLANS: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"zero": stage} for stage in range(4)},
    "bf16": {"zero": 3, "precision": "bf16"},
    "offload": {"zero": 2, "offload": "optimizer"},
    "below": {"zero": 3, "offload": "optimizer,parameters"},
    "pipeline": {"pipeline_parallel": 2, "microbatches": 2, "pipeline_parallel.balance": "parameters"},
}
PAIRS = [("zero0", "zero3"), ("zero3", "zero1"), ("zero1", "pipeline"), ("pipeline", "zero2"), ("bf16", "bf16"),
         ("zero3", "offload"), ("zero2", "below"), ("below", "zero0")]  # fmt: skip


def make(mesh: zs.Mesh, plan: dict[str, Any], seed: int) -> zs.Engine:
    example = (batch(0, 0, 1, 2), 0) if "pipeline_parallel" in plan else None
    return zs.Engine(build("TiedFive", seed), OPTIMIZERS["adamw"], zs.Plan.from_dict(plan), mesh=mesh, example=example)


def norm(engine: zs.Engine, step: int) -> float:
    """The norm of the gradient in a step."""
    return engine.train_step((batch(step, engine.data_rank, engine.data_ranks), step)).grad_norm


def through(mesh: zs.Mesh, before: dict[str, Any], after: dict[str, Any], alone: bool) -> Any:
    """The weights of a trained engine, those of one into which they were loaded, and both engines' next norms."""
    first, second = make(mesh, before, 0), make(mesh, after, 1)
    norm(first, 0), norm(first, 1), norm(second, 0)
    state = first.state_dict()
    keys = second.load_state_dict(state if mesh.rank == 0 or not alone else None)
    return keys, state, second.state_dict(), (norm(first, 2), norm(second, 2)), second.steps


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_state_dict_goes_into_an_engine_of_another_plan(pool: Pool, before: str, after: str, alone: bool) -> None:
    for keys, state, loaded, norms, steps in pool.run(through, 2, PLANS[before], PLANS[after], alone):
        assert keys == ([], []) and state.keys() == loaded.keys()
        assert all(torch.equal(loaded[name], values) for name, values in state.items())
        assert norms[1] == pytest.approx(norms[0], rel=1e-5)
        assert steps == 2  # of its own: loading weights does not change the count


def load_rounded(mesh: zs.Mesh, zero: int) -> Any:
    """What an engine that computes in 16 bits has of a state dict in 32."""
    engine = make(mesh, {"zero": zero, "precision": "bf16"}, 1)
    engine.load_state_dict(build("TiedFive", 0).state_dict())
    return engine.state_dict(), masters(engine)


@pytest.mark.parametrize("zero", [1, 3])
def test_master_weights_are_not_rounded(pool: Pool, zero: int) -> None:
    given = build("TiedFive", 0).state_dict()
    answers = pool.run(load_rounded, 2, zero)
    for weights, _ in answers:
        assert all(torch.equal(weights[name], values.bfloat16()) for name, values in given.items())
    for name in answers[0][1].keys() | answers[1][1].keys():
        whole = torch.cat([held[name].reshape(-1) for _, held in answers if name in held])
        assert torch.equal(whole, given[name].reshape(-1)), name


class Counting(nn.Module):
    """A parameter, a buffer in a module with two names, a module with more than tensors, and a frozen scalar."""

    class Extra(nn.Module):
        """Keeps a word."""

        word = "before"

        def get_extra_state(self) -> str:
            return self.word

        def set_extra_state(self, state: str) -> None:
            self.word = state

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(4)
        self.again = self.inner
        self.extra = self.Extra()
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.again(x) * self.scale).square().mean()


def counting(mesh: zs.Mesh, zero: int = 2) -> zs.Engine:
    plan = zs.Plan(zero=zero)
    return zs.Engine(Counting(), lambda ps: torch.optim.SGD([p for p in ps if p.requires_grad], 0.1), plan, mesh=mesh)


def load_buffers(mesh: zs.Mesh, alone: bool) -> Any:
    """Each rank's buffers, which it gives itself, or rank 0 to all."""
    given = Counting()
    given.extra.word = "after"
    given.inner(torch.randn(8, 4, generator=torch.Generator().manual_seed(mesh.rank)))
    with torch.no_grad():
        given.scale.fill_(3)
    engine = counting(mesh)
    engine.load_state_dict(given.state_dict() if mesh.rank == 0 or not alone else None)
    model: Any = engine.model
    return given.state_dict(), engine.state_dict(), model.extra.word


@pytest.mark.parametrize("alone", [False, True])
def test_buffers_and_extra_state(pool: Pool, alone: bool) -> None:
    answers = pool.run(load_buffers, 2, alone)
    assert not torch.equal(answers[0][0]["inner.running_mean"], answers[1][0]["inner.running_mean"])
    for rank, (_, found, word) in enumerate(answers):
        given = answers[0 if alone else rank][0]
        assert word == "after" == found["extra._extra_state"] and found.keys() == given.keys()
        assert all(torch.equal(found[name], values) for name, values in given.items() if values != "after")


@pytest.mark.parametrize("zero", [0, 3])
def test_without_strict_the_rest_stays_and_names_are_returned(zero: int) -> None:
    engine, plain = counting(zs.Mesh(), zero), Counting()
    engine.backward(engine(torch.randn(8, 4)))
    engine.step()
    before = engine.state_dict()
    state = {"scale": torch.tensor(5.0), "odd": torch.zeros(1), "inner.bias": torch.ones(4)}
    keys = engine.load_state_dict(state, strict=False)
    expected = plain.load_state_dict(state, strict=False)
    assert keys.unexpected_keys == expected.unexpected_keys == ["odd"]
    missing = {name for name in expected.missing_keys if not name.startswith("again.")}
    assert set(keys.missing_keys) == missing | {"inner.num_batches_tracked"}  # torch takes this for an old BatchNorm
    after = engine.state_dict()
    for name, values in after.items():
        wanted = state.get(name.replace("again.", "inner."), before[name])
        assert values == wanted if name.startswith("extra") else torch.equal(values, wanted), name


WRONG: list[tuple[Any, str]] = [
    ("weights.safetensors", r"was given a str, and takes the mapping .*engine\.load_weights\(path\)"),
    ({}, r"lacks 'extra\._extra_state', 'inner\.bias'.* and 2 more.*strict=False"),
    ({**Counting().state_dict(), "odd": torch.zeros(1)}, "holds 'odd', which the model does not have"),
    ({**Counting().state_dict(), "inner.bias": torch.ones(3)}, r"'inner\.bias' is \(3,\) there and \(4,\) here"),
    ({**Counting().state_dict(), "scale": 2.0}, "holds a float under 'scale', and a tensor is needed"),
    ({**Counting().state_dict(), "scale": torch.tensor(2)}, r"holds 'scale' as torch\.int64"),
    ({**Counting().state_dict(), "again.bias": torch.ones(4)}, "other values under 'again.bias' than under 'inner"),
    ({**Counting().state_dict(), "scale": torch.empty((), device="meta")}, "'scale' on the meta device"),
    (None, r"was given a state dict on ranks \[\] of 1"),
]


@pytest.mark.parametrize(("state", "message"), WRONG)
def test_what_is_refused_leaves_the_weights(state: Any, message: str) -> None:
    engine = counting(zs.Mesh())
    before = engine.state_dict()
    with pytest.raises(CheckpointError, match=message):
        engine.load_state_dict(state)
    after = engine.state_dict()
    assert all(values == after[n] if n.startswith("extra") else torch.equal(values, after[n])
               for n, values in before.items())  # fmt: skip


def differing(mesh: zs.Mesh, how: str) -> None:
    """Ranks give what does not go together."""
    state = build("TiedFive", mesh.rank).state_dict()
    missing = how == "last alone" and mesh.rank == 0
    make(mesh, {"zero": 3}, 2).load_state_dict(None if missing else state)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("values", "Ranks 0 and 1 give .* different values of 'blocks.0.down.bias'"),
        ("last alone", r"on ranks \[1\] of 2"),
    ],
)
def test_ranks_that_differ_are_refused(pool: Pool, how: str, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        pool.run(differing, 2, how)


def test_inside_of_gathered_it_is_refused() -> None:
    engine = counting(zs.Mesh())
    with engine.gathered(), pytest.raises(PlanError, match=r"inside `with engine\.gathered\(\):`"):
        engine.load_state_dict(engine.model.state_dict())
