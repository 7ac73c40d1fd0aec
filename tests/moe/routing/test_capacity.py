"""Capacities by the formulas of papers and systems, and who finds a place, beside loops over tokens."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zeroshard.errors import PlanError
from zeroshard.moe.routing.presets import router_of
from zeroshard.moe.routing.record import TokenGroups
from zeroshard.moe.routing.selection import PRIORITIES, Capacity, serving_order, with_place

CASES = ((100, 8, 1, 1.25), (100, 8, 2, 1.25), (7, 8, 1, 1.0), (10, 16, 1, 1.25))
MEASURED = {  # what each system computed for the cases
    "deepspeed": (Capacity(minimum=4), (16, 32, 4, 4)),
    "megatron": (Capacity(), (16, 32, 1, 1)),
    "tutel": (Capacity(formula="tutel"), (16, 32, 1, 1)),
    "megablocks": (Capacity(formula="down"), (15, 31, 0, 0)),
    "mesh": (Capacity(formula="mesh", minimum=4), (15, 15, 4, 4)),
    "lingvo": (Capacity(formula="lingvo", minimum=4), (16, 16, 4, 4)),
    "fastmoe": (Capacity(formula="fastmoe"), (15, 31, 0, 0)),
}


@pytest.mark.parametrize("system", MEASURED)
def test_the_formula_gives_what_the_system_computes(system: str) -> None:
    settings, expected = MEASURED[system]
    found = [
        Capacity(factor, formula=settings.formula, minimum=settings.minimum).limit(s, e, k, training=True)
        for s, e, k, factor in CASES
    ]
    assert found == list(expected)
    assert Capacity(formula="down").limit(100, 8, 2, training=True) == 2 * 100 // 8  # fairscale
    assert Capacity(64, formula="constant").limit(100, 8, 2, training=True) == 64  # Switch of Hugging Face


def test_the_factor_is_the_decimal_that_is_written() -> None:
    """In floats 50·1.1 is 55.00000000000001, which would round up to 56."""
    assert Capacity(1.1).limit(500, 10, 1, training=True) == 55
    assert math.ceil(500 / 10 * 1.1) == 56


def test_evaluation_has_no_limit_by_default() -> None:
    assert Capacity(1.25).limit(100, 8, 1, training=False) is None
    assert Capacity(1.25, 2.0).limit(100, 8, 1, training=False) == 25
    assert Capacity(math.inf).limit(100, 8, 1, training=True) is None


@pytest.mark.parametrize("factor", [0, -1.0, math.nan, True, "1.25"])
def test_factors_that_are_none_are_refused(factor: float) -> None:
    with pytest.raises(PlanError, match=r"capacity.train is .* math.inf"):
        Capacity(factor)


def places(experts: Tensor, priority: str, gates: Tensor, draws: Tensor) -> list[tuple[int, int]]:
    """(choice, token) in the sequence in which they ask, by a sort of Python."""
    tokens, choices = experts.shape

    def key(choice: int, token: int) -> tuple[float, ...]:
        first, own = gates[token, 0].item(), gates[token, choice].item()
        return {
            "position": (choice, token),
            "probability": (choice, -first, token),
            "gate": (-own, choice, token),
            "random": (choice, draws[token].item(), token),
        }[priority]

    return sorted(((c, t) for c in range(choices) for t in range(tokens)), key=lambda pair: key(*pair))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 9999),
    st.integers(1, 40),
    st.integers(1, 3),
    st.sampled_from(PRIORITIES),
    st.integers(1, 50),
    st.booleans(),
)
def test_places_are_those_of_a_loop(
    seed: int, tokens: int, choices: int, priority: str, size: int, padded: bool
) -> None:
    torch.manual_seed(seed)
    experts = torch.rand(tokens, 5).argsort(-1)[:, :choices]
    gates = torch.randint(1, 4, (tokens, choices)).float()  # many ties
    limits = torch.randint(0, 5, (-(-tokens // size),)).tolist()
    takes = torch.rand(tokens, choices) < 0.7 if padded else None
    torch.manual_seed(seed + 1)
    draws = torch.rand(tokens)
    torch.manual_seed(seed + 1)
    order = serving_order(priority, gates, gates)
    kept = with_place(experts, limits, TokenGroups(tokens, size), order, takes)
    held: dict[tuple[int, int], int] = {}
    for choice, token in places(experts, priority, gates, draws):
        if takes is not None and not takes[token, choice]:
            assert not kept[token, choice]
            continue
        queue = token // size, experts[token, choice].item()
        assert kept[token, choice].item() is (held.get(queue, 0) < limits[queue[0]])
        held[queue] = held.get(queue, 0) + 1


def test_one_expert_with_all_tokens_keeps_the_first_ones() -> None:
    """Systems that drop by `topk` of a 0/1 matrix keep tokens 40 to 47."""
    router = router_of("megatron_position", 4, 8)
    x = torch.ones(64, 4)
    kept = router(x).kept
    assert kept is not None
    assert kept.all(-1).nonzero().flatten().tolist() == list(range(16))


def test_random_priority_is_fair_and_follows_the_seed() -> None:
    """The mean position of those who are kept is the middle; by position it would be an eighth."""
    router, x = router_of("deepspeed_top1", 4, 8, capacity=2.0), torch.ones(4096, 4)
    torch.manual_seed(0)
    first = router(x).kept
    torch.manual_seed(0)
    assert first is not None and torch.equal(first, router(x).kept)
    assert not torch.equal(first, router(x).kept)
    assert int(first.sum()) == 1024
    assert first.flatten().nonzero().double().mean().item() == pytest.approx(2048, rel=0.05)


def test_capacity_follows_each_group_of_its_own_size() -> None:
    router = router_of("switch", 4, 2, noise=None, group=8)
    kept = router(torch.ones(19, 4)).kept
    assert kept is not None
    capacities = [math.ceil(Fraction("1.25") * size / 2) for size in (8, 8, 3)]
    assert [int(part.sum()) for part in kept.split(8)] == capacities == [5, 5, 2]
