"""PipeDream and 2BW by hand: a single process follows their papers' update equations with a history of weights.

The emulation knows nothing of our schedules. It takes microbatch after microbatch in the order in which they enter the
pipeline, computes each gradient on the whole model with the weights of every stage as old as the paper says, and lets
each stage's optimizer update the stage's latest weights.
"""

import math
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from engine.models import OPTIMIZERS, build
from pipeline.pipelines import data
from torch import Tensor, nn
from torch.func import functional_call


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
    script: str = "sss"
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
    def data_ranks(self) -> int:
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
        plan = {
            "pipeline_parallel": self.stages,
            "pipeline_parallel.schedule": schedule,
            "microbatches": self.microbatches,
            "pipeline_parallel.split": split,
        }
        return {
            **plan,
            "pipeline_parallel.vertical_sync": self.schedule == "vertical",
            "pipeline_parallel.replicas": self.replicas,
            **self.more,
        }

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
                    evaluations.append(
                        [self.evaluate(len(self.losses), data_rank) for data_rank in range(self.case.data_ranks)]
                    )
        return evaluations

    def flush(self) -> None:
        """Count versions and microbatches anew."""
        self.history = [[self._copy(stage)] for stage in range(self.case.stages)]
        self.sums: list[dict[str, Tensor]] = [{} for _ in range(self.case.stages)]
        self.j = 0

    def step(self, number: int) -> None:
        """All microbatches of all lanes."""
        case = self.case
        data_ranks = [data(number, data_rank, case.data_ranks, case.rows) for data_rank in range(case.data_ranks)]
        self.losses.append({})
        for k in range(case.microbatches):
            for data_rank, batch in enumerate(data_ranks):
                first, last = (len(batch) * end // case.microbatches for end in (k, k + 1))
                share = (last - first) / len(batch) if case.every > 1 else 1.0
                self.losses[-1][k, data_rank] = self._microbatch(batch[first:last], number, share)

    def evaluate(self, number: int, data_rank: int) -> float:
        batch = data(number, data_rank, self.case.data_ranks, self.case.rows)
        return functional_call(self.model, self.weights(), (batch, number)).item()

    def weights(self) -> dict[str, Tensor]:
        """The latest of all stages."""
        return {name: value for stage in range(self.case.stages) for name, value in self._copy(stage).items()}

    def mean_loss(self, number: int, rank: int) -> float:
        """Of a step, on a rank of the last stage."""
        case, replicas = self.case, self.case.per_stage[-1]
        replica = rank - case.ranks.index(case.stages - 1)
        found = self.losses[number]
        mine = [
            v for (k, data_rank), v in found.items() if (data_rank if case.data_ranks > 1 else k % replicas) == replica
        ]
        rows = len(data(number, 0, case.data_ranks, case.rows))
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
