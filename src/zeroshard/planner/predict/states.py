"""Model states by the formulas alone, to leave out plans before a rehearsal. Predictions never come from here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from zeroshard.moe.choice import mixtures_of
from zeroshard.plan import Plan
from zeroshard.planner.choices import choices_of
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.planner.predict.shallow import whole_model
from zeroshard.planning.questions import Mixtures, States
from zeroshard.units import find_units
from zeroshard.units.ignored import ignored_in, mark_ignored, trained_by


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a model and its optimizer in the formulas.

    Attributes:
        trainable: number of parameters that are trained.
        frozen: number of the others.
        packed: bytes of frozen parameters that are no floating-point numbers.
        ignored: bytes of parameters that the plan ignores, which no other number counts.
        units: parameters of each unit.
        state_bytes: bytes of optimizer states per parameter, in fp32; of whole tensors the mean.
        mixtures: of the model.
    """

    trainable: int
    frozen: int
    units: tuple[int, ...]
    state_bytes: int | Fraction
    mixtures: Mixtures = Mixtures()
    packed: int = 0
    ignored: int = 0


def sizes_of(task: TrainingTask, ignored: Sequence[str] = ()) -> Sizes:
    """The sizes of a task's model and optimizer, made without values.

    Args:
        ignored: parameters, as of a plan.

    Raises:
        OptimizerError: the optimizer does not run, or its parameters depend on each other.
    """
    model = whole_model(task.build)
    mark_ignored(model, ignored)
    parameters, others = trained_by(model), ignored_in(model).values()
    numbers = [p for p in parameters if p.is_floating_point()]
    trainable = sum(p.numel() for p in numbers if p.requires_grad)
    units = tuple(
        sum(p.numel() for p in unit.parameters.values() if p.is_floating_point()) for unit in find_units(model)
    )
    mixtures = mixtures_of(model)
    layout = task.layout
    frozen = sum(p.numel() for p in numbers) - trainable
    packed = sum(p.nbytes for p in parameters) - sum(p.nbytes for p in numbers)
    return Sizes(trainable, frozen, units, layout.bytes_per_element, mixtures, packed, sum(p.nbytes for p in others))


def least_bytes(sizes: Sizes, plan: Plan, ranks: int) -> int:
    """The least bytes of states on every rank; under stage 3 with the largest unit gathered."""
    states = states_of(sizes, plan, ranks)
    answers = (choice.least_bytes(states, ranks) for choice in reversed(choices_of(plan)))
    ignored = sizes.ignored // plan.pipeline.stages  # of the stage with the most of them, at least
    return ignored + next(nbytes for nbytes in answers if nbytes is not None)


def states_of(sizes: Sizes, plan: Plan, ranks: int) -> States:
    """One rank's shard of the model, in the plan's dtypes."""
    states = States(sizes.trainable, sizes.frozen, max(sizes.units), sizes.state_bytes, mixtures=sizes.mixtures)
    states = replace(states, packed=sizes.packed)
    for choice in choices_of(plan):
        states = choice.share(states, ranks)
    return states
