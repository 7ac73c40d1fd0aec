"""Protocols of a step: backwards, updates and the decision between them, as an order of actions uses them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import Mesh
from zeroshard.comm.over_budget import announce_over_budget
from zeroshard.errors import BudgetExceeded, CommError
from zeroshard.parts.gradients import Gradients
from zeroshard.parts.part import Part
from zeroshard.schedule import Schedule
from zeroshard.schedule.run import Interpreter
from zeroshard.step.losses import StepLosses
from zeroshard.traffic import Purpose

Run = Callable[[Any], Any]  # runs the model on a microbatch, down to the loss


@contextmanager
def whole_or_not(discard: Callable[[], None], mesh: Mesh) -> Iterator[None]:
    """A step, of which an error leaves no gradients to the next; after one of the connection there is none."""
    try:
        yield
    except CommError:
        raise
    except Exception as error:
        if isinstance(error, BudgetExceeded):
            announce_over_budget(mesh, error)
        with suppress(CommError):  # ranks that this one waits for may have met another error
            discard()
        raise


@dataclass(frozen=True, slots=True)
class Settled:
    """The agreement of all ranks before an update: the norm of the scaled mean gradient, and which parameters got one.

    Attributes:
        written: one byte for each parameter, 1 for one that got a gradient.
        sound: whether the losses of all ranks are finite, as far as they are known.
        gain: the factor on the gradients that divides losses by sum; `norm` has it.
    """

    norm: float
    written: bytes
    sound: bool
    gain: float = 1.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The norm of the mean gradient before clipping, the loss scale, and the factor on gradients if not skipped."""

    norm: float
    scale: float
    skip: bool
    factor: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step.

    Attributes:
        step: steps taken or skipped so far, this one included.
        grad_norm: 2-norm of the whole mean gradient before clipping, as it is (it may be infinite or NaN).
        loss_scale: the loss scale of this step, 1.0 without loss scaling.
        skipped: whether the weights were left as they are.
        loss: where losses are given by sum, the sum of all over their count; else of `train_step` this rank's mean
            loss, and None after `step`.
    """

    step: int
    grad_norm: float
    loss_scale: float
    skipped: bool
    loss: torch.Tensor | None = None


class Reduces(Protocol):
    """Reduces the gradients of units."""

    def begin_units(self, units: Sequence[int]) -> None:
        """A backward begins that makes these units' gradients complete."""

    def start_complete(self, first: int, complete: Callable[[int], bool]) -> None:
        """Start to reduce those from `first` on whose turn it is, as long as they are complete."""

    def start_units(self, units: Sequence[int]) -> None:
        """Start to reduce these units' gradients, as far as that was not done."""


class Learns(Protocol):
    """Knows which gradients a reduction has to wait for."""

    def learn(self) -> None:
        """A step is over: expect of the next the gradients that came so far."""

    def complete(self, unit: int) -> bool:
        """Whether every gradient of a unit that is expected has come in the backward under way."""


class Backwards(Protocol):
    """Takes in the gradients of backwards.

    Attributes:
        reductions: of its units.
        expected: which of its gradients are waited for.
        under_scale: whether the loss of the backward under way was multiplied by the loss scale.
        count: backwards since the last update.
        losses: of those backwards.
    """

    under_scale: bool
    count: int
    losses: StepLosses

    @property
    def reductions(self) -> Reduces:
        """As above."""

    @property
    def expected(self) -> Learns:
        """As above."""

    def local(self) -> AbstractContextManager[None]:
        """Backwards inside add up on this rank and are not reduced."""

    def forget_interrupted(self) -> None:
        """Clear up after a backward that ended in an exception."""

    def listen(self, gradients: Gradients, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Take in the gradients of these parameters, which stand for those of the flat."""


class Updates(Protocol):
    """Takes steps with the gradients."""

    def settle(self, step: int) -> Settled:
        """Reduce what is left and agree with all ranks."""

    def apply(self, factor: float, parts: Sequence[Part] | None = None) -> None:
        """One optimizer step with the gradients times `factor`, of all parts by default."""

    def skip(self, parts: Sequence[Part]) -> None:
        """Count a version of these parts' weights that is the same as the last."""

    def consume(self) -> None:
        """Drop the step's gradients."""

    def finish(self) -> None:
        """Have the weights of all updates that were begun."""

    def refuse_nonfinite(self, norm: float, comm: Comm | None = None) -> None:
        """Raise with the names of the parameters whose gradients are not finite."""


class Decides(Protocol):
    """Decides whether a step is taken, clipped or skipped."""

    @property
    def scale(self) -> float:
        """The factor on the loss."""

    def decide(self, scaled_norm: float, refuse: Callable[[float], None], sound: bool = True) -> Verdict:
        """The verdict on gradients of this norm, loss scale included."""


class StepEnd(Protocol):
    """What a technique does when a step is over.

    Attributes:
        reads: whether the model has layers that are read, on any stage.
    """

    reads: bool

    def before_update(self) -> None:
        """The gradients of an update are there, and nothing is changed yet; a collective call."""

    def end_step(self, skipped: bool) -> None:
        """A step was taken or skipped; a collective call."""

    @property
    def readings(self) -> Mapping[str, Mapping[str, Any]]:
        """Readings of layers of this rank in the last step, plain values by name, by the layer's path."""


class StepOrder(Protocol):
    """Steps as lists of actions: over one stage, or over several.

    Attributes:
        interpreter: of the actions.
    """

    interpreter: Interpreter

    @property
    def actions(self) -> Schedule:
        """This rank's list of one step; of the first, where steps differ."""

    def step(self, batch: Any) -> torch.Tensor | None:
        """One step on this data rank's batch; the mean loss, where it is known."""

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of the whole model for this data rank's arguments."""

    def flush(self) -> None:
        """Finish the microbatches in flight."""

    def reloaded(self) -> None:
        """The weights were replaced; a collective call."""

    def gathers(self, unit: int) -> int:
        """How often a step gathers a unit whose weights come and go."""

    def planned_messages(self) -> dict[Purpose, int]:
        """Elements that this rank sends to other stages in a step."""
