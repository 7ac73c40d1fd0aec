"""The settings of offload: parts kept in host memory or on a disk, and their updates there."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from zeroshard.errors import PlanError
from zeroshard.planning.foreign_names import explains_unknown
from zeroshard.planning.settings import check_choice, check_flag, check_whole, shown

KINDS = ("optimizer", "parameters", "activations")  # in the order in which they help
OF_STATES = ("fraction", "disk", "disk_parameters", "moments", "delayed_update")  # settings for offloaded states


@explains_unknown
@dataclass(frozen=True, repr=False)
class Offload:
    """Offload to host memory or a disk (ZeRO-Offload, 2101.06840; ZeRO-Infinity, 2104.07857).

    Raises:
        PlanError: a value out of range, or two settings that do not combine.
    """

    parts: str = ""
    """Parts of the training state kept off the device: "optimizer" (states and updates, ZeRO-Offload),
    "optimizer,parameters" (a unit is copied to the device for its use, two at a time; needs zero=3), and "activations"
    after either or alone."""
    fraction: float = 1.0
    """Fraction of the parameters, in whole units, whose optimizer states are offloaded; the last units first."""
    disk: str | None = None
    """Folder of a disk for the offloaded optimizer states; host memory by default."""
    disk_parameters: bool = False
    """Keep offloaded parameters in that folder too, in a file that is mapped into memory."""
    moments: Literal["fp32", "bf16", "8bit"] = "fp32"
    """Storage of Adam's offloaded moments: exact, or rounded after each update."""
    delayed_update: bool = False
    """Let the update of a step run during the next step, which uses weights that are one update old (ZeRO-Offload,
    section 5)."""
    delayed_warmup: int = 40
    """Steps before the first delayed update."""
    speculate: bool = True
    """Make new weights during the backward, as if nothing were clipped, and drop wrong ones; states come after it."""

    def __post_init__(self) -> None:
        if not isinstance(self.parts, str) or self.kinds - {*KINDS}:
            raise PlanError(
                f"offload is {self.parts!r}; it must be some of 'optimizer', 'parameters' and 'activations', like "
                f"'optimizer,activations'."
            )
        check_choice("offload.moments", self.moments, ("fp32", "bf16", "8bit"))
        for name in ("delayed_update", "speculate", "disk_parameters"):
            check_flag(f"offload.{name}", getattr(self, name))
        check_whole("offload.delayed_warmup", self.delayed_warmup, least=0)
        if self.disk is not None and not (isinstance(self.disk, str) and self.disk):
            raise PlanError(f"offload.disk is {self.disk!r}; it must be the path of a folder, or None.")
        if not isinstance(self.fraction, (int, float)) or not 0 < self.fraction <= 1:
            raise PlanError(f"offload.fraction is {self.fraction!r}; it must be a number above 0 and at most 1.")
        if not self.optimizer:
            for name in OF_STATES:
                if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                    raise PlanError(
                        f"offload.{name}={getattr(self, name)!r} is for offloaded optimizer states; set "
                        f"offload=Offload('optimizer', {name}=...)."
                    )
        if self.disk_parameters and (self.disk is None or not self.parameters):
            raise PlanError(
                "offload.disk_parameters=True needs parameters that are offloaded and a disk for them. Set zero=3 and "
                "offload=Offload('optimizer,parameters', disk=..., disk_parameters=True)."
            )
        if self.parameters and self.fraction != 1:
            raise PlanError(
                "offload.fraction and 'optimizer,parameters' do not combine: units that come and go are all offloaded. "
                "Leave fraction out, or offload 'optimizer' alone."
            )

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The parts as a set."""
        return frozenset(part.strip() for part in self.parts.split(",")) - {""}

    @property
    def optimizer(self) -> bool:
        """Whether optimizer states are offloaded, and updated there."""
        return "optimizer" in self.kinds

    @property
    def parameters(self) -> bool:
        """Whether slices of parameters are offloaded, and copied to the device for each use."""
        return "parameters" in self.kinds

    @property
    def activations(self) -> bool:
        """Whether tensors saved for backward are offloaded until then."""
        return "activations" in self.kinds

    @property
    def staying(self) -> float:
        """The fraction of the parameters whose optimizer states stay on the device."""
        return 1 - self.fraction if self.optimizer else 1.0

    @property
    def for_adam(self) -> list[str]:
        """The settings that need the host's own Adam."""
        chosen = {"disk": None, "delayed_update": False, "moments": "fp32"}
        return [
            f"offload.{name}={getattr(self, name)!r}" for name, usual in chosen.items() if getattr(self, name) != usual
        ]

    def refusals(self, zero: int, stages: int, streams: bool, schedule: str) -> Iterator[str]:
        """Sentences about settings of the plan that do not combine with these, each with the way out."""
        if self.parameters and not (self.optimizer and zero == 3):
            yield (
                f"offload={self.parts!r} with zero={zero} does not combine: parameters that come and go are those of "
                f"stage 3, and their updates run where they are kept. Use zero=3 and offload='optimizer,parameters', "
                f"on one device too."
            )
        if self.optimizer and streams:
            yield (
                f"offload='optimizer' and schedule={schedule!r} do not combine: offloaded updates end with a step, and "
                f"this schedule has no step's end. Use schedule='1f1b', or another that flushes."
            )
        if self.delayed_update and stages > 1:
            yield (
                f"delayed_update=True and pipeline_parallel={stages} do not combine: stages would go on from weights "
                f"of unlike ages. Leave delayed_update out: a stage's update runs during the other stages' backwards."
            )

    def __repr__(self) -> str:
        return shown(self)
