"""Text of numbers (sizes, counts, shares, times) and of names; an unknown number is NaN, and an en dash as text."""

import math
import re
import textwrap
from collections.abc import Sequence
from fractions import Fraction

from zeroshard.errors import ConfigError

DASH = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"
_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB")
_COUNT_UNITS = ("", "k", "M", "G", "T")


def _scaled(value: float, base: float, units: tuple[str, ...], decimals: int) -> tuple[float, str]:
    """Divide ``value`` by ``base`` until it reads below ``base`` at ``decimals`` places, or the units end."""
    for unit in units[:-1]:
        if round(abs(value), decimals) < base:
            return value, unit
        value /= base
    return value, units[-1]


def parse_bytes(size: str | int, name: str = "memory") -> int:
    """``"1.5 GB"`` -> ``1500000000``.

    Raises:
        ConfigError: no size; `name` is the setting with this value.
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMGT]i?B|B|)\s*", str(size), re.ASCII)
    number, unit = (Fraction(match[1]), _UNITS[match[2]]) if match else (Fraction(0), 0)
    if not unit or (unit == 1 and "." in str(size)):  # no fractions of a byte
        meant = re.fullmatch(r"\s*([\d.]+)\s*([kmgt])(i?)b?\s*", str(size), re.ASCII | re.IGNORECASE)
        near = f" Did you mean {meant[1]}{meant[2].upper()}{meant[3].lower()}B?" if meant else ""
        raise ConfigError(
            f"{name} is {size!r}; write bytes, or a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB.{near}"
        )
    return int(number * unit)


def check_unit(name: str, size: str | int) -> None:
    """Refuse a number without a unit that is too small for the memory of a device or of a machine.

    Raises:
        ConfigError: `name` is the setting with this value.
    """
    if str(size).strip().isdecimal() and 0 < int(size) < 2**20:
        raise ConfigError(f"{name} is {size}, which is bytes without a unit; write {size}GiB or {size}MiB.")


def shard_bytes(size: str | int, name: str) -> int:
    """The most bytes of tensors in a file, from a size such as "5GB".

    Args:
        name: of the setting.

    Raises:
        ConfigError: it is no size.
    """
    try:
        most = parse_bytes(size)
    except ConfigError:
        most = 0
    if most < 1:
        raise ConfigError(f"{name} is {size!r}; write a size such as 500MB or 5GB.")
    return most


def format_bytes(n: float) -> str:
    """``1536`` -> ``1.50 KiB``; whole bytes without decimals, everything else with two."""
    if not math.isfinite(n):
        return DASH
    value, unit = _scaled(n, 1024.0, _BYTE_UNITS, 2)
    if unit == "B":
        return _signed(f"{value:.{0 if float(value).is_integer() else 2}f} B")
    return _signed(f"{value:,.2f} {unit}")


def format_count(n: float) -> str:
    """``12345678`` -> ``12.35 M``: for headlines and bar ends; tables have the exact value."""
    if not math.isfinite(n):
        return DASH
    value, unit = _scaled(n, 1000.0, _COUNT_UNITS, 2)
    return _signed(f"{value:.2f} {unit}" if unit else f"{value:g}")


def format_exact(n: float, unit: str = "") -> str:
    """``12345.5`` -> ``12,345.5``: every digit, grouped; fractions (a formula's) to two places."""
    if not math.isfinite(n):
        return DASH
    digits = f"{n:,.0f}" if float(n).is_integer() else f"{n:,.2f}".rstrip("0").rstrip(".")
    return _signed(f"{digits} {unit}".rstrip())


def format_difference(n: float, unit: str = "") -> str:
    """``equal`` within less than one unit (formulas give fractions), else the signed difference."""
    if not math.isfinite(n):
        return DASH
    return "equal" if abs(n) < 1.0 else ("+" if n > 0 else "") + format_exact(n, unit)


def format_decimal(n: float, decimals: int = 4) -> str:
    """A plain decimal, or the dash."""
    return _signed(f"{n:.{decimals}f}") if math.isfinite(n) else DASH


def format_share(n: float) -> str:
    """``0.0312`` -> ``+3.12 %``."""
    return _signed(f"{100 * n:+.2f} %") if math.isfinite(n) else DASH


def format_seconds(seconds: float) -> str:
    """``3723`` -> ``1 h 02 min``; ``75`` -> ``1 min 15 s``; ``9.53`` -> ``9.5 s``."""
    if not math.isfinite(seconds):
        return DASH
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def format_duration(seconds: float) -> str:
    """``0.00325`` -> ``3.25 ms``; from a second on as `format_seconds` writes it."""
    if not math.isfinite(seconds) or seconds >= 1:
        return format_seconds(seconds)
    return f"{1e3 * seconds:.2f} ms"


def format_names(names: Sequence[str], most: int = 5) -> str:
    """``"'a', 'b' and 3 more"``: at most ``most`` names; "nothing" for none."""
    listed = ", ".join(map(repr, names[:most])) or "nothing"
    return listed + (f" and {len(names) - most} more" if len(names) > most else "")


def _signed(text: str) -> str:
    return MINUS + text[1:] if text.startswith("-") else text


def wrapped(text: str, columns: int) -> str:
    """A text with its lines broken at so many columns; lines of a list go on under their second column."""
    lines = []
    for line in text.splitlines():
        listed = re.match(r" +\S.*? {2,}", line)
        lines += textwrap.wrap(line, columns, subsequent_indent=" " * listed.end() if listed else "") or [""]
    return "\n".join(lines)
