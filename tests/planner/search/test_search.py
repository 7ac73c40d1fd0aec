"""The search: first estimates, what is said meanwhile, and what is never rehearsed."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.doctor.hardware import Device, Link, Machines
from zeroshard.errors import PlanError
from zeroshard.offload import choice as offload
from zeroshard.plan import Plan
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.planner.predict.result import Found, Prediction
from zeroshard.planner.search import search as searching
from zeroshard.planner.search.progress import Looks, SearchProgress
from zeroshard.planner.search.search import search
from zeroshard.planning.offers import Offer, Refused, Site
from zeroshard.train.family import gpt_task
from zeroshard.train.sizes import GPTConfig
from zeroshard.zero import choice as zero

WIDTH = 64
PSI = 6 * WIDTH * WIDTH
MACHINES = Machines(Device("a GPU", "cuda", 2**26, {"fp32": 1e9}, 1e9, 1e-6), 2, 2, Link(1e8), Link(1e8))


class Layers(nn.Module):
    """Six layers of 16 KiB, which ranks do not split, as the elements between two of them depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.between(layer(x))
        return x.square().mean()

    def between(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


class Pairs(Layers):
    """Layers of which pairs are split."""

    def between(self, x: Tensor) -> Tensor:
        return x.relu()


def job(rows: int = 16) -> TrainingTask:
    return TrainingTask(Layers, lambda rows: torch.ones(rows, WIDTH), torch.optim.Adam, rows)


def hear(patch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that are rehearsed for the search itself from now on."""
    plans: list[Plan] = []
    predict = searching.predict

    def heard(task: TrainingTask, plan: Plan, *given: Any, **more: Any) -> Prediction:
        plans.append(plan)
        return predict(task, plan, *given, **more)

    patch.setattr(searching, "predict", heard)
    return plans


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that were rehearsed for the search itself."""
    return hear(monkeypatch)


@dataclass(frozen=True)
class Search:
    """One search, for several tests.

    Attributes:
        first: first estimates, and how many plans were rehearsed before them.
        said: the lines of its progress.
        asked: the plans that were rehearsed.
    """

    found: Found
    first: list[tuple[Found, int]]
    said: list[str]
    asked: list[Plan]


@pytest.fixture(scope="module")
def searched() -> Search:
    """The plans of the six layers on two devices."""
    shown: list[tuple[Found, int]] = []
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        plans = hear(patch)
        first = lambda found: shown.append((found, len(plans)))  # noqa: E731
        return Search(search(job(), MACHINES, top=10, first=first, say=said.append), shown, said, plans)


def test_first_estimates_come_before_any_plan_is_rehearsed_and_are_near(searched: Search) -> None:
    (first, before), (fits, asked) = searched.first
    assert before == 0 and searched.asked
    assert [one.mode for one in fits.best] == ["fake"] and fits.best[0].fits  # while others are tried
    assert 0 < asked <= 2 and fits.best[0].plan in searched.asked[:asked]
    assert {p.mode for p in first.best} == {p.time_mode for p in first.best} == {"estimate"}
    assert {(p.plan.zero, p.plan.pipeline.stages) for p in first.best} == {(0, 1), (1, 1), (2, 1), (3, 1), (0, 2)}
    for one in first.best:
        last = next(
            p
            for p in searched.found.best
            if (p.plan.zero, p.plan.pipeline.stages) == (one.plan.zero, one.plan.pipeline.stages)
        )
        assert one.peak_bytes == pytest.approx(last.peak_bytes, rel=0.3)
        assert one.seconds == pytest.approx(last.seconds, rel=0.5)


def test_plans_whose_states_alone_do_not_fit_are_never_rehearsed(asked: list[Plan]) -> None:
    room = 13 * PSI  # of 16 bytes per parameter; stage 1 leaves 12 on two ranks, stages 2 and 3 less
    small = replace(MACHINES, device=replace(MACHINES.device, memory_bytes=room))
    found = search(job(2), small)
    assert all(plan.zero or plan.pipeline.stages > 1 for plan in asked)
    assert any(refusal.plan.zero == 0 and "states alone" in refusal.why for refusal in found.refused)


def test_it_says_how_many_plans_are_left_and_about_how_long(searched: Search) -> None:
    counted = [line for line in searched.said if " plans" in line]
    assert counted[0].startswith("0/") and all(" s left: " in line for line in counted)
    assert len({line.split(" plans")[0].split("/")[1] for line in counted}) == 1
    done, everything = (int(number) for number in counted[-1].split(" plans")[0].split("/"))
    assert everything - done == 1 and everything == len(counted) + searched.found.left_out


def test_schedules_are_tried_beside_split_layers() -> None:
    found = search(replace(job(), build=Pairs), MACHINES, top=20)
    schedules = {one.plan.pipeline.schedule for one in found.best if one.plan.pipeline.stages > 1}
    assert "interleaved" in schedules and any(one.plan.tensor.ranks > 1 for one in found.best)


def looks(*plans: Plan) -> Looks:
    return Looks(plans, len(plans), len(plans))


def test_the_time_left_is_that_of_the_plans_ahead() -> None:
    """Four seconds per plan, and as much per microbatch more; with stages by the work of two short rehearsals."""
    clock = iter([0.0, 4.0, 4.0, 12.0, 12.0, 24.0, 24.0])
    alone, staged = Plan(zero=0), Plan(zero=0, pipeline_parallel=2, microbatches=2)
    several = replace(alone, microbatches=3)
    groups = {alone: looks(alone, several), staged: looks(staged, staged)}
    progress = SearchProgress(groups, now=lambda: next(clock), best=alone)  # which few blocks tell whole
    progress.took(alone, 6.0, first=True)
    progress.begin(alone)
    assert progress.look(alone) == "0/4 plans, about 19 s left: "  # 3, twice that, and 1.6 times for each with stages
    assert progress.look(several) == "1/4 plans, about 17 s left: "
    progress.begin(staged)
    assert progress.look(staged) == "2/4 plans, about 12 s left: "
    assert progress.look(staged) == "3/4 plans, about 12 s left: "
    assert progress.left_out == 0


def test_plans_that_are_not_needed_count_as_done() -> None:
    one, *others = STAGES
    groups = {one: looks(one, one), others[0]: looks(*3 * [others[0]]), others[1]: looks(*2 * [others[1]])}
    progress = SearchProgress({**groups, None: looks(one)}, now=lambda: 0.0)
    progress.begin(one)
    assert progress.look(one).startswith("0/8 plans")
    progress.drop(others[0])
    progress.begin(others[1])
    assert progress.look(others[1]).startswith("5/8 plans")
    assert progress.left_out == 6  # so far


def test_the_number_of_plans_stays_where_more_are_looked_at_than_expected() -> None:
    progress = SearchProgress({STAGES[0]: looks(STAGES[0]), STAGES[1]: looks(STAGES[1])}, now=lambda: 0.0)
    progress.begin(STAGES[0])
    said = [progress.look(replace(STAGES[0], microbatches=m)) for m in (1, 2, 3)]
    progress.also({HOST: looks(HOST, HOST.with_settings(LEAN))})
    progress.begin(STAGES[1])
    said.append(progress.look(STAGES[1]))
    progress.begin(HOST)
    said += [progress.look(HOST), progress.look(HOST.with_settings(LEAN))]
    assert [line.split()[0] for line in said] == ["0/2", "0/2", "0/2", "1/2", "1/2", "1/2"]
    assert progress.left_out == 0


def test_groups_that_nothing_was_expected_of_count_before_the_first_line() -> None:
    progress = SearchProgress(now=lambda: 0.0)
    progress.also({HOST: looks(HOST, HOST.with_settings(LEAN))})
    progress.begin(HOST)
    assert progress.look(HOST) == "0/2 plans: "
    assert SearchProgress().look(HOST) == ""


def test_groups_of_which_the_first_plan_is_needless_have_one_plan_less_ahead() -> None:
    now = 0.0
    lean, lean_3 = HOST.with_settings(LEAN), HOST_3.with_settings(LEAN)
    groups = {HOST: looks(HOST, lean), HOST_3: looks(HOST_3, lean_3), STAGES[0]: looks(STAGES[0])}
    progress = SearchProgress(groups, now=lambda: now)
    progress.begin(HOST)
    progress.look(HOST)
    now = 10.0
    for _ in range(2):
        progress.spare(lambda plan: plan == HOST_3)
    assert progress.look(lean).startswith("2/5 plans")


def test_doubtful_groups_and_variants_that_may_not_come_take_less_time() -> None:
    one, other, *more = STAGES
    now = 0.0
    progress = SearchProgress({one: Looks([one, *more], 3, 1), other: looks(other)}, now=lambda: now)
    progress.took(one, 200.0, first=True)
    progress.begin(one)
    assert progress.look(one) == "0/4 plans, about 360 s left: "  # 100 each, the second variant by a chance of 0.6
    progress.doubt([other])
    now = 100.0
    assert progress.look(more[0]) == "1/4 plans, about 160 s left: "
    now = 200.0
    assert progress.look(more[1]) == "2/4 plans, about 100 s left: "


def test_the_best_plan_is_rehearsed_whole_in_the_end_unless_it_is_too_large() -> None:
    progress = SearchProgress({HOST: looks(HOST)}, depth=25, now=lambda: 0.0, best=STAGES[0])
    progress.took(STAGES[0], 200.0, first=True)
    progress.begin(HOST)
    assert progress.look(STAGES[0]) == "0/1 plans, about 300 s left: "
    progress.best = replace(STAGES[0], microbatches=2)
    assert progress.look(STAGES[0]) == "0/1 plans, about 67 s left: "  # the first took no time


LEAN = {"activations.recompute": "blocks"}
HOST, HOST_3 = Plan(zero=2, offload="optimizer"), Plan(zero=3, offload="optimizer,parameters")
STAGES = [Plan(zero=zero) for zero in (1, 2, 3, 0)]
SLICED = Plan(zero=3, offload="optimizer")
SHARE = SLICED.with_settings({"offload.fraction": 0.75})
RECORDS = {  # looks expected by group; groups, plans and CPU seconds of those taken; and of the best plan, whole
    "7 B on an RTX 4090": (
        SearchProgress({one: looks(one, one.with_settings(LEAN)) for one in (HOST, HOST_3)}, depth=32),
        [
            (HOST, HOST, 1.5),
            (None, HOST.with_settings(LEAN), 1.4),
            (HOST_3, HOST_3, 1.5),
            (None, HOST_3.with_settings(LEAN), 1.3),
        ],
        3.4,
    ),
    "7 B on 8 H100s": (
        SearchProgress({one: looks(one) for one in STAGES[:3]}, depth=32),
        [(plan, plan, seconds) for plan, seconds in zip(STAGES, (1.4, 1.6, 2.3), strict=False)],
        3.8,
    ),
    "70 B on 8 H100s": (  # the share is rehearsed with all blocks
        SearchProgress({SLICED: looks(SLICED, SLICED.with_settings(LEAN)), SHARE: looks(SHARE)}, depth=80),
        [
            (SLICED, SLICED, 6.4),
            (None, SLICED.with_settings(LEAN), 7.0),
            (SHARE, SHARE.with_settings(LEAN), 25.5),
        ],
        0.0,
    ),
}


@pytest.mark.parametrize("record", RECORDS)
def test_the_time_left_is_within_a_factor_of_one_and_a_half(record: str) -> None:
    now = 0.0
    found, looked, whole = RECORDS[record]
    progress = SearchProgress(found.expected, found.depth, now=lambda: now)
    if known := STAGES[0] in found.expected:  # it starts from estimates
        progress.took(STAGES[0], 340.0, first=True)
        progress.took(Plan(zero=0, tensor_parallel=8), 450.0, first=False)
    for number, (group, plan, seconds) in enumerate(looked):
        if group is not None:
            progress.begin(group)
        text, _, left = progress.look(plan).partition(" plans")
        assert text == f"{number}/{len(looked)}"
        rest = 100 * (whole + sum(more for _, _, more in looked[number:]))
        if number or known:
            assert rest / 1.5 <= float(left.split()[2]) <= 1.5 * rest, (number, left, rest)
        else:  # nothing is known yet
            assert left == ": "
        now += 100 * seconds


BLOCKS = GPTConfig(vocabulary=64, context=32, width=64, heads=4, layers=2)
FAST = Link(1e12)


def gpt(rows: int = 2) -> TrainingTask:
    return gpt_task(BLOCKS, rows)


def test_layers_are_split_where_nothing_else_fits(asked: list[Plan]) -> None:
    """One unit as large as the device, which stage 3 would gather whole and no stage can hold."""
    wide = gpt_task(replace(BLOCKS, width=512), rows=2)
    room = 30 * 2**20  # states of 25.5 million bytes per rank on four; a block is 12.6 million
    device = replace(MACHINES.device, memory_bytes=room)
    found = search(wide, Machines(device, 4, 4, FAST, FAST), Plan(precision="fp32"))
    assert any(plan.tensor.ranks > 1 for plan in asked)
    assert found.best and all(best.plan.tensor.ranks > 1 for best in found.best)


@pytest.mark.whole
def test_plans_that_split_layers_are_left_out_where_they_are_expected_to_be_slower(asked: list[Plan]) -> None:
    slow = Machines(MACHINES.device, 2, 2, Link(1e5), Link(1e5))
    heard: list[str] = []
    found = search(gpt(), slow, say=heard.append)
    assert found.best and all(plan.tensor.ranks == 1 for plan in asked)
    assert any(line == "2 ranks that split layers, for first estimates" for line in heard)


@pytest.mark.whole
def test_only_plans_with_the_ranks_in_a_layer_that_are_asked_for(asked: list[Plan]) -> None:
    machines = Machines(MACHINES.device, 4, 4, FAST, FAST)
    found = search(gpt(), machines, Plan(tensor_parallel=2), top=10)
    assert found.best and {plan.tensor.ranks for plan in asked} == {2}
    assert {(p.plan.zero, p.plan.pipeline.stages) for p in found.best} >= {(0, 1), (1, 1), (2, 1), (0, 2)}
    assert all(refusal.plan.tensor.ranks == 2 for refusal in found.refused)
    with pytest.raises(PlanError, match=r"tensor_parallel is 3, .* set it to one of 1, 2, 4\."):
        search(gpt(), machines, Plan(tensor_parallel=3))


def test_a_model_that_cannot_be_split_is_refused_once_for_each_number_of_ranks(searched: Search) -> None:
    every = searched.found.refused
    refused = [refusal for refusal in every if refusal.plan.tensor.ranks > 1]
    assert [refusal.plan.tensor.ranks for refusal in refused] == [2] and refused == list(every[-1:])


class Sparse(nn.Module):
    """Two mixtures of four experts, which have nearly all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.mixtures = nn.Sequential(*(zs.moe.MoE(32, 128, experts=4) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.mixtures(x).square().mean()
        return loss


SPARSE = TrainingTask(Sparse, lambda rows: torch.ones(rows, 4, 32), torch.optim.Adam, rows=2)
SLOW = Machines(MACHINES.device, 2, 2, Link(1e7), Link(1e7))


def one_offer(site: Site) -> Iterator[Offer | Refused]:
    """Plans without slices and stages."""
    return islice(zero.offers(site), 1)


def kinds_of(plans: Iterable[Plan]) -> list[tuple[int, int]]:
    """The stage of ZeRO and the ranks that share out experts."""
    return [(plan.zero, plan.experts.ranks) for plan in plans]


def test_experts_are_shared_out_where_that_is_faster_or_nothing_else_fits(
    asked: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "OFFERS", (one_offer,))
    found = search(SPARSE, SLOW, top=10)
    assert kinds_of(asked[:2]) == [(0, 1), (0, 2)]
    assert kinds_of(prediction.plan for prediction in found.best) == [(0, 2), (0, 1)]
    states = 16 * sum(parameter.numel() for parameter in Sparse().parameters())
    small = replace(SLOW, device=replace(SLOW.device, memory_bytes=int(0.9 * states)))
    asked.clear()
    found = search(SPARSE, small, top=10)
    assert found.best and set(kinds_of(asked)) == {(0, 2)}
    whole = next(refusal for refusal in found.refused if (refusal.plan.zero, refusal.plan.experts.ranks) == (0, 1))
    assert "states alone" in whole.why and whole.way_out == "expert_parallel=2 would bring the states down to fit."


def last_offer(site: Site) -> Iterator[Offer]:
    """Plans that offload everything."""
    return (one for one in offload.offers(site) if one.settings["offload"] == "optimizer,parameters,activations")


def test_experts_are_shared_out_beside_offload_where_only_both_fit(
    asked: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "OFFERS", (one_offer,))
    monkeypatch.setattr(searching, "LAST_RESORTS", (last_offer,))
    mixture = sum(parameter.numel() for parameter in Sparse().mixtures[0].parameters())
    room = 15 * mixture  # bytes; states without offload take 16, offload alone 23, and with half of the experts 14
    found = search(SPARSE, replace(SLOW, device=replace(SLOW.device, memory_bytes=room)))
    assert list(dict.fromkeys(kinds_of(asked))) == [(3, 1), (3, 2)]
    assert [plan.plan.offloading.kinds >= {"optimizer", "parameters"} for plan in found.best] == [True]
    assert kinds_of(plan.plan for plan in found.best) == [(3, 2)]


def test_all_plans_have_the_ranks_of_experts_that_are_asked_for(
    asked: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "OFFERS", (one_offer,))
    search(SPARSE, SLOW, Plan(expert_parallel=2))
    assert kinds_of(asked) == [(0, 2)]  # the best was rehearsed whole


def test_a_model_without_mixtures_is_searched_as_if_there_were_no_experts(asked: list[Plan]) -> None:
    found = search(job(2), MACHINES)
    assert kinds_of(asked[:-1]) == [(0, 1), (1, 1), (2, 1), (3, 1), (0, 1), (0, 1), (0, 1)]
    assert [plan.pipeline.schedule for plan in asked[4:-1]] == ["1f1b", "interleaved", "zb-h1"]
    assert found.looked_at == 7
