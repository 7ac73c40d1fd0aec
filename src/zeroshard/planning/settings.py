"""Checks that all settings share: a choice from a list, a number in a range."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from zeroshard.errors import PlanError


def check_choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Refuse a value outside of `allowed`; True and False are no numbers.

    Raises:
        PlanError: naming the setting, the value and the choices.
    """
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise PlanError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}.")


def check_flag(name: str, value: Any) -> None:
    """Refuse a value other than True and False.

    Raises:
        PlanError: naming the setting and the value.
    """
    if not isinstance(value, bool):
        raise PlanError(f"{name} is {value!r}; it must be True or False.")


def check_number(name: str, value: Any) -> None:
    """Refuse a value other than a finite number above 0.

    Raises:
        PlanError: naming the setting and the value.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise PlanError(f"{name} is {value!r}; it must be a number that is more than 0 and finite.")


def check_whole(name: str, value: Any, least: int = 1) -> None:
    """Refuse a value other than a whole number of `least` or more.

    Raises:
        PlanError: naming the setting and the value.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise PlanError(f"{name} is {value!r}; it must be a whole number of {least} or more.")


def names_of(name: str, value: Any) -> tuple[str, ...]:
    """A tuple of names.

    Raises:
        PlanError: `value` is something else.
    """
    if isinstance(value, str):
        each = tuple(part.strip() for part in value.split(","))
        raise PlanError(f"{name} is {value!r}; it must be a tuple of names, such as {each!r}.")
    if not isinstance(value, Iterable) or not all(isinstance(v, str) for v in value):
        raise PlanError(f"{name} is {value!r}; it must be a tuple of names, such as ('Block',).")
    return tuple(value)


def group_from(kind: type[Any], name: str, value: Any) -> Any:
    """A group of settings from itself, from its short form (the value of its first field), or from a table.

    Raises:
        PlanError: the table has a setting that the group lacks, or a value is refused.
    """
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        return kind(value)
    known = [field.name for field in fields(kind)]
    for key in value:
        if key not in known:
            raise PlanError(f"{name} has no setting {key!r}; its settings are {', '.join(known)}.")
    return kind(**value)


def short_form(group: Any) -> Any:
    """The value of a group's first field if the other fields have their defaults, else the group."""
    value = getattr(group, fields(group)[0].name)
    return value if type(group)(value) == group else group


def shown(settings: Any) -> str:
    """A constructor call with only the settings that differ from the defaults."""
    differing = [field.name for field in fields(settings) if getattr(settings, field.name) != field.default]
    return f"{type(settings).__name__}({', '.join(f'{name}={getattr(settings, name)!r}' for name in differing)})"


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All values of nested tables, with names such as "offload.disk"."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
