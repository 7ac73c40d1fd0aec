"""Initial weights keyed by name: the same bits under every plan and world size, and in every run."""

from typing import Any

import pytest
import torch
from engine.models import batch
from inside import parts_of
from pool import Pool
from torch import Tensor, nn
from torch.nn import functional as F

import zeroshard as zs
from zeroshard.errors import ModelError

CUTS: dict[str, tuple[str, ...] | None] = {
    "rule": None,
    "one": (),
    "classes": ("Linear", "Embedding"),
    "paths": ("blocks.1", "blocks"),
}


class Scaled(nn.Module):
    """A block with parameters and buffers of its own beside those of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(9, 7)
        self.down = nn.Linear(7, 9)
        self.norm = nn.BatchNorm1d(9, affine=False)
        self.gain = nn.Parameter(torch.empty(9))
        self.register_buffer("angles", torch.empty(9))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gain)
        self.angles = torch.arange(9, dtype=torch.float32) / 9
        self.calls.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x + self.angles.to(x.dtype)))) * self.gain


class Keyed(nn.Module):
    """Tied embedding and head; dropout nowhere, so that a run has no randomness but its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 9)
        self.blocks = nn.ModuleList([Scaled() for _ in range(3)])
        self.head = nn.Linear(9, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())


class Bare(nn.Module):
    """A parameter and no way to initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"odd": nn.ParameterList([nn.Parameter(torch.zeros(3))])})


class Unset(nn.Module):
    """A buffer that `reset_parameters` forgets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("table", torch.zeros(3))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def meta(kind: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = kind()
    return model


def start(mesh: zs.Mesh, zero: int, cut: str, seed: int, precision: str = "fp32") -> dict[str, Tensor]:
    torch.manual_seed(99 + mesh.rank)  # the global generator must not matter
    plan = zs.Plan(zero=zero, units=CUTS[cut], seed=seed, precision=precision)  # type: ignore[arg-type]
    before = torch.random.get_rng_state()
    engine = zs.Engine(meta(Keyed), torch.optim.AdamW, plan, mesh=mesh)
    assert torch.equal(before, torch.random.get_rng_state()), "the global generator was moved"
    assert engine.model.head.weight is engine.model.embed.weight
    return engine.state_dict()


def starts(mesh: zs.Mesh, seed: int) -> dict[tuple[int, str], dict[str, Tensor]]:
    """Initial weights under every stage and, at stages 1 and 3, every cut into units."""
    return {
        (zero, cut): start(mesh, zero, cut, seed)
        for zero in range(4)
        for cut in (CUTS if zero in (1, 3) else ("rule",))
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], value) for name, value in b.items())


def test_initial_weights_do_not_depend_on_the_plan_or_the_world(pool: Pool) -> None:
    found = [weights for ranks in (1, 2, 4) for answer in pool.run(starts, ranks, 7) for weights in answer.values()]
    assert len(found) == (1 + 2 + 4) * (2 + 2 * len(CUTS))
    assert all(same(weights, found[0]) for weights in found)
    assert torch.equal(found[0]["head.weight"], found[0]["embed.weight"])
    assert torch.equal(found[0]["blocks.2.angles"], torch.arange(9, dtype=torch.float32) / 9)
    assert found[0]["blocks.0.calls"].dtype == torch.int64 and int(found[0]["blocks.0.calls"]) == 0
    assert torch.equal(found[0]["blocks.1.norm.running_var"], torch.ones(9))


def test_initial_weights_follow_the_seed_and_the_path(pool: Pool) -> None:
    one, other = pool.run(start, 1, 2, "rule", 7)[0], pool.run(start, 1, 2, "rule", 8)[0]
    for name, value in one.items():
        if name.endswith(("up.weight", "down.bias", "gain", "embed.weight")):
            assert not torch.equal(value, other[name]), name
    assert not torch.equal(one["blocks.0.up.weight"], one["blocks.1.up.weight"])
    assert not torch.equal(one["blocks.0.gain"], one["blocks.1.gain"])


def test_initial_weights_are_those_of_the_modules_own_initialisation(pool: Pool) -> None:
    """Each module's `reset_parameters`: bounds and spread as torch's."""
    weights = pool.run(start, 1, 0, "rule", 7)[0]
    bound = 1 / 9**0.5  # nn.Linear(9, 7): uniform in ±1/sqrt(fan in)
    assert float(weights["blocks.0.up.weight"].abs().max()) <= bound < float(weights["embed.weight"].abs().max())
    assert float(weights["blocks.0.up.weight"].abs().mean()) == pytest.approx(bound / 2, rel=0.3)


def masters(mesh: zs.Mesh) -> tuple[Tensor, Tensor]:
    """fp32 masters of a bf16 run, and the fp32 weights that they should be."""
    engine = zs.Engine(meta(Keyed), torch.optim.AdamW, zs.Plan(zero=0, precision="bf16", seed=7), mesh=mesh)
    whole = zs.Engine(meta(Keyed), torch.optim.AdamW, zs.Plan(zero=0, seed=7), mesh=mesh)
    pairs = zip(parts_of(engine).all, parts_of(whole).all, strict=True)
    both = [(a.updater.values, b.updater.values) for a, b in pairs]
    return torch.cat([a.detach() for a, _ in both]), torch.cat([b.detach() for _, b in both])


def test_masters_start_from_unrounded_weights(pool: Pool) -> None:
    for found, wanted in pool.run(masters, 2):
        assert torch.equal(found, wanted)


def refused(mesh: zs.Mesh) -> list[str]:
    messages = []
    for kind in (Bare, Unset):
        try:
            zs.Engine(meta(kind), torch.optim.AdamW, zs.Plan(zero=2), mesh=mesh)
            messages.append("nothing")
        except ModelError as error:
            messages.append(str(error))
    return messages


def test_what_cannot_be_initialised_is_refused_by_name(pool: Pool) -> None:
    for ranks in (1, 2):
        for bare, unset in pool.run(refused, ranks):
            assert "inner.odd" in bare and "reset_parameters" in bare
            assert "'.table'" in unset or "'table'" in unset


def run_twice(mesh: zs.Mesh, zero: int, precision: str) -> list[list[float]]:
    runs = []
    for _ in range(2):
        plan = zs.Plan(zero=zero, seed=3, precision=precision, clip_norm=1.0)  # type: ignore[arg-type]
        engine = zs.Engine(meta(Keyed), torch.optim.AdamW, plan, mesh=mesh)
        losses = []
        for step in range(5):
            result = engine.train_step(batch(step, mesh.rank, mesh.ranks))
            assert result.loss is not None
            losses += [result.loss.item(), result.grad_norm]
        runs.append(losses)
    return runs


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_same_seed_gives_the_same_run_to_the_bit(pool: Pool, zero: int) -> None:
    for precision in ("fp32", "bf16"):
        first, again = pool.run(run_twice, 2, zero, precision)[0]
        assert first == again and first[0] != first[2]
