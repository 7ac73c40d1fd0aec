"""Owners: whole parameters dealt out to ranks by their cost, over all units."""

import random
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.optim import Owners
from zeroshard.optim.slices.owners import LEAST, rows_of
from zeroshard.optim.trial.probe_optimizers import StateSizes
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig


class Own(zs.optim.Adafactor):
    """A user's subclass, which may step in another way."""


def parameters(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.empty(size, device="meta")) for size in sizes]


def dealt(owners: Owners, members: list[nn.Parameter], ranks: int) -> list[int]:
    """Elements of each rank, counted from the order of one flat."""
    _, owned = owners.order({str(n): p for n, p in enumerate(members)})
    assert owned is not None and owned == sorted(owned)
    ordered, _ = owners.order({str(n): p for n, p in enumerate(members)})
    found = [0] * ranks
    for rank, parameter in zip(owned, ordered.values(), strict=True):
        found[rank] += parameter.numel()
    return found


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_the_fullest_is_above_the_mean_by_less_than_the_largest(ranks: int) -> None:
    draw = random.Random(ranks)
    units = [parameters(*(draw.randint(1, 50) for _ in range(draw.randint(1, 6)))) for _ in range(9)]
    owners = Owners([(unit, "all", ranks) for unit in units], states=lambda p: 0)
    members = [p for unit in units for p in unit]
    found = dealt(owners, members, ranks)
    assert [found] == owners.shares and sum(found) == sum(p.numel() for p in members)
    assert max(found) - sum(found) / ranks < max(p.numel() for p in members)


def test_the_largest_comes_first_wherever_it_stands() -> None:
    """An embedding of half the model in the last unit has a rank of its own, and the blocks go to the other."""
    blocks, embedding = [parameters(10, 10) for _ in range(6)], parameters(120)
    owners = Owners([(unit, "all", 2) for unit in (*blocks, embedding)])
    assert owners.shares == [[120, 120]]


def test_states_count_and_the_fullest_rank_is_the_first() -> None:
    members = parameters(6, 5, 4)
    owners = Owners([(members, "all", 2)], states=lambda p: 100 if p is members[1] else 0, kept=4)
    assert dealt(owners, members, 2) == [5, 10]


def test_groups_are_dealt_out_apart_and_one_rank_has_no_owners() -> None:
    a, b, c = parameters(3, 2), parameters(2, 3), parameters(8)
    owners = Owners([(a, "dense", 2), (b, "experts", 2), (c, "alone", 1)])
    assert owners.shares == [[3, 2], [3, 2]]
    assert owners.order({"c": c[0]}) == ({"c": c[0]}, None)


def shared_out(rows: dict[int, int], *sizes: int) -> tuple[list[int], list[int]]:
    """Shares of 4 ranks, and what is cut, of parameters of so many times `LEAST` elements, some of which have rows."""
    members = parameters(*(LEAST * size for size in sizes))
    found = {members[number]: count for number, count in rows.items()}
    owners = Owners([(members, "all", 4)], lambda _: 0, rows=lambda p: found.get(p, 0))
    (shares,) = owners.shares
    assert sum(shares) == LEAST * sum(sizes)
    return [share // LEAST for share in shares], [number for number, p in enumerate(members) if owners.cuts(p)]


def test_matrices_that_make_a_rank_too_full_are_cut_and_no_others() -> None:
    assert shared_out({0: 64}, 12, 2, 2, 2, 2) == ([5, 5, 5, 5], [0])
    assert shared_out({}, 12, 2, 2, 2, 2) == ([12, 4, 2, 2], [])
    assert shared_out({0: 64, 1: 64}, 4, 4, 4, 4) == ([4, 4, 4, 4], [])
    assert shared_out({0: 64, 1: 64}, 12, 8, 1, 1, 1, 1) == ([6, 6, 6, 6], [0, 1])
    assert shared_out({1: 64}, 12, 4, 4) == ([12, 4, 4, 0], [])  # the fullest cannot be cut, so no cut of others helps
    assert shared_out({0: 31}, 12, 2, 2, 2, 2) == ([12, 4, 2, 2], [])  # less than 8 rows for each rank


@pytest.mark.parametrize(("ranks", "whole", "cut", "count"), [
    (2, 1.0, 1.0, 0), (4, 1.25, 1.0, 1), (8, 2.5, 1.0, 1), (64, 20.0, 1.25, 37),
])  # fmt: skip
def test_the_figures_of_the_documentation(ranks: int, whole: float, cut: float, count: int) -> None:
    """GPT-2 with Adafactor: the fullest rank over the mean, with and without cuts."""
    with torch.device("meta"):
        gpt = GPT(GPTConfig(vocabulary=50257, context=1024, width=768, heads=12, layers=12))
    optimizer = zs.optim.Adafactor(gpt.parameters())
    members, (group,), sizes = [*gpt.parameters()], optimizer.param_groups, StateSizes(optimizer)
    for rows, expected in ((lambda _: 0, whole), (lambda p: rows_of(optimizer, group, p.shape), cut)):
        owners = Owners([(members, "all", ranks)], lambda p: sizes.of(0, p), rows=rows)
        (shares,) = owners.shares
        assert ranks * max(shares) / sum(shares) == pytest.approx(expected, rel=0.005)
    asked = [sum(optimizer.reduced_numels(p.shape, group)) for p in members if owners.cuts(p)]
    assert (len(asked), sum(asked)) == (count, {0: 0, 1: 771, 37: 56175}[count])


def test_small_matrices_stay_whole() -> None:
    members = parameters(LEAST - 1, 10)
    owners = Owners([(members, "all", 2)], rows=lambda _: 64)
    assert owners.shares == [[LEAST - 1, 10]] and not any(map(owners.cuts, members))


def test_rows_are_dealt_out_evenly_and_lie_in_a_flat_of_their_own() -> None:
    large, *small = parameters(28 * LEAST, 5, 3)
    owners = Owners([([small[0], large, small[1]], "all", 3)], lambda _: 0, rows=lambda p: 28 if p is large else 0)
    whole, cut = owners.flats({"a": small[0], "b": large, "c": small[1]}, 3)
    assert (*whole,) == ({"a": small[0], "c": small[1]}, (0, 5, 8, 8), "")
    assert (*cut,) == ({"b": large}, (0, 10 * LEAST, 19 * LEAST, 28 * LEAST), "rows of b")
    assert owners.rank_of(large) is None
    assert "1 larger matrices" in owners.summary and "each of 2 parameters" in owners.summary


@pytest.mark.parametrize(("make", "shape", "rows"), [
    (zs.optim.Adafactor, (9, 4), 9), (zs.optim.Adafactor, (9,), 0), (zs.optim.Adafactor, (9, 4, 3), 0),
    (zs.optim.SM3, (9, 4, 3, 2), 9), (zs.optim.LAMB, (9, 4), 9), (zs.optim.Muon, (9, 4), 0),
    (torch.optim.Adafactor, (9, 4), 0), (Own, (9, 4), 0),
])  # fmt: skip
def test_matrices_of_optimizers_that_ask_have_rows(make: Any, shape: tuple[int, ...], rows: int) -> None:
    optimizer = make([nn.Parameter(torch.zeros(shape))], lr=0.1)
    assert rows_of(optimizer, optimizer.param_groups[0], torch.Size(shape)) == rows


def test_a_stack_that_counts_as_one_matrix_has_rows() -> None:
    optimizer = zs.optim.SM3([{"params": [nn.Parameter(torch.zeros(9, 4, 3))], "batch_dims": 0}])
    assert rows_of(optimizer, optimizer.param_groups[0], torch.Size((9, 4, 3))) == 9


def test_what_is_told() -> None:
    assert Owners().summary == ""
    told = Owners([(parameters(6, 1, 1), "all", 2)], optimizer="Muon").summary
    assert "Muon" in told and "3 parameters" in told and "2 ranks" in told and "1.50 times" in told
