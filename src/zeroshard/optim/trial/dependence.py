"""The dependences of each parameter's update, by the data flow in trial steps ([Note: data flow]).

Torch's optimizers are known; others are watched. If Python reads values of a parameter, which the flow does not show,
that parameter gets gradients and values of every magnitude, and no other may change.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zeroshard.errors import OptimizerError
from zeroshard.optim.trial.data_flow import DataFlow, memory_of
from zeroshard.optim.trial.probe_optimizers import attributes_of, probe_of, probe_over_groups

SIDES = (7, 5, 3, 2, 2)  # of trial tensors
FACTORS = (0.0, 1e-25, 1e25, math.nan)  # on the gradients of the disturbed parameter
COUNTS = (10, 1000)  # steps to which counts are set, as rules may change with them
GROUPS = 64  # that are watched
GRADIENT = -1  # in place of a parameter's number, for gradients

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Dependence:
    """Dependences of a parameter's update on data beyond its element, as text; None without.

    Attributes:
        on_elements: on other elements of the parameter, or on values that Python reads.
        on_parameters: on other parameters.
        shapes: whether the step reads shapes.
    """

    on_elements: str | None = None
    on_parameters: str | None = None
    shapes: bool = False


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is torch's or this package's, which never mix parameters."""
    return type(optimizer).__module__.startswith(("torch.optim.", "zeroshard.optim."))


def dependence_of(optimizer: torch.optim.Optimizer) -> Dependence:
    """Watch trial steps of an optimizer over two parameters of each group.

    Raises:
        OptimizerError: it draws random numbers, or reads names or attributes of parameters, which slices lack.
            Other errors are the optimizer's.
    """
    if is_known(optimizer):
        return Dependence()
    members = _members(optimizer)
    trial = _Trial(optimizer, members)
    found = _watched(trial)
    _refuse_names(optimizer, trial)
    if found.on_parameters and not _watched(_Trial(optimizer, members, alike=False)).on_parameters:
        # parameters of one shape are stacked, and operations on a stack may treat each alone
        found = replace(found, on_elements=found.on_parameters, on_parameters=_disturbed(optimizer, members))
    elif trial.read and not found.on_parameters:
        found = replace(found, on_parameters=_disturbed(optimizer, members))
    return found


def _watched(trial: "_Trial") -> Dependence:
    """Take the steps of a trial, and return its dependences."""
    flow = DataFlow()
    trial.take(flow)
    if flow.random:
        raise OptimizerError(
            f"{trial.name} draws random numbers. Ranks that update the same parameter would draw others, and none "
            f"those of one process: use an optimizer that draws none."
        )
    return _judged(trial, flow)


def _judged(trial: "_Trial", flow: DataFlow) -> Dependence:
    """The dependences that a trial's data flow shows."""
    trial.read = bool(flow.read)
    on_elements = "Python reads values of the parameter" if flow.read else None
    on_parameters = "Python reads numbers that come from several parameters" if flow.together else None
    for number, parameter in enumerate(trial.parameters):
        for what, tensor in trial.kept(parameter):
            origin = flow.origin(tensor)
            if origin.parameters - {number}:
                on_parameters = f"{what} of a parameter come from data of other parameters"
            elif origin.mixed:
                on_elements = f"{what} of an element come from other elements of the parameter"
    if any(flow.origin(tensor).parameters for tensor in trial.shared):
        on_parameters = "a tensor of its groups or attributes holds data of parameters"
    return Dependence(on_elements, on_parameters, flow.shapes)


@dataclass(frozen=True, slots=True)
class MethodCall:
    """A call of a method of an optimizer."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def of(self, optimizer: torch.optim.Optimizer) -> Any:
        """Call the method of the object's class."""
        return getattr(type(optimizer), self.method)(optimizer, *self.args, **self.kwargs)


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect on tensors of a method of an optimizer other than its step.

    Attributes:
        writes: whether it changes parameters or states.
        refused: why it cannot run over slices, as text; None if it can.
    """

    writes: bool = False
    refused: str | None = None


def effect_of(optimizer: torch.optim.Optimizer, call: MethodCall, before: Iterable[MethodCall], whole: bool) -> Effect:
    """Watch a call of a method with the optimizer's present options, over small parameters after two steps.

    Args:
        before: calls that may have made states.
        whole: whether the optimizer has whole parameters, each on one rank; else slices.
    """
    members = _members(optimizer)
    trial, flow = _Trial(optimizer, members), DataFlow()
    trial.take(None)
    for earlier in before:
        earlier.of(trial.probe)
    for group, (options, _) in zip(trial.probe.param_groups, members, strict=True):
        group.update({key: value for key, value in options.items() if key in group and key != "param_names"})
    memories = trial.memories
    for number, parameter in enumerate(trial.parameters):
        for _, tensor in trial.kept(parameter):
            flow.give(tensor, number)
        assert parameter.grad is not None
        flow.give(parameter.grad, GRADIENT)
    with flow:
        call.of(trial.probe)
    writes = bool(flow.written & memories) or trial.memories != memories
    found = _judged(trial, flow)
    if GRADIENT in flow.used:
        return Effect(writes, "it reads gradients, which the engine holds")
    if flow.random:
        return Effect(writes, "it draws random numbers, which would be others on each rank")
    if flow.used and not writes:
        return Effect(writes, "it reads weights or states, of which each rank has a slice")
    return Effect(writes, found.on_parameters or (None if whole else found.on_elements))


def shaped_alike(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the steps on parameters of the model's shapes and on a flat piece are the same operations."""
    for group in optimizer.param_groups:
        flat = _program(optimizer, group, torch.ones(8))
        for shape in dict.fromkeys(parameter.shape for parameter in group["params"]):
            try:
                found = _program(optimizer, group, torch.empty(shape, device="meta"))
            except Exception:  # it reads values, such as a count of steps
                found = _program(optimizer, group, torch.ones(SIDES[: len(shape)]))
            if found != flat:
                return False
    return True


def _program(optimizer: torch.optim.Optimizer, group: Options, values: Tensor) -> Sequence[Any]:
    """The operations of two steps on one tensor."""
    parameter, flow = nn.Parameter(values), DataFlow(keep=True)
    probe = probe_of(optimizer, {**group, "lr": 0.01}, [parameter])
    for _ in range(2):
        parameter.grad = torch.ones_like(values)
        with torch.enable_grad(), flow:
            probe.step()
    return flow.program or ()


class _Named(nn.Parameter):
    """A parameter that records reads of missing attributes."""

    asked: set[str]

    def __getattr__(self, name: str) -> Any:
        type(self).asked.add(name)
        raise AttributeError(f"'Parameter' object has no attribute {name!r}")


class _Names(list[str]):
    """Names of parameters that record reads."""

    read = False

    def __getitem__(self, place: Any) -> Any:
        self.read = True
        return super().__getitem__(place)

    def __iter__(self) -> Iterator[str]:
        self.read = True
        return super().__iter__()


class _Trial:
    """A probe over small parameters, and its trial steps.

    Attributes:
        parameters: of all groups.
        asked: missing attributes of parameters that were read.
        names: names of each group's parameters.
        read: whether Python has read values of parameters.
        name: of the optimizer's class.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, members: Sequence[tuple[Options, int]], alike: bool = True
    ) -> None:
        self._optimizer, self._members, self.read, self.name = optimizer, members, False, type(optimizer).__name__
        self._generator = torch.Generator().manual_seed(0)
        self.asked: set[str] = set()
        kind = type("Parameter", (_Named,), {"asked": self.asked})
        count = sum(number for _, number in members)
        shapes = [SIDES[:2] if alike else SIDES[n % 2 : 2 + n % 2] for n in range(count)]
        self.parameters: list[Tensor] = [
            torch.Tensor._make_subclass(kind, self._random(shape), True) for shape in shapes
        ]
        self.names: list[_Names] = []

    def take(self, flow: DataFlow | None, disturbed: int = -1, factor: float = 1.0) -> None:
        """Make the probe and take its steps.

        Args:
            disturbed: the number of a parameter whose values and gradients are multiplied.
        """
        if flow is not None:
            for number, parameter in enumerate(self.parameters):
                flow.give(parameter, number)
        if disturbed >= 0 and math.isfinite(factor):
            with torch.no_grad():
                self.parameters[disturbed].mul_(factor)
        with torch.enable_grad():
            self._make(flow)
            for _ in range(2):
                self._step(flow, disturbed, factor)
            for count in COUNTS if flow is not None else ():
                self._set_counts(count - 1)
                self._step(flow, disturbed, factor)

    @property
    def memories(self) -> set[int]:
        """The memories of all parameters and their states."""
        return {memory_of(tensor) for parameter in self.parameters for _, tensor in self.kept(parameter)}

    def kept(self, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The values and states of a parameter."""
        yield "new values", parameter
        for leaf in tree_leaves(dict(self.probe.state[parameter]) if parameter in self.probe.state else {}):
            if isinstance(leaf, Tensor):
                yield "states", leaf

    @property
    def shared(self) -> list[Tensor]:
        """Tensors that belong to no parameter."""
        groups = [value for group in self.probe.param_groups for key, value in group.items() if key != "params"]
        own = {id(parameter) for parameter in self.parameters}
        found = tree_leaves([groups, [value for _, value in attributes_of(self.probe)]])
        return [leaf for leaf in found if isinstance(leaf, Tensor) and id(leaf) not in own]

    @property
    def numbers(self) -> list[str]:
        """The numbers of the probe and its groups."""
        tables = [vars(self.probe), *self.probe.param_groups]
        return [f"{key} {value!r}" for table in tables for key, value in table.items() if type(value) in (int, float)]

    def _random(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def _make(self, flow: DataFlow | None) -> None:
        groups, place = [], 0
        for group, count in self._members:
            groups.append(({**group, "lr": 0.01}, self.parameters[place : place + count]))
            place += count
        if flow is None:
            self.probe = probe_over_groups(self._optimizer, groups)
        else:
            with flow:
                self.probe = probe_over_groups(self._optimizer, groups)
        for group, (options, _) in zip(self.probe.param_groups, groups, strict=True):
            if "param_names" in options:
                self.names.append(_Names(f"trial.{number}.weight" for number in range(len(group["params"]))))
                group["param_names"] = self.names[-1]

    def _step(self, flow: DataFlow | None, disturbed: int, factor: float) -> None:
        for number, parameter in enumerate(self.parameters):
            parameter.grad = self._random(parameter.shape) * (factor if number == disturbed else 1.0)
            if flow is not None:
                flow.give(parameter.grad, number)
        self._before = self._counts()
        if flow is None:
            self.probe.step()
            return
        with flow:
            self.probe.step()

    def _counts(self) -> dict[tuple[int, Any], float]:
        """The numbers of the probe, its groups and states, by table and key."""
        return {
            (place, key): float(value)
            for place, table in enumerate(self._tables())
            for key, value in table.items()
            if type(value) is int or (isinstance(value, Tensor) and value.numel() == 1)
        }

    def _set_counts(self, count: int) -> None:
        """Set the numbers that grew by one in the last step to `count`."""
        tables, before = self._tables(), self._before
        for (place, key), value in self._counts().items():
            if before.get((place, key), value) == value - 1:
                kept = tables[place][key]
                if isinstance(kept, Tensor):
                    kept.detach().fill_(count)
                else:
                    tables[place][key] = count

    def _tables(self) -> list[dict[Any, Any]]:
        return [vars(self.probe), *self.probe.param_groups, *filter(_is_table, self.probe.state.values())]


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _members(optimizer: torch.optim.Optimizer) -> list[tuple[Options, int]]:
    """The options of each group, and its number of trial parameters: at least two in all to show dependences."""
    groups = optimizer.param_groups[:GROUPS]
    return [({k: v for k, v in g.items() if k != "params"}, 2 if len(groups) <= 2 else 1) for g in groups]


def _disturbed(optimizer: torch.optim.Optimizer, members: Sequence[tuple[Options, int]]) -> str | None:
    """The change of other parameters by one with other gradients and values, as text; None if there is none."""
    usual = _Trial(optimizer, members)
    usual.take(None)
    for disturbed in {0, len(usual.parameters) - 1}:
        for factor in FACTORS:
            other = _Trial(optimizer, members)
            try:
                other.take(None, disturbed, factor)
            except Exception:  # it refuses such gradients itself
                continue
            if usual.numbers != other.numbers:
                return "numbers of its groups or attributes follow the gradients"
            for number in range(len(usual.parameters)):
                pairs = zip(usual.kept(usual.parameters[number]), other.kept(other.parameters[number]), strict=False)
                if number != disturbed and not all(torch.equal(one, two) for (_, one), (_, two) in pairs):
                    return f"a parameter changes otherwise where another has gradients times {factor}"
    return None


def _refuse_names(optimizer: torch.optim.Optimizer, trial: _Trial) -> None:
    """Refuse an optimizer that reads names or attributes of parameters, which slices lack."""
    name, parameters = type(optimizer).__name__, [p for group in optimizer.param_groups for p in group["params"]]
    for key in trial.probe.state:
        if not isinstance(key, Tensor):
            raise OptimizerError(
                f"{name} keeps a state under {key!r}, which is no parameter, and each rank updates its own slices. "
                f"Keep it as a number in the parameter groups, or by parameter."
            )
    way_out = (
        "The engine has slices in the place of the parameters: give those that are treated alike a group of their own, "
        "with an option by which the step goes."
    )
    if any(names.read for names in trial.names):
        raise OptimizerError(f"{name} reads the names of the parameters in its step. {way_out}")
    marks = sorted({key for p in parameters for key in vars(p)} & trial.asked)
    if marks:
        raise OptimizerError(f"{name} reads the attribute '{marks[0]}' of the parameters in its step. {way_out}")
    known = {id(p) for p in parameters}
    for attribute, value in attributes_of(optimizer):
        if _names_any(value, known):
            raise OptimizerError(f"{name} keeps parameters of the model in its attribute '{attribute}'. {way_out}")


def _names_any(value: Any, known: set[int], depth: int = 4) -> bool:
    """Whether a structure contains a parameter of the model, or the id of one."""
    if isinstance(value, Tensor) or type(value) is int:
        return id(value) in known or (type(value) is int and value in known)
    if depth == 0 or not isinstance(value, (dict, list, tuple, set, frozenset)):
        return False
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return any(_names_any(each, known, depth - 1) for each in inner)
