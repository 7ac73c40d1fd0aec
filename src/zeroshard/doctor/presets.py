"""Cards by name, from `devices.toml`, and cards of one's own, from a file with the same keys.

The numbers are those of the sheets; `zeroshard.doctor.hardware` makes attainable rates of them.
"""

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from zeroshard.errors import ConfigError, PlanError
from zeroshard.text import parse_bytes

DTYPES = ("fp32", "bf16", "fp16")
MAKERS = re.compile(r"nvidia|geforce|tesla|quadro|amd|instinct|radeon|gpu")
EXAMPLE = 'memory = "24GiB", peak_tflops = { fp32 = 20, bf16 = 80 }, memory_gbytes = 800'


@dataclass(frozen=True, slots=True)
class Card:
    """A card as its sheet describes it.

    Attributes:
        name: for people.
        memory: bytes.
        peak_tflops: dense rates by dtype; fp32 is always there.
        memory_gbytes: 10^9 bytes/s of its memory.
        inside_gbytes: 10^9 bytes/s to the other cards of a node, in one direction; 0 is unknown.
        host_gbytes: 10^9 bytes/s to the host, in one direction.
        between_gbps: 10^9 bits/s of one node, in one direction.
        source: of the numbers, with the year.
    """

    name: str
    memory: int
    peak_tflops: Mapping[str, float]
    memory_gbytes: float
    inside_gbytes: float
    host_gbytes: float
    between_gbps: float
    source: str


@cache
def card_table() -> dict[str, Any]:
    """The content of `devices.toml`."""
    return tomllib.loads(files("zeroshard.doctor").joinpath("devices.toml").read_text(encoding="utf-8"))


def assumed(name: str) -> Any:
    """A number that holds for all cards which do not say otherwise."""
    return card_table()["assumed"][name]


def card_names() -> list[str]:
    """The names of the built-in cards."""
    return list(card_table()["device"])


def card_of(name: str) -> Card:
    """The built-in card of a name as people type it, or the card of a file whose name ends in `.toml`.

    Raises:
        PlanError: no such card. ConfigError: the file cannot be read, or a key of it is wrong.
    """
    if Path(name).suffix == ".toml":
        return _own_card(Path(name))
    known = known_name(name)
    if known is not None:
        return _card(known, card_table()["device"][known])
    raise PlanError(
        f"There is no device {name!r}; {_near(plain_name(name))} Others can be described in a file: "
        f"mycard.toml, with {EXAMPLE}."
    )


def known_name(name: str) -> str | None:
    """The name in `devices.toml` of a card that is called `name`; None without one."""
    return _spellings().get(plain_name(name))


def plain_name(name: str) -> str:
    """A name without case, spaces, dashes, the maker's name and units: "NVIDIA A100-SXM4-80GB" is "a100sxm480"."""
    letters = MAKERS.sub("", re.sub(r"[^a-z0-9]", "", name.casefold()))
    return re.sub(r"(\d)g(i?b)?", r"\1", letters)


def read_number(table: Mapping[str, Any], key: str, called: str = "") -> float | None:
    """The number under a key, more than 0; None where there is none.

    Args:
        called: the key's name in the error, if it is another.

    Raises:
        ConfigError: it is no such number.
    """
    number = table.get(key)
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
        raise ConfigError(f"{called or key} is {number!r}; it must be a number of more than 0, and finite.")
    return number


def refuse_unknown(table: Mapping[str, Any], keys: tuple[str, ...], what: str, example: str) -> None:
    """Raise `ConfigError` for a key that is none of `keys`."""
    unknown = [key for key in table if key not in keys]
    if unknown:
        near = get_close_matches(unknown[0], keys, n=1)
        meant = f"did you mean {near[0]}? An example: " if near else "write "
        raise ConfigError(f"{unknown[0]} is no key of {what}; {meant}{example}.")


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file.

    Raises:
        ConfigError: it cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The file {path} cannot be read ({error.strerror}); name one that can be read.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}; correct it there.") from error


@cache
def _spellings() -> dict[str, str]:
    """The name of each card by all of its plain names."""
    table = card_table()["device"]
    return {plain_name(spelt): name for name, entry in table.items() for spelt in (name, *entry.get("names", ()))}


def _near(plain: str) -> str:
    spellings = _spellings()
    near = [name for spelt, name in spellings.items() if plain and plain in spelt]
    near = near or [spellings[found] for found in get_close_matches(plain, spellings, cutoff=0.6)]
    if near:
        return f"did you mean {' or '.join(dict.fromkeys(near))}?"
    return f"the devices are {', '.join(card_names())}."


def _own_card(path: Path) -> Card:
    table = read_toml(path)
    keys = (*Card.__dataclass_fields__, "published", "names")
    try:
        refuse_unknown(table, keys, "a card", EXAMPLE)
        return _card(path.stem, {"source": f"As {path.name} says", **table})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _card(name: str, entry: Mapping[str, Any]) -> Card:
    """Check the keys of a card.

    Raises:
        ConfigError: with the key that is missing or wrong.
    """
    for key in ("memory", "peak_tflops", "memory_gbytes"):
        if key not in entry:
            raise ConfigError(f"{key} is missing; write {EXAMPLE}.")
    rates = entry["peak_tflops"]
    if not isinstance(rates, dict) or "fp32" not in rates or not set(rates) <= set(DTYPES):
        raise ConfigError(f"peak_tflops is {rates!r}; give {{ fp32 = 20 }}, and bf16 and fp16 if they differ.")
    try:
        memory = parse_bytes(entry["memory"])
    except ConfigError as error:
        raise ConfigError(f"memory: {error}") from None
    pcie = read_number(entry, "host_gbytes") or assumed("host_gbytes")
    published = f" ({entry['published']})" if "published" in entry else ""
    return Card(
        name=str(entry.get("name", name)),
        memory=memory,
        peak_tflops={dtype: read_number(rates, dtype, f"peak_tflops.{dtype}") or 0.0 for dtype in rates},
        memory_gbytes=read_number(entry, "memory_gbytes") or 0.0,
        inside_gbytes=read_number(entry, "inside_gbytes") or pcie,
        host_gbytes=pcie,
        between_gbps=read_number(entry, "between_gbps") or assumed("between_gbps"),
        source=f"{entry['source']}{published}",
    )
