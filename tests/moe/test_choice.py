"""What expert parallelism answers the planner, and which numbers of ranks it offers to a search."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from torch import nn

from moe.mixed import EXPERTS, Mixed
from zeroshard.moe.choice import SharingExperts, mixtures_of
from zeroshard.plan import Plan
from zeroshard.planner.predict.states import Sizes, least_bytes
from zeroshard.planning.questions import Mixtures, States

DENSE, SHARED, RANKS = 400, 600, 8
STATES = States(DENSE + SHARED, 0, 300, optimizer_state=8, slices=RANKS)
MIXED = replace(STATES, mixtures=Mixtures(4, Fraction(SHARED, DENSE + SHARED)))
SIZES = Sizes(DENSE + SHARED, 0, (0,), 8, MIXED.mixtures)


@pytest.mark.parametrize("modules", [False, True])
def test_the_experts_of_a_model_are_counted(modules: bool) -> None:
    model = Mixed(modules=modules)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    everything = sum(p.numel() for p in model.parameters())
    assert mixtures_of(model) == Mixtures(EXPERTS, Fraction(experts, everything))
    assert mixtures_of(nn.Linear(2, 2)) == Mixtures()


def test_parameters_that_are_not_trained_count_by_themselves() -> None:
    model = Mixed()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." not in name)
    assert mixtures_of(model) == Mixtures(EXPERTS, Fraction(1))


def part(buffers: int, zero: int, slices: int) -> Fraction:
    """Bytes of so many parameters with fp32 Adam."""
    kept = [Fraction(buffers) if zero < stage else Fraction(buffers, slices) for stage in (3, 2, 1)]
    return 4 * kept[0] + 4 * kept[1] + 8 * kept[2]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("together", [1, 2, 4])
def test_states_are_those_of_dense_layers_and_of_a_part_of_the_experts(zero: Any, ranks: int, together: int) -> None:
    """Experts that are shared out are not split besides, as dense layers are."""
    plan = Plan(zero=zero, expert_parallel=ranks, tensor_parallel=together)
    dense = part(DENSE // together, zero, RANKS // together)
    assert least_bytes(SIZES, plan, RANKS) == dense + part(SHARED // ranks, zero, RANKS // ranks)


def test_states_of_groups_that_are_wider_than_slices_are_not_less_than_a_part() -> None:
    plan = Plan(zero=1, shard_group=2, expert_parallel=4)
    assert least_bytes(SIZES, plan, RANKS) == part(DENSE, 1, 2) + part(SHARED // 4, 1, 1)


def test_a_model_has_the_same_states_where_there_is_nothing_to_share_out() -> None:
    assert SharingExperts(4).share(STATES, RANKS) == STATES
    assert SharingExperts(8).share(MIXED, RANKS) == MIXED  # more ranks than experts
    assert SharingExperts().share(MIXED, RANKS) == MIXED


def test_more_ranks_for_experts_are_a_way_out() -> None:
    found = list(SharingExperts(2).remedies(RANKS))
    assert [remedy.settings["expert_parallel.ranks"] for remedy in found] == [4, 8]
    assert found[0].sentence == "expert_parallel=4 would bring the states down to fit."
    assert [remedy.settings["expert_parallel.ranks"] for remedy in SharingExperts(stages=2).remedies(RANKS)] == [2, 4]


def test_divisors_of_the_ranks_of_a_stage_are_offered_up_to_the_number_of_experts() -> None:
    def offered(choice: SharingExperts, states: States = MIXED, ranks: int = RANKS) -> list[int]:
        return [settings["expert_parallel.ranks"] for settings in choice.variants(states, ranks)]

    assert offered(SharingExperts()) == [2, 4]
    assert offered(SharingExperts(stages=4)) == [2]
    assert offered(SharingExperts(), ranks=6) == [2, 3]
    assert offered(SharingExperts(2)) == offered(SharingExperts(), STATES) == []
