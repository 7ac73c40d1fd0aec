"""Round ticks and the maps from data to drawing coordinates."""

import math
from dataclasses import dataclass

from zeroshard.text import format_bytes


@dataclass(frozen=True, slots=True)
class ChartAxis:
    """A range of data with its ticks, which places grid lines and points."""

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def fraction(self, value: float) -> float:
        """Where ``value`` stands between ``low`` (0) and ``high`` (1)."""
        return (value - self.low) / (self.high - self.low)


def nice_ticks(low: float, high: float, target: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that cover [low, high], about ``target`` of them."""
    largest = max(abs(low), abs(high))
    span = high - low if high - low > 1e-9 * largest else (largest or 1.0)
    magnitude = 10.0 ** math.floor(math.log10(span / target))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= span / target * (1 - 1e-9))
    first, last = math.floor(low / step), math.ceil(high / step)
    # rounding takes off the tail that a float product leaves (0.30000000000000004)
    decimals = max(0, 1 - math.floor(math.log10(step)))
    return [round(k * step, decimals) for k in range(first, max(last, first + 1) + 1)]


def covering_axis(label: str, low: float, high: float) -> ChartAxis:
    """An axis that ends on round ticks outside the data."""
    ticks = nice_ticks(low, high)
    return ChartAxis(label, ticks[0], ticks[-1], tuple((tick, _tick_label(tick)) for tick in ticks))


def fitted_axis(label: str, low: float, high: float, target: int = 8, whole: bool = False) -> ChartAxis:
    """An axis that ends with the data, round ticks inside; ``whole`` drops ticks between integers."""
    if high <= low:
        low, high = low - 0.5, low + 0.5
    ticks = [t for t in nice_ticks(low, high, target) if low <= t <= high and not (whole and t % 1)]
    return ChartAxis(label, low, high, tuple((tick, _tick_label(tick)) for tick in ticks))


def bytes_axis(label: str, high: float) -> ChartAxis:
    """From zero to a round number of binary units (200 MiB, not 209,715,200)."""
    unit = 1024.0 ** min(max(int(math.log2(max(high, 1.0)) // 10), 0), 3)
    name = format_bytes(unit).split(" ")[1]
    ticks = nice_ticks(0.0, max(high / unit, 1.0), 4)
    return ChartAxis(
        label, 0.0, ticks[-1] * unit, tuple((tick * unit, f"{_tick_label(tick)} {name}") for tick in ticks)
    )


def _tick_label(tick: float) -> str:
    return f"{tick:,.10g}" if tick == 0 or 1e-6 <= abs(tick) < 1e10 else f"{tick:g}"
