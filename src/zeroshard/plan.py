"""The plan: everything that decides how a model is trained, in one frozen, validated object."""

import dataclasses
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from zeroshard.errors import PlanError
from zeroshard.schedule import SCHEDULES, STREAMING, Layout, Loan, PipelineSchedule
from zeroshard.schedule.orders import check

if TYPE_CHECKING:
    from torch import nn

UNITS_OF_SIZE = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}

OFFLOADED = frozenset({"optimizer", "parameters", "activations"})
POSITIVE = (
    *(f"loss_scale_{part}" for part in ("initial", "growth", "backoff", "window", "hysteresis", "floor")),
    *("microbatches", "stages", "chunks", "shard_ranks", "timeout", "clip_norm", "loss_scale"),
)
WHOLE = ("microbatches", "stages", "chunks", "shard_ranks", "loss_scale_window", "loss_scale_hysteresis", "seed")
MOST_CHUNKS = 2**16
SEARCHED = (  # what `Plan.auto` chooses; it keeps everything else
    *("zero", "shard_ranks", "microbatches", "stages", "schedule", "chunks", "replicas", "split", "recompute"),
    *("vertical_sync", "offload", "offload_share", "overlap_gather"),
)
ScheduleName = Literal["naive", "gpipe", "1f1b", "pipedream-flush", "interleaved", "zb-h1", "pipedream", "2bw"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to train: what each rank keeps, in which precision, and what a step is.

    Raises:
        PlanError: a value out of range, or two settings that do not combine, with the way out.
    """

    zero: Literal[0, 1, 2, 3] = 2
    """ZeRO stage: 0 keeps everything on every rank, 1 slices optimizer states, 2 gradients too, 3 parameters too."""
    shard_ranks: int | None = None
    """Ranks that slice among themselves, neighbours by number; each such group holds a copy of the others' slices. All
    ranks by default."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype of computation. fp32 leaves the model's dtypes alone; 16-bit parameters always have fp32 master weights."""
    fp32_modules: tuple[str, ...] = ()
    """Classes or paths of modules that compute in fp32 under bf16 or fp16."""
    transport: Literal["auto", "shared", "network"] = "auto"
    """How slices get from rank to rank: through memory that they share ("shared": all ranks are processes of one
    machine and compute on its CPUs), or torch.distributed ("network"); "auto" shares where that is possible."""
    overlap_gather: bool = False
    """At stages 1 and 2 over the network, let `step` return while updated parameters are gathered: the next forward
    waits unit by unit, and so does nearly all that reads a parameter before it (the exceptions are in docs/zero.md)."""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Dtype of gradients on the wire; by default their own, which loses nothing. Sums are always made in fp32."""
    loss_scale: float | Literal["auto", "dynamic", "off"] = "auto"
    """A fixed loss scale, "dynamic", or "off"; "auto" is dynamic for fp16 and off otherwise."""
    loss_scale_initial: float = 65536.0
    """First value of a dynamic loss scale."""
    loss_scale_growth: float = 2.0
    """Factor on the dynamic loss scale after a window of good steps."""
    loss_scale_backoff: float = 0.5
    """Factor on the dynamic loss scale after an overflow."""
    loss_scale_window: int = 2000
    """Good steps before the dynamic loss scale grows."""
    loss_scale_hysteresis: int = 1
    """Overflows that the dynamic loss scale bears before it backs off."""
    loss_scale_floor: float = 1.0
    """Lowest dynamic loss scale; an overflow there is an error."""
    microbatches: int = 1
    """Microbatches per step of `train_step`."""
    stages: int = 1
    """Pipeline stages: contiguous layers of the model, each stage on as many ranks as there are replicas of it."""
    schedule: ScheduleName = "1f1b"
    """Order of forwards and backwards over the stages; "pipedream" and "2bw" never flush and use older weights."""
    chunks: int = 1
    """Chunks of the model per stage, dealt round robin ("interleaved", "gpipe", "naive")."""
    replicas: tuple[int, ...] | None = None
    """Replicas of each stage; by default the ranks are shared out evenly."""
    split: tuple[str, ...] = ()
    """The layer with which every chunk after the first begins; by default the chunks are balanced."""
    balance: Literal["time", "parameters"] = "time"
    """What the chunks are balanced by: each layer's measured time, or its number of parameters."""
    recompute: Literal["auto", "chunk", "off"] = "auto"
    """What a backward computes again: its chunk's forward ("chunk"), or nothing; "auto" is "chunk" for "gpipe"."""
    vertical_sync: bool = False
    """Under "pipedream", let every stage use the weight version that the first stage had."""
    reduce_every: Literal["auto", "microbatch", "step"] = "auto"
    """When gradients are reduced: after each microbatch, or once a step after adding up locally (less on the wire,
    whole gradients kept meanwhile). "auto": once a step at stage 0 and in pipelines, else after each microbatch, so
    that stages 1 to 3 add in the same order and agree bit for bit."""
    clip_norm: float | None = None
    """Largest 2-norm of the whole gradient; longer ones are scaled down to it. Schedules that never flush clip each of
    the d stages alone, to this by √d, which keeps the whole within it."""
    nonfinite: Literal["raise", "skip", "ignore"] = "raise"
    """What a step does with NaN or infinite gradients when no loss scaling is on."""
    units: tuple[str, ...] | None = None
    """Classes or paths of the modules that are units; by default the repeated blocks, () for one unit in all."""
    seed: int = 0
    """Seed of the initial weights of a model on the meta device."""
    device_memory: str | int | None = None
    """Budget for all that the ledger counts on the device, in bytes or like "512MiB"; activations count too."""
    offload: str = ""
    """What is kept below the device: "optimizer" (states and updates, ZeRO-Offload), "optimizer,parameters" (units come
    up for use, two at a time; needs zero=3), and "activations" after either or alone."""
    offload_share: float = 1.0
    """Share of the parameters, in whole units, whose optimizer states are kept below; the last units first."""
    offload_disk: str | None = None
    """Folder of a disk on which the offloaded optimizer states are kept instead of in host memory."""
    offload_disk_parameters: bool = False
    """Keep offloaded parameters in that folder too, in a file that is mapped into memory."""
    offload_moments: Literal["fp32", "bf16", "8bit"] = "fp32"
    """How Adam's moments are kept below: exact, or rounded after each update."""
    delayed_update: bool = False
    """Let the update of a step run beside the next step, which uses weights that are one update old (ZeRO-Offload,
    section 5)."""
    delayed_warmup: int = 40
    """Steps before the first delayed update."""
    speculate: bool = True
    """Let offloaded updates run during the backward, on copies, as if nothing were clipped; wrong ones are undone."""
    timeout: float = 300.0
    """Seconds that a collective may wait before it is an error."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_ranges()
        self._check_pipeline()
        self._check_offload()
        self._check_overlap()
        if self.precision == "fp16" and self.loss_scale == "off" and self.nonfinite == "raise":
            raise PlanError(
                "precision='fp16' with loss_scale='off' loses small gradients silently. Use loss_scale='dynamic', "
                "precision='bf16', or nonfinite='skip' to say that you mean it."
            )
        if self.zero == 0 and self.shard_ranks is not None:
            raise PlanError("shard_ranks is for slices, and zero=0 has none. Set zero to 1, 2 or 3, or leave it out.")
        if self.microbatches == 1 and not self.pipelined and self.reduce_every == "step" and self.zero >= 2:
            raise PlanError(
                f"reduce_every='step' with microbatches=1 has no effect at zero={self.zero}; set microbatches to 2 or "
                f"more, "
                "or leave reduce_every='auto'."
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
        say: Callable[[str], None] = lambda line: None,
    ) -> "Plan":
        """The fastest plan that fits; found by rehearsing the engine on tensors without values, which takes no memory.

        A step is as many rows as one batch has, times the number of ranks. With stages there are fewer lanes than
        ranks, and each takes as many more rows. In a job of several processes all must call this: rank 0 plans, and
        all get its plan.

        Args:
            model: returns its loss; on the meta device, or real (nothing of it is copied or changed).
            batch: of one rank, as `engine.train_step` takes it: tensors [B, ...].
            optimizer: a torch.optim class, a function of the parameters, or an optimizer over this model's parameters.
            machines: a `zeroshard.planner.hardware.Machines`; by default this machine, as `zeroshard doctor` measured
                it, else as its GPU is known by name, else with rates that are assumed.
            ranks: how many ranks there will be; by default as many as the launcher started.
            base: what is kept: precision, clipping, seed and the like. Fields that are searched are left at their
                defaults: zero, shard_ranks, microbatches, stages, schedule, chunks, replicas, split, recompute,
                vertical_sync, offload, offload_share, overlap_gather.
            say: told on rank 0 what is being looked at, and in the end what was chosen and why.

        Raises:
            PlanError: no plan fits, with the way out; or arguments that contradict each other.
            ModelError, OptimizerError, BatchError: what no plan can train.
        """
        # The planner stands above plans, because it runs the engine with them.
        plan_for = import_module("zeroshard.planner.auto").plan_for
        found: Plan = plan_for(model, batch, optimizer, machines, ranks, base, say)
        return found

    @property
    def pipelined(self) -> bool:
        """Whether the model is cut into stages."""
        return self.stages > 1

    @property
    def streams(self) -> bool:
        """Whether the pipeline goes on from step to step without a flush."""
        return self.pipelined and self.schedule in STREAMING

    @property
    def microbatches_per_update(self) -> int:
        """Microbatches whose gradients one update takes in."""
        return 1 if self.streams and self.schedule == "pipedream" else self.microbatches

    @property
    def recomputes(self) -> bool:
        """Whether backwards compute their chunk's forward again."""
        return self.pipelined and self.recompute != "off" and (self.recompute == "chunk" or self.schedule == "gpipe")

    @property
    def reduces_each_microbatch(self) -> bool:
        """Whether `train_step` reduces after every microbatch."""
        if self.reduce_every == "auto":
            return self.zero >= 1 and not self.pipelined
        return self.reduce_every == "microbatch" and not self.streams

    @property
    def reductions(self) -> int:
        """Reductions of the gradients per update."""
        return self.microbatches_per_update if self.reduces_each_microbatch else 1

    def pipeline(self, ranks: int, loans: tuple[Loan, ...] = ()) -> PipelineSchedule:
        """The schedule over `ranks` ranks.

        Raises:
            PlanError: the ranks do not divide among the stages, or the schedule cannot run.
        """
        replicas = self.replicas
        if replicas is None:
            if ranks % self.stages:
                raise PlanError(
                    f"{ranks} ranks do not divide among stages={self.stages}; start a multiple of {self.stages} ranks, "
                    f"or say with replicas=(...) how many each stage gets."
                )
            replicas = (ranks // self.stages,) * self.stages
        if sum(replicas) != ranks:
            raise PlanError(f"replicas={replicas} needs {sum(replicas)} ranks and there are {ranks}; start as many.")
        layout = Layout(replicas, self.chunks)
        gathers = self.zero == 3 and (max(replicas) > 1 or "parameters" in self.offloads)
        each = self.reduces_each_microbatch
        return PipelineSchedule(self.schedule, layout, self.microbatches, self.vertical_sync, each, loans, gathers)

    @property
    def offloads(self) -> frozenset[str]:
        """What is kept below the device."""
        return frozenset(part.strip() for part in self.offload.split(",")) - {""}

    @property
    def scales_loss(self) -> bool:
        """Whether a loss scale is in use."""
        return self.precision == "fp16" if self.loss_scale == "auto" else self.loss_scale != "off"

    @property
    def device_budget(self) -> int | None:
        """The device's budget in bytes, or None."""
        return None if self.device_memory is None else parse_bytes(self.device_memory)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON and TOML hold them."""
        return dataclasses.asdict(self)

    def _check_choices(self) -> None:
        choices = {
            "zero": (0, 1, 2, 3),
            "precision": ("fp32", "bf16", "fp16"),
            "transport": ("auto", "shared", "network"),
            "reduce_dtype": (None, "fp32", "bf16", "fp16"),
            "reduce_every": ("auto", "microbatch", "step"),
            "nonfinite": ("raise", "skip", "ignore"),
            "schedule": SCHEDULES,
            "balance": ("time", "parameters"),
            "recompute": ("auto", "chunk", "off"),
            "offload_moments": ("fp32", "bf16", "8bit"),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed or isinstance(value, bool):
                raise PlanError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}.")
        if isinstance(self.loss_scale, str) and self.loss_scale not in ("auto", "dynamic", "off"):
            raise PlanError(f"loss_scale is {self.loss_scale!r}; it must be a number, 'auto', 'dynamic' or 'off'.")
        for name in ("units", "fp32_modules", "split"):
            value = getattr(self, name)
            if value is None and name == "units":
                continue
            if isinstance(value, str) or not isinstance(value, Iterable) or not all(isinstance(v, str) for v in value):
                raise PlanError(f"{name} is {value!r}; it must be a tuple of names, such as ('Block',).")
            object.__setattr__(self, name, tuple(value))

    def _check_pipeline(self) -> None:
        if self.replicas is not None:
            several = isinstance(self.replicas, (tuple, list))
            if (
                not several
                or not all(isinstance(r, int) and r >= 1 for r in self.replicas)
                or len(tuple(self.replicas)) != self.stages
            ):
                raise PlanError(
                    f"replicas is {self.replicas!r}; it must be a tuple with a whole number of 1 or more for each of "
                    f"the {self.stages} stages."
                )
            object.__setattr__(self, "replicas", tuple(self.replicas))
        if not self.pipelined:
            alone = {"chunks": 1, "replicas": None, "split": (), "vertical_sync": False, "recompute": "auto"}
            for name, value in alone.items():
                if getattr(self, name) != value:
                    raise PlanError(f"{name}={getattr(self, name)!r} is for pipelines; set stages to 2 or more.")
            if self.schedule in STREAMING:
                raise PlanError(f"schedule={self.schedule!r} is for pipelines; set stages to 2 or more.")
            return
        if self.transport == "shared" and self.streams:
            raise PlanError(
                f"transport='shared' and schedule={self.schedule!r} do not combine: each rank keeps older weights of "
                f"its own. Leave transport='auto', or use schedule='1f1b', which flushes."
            )
        check(self.schedule, Layout(self.replicas or (1,) * self.stages, self.chunks), self.microbatches)
        if self.zero == 3 and self.streams:
            raise PlanError(
                f"zero=3 and schedule={self.schedule!r} do not combine: older versions of the weights are kept whole. "
                f"Use zero=1 or 2, or a schedule that flushes, such as 'gpipe', which gathers a chunk once per pass."
            )
        if self.split and len(self.split) != self.stages * self.chunks - 1:
            raise PlanError(
                f"split names {len(self.split)} layers and {self.stages * self.chunks} chunks (stages times chunks) "
                f"need {self.stages * self.chunks - 1}, the first layer of every chunk but the first. Name as many, or "
                f"leave split out to have the chunks balanced."
            )
        if self.vertical_sync and (self.schedule != "pipedream" or len(set(self.replicas or ())) > 1):
            raise PlanError(
                "vertical_sync=True is for schedule='pipedream' with equally many replicas of every stage; leave it "
                "out otherwise."
            )
        if self.streams and (self.scales_loss or self.reduce_every == "microbatch"):
            raise PlanError(
                f"schedule={self.schedule!r} never waits for all stages, so they cannot decide together to skip a step "
                f"(loss scaling), nor reduce at other times than updates. Use precision='bf16' and "
                f"reduce_every='auto', or schedule='1f1b'."
            )

    def _check_offload(self) -> None:
        if not isinstance(self.offload, str) or self.offloads - OFFLOADED:
            raise PlanError(
                f"offload is {self.offload!r}; it must be some of 'optimizer', 'parameters' and 'activations', like "
                f"'optimizer,activations'."
            )
        for name in ("delayed_update", "speculate", "offload_disk_parameters"):
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"{name} is {getattr(self, name)!r}; it must be True or False.")
        warmup = self.delayed_warmup
        if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0:
            raise PlanError(f"delayed_warmup is {warmup!r}; it must be a whole number of 0 or more.")
        if self.offload_disk is not None and not (isinstance(self.offload_disk, str) and self.offload_disk):
            raise PlanError(f"offload_disk is {self.offload_disk!r}; it must be the path of a folder, or None.")
        below = "optimizer" in self.offloads
        if "parameters" in self.offloads and not (below and self.zero == 3):
            raise PlanError(
                f"offload={self.offload!r} with zero={self.zero} does not combine: parameters that come and go are "
                f"those of stage 3, and their updates run where they are kept. Use zero=3 and "
                f"offload='optimizer,parameters', on one device too."
            )
        if not below:
            names = ("offload_share", "offload_disk", "offload_disk_parameters", "offload_moments", "delayed_update")
            for name in names:
                if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                    raise PlanError(
                        f"{name}={getattr(self, name)!r} is for offloaded optimizer states; set offload='optimizer'."
                    )
            return
        if self.streams:
            raise PlanError(
                f"offload='optimizer' and schedule={self.schedule!r} do not combine: updates below the device end with "
                f"a step, and this schedule has no step's end. Use schedule='1f1b', or another that flushes."
            )
        if self.delayed_update and self.pipelined:
            raise PlanError(
                f"delayed_update=True and stages={self.stages} do not combine: stages would go on from weights of "
                f"unlike ages. Leave delayed_update out: a stage's update runs beside what other stages still compute."
            )
        if not isinstance(self.offload_share, (int, float)) or not 0 < self.offload_share <= 1:
            raise PlanError(f"offload_share is {self.offload_share!r}; it must be a number above 0 and at most 1.")
        if self.offload_disk_parameters and (self.offload_disk is None or "parameters" not in self.offloads):
            raise PlanError(
                "offload_disk_parameters=True needs parameters that are offloaded and a disk for them. Set "
                "offload='optimizer,parameters', zero=3 and offload_disk."
            )
        if "parameters" in self.offloads and self.offload_share != 1:
            raise PlanError(
                "offload_share and offload='optimizer,parameters' do not combine: units that come and go are all kept "
                "below. Leave offload_share out, or offload 'optimizer' alone."
            )

    def _check_overlap(self) -> None:
        if not isinstance(self.overlap_gather, bool):
            raise PlanError(f"overlap_gather is {self.overlap_gather!r}; it must be True or False.")
        if not self.overlap_gather:
            return
        others = {
            f"zero={self.zero}": self.zero not in (1, 2),
            f"transport={self.transport!r}": self.transport == "shared",
            f"stages={self.stages}": self.pipelined,
            f"offload={self.offload!r}": bool(self.offloads),
        }
        for setting in (setting for setting, found in others.items() if found):
            raise PlanError(
                f"overlap_gather=True and {setting} do not combine: it is for the gather after the update at stages 1 "
                f"and 2, over the network, of a model in one stage that is updated on the device. Leave it out."
            )

    def _check_ranges(self) -> None:
        for name in POSITIVE:
            value = getattr(self, name)
            if (name in ("clip_norm", "shard_ranks") and value is None) or (
                name == "loss_scale" and isinstance(value, str)
            ):
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
                raise PlanError(f"{name} is {value!r}; it must be a number that is more than 0 and finite.")
        for name in WHOLE:
            value = getattr(self, name)
            if name == "shard_ranks" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise PlanError(f"{name} is {value!r}; it must be a whole number.")
        if self.stages * self.chunks > MOST_CHUNKS:
            raise PlanError(f"stages={self.stages} times chunks={self.chunks} is more than {MOST_CHUNKS:,}; use fewer.")
        if self.loss_scale_growth < 1 or self.loss_scale_backoff > 1:
            raise PlanError(
                f"loss_scale_growth is {self.loss_scale_growth} and loss_scale_backoff {self.loss_scale_backoff}; "
                "growth must be at least 1 and backoff in (0, 1]."
            )
        if self.device_memory is not None:
            try:
                parse_bytes(self.device_memory)
            except PlanError as error:
                raise PlanError(f"device_memory: {error}") from None


def parse_bytes(size: str | int) -> int:
    """Bytes from a number or a text such as "512MiB" or "1.5 GB".

    Raises:
        PlanError: not a size.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMG]i?B|B|)\s*", str(size))
    try:
        return int(Fraction(match.group(1)) * UNITS_OF_SIZE[match.group(2)]) if match else int("")
    except ValueError:
        raise PlanError(f"{size!r} is no size; write bytes, or a number with KiB, MiB, GiB, KB, MB or GB.") from None
