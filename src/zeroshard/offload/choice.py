"""Offload's answers to the planner, and its offers to a search in which no other plan fits."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any, TypeVar

from zeroshard.offload.policy import KINDS, Offload
from zeroshard.planning.offers import Coarsest, Fewest, Offer, Site, divisors
from zeroshard.planning.questions import Choice, Description, Remedy, States
from zeroshard.schedule import PipelineSchedule

SHARES = (0.25, 0.5, 0.75, 1.0)  # of the parameters whose states are offloaded: the fewest first, as they move
LEANER: dict[str, Any] = {"activations.recompute": "blocks", "offload.speculate": False}
ONE_FIRST = Fewest(ascending=True)
FOLDER = "zeroshard-offload"  # on the disk, in the folder of the run
MOMENTS = {"bf16": "bf16", "8bit": "8-bit"}
MOMENT_BYTES = {"fp32": 4, "bf16": 2, "8bit": 1}
Made = TypeVar("Made")


@dataclass(frozen=True)
class Offloading(Choice):
    """The offloaded parts of a plan, as a choice of the planner.

    Attributes:
        policy: of the plan.
        sliced: whether parameters are sliced, and gathered for each use.
    """

    policy: Offload = Offload()
    sliced: bool = False

    @property
    def parts(self) -> list[str]:
        """The offloaded parts, in the order in which a search tries them."""
        return [part for part in KINDS if part in self.policy.kinds]

    @property
    def reach(self) -> tuple[float, ...]:
        """The number of offloaded parts, and their share."""
        return (len(self.parts), self.policy.fraction)

    @property
    def resort(self) -> str:
        """The name "offload", where any part is offloaded."""
        return "offload" if self.parts else ""

    @property
    def exhausted(self) -> bool:
        """Whether all states are offloaded, parameters too: it is rehearsed for the smallest budget."""
        return self.policy.parameters and self.policy.fraction == 1

    @property
    def alike(self) -> bool:
        """Whether all blocks are offloaded alike; not with a share of the states."""
        return not (self.policy.optimizer and self.policy.fraction < 1)

    @property
    def leaner_first(self) -> Mapping[str, Any]:
        """All states offloaded, where a share of them is."""
        return {} if self.alike else {"offload.fraction": 1.0}

    @property
    def beside_forward(self) -> Mapping[str, Any] | None:
        """No offload, unless it is of activations."""
        return None if "activations" in self.parts else {"offload": Offload()}

    @property
    def changes(self) -> tuple[str, ...]:
        """Rounded moments, and late updates."""
        rounded = () if self.policy.moments == "fp32" else (f"{MOMENTS[self.policy.moments]} moments",)
        return (*rounded, *(("late updates",) if self.policy.delayed_update else ()))

    @property
    def beside_devices(self) -> bool:
        """Whether offloaded bytes, and the memory for them, are counted exactly."""
        return bool(self.parts)

    def describe(self, ranks: int | None) -> Description:
        """The offloaded parts, and their share."""
        if not self.parts:
            return Description()
        policy = self.policy
        share = "" if policy.fraction == 1 else f" {policy.fraction:.0%}"
        where = "" if policy.disk is None else ", parameters too, to disk" if policy.disk_parameters else " to disk"
        moments = () if policy.moments == "fp32" else (f"{MOMENTS[policy.moments]} moments",)
        guessed = () if policy.speculate else ("no guesses",)
        return Description(settings=("offload " + " + ".join(self.parts) + share + where, *moments, *guessed))

    def least_bytes(self, states: States, ranks: int) -> int | None:
        """The weights, whole or sliced, or of one unit if they are streamed; and the states that stay on the device."""
        if not self.policy.optimizer:
            return None
        parameters_offloaded = self.policy.parameters
        weights = 0 if parameters_offloaded else states.trainable + states.frozen
        gathered = states.largest if self.sliced and (states.slices > 1 or parameters_offloaded) else 0
        stay = max(Fraction(0), (1 - Fraction(self.policy.fraction)) * states.trainable - states.largest)
        kept = stay * (states.kept_gradient + states.master_weight + states.optimizer_state) / states.slices
        held = weights * states.parameter + (0 if parameters_offloaded else states.packed)
        whole = Fraction(held) / (states.slices if self.sliced else 1)
        return ceil(whole + kept) + gathered * states.parameter

    def least_host_bytes(self, states: States, ranks: int) -> int:
        """Master weights and the optimizer's states unless on a disk, and the parameters unless there."""
        policy = self.policy
        kept = Fraction(0)
        if policy.optimizer and policy.disk is None:
            moved = max(Fraction(0), Fraction(policy.fraction) * states.trainable - states.largest)
            kept += moved * (4 + states.optimizer_state * Fraction(MOMENT_BYTES[policy.moments], 4))
        if policy.parameters and not policy.disk_parameters:
            kept += (states.trainable + states.frozen) * states.parameter + states.packed
        return int(kept / states.slices)

    def remedies(self, ranks: int) -> Iterator[Remedy]:
        """A larger share, then the parameters too."""
        if self.parts and self.policy.fraction < 1:
            yield Remedy("A larger offload.fraction would leave less.", {}, ranks, certain=True)
        elif self.parts and not self.policy.parameters:
            streamed = {"zero": 3, "offload": "optimizer,parameters"}
            yield Remedy("offload=optimizer,parameters under zero 3 would hold them.", streamed, ranks)

    def on_host(self, usual: str) -> str:
        """The phrase for offloaded bytes and checkpoints."""
        return "Offloaded states and checkpoints on their way to the disk need" if self.parts else usual

    def budget(self, nbytes: int, usual: str) -> str:
        """The smallest budget of the device with which the plan works."""
        return f"The smallest budget that works for it is device_memory={nbytes}." if self.parts else usual

    def rehearsed(self, settled: int, meaningless: bool) -> Mapping[str, Any]:
        """Settings under which updates are late from the first measured step on."""
        return {"offload.delayed_warmup": min(self.policy.delayed_warmup, settled)}

    def settled(self, pipeline: PipelineSchedule, usual: int) -> int:
        """Weights of delayed updates come one step later, and so do the states of those before their verdict."""
        policy = self.policy
        return usual + 2 * (policy.delayed_update or (policy.optimizer and policy.speculate))

    def notes(self, host_rate: str) -> tuple[str, ...]:
        """A note that its seconds are modelled."""
        modelled = (
            "Seconds of copies between tiers and of host updates are modelled on a virtual clock, or are the CPU time "
            "that they take where layers are really run"
        )
        return (f"{modelled}; {host_rate}.",) if self.parts else ()

    def updater(self, on_device: Made, on_host: Made) -> Made:
        """The optimizer on the tier of the states."""
        return on_host if self.policy.optimizer else on_device


def offers(site: Site) -> Iterator[Offer]:
    """Plans that move the fewest bytes first, with ZeRO-2 as in 2101.06840, section 4.2, or 3; then by way of a disk.

    Those with rounded moments, which change results, come last.
    """
    if site.rows % site.ranks:
        return
    counts = divisors(site.rows // site.ranks)
    for settings in _settings(site.ranks):
        yield Offer(
            {"reduce_every": "auto", **settings}, site.ranks, counts, Coarsest(), leaner=LEANER, lean_order=ONE_FIRST
        )


def _settings(ranks: int) -> Iterator[dict[str, Any]]:
    for zero in (2, 3) if ranks > 1 else (2,):
        yield from ({"zero": zero, "offload": "optimizer", "offload.fraction": share} for share in SHARES)
    streamed = {"zero": 3, "offload": "optimizer,parameters"}
    yield streamed
    yield {"zero": 3, "offload": "optimizer,parameters,activations"}
    on_device = {"zero": 2, "offload": "optimizer"}
    yield from ({**settings, "offload.disk": FOLDER} for settings in (on_device, streamed))
    yield {**streamed, "offload.disk": FOLDER, "offload.disk_parameters": True}
    yield from ({**settings, "offload.moments": "8bit"} for settings in (on_device, streamed))
    yield {**streamed, "offload.moments": "8bit", "offload.disk": FOLDER}
