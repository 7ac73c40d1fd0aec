"""Plans of a second generator, which shares no model, draw or reference with `random_plans`.

Each case trains on its ranks and beside them in a plain loop: mixtures token by token, versions of PipeDream (SOSP
2019, section 3.3) and 2BW (2006.09503, section 3.1) as lists of weights, fp16 with a loss scale by hand. `draw(seed,
ranks)` is the case of a seed.
"""

import copy
import hashlib
import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zeroshard as zs

WIDTH, WORDS, TOKENS = 8, 11, 6
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SLICED: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01, eps=1e-4),
    "amsgrad": partial(torch.optim.AdamW, lr=0.01, amsgrad=True, eps=1e-3),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.003, eps=1e-2, centered=True, momentum=0.3),
    "nadam": partial(torch.optim.NAdam, lr=0.01, eps=1e-3),
    "adamax": partial(torch.optim.Adamax, lr=0.01, eps=1e-3),
}
WHOLE: dict[str, Any] = {
    "adafactor": partial(zs.optim.Adafactor, lr=0.01),
    "sm3": partial(zs.optim.SM3, lr=0.05, momentum=0.9),
    "lamb": partial(zs.optim.LAMB, lr=0.01),
    "muon": partial(zs.optim.Muon, lr=0.01),
}
STREAMS = ("pipedream", "2bw")
Batch = tuple[Tensor, Tensor]


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up_proj, self.down_proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(F.relu(self.up_proj(self.norm(x))))


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.norm = 2, WIDTH // 2, nn.LayerNorm(WIDTH)
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.v_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y, split = self.norm(x), (-1, self.head_dim)
        heads = [each(y).unflatten(-1, split).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.o_proj(mixed.transpose(1, 2).flatten(2))


class Recur(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.gain = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.gru(x)[0]


class ByToken(nn.Module):
    """A mixture of experts, token by token; parameters are named as those of `zs.moe.MoE`."""

    def __init__(self, experts: int, choices: int, capacity: float, balance: float) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, experts, bias=False), nn.Module()
        self.experts.up = nn.Parameter(torch.zeros(experts, 6, WIDTH))
        self.experts.down = nn.Parameter(torch.zeros(experts, WIDTH, 6))
        self.choices, self.capacity, self.balance, self.penalty = choices, capacity, balance, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        tokens, (up, down) = x.flatten(0, 1), (self.experts.up, self.experts.down)
        count, experts = len(tokens), len(up)
        scores = self.router(tokens).softmax(-1)
        chosen = scores.argsort(dim=-1, descending=True, stable=True)[:, : self.choices]  # of equal scores the first
        gates = scores.gather(-1, chosen)
        room, outputs = [self.choices * count * self.capacity / experts] * experts, list(torch.zeros_like(tokens))
        for choice in range(self.choices):
            for token in range(count):
                expert = int(chosen[token, choice])
                if room[expert] > 1e-9:
                    hidden = F.relu(up[expert] @ tokens[token])
                    outputs[token] = outputs[token] + gates[token, choice] * (down[expert] @ hidden)
                room[expert] -= 1
        shares = torch.bincount(chosen.flatten(), minlength=experts) / chosen.numel()
        self.penalty = self.balance * experts * (shares.to(scores.dtype) * scores.mean(0)).sum()
        return torch.stack(outputs).view(x.shape)


@dataclass
class Case:
    """A plan on so many ranks, in `lanes` of different data, and all around it."""

    seed: int
    ranks: int
    theme: str
    plan: dict[str, Any] = field(default_factory=dict)
    lanes: int = 1
    blocks: tuple[str, ...] = ()
    mixture: tuple[int, int, float, float] = (4, 1, 1.0, 0.1)  # experts, choices, capacity, weight of the balance
    odd: str = ""
    optimizer: str = "sgd"
    groups: bool = False
    steps: int = 3
    flushes: tuple[int, ...] = ()

    @property
    def parts(self) -> int:
        """Microbatches of a step."""
        count: int = self.plan.get("microbatches", 1)
        return count

    @property
    def pipeline(self) -> zs.Pipeline:
        """Its stages."""
        return zs.Plan(**self.plan).pipeline

    def batch(self, step: int, lane: int) -> Batch:
        """The batch of a lane, of two rows for each microbatch."""
        drawn = torch.Generator().manual_seed(self.seed * 1_000_003 + step * 101 + lane)
        tokens, labels = torch.randint(WORDS, (2, 2 * self.parts, TOKENS), generator=drawn)
        return tokens, labels

    def microbatches(self, step: int) -> list[list[Batch]]:
        """By number, those of all lanes."""
        lanes = [zip(*(each.chunk(self.parts) for each in self.batch(step, n)), strict=True) for n in range(self.lanes)]
        return [list(number) for number in zip(*lanes, strict=True)]

    def optimizer_of(self, parameters: Any) -> torch.optim.Optimizer:
        """The optimizer, perhaps of two groups."""
        trained: list[Any] = [each for each in parameters if each.requires_grad]
        if self.groups:
            trained = [{"params": trained[::2]}, {"params": trained[1::2], "lr": 0.004}]
        optimizer: torch.optim.Optimizer = {**SLICED, **WHOLE}[self.optimizer](trained)
        return optimizer


class Net(nn.Module):
    """The model of a case; `plain` with mixtures token by token."""

    def __init__(self, case: Case, plain: bool) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList()
        for kind in case.blocks:
            if kind == "mixture":
                self.blocks.append(ByToken(*case.mixture) if plain else _mixture(*case.mixture))
            else:
                self.blocks.append({"feed": Feed, "attend": Attend, "recur": Recur}[kind]())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if case.odd == "tied":
            self.head.weight = self.embed.weight
        if case.odd == "unused":
            self.extra = nn.Linear(3, 3)
        for name, parameter in self.named_parameters():  # the same in both kinds
            drawn = torch.Generator().manual_seed(int(hashlib.md5(f"{case.seed} {name}".encode()).hexdigest()[:8], 16))
            scale, mean = (0.35, 0.0) if parameter.dim() > 1 else (0.1, float("norm.weight" in name))
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=drawn) * scale + mean)
        if case.odd == "frozen":
            self.embed.requires_grad_(False)
            self.blocks[1].requires_grad_(False)
        self.to(torch.float32 if case.theme in ("half", "offload") else torch.float64)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels.flatten())


def _mixture(experts: int, choices: int, capacity: float, balance: float) -> nn.Module:
    losses = zs.moe.Losses(balance=balance)
    router = zs.moe.router_of("switch", WIDTH, experts, k=choices, capacity=capacity, noise=None, losses=losses)
    return zs.moe.MoE(WIDTH, 6, experts, router=router)


def draw(seed: int, ranks: int) -> Case:
    """The case of a seed."""
    rng = random.Random(seed * 7919 + ranks)
    case = Case(
        seed, ranks, rng.choice(("stages", "stream", "stream", "tensor", "experts", "half", "whole", "offload"))
    )
    plan, pick = case.plan, rng.choice
    plan["zero"], plan["microbatches"] = pick((0, 1, 2, 3)), pick((1, 2, 4))
    kinds, together = ("feed", "attend", "recur"), 1
    case.odd, case.groups, case.steps = pick(("", "", "tied", "frozen", "unused")), rng.random() < 0.3, pick((3, 4))
    case.optimizer = pick(tuple(WHOLE) if case.theme == "whole" else tuple(SLICED))
    if case.theme in ("stages", "stream") and ranks > 1:
        together = pick((2, ranks)) if ranks % 2 == 0 else ranks
        _draw_stages(rng, case, together)
    elif case.theme == "tensor" and ranks > 1:
        together = pick((2, ranks)) if ranks % 2 == 0 else ranks
        kinds = ("feed", "attend") if together == 2 else ("feed",)  # two heads
        plan["tensor_parallel"] = zs.TensorParallel(together, sequence=pick((True, False)))
    elif case.theme == "experts":
        kinds, plan["expert_parallel"] = ("feed", "mixture"), pick((1, ranks))
        case.mixture = (pick((4, 5)), pick((1, 2)), pick((0.5, 1.0, 1.25)), pick((0.0, 0.1)))
    elif case.theme == "half":
        plan["precision"] = pick(("bf16", "fp16"))
        if plan["precision"] == "fp16":
            plan["loss_scale"] = zs.LossScale("dynamic", initial=pick((256.0, 2.0**24)), window=pick((1, 2)))
        case.optimizer = "sgd"
    elif case.theme == "offload":
        plan["zero"], plan["offload"] = 3, pick(("optimizer", "optimizer,parameters", "optimizer,activations"))
    case.lanes = ranks // together
    stages = case.pipeline
    case.blocks = tuple(pick(kinds) for _ in range(max(3, stages.stages * stages.virtual_stages)))
    if stages.stages > 1:
        plan["units"] = tuple(f"blocks.{number}" for number in range(len(case.blocks)))
    if rng.random() < 0.35:
        plan["clip_norm"] = pick((0.05, 0.3))
    if plan["zero"] == 3 and "offload" not in plan and rng.random() < 0.4:
        plan["strict"] = True
    elif rng.random() < 0.4 and case.theme != "stream":
        plan["transport"] = "network"
    if case.theme not in ("stream", "half") and rng.random() < 0.3:
        plan["activations"] = pick(("blocks", "sqrt", "selective"))
    case.flushes = tuple(n for n in range(case.steps) if n == case.steps - 1 or rng.random() < 0.3)
    return case


def _draw_stages(rng: random.Random, case: Case, stages: int) -> None:
    schedule, virtual = rng.choice(("naive", "gpipe", "1f1b", "interleaved", "zb-h1")), 1
    if case.theme == "stream":
        schedule, case.plan["zero"], case.optimizer = rng.choice(STREAMS), rng.choice((0, 1, 2)), "adamw"
        case.groups, case.odd = False, rng.choice(("", "tied", "unused"))
    if schedule in ("2bw", "interleaved"):
        case.plan["microbatches"], virtual = stages, 1 + (schedule == "interleaved")
    sync = schedule == "pipedream" and rng.random() < 0.4
    case.plan["pipeline_parallel"] = zs.Pipeline(
        stages, schedule=schedule, virtual_stages=virtual, balance="parameters", vertical_sync=sync
    )


def perform(mesh: zs.Mesh, case: Case) -> dict[str, Any]:
    """One rank's part: its losses, norms, loss scales and skips, the weights at each flush, and the split."""
    warnings.simplefilter("ignore")
    example = tuple(each[:2] for each in case.batch(0, 0))
    plan = zs.Plan(timeout=20.0, **case.plan)
    engine = zs.Engine(Net(case, plain=False), case.optimizer_of, plan, mesh=mesh, example=example)
    steps, weights = [], []
    for number in range(case.steps):
        result = engine.train_step(case.batch(number, engine.data_rank))
        loss = math.nan if result.loss is None else float(result.loss)
        steps.append((loss, result.grad_norm, result.loss_scale, result.skipped))
        if number in case.flushes:
            weights.append(engine.state_dict())
    return {"steps": steps, "weights": weights, "split": engine.split}


class Plain:
    """The case in one process.

    Args:
        split: the first layers of the chunks but the first.
    """

    def __init__(self, case: Case, split: Sequence[str]) -> None:
        self.case, self.model = case, Net(case, plain=True)
        self.named = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
        self.optimizer = case.optimizer_of(self.model.parameters())
        firsts = [int(first.rpartition(".")[2]) if "blocks" in first else math.inf for first in split]
        self.stage = {name: sum(_layer(name) >= first for first in firsts) for name in self.named}
        self.steps: list[tuple[float, float, float, bool]] = []
        self.weights: list[dict[str, Tensor]] = []

    def play(self) -> None:
        """All steps."""
        case, scaling = self.case, zs.Plan(**self.case.plan).loss_scaling
        scale, good = scaling.initial if case.plan.get("precision") == "fp16" else 1.0, 0
        versions = self._now(), self._now()
        fed: list[dict[str, Tensor]] = [versions[0]]  # of the weights since the last flush
        for number in range(case.steps):
            groups = case.microbatches(number)
            if case.pipeline.schedule == "pipedream":
                for lanes in groups:
                    self._update(self._gradients(self._seen(fed), [lanes], 1.0)[1], stages=True)
                    fed.append(self._now())
            else:
                used = fed[max(len(fed) - 2, 0)] if case.pipeline.schedule == "2bw" else fed[-1]
                loss, gradients = self._gradients(used, groups, scale)
                norm = _norm(gradients.values())
                skipped = not math.isfinite(norm)
                self.steps.append((loss, norm, scale, skipped))
                if not skipped:
                    self._update(gradients, stages=case.pipeline.schedule == "2bw")
                    good += 1
                fed.append(self._now())
                if case.plan.get("precision") == "fp16" and (skipped or good == scaling.window):
                    scale, good = scale * (scaling.backoff if skipped else scaling.growth), 0
            if number in case.flushes:
                fed = [self._now()]
                self.weights.append({name: each.clone() for name, each in self.model.state_dict().items()})

    def _seen(self, fed: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The version of each weight that microbatch number j since a flush sees: j - (d - 1 - s) on stage s of d."""
        pipeline, j = self.case.pipeline, len(fed) - 1
        lags = {n: pipeline.stages - 1 - (0 if pipeline.vertical_sync else stage) for n, stage in self.stage.items()}
        return {name: fed[max(0, j - lag)][name] for name, lag in lags.items()}

    def _now(self) -> dict[str, Tensor]:
        return {name: each.detach().clone() for name, each in self.named.items()}

    def _gradients(
        self, used: Mapping[str, Tensor], groups: Sequence[Sequence[Batch]], scale: float
    ) -> tuple[float, dict[str, Tensor]]:
        """The mean loss of the microbatches under the weights `used`, and its gradients."""
        model, total, sums = copy.deepcopy(self.model), 0.0, dict[str, Tensor]()
        model.load_state_dict(dict(used), strict=False)
        model.to(DTYPES.get(self.case.plan.get("precision", ""), next(iter(used.values())).dtype))
        count = sum(map(len, groups))
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        for batch in (batch for lanes in groups for batch in lanes):
            loss = model(*batch)
            penalties = [each.penalty for each in model.modules() if isinstance(each, ByToken)]
            found = torch.autograd.grad(
                sum(penalties, loss) * (scale / len(groups)), list(trained.values()), allow_unused=True
            )
            for name, gradient in zip(trained, found, strict=True):
                if gradient is not None:
                    wide = gradient.to(used[name].dtype) * (len(groups) / (scale * count))
                    sums[name] = sums[name] + wide if name in sums else wide
            total += loss.item() / count
        return total, sums

    def _update(self, gradients: dict[str, Tensor], stages: bool) -> None:
        """One update; each stage is clipped alone to the limit over √d where there is no flush."""
        limit, places = self.case.plan.get("clip_norm", math.inf), set(self.stage.values()) if stages else {None}
        for place in places:
            own = [name for name in gradients if place is None or self.stage[name] == place]
            most = limit / math.sqrt(self.case.pipeline.stages) if stages else limit
            factor = min(1.0, most / (_norm(gradients[name] for name in own) + 1e-6))
            for name in own:
                self.named[name].grad = gradients[name] * factor
        self.optimizer.step()
        self.optimizer.zero_grad()


def _layer(name: str) -> float:
    """The number of the block of a parameter; -1 before the blocks, and infinity after them."""
    if name.startswith("blocks."):
        return int(name.split(".")[1])
    return -1 if name.startswith("embed") else math.inf


def _norm(gradients: Any) -> float:
    return math.sqrt(sum(float(each.double().square().sum()) for each in gradients))


def differences(case: Case, answers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The places in which the ranks and the plain loop differ, which for 16 bits are those above 2 %."""
    plain = Plain(case, answers[0]["split"])
    plain.play()
    limit = {"half": 2e-2, "offload": 3e-5, "whole": 1e-5, "experts": 1e-6}.get(case.theme, 1e-8)
    for number, (found, wanted) in enumerate(zip(answers[0]["weights"], plain.weights, strict=True)):
        for name, value in wanted.items():
            unlike = (found[name].double() - value.double()).abs().max() / (value.double().abs().max() + 1e-3)
            if not unlike <= limit:
                yield f"{name} differs by {unlike:.1e} at flush {number}"
        if any(not torch.equal(other["weights"][number][name], found[name]) for other in answers for name in found):
            yield f"ranks differ at flush {number}"
    if case.pipeline.streams:
        return
    for number, (loss, norm, scale, skipped) in enumerate(plain.steps):
        shown = [answer["steps"][number] for answer in answers]
        if any(each[2:] != (scale, skipped) for each in shown):
            yield f"loss scale or skips are {shown} in step {number}, and {scale, skipped} in the plain loop"
        mean = sum(each[0] for each in shown) / len(shown)
        for word, one, other in (("loss", mean, loss), ("norm", shown[0][1], norm)):
            if not skipped and abs(one - other) > max(limit, 3e-7) * max(1.0, abs(other)):
                yield f"{word} {one} in step {number}, and {other} in the plain loop"
