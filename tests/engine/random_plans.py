"""Plans drawn at random from the whole space, and what is said of those that are refused.

`draw(seed)` gives the same case every time: a plan, which may be an impossible one, a model, an optimizer, a number of
ranks, and three steps with what a user does in them and between them. `random_runs` carries cases out.
"""

import itertools
import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from engine import models
from engine.random_techniques import draw_experts, draw_split_layers

import zeroshard as zs
from zeroshard.errors import PlanError
from zeroshard.planning.settings import flat
from zeroshard.schedule.orders import CHUNKED, SCHEDULES, STREAMING

GROUPS = {
    "pipeline_parallel.stages",
    "activations.recompute",
    "offload.parts",
    "loss_scale.value",
    "tensor_parallel.ranks",
    "expert_parallel.ranks",
}  # drawn by their names
USUAL = {field.name: field.default for field in fields(zs.Plan)}
USUAL |= {name: value for name, value in flat(zs.Plan().as_dict()) if name not in GROUPS}
DISK = "DISK"  # stands for a folder of the run's own
ALONE = ("Plain", "Tied", "Frozen", "Sometimes", "Twice", "Nested", "TwoDtypes", "Checkpointed",
         "CheckpointedReentrant", "CheckpointedInside", "Tiny", "Spiked", "Five")  # fmt: skip
CUT = ("Five", "TiedFive", "Deep", "DeepTied", "Thrifty", "Spiked", "Dropped", "Frozen", "TwoDtypes", "Nested")
DEEP = ("Deep", "DeepTied")
BY_CHUNKS = {"Plain": "Chunked", "Tied": "ChunkedTied", "Five": "Chunked", "TiedFive": "ChunkedTied"}
ADAMS = ("adamw", "adam")
OPTIMIZERS: dict[str, Any] = {
    **models.OPTIMIZERS,
    "adam": partial(torch.optim.Adam, lr=1e-2, betas=(0.8, 0.95)),
    "amsgrad": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "nesterov": partial(torch.optim.SGD, lr=5e-2, momentum=0.9, nesterov=True, weight_decay=0.01),
    "plain sgd": partial(torch.optim.SGD, lr=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-2, momentum=0.5, eps=1e-2),
}
WHOLE: dict[str, Any] = {  # need whole tensors, which have owners
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "adafactor of the paper": partial(zs.optim.Adafactor, lr=1e-2, beta1=0.9),
    "8 bits": partial(zs.optim.AdamW8bit, lr=1e-2, min_8bit_size=64),
    "lamb": partial(zs.optim.LAMB, lr=1e-2),
    "muon": partial(zs.optim.Muon, lr=1e-2),
    "sm3": partial(zs.optim.SM3, lr=5e-2, momentum=0.9),
}
FORMS = ("loop", "no_sync", "all no_sync", "zero_grad", "forwards first", "plain backward", "clip", "clip value")
BETWEEN = ("evaluate", "gathered", "write", "state_dict", "flush", "check_replicas", "resume", "resume elsewhere")
WRONG: dict[str, tuple[Any, ...]] = {
    "zero": (4, -1),
    "microbatches": (0, 1.5),
    "pipeline_parallel.schedule": ("fifo",),
    "clip_norm": (-1.0, 0),
    "offload": ("disk", 7),
    "offload.fraction": (0.0, 2),
    "timeout": (0,),
    "units": ("Block",),
    "loss_scale": ("much",),
    "loss_scale.growth": (0.5,),
    "device_memory": ("lots",),
    "pipeline_parallel.replicas": ((0, 1),),
    "pipeline_parallel.virtual_stages": (2**20,),
    "offload.delayed_warmup": (-1,),
}


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        form: "train_step", or what is special in a loop by hand.
        count: backwards of a loop by hand.
        limit, kind: of clipping by hand, the limit, and which p-norm.
        after: what is done when it is over.
    """

    form: str = "train_step"
    count: int = 1
    limit: float = 0.3
    kind: float = 2.0
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """A plan and everything around it; `plan` and `other` hold the fields that are not left out.

    Attributes:
        other: of the plan that goes on in "resume elsewhere".
        groups: the optimizer has two groups of unlike settings.
        made: the optimizer is made by the user.
        meta: the model has no values yet.
        scheduled: a learning-rate scheduler steps after each step.
        counted: losses are given by sum with counts, and data ranks have unlike numbers of rows.
        rows: of the global batch of each step.
    """

    seed: int
    ranks: int
    plan: dict[str, Any]
    other: dict[str, Any]
    model: str
    optimizer: str
    groups: bool = False
    made: bool = False
    meta: bool = False
    scheduled: bool = False
    counted: bool = False
    rows: int = 12
    steps: tuple[Step, ...] = (Step(),) * 3

    def optimizer_of(self, parameters: Any) -> torch.optim.Optimizer:
        """The optimizer over those parameters that train."""
        make = {**OPTIMIZERS, **WHOLE}[self.optimizer]
        parts: list[Any] = [p for p in parameters if p.requires_grad]
        if self.groups:
            parts = [{"params": parts[::2]}, {"params": parts[1::2], "lr": 2e-2, "weight_decay": 0.3}]
        optimizer: torch.optim.Optimizer = make(parts)
        return optimizer


@dataclass
class _Draw:
    """Fields of one plan, drawn one after the other."""

    random: random.Random
    settings: dict[str, Any] = field(default_factory=dict)

    def maybe(self, name: str, chance: float, *values: Any) -> Any:
        """With some chance, one of the values; else the default. What the field is then."""
        if self.random.random() < chance:
            self.settings[name] = self.random.choice(values)
        return self.settings.get(name, USUAL[name])


def draw(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(seed)
    theme = rng.choice(("flat", "flat", "flat", "offload", "offload", "pipeline", "pipeline", "pipeline", "wild"))
    plan = _plan(rng, theme, rng.choice((1, 2, 2, 3, 4)))
    stages = plan.get("pipeline_parallel", 1)
    ranks = rng.choice((1, 2, 2, 2, 3, 4))
    if stages > 1 and rng.random() < 0.95:
        fitting = [n for n in (1, 2, 3, 4) if n % stages == 0]
        replicas = plan.get("pipeline_parallel.replicas")
        ranks = min(4, sum(replicas)) if replicas else rng.choice(fitting or [4])
    other = _plan(rng, rng.choice((theme, "flat", "offload", "pipeline")), ranks)
    many = stages * plan.get("pipeline_parallel.virtual_stages", 1) > 5 and rng.random() < 0.9
    model = rng.choice(DEEP if many else CUT if stages > 1 else ALONE)
    adams = "offload.moments" in plan or "offload.delayed_update" in plan or "offload.disk" in plan
    optimizer = rng.choice(ADAMS if adams else tuple(OPTIMIZERS)) if rng.random() < 0.95 else "adafactor"
    groups, meta, scheduled = rng.random() < 0.25, rng.random() < 0.15, rng.random() < 0.25
    if plan.get("pipeline_parallel.schedule") in STREAMING:
        if rng.random() < 0.6:  # what the papers' equations can be compared with
            model, optimizer = rng.choice((*CUT[:5], *DEEP)), rng.choice(tuple(models.OPTIMIZERS))
            groups = meta = scheduled = False
            other = {}
        if model == "Spiked":
            plan["nonfinite"] = "skip"  # else the stage that met it stops, and the others only time out
    if rng.random() < 0.03:
        name = rng.choice(tuple(WRONG))
        plan[name] = rng.choice(WRONG[name])
    wanted = [settings.get("microbatches", 1) for settings in (plan, other)]
    rows = 12 * math.lcm(*(m for m in wanted if isinstance(m, int) and m > 0))
    if stages > 1 and (other.get("pipeline_parallel", 1) > 1 or not other) and rng.random() < 0.3:
        rows = rng.choice((24, 36))  # which pipelines cut into microbatches of unlike sizes
    split = random.Random(-(2**32) - seed)  # of its own, too
    if split.random() < 0.25:
        ranks, model = draw_split_layers(split, plan, other, ranks), split.choice(tuple(models.SPLIT))
    mixed = random.Random(-(2**33) - seed)  # likewise
    if mixed.random() < 0.25:
        ranks, model = draw_experts(mixed, plan, other, ranks), mixed.choice(tuple(models.MIXED))
    if mixed.random() < 0.2 and not adams:
        optimizer = mixed.choice(tuple(WHOLE))
    each = max(1, rows * plan.get("tensor_parallel", 1) // ranks) if stages == 1 else 1
    fits = plan.get("zero", 2) in (1, 2) and stages == 1 and "offload" not in plan
    apart = random.Random(-1 - seed)  # its own, so that a seed's other fields are as they were
    if apart.random() < (0.4 if fits else 0.01):
        plan["overlap_gather"] = True
        if plan.get("transport") != "network" and fits and apart.random() < 0.9:
            plan["transport"] = "network"
    streams = plan.get("pipeline_parallel.schedule") in STREAMING
    if apart.random() < (0.4 if model in BY_CHUNKS and not streams else 0.01):
        model = BY_CHUNKS.get(model, model)  # the others are refused
        plan["loss_chunk"] = apart.choice((1, 4, 1000))
    if apart.random() < 0.3:
        plan["rng"] = "exact"
    strict = random.Random(-(2**34) - seed)  # of its own, too
    if strict.random() < (0.3 if plan.get("zero") == 3 else 0.02):
        plan["strict"] = True
    left = random.Random(-(2**35) - seed)
    fields = {**plan, **other}
    if model == "Frozen" and not {"expert_parallel", "precision"} & fields.keys() and left.random() < 0.9:
        plan["ignored"] = other["ignored"] = ("embed", "blocks.2.*")  # which no loop trains
    if model == "Sometimes" and other.get("pipeline_parallel", 1) > 1:
        other = {}  # a pipeline refuses it in the step that leaves a block out
    if model == "CheckpointedInside" and "Block" in plan.get("fp32_modules", ()):
        plan["fp32_modules"] = ("LayerNorm",)  # its forward calls layers of blocks alone, past the casts of a block
    return Case(
        seed=seed,
        ranks=ranks,
        plan=plan,
        other=other,
        model=model,
        optimizer=optimizer,
        groups=groups,
        made=rng.random() < 0.3,
        meta=meta,
        scheduled=scheduled,
        counted=apart.random() < 0.3 and plan.get("pipeline_parallel.schedule") not in STREAMING,
        rows=rows,
        steps=tuple(_step(rng, BETWEEN if other else BETWEEN[:-1], stages, each, wanted[0]) for _ in range(3)),
    )


def _step(rng: random.Random, between: tuple[str, ...], stages: int, rows: int, microbatches: int) -> Step:
    after = tuple(rng.sample(between, rng.choice((0, 0, 1, 1, 2))))
    if stages > 1 or rng.random() < 0.5:
        return Step(after=after)
    counts = [n for n in (1, 2, 3, 4) if rows % n == 0]
    count = microbatches if microbatches in counts and rng.random() < 0.5 else rng.choice(counts)
    return Step(rng.choice(FORMS), count, rng.choice((0.05, 0.3, 50.0)), rng.choice((2.0, float("inf"), 1.0)), after)


def _plan(rng: random.Random, theme: str, ranks: int) -> dict[str, Any]:
    """The fields of a plan that are not left out."""
    d = _Draw(rng)
    chances = {"flat": (0.02, 0.02), "pipeline": (1.0, 0.02), "offload": (0.02, 1.0), "wild": (0.5, 0.5)}
    pipelined, offloaded = (rng.random() < chance for chance in chances[theme])
    zeros = (1, 2, 3) if offloaded else (0, 1, 2, 3)
    d.maybe("zero", 0.75, *zeros) if rng.random() < 0.93 else d.maybe("zero", 1, 0, 1, 2, 3)
    d.maybe("shard_group", 0.02 if pipelined or offloaded else 0.2, 1, 2, 2, ranks)
    precision = d.maybe("precision", 0.4, "bf16", "fp16", "fp32")
    d.maybe("fp32_modules", 0.15, ("LayerNorm",), ("head",), ("Block", "embed"))
    d.maybe("transport", 0.4, "network", "network", "auto", "shared")
    d.maybe("reduce_dtype", 0.15, "bf16", "fp16", "fp32")
    d.maybe("loss_scale", 0.15, "dynamic", "off", 128.0, 1000)
    if precision == "fp16" or rng.random() < 0.05:
        d.maybe("loss_scale.initial", 0.7, 256.0, 1024.0, 4096.0)
        d.maybe("loss_scale.growth", 0.3, 1.0, 4.0)
        d.maybe("loss_scale.backoff", 0.3, 0.25, 1.0)
        d.maybe("loss_scale.window", 0.4, 1, 2)
        d.maybe("loss_scale.hysteresis", 0.3, 1, 2)
        d.maybe("loss_scale.floor", 0.2, 0.5, 16.0)
    d.maybe("microbatches", 0.9 if pipelined else 0.5, *((2, 3, 4, 4, 6) if pipelined else (1, 2, 3, 4)))
    d.maybe("reduce_every", 0.25, "microbatch", "step")
    d.maybe("clip_norm", 0.3, 0.05, 0.5, 1000.0)
    d.maybe("nonfinite", 0.25, "skip", "ignore", "raise")
    d.maybe("units", 0.2, (), ("Block",), ("blocks.0", "blocks.2"))
    d.maybe("seed", 0.2, 1, -5, 2**40)
    d.maybe("device_memory", 0.15, "1GiB", 2**30)
    d.maybe("timeout", 0.1, 20, 60.0)
    _draw_pipeline(d, pipelined, ranks)
    _draw_offload(d, offloaded)
    return d.settings


def _draw_pipeline(d: _Draw, on: bool, ranks: int) -> None:
    rng, odd = d.random, 0.008
    stages = d.maybe("pipeline_parallel", 1.0, *((2, 2, 3, 4) if rng.random() < 0.4 else (max(2, ranks),))) if on else 1
    schedule = d.maybe("pipeline_parallel.schedule", 0.85 if on else odd, *SCHEDULES)
    d.maybe("pipeline_parallel.virtual_stages", 0.6 if on and schedule in CHUNKED else 0.03 if on else odd, 2, 3)
    if on and schedule in ("interleaved", "2bw") and rng.random() < 0.85:
        d.settings["microbatches"] = stages * rng.choice((1, 2))
    fitting = [r for r in ((1, 1), (2, 1), (1, 2), (2, 2), (1, 2, 1), (1, 1, 1), (2, 1, 1), (1, 1, 1, 1), (3, 1))
               if len(r) == stages or rng.random() < 0.02]  # fmt: skip
    d.maybe("pipeline_parallel.replicas", (0.25 if on else odd) if fitting else 0, *fitting)
    cuts = stages * d.settings.get("pipeline_parallel.virtual_stages", 1) - 1
    if 0 < cuts <= 5:
        splits = [tuple(f"blocks.{n}" for n in sorted(rng.sample(range(5), min(cuts, 5)))) for _ in range(2)]
        d.maybe("pipeline_parallel.split", 0.35, *splits, ("blocks.1",))
    elif rng.random() < odd:
        d.settings["pipeline_parallel.split"] = ("blocks.1",)
    d.maybe("pipeline_parallel.balance", 0.6 if on else 0.1, "parameters", "parameters", "time")
    _draw_activations(d)
    d.maybe("pipeline_parallel.vertical_sync", 0.4 if on and schedule == "pipedream" else 0.02 if on else odd, True)


def _draw_activations(d: _Draw) -> None:
    policies = ("blocks", "off", "sqrt", "selective", "selective", "auto")
    chosen = d.maybe("activations", 0.3, *policies)
    if "activations" not in d.settings:
        d.maybe("recompute", 0.15, *policies)
    if "auto" in (chosen, d.settings.get("recompute")):
        d.maybe("device_memory", 0.95, "1GiB")  # else it is refused
    if chosen == "selective":
        d.maybe("activations.operations", 0.4, ("norms",), ("attention", "activations"), ())
    d.maybe("activations.save_sums", 0.1, False)
    d.maybe("activations.arena", 0.4 if chosen in ("blocks", "sqrt") else 0.01, True)
    d.maybe(
        "activations.compress", 0.2, ("sparse",), ("binarize", "sparse"), ("binarize", "inplace"), ("binarize", "fp16")
    )


def _draw_offload(d: _Draw, on: bool) -> None:
    rng, odd = d.random, 0.008
    ways = ("optimizer", "optimizer", "optimizer,parameters", "optimizer,activations", "activations",
            "optimizer,parameters,activations", "activations,optimizer", "parameters")  # fmt: skip
    offload = d.maybe("offload", 1.0 if on else 0.0, *ways)
    below, streamed = "optimizer" in offload, "parameters" in offload
    if streamed and rng.random() < 0.9:
        d.settings["zero"] = 3
    d.maybe("offload.fraction", (0.03 if streamed else 0.3) if below else odd, 0.5, 0.3, 1.0)
    disk = d.maybe("offload.disk", 0.3 if below else odd, DISK)
    d.maybe("offload.disk_parameters", (0.5 if streamed and disk else 0.02) if below else odd, True)
    d.maybe("offload.moments", 0.3 if below else odd, "bf16", "8bit", "fp32")
    d.maybe("offload.delayed_update", 0.35 if below else odd, True)
    d.maybe("offload.delayed_warmup", 0.6 if below else odd, 0, 1, 2)
    d.maybe("offload.speculate", 0.25 if below else odd, False)


def plan_of(settings: Mapping[str, Any], folder: str) -> zs.Plan:
    """The plan, with its own folder in place of `DISK`.

    Raises:
        PlanError: the settings do not combine.
    """
    return zs.Plan.from_dict({name: folder if value == DISK else value for name, value in settings.items()})


@dataclass(frozen=True)
class Refusal:
    """A plan that cannot be made.

    Attributes:
        needed: the fewest of the fields that bring the same message alone.
    """

    message: str
    needed: tuple[str, ...]

    @property
    def complaint(self) -> str | None:
        """What is missing in the message, if anything: the settings, or the way out."""
        named = {name for name in USUAL if re.search(rf"\b{name.rpartition('.')[2]}\b", self.message)}
        alone = re.match(r"([\w.]+) is .*; (it )?must be", self.message)  # a value out of range, whatever else there is
        if not named & set(self.needed) or len(named) < (1 if alone else min(2, len(self.needed))):
            return f"it is about {', '.join(self.needed)} and names {', '.join(sorted(named)) or 'none of them'}"
        return None if has_way_out(self.message) else "it does not say the way out"


def has_way_out(message: str) -> bool:
    """Whether a message tells its reader what to do."""
    doing = "use|set|cast|leave|make|start|give|take|write|say|call|build|put|raise|keep|convert|name|did you mean"
    return re.search(rf"(must (be|have)|[.;:,] (or )?({doing}) |^.*; only )", message, re.IGNORECASE) is not None


def refusal_of(settings: Mapping[str, Any]) -> Refusal | None:
    """Why a plan cannot be made; None if it can."""
    message = message_of(settings)
    if message is None:
        return None
    for count in range(1, 5):
        for needed in itertools.combinations(settings, count):
            if message_of({name: settings[name] for name in needed}) == message:
                return Refusal(message, needed)
    return Refusal(message, tuple(settings))


def message_of(settings: Mapping[str, Any]) -> str | None:
    """The message with which a plan is refused; None if it can be made."""
    try:
        plan_of(settings, DISK)
    except PlanError as error:
        return str(error)
    return None


def drawn_fields() -> set[str]:
    """Every field that is ever drawn; a new one of `Plan` is to be drawn, too."""
    return {name for seed in range(400) for name in draw(seed).plan} & USUAL.keys()
