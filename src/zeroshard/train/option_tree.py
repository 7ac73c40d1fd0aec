"""Options of a frozen dataclass: one description behind the command line, its help, TOML files and error messages.

A field that is a dataclass only groups options, which have flat names. A field that is a plain value or a group of
settings (`int | Pipeline`) is an option of its own name, for the group's first setting, and one for each other setting:
`--pipeline-parallel 4 --pipeline-parallel.schedule gpipe`.

A class may have more class attributes: `ALIASES` gives other names of options; `SECTIONS` the title of a box of the
help by the first field in it; `FIRST` the fields that a first run needs; `ELSEWHERE` options of other commands or
versions, by name: the option to use instead and its meaning, which is empty for an option that only was renamed.
"""

import ast
import dataclasses
import inspect
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

Value = TypeVar("Value")
Path = tuple[str, ...]  # fields from a class to one of its options
POSITIONAL = "positional"
Positional = Annotated[Value, POSITIONAL]


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """Annotation of a field whose option has another name than the field."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One option of a command.

    Attributes:
        path: fields from the class to the option.
        name: of the field; in a group, of the group for the first setting, and "group.setting" for the others.
        flags: of the command line, such as ("--out", "--output-dir"); none for a positional argument.
        hint: type of its values.
        about: meaning.
        default: `dataclasses.MISSING` where a value must be given.
        box: title of its box in the help; empty for the first.
        group: field of the group that has it, or empty.
    """

    path: Path
    name: str
    flags: Path
    hint: Any
    about: str
    default: Any
    box: str
    group: str = ""

    @property
    def required(self) -> bool:
        """Whether a value must be given."""
        return self.default is dataclasses.MISSING


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One field of a class of options: its type, annotations, default, and the class of its own fields, if any."""

    name: str
    hint: Any
    annotations: tuple[Any, ...]
    default: Any
    inside: Any

    @property
    def nested(self) -> bool:
        """Whether the field only groups options."""
        return self.inside is self.hint

    @property
    def called(self) -> str:
        """The name of its option."""
        return next((each.name for each in self.annotations if isinstance(each, Named)), self.name)

    def expanded(self, value: Any) -> Any:
        """A value of the field, which may be the short form of a group, as its class; None without a value."""
        if value is dataclasses.MISSING:
            return None
        return value if isinstance(value, self.inside) else self.inside(value)


@cache
def settings_of(cls: type[Any]) -> tuple[Setting, ...]:
    """The fields that the constructor takes."""
    hints, settings = get_type_hints(cls, include_extras=True), []
    for field in (field for field in dataclasses.fields(cls) if field.init):
        annotated = get_origin(hints[field.name]) is Annotated
        hint, *annotations = get_args(hints[field.name]) if annotated else [hints[field.name]]
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        inside = next((each for each in (hint, *choices(hint)) if dataclasses.is_dataclass(each)), None)
        settings.append(Setting(field.name, hint, tuple(annotations), default, inside))
    return tuple(settings)


def choices(hint: Any) -> tuple[Any, ...]:
    """The types of a union; none of another type."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else ()


def options_of(cls: Any, config: Any = None) -> list[Option]:
    """Every option of `cls`, groups after single options.

    Args:
        config: an instance with the defaults; None for those of the class.
    """
    return list(_options(cls, config, (), ""))


def _options(cls: Any, config: Any, path: Path, box: str, group: str = "") -> Iterator[Option]:
    aliases, sections, abouts = getattr(cls, "ALIASES", {}), getattr(cls, "SECTIONS", {}), _abouts(cls)
    later: list[Iterable[Option]] = []
    for place, setting in enumerate(settings_of(cls)):
        name, inside = setting.name, (*path, setting.name)
        box = sections.get(name, box)
        value = setting.default if config is None else getattr(config, name)
        if setting.nested:
            later.append(_options(setting.inside, setting.expanded(value), inside, name))
        elif setting.inside is not None:
            first, *others = _options(setting.inside, setting.expanded(value), inside, name.replace("_", "-"), name)
            flags = (*first.flags, *aliases.get(name, ()))
            later.append([dataclasses.replace(first, flags=flags), *others])
        else:
            called = f"{group}.{name}" if group and place else group or setting.called
            flags = () if POSITIONAL in setting.annotations else (*_flags(called, setting.hint), *aliases.get(name, ()))
            about = " ".join(abouts.get(name, "").split())
            yield Option(inside, called if group else name, flags, setting.hint, about, value, box, group)
    for options in later:
        yield from options


def _flags(name: str, hint: Any) -> Path:
    group, dot, setting = name.replace("_", "-").rpartition(".")
    return (f"--{group}{dot}{setting}", *([f"--{group}{dot}no-{setting}"] if hint is bool else []))


def built(cls: Any, values: Mapping[Path, Any], base: Any = None, path: Path = ()) -> Any:
    """An instance of `cls` with `values` by their paths, over those of `base` or the defaults of the class.

    Raises:
        KeyError: an option has no value.
    """
    chosen: dict[str, Any] = {}
    for setting in settings_of(cls):
        inside = (*path, setting.name)
        default = setting.default if base is None else getattr(base, setting.name)
        if inside in values:
            chosen[setting.name] = values[inside]
        elif setting.nested or (setting.inside and any(at[: len(inside)] == inside for at in values)):
            chosen[setting.name] = built(setting.inside, values, setting.expanded(default), inside)
        elif default is dataclasses.MISSING:
            raise KeyError(setting.name)
        else:
            chosen[setting.name] = default
    return cls(**chosen)


@cache
def _abouts(cls: type[Any]) -> dict[str, str]:
    """The docstrings of the fields of a class and of its bases, by name."""
    found: dict[str, str] = {}
    for base in (base for base in reversed(inspect.getmro(cls)) if dataclasses.is_dataclass(base)):
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError):  # a class that was typed at a prompt has no source
            continue
        for field, text in pairwise(tree.body if isinstance(tree, ast.ClassDef) else []):
            docstring = (
                text.value.value if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) else None
            )
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(docstring, str):
                found[field.target.id] = docstring
    return found
