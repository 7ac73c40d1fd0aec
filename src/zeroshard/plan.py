"""The plan: everything that decides how a model is trained, in one frozen, validated object."""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from zeroshard.errors import ConfigError, PlanError
from zeroshard.moe.policy import ExpertParallel
from zeroshard.offload.policy import Offload
from zeroshard.pipeline.policy import Pipeline
from zeroshard.planning.foreign_names import explains_unknown
from zeroshard.planning.settings import (
    check_choice,
    check_flag,
    check_number,
    check_whole,
    flat,
    group_from,
    names_of,
    short_form,
    shown,
)
from zeroshard.precision.policy import LossScale
from zeroshard.recompute.policy import RECOMPUTE, Activations, RecomputeName
from zeroshard.schedule import Loan, PipelineSchedule
from zeroshard.tensor.policy import TensorParallel
from zeroshard.text import parse_bytes

if TYPE_CHECKING:
    from torch import nn


LOG = logging.getLogger(__name__)
SEARCHED = (  # by `Plan.auto`, which keeps all other settings
    *("zero", "shard_group", "microbatches", "activations.recompute", "overlap_gather"),
    *("offload.parts", "offload.fraction"),
    *(f"pipeline_parallel.{name}" for name in ("stages", "schedule", "virtual_stages", "replicas", "split")),
    *("pipeline_parallel.vertical_sync", "tensor_parallel.ranks"),
)
SEARCHED_UNLESS_GIVEN = (  # likewise, where they are at their defaults
    *("expert_parallel.ranks", "loss_chunk", "offload.disk", "offload.disk_parameters", "offload.speculate"),
)
GROUPS: dict[str, Any] = {
    "loss_scale": LossScale,
    "pipeline_parallel": Pipeline,
    "tensor_parallel": TensorParallel,
    "expert_parallel": ExpertParallel,
    "activations": Activations,
    "offload": Offload,
}
CHOICES: dict[str, tuple[Any, ...]] = {
    "zero": (0, 1, 2, 3),
    "precision": ("fp32", "bf16", "fp16"),
    "transport": ("auto", "shared", "network"),
    "reduce_dtype": (None, "fp32", "bf16", "fp16"),
    "reduce_every": ("auto", "microbatch", "step"),
    "nonfinite": ("raise", "skip", "ignore"),
    "recompute": (None, *RECOMPUTE),
    "rng": ("fast", "exact"),
}
RENAMED = {  # settings by their names of earlier versions, in stored plans and on the command line
    "shard_ranks": "shard_group",
    **{name: f"pipeline_parallel.{name}" for name in ("stages", "schedule", "replicas", "split", "balance")},
    "vertical_sync": "pipeline_parallel.vertical_sync",
    "chunks": "pipeline_parallel.virtual_stages",
    "offload_share": "offload.fraction",
    **{f"offload_{name}": f"offload.{name}" for name in ("disk", "disk_parameters", "moments")},
    **{name: f"offload.{name}" for name in ("delayed_update", "delayed_warmup", "speculate")},
    **{
        f"loss_scale_{name}": f"loss_scale.{name}"
        for name in ("initial", "growth", "backoff", "window", "hysteresis", "floor")
    },
}
SHORT_FORMS = {"recompute": "activations.recompute"}  # settings by the names of fields of the plan that say the same
RENAMED_VALUES: dict[str, dict[Any, Any]] = {  # by setting: values of earlier versions
    "recompute": {"auto": "schedule", "chunk": "blocks"},
}


@explains_unknown
@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """How to train: the slices that each rank keeps, the precision, and the parts of a step.

    docs/settings.md and `zeroshard train --help-all` explain every setting.

    Raises:
        PlanError: a value out of range, or two settings that do not combine, with the way out.
    """

    ALIASES: ClassVar[Mapping[str, Sequence[str]]] = {  # options of the command line as other programs call them
        "pipeline_parallel": ("--pp",),
        "tensor_parallel": ("--tp",),
        "expert_parallel": ("--ep",),
        "microbatches": ("--gradient-accumulation-steps",),
        "clip_norm": ("--max-grad-norm",),
    }
    _search: ClassVar[Callable[..., "Plan"] | None] = None  # of the planner; the package sets it on first use
    zero: Literal[0, 1, 2, 3] = 2
    """ZeRO stage: 0 keeps everything on every rank, 1 slices optimizer states, 2 gradients too, 3 parameters too."""
    shard_group: int | None = None
    """Ranks that slice among themselves, neighbours by number; each such group holds a copy of the others' slices. All
    ranks by default."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype of computation. fp32 leaves the model's dtypes alone; 16-bit parameters always have fp32 master weights."""
    fp32_modules: tuple[str, ...] = ()
    """Classes or paths of modules that compute in fp32 under bf16 or fp16."""
    transport: Literal["auto", "shared", "network"] = "auto"
    """How slices get from rank to rank: through memory that they share ("shared": all ranks are processes of one
    machine and compute on its CPUs), or torch.distributed ("network"); "auto" shares where that is possible."""
    strict: bool = False
    """At zero=3, gather each unit for its use in every case, on one rank and where ranks could share memory too: so a
    run on one machine refuses the reads of parameters that a cluster refuses. `transport` is "network" then."""
    overlap_gather: bool = False
    """At stages 1 and 2 over the network, let `step` return while updated parameters are gathered: the next forward
    waits for them unit by unit, and so do nearly all other reads of parameters (exceptions: docs/zero.md)."""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Dtype of gradients on the wire; by default their own, which loses nothing. Sums are always made in fp32."""
    loss_scale: float | Literal["auto", "dynamic", "off"] | LossScale = "auto"
    """A fixed loss scale, "dynamic", or "off"; "auto" is dynamic for fp16 and off otherwise. `LossScale` sets how a
    dynamic one grows and backs off."""
    microbatches: int = 1
    """Microbatches per step of `train_step`."""
    pipeline_parallel: int | Pipeline = 1
    """Pipeline stages; `Pipeline(stages, schedule=..., ...)` sets how they run."""
    tensor_parallel: int | TensorParallel = 1
    """Ranks that split each layer among themselves; `TensorParallel(ranks, sequence=..., layers=...)` sets how."""
    expert_parallel: int | ExpertParallel = 1
    """Ranks that share out the experts of each mixture among themselves; `ExpertParallel(ranks, two_level=...)` sets
    how."""
    activations: RecomputeName | Activations = "schedule"
    """What a backward computes again of the activations; `Activations(recompute, operations=...)` sets how."""
    recompute: RecomputeName | None = None
    """Short form of `activations` for its first setting, which the plan then has: "off", "blocks", "sqrt",
    "selective" or "auto"."""
    loss_chunk: int | None = None
    """Rows (tokens) of which logits exist together while the loss of a language model is computed (docs/losses.md): of
    the built-in model, which chooses by default, and of causal models of transformers, which else hold all logits."""
    reduce_every: Literal["auto", "microbatch", "step"] = "auto"
    """When gradients are reduced: after each microbatch, or once a step after adding up locally (less on the wire,
    whole gradients kept meanwhile). "auto": once a step at stage 0 and in pipelines, else after each microbatch, so
    that stages 1 to 3 add in the same order and agree bit for bit."""
    clip_norm: float | None = None
    """Largest 2-norm of the whole gradient; longer ones are scaled down to it. Schedules that never flush clip each of
    the d stages alone, to this by √d, which keeps the whole within it."""
    nonfinite: Literal["raise", "skip", "ignore"] = "raise"
    """NaN or infinite gradients without loss scaling raise an error, skip the update, or are ignored."""
    units: tuple[str, ...] | None = None
    """Classes or paths of the modules that are units; by default the repeated blocks, () for one unit in all."""
    ignored: tuple[str, ...] = ()
    """Parameters that stay whole and the user's own on each rank, as FSDP2's `ignored_params`: their names, paths or
    classes of modules, or patterns (`blocks.*.gate`). No gradient of theirs is reduced, and no update changes them."""
    seed: int = 0
    """Seed of the initial weights of a model on the meta device, and of exact random numbers."""
    rng: Literal["fast", "exact"] = "fast"
    """Random numbers of modules in training, such as dropout's: torch's own of each rank ("fast"), or keyed by step,
    module and row of the whole batch ("exact"), so that they are those of one process under any plan."""
    device_memory: str | int | None = None
    """Budget for all bytes that the ledger counts on the device, activations included; a number or like "512MiB"."""
    offload: str | Offload = ""
    """Parts of the training state kept off the device, such as "optimizer" (states and updates in host memory);
    `Offload(parts, disk=..., ...)` sets how."""
    timeout: float = 300.0
    """Seconds that a collective may wait before it is an error."""

    def __post_init__(self) -> None:
        self._check_choices()
        for name, kind in GROUPS.items():
            group = group_from(kind, name, getattr(self, name))
            object.__setattr__(self, name, short_form(group))
        group = "activations" if isinstance(self.activations, str) else "activations.recompute"
        recompute = group if self.recompute is None else "recompute"
        self._take_short_forms()
        self._check_ranges()
        transports = {("auto", True, 3): "network"}
        transport = transports.get((self.transport, self.strict, self.zero), self.transport)
        object.__setattr__(self, "transport", transport)
        for refusal in self._refusals(recompute):
            raise PlanError(refusal)

    def _refusals(self, recompute: str) -> Iterator[str]:
        """Sentences about two settings that do not combine, each with the way out.

        Args:
            recompute: the name by which `activations.recompute` was set.
        """
        pipeline, scales, every = self.pipeline, self.scales_loss, self.reduce_every
        yield from pipeline.refusals(self.zero, self.microbatches, self.transport, scales, every)
        yield from self.offloading.refusals(self.zero, pipeline.stages, pipeline.streams, pipeline.schedule)
        yield from self.experts.refusals()
        yield from self.saving.refusals(self.device_memory is not None, recompute)
        tensor = self.tensor
        yield from self.saving.split_refusals(tensor.ranks, tensor.sequence, pipeline.stages, pipeline.schedule)
        offloads = "activations" in self.offloading.kinds
        yield from self.saving.arena_refusals(pipeline.stages, pipeline.schedule, pipeline.streams, offloads)
        yield from self._overlap_refusals() if self.overlap_gather else ()
        yield from (
            "strict=True gathers parameters over the network, and with transport='shared' none are gathered. Leave one "
            "out.",
        ) * ((self.strict, self.transport) == (True, "shared"))
        if self.precision == "fp16" and self.loss_scaling.value == "off" and self.nonfinite == "raise":
            yield (
                "precision='fp16' with loss_scale='off' loses small gradients silently. Use loss_scale='dynamic', "
                "precision='bf16', or nonfinite='skip' to say that you mean it."
            )
        if self.zero == 0 and self.shard_group is not None:
            yield "shard_group is for slices, and zero=0 has none. Set zero to 1, 2 or 3, or leave it out."
        if self.microbatches == 1 and not self.pipelined and self.reduce_every == "step" and self.zero >= 2:
            yield (
                f"reduce_every='step' with microbatches=1 has no effect at zero={self.zero}; set microbatches to 2 or "
                f"more, or leave reduce_every='auto'."
            )

    def _overlap_refusals(self) -> Iterator[str]:
        others = {
            f"zero={self.zero}": self.zero not in (1, 2),
            f"transport={self.transport!r}": self.transport == "shared",
            f"pipeline_parallel={self.pipeline.stages}": self.pipelined,
            f"offload={self.offloading.parts!r}": bool(self.offloading.kinds),
        }
        for setting in (setting for setting, found in others.items() if found):
            yield (
                f"overlap_gather=True and {setting} do not combine: it is for the gather after the update at stages 1 "
                f"and 2, over the network, of a model in one stage that is updated on the device. Leave it out."
            )

    @classmethod
    def auto(
        cls,
        model: "nn.Module",
        batch: Any,
        *,
        optimizer: Any,
        machines: Any = None,
        ranks: int | None = None,
        base: "Plan | None" = None,
        say: Callable[[str], None] | None = None,
        fresh: bool = False,
    ) -> "Plan":
        """The fastest plan that fits; found by rehearsing the engine on tensors without values, which takes no memory.

        A step has as many rows as `batch`, times the number of ranks. With stages or tensor parallelism there are fewer
        data ranks than ranks, so each takes more rows. In a job of several processes all must call this: rank 0 plans,
        and all get its plan.

        Args:
            model: returns its loss; on the meta device, or real (nothing of it is copied or changed).
            batch: of one rank, as `engine.train_step` takes it: tensors [B, ...].
            optimizer: a torch.optim class, a function of the parameters, or an optimizer over this model's parameters.
            machines: a `zeroshard.doctor.hardware.Machines`; by default this machine, as `zeroshard doctor` measured
                it, else as its GPU is known by name, else with rates that are assumed.
            ranks: how many ranks there will be; by default as many as the launcher started.
            base: settings to keep, such as precision, clipping and seed. It leaves the settings that are searched at
                their defaults: zero, shard_group, microbatches, activations.recompute, overlap_gather, offload.parts,
                offload.fraction, of pipeline_parallel stages, schedule, virtual_stages, replicas, split and
                vertical_sync, and of tensor_parallel ranks. expert_parallel is searched for models with mixtures of
                experts, and kept where it is set. Where nothing else fits, offload.disk is a folder "zeroshard-offload"
                and offload.speculate is False.
            say: called on rank 0 with lines about the progress, and in the end with the chosen plan and the reason; by
                default the logger zeroshard.plan gets them, at level INFO.
            fresh: search in any case; by default an earlier answer is taken from the user's cache folder if it is of
                the same model, code, batch, optimizer, machines, settings and versions.

        Raises:
            PlanError: no plan fits, with the way out; or arguments that contradict each other.
            ModelError, OptimizerError, BatchError: a model, optimizer or batch that no plan can train.
        """
        if cls._search is None:
            raise PlanError(
                "Plan.auto needs the planner, which this Plan lacks: take it by `from zeroshard import Plan`."
            )
        return cls._search(model, batch, optimizer, machines, ranks, base, say or LOG.info, fresh)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "Plan":
        """The plan of `as_dict()`; plans stored by earlier versions are upgraded.

        Raises:
            PlanError: a setting that this version does not know, or whose value it refuses.
        """
        if not isinstance(stored, Mapping):
            raise PlanError(f"The stored plan is {stored!r}; it must be a table of settings, as as_dict() returns it.")
        settings = upgraded(stored)
        known = [field.name for field in dataclasses.fields(cls)]
        for name in settings:
            if name not in known:
                raise PlanError(f"The stored plan has a setting {name!r}, and this version knows {', '.join(known)}.")
        return cls(**settings)

    def with_settings(self, changes: Mapping[str, Any]) -> "Plan":
        """This plan with some settings changed, those of groups by names such as "offload.disk".

        Raises:
            PlanError: as the constructor.
        """
        return Plan.from_dict({**dict(flat(self.as_dict())), **changes})

    @cached_property
    def pipeline(self) -> Pipeline:
        """The pipeline settings, all spelled out."""
        group: Pipeline = group_from(Pipeline, "pipeline_parallel", self.pipeline_parallel)
        return group

    @cached_property
    def tensor(self) -> TensorParallel:
        """The settings of tensor parallelism, all spelled out."""
        group: TensorParallel = group_from(TensorParallel, "tensor_parallel", self.tensor_parallel)
        return group

    @cached_property
    def experts(self) -> ExpertParallel:
        """The settings of expert parallelism, all spelled out."""
        group: ExpertParallel = group_from(ExpertParallel, "expert_parallel", self.expert_parallel)
        return group

    @cached_property
    def offloading(self) -> Offload:
        """The offload settings, all spelled out."""
        group: Offload = group_from(Offload, "offload", self.offload)
        return group

    @cached_property
    def saving(self) -> Activations:
        """The settings of activations, all spelled out."""
        group: Activations = group_from(Activations, "activations", self.activations)
        return group

    @cached_property
    def loss_scaling(self) -> LossScale:
        """The loss-scale settings, all spelled out."""
        group: LossScale = group_from(LossScale, "loss_scale", self.loss_scale)
        return group

    @property
    def pipelined(self) -> bool:
        """Whether the model is cut into stages."""
        return self.pipeline.cuts

    @property
    def streams(self) -> bool:
        """Whether the pipeline goes on from step to step without a flush."""
        return self.pipeline.streams

    @property
    def microbatches_per_update(self) -> int:
        """Microbatches whose gradients are summed for one update."""
        return self.pipeline.microbatches_per_update(self.microbatches)

    @property
    def recomputes(self) -> bool:
        """Whether backwards compute their chunk's forward again."""
        return self.saving.of_chunks(self.pipeline.stages, self.pipeline.schedule)

    @property
    def reduces_each_microbatch(self) -> bool:
        """Whether `train_step` reduces after every microbatch."""
        if self.reduce_every == "auto":
            return self.zero >= 1 and not self.pipelined
        return self.reduce_every == "microbatch"

    @property
    def adds_up_locally(self) -> bool:
        """Whether a rank sums the gradients of several microbatches before they are reduced."""
        return self.pipeline.adds_up_locally(self.microbatches_per_update, self.reduces_each_microbatch)

    @property
    def reductions(self) -> int:
        """Reductions of the gradients per update."""
        return self.microbatches_per_update if self.reduces_each_microbatch else 1

    def pipeline_schedule(
        self, ranks: int, loans: tuple[Loan, ...] = (), together: int | None = None
    ) -> PipelineSchedule:
        """The lists of actions of `ranks` ranks.

        Args:
            together: ranks on the same data; by default those that split layers.

        Raises:
            PlanError: the ranks do not divide among the stages, or the schedule cannot run.
        """
        pipeline, layout = self.pipeline, self.pipeline.layout(ranks, together or self.tensor.ranks)
        gathers = self.zero == 3 and (max(layout.replicas) > 1 or self.offloading.parameters or self.strict)
        each, sync = self.reduces_each_microbatch, pipeline.vertical_sync
        return PipelineSchedule(pipeline.schedule, layout, self.microbatches, sync, each, loans, gathers)

    @property
    def scales_loss(self) -> bool:
        """Whether a loss scale is in use."""
        return self.loss_scaling.is_on(self.precision)

    @property
    def device_budget(self) -> int | None:
        """The device's budget in bytes, or None."""
        return None if self.device_memory is None else parse_bytes(self.device_memory)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON and TOML hold them; groups as tables, all settings spelled out."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values |= {name: dataclasses.asdict(group_from(kind, name, values[name])) for name, kind in GROUPS.items()}
        return {name: value for name, value in values.items() if name not in SHORT_FORMS}

    def __repr__(self) -> str:
        return shown(self)

    def _take_short_forms(self) -> None:
        """Move the values of short forms into their groups.

        Raises:
            PlanError: the group has another value.
        """
        for name, setting in SHORT_FORMS.items():
            value, (group, _, inner) = getattr(self, name), setting.partition(".")
            given = group_from(GROUPS[group], group, getattr(self, group))
            said, usual = getattr(given, inner), type(given).__dataclass_fields__[inner].default
            if value is not None and said not in (usual, value):
                raise PlanError(
                    f"{name}={value!r} and {group}={getattr(self, group)!r} contradict each other: {name} is the short "
                    f"form of {setting}. Leave one of them out."
                )
            if value is not None:
                object.__setattr__(self, group, short_form(dataclasses.replace(given, **{inner: value})))
                object.__setattr__(self, name, None)

    def _check_choices(self) -> None:
        check_flag("overlap_gather", self.overlap_gather)
        check_flag("strict", self.strict)
        for name, allowed in CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
        for name in ("units", "fp32_modules", "ignored"):
            value = getattr(self, name)
            if value is not None or name != "units":
                object.__setattr__(self, name, names_of(name, value))

    def _check_ranges(self) -> None:
        check_whole("microbatches", self.microbatches)
        check_number("timeout", self.timeout)
        check_whole("seed", self.seed, least=-(2**63))
        if self.clip_norm is not None:
            check_number("clip_norm", self.clip_norm)
        for name in ("shard_group", "loss_chunk"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name))
        if self.device_memory is not None:
            try:
                parse_bytes(self.device_memory, "device_memory")
            except ConfigError as error:
                raise PlanError(str(error)) from None


def upgraded(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored plan with all groups as tables, and settings of earlier versions under their current names."""
    settings: dict[str, Any] = {}
    # Versions without `activations` stored all settings; "auto" has another meaning since.
    before = "timeout" in stored and not any(name.partition(".")[0] == "activations" for name in stored)
    for name, given in stored.items():
        value = RENAMED_VALUES.get(name, {}).get(given, given) if before and isinstance(given, str) else given
        if name in SHORT_FORMS and value is None:
            continue
        group, _, inner = (RENAMED | SHORT_FORMS).get(name, name).partition(".")
        if group not in GROUPS:
            settings[group] = value
        elif isinstance(value, (Mapping, GROUPS[group])):
            settings.setdefault(group, {}).update(value if isinstance(value, Mapping) else dataclasses.asdict(value))
        else:
            settings.setdefault(group, {})[inner or next(iter(GROUPS[group].__dataclass_fields__))] = value
    return settings


def option_of(setting: str) -> str:
    """The option of a setting such as "offload.disk": its own name, or the group's for the group's first setting."""
    group, _, inner = setting.partition(".")
    return group if group in GROUPS and inner == next(iter(GROUPS[group].__dataclass_fields__)) else setting


def renamed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored plan, upgraded if an earlier version stored it."""
    return upgraded(stored) if RENAMED.keys() & stored.keys() else dict(stored)
