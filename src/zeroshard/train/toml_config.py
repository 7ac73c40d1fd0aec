"""Options in a TOML file; `option_tree` describes them.

Their options stand in a file at top level or in a table named after the field that groups them. An option may have the
name of a group: in a file, a table under that name is the group, and any other value the option. An option that is a
plain value or a group of settings may be a table. A class whose options had other names in earlier versions gives
`stored`, which upgrades a table.
"""

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from zeroshard.errors import ConfigError
from zeroshard.train.option_tree import Setting, built, settings_of
from zeroshard.train.option_values import NONE, described_values, from_toml

Config = TypeVar("Config")

Place = tuple[str, ...]  # fields from a class to one of its options


def load_toml(path: Path, cls: type[Config]) -> Config:
    """The options in the file at `path`, over the defaults of `cls`; dashes in names may be underscores.

    Raises:
        ConfigError: the file is missing or no TOML; an option is unknown, given twice, of the wrong type or lacking.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the options file {path} cannot be read ({error.strerror}); name one that can be read"
        ) from error
    except ValueError as error:  # not TOML or not UTF-8; tomllib's message has the line and the column
        raise ConfigError(f"{path} is not valid TOML: {error}; correct it there") from error
    values: dict[Place, Any] = {}
    for place, key, value in _given(getattr(cls, "stored", dict)(table), cls, (), path):
        if place in values:
            raise ConfigError(f"{path} gives the option {key} twice, and it can have only one value; remove one")
        values[place] = value
    try:
        config: Config = built(cls, values)
    except KeyError as error:
        raise ConfigError(f"{path} lacks the option {error.args[0]}, which has no default; add it") from error
    return config


def _given(
    table: Mapping[str, Any], cls: Any, at: Place, file: Path, above: str = ""
) -> Iterator[tuple[Place, str, Any]]:
    """(place, key as written, value) of every option in `table`; refuses keys that `cls` does not have."""
    fields = {setting.name: setting for setting in settings_of(cls) if setting.nested}
    options = dict(_flat(cls, at))
    for key, value in table.items():
        name, shown = key.replace("-", "_"), f"{above}{key}"
        if name in fields and (isinstance(value, dict) or name not in options):
            if not isinstance(value, dict):
                raise ConfigError(_wrong(shown, value, "a table of options", file))
            yield from _given(value, fields[name].inside, (*at, name), file)
            continue
        if name not in options:
            instead = ", ".join(filter(None, getattr(cls, "ELSEWHERE", {}).get(name, ())))
            raise ConfigError(_unknown(key, sorted({*options, *fields}), instead, file))
        place, setting = options[name]
        if setting.inside is not None and isinstance(value, dict):
            yield from _given(value, setting.inside, place, file, f"{shown}.")
            continue
        try:
            yield place, shown, from_toml(value, setting.hint)
        except ValueError as error:
            raise ConfigError(_wrong(shown, value, described_values(setting.hint, json.dumps), file)) from error


def _flat(cls: Any, at: Place) -> Iterator[tuple[str, tuple[Place, Setting]]]:
    """Every option by its names, with its place; those of `cls` itself last."""
    for setting in settings_of(cls):
        if setting.nested:
            yield from _flat(setting.inside, (*at, setting.name))
    for setting in settings_of(cls):
        if not setting.nested:
            yield from ((name, ((*at, setting.name), setting)) for name in (setting.name, setting.called))


def _unknown(key: str, valid: list[str], instead: str, file: Path) -> str:
    if instead:
        return f"{file} has an unknown option {key}; use {instead}"
    near = difflib.get_close_matches(key.replace("-", "_"), valid, n=1)
    way_out = f"did you mean {near[0]}?" if near else f"the options there are {', '.join(valid)}"
    return f"{file} has an unknown option {key}; {way_out}"


def _wrong(key: str, value: Any, needed: str, file: Path) -> str:
    found = f"{json.dumps(value, default=str)}, {type(value).__name__}"
    return f"{file} gives the option {key} as {found}; it needs {needed}"


def dump_toml(config: Any, path: Path) -> None:
    """Write all options to `path`, groups as tables, so that `load_toml` gives an equal `config`.

    TOML has no None: such an option is left out if None is its default, otherwise written as "None".
    """
    path.write_text(tomli_w.dumps(_table(config)), encoding="utf-8")


def _table(config: Any, usual: Any = None) -> dict[str, Any]:
    """`config` as TOML values; a None is written unless `usual`, the default of its group, has it too."""
    table: dict[str, Any] = {}
    cls: Any = type(config)
    for setting in settings_of(cls):
        value, default = (
            getattr(config, setting.name),
            setting.default if usual is None else getattr(usual, setting.name),
        )
        if dataclasses.is_dataclass(value):
            table[setting.name] = _table(value, default if type(default) is type(value) else None)
        elif value is not None:
            table[setting.name] = _plain(value)
        elif default is not None:
            table[setting.name] = NONE
    return table


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
