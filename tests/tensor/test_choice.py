"""What tensor parallelism answers the planner, and which groups of ranks it offers to a search."""

from zeroshard.plan import Plan
from zeroshard.planner.choices import choices_of, schedule_of
from zeroshard.planner.search.text import short
from zeroshard.planning.offers import Site
from zeroshard.planning.questions import States
from zeroshard.tensor.choice import Splitting, divisions
from zeroshard.tensor.policy import TensorParallel

STATES = States(trainable=1000, frozen=100, largest=300, optimizer_state=8)


def test_a_plan_without_it_says_nothing_of_it() -> None:
    plain = Splitting()
    assert plain.describe(4) == choices_of(Plan()).splitting.describe(4)
    assert plain.share(STATES, 4) == STATES and plain.row_owner("rank") == "rank"


def test_a_plan_is_described_with_the_ranks_of_each_layer() -> None:
    plan = Plan(zero=1, pipeline_parallel=2, microbatches=2, tensor_parallel=2)
    assert short(plan, 8) == "2 stages 1f1b x 2, tensor 2, zero 1, fp32, 2 microbatches"
    told = Plan(zero=0, tensor_parallel=TensorParallel(4, sequence=False, layers={"mlp.up": "column"}))
    assert short(told, 4) == "tensor 4, zero 0, fp32, no sequence parallelism, layers split as given"


def test_states_are_divided_among_the_ranks_of_a_layer_and_then_sliced() -> None:
    plan = Plan(zero=1, tensor_parallel=2)
    states = STATES
    for choice in choices_of(plan):
        states = choice.share(states, 8)
    assert (states.trainable, states.frozen, states.largest, states.slices) == (500, 50, 150, 4)
    assert schedule_of(plan, 8).layout.replicas == (4,)


def test_stage_3_with_more_ranks_in_each_layer_is_a_way_out() -> None:
    found = list(Splitting(ranks=2).remedies(8))
    assert [remedy.settings["tensor_parallel"] for remedy in found] == [4, 8]
    assert found[0].sentence.startswith("tensor_parallel=4 with zero=3 ") and found[0].ranks == 8


def test_groups_of_one_node_are_offered() -> None:
    found = list(divisions(Site(32, 8, 64, lambda: 4)))
    assert [divided.together for divided in found] == [1, 2, 4, 8]
    assert [(divided.site.ranks, divided.site.per_node) for divided in found] == [(32, 8), (16, 4), (8, 2), (4, 1)]
    assert found[0].settings == {"tensor_parallel": 1}
    assert [divided.together for divided in divisions(Site(6, 4, 6, lambda: 4))] == [1, 2]
