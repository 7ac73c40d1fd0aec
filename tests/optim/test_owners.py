"""Owners: whole parameters dealt out to ranks by their cost, over all units."""

import random

import pytest
import torch
from torch import nn

from zeroshard.optim import Owners


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


def test_what_is_told() -> None:
    assert Owners().told == ""
    told = Owners([(parameters(6, 1, 1), "all", 2)], optimizer="Muon").told
    assert "Muon" in told and "3 parameters" in told and "2 ranks" in told and "1.50 times" in told
