"""Values of options: their types in words, and conversions from words of a command line and values of a file."""

import contextlib
import dataclasses
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from zeroshard.errors import ConfigError
from zeroshard.train.option_tree import choices

NONE = "None"  # an absent value in a file, as on the command line
KINDS = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH"}
NOUNS = {int: "whole number", float: "number", str: "string", Path: "path"}


def check_least(options: Any, least: Mapping[str, float]) -> None:
    """Refuse numbers below the least of their options; None is no number.

    Raises:
        ConfigError: an option has one.
    """
    for name, low in least.items():
        value = getattr(options, name)
        if value is not None and not value >= low:  # nor is NaN
            raise ConfigError(f"{name} is {value}; it must be {low} or more.")


def kind_of(hint: Any) -> str:
    """The values of a type, such as "INT", "{auto,never}|PATH" or "NAME ..."; None is not shown."""
    inner = get_args(hint)
    if get_origin(hint) is Literal:
        return "{" + ",".join(str(choice) for choice in inner if choice is not None) + "}"
    if choices(hint):
        return "|".join(dict.fromkeys(kind_of(choice) for choice in inner if choice is not type(None)))
    if get_origin(hint) is tuple:
        kinds = ["NAME" if choice is str else kind_of(choice) for choice in inner if choice is not ...]
        return " ".join([*kinds, *(["..."] if ... in inner else [])])
    return KINDS.get(hint, getattr(hint, "__name__", str(hint)).upper())


def described_values(hint: Any, literal: Callable[[Any], str] = str) -> str:
    """The values of a type as words of a sentence, such as "a whole number or None".

    Args:
        literal: writes one value, as in a file or on a command line.
    """
    inner = get_args(hint)
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(literal, inner))
    if choices(hint):
        return " or ".join(described_values(choice, literal) for choice in inner)
    if get_origin(hint) is tuple and inner[1:] == (...,):
        return f"a list of {NOUNS[inner[0]]}s"
    if get_origin(hint) is tuple:
        return f"a list of {len(inner)}: " + " and ".join(described_values(choice, literal) for choice in inner)
    if hint is type(None):
        return literal(NONE)
    if hint is bool:
        return "true or false"
    return "a table" if dataclasses.is_dataclass(hint) else f"a {NOUNS[hint]}"


def default_text(value: Any) -> str:
    """A default as typed; empty for none, for an empty list and for an empty text."""
    if value in (None, (), ""):
        return ""
    return shlex.join(map(str, value)) if isinstance(value, tuple) else shlex.quote(str(value))


def from_text(text: Any, hint: Any) -> Any:
    """The value of text from a command line; of a list of texts where `is_list`.

    Raises:
        ValueError: it has another type.
    """
    return _converted(text, hint, _from_word)


def from_toml(value: Any, hint: Any) -> Any:
    """The value of a TOML file's value.

    Raises:
        ValueError: it has another type.
    """
    return _converted(value, hint, _from_toml)


def is_list(hint: Any) -> bool:
    """Whether an option takes several words."""
    return get_origin(hint) is tuple or any(is_list(choice) for choice in choices(hint))


def _converted(value: Any, hint: Any, convert: Callable[[Any, Any], Any]) -> Any:
    inner = get_args(hint)
    if choices(hint):
        if value in (NONE, [NONE]) and type(None) in inner:
            return None
        for choice in (choice for choice in inner if choice is not type(None)):
            with contextlib.suppress(ValueError):
                return _converted(value, choice, convert)
        raise ValueError(value)
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ValueError(value)
        hints = (inner[0],) * len(value) if inner[1:] == (...,) else inner
        return tuple(_converted(each, kind, convert) for each, kind in zip(value, hints, strict=True))
    return convert(value, hint)


def _from_word(word: str, hint: Any) -> Any:
    if hint is Path and not word:
        raise ValueError(word)
    if get_origin(hint) is not Literal:
        return hint(word)
    return _only(choice for choice in get_args(hint) if str(choice) == word)


def _from_toml(value: Any, hint: Any) -> Any:
    if get_origin(hint) is Literal:
        return _only(choice for choice in get_args(hint) if type(choice) is type(value) and choice == value)
    if hint is float and type(value) is int:
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    return _only([value] if type(value) is hint else [])


def _only(found: Iterable[Any]) -> Any:
    """The one value found; `ValueError` for none."""
    (value,) = found
    return value
