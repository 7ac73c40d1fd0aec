"""Torch's streams where layers are split: shared where activations are whole, a rank's own where it has a part."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from zeroshard.comm.collectives import Comm
from zeroshard.errors import PlanError
from zeroshard.memory.ledger import Ledger
from zeroshard.parts.zones import Zone
from zeroshard.replay.replay import Replay
from zeroshard.rng import streams
from zeroshard.rng.streams import RankStreams, equalise
from zeroshard.tensor.split.collectives import Zones

CPU = torch.device("cpu")


def group(rank: int, ranks: int = 4) -> Any:
    """One of several ranks, whose generators are equal."""
    mesh = SimpleNamespace(rank=rank, ranks=ranks, device=CPU)
    return SimpleNamespace(mesh=mesh, agree=lambda content, label: [content] * ranks)


SIZE = 40  # elements of a draw


class Walk(nn.Module):
    """Passes borders of zones and draws, as told; each draw is a tensor in `drawn`.

    w, c, s: enter WHOLE, COLUMNS, SEQUENCE; l: leave the split layers; b, n: leave a block, enter the next; r: the
    blocks are over; d: draw. What stands in brackets is recomputed in the backward.
    """

    def __init__(self, zones: Zones, steps: str, reentrant: bool = False) -> None:
        super().__init__()
        self.zones, self.steps, self.reentrant = zones, steps, reentrant
        self.weight = nn.Parameter(torch.ones(SIZE))
        self.drawn: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        before, _, rest = self.steps.partition("(")
        inside, _, after = rest.partition(")")
        x = self.walk(before, x)
        if inside:
            x = checkpoint(self.walk, inside, x, use_reentrant=self.reentrant)
        return self.walk(after, x)

    def walk(self, steps: str, x: Tensor) -> Tensor:
        moves: dict[str, Callable[[], None]] = {
            "w": lambda: self.zones.enter(Zone.WHOLE),
            "c": lambda: self.zones.enter(Zone.COLUMNS),
            "s": lambda: self.zones.enter_sequence(8),
            "l": self.zones.leave,
            "b": self.zones.leave_block,
            "n": self.zones.enter_block,
            "r": self.zones.reset,
        }
        for step in steps:
            if step == "d":
                drawn = torch.rand(SIZE)
                self.drawn.append(drawn)
                x = x * drawn * self.weight
            else:
                moves[step]()
        return x


def walk_of(rank: int, steps: str, reentrant: bool = False) -> Walk:
    """A model whose zones seed the streams of one of several ranks."""
    zones = Zones()
    model = Walk(zones, steps, reentrant)
    RankStreams(model, zones, group(rank))
    return model


def drawn(rank: int, steps: str, forwards: int = 1) -> list[Tensor]:
    """What a rank draws in forwards that begin with the same state of torch's generator."""
    torch.manual_seed(3)
    model = walk_of(rank, steps)
    for _ in range(forwards):
        model(torch.ones(SIZE))
    return model.drawn


PATHS = {  # steps, and for each draw whether all ranks share its numbers
    "dcdldcddld": [True, False, True, False, False, True],
    "sdwdcdldbdndwcdldrd": [False, True, False, False, True, False, False, False, True],
}


@pytest.mark.parametrize("steps", PATHS)
def test_draws_are_shared_where_activations_are_whole_and_differ_where_they_are_divided(steps: str) -> None:
    ranks = [drawn(rank, steps, forwards=3) for rank in range(4)]
    shared = PATHS[steps] * 3
    assert all(len(found) == len(shared) for found in ranks)
    for number, alike in enumerate(shared):
        for one in range(4):
            for other in range(one):
                assert torch.equal(ranks[one][number], ranks[other][number]) is alike
    for found in ranks:  # and no numbers come twice
        assert torch.cat(found).unique().numel() > 0.999 * len(found) * SIZE
    assert all(torch.equal(one, other) for one, other in zip(drawn(2, steps, 3), ranks[2], strict=True))


REGIONS = (
    "d(cdl)dcdld",  # a block
    "dcd(d)dldcdld",  # inside of a zone
    "dcd(dldcd)dld",  # from one zone into the next
    "(dcdld)cdld",
    "sd(wcdldbdnd)wcdldrd",  # blocks under sequence parallelism
    "s(dbdndwcdl)drd",
    "sdwcd(dldbndw)cdldrd",
    "(sdwdcdldrd)d",
)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("steps", REGIONS)
def test_a_region_that_is_recomputed_meets_the_draws_of_its_forward(steps: str, reentrant: bool) -> None:
    gradients, found = [], []
    for path in (steps.replace("(", "").replace(")", ""), steps):
        torch.manual_seed(4)
        model = walk_of(1, path, reentrant)
        outputs = [model(torch.ones(SIZE, requires_grad=True)) for _ in range(2)]
        for output in outputs:
            output.sum().backward()
            torch.rand(3)  # the user's own stream goes on in between
        gradients.append(model.weight.grad)
        found.append([*model.drawn, torch.rand(3)])
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-7)
    plain, (*recomputed, last) = found
    forwards = len(plain) - 1
    assert torch.equal(last, plain[-1]) and len(recomputed) > forwards
    assert all(torch.equal(one, other) for one, other in zip(recomputed[:forwards], plain[:-1], strict=True))
    assert {tuple(each.tolist()) for each in recomputed[forwards:]} <= {tuple(each.tolist()) for each in plain}


@pytest.mark.parametrize("model_recomputed", [False, True])
def test_a_model_that_is_recomputed_as_a_whole_draws_the_same(model_recomputed: bool) -> None:
    """By torch, and as a chunk of a pipeline is."""
    torch.manual_seed(5)
    model, x = walk_of(2, "dcdldsdwcdlrd"), torch.ones(SIZE, requires_grad=True)
    if model_recomputed:
        checkpoint(model, x, use_reentrant=False).sum().backward()
    else:
        replay = Replay([model], CPU, Ledger({}))
        model(x)
        replay.end()
        torch.rand(7)
        with replay.again():
            model(x)
        replay.drop()
    first, again = model.drawn[: len(model.drawn) // 2], model.drawn[len(model.drawn) // 2 :]
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_an_order_brackets_forwards_of_parts_of_the_model() -> None:
    """In a pipeline the model's own forward does not run."""
    found = []
    for rank in range(2):
        torch.manual_seed(6)
        zones = Zones()
        model = Walk(zones, "dcdl")
        numbers = RankStreams(model, zones, group(rank, 2))
        for _ in range(2):
            with numbers.microbatch(None):
                model.walk("dcdl", torch.ones(SIZE))
                model(torch.ones(SIZE))
        found.append(model.drawn)
    for number, (one, other) in enumerate(zip(*found, strict=True)):
        assert torch.equal(one, other) is (number % 2 == 0)
    assert torch.cat(found[0]).unique().numel() > 0.999 * 8 * SIZE


def test_streams_outside_of_the_model_go_on_whatever_it_draws() -> None:
    found = []
    for rank, steps in ((0, "dcdd"), (1, "d"), (3, "sdr")):
        torch.manual_seed(7)
        walk_of(rank, steps)(torch.ones(SIZE))
        found.append(torch.rand(3))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_a_forward_that_fails_or_is_interrupted_leaves_no_stream_behind() -> None:
    torch.manual_seed(8)
    wanted = drawn(1, "dcdld", forwards=2)[3:]
    for error in (RuntimeError, KeyboardInterrupt):
        torch.manual_seed(3)
        model = walk_of(1, "dcd")
        model.zones.leave = lambda error=error: (_ for _ in ()).throw(error())  # type: ignore[method-assign]
        model.steps = "dcdl"
        with pytest.raises(error):
            model(torch.ones(SIZE))
        del model.zones.leave
        model.zones.reset()
        model.steps = "dcdld"
        model(torch.ones(SIZE))
        assert all(torch.equal(one, other) for one, other in zip(model.drawn[2:], wanted, strict=True))
        assert torch.default_generator.initial_seed() == 3


class Rates(nn.Module):
    """Counts how often a forward seeds torch's generator."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.zones, self.inner = Zones(), nn.Sequential(*modules)
        self.seeds: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.zones.enter(Zone.COLUMNS)
        self.seeds.add(torch.default_generator.initial_seed() >> streams.TAG_AT)
        self.zones.leave()
        return x


def seeds(model: nn.Module) -> bool:
    torch.manual_seed(0)
    zones: Zones = model.zones  # type: ignore[assignment]
    RankStreams(model, zones, group(0, 2))
    model(torch.ones(3))
    (found,) = model.seeds  # type: ignore[misc]
    model.seeds.clear()  # type: ignore[operator]
    return found == streams.TAG


def test_nothing_is_seeded_where_no_module_can_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seeds(Rates(nn.Linear(3, 3)))  # a module of another package may draw
    monkeypatch.setattr(streams, "KNOWN", (*streams.KNOWN, Rates.__module__.partition(".")[0]))
    assert not seeds(Rates(nn.Linear(3, 3), nn.Dropout(0.0), nn.LSTM(3, 3)))
    for module in (nn.Dropout(0.1), nn.RReLU(), nn.LSTM(3, 3, 2, dropout=0.1), nn.MultiheadAttention(4, 2, 0.1)):
        assert seeds(Rates(module)), module
        assert not seeds(Rates(module).eval())
    model = Rates(nn.Dropout(0.0))
    assert not seeds(model)
    model.inner[0].p = 0.5
    RankStreams(model, model.zones, group(0, 2))
    model.inner[0].p = 0.0
    model(torch.ones(3))
    model.inner[0].p = 0.5
    model(torch.ones(3))
    assert len(model.seeds) == 2  # rates are looked at in every forward


def test_rates_of_configurations_count() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    assert not streams._Drawing(transformers.LlamaForCausalLM(config)).now()
    config.attention_dropout = 0.1
    assert streams._Drawing(transformers.LlamaForCausalLM(config)).now()


@pytest.mark.parametrize("offset", [0, streams.OF_RANK, 5 * streams.OF_RANK])
def test_a_seed_tells_its_place(offset: int) -> None:
    places = [number << streams.BORDERS | border for number in (0, 1, 2**36 - 1, 12345) for border in (0, 1, 2**16 - 1)]
    mixed = [streams._mixed(place, offset) for place in places]
    assert [streams._separated(each, offset) for each in mixed] == places
    assert len({each & 2**32 - 1 for each in mixed}) == len(places)  # torch's generator of the CPU reads 32 bits


def made_equal(mesh: zs.Mesh) -> list[Any]:
    torch.manual_seed(mesh.rank)
    random.seed(mesh.rank)
    np.random.seed(mesh.rank)
    equalise(Comm(mesh))
    return [torch.rand(3).tolist(), random.random(), float(np.random.rand())]


def test_generators_are_made_those_of_the_first_rank(pool: Pool) -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    wanted = [torch.rand(3).tolist(), random.random(), float(np.random.rand())]
    assert pool.run(made_equal, 3) == [wanted] * 3


def compared(mesh: zs.Mesh, seeded_in: int) -> list[str]:
    """The errors at the ends of steps, of which one seeds the ranks unlike."""
    torch.manual_seed(1)
    model = Walk(Zones(), "d")
    numbers = RankStreams(model, Zones(), Comm(mesh))
    numbers.end_step()  # before the first forward nothing is compared
    model(torch.ones(SIZE))
    said = []
    for step in range(2, 10):
        if step == seeded_in:
            torch.manual_seed(mesh.rank // 2)
        try:
            numbers.end_step()
            said.append("")
        except PlanError as error:
            said.append(str(error))
    return said


def test_generators_that_differ_are_found(pool: Pool) -> None:
    for seeded_in, found_in in ((2, (2, 4, 8)), (5, (8,)), (9, ())):
        for said in pool.run(compared, 3, seeded_in):
            assert [step for step, text in enumerate(said, start=2) if text] == list(found_in)
            for text in filter(None, said):
                assert "between ranks 0 and 2 of a group of 3 ranks" in text and "seed + engine.data_rank" in text
