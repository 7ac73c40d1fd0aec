"""The user's writes into parameters: where they are allowed, and how they reach the engine.

[Note: writes] If every rank has whole parameters of its own and no master weights, a user may write into them at any
time, as in PyTorch. Else the authoritative values are in a slice, an fp32 master or memory that ranks share, so a write
outside of `engine.gathered()` would be lost or repeated by N ranks, and is refused: at once for `p.data = values`, else
in the next forward or step. A module that casts its own weights in its forward
(`self.router = self.router.to(torch.float32)`) changes no value: the cast lasts until the next step, and its gradient
goes to the weights in the dtype in which they are kept. A module that limits its own weights in its forward
(`self.weight.data.clamp_(-1, 1)`) writes alike on every rank, and a repetition changes nothing: the values go to slices
and master weights at once.
"""

import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zeroshard.errors import PlanError
from zeroshard.parts.part import Part, Parts
from zeroshard.parts.weights import Residence
from zeroshard.units import (
    ForwardAlias,
    Unreadable,
    in_dispatch_handler,
    kinds_for,
    set_values,
    values_of,
    written_while_absent,
)
from zeroshard.units.ignored import is_ignored

GATHERED = "Change parameters inside `with engine.gathered():`, on every rank alike or with gathered(writer=0)."


class Passes(Protocol):
    """Passes of the model."""

    @property
    def running(self) -> bool:
        """Whether a forward or a backward of the model is under way."""

    def bring(self, unit: int, parameter: str) -> None:
        """Gather a unit whose parameter a module of another unit reads, or raise."""


class Writes:
    """Watches the parameters of one engine.

    Attributes:
        allowed: whether the user may write into any parameter now (inside `gathered()`).
        grows: whether new parameters in the model are no mistake, since the engine is made anew.
    """

    def __init__(self, model: nn.Module, parts: Parts, passes: Passes) -> None:
        self._model, self._parts, self._passes = model, parts, passes
        self._places = places_of(parts)
        self._frozen: list[tuple[str, nn.Parameter]] = []
        self._casts: list[tuple[Part, int]] = []
        self._cast_modules: set[str] = set()
        self._modules: list[nn.Module] = []
        self._tables: list[dict[str, Any]] = []
        self._contents: list[int] = []
        self.allowed = self.grows = False
        self._kinds = kinds_for(self)

    def watch(self, frozen: Collection[str] = ()) -> None:
        """Watch the parameters, except those with several versions, whose objects change.

        Args:
            frozen: names of parameters that were frozen, in the whole model; others may be in no optimizer group.
        """
        here = {entry.name for part in self._parts.all if not part.flat.trainable for entry in part.flat.index.entries}
        every = [(name, p) for name, p in self._model.named_parameters() if not is_ignored(p)]
        self._frozen = [(name, p) for name, p in every if name in frozen or name in here]
        for part in self._parts.all:
            if part.versions.single:
                part.flat.watch(self._kinds, part.weights.residence is not Residence.SLICED)
        if all(part.versions.single for part in self._parts.all):
            self._learn_structure()

    def alias(self, parameter: nn.Parameter) -> Tensor:
        """The value of `parameter.data`."""
        part, number, _ = self._places[id(parameter)]
        if self._absent(part):
            if not self._passes.running:
                with torch._C.DisableTorchFunctionSubclass():
                    return Unreadable.of(parameter, self._name(part, number), self._unreadable)
            self.fetch([parameter])
        alias = part.flat.alias(number)
        limits = self._passes.running and not self.allowed and part.lost is not None and type(alias) is Tensor
        if limits and not in_dispatch_handler():
            alias.__class__ = ForwardAlias
            alias.limit = partial(self._limit, part, number)  # type: ignore[attr-defined]
        return alias

    def part_of(self, parameter: nn.Parameter | None) -> Part | None:
        """The part of a parameter; None if it is not this rank's."""
        found = self._places.get(id(parameter))
        return None if found is None else found[0]

    def fetch(self, parameters: list[nn.Parameter], reads: bool = True) -> None:
        """Wait for arriving parameters; to read values inside a forward or backward, gather all others too.

        Args:
            reads: whether values are read, or only their memory.

        Raises:
            PlanError: values are read, and neither a forward nor a backward is under way.
        """
        for parameter in parameters:
            part, number, unit = self._places[id(parameter)]
            if not self._absent(part) or not reads:
                continue
            if not self._passes.running:
                raise self._unreadable(self._name(part, number))
            self._passes.bring(unit, self._name(part, number))

    def replace(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Carry out `parameter.data = values`.

        Raises:
            PlanError: the write would be lost, or the values have another shape or dtype.
        """
        if values is parameter:
            return
        part, number, _ = self._places[id(parameter)]
        _arrive(part)  # else the gather would replace `values` later
        name, current = self._name(part, number), values_of(parameter)
        if values.shape != current.shape and self.allowed:
            self._let_go(part, number, parameter, values)
            return
        if values.shape != current.shape:
            raise PlanError(
                f"'{name}' of shape {tuple(current.shape)} was given values of shape {tuple(values.shape)}. Its place "
                f"in the flat buffer has the shape that the model had when the engine was made. Change it inside `with "
                f"engine.gathered():`, and call engine.rebuild() after it."
            )
        alike = (values.dtype, values.device) == (current.dtype, current.device)
        if alike and values.is_set_to(current):
            return
        if not alike and self._passes.running and _is_cast(values, current):
            self._cast(part, number, parameter, values)
            return
        reason = None if self.allowed else part.lost
        fits = alike or (self.allowed and torch.promote_types(values.dtype, torch.float32) == torch.float32)
        if not fits:
            raise PlanError(_conversion_text(name, current, values))
        if reason is not None:
            raise PlanError(f"'{name}' was given other values while {reason}. {GATHERED}")
        set_values(parameter, values)
        part.flat.replaced.add(number)

    def _let_go(self, part: Part, number: int, parameter: nn.Parameter, values: Tensor) -> None:
        """Make a parameter of another shape an ordinary one; a stand-in takes its place in the flat until a rebuild."""
        parameter.__class__ = nn.Parameter
        stand_in = part.flat.parameters[number] = nn.Parameter(values_of(parameter), parameter.requires_grad)
        self._places[id(stand_in)] = self._places.pop(id(parameter))
        set_values(parameter, values)
        part.flat.replaced.discard(number)
        self._contents = []

    def reconcile(self, thoroughly: bool = False) -> None:
        """Copy writes since the last call into the flat buffers, or refuse them.

        Args:
            thoroughly: find new parameters too, and memory that was replaced other than by `p.data = values`.

        Raises:
            PlanError: a write would be lost, or repeated by each rank in memory that all ranks share; with the way
                out.
        """
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for part, number in self._casts:
                part.flat.restore(number)
            self._casts.clear()
            for part in self._parts.all:
                if part.flat.kinds is not None and (thoroughly or part.flat.replaced) and not self._absent(part):
                    self._take_over(part)
            self._refuse_lost()
        looks = (thoroughly or not self._contents) and not self.grows
        if looks and self._structure() != self._contents:
            self._refuse_new_parameters()
            self._learn_structure()

    def unfrozen(self) -> list[str]:
        """The names of parameters that were frozen and require gradients by now, in the order of the model."""
        if not self._frozen:
            return []
        with torch._C.DisableTorchFunctionSubclass():
            return [name for name, parameter in self._frozen if parameter.requires_grad]

    def take_parts(self, new: Sequence[Part]) -> None:
        """Watch the parameters of parts that replace others; those that require gradients are no longer frozen."""
        due = set(self.unfrozen())
        self._frozen = [(name, parameter) for name, parameter in self._frozen if name not in due]
        self._places = places_of(self._parts)
        for part in new:
            part.flat.watch(self._kinds, part.weights.residence is not Residence.SLICED)

    def _take_over(self, part: Part) -> None:
        """Copy the new values of parameters whose memory was replaced into the flat buffer, which they view again."""
        flat = part.flat
        if part.weights.misplaced is not None:
            raise PlanError(part.weights.misplaced)
        for number in flat.moved():
            if torch.equal(values_of(flat.parameters[number]), flat.views[number]):
                flat.restore(number)
                continue
            reason = None if self.allowed else part.lost
            if reason is not None:
                raise PlanError(f"'{self._name(part, number)}' was given other memory while {reason}. {GATHERED}")
            flat.take_over(number)

    def _refuse_lost(self) -> None:
        """Refuse writes that would be lost; the device is waited for once, and not once for each flat."""
        parts = [] if self.allowed else [part for part in self._parts.all if part.lost is not None]
        edited = [part for part in parts if part.flat.edits != part.edits]
        sliced = [part for part in parts if part.weights.sliced]
        if not edited:
            edited = [sliced[number] for number in written_while_absent([part.flat for part in sliced])]
        for part in edited[:1]:
            raise PlanError(f"A parameter of {part.flat.label} was written while {part.lost}. {GATHERED}")

    def _limit(self, part: Part, number: int, function: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Apply a limit to the elements of a parameter, in slices and master weights too; see [Note: writes]."""
        values = part.flat.alias(number)
        limited = getattr(values.clone(), function)(*args, **kwargs)
        if torch.equal(limited, values):
            return
        foreign = part.flat.edits != part.edits  # written otherwise before, which is still to be refused
        values.copy_(limited)
        if not foreign:
            part.keep_what_was_written()

    def _cast(self, part: Part, number: int, parameter: nn.Parameter, values: Tensor) -> None:
        set_values(parameter, values)
        if not part.weights.sliced:  # else the next gather replaces the cast
            self._casts.append((part, number))
        module = self._name(part, number).rpartition(".")[0]
        if module not in self._cast_modules:
            self._cast_modules.add(module)
            kept = str(part.flat.dtype).removeprefix("torch.")
            warnings.warn(
                f"'{module}' casts its weights to {str(values.dtype).removeprefix('torch.')} in its forward. It "
                f"computes so, from weights that are kept in {kept}; name it in fp32_modules to keep them in fp32.",
                stacklevel=4,
            )

    def _refuse_new_parameters(self) -> None:
        """Refuse trainable parameters that were added to the model after the engine was made."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._places and not is_ignored(parameter):
                raise PlanError(
                    f"'{name}' came into the model after the engine was made, so it is never trained. Call "
                    f"engine.rebuild(), which keeps the states of the others; or change the model first and make the "
                    f"engine then."
                )

    def _learn_structure(self) -> None:
        self._modules = list(self._model.modules())  # kept alive, so that no new module gets the id of an old one
        self._tables = [table for m in self._modules for table in (m._parameters, m._modules)]
        self._contents = self._structure()

    def _structure(self) -> list[int]:
        """The ids of all parameters and submodules of the known modules."""
        return list(map(id, chain.from_iterable(map(dict.values, self._tables))))

    def _absent(self, part: Part) -> bool:
        """Whether the values are on other ranks, once arriving values are complete."""
        _arrive(part)
        return part.weights.residence is not Residence.GATHERED

    def _name(self, part: Part, number: int) -> str:
        return part.flat.index.entries[number].name

    def _unreadable(self, name: str) -> PlanError:
        return PlanError(
            f"'{name}' was read outside of the model's forward and backward while each rank has a slice of it (zero=3)."
            f" Read it inside `with engine.gathered():`, on every rank, or take engine.state_dict(); a method besides "
            f"forward that reads it becomes a forward by engine.register_forward_method(module, 'name')."
        )


def places_of(parts: Parts) -> dict[int, tuple[Part, int, int]]:
    """By the identity of a parameter: its part, its number there, and its unit."""
    return {
        id(parameter): (part, number, unit)
        for unit, of_unit in enumerate(parts.of_units)
        for part in of_unit
        for number, parameter in enumerate(part.flat.parameters)
    }


def _arrive(part: Part) -> None:
    if part.weights.residence is Residence.ARRIVING:
        part.weights.finish_gather()


def _is_cast(values: Tensor, current: Tensor) -> bool:
    """Whether `values` are `current` in another floating dtype."""
    both = values.is_floating_point() and current.is_floating_point() and values.device == current.device
    return both and values.dtype != current.dtype and torch.equal(values.detach(), current.to(values.dtype))


def _conversion_text(name: str, current: Tensor, values: Tensor) -> str:
    own, given = (f"{str(t.dtype).removeprefix('torch.')} on {t.device}" for t in (current, values))
    return (
        f"'{name}' is {own}, and was given {given}. The engine decides about dtype and device: set "
        f"Plan(precision=...), or fp32_modules=('{name.rpartition('.')[0]}',) for a module that computes in fp32; move "
        f"or cast the model before the engine is made."
    )
