"""PipeDream and 2BW follow their papers' update equations: a single process does the same with a history of weights.

The emulation below knows nothing of our schedules. It takes microbatch after microbatch in the order in which they
enter the pipeline, computes each gradient on the whole model with the weights of every stage as old as the paper says,
and lets each stage's optimizer update the stage's latest weights.
"""

import math
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from engine.models import OPTIMIZERS, build
from engine.pipelines import data, follow, train_gpt
from pool import Pool
from torch import Tensor, nn
from torch.func import functional_call

from zeroshard.schedule import Action, Kind


@dataclass(frozen=True)
class Case:
    """A run of an asynchronous schedule.

    Attributes:
        schedule: "pipedream", "vertical" (PipeDream with vertical sync) or "2bw".
        sizes: the number of blocks on each stage.
        script: see `follow`.
        rows: of the global batch of a step.
        more: of the plan.
    """

    schedule: str
    sizes: tuple[int, ...]
    microbatches: int = 4
    model: str = "Five"
    optimizer: str = "adamw"
    replicas: tuple[int, ...] | None = None
    script: str = "ssss"
    rows: int = 8
    more: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [self.schedule, *map(str, self.sizes), f"m{self.microbatches}", self.model, self.optimizer]
        words += [f"x{'x'.join(map(str, self.replicas))}"] if self.replicas else []
        return "-".join([*words, self.script, *(f"{k}={v}" for k, v in self.more.items())])

    @property
    def stages(self) -> int:
        return len(self.sizes)

    @property
    def per_stage(self) -> tuple[int, ...]:
        """Replicas of each stage."""
        return self.replicas or (1,) * self.stages

    @property
    def ranks(self) -> list[int]:
        """The stage of every rank."""
        return [stage for stage, replicas in enumerate(self.per_stage) for _ in range(replicas)]

    @property
    def lanes(self) -> int:
        """Batches per step: with unlike numbers of replicas all share one."""
        return self.per_stage[0] if len(set(self.per_stage)) == 1 else 1

    @property
    def firsts(self) -> list[int]:
        """The first block of every stage."""
        return list(accumulate(self.sizes, initial=0))[:-1]

    @property
    def plan(self) -> dict[str, Any]:
        schedule = "pipedream" if self.schedule == "vertical" else self.schedule
        split = tuple(f"blocks.{first}" for first in self.firsts[1:])
        plan = {"stages": self.stages, "schedule": schedule, "microbatches": self.microbatches, "split": split}
        return {**plan, "vertical_sync": self.schedule == "vertical", "replicas": self.replicas, **self.more}

    @property
    def every(self) -> int:
        """Microbatches of one replica in one update."""
        return self.microbatches if self.schedule == "2bw" else 1

    def stage_of(self, parameter: str) -> int:
        """A tied weight, which torch names after its first use, belongs to the first stage."""
        word, number, *_ = parameter.split(".")
        if word == "blocks":
            return max(s for s, first in enumerate(self.firsts) if first <= int(number))
        return 0 if word == "embed" else self.stages - 1

    def held(self, stage: int) -> int:
        """Microbatches that a replica of a stage takes in before the first comes back (1F1B, 1F1B-RR)."""
        return (sum(self.per_stage[stage:]) - 1) // self.per_stage[stage]

    def version(self, stage: int, j: int) -> int:
        """Which weights of a stage microbatch j of the whole pipeline meets, in updates since the last flush.

        W(t+1) = W(t) - lr·∇f(...), with d stages s counted from 0:
            stashing (PipeDream, section 3.3): stage s at t - (d-1-s); with replicas, a replica meets its k-th
                microbatch at k - ⌊(N-1)/r⌋, N being the replicas of this and all later stages;
            vertical sync (same section): every stage like the first, t - (d-1);
            2BW (2006.09503, section 3.1): the batch of t at W(t-1), on every stage.
        """
        k = j // self.per_stage[stage]
        if self.schedule == "2bw":
            return max(0, k // self.microbatches - 1)
        return max(0, k - self.held(0 if self.schedule == "vertical" else stage))


class Emulation:
    """The whole model in one process.

    Attributes:
        losses: of each step, by the microbatch's number in its lane and the lane.
        norms: of each stage's gradients, for each of its updates.
        clipped: updates that were made shorter.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.model = case, build("Five" if case.model == "Thrifty" else case.model)
        self.dtype = torch.bfloat16 if case.more.get("precision") == "bf16" else torch.float32
        self.parameters: list[dict[str, nn.Parameter]] = [{} for _ in range(case.stages)]
        for name, parameter in self.model.named_parameters():
            self.parameters[case.stage_of(name)][name] = nn.Parameter(parameter.detach().clone())
        self.optimizers = [OPTIMIZERS[case.optimizer](list(mine.values())) for mine in self.parameters]
        self.norms: list[list[float]] = [[] for _ in range(case.stages)]
        self.losses: list[dict[tuple[int, int], float]] = []
        self.clipped = 0
        self.flush()

    def play(self) -> list[list[float]]:
        """Go through the script; what each lane's evaluations give."""
        evaluations = []
        for event in self.case.script:
            if event == "s":
                self.step(len(self.losses))
            else:
                self.flush()
                if event == "e":
                    evaluations.append([self.evaluate(len(self.losses), lane) for lane in range(self.case.lanes)])
        return evaluations

    def flush(self) -> None:
        """Count versions and microbatches anew."""
        self.history = [[self._copy(stage)] for stage in range(self.case.stages)]
        self.sums: list[dict[str, Tensor]] = [{} for _ in range(self.case.stages)]
        self.j = 0

    def step(self, number: int) -> None:
        """All microbatches of all lanes."""
        case = self.case
        lanes = [data(number, lane, case.lanes, case.rows) for lane in range(case.lanes)]
        self.losses.append({})
        for k in range(case.microbatches):
            for lane, batch in enumerate(lanes):
                first, last = (len(batch) * end // case.microbatches for end in (k, k + 1))
                share = (last - first) / len(batch) if case.every > 1 else 1.0
                self.losses[-1][k, lane] = self._microbatch(batch[first:last], number, share)

    def evaluate(self, number: int, lane: int) -> float:
        batch = data(number, lane, self.case.lanes, self.case.rows)
        return functional_call(self.model, self.weights(), (batch, number)).item()

    def weights(self) -> dict[str, Tensor]:
        """The latest of all stages."""
        return {name: value for stage in range(self.case.stages) for name, value in self._copy(stage).items()}

    def mean_loss(self, number: int, rank: int) -> float:
        """Of a step, on a rank of the last stage."""
        case, replicas = self.case, self.case.per_stage[-1]
        replica = rank - case.ranks.index(case.stages - 1)
        found = self.losses[number]
        mine = [v for (k, lane), v in found.items() if (lane if case.lanes > 1 else k % replicas) == replica]
        rows = len(data(number, 0, case.lanes, case.rows))
        ends = [rows * k // case.microbatches for k in range(case.microbatches + 1)]
        shares = [b - a for a, b in pairwise(ends)] if case.every > 1 else [1] * len(mine)
        return sum(loss * share for loss, share in zip(mine, shares, strict=True)) / sum(shares)

    def _microbatch(self, tokens: Tensor, step: int, share: float) -> float:
        case, weights = self.case, {}
        for stage, versions in enumerate(self.history):
            old = versions[case.version(stage, self.j)]
            weights.update({name: value.clone().requires_grad_() for name, value in old.items()})
        loss = functional_call(self.model, weights, (tokens, step))
        found = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
        for stage in range(case.stages):
            for name in self.parameters[stage]:
                mean = share * found[name].float() / case.per_stage[stage]
                before = self.sums[stage].get(name)
                self.sums[stage][name] = mean if before is None else before + mean
            if (self.j + 1) % (case.every * case.per_stage[stage]) == 0:
                self._update(stage)
        self.j += 1
        return loss.item()

    def _update(self, stage: int) -> None:
        gradients, self.sums[stage] = self.sums[stage], {}
        norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients.values()))
        clip = self.case.more.get("clip_norm")
        limit = math.inf if clip is None else clip / math.sqrt(self.case.stages)
        self.norms[stage].append(norm)
        self.clipped += norm > limit
        if math.isfinite(norm):
            for name, parameter in self.parameters[stage].items():
                parameter.grad = gradients[name] * min(1.0, limit / norm)
            self.optimizers[stage].step()
        self.history[stage].append(self._copy(stage))

    def _copy(self, stage: int) -> dict[str, Tensor]:
        return {name: value.detach().to(self.dtype, copy=True) for name, value in self.parameters[stage].items()}


TIED = {"model": "TiedFive", "optimizer": "sgd"}
ALL = [
    Case("", (3, 2)),
    Case("", (2, 2, 1), **TIED, script="ssfsesffs"),
    Case("", (2, 2, 1), model="TiedFive", more={"clip_norm": 1.0}),
    Case("", (2, 2, 1), model="Spiked", rows=16, more={"nonfinite": "skip"}),
]
CASES = [
    *(replace(case, schedule=schedule) for schedule in ("pipedream", "vertical", "2bw") for case in ALL),
    *(Case(schedule, (1, 2, 1, 1), **TIED) for schedule in ("pipedream", "vertical")),
    Case("2bw", (2, 2, 1), **TIED),
    Case("pipedream", (1, 2, 1, 1), more={"recompute": "chunk"}),
    Case("2bw", (2, 1, 2), model="TiedFive", more={"recompute": "chunk"}),
    Case("vertical", (2, 2, 1), model="Thrifty"),  # the model's own recomputation
    Case("pipedream", (3, 2), more={"precision": "bf16"}),
    Case("pipedream", (2, 2, 1), 1, script="sfssfsssssss"),
    Case("vertical", (1, 2, 1, 1), 2, model="TiedFive", script="sfsssss", rows=7),
    Case("2bw", (2, 2, 1), 3, model="TiedFive", optimizer="adagrad", rows=11, script="sesf"),
    Case("2bw", (2, 2, 1), 3, rows=11),
    Case("2bw", (1, 2, 1, 1), 5, rows=12),
    Case("pipedream", (3, 2), replicas=(2, 2), rows=16, model="TiedFive", more={"zero": 0}),
    Case("vertical", (3, 2), replicas=(2, 2), rows=16, more={"zero": 1}),
    Case("2bw", (3, 2), 3, replicas=(2, 2), rows=16, model="TiedFive", more={"zero": 2}),
    *(Case("pipedream", (3, 2), replicas=replicas) for replicas in ((2, 1), (1, 2))),
    Case("pipedream", (2, 2, 1), replicas=(1, 2, 1), rows=12),
]
STRAIGHT = [case for case in CASES if not case.replicas and set(case.script) == {"s"} and case.microbatches == 4]
_runs: dict[str, tuple[Emulation, list[list[float]], list[dict[str, Any]]]] = {}


def run(pool: Pool, case: Case) -> tuple[Emulation, list[list[float]], list[dict[str, Any]]]:
    """The emulation, its evaluations, and what each rank saw."""
    if str(case) not in _runs:
        emulation = Emulation(case)
        evaluations = emulation.play()
        seen = pool.run(follow, len(case.ranks), case.model, case.plan, case.script, case.rows, case.optimizer)
        _runs[str(case)] = emulation, evaluations, seen
    return _runs[str(case)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_and_weights_follow_the_papers_equations(pool: Pool, case: Case) -> None:
    emulation, evaluations, seen = run(pool, case)
    for rank, mine in enumerate(seen):
        stage = case.ranks[rank]
        blocks = range(case.firsts[stage], case.firsts[stage] + case.sizes[stage])
        ends = (["prefix"] if stage == 0 else [], ["suffix"] if stage == case.stages - 1 else [])
        assert mine["layers"] == [*ends[0], *(f"blocks.{block}" for block in blocks), *ends[1]]
        if stage < case.stages - 1:
            assert mine["losses"] == [None] * case.script.count("s")
        else:
            expected = [emulation.mean_loss(number, rank) for number in range(case.script.count("s"))]
            torch.testing.assert_close(mine["losses"], expected, rtol=1e-5, atol=0)
        expected = [values[mine["lane"]] for values in evaluations]
        torch.testing.assert_close(mine["evaluations"], expected, rtol=1e-5, atol=0)
        for name, value in emulation.weights().items():
            torch.testing.assert_close(mine["weights"][name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if set(case.script) == {"s"}], ids=str)
def test_the_trace_tells_the_promised_versions(pool: Pool, case: Case) -> None:
    """Of each forward and backward as it ran; and the lists that were verified are what ran."""
    _, _, seen = run(pool, case)
    for rank, mine in enumerate(seen):
        assert mine["actions"] == mine["promised"]
        stage, replicas = case.ranks[rank], case.per_stage[case.ranks[rank]]
        actions = [Action.parse(text) for text in mine["actions"]]
        fed = range(len(case.script) * case.microbatches // (1 if case.lanes > 1 else replicas))
        own = [rank - case.ranks.index(stage) + replicas * k for k in fed]
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            versions = [(a.microbatch, a.version) for a in actions if a.kind is kind]
            assert versions == [(j, case.version(stage, j)) for j in own]
        made = [action.version for action in actions if action.kind is Kind.UPDATE]
        assert made == list(range(len(fed) // case.every))


@pytest.mark.parametrize("case", STRAIGHT, ids=str)
def test_each_stage_judges_its_own_updates(pool: Pool, case: Case) -> None:
    """The norm is that of the last update of a step, before it is clipped; a stage skips without asking the others."""
    emulation, _, seen = run(pool, case)
    tolerance = 0.02 if "precision" in case.more else 1e-4
    for stage, mine in enumerate(seen):
        for step, (norm, skipped) in enumerate(zip(mine["norms"], mine["skipped"], strict=True)):
            done = ((step + 1) * case.microbatches - case.held(stage)) // case.every
            expected = emulation.norms[stage][done - 1] if done else math.nan
            assert skipped == (done > 0 and not math.isfinite(expected))
            torch.testing.assert_close(norm, expected, rtol=tolerance, atol=0, equal_nan=True)
    assert bool(emulation.clipped) == ("clip_norm" in case.more)
    assert all(map(math.isfinite, emulation.norms[0])) == ("nonfinite" not in case.more)
    assert all(math.isfinite(norm) for norms in emulation.norms[1:] for norm in norms)


@pytest.mark.parametrize("case", STRAIGHT, ids=str)
def test_as_many_versions_as_the_papers_say(pool: Pool, case: Case) -> None:
    """Stashing d - s, vertical sync d, 2BW two; a tied weight is on the last stage twice: in use, and coming."""
    emulation, _, seen = run(pool, case)
    size = emulation.dtype.itemsize
    for stage, mine in enumerate(seen):
        own = sum(parameter.numel() for parameter in emulation.parameters[stage].values()) * size
        versions = {"pipedream": case.stages - stage, "vertical": case.stages, "2bw": 2}[case.schedule]
        borrowed = 13 * 10 * size if stage == case.stages - 1 and case.model == "TiedFive" else 0
        assert mine["parameter bytes"] == (versions * own + 2 * borrowed,) * 2


def test_the_rules_lead_apart() -> None:
    """The comparison above would not mistake one rule for another, nor for no delay at all."""
    found = {}
    for schedule in ("pipedream", "vertical", "2bw"):
        emulation = Emulation(Case(schedule, (2, 2, 1)))
        emulation.play()
        found[schedule] = emulation.weights()
    prompt = Emulation(Case("pipedream", (5,)))
    prompt.play()
    found["prompt"] = prompt.weights()
    for one in found:
        for other in found:
            apart = max((found[one][name] - value).abs().max().item() for name, value in found[other].items())
            assert apart > 1e-2 or one == other


# Of the synchronous run: 32 updates, each of 16 rows in 4 microbatches, at the main job's learning rate.
GPT_BASE = ({"schedule": "1f1b", "microbatches": 4}, 32, 16, 6e-3)
# As many rows by other schedules: updates, rows in each, learning rate, and the largest ratio of the final losses.
GPT_RUNS = {
    "stashing": ({"schedule": "pipedream", "microbatches": 4}, 128, 4, 4e-3, 1.02),
    "vertical-sync": ({"schedule": "pipedream", "vertical_sync": True, "microbatches": 4}, 128, 4, 2e-3, 1.02),
    "2bw-half-the-batch": ({"schedule": "2bw", "microbatches": 2}, 64, 8, 6e-3, 1.05),
    "2bw-same-settings": ({"schedule": "2bw", "microbatches": 4}, 32, 16, 6e-3, 1.10),
}


@pytest.fixture(scope="module")
def synchronous(pool: Pool) -> float:
    """The final validation loss of the synchronous run."""
    return pool.run(train_gpt, 2, *GPT_BASE)[0]


@pytest.mark.parametrize("name", GPT_RUNS)
def test_the_loss_on_real_text_ends_near_the_synchronous_one(pool: Pool, synchronous: float, name: str) -> None:
    """After the same number of rows. A gradient that is one update old bears a lower rate, or wants smaller updates."""
    *job, largest = GPT_RUNS[name]
    losses = pool.run(train_gpt, 2, *job)
    assert losses[0] == losses[1]
    assert synchronous < 0.6 * math.log(256)
    assert losses[0] < largest * synchronous
