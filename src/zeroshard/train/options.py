"""The command line of a frozen dataclass, with a TOML file as its defaults; `option_tree` describes its options."""

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from zeroshard.errors import ConfigError
from zeroshard.train.help_page import help_page, option_box
from zeroshard.train.option_names import in_options
from zeroshard.train.option_tree import Option, built, options_of
from zeroshard.train.option_values import described_values, from_text, is_list
from zeroshard.train.toml_config import load_toml

Config = TypeVar("Config")

HELP = {"-h": False, "--help": False, "--help-all": True}  # whether the help shows every option


class _WrongOption(ConfigError):
    """An option that cannot be read, with those whose help shows the way out."""

    def __init__(self, message: str, *shown: Option) -> None:
        super().__init__(message)
        self.shown = shown


def parse(cls: type[Config], argv: Sequence[str], prog: str) -> Config:
    """The options of `argv`, over those of the file that `--config FILE` names, over the defaults of `cls`.

    `--help`, and options that cannot be read or that `cls` refuses with a `ValueError` (as `ConfigError` is), print to
    the terminal and raise `SystemExit` (codes 0 and 2).

    Raises:
        ConfigError: see `load_toml`.
    """
    first = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--config", type=Path)
    try:
        known, rest = first.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        print(f"{prog}: --config has no value; it needs the path of a TOML file.", file=sys.stderr)
        raise SystemExit(2) from error
    given = None if known.config is None else load_toml(known.config, cls)
    helps = [HELP[argument] for argument in rest if argument in HELP]
    if helps:
        print(help_page(cls, given, prog, any(helps)), end="")
        raise SystemExit(0)
    try:
        _refuse_elsewhere(cls, rest)
        config: Config = built(cls, _typed(rest, options_of(cls, given)), given)
    except ValueError as error:
        print(f"{prog}: {in_options(str(error), cls, argv)}", file=sys.stderr)
        if isinstance(error, _WrongOption):
            Console(stderr=True, highlight=False).print(option_box(f"see {prog} --help", error.shown))
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


def _typed(argv: Sequence[str], options: Sequence[Option]) -> dict[tuple[str, ...], Any]:
    """The values of the options in `argv`, by the options' paths.

    Raises:
        ConfigError: an option that does not exist, or one without a value or with a wrong one.
    """
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, exit_on_error=False, argument_default=argparse.SUPPRESS
    )
    for place, option in enumerate(options):
        if option.hint is bool:
            for flag, value in zip(option.flags, (True, False), strict=True):
                parser.add_argument(flag, dest=str(place), action="store_const", const=value)
        elif option.flags:
            empties = "*" if option.default not in ((), None) else "+"  # without words it empties a default alone
            parser.add_argument(*option.flags, dest=str(place), nargs=empties if is_list(option.hint) else None)
    try:
        known, others = parser.parse_known_args([_dashed(word) for word in argv])
    except argparse.ArgumentError as error:
        flags = (error.argument_name or "").split("/")
        option = next(option for option in options if flags[0] in option.flags)
        raise _without_value(flags[-1], option, argv) from error
    texts = {int(place): found for place, found in vars(known).items()}
    positional = [place for place, option in enumerate(options) if not option.flags]
    rest = positional and is_list(options[positional[-1]].hint)  # the last positional option takes all further words
    words = [*others[: len(positional) - 1], others[len(positional) - 1 :]] if rest else others
    texts |= {place: found for place, found in zip(positional, words, strict=False) if found}
    _refuse_unknown(others, sys.maxsize if rest else len(positional), options)
    values = {options[place].path: _value(found, options[place]) for place, found in texts.items()}
    missing = [option for option in options if option.required and option.path not in values]
    if missing:
        raise _WrongOption(f"{' and '.join(_title(option) for option in missing)} must be given.", *missing)
    return values


def _without_value(flag: str, option: Option, argv: Sequence[str]) -> _WrongOption:
    """The error of an option that ends the line or stands before a word with a dash."""
    typed = next((word for word in map(_dashed, argv) if word in option.flags), flag)
    following = next((after for word, after in pairwise(map(_dashed, argv)) if word == typed), "")
    negative = re.fullmatch(r"-\.?\d.*", following)
    dashed = f" A value that begins with a dash is written {typed}={following}." if negative else ""
    return _WrongOption(f"{typed} has no value; it needs {described_values(option.hint)}.{dashed}", option)


def _dashed(word: str) -> str:
    """A word of the command line, with dashes in the name of an option."""
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if word.startswith("--") else word


def _refuse_unknown(others: Sequence[str], most: int, options: Sequence[Option]) -> None:
    """Raise `ConfigError` for an unknown option among `others`, and where they are too many for positional ones."""
    unknown = next((word.partition("=")[0] for word in others if word.startswith("-")), None)
    if unknown is None:
        if len(others) > most:
            raise ConfigError(f"{others[most]!r} belongs to no option; leave it out.")
        return
    flags = {flag: option for option in options for flag in option.flags}
    near = difflib.get_close_matches(unknown, flags, n=1, cutoff=0.7)
    near = near or sorted((flag for flag in flags if len(unknown) > 3 and flag.startswith(unknown)), key=len)[:1]
    if not near:
        raise ConfigError(f"There is no option {unknown} here; --help lists those that there are.")
    raise _WrongOption(f"There is no option {unknown} here; did you mean {near[0]}?", flags[near[0]])


def _value(found: Any, option: Option) -> Any:
    """The value of an option from its words."""
    if option.hint is bool:
        return found
    try:
        return from_text(found, option.hint)
    except ValueError as error:
        text = " ".join(found) if isinstance(found, list) else found
        wrong = f"{_title(option)}: {text!r} is not {described_values(option.hint)}."
        raise _WrongOption(wrong, option) from error


def _title(option: Option) -> str:
    return option.flags[0] if option.flags else option.name.upper()
