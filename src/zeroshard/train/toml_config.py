"""Options in a TOML file: one frozen dataclass describes them there and on the command line.

Fields that are dataclasses themselves only group options: their options stand in a file at top level or in a table
named after the field. An option may have the name of a group (`tyro.conf.arg(name=...)`): in a file, a table under that
name is the group, and any other value the option. An option that is a plain value or a group of settings may be a
table. A class whose options had other names in earlier versions gives `stored`, which upgrades a table; `ELSEWHERE`
names options of other classes, and those to use instead.
"""

import dataclasses
import difflib
import json
import tomllib
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tomli_w

from zeroshard.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Config = TypeVar("Config", bound=DataclassInstance)
else:
    Config = TypeVar("Config")

NONE = "None"  # an absent value in a file, as on the command line
_PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", Path: "a path as a string"}
_MISMATCH = object()


def load_toml(path: Path, cls: type[Config]) -> Config:
    """The options in the file at `path`, over the defaults of `cls`; dashes in names may be underscores.

    Raises:
        ConfigError: the file is missing or no TOML; an option is unknown, given twice, of the wrong type or lacking.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the options file {path} cannot be read ({error.strerror}); name one that can") from error
    except ValueError as error:  # not TOML or not UTF-8; tomllib's message has the line and the column
        raise ConfigError(f"{path} is not valid TOML: {error}; correct it there") from error
    values: dict[tuple[str, ...], Any] = {}
    for place, key, value, hint in _given(getattr(cls, "stored", dict)(table), cls, (), path):
        if place in values:
            raise ConfigError(f"{path} gives the option {key} twice, and it can have only one value; remove one")
        values[place] = _converted(value, hint, key, path)
    try:
        config: Config = _instance(cls, values, ())
    except KeyError as error:
        raise ConfigError(f"{path} lacks the option {error.args[0]}, which has no default; add it") from error
    return config


def dump_toml(config: "DataclassInstance", path: Path) -> None:
    """Write all options to `path`, groups as tables, so that `load_toml` gives an equal `config`.

    TOML has no None: such an option is left out if None is its default, otherwise written as "None".
    """
    path.write_text(tomli_w.dumps(_table(config)), encoding="utf-8")


def _hints(cls: Any) -> dict[str, Any]:
    """Name to type, for every field that the constructor takes."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def _called(cls: Any) -> dict[str, str]:
    """The fields of `cls` with another name on the command line, by that name."""
    hints = get_type_hints(cls, include_extras=True)
    extras = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {extra.name: name for name, found in extras.items() for extra in found if getattr(extra, "name", None)}


def _options(cls: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(place, type) of every option, groups entered; the last name of a place is the flat name."""
    for name, hint in _hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from _options(hint, (*place, name))
        else:
            yield (*place, name), hint


def _given(
    table: Mapping[str, Any], cls: Any, place: tuple[str, ...], file: Path
) -> Iterator[tuple[tuple[str, ...], str, Any, Any]]:
    """(place, key as written, value, type) of every option in `table`; refuses keys that `cls` does not have."""
    hints = _hints(cls)
    options = {inside[-1]: (inside, hint) for inside, hint in reversed(list(_options(cls, place)))}
    options |= {called: options[name] for called, name in _called(cls).items()}
    for key, value in table.items():
        name = key.replace("-", "_")
        if dataclasses.is_dataclass(hints.get(name)) and (isinstance(value, dict) or name not in options):
            if not isinstance(value, dict):
                raise ConfigError(_wrong(key, value, "a table of options", file))
            yield from _given(value, hints[name], (*place, name), file)
        elif name in options:
            inside, hint = options[name]
            yield inside, key, value, hint
        else:
            instead = ", ".join(filter(None, getattr(cls, "ELSEWHERE", {}).get(name, ())))
            raise ConfigError(_unknown(key, sorted({*options, *hints}), instead, file))


def _unknown(key: str, valid: list[str], instead: str, file: Path) -> str:
    if instead:
        return f"{file} has an unknown option {key}; use {instead}"
    near = difflib.get_close_matches(key.replace("-", "_"), valid, n=1)
    way_out = f"did you mean {near[0]}?" if near else f"the options there are {', '.join(valid)}"
    return f"{file} has an unknown option {key}; {way_out}"


def _instance(cls: Any, values: Mapping[tuple[str, ...], Any], place: tuple[str, ...]) -> Any:
    """`cls` with `values` set over its defaults. Raises `KeyError` for an option that has neither."""
    chosen: dict[str, Any] = {}
    for field in (field for field in dataclasses.fields(cls) if field.init):
        inside = (*place, field.name)
        hint = _hints(cls)[field.name]
        if inside in values:
            chosen[field.name] = values[inside]
        elif dataclasses.is_dataclass(hint):
            given = {at: value for at, value in values.items() if at[: len(inside)] == inside}
            chosen[field.name] = _instance(hint, {**_values(_default(field), inside), **given}, inside)
        elif _default(field) is dataclasses.MISSING:
            raise KeyError(field.name)
    return cls(**chosen)


def _default(field: "dataclasses.Field[Any]") -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _values(config: Any, place: tuple[str, ...]) -> dict[tuple[str, ...], Any]:
    """Place to value of every option of `config`; nothing when a group has no default of its own."""
    if config is dataclasses.MISSING:
        return {}
    found: dict[tuple[str, ...], Any] = {}
    for name, hint in _hints(type(config)).items():
        value = getattr(config, name)
        inside = dataclasses.is_dataclass(hint)
        found |= _values(value, (*place, name)) if inside else {(*place, name): value}
    return found


def group_in(hint: Any) -> Any:
    """The group of settings that a field may be instead of a plain value, or None."""
    inside = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else ()
    return next((choice for choice in inside if dataclasses.is_dataclass(choice)), None)


def _converted(value: Any, hint: Any, key: str, file: Path) -> Any:
    group = group_in(hint)
    if group is not None and isinstance(value, dict):
        settings = {place[-1]: _converted(inner, inside, f"{key}.{name}", file)
                    for place, name, inner, inside in _given(value, group, (), file)}  # fmt: skip
        return group(**settings)
    result = _match(value, hint)
    if result is _MISMATCH:
        raise ConfigError(_wrong(key, value, _spell(hint), file))
    return result


def _wrong(key: str, value: Any, needed: str, file: Path) -> str:
    found = f"{json.dumps(value, default=str)}, {type(value).__name__}"
    return f"{file} gives the option {key} as {found}; it needs {needed}"


def _match(value: Any, hint: Any) -> Any:
    """`value` of a TOML file as a `hint`, or `_MISMATCH`."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return next((choice for choice in inner if type(choice) is type(value) and choice == value), _MISMATCH)
    if origin in (Union, types.UnionType):
        if value == NONE and type(None) in inner:
            return None
        results = (_match(value, choice) for choice in inner)
        return next((result for result in results if result is not _MISMATCH), _MISMATCH)
    if origin is tuple:
        return _match_tuple(value, inner)
    if hint is float and type(value) is int:
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    return value if type(value) is hint else _MISMATCH


def _match_tuple(value: Any, inner: tuple[Any, ...]) -> Any:
    if not isinstance(value, list):
        return _MISMATCH
    hints = (inner[0],) * len(value) if inner[1:] == (...,) else inner
    if len(hints) != len(value):
        return _MISMATCH
    results = tuple(_match(item, hint) for item, hint in zip(value, hints, strict=True))
    return _MISMATCH if _MISMATCH in results else results


def _spell(hint: Any) -> str:
    """`hint` in words, for a message."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(json.dumps(choice) for choice in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(f'"{NONE}"' if choice is type(None) else _spell(choice) for choice in inner)
    if origin is tuple and inner[1:] == (...,):
        return f"a list, each item {_spell(inner[0])}"
    if origin is tuple:
        return f"a list of {len(inner)}: " + ", ".join(_spell(choice) for choice in inner)
    return _PLAIN.get(hint, "a table" if dataclasses.is_dataclass(hint) else getattr(hint, "__name__", str(hint)))


def _table(config: Any, usual: Any = None) -> dict[str, Any]:
    """`config` as TOML values; a None is written unless `usual`, the default of its group, has it too."""
    table: dict[str, Any] = {}
    for field in (field for field in dataclasses.fields(config) if field.init):
        value = getattr(config, field.name)
        default = _default(field) if usual is None else getattr(usual, field.name)
        if dataclasses.is_dataclass(value):
            table[field.name] = _table(value, default if type(default) is type(value) else None)
        elif value is not None:
            table[field.name] = _plain(value)
        elif default is not None:
            table[field.name] = NONE
    return table


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
