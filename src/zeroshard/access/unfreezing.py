"""Parameters that were frozen when the engine was made, and require gradients later.

[Note: unfreezing] torch makes an optimizer's states for a parameter in the first step in which it has a gradient, so a
plain loop may freeze a parameter and train it later. Here a frozen parameter has neither gradient buffer nor states,
and lies in flats without them. When it requires gradients before a step, all ranks agree, and each frozen flat with
such parameters is made anew as two: one of them, with fresh gradients, master weights and states, and one of the
others. The values are those that the model had, as precise as it kept them. A parameter that is frozen again keeps its
buffers, and is not updated while it has no gradient.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from zeroshard.access.frozen_base import FrozenBase
from zeroshard.comm.collectives import Comm
from zeroshard.errors import BudgetExceeded, CheckpointWarning, PlanError
from zeroshard.optim.states.other_forms import Members
from zeroshard.parts.part import Part, Parts
from zeroshard.parts.weights import Weights
from zeroshard.text import format_names
from zeroshard.units import Flat

Replacement = Callable[[Flat, Part, Mapping[str, int], torch.Tensor], Part]
CheckRoom = Callable[[Sequence[tuple[Part, int]]], None]


class Unfreezing:
    """Makes the gradients and states of parameters of one engine that are trained from now on.

    Args:
        parts: of this rank.
        world: all ranks.
        members: the parameters of each optimizer group.
        replacement: makes a part of some parameters of a frozen one, from their flat, that part, the groups of those
            that are trained, and values.
        refused: the reason why the plan or the optimizer cannot unfreeze; None if it can.
        check_room: raises `BudgetExceeded` if the gradients and states of so many elements of each part have no room.

    Attributes:
        members: as given.
        count: how often parameters were unfrozen.
    """

    def __init__(
        self,
        parts: Parts,
        world: Comm,
        members: Members,
        replacement: Replacement,
        refused: str | None,
        check_room: CheckRoom,
    ) -> None:
        self._parts, self._world, self.members = parts, world, members
        self._replacement, self._refused, self._check_room = replacement, refused, check_room
        self.count = 0

    def agree(self, names: list[str], busy: bool) -> None:
        """Agree with all ranks on the parameters to be trained; a collective call.

        Args:
            names: of these parameters.
            busy: whether gradients of the step under way have come.

        Raises:
            PlanError: on all ranks: they differ in it, a step is under way, or it is refused. BudgetExceeded: on all
                ranks, if one of them has no room for gradients and states; nothing was changed.
        """
        answers = self._world.agree_on([names, busy], "unfrozen parameters")
        others = next((theirs for theirs, _ in answers if theirs != names), None)
        if others is not None:
            raise PlanError(
                f"{_trained_now(sorted(set(others) ^ set(names)))} on some ranks alone. Unfreeze the same parameters "
                f"on every rank, before the same step."
            )
        self._check(names, any(under_way for _, under_way in answers))
        problem = ""
        try:
            self._check_room([(part, _numel(part, names)) for part in self._parts.all])
        except BudgetExceeded as error:
            problem = error.found
        found = next(filter(None, self._world.agree_on(problem, "room for unfrozen parameters")), "")
        if found:
            raise BudgetExceeded(
                found,
                f"Nothing was changed: freeze {format_names(names)} again, or make an engine with a larger budget.",
            )

    def carry_out(self, names: Sequence[str], base: FrozenBase, gathered: Sequence[list[Weights]]) -> list[Part]:
        """Make gradients and states of these parameters; returns the new parts; a collective call.

        Args:
            base: frozen weights that are in files.
            gathered: of each unit, the weights that are gathered.
        """
        self.count += 1
        due, made, groups = set(names), list[Part](), self._groups
        for of_unit, weights in zip(self._parts.of_units, gathered, strict=True):
            assert isinstance(of_unit, list)
            for place, part in reversed(list(enumerate(of_unit))):
                chosen = {name: groups[name] for name in _names(part) if name in due}
                if chosen:
                    replacing = self._anew(part, chosen)
                    base.replaced(part, replacing)
                    of_unit[place : place + 1] = replacing
                    made += replacing
            weights[:] = [part.weights for part in of_unit]
        return made

    @property
    def _groups(self) -> dict[str, int]:
        """The optimizer group of each parameter in one, by name."""
        return {each.name: number for number, group in enumerate(self.members) for each in group}

    def _anew(self, part: Part, groups: Mapping[str, int]) -> list[Part]:
        """Parts in place of a frozen one: of the parameters that are trained now, and of the others."""
        flat, comm = part.flat, part.place.slices.comm
        every = {entry.name: number for number, entry in enumerate(flat.index.entries)}
        kinds = flat.label.removeprefix(f"{flat.unit.label}[")[:-1].split(", ")[2:]  # after dtype and "frozen"
        made: list[tuple[Flat, torch.Tensor]] = []
        with self._parts.gatherer.visit(flat.unit.number):
            for trained in {name in groups: None for name in every}:
                own = {name: flat.parameters[number] for name, number in every.items() if (name in groups) == trained}
                kind = ", ".join([*kinds, f"unfrozen {self.count}"] if trained else kinds)
                new = Flat(flat.unit, own, flat.dtype, trained, flat.index.ranks, kind)
                values = torch.zeros(new.index.padded_numel, dtype=flat.dtype, device=comm.mesh.device)
                for number, name in enumerate(own):
                    new.view(values, number).copy_(flat.view(part.weights.full, every[name]))
                made.append((new, values))
        comm.agree(b"", "weights are copied")
        part.weights.free(for_good=True)
        flat.unwatch()
        parts = [self._replacement(new, part, groups, values) for new, values in made]
        comm.agree(b"", "weights are in place")
        return parts

    def _check(self, names: Sequence[str], busy: bool) -> None:
        """Refuse parameters that cannot be unfrozen, or not now.

        Raises:
            PlanError: with the parameter, the reason, and the way out.
        """
        if busy:
            raise PlanError(
                f"{_trained_now(names)}, between two backwards of one step. Unfreeze between steps: after "
                f"engine.step() or train_step()."
            )
        groups = self._groups
        without = [name for name in names if name not in groups]
        if without:
            raise PlanError(
                f"{_trained_now(without, made=True)}, in no optimizer group. Call engine.optimizer.add_param_group "
                f"with what is to be trained, or give the optimizer all parameters that are to be trained at some "
                f"time, frozen or not: those without a gradient have no states."
            )
        if self._refused is not None:
            raise PlanError(
                f"{_trained_now(names, made=True)}: {self._refused}. Make the engine while all that is to be trained "
                f"requires gradients, and freeze it afterwards until then; or engine.save(), make a new engine, and "
                f"load."
            )


def _trained_now(names: Sequence[str], made: bool = False) -> str:
    """The beginning of an error about parameters, in the plural where there are several.

    Args:
        made: whether they were frozen when the engine was made.
    """
    were, require = ("were", "require") if len(names) > 1 else ("was", "requires")
    when = " when the engine was made" if made else ""
    return f"{format_names(names)} {were} frozen{when} and {require} gradients now"


def _numel(part: Part, names: Sequence[str]) -> int:
    """Elements of these parameters in a part."""
    return sum(entry.numel for entry in part.flat.index.entries if entry.name in names)


def _names(part: Part) -> list[str]:
    return [entry.name for entry in part.flat.index.entries]


def warn_of_dropped(path: Path, parts: Iterable[Part], kinds: Callable[[str], Sequence[str]]) -> None:
    """Warn of a checkpoint's states of parameters that are frozen here, and that have none.

    Args:
        path: of the checkpoint.
        kinds: gives the kinds of all tensors in it of a parameter.
    """
    frozen = [name for part in parts if part.gradients is None for name in _names(part)]
    dropped = [name for name in frozen if set(kinds(name)) - {"weight", "buffer"}]
    if dropped:
        warnings.warn(
            f"{path} has optimizer states of {format_names(dropped)}, which are frozen here, so they were not loaded. "
            f"If they are to be trained, let them require gradients (requires_grad_(True)) before engine.load().",
            CheckpointWarning,
            stacklevel=5,
        )
