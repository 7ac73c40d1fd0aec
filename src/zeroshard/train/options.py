"""Options of a command: a frozen dataclass, its fields as options, with a TOML file as their defaults.

Fields that are dataclasses only group options, which have flat names. A field that is a plain value or a group of
settings (`int | Pipeline`) is an option of its own name, for the group's first setting, and one for each other setting:
`--pipeline-parallel 4 --pipeline-parallel.schedule gpipe`. A class may give other names of options in `ALIASES`, and in
`ELSEWHERE` options of other commands or versions: by name, the option to use instead and its meaning, which is empty
for an option that only has another name here.
"""

import argparse
import dataclasses
import re
import sys
from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import tyro

from zeroshard.errors import ConfigError
from zeroshard.train.help_page import POSITIONAL, described_values, help_page, kind_of
from zeroshard.train.option_names import in_options
from zeroshard.train.toml_config import NONE, group_in, load_toml

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Config = TypeVar("Config", bound=DataclassInstance)
else:
    Config = TypeVar("Config")

HELP = {"-h": False, "--help": False, "--help-all": True}  # whether the help shows every option


def parse(cls: type[Config], argv: Sequence[str], prog: str) -> Config:
    """The options of `argv`, over those of the file that `--config FILE` names, over the defaults of `cls`.

    `--help`, and options that cannot be read or that `cls` refuses with a `ValueError` (as `ConfigError` is), print to
    the terminal and raise `SystemExit` (codes 0 and 2).

    Raises:
        ConfigError: see `load_toml`.
    """
    first = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    known, rest = first.parse_known_args(list(argv))
    given = None if known.config is None else load_toml(known.config, cls)
    argv = rest[: rest.index("--")] if "--" in rest else rest
    helps = [HELP[argument] for argument in argv if argument in HELP]
    if helps:
        print(help_page(cls, given, prog, any(helps)), end="")
        raise SystemExit(0)
    options = _options_of(cls)
    default = tyro.MISSING_NONPROP if given is None else _spelled_out(given, options)
    try:
        _refuse_elsewhere(cls, argv)
        found: Any = tyro.cli(options, args=rest, prog=prog, default=default)
        config: Config = found.chosen()
    except ValueError as error:
        print(f"{prog}: {in_options(str(error), cls, argv)}", file=sys.stderr)
        raise SystemExit(2) from error
    return config


def _refuse_elsewhere(cls: Any, argv: Sequence[str]) -> None:
    """Raise `ConfigError` for an option that only another command or version has, with its value where that stays."""
    for argument, following in pairwise([*argv, ""]):
        option, _, value = argument.partition("=")
        instead, meaning = getattr(cls, "ELSEWHERE", {}).get(option[2:].replace("-", "_"), ("", ""))
        if not option.startswith("--") or not instead:
            continue
        value = value or ("" if following.startswith("--") else following)
        rest = f", {meaning}" if meaning else f" {value}".rstrip()
        raise ConfigError(f"There is no option {option} here; use --{instead.replace('_', '-')}{rest}.")


class _Options:
    """Parsed options; `chosen` makes an instance of their class."""

    made: Any

    def __post_init__(self) -> None:
        """Check nothing until all options are read."""

    def chosen(self) -> Any:
        """An instance of the class."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        return self.made(**{name: v.chosen() if isinstance(v, _Options) else v for name, v in values.items()})


@cache
def _options_of(cls: Any) -> Any:
    """`cls` with the names of its options, groups of settings spelled out."""
    hints, aliases = get_type_hints(cls, include_extras=True), getattr(cls, "ALIASES", {})
    plain = get_type_hints(cls)
    space: dict[str, Any] = {"__annotations__": {}, "__doc__": cls.__doc__, "__module__": cls.__module__, "made": cls}
    for field in (field for field in dataclasses.fields(cls) if field.init):
        name, group = field.name, group_in(plain[field.name])
        known = tuple(aliases.get(name, ()))
        if dataclasses.is_dataclass(plain[name]):
            hint = _options_of(plain[name])
            space["__annotations__"][name] = Annotated[hint, tyro.conf.arg(name="")]
            space[name] = dataclasses.field(default_factory=partial(_default, field, hint))
        elif group is not None:
            hint = _settings_of(group, name, known)
            space["__annotations__"][name] = hint
            space[name] = dataclasses.field(default_factory=partial(_default, field, hint))
        else:
            space["__annotations__"][name] = _described(hints[name], known)
            if field.default_factory is not dataclasses.MISSING:
                space[name] = dataclasses.field(default_factory=field.default_factory)
    made = type(cls.__name__, (_Options, cls), space)
    return dataclasses.dataclass(frozen=True, kw_only=True, repr=False)(made)


@cache
def _settings_of(group: Any, name: str, aliases: tuple[str, ...]) -> Any:
    """The options of a group; the first has the name of the group."""
    hints = get_type_hints(group, include_extras=True)
    first, *others = dataclasses.fields(group)
    group_name = tyro.conf.arg(name=name.replace("_", "-"), prefix_name=False)
    space = {
        "__annotations__": {
            first.name: Annotated[_described(hints[first.name], aliases), group_name],
            **{field.name: _described(hints[field.name]) for field in others},
        },
        **{"__doc__": group.__doc__, "made": group, "__module__": group.__module__},
    }
    return dataclasses.dataclass(frozen=True, repr=False)(type(group.__name__, (_Options, group), space))


def _described(hint: Any, aliases: tuple[str, ...] = ()) -> Any:
    """The type of an option with its aliases, and its values and default as the help shows them."""
    if hint is bool:
        return Annotated[hint, tyro.conf.arg(help_behavior_hint=_default_hint, aliases=aliases or None)]
    kind = None if POSITIONAL in get_args(hint) else kind_of(hint)
    shown = tyro.conf.arg(metavar=kind, help_behavior_hint=_default_hint, aliases=aliases or None)
    return Annotated[hint, shown, _explained(hint)]


def _explained(hint: Any) -> Any:
    """The conversion from text to a type, with errors that name the value and the values that the type has."""
    made = tyro.constructors.ConstructorRegistry.get_primitive_spec(
        tyro.constructors.PrimitiveTypeInfo.make(hint, set())
    )
    assert isinstance(made, tyro.constructors.PrimitiveConstructorSpec), made

    def convert(texts: list[str]) -> Any:
        try:
            return made.instance_from_str(texts)
        except ValueError:
            raise ValueError(f"{' '.join(texts)!r} is not {described_values(hint)}.") from None

    order = [*re.split(r"[{},|]+", kind_of(hint)), NONE]  # as declared; tyro shuffles choices with None
    choices = made.choices and tuple(sorted(made.choices, key=order.index))
    return dataclasses.replace(made, instance_from_str=convert, choices=choices)


def _default_hint(text: str) -> str:
    """A default, appended to the meaning of an option."""
    return "" if text in ("None", "", "''") else f"(default: {text})"


def _default(field: "dataclasses.Field[Any]", options: Any) -> Any:
    """The command-line options of a field's default."""
    usual = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return _spelled_out(usual, options)


def _spelled_out(config: Any, options: Any) -> Any:
    """The options that give `config`, which may be the short form of a group."""
    config = config if isinstance(config, options.made) else options.made(config)
    hints, values = get_type_hints(options), {}
    for field in (field for field in dataclasses.fields(config) if field.init):
        value, hint = getattr(config, field.name), hints[field.name]
        inside = isinstance(hint, type) and issubclass(hint, _Options)
        values[field.name] = _spelled_out(value, hint) if inside else value
    return options(**values)
