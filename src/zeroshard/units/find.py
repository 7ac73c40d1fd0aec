"""The units of a model: its repeated blocks, or modules that the user names; the rest is the root unit."""

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from zeroshard.errors import PlanError
from zeroshard.units.ignored import is_ignored

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
UNDIVIDED = "undivided"  # an attribute, true of modules in which no unit begins: not all of them run in each forward


@dataclass(slots=True, eq=False)
class Unit:
    """One unit: a module and the parameters that are gathered, reduced and freed at once.

    Attributes:
        number: its place in the order of units (registration order, root last), which collectives follow.
        name: the module's path in the model; "" for the root.
        module: the module whose forward is the unit's.
        parameters: by name, each parameter once.
        owners: modules that hold one of these parameters directly.
    """

    number: int
    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    owners: list[nn.Module] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The name in messages and tables."""
        return self.name or "root"


def find_units(model: nn.Module, wanted: Sequence[str] | None = None) -> list[Unit]:
    """Cut a model into units.

    By rule, the units are the outermost modules that repeat: children of a `ModuleList`, `Sequential` or `ModuleDict`
    that share their class with a sibling. With `wanted`, they are the modules of the named classes or paths. Every
    parameter belongs to the innermost unit around all of its uses, so a tied parameter is stored once; ignored ones
    belong to none.

    Raises:
        PlanError: a wanted name fits no module.
    """
    chosen = list(_named(model, wanted)) if wanted is not None else list(_repeated(model, ""))
    first_path = {module: path for path, module in model.named_modules()}
    modules = dict(model.named_modules(remove_duplicate=False))
    paths = list(dict.fromkeys(first_path[modules[path]] for path in chosen))
    units = [Unit(n, path, modules[path]) for n, path in enumerate([*(path for path in paths if path), ""])]
    _assign_parameters(model, modules, units)
    units = [unit for unit in units if unit.parameters or unit.name == ""]
    for number, unit in enumerate(units):
        unit.number = number
    return units


def _repeated(module: nn.Module, path: str) -> Iterator[str]:
    children = [] if getattr(module, UNDIVIDED, False) else list(module.named_children())
    kinds = Counter(type(child) for _, child in children if next(child.parameters(), None) is not None)
    for name, child in children:
        where = f"{path}.{name}" if path else name
        repeats = isinstance(module, CONTAINERS) and kinds[type(child)] >= 2
        if repeats and not isinstance(child, CONTAINERS):
            yield where
        else:
            inner = list(_repeated(child, where))
            yield from inner or ([where] if repeats else [])


def _named(model: nn.Module, wanted: Sequence[str]) -> Iterator[str]:
    modules = dict(model.named_modules(remove_duplicate=False))
    classes = {type(module).__name__ for module in modules.values()}
    for want in wanted:
        if want not in modules and want not in classes:
            near = difflib.get_close_matches(want, [*classes, *modules], n=1)
            hint = (
                f"Did you mean {near[0]!r}?"
                if near
                else f"Name a path or one of its classes: {', '.join(sorted(classes))}."
            )
            raise PlanError(f"units names {want!r}, which is no class and no path in the model. {hint}")
    whole = [path for path, module in modules.items() if getattr(module, UNDIVIDED, False)]
    for path, module in modules.items():
        if path in wanted or type(module).__name__ in wanted:
            around = next(
                (each for each in whole if path.startswith(f"{each}." if each else "") and path != each), None
            )
            if around is not None:
                raise PlanError(
                    f"The unit {path!r} is inside of {around!r}, whose modules do not all run in each forward, so that "
                    f"ranks would wait for each other. Name {around!r} or a module around it."
                )
            yield path


def _assign_parameters(model: nn.Module, modules: dict[str, nn.Module], units: list[Unit]) -> None:
    uses: dict[nn.Parameter, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if not is_ignored(parameter):
            uses.setdefault(parameter, []).append(path)
    unit_of = {unit.module: unit for unit in units}
    for parameter, paths in uses.items():
        first, *others = [_skipped_in_graph(path, modules) for path in paths]
        innermost = next(module for module in first if module in unit_of and all(module in way for way in others))
        unit_of[innermost].parameters[paths[0]] = parameter
    unit_by_parameter = {parameter: unit for unit in units for parameter in unit.parameters.values()}
    for module in model.modules():
        direct = [parameter for parameter in module._parameters.values() if parameter is not None]
        for unit in dict.fromkeys(unit_by_parameter[p] for p in direct if p in unit_by_parameter):
            unit.owners.append(module)


def _skipped_in_graph(path: str, modules: dict[str, nn.Module]) -> list[nn.Module]:
    """The modules around a parameter, innermost first."""
    names = path.split(".")[:-1]
    return [modules[".".join(names[:n])] for n in range(len(names), -1, -1)]
