"""Choices: the questions of the planner to each technique of a plan.

Each technique's `choice.py` overrides some; the others keep the defaults of a technique not in use.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from zeroshard.schedule import PipelineSchedule

Split = Callable[[int], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Description:
    """A technique in the short text that describes a plan.

    Attributes:
        name: which of its kinds it is.
        sizes: of its parts.
        settings: those that are not as usual.
    """

    name: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mixtures:
    """The mixtures of experts of a model.

    Attributes:
        experts: of the smallest mixture; 0 for a model without any.
        share: the experts' share of the trained or of the frozen parameters, the larger one.
    """

    experts: int = 0
    share: Fraction = Fraction(0)


@dataclass(frozen=True, slots=True)
class States:
    """The model states of one rank, before they are sliced or moved anywhere.

    Attributes:
        trainable: parameters that are trained.
        frozen: those that are not.
        packed: bytes of frozen parameters that are no floating-point numbers.
        largest: parameters of the largest unit.
        optimizer_state: bytes of the optimizer's states per trained parameter, in fp32.
        parameter: bytes of one parameter.
        gradient: bytes of one parameter's gradient.
        master_weight: bytes of its master weight, 0 without.
        slices: into which a buffer is cut; a mean where buffers differ.
        mixtures: of the whole model.
        gradient_sum: bytes of one parameter's gradients of several backwards, which add up; 0 for one backward.
    """

    trainable: int
    frozen: int
    largest: int
    optimizer_state: int | Fraction
    parameter: int = 4
    gradient: int = 4
    master_weight: int = 0
    slices: int | Fraction = 1
    mixtures: Mixtures = Mixtures()
    packed: int = 0
    gradient_sum: int = 0

    @property
    def kept_gradient(self) -> int:
        """Bytes per parameter that hold the gradient of a step until the update."""
        return max(self.gradient, self.gradient_sum)


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change with which the states of a plan that is too large may fit.

    Attributes:
        sentence: the change in words.
        settings: fields of the plan that change.
        ranks: on so many.
        anew: from the common base plan, not from the one that is too large.
        certain: whether it helps in any case.
    """

    sentence: str
    settings: Mapping[str, Any]
    ranks: int
    anew: bool = False
    certain: bool = False


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A time of a rank outside of its rehearsed step: a label, and a sentence."""

    label: str
    sentence: str


class Choice:
    """The choices of a plan for one technique; these answers are those of a technique that is not in use."""

    @property
    def reach(self) -> tuple[float, ...]:
        """Sort key of plans by memory saved: the ZeRO stage, ranks, or the share offloaded."""
        return ()

    @property
    def resort(self) -> str:
        """The name of a last resort; empty otherwise."""
        return ""

    @property
    def exhausted(self) -> bool:
        """True if this technique cannot free more device memory."""
        return False

    @property
    def changes(self) -> tuple[str, ...]:
        """Settings with which training gets other numbers than with as much memory as one likes, in words."""
        return ()

    @property
    def alike(self) -> bool:
        """Whether all further blocks of a model cost the same."""
        return True

    @property
    def leaner_first(self) -> Mapping[str, Any]:
        """Settings of a plan that needs less of the device and is rehearsed sooner; none by default."""
        return {}

    @property
    def beside_forward(self) -> Mapping[str, Any] | None:
        """Settings with which a plan keeps as many activations on a device, none by default; None where it does not."""
        return {}

    @property
    def beside_devices(self) -> bool:
        """True if device tensors count as host memory too (CPU ranks)."""
        return False

    def describe(self, ranks: int | None) -> Description:
        """The technique in a few words.

        Args:
            ranks: of the whole job; None where that is not known.
        """
        return Description()

    def share(self, states: States, ranks: int) -> States:
        """A lower bound of one rank's states, from the whole model's."""
        return states

    def least_bytes(self, states: States, ranks: int) -> int | None:
        """The least bytes of one rank's states on its device; None where the technique does not decide it."""
        return None

    def least_host_bytes(self, states: States, ranks: int) -> int:
        """The least bytes of one rank's states in host memory."""
        return 0

    def remedies(self, ranks: int) -> Iterator[Remedy]:
        """Changes of the technique with which states could fit, the smallest first."""
        yield from ()

    def row_owner(self, usual: str) -> str:
        """Name of the unit with rows of its own, such as "rank"; `usual` by default."""
        return usual

    def on_host(self, usual: str) -> str:
        """The start of a sentence on host memory, which goes on with its size; the `usual` one by default."""
        return usual

    def budget(self, nbytes: int, usual: str) -> str:
        """The way out for a plan that needs so many bytes of a device; `usual` by default."""
        return usual

    def filled(self, split: Split) -> Mapping[str, Any]:
        """Fields that the plan leaves open.

        Args:
            split: gives the first layers of so many chunks but for the first.
        """
        return {}

    def rehearsed(self, settled: int, meaningless: bool) -> Mapping[str, Any]:
        """Fields that change for a rehearsal.

        Args:
            settled: steps before the steady state.
            meaningless: whether tensors have arbitrary values.
        """
        return {}

    def settled(self, pipeline: PipelineSchedule, usual: int) -> int:
        """Steps before the steady state; `usual` by default."""
        return usual

    def notes(self, host_rate: str) -> tuple[str, ...]:
        """Notes for the reader of a prediction, a sentence each.

        Args:
            host_rate: rate of host memory, in words.
        """
        return ()

    def left_out(self) -> tuple[LeftOut, ...]:
        """Times outside of the memory of a rehearsed step."""
        return ()
