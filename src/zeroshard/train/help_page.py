"""The help of a command: the options of a dataclass in boxes, each with its type, meaning and default.

A class may say more: `SECTIONS` gives a box its title by the first field in it, and `FIRST` the fields that a first run
needs, which `--help` shows alone; `--help-all` shows all. Without `FIRST` both show all.
"""

import ast
import dataclasses
import inspect
import itertools
import shlex
import textwrap
import types
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from rich.box import ROUNDED
from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

from zeroshard.train.toml_config import group_in

WIDEST = 120  # columns of a readable line
POSITIONAL = get_args(tyro.conf.Positional[int])[1]
KINDS = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH"}
NOUNS = {int: "whole number", float: "number", str: "text", Path: "path", type(None): "None"}
CONFIG = "--config FILE reads options from a TOML file first; the command line overrides them."


@dataclasses.dataclass(frozen=True)
class OptionHelp:
    """One option as the help shows it.

    Attributes:
        name: of its field, or of the field of the group whose first setting it is.
        box: title of its box; empty for the first.
        flags: of the command line; none for a positional argument.
        default: empty where there is none to show, and None where a value must be given.
    """

    name: str
    box: str
    flags: tuple[str, ...]
    kind: str
    about: str
    default: str | None


def help_page(cls: Any, config: Any, prog: str, whole: bool) -> str:
    """The help of the command `prog`, as wide as the terminal.

    Args:
        cls: class of its options.
        config: an instance with the defaults; None for those of the class.
        whole: every option, in boxes; otherwise those of a first run.
    """
    options, first = list(_options(cls, config)), getattr(cls, "FIRST", None)
    shown = options if whole or first is None else [dataclasses.replace(o, box="") for o in options if o.name in first]
    console = Console(highlight=False, markup=False)
    console.width = min(console.width, WIDEST)
    places = [option.kind if option.default is None else f"[{option.kind}]" for option in shown if not option.flags]
    with console.capture() as page:
        console.print(f"usage: {' '.join((prog, '[OPTIONS]', *places))}\n")
        for paragraph in (*inspect.cleandoc(cls.__doc__ or "").split("\n\n"), CONFIG):
            console.print(" ".join(paragraph.split()), end="\n\n")
        for title in dict.fromkeys(option.box for option in shown):
            console.print(_box(title or "options", [option for option in shown if option.box == title]))
        if len(shown) < len(options):
            console.print(f"These are the options of a first run; {prog} --help-all shows all {len(options)}.")
    return "".join(f"{line.rstrip()}\n" for line in page.get().splitlines())


def kind_of(hint: Any) -> str:
    """The values of a type, such as "INT", "{auto,never}|PATH" or "NAME ..."; None is not shown."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return kind_of(inner[0])
    if origin is Literal:
        return "{" + ",".join(str(choice) for choice in inner if choice is not None) + "}"
    if origin in (Union, types.UnionType):
        return "|".join(dict.fromkeys(kind_of(choice) for choice in inner if choice is not type(None)))
    if origin is tuple and inner[1:] == (...,):
        return f"{'NAME' if inner[0] is str else kind_of(inner[0])} ..."
    if origin is tuple:
        return " ".join(kind_of(choice) for choice in inner)
    return KINDS.get(hint, getattr(hint, "__name__", str(hint)).upper())


def described_values(hint: Any) -> str:
    """The values of a type as words of a sentence, such as "a whole number or None"."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return described_values(inner[0])
    if origin is Literal:
        return "one of " + ", ".join(map(str, inner))
    if origin in (Union, types.UnionType):
        return " or ".join(described_values(choice) for choice in inner)
    if origin is tuple and inner[1:] == (...,):
        return f"a list of {NOUNS.get(inner[0], 'value')}s"
    if origin is tuple:
        return " and ".join(described_values(choice) for choice in inner)
    noun = NOUNS.get(hint, getattr(hint, "__name__", str(hint)))
    return noun if noun == str(None) else f"a {noun}"


def default_text(value: Any) -> str:
    """A default as typed; empty for none, for an empty list and for an empty text."""
    if value is None or value in ((), ""):
        return ""
    return shlex.join(map(str, value)) if isinstance(value, tuple) else shlex.quote(str(value))


def _options(cls: Any, config: Any, box: str = "") -> Iterator[OptionHelp]:
    """Every option of `cls`, groups after single options."""
    hints, aliases, later = get_type_hints(cls, include_extras=True), getattr(cls, "ALIASES", {}), []
    sections = getattr(cls, "SECTIONS", {})
    for field in (field for field in dataclasses.fields(cls) if field.init):
        name, hint = field.name, hints[field.name]
        value = _default(field) if config is None else getattr(config, name)
        box, group = sections.get(name, box), group_in(hint)
        if dataclasses.is_dataclass(hint):
            later.append(_options(hint, None if value is dataclasses.MISSING else value, name))
        elif group is not None:
            later.append(_settings(group, value, name, aliases.get(name, ())))
        else:
            yield _option(cls, name, _given_name(hint) or name, hint, value, aliases.get(name, ()), box)
    for options in later:
        yield from options


def _settings(group: Any, value: Any, name: str, aliases: Sequence[str]) -> Iterator[OptionHelp]:
    """The options of a group of settings; the first has the name of the group."""
    config = value if isinstance(value, group) else group(value)
    box, hints = name.replace("_", "-"), get_type_hints(group, include_extras=True)
    for place, field in enumerate(dataclasses.fields(group)):
        called, others = (f"{box}.{field.name}", ()) if place else (box, aliases)
        option = _option(group, field.name, called, hints[field.name], getattr(config, field.name), others, box)
        yield dataclasses.replace(option, name=f"{name}.{field.name}" if place else name)


def _option(cls: Any, name: str, called: str, hint: Any, value: Any, aliases: Sequence[str], box: str) -> OptionHelp:
    called = called.replace("_", "-")
    about = " ".join(_abouts(cls).get(name, "").split())
    default = None if value is dataclasses.MISSING else default_text(value)
    if POSITIONAL in get_args(hint):
        return OptionHelp(name, box, (), name.upper(), about, default)
    if hint is bool:
        group, dot, setting = called.rpartition(".")
        return OptionHelp(name, box, (f"--{called}", f"--{group}{dot}no-{setting}"), "", about, default)
    return OptionHelp(name, box, (f"--{called}", *aliases), kind_of(hint), about, default)


def _given_name(hint: Any) -> str | None:
    """The name that an annotation gives an option."""
    extras = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((extra.name for extra in extras if getattr(extra, "name", None)), None)


def _default(field: "dataclasses.Field[Any]") -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


@cache
def _abouts(cls: type[Any]) -> dict[str, str]:
    """The docstrings of the fields of a class and of its bases, by name."""
    found: dict[str, str] = {}
    for base in (base for base in reversed(inspect.getmro(cls)) if dataclasses.is_dataclass(base)):
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError):  # a class that was typed at a prompt has no source
            continue
        body = tree.body if isinstance(tree, ast.ClassDef) else []
        for field, text in itertools.pairwise(body):
            docstring = (
                text.value.value if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) else None
            )
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(docstring, str):
                found[field.target.id] = docstring
    return found


def _box(title: str, options: Iterable[OptionHelp]) -> Panel:
    """A box of options, each with its meaning below."""
    lines: list[Text | Padding] = []
    for option in options:
        lines.append(Text.assemble((", ".join(option.flags), "bold"), " " * bool(option.flags), (option.kind, "cyan")))
        about = Text(option.about)
        if option.default is None:
            about.append(" (required)", "red")
        elif option.default:
            about.append(f" (default: {option.default})", "dim")
        lines.append(Padding(about, (0, 0, 0, 6)))
    return Panel(Group(*lines), title=title, title_align="left", box=ROUNDED, border_style="dim")
