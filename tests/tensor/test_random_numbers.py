"""Random numbers where layers are split: those of one process if exact, a stream of each rank's own if fast."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from zeroshard.comm.collectives import Comm
from zeroshard.engine import techniques
from zeroshard.errors import PlanError
from zeroshard.parts.place import Axis
from zeroshard.parts.technique import NewAxis
from zeroshard.parts.zones import DividedActivations, Division, Zone
from zeroshard.rng.exact import random_numbers_of
from zeroshard.rng.rows import Rows
from zeroshard.tensor.split.collectives import CopyIn, CutRows, Gathered, JoinRows, Summed, SumOut, TensorRanks, Zones

ROWS, TIME, WIDTH, HEADS, FEATURES, P = 3, 9, 8, 4, 10, 0.3
DIM = 1  # of positions
WIDE = 40  # features, so that no two masks of some rows are equal by chance


class Mask(nn.Module):
    """A dropout that keeps its masks, with the zones in which it drew them."""

    def __init__(self, zones: Zones) -> None:
        super().__init__()
        self.zones = zones
        self.seen: list[tuple[str, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        zone = self.zones.now
        mask = F.dropout(torch.ones_like(x), P)
        self.seen.append((str(zone), mask.detach()))
        return x * mask


class Split:
    """How a model is split by hand: by heads and features, and in between by positions if `sequence`."""

    def __init__(self, ranks: TensorRanks | None, zones: Zones, sequence: bool) -> None:
        self.ranks, self.zones, self.sequence = ranks, zones, sequence

    def own(self, whole: int) -> Division:
        """This rank's part of heads or features; the last may be smaller."""
        if self.ranks is None:
            return Division(whole, 0, whole)
        start, stop = self.ranks.rows(whole)
        return Division(whole, start, stop - start)

    def enter(self, x: Tensor, divided: DividedActivations) -> Tensor:
        """The input of column-parallel layers."""
        if self.ranks is not None:
            gathered = (Gathered, (x, self.ranks, DIM, TIME, "in"))
            kind, arguments = gathered if self.sequence else (CopyIn, (x, self.ranks, "in"))
            x = kind.apply(*arguments)
            self.zones.enter(Zone.COLUMNS, divided)
        return x

    def leave(self, x: Tensor) -> Tensor:
        """The output of a row-parallel layer."""
        if self.ranks is not None:
            self.zones.leave()
            x = Summed.apply(x, self.ranks, DIM, "out") if self.sequence else SumOut.apply(x, self.ranks, "out")
        return x


class Attention(nn.Module):
    """Whole weights on each rank, of which it reads those of its heads."""

    def __init__(self, split: Split, eager: bool) -> None:
        super().__init__()
        self.split, self.eager = split, eager
        self.projection = nn.Parameter(torch.randn(3, HEADS, WIDTH // HEADS, WIDTH) / 3)
        self.output = nn.Parameter(torch.randn(HEADS, WIDTH // HEADS, WIDTH) / 3)
        self.dropout = Mask(split.zones)

    def forward(self, x: Tensor) -> Tensor:
        heads, size = self.split.own(HEADS), WIDTH // HEADS
        features = Division(WIDTH, heads.first * size, heads.size * size)
        x = self.split.enter(x, DividedActivations(heads=(heads,), features=(features,)))
        own = slice(heads.first, heads.first + heads.size)
        query, key, value = torch.einsum("btw,phdw->pbhtd", x, self.projection[:, own])
        if self.eager:
            mixed = self.dropout((query @ key.mT).softmax(-1)) @ value
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=P, scale=1.0)
        return self.split.leave(torch.einsum("bhtd,hdw->btw", mixed, self.output[own]))


class MLP(nn.Module):
    """As `Attention`, with features; `flattens` rows and positions, as some models do."""

    def __init__(self, split: Split, flattens: bool) -> None:
        super().__init__()
        self.split, self.flattens = split, flattens
        self.up, self.down = (
            nn.Parameter(torch.randn(FEATURES, WIDTH) / 3),
            nn.Parameter(torch.randn(FEATURES, WIDTH) / 3),
        )
        self.dropout, self.after = Mask(split.zones), Mask(split.zones)

    def forward(self, x: Tensor) -> Tensor:
        features = self.split.own(FEATURES)
        x = self.split.enter(x, DividedActivations(features=(features,)))
        own = slice(features.first, features.first + features.size)
        inner = torch.tanh(F.linear(x, self.up[own]))
        dropped = self.dropout(inner.flatten(0, 1)).view_as(inner) if self.flattens else self.dropout(inner)
        x = self.split.leave(dropped @ self.down[own])
        return self.after(x.flatten(0, 1)).view_as(x) if self.flattens else self.after(x)


class Block(nn.Module):
    """Attention and MLP, each with a dropout of its own around."""

    def __init__(self, split: Split, first: bool, recompute: str) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(split, eager=first), MLP(split, flattens=not first)
        self.dropout, self.inside = Mask(split.zones), recompute == "inside"

    def forward(self, x: Tensor) -> Tensor:
        if self.inside:
            x = x + self.dropout(checkpoint(self.attention, x, use_reentrant=False))
            return x + checkpoint(self.mlp, x, use_reentrant=True)
        x = x + self.dropout(self.attention(x))
        return x + self.mlp(x)


class Model(nn.Module):
    """Two blocks between dropouts of whole activations."""

    def __init__(self, ranks: TensorRanks | None, zones: Zones, sequence: bool, recompute: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ranks, self.zones, self.sequence = ranks, zones, sequence
        split = Split(ranks, zones, sequence)
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.before, self.after = Mask(zones), Mask(zones)
        self.blocks = nn.ModuleList([Block(split, number == 0, recompute) for number in range(2)])
        self.recomputes = recompute == "blocks"

    def forward(self, x: Tensor) -> Tensor:
        self.zones.reset()
        x = self.before(x * self.weight)
        if self.sequence and self.ranks is not None:
            self.zones.enter_sequence(TIME)
            x = CutRows.apply(x, self.ranks, DIM, "first")
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        if self.sequence and self.ranks is not None:
            self.zones.reset()
            x = JoinRows.apply(x, self.ranks, DIM, TIME, "last")
        return self.after(x).square().mean()


def masks_of(model: nn.Module) -> dict[str, list[tuple[str, Tensor]]]:
    return {name: module.seen for name, module in model.named_modules() if isinstance(module, Mask) and module.seen}


def is_recomputed(name: str, recompute: str) -> bool:
    inside = "attention." in name or "mlp." in name
    return "blocks" in name and (recompute == "blocks" or (recompute == "inside" and inside))


def run(mesh: zs.Mesh | None, exact: bool, sequence: bool, recompute: str = "") -> tuple[list[float], Any, Any]:
    """Losses of two microbatches, all masks, and the gradients of the split weights on this rank."""
    zones, comm = Zones(), Comm(mesh or zs.Mesh())
    ranks = None
    if mesh is not None:
        zones.axis = Axis("tensor", (tuple(range(mesh.ranks)),), comm)
        ranks = TensorRanks(zones.axis)
    model = Model(ranks, zones, sequence, recompute)
    torch.manual_seed(11 if mesh is None else mesh.rank)
    rows = Rows(comm, 0, 1, 2, lambda: 4)
    random_numbers_of(model, exact, 17, rows, zones)
    losses = []
    x = torch.randn(2 * ROWS, TIME, WIDTH, generator=torch.Generator().manual_seed(1))
    for part in x.split(ROWS):
        loss = model(part)
        loss.backward()
        losses.append(float(loss.detach()))
    gradients = {name: p.grad for name, p in model.named_parameters() if "blocks" in name}
    return losses, masks_of(model), gradients


@pytest.fixture(scope="module")
def alone() -> Any:
    """One process with exact numbers."""
    return run(None, True, False)


def parts(name: str, mask: Tensor, zone: str, rank: int, ranks: int) -> Tensor:
    """A rank's part of a mask of one process."""
    if zone == Zone.WHOLE:
        return mask
    dimension = DIM if zone == Zone.SEQUENCE or "attention" in name else -1
    if mask.dim() == 2 and zone == Zone.SEQUENCE:
        mask = mask.view(ROWS, TIME, WIDTH)
    size = mask.shape[dimension]
    chunk = -(-size // ranks)
    first = min(rank * chunk, size)
    return mask.narrow(dimension, first, min(chunk, size - first))


@pytest.mark.parametrize("recompute", ["", "blocks", "inside"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_exact_numbers_are_those_of_one_process(
    pool: Pool, alone: Any, ranks: int, sequence: bool, recompute: str
) -> None:
    losses, masks, gradients = alone
    answers = pool.run(run, ranks, True, sequence, recompute)
    for rank, (found, seen, _) in enumerate(answers):
        assert found == pytest.approx(losses, rel=1e-5)
        zones = set()
        for name, (first, second) in masks.items():
            again = is_recomputed(name, recompute)
            (zone, one), (_, other) = seen[name][:: 2 if again else 1]
            zones.add(zone)
            for own, (_, whole) in ((one, first), (other, second)):
                assert torch.equal(own, parts(name, whole, zone, rank, ranks).reshape(own.shape)), (name, zone)
            if again:  # the recomputed ones
                assert torch.equal(seen[name][1][1], one) and torch.equal(seen[name][3][1], other)
        assert zones == {"whole", "columns", *(["sequence"] if sequence else [])}
    for name, gradient in gradients.items():
        total = sum(answer[2][name] for answer in answers)
        torch.testing.assert_close(total, gradient, rtol=0, atol=2e-6 * float(gradient.abs().max()))


@pytest.mark.parametrize("recompute", ["", "blocks", "inside"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_fast_numbers_are_alike_where_activations_are_whole_and_each_ranks_own_elsewhere(
    pool: Pool, ranks: int, sequence: bool, recompute: str
) -> None:
    plain = pool.run(run, ranks, False, sequence, "")
    answers = pool.run(run, ranks, False, sequence, recompute)
    for rank, (losses, seen, _) in enumerate(answers):
        assert losses == answers[0][0] == plain[rank][0]
        for name, masks in plain[rank][1].items():
            assert {tuple(m.flatten().tolist()) for _, m in seen[name]} == {
                tuple(m.flatten().tolist()) for _, m in masks
            }
            for number, (zone, mask) in enumerate(masks):
                for other in range(rank):
                    theirs = plain[other][1][name][number][1]
                    alike = mask.shape == theirs.shape and torch.equal(mask, theirs)
                    assert alike is (zone == Zone.WHOLE), (name, zone, rank, other)
    for name, gradient in plain[0][2].items():
        total, wanted = (sum(answer[2][name] for answer in of) for of in (answers, plain))
        torch.testing.assert_close(total, wanted, rtol=1e-5, atol=1e-7)
        assert gradient.abs().sum() > 0


class Drawn(nn.Module):
    """Between split layers and around them, returns what it draws."""

    def __init__(self, zones: Zones, p: float = P) -> None:
        super().__init__()
        self.zones, self.dropout = zones, nn.Dropout(p)
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        whole = self.dropout(x)
        self.zones.enter(Zone.COLUMNS, DividedActivations(features=(Division(WIDE, self.zones.axis.rank * 20, 20),)))
        own = self.dropout(x[..., :20])
        self.zones.leave()
        return self.weight * torch.cat([whole, own, self.dropout(x)], dim=-1)


class Technique:
    """Says that pairs of ranks divide activations, and divides no parameter."""

    def __init__(self) -> None:
        self.zones = Zones()

    def axes(self, ranks: int) -> Mapping[str, NewAxis]:
        return {"tensor": NewAxis([[first, first + 1] for first in range(0, ranks, 2)], data=False)}

    def cut(self, model: nn.Module, axes: Mapping[str, Axis]) -> Mapping[nn.Parameter, Any]:
        self.zones.axis = axes["tensor"]
        return {}


def engine_of(mesh: zs.Mesh, rng: str, model: type[nn.Module] = Drawn) -> tuple[zs.Engine, list[Tensor]]:
    """An engine and the list of what its microbatches put out."""
    technique, found = Technique(), []
    before = techniques.TECHNIQUES[:]
    techniques.TECHNIQUES[:] = [lambda _: technique]

    def loss(output: Tensor, _: Any) -> Tensor:
        found.append(output.detach())
        return output.sum()

    try:
        torch.manual_seed(mesh.rank)
        plan = zs.Plan.from_dict({"zero": 0, "rng": rng, "microbatches": 2})
        engine = zs.Engine(model(technique.zones), lambda p: torch.optim.SGD(p, lr=0.0), plan, mesh=mesh, loss=loss)
    finally:
        techniques.TECHNIQUES[:] = before
    return engine, found


def steps(mesh: zs.Mesh, rng: str, folder: str) -> tuple[tuple[int, int], list[Tensor], list[Tensor]]:
    """What two steps draw, and two more; in the second place those of an engine that loads what the first one saved."""
    engine, found = engine_of(mesh, rng)
    x = torch.ones(4, WIDE)
    for step in range(4):
        engine.train_step(x)
        if step == 1:
            engine.save(folder, wait=True)
    again, loaded = engine_of(mesh, rng)
    torch.manual_seed(mesh.rank + 50)
    again.load(folder)
    for _ in range(2):
        again.train_step(x)
    return (engine.data_rank, engine.data_ranks), found, loaded


@pytest.mark.parametrize("rng", ["fast", "exact"])
def test_engines_draw_so_and_a_run_that_is_resumed_draws_the_same(pool: Pool, tmp_path: Path, rng: str) -> None:
    """Two data ranks of two ranks each, whose generators are seeded unlike before the engine is made."""
    answers = pool.run(steps, 4, rng, str(tmp_path / "run"))
    for rank, (place, found, loaded) in enumerate(answers):
        assert place == (rank // 2, 2) and len(found) == 8 and len(loaded) == 4
        assert all(torch.equal(one, other) for one, other in zip(found[4:], loaded, strict=True))
        assert torch.stack(found).flatten(1).unique(dim=0).shape[0] == 8
        beside = answers[rank ^ 1][1]
        for own, other in zip(found, beside, strict=True):
            whole, part, after = own.split([WIDE, 20, WIDE], dim=-1)
            others = other.split([WIDE, 20, WIDE], dim=-1)
            assert torch.equal(whole, others[0]) and torch.equal(after, others[2])
            assert not torch.equal(part, others[1])
        assert not torch.equal(found[0], answers[(rank + 2) % 4][1][0])


class Unclear(Drawn):
    """Draws what no part of one process's draw shows."""

    def forward(self, x: Tensor) -> Tensor:
        self.zones.enter(Zone.COLUMNS, DividedActivations(features=(Division(WIDE, self.zones.axis.rank * 20, 20),)))
        drawn = self.dropout(x[..., :3])
        self.zones.leave()
        return self.weight * drawn


def refused(mesh: zs.Mesh) -> str:
    engine, _ = engine_of(mesh, "exact", Unclear)
    with pytest.raises(PlanError) as error:
        engine.train_step(torch.ones(4, WIDE))
    return str(error.value)


def test_a_draw_whose_part_is_not_clear_is_refused_by_name(pool: Pool) -> None:
    for text in pool.run(refused, 2):
        assert text == (
            "rng='exact': Dropout at 'dropout' draws numbers of shape [2, 3] for 2 rows where ranks have 20 of 40 "
            "features; no dimension of that shape shows which part this rank has. Draw numbers for each element of the "
            "activation, leave the layers around it whole, or use rng='fast'."
        )


def reseeded(mesh: zs.Mesh, by_hand: bool) -> tuple[list[Tensor], str]:
    engine, found = engine_of(mesh, "fast")
    torch.manual_seed(mesh.rank)
    x = torch.ones(4, WIDE)
    if by_hand:
        found.append(engine(x).detach())
        engine.backward(engine(x).sum())
        engine.step()
    else:
        engine.train_step(x)
    torch.manual_seed(mesh.rank)
    with pytest.raises(PlanError) as error:
        engine.train_step(x)
    return found, str(error.value)


@pytest.mark.parametrize("by_hand", [False, True])
def test_ranks_that_are_seeded_unlike_draw_alike_from_the_first_forward_on_or_are_told(
    pool: Pool, by_hand: bool
) -> None:
    """The main job seeds each rank when its engine is made."""
    (one, text), (other, _) = pool.run(reseeded, 2, by_hand)
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine[:, :WIDE], theirs[:, :WIDE]) and not torch.equal(mine, theirs)
    assert "Torch's random number generators differ between ranks 0 and 1" in text


def loaded_elsewhere(mesh: zs.Mesh, folder: str, saves: bool) -> float:
    """A run without split layers is resumed with them on as many ranks, whose generators it kept one by one."""
    if saves:
        torch.manual_seed(mesh.rank)
        engine = zs.Engine(Drawn(Zones()), lambda p: torch.optim.SGD(p, lr=0.0), zs.Plan(zero=0), mesh=mesh)
        engine.save(folder, wait=True)
        return float(torch.rand(()))
    engine, _ = engine_of(mesh, "fast")
    engine.load(folder)
    return float(torch.rand(()))


def test_generators_stay_alike_when_a_run_without_split_layers_is_resumed(pool: Pool, tmp_path: Path) -> None:
    saved = pool.run(loaded_elsewhere, 4, str(tmp_path / "run"), True)
    assert len(set(saved)) == 4
    first, second, third, fourth = pool.run(loaded_elsewhere, 4, str(tmp_path / "run"), False)
    assert (first, third) == (second, fourth)
