"""Numbers as text. A number that is not known is NaN in this package and an en dash on the page."""

import math

DASH = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB")
_COUNT_UNITS = ("", "k", "M", "G", "T")


def _scaled(value: float, base: float, units: tuple[str, ...], decimals: int) -> tuple[float, str]:
    """Divide ``value`` by ``base`` until it reads below ``base`` at ``decimals`` places, or the units end."""
    for unit in units[:-1]:
        if round(abs(value), decimals) < base:
            return value, unit
        value /= base
    return value, units[-1]


def format_bytes(n: float) -> str:
    """``1536`` -> ``1.50 KiB``; whole bytes without decimals, everything else with two."""
    if not math.isfinite(n):
        return DASH
    value, unit = _scaled(n, 1024.0, _BYTE_UNITS, 2)
    whole = unit == "B" and float(value).is_integer()
    return _signed(f"{value:.{0 if whole else 2}f} {unit}")


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


def _signed(text: str) -> str:
    return MINUS + text[1:] if text.startswith("-") else text
