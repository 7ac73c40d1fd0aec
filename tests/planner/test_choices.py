"""What techniques answer the planner: together as one plan, and what they offer to a search."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest

from zeroshard.errors import PlanError
from zeroshard.offload import choice as offload
from zeroshard.offload.policy import Offload
from zeroshard.pipeline import choice as pipeline
from zeroshard.plan import Plan
from zeroshard.planner.choices import choices_of
from zeroshard.planning.offers import Fastest, Fewest, Offer, Refused, Site, divisors
from zeroshard.planning.questions import Choice, States
from zeroshard.schedule import Layout, PipelineSchedule
from zeroshard.schedule.peaks import few_microbatches, in_flight
from zeroshard.zero import choice as zero

STATES = States(trainable=1000, frozen=100, largest=300, optimizer_state=8)


def site(ranks: int, per_node: int, rows: int, blocks: int = 6) -> Site:
    return Site(ranks, per_node, rows, lambda: blocks)


def test_what_a_plan_does_not_use_answers_as_if_it_were_not_there() -> None:
    usual, lists = Choice(), PipelineSchedule("naive", Layout((2,)), 1)
    for choice in choices_of(Plan(zero=0)):
        assert choice.settled(lists, 1) == 1 and choice.row_owner("rank") == "rank"
        assert choice.on_host("usual") == choice.budget(1, "usual") == "usual"
        assert not choice.filled(lambda chunks: ("a",)) and not choice.notes("fast") and not choice.left_out()
        assert (choice.resort, choice.exhausted, choice.alike) == (usual.resort, usual.exhausted, usual.alike)


def test_stages_and_dtypes_change_the_states_of_a_rank() -> None:
    plan = Plan(zero=1, pipeline_parallel=2, microbatches=2, precision="bf16")
    states = STATES
    for choice in choices_of(plan):
        states = choice.share(states, 4)
    assert (states.trainable, states.frozen, states.slices) == (500, 50, 2)
    assert (states.parameter, states.gradient, states.kept_gradient, states.master_weight) == (2, 2, 4, 4)
    assert choices_of(plan).slicing.least_bytes(states, 4) == 550 * 2 + 500 * 4 + 500 * (4 + 8) // 2


def test_exact_random_numbers_are_named_and_not_rehearsed() -> None:
    exact, fast = (choices_of(Plan(rng=rng)).drawing for rng in ("exact", "fast"))  # type: ignore[arg-type]
    assert exact.describe(2).settings == ("exact random numbers",) and not fast.describe(2).settings
    assert exact.rehearsed(2, True) == {"rng": "fast"} and not fast.rehearsed(2, True)


def test_what_is_offloaded_leaves_the_share_that_stays() -> None:
    half = choices_of(Plan(zero=2, offload=Offload("optimizer", fraction=0.5))).offloading
    assert half.least_bytes(STATES, 1) == 1100 * 4 + (500 - 300) * (4 + 0 + 8)
    assert not half.alike and not half.exhausted and half.reach == (1, 0.5)
    whole = choices_of(Plan(zero=2, offload=Offload("optimizer"))).offloading
    sentences = [[remedy.sentence for remedy in one.remedies(2)] for one in (half, whole)]
    assert not whole.exhausted and "larger" in sentences[0][0] and "optimizer,parameters" in sentences[1][0]
    streamed = choices_of(Plan(zero=3, offload="optimizer,parameters")).offloading
    assert streamed.least_bytes(STATES, 1) == 300 * 4
    assert streamed.exhausted and streamed.resort == "offload"


def test_several_nodes_are_offered_slices_within_each() -> None:
    found = [offer for offer in zero.offers(site(8, 4, 16)) if isinstance(offer, Offer)]
    sizes = [(offer.settings["zero"], offer.settings["shard_group"]) for offer in found]
    assert sizes == [(0, None), *product((1, 2, 3), (None, 4))]
    assert all(offer.data_ranks == 8 and list(offer.counts) == [1, 2] for offer in found)


def test_rows_that_do_not_divide_are_refused_with_the_way_out() -> None:
    found = list(zero.offers(site(4, 4, 6)))
    assert all(isinstance(offer, Refused) for offer in found) and len(found) == 4
    assert not list(offload.offers(site(4, 4, 6)))


def test_stages_are_offered_as_far_as_there_are_blocks() -> None:
    two, four, eight = pipeline.offers(site(8, 8, 64, blocks=5))
    assert isinstance(two, Offer) and isinstance(four, Offer) and isinstance(eight, Refused)
    assert (two.data_ranks, two.settings["zero"], list(two.counts), two.usual) == (4, 1, [2, 4, 8, 16], 8)
    assert "5 blocks for 8 stages" in eight.why
    assert [dict(more) for more in two.faster(4, site(8, 8, 64, 5))] == list(pipeline.FASTER)
    assert [more["pipeline_parallel.schedule"] for more in four.faster(4, site(8, 8, 64, 5))] == [
        "zb-h1"
    ]  # 8 chunks of 5 blocks


def test_chunks_are_offered_to_pipelines_that_are_rehearsed_quickly() -> None:
    """Each stage of a pipeline with several chunks per stage is rehearsed."""
    place = site(8, 8, 64, blocks=32)
    two, four, eight = pipeline.offers(place)
    assert isinstance(two, Offer) and isinstance(four, Offer) and isinstance(eight, Offer)
    assert [len(list(offer.faster(8, place))) for offer in (two, four, eight)] == [2, 2, 1]


def test_a_model_that_is_no_chain_is_refused_once() -> None:
    def tangled() -> int:
        raise PlanError("no chain")

    (refused,) = pipeline.offers(Site(8, 8, 64, tangled))
    assert isinstance(refused, Refused) and refused.why == "no chain"


@dataclass(frozen=True)
class Plain:
    """A plan as it was looked at."""

    count: int
    fits: bool
    seconds: float


def looks(least: int, seconds: Callable[[int], float], asked: list[int]) -> Callable[[int], Plain]:
    def look(count: int) -> Plain:
        asked.append(count)
        return Plain(count, count >= least, seconds(count))

    return look


@pytest.mark.parametrize("least, guess", list(product((1, 2, 3, 4, 6, 8, 12, 24, 99), (None, 1, 4, 24))))
def test_the_fewest_that_fit_are_found_from_any_guess(least: int, guess: int | None) -> None:
    counts, asked = divisors(24), list[int]()
    found = Fewest().find(looks(least, float, asked), counts, [] if guess is None else [guess])
    assert found is not None
    assert (found.count, found.fits) == (next((c for c in counts if c >= least), 24), least <= 24)
    assert len(asked) <= 5 and len(set(asked)) == len(asked)


def test_the_fastest_is_one_of_those_that_were_near_and_fit() -> None:
    asked: list[int] = []
    found = Fastest().find(looks(2, lambda count: 1 / count, asked), [2, 4, 8], [4, 2])
    assert found is not None and found.count == 4 and asked == [4, 2]


def test_where_none_that_was_near_fits_finer_ones_are_looked_at() -> None:
    asked: list[int] = []
    found = Fastest().find(looks(8, float, asked), [2, 4, 8, 16], [2])
    assert found is not None and found.count == 8 and asked == [2, 4, 8]


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "naive"])
def test_few_microbatches_tell_how_many_are_in_flight(name: str) -> None:
    lists = PipelineSchedule(name, Layout.equal(4), 64)
    few = few_microbatches(lists)
    assert few is not None
    low, high, most = (in_flight(lists, 0, m) for m in (*few, 64))
    assert most == high + (high - low) / (few[1] - few[0]) * (64 - few[1])
    assert few_microbatches(PipelineSchedule(name, Layout.equal(4), few[0])) is None
