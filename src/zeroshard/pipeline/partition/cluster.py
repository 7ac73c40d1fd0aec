"""A cluster as PipeDream's partitioner sees it: levels of equal components, each level with its bandwidth."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from zeroshard.errors import ConfigError
from zeroshard.text import format_bytes, parse_bytes

BITS = 8
EXAMPLE = (
    '[[level]], count = 4, gbps = 100, from the innermost level outwards, and above them memory = "16GiB" if limited'
)


@dataclass(frozen=True, slots=True)
class Level:
    """`count` components (m_k), any two of which exchange `bandwidth` bytes/s (B_k)."""

    count: int
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices in levels: those of the first are devices, a component of any other is all of the level before it.

    Attributes:
        levels: from the innermost (devices of one machine) to the outermost (PipeDream, SOSP 2019, section 3.1).
        memory_bytes: of one device; None is no limit.

    Raises:
        ConfigError: no levels, or a number out of range.
    """

    levels: tuple[Level, ...]
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.levels:
            raise ConfigError(f"A cluster needs one level or more, such as {EXAMPLE}.")
        for number, (count, bandwidth) in enumerate(((level.count, level.bandwidth) for level in self.levels), 1):
            if count < 1:
                raise ConfigError(f"Level {number} of the cluster has {count} components; it must have 1 or more.")
            if not bandwidth > 0:
                raise ConfigError(f"Level {number} of the cluster has {bandwidth} bytes/s; it must have more than 0.")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise ConfigError(
                f"The memory of a device is {self.memory_bytes} bytes; it must be 1 or more, or absent for no limit."
            )

    @classmethod
    def flat(cls, devices: int, bandwidth: float, memory_bytes: int | None = None) -> "Cluster":
        """One level: devices that all exchange `bandwidth` bytes/s."""
        return cls((Level(devices, bandwidth),), memory_bytes)

    @classmethod
    def load(cls, path: Path) -> "Cluster":
        """Read a TOML file: `memory`, and from the innermost outwards a `[[level]]` each with `count` and `gbps`.

        `gbps` is in gigabits (10^9) per second.

        Raises:
            ConfigError: the file cannot be read, or is no cluster.
        """
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"The cluster file {path} cannot be read ({error.strerror}); name one that can be read."
            ) from error
        except ValueError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}; correct it there.") from error
        try:
            return _cluster(table)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices in one component of each level, the whole cluster last: 1, m_1, m_1·m_2, …"""
        return tuple(accumulate((level.count for level in self.levels), mul, initial=1))

    @property
    def devices(self) -> int:
        """All devices."""
        return self.sizes[-1]

    def __str__(self) -> str:
        memory = "" if self.memory_bytes is None else f", {format_bytes(self.memory_bytes)} each"
        if self.devices == 1:
            return f"1 device{memory}"
        shape = " x ".join(str(level.count) for level in reversed(self.levels))
        speeds = ", then ".join(f"{level.bandwidth * BITS / 1e9:,.4g}" for level in self.levels)
        return f"{shape} devices at {speeds} Gb/s{memory}"


def _cluster(table: Mapping[str, Any]) -> Cluster:
    levels = table.get("level")
    unknown = [key for key in table if key not in ("level", "memory")]
    if unknown:
        raise ConfigError(f"{unknown[0]} is no key of a cluster; write {EXAMPLE}.")
    if not isinstance(levels, list) or not levels or not all(isinstance(level, dict) for level in levels):
        raise ConfigError(f"there is no level; write {EXAMPLE}.")
    memory = table.get("memory")
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, str | int)):
        raise ConfigError(f'memory is {memory!r}; write bytes, or a text such as "16GiB".')
    return Cluster(
        tuple(_level(number, level) for number, level in enumerate(levels, 1)),
        None if memory is None else parse_bytes(memory),
    )


def _level(number: int, table: Mapping[str, Any]) -> Level:
    if set(table) != {"count", "gbps"}:
        raise ConfigError(f"level {number} has {', '.join(table) or 'nothing'}; it must have count and gbps.")
    count, gbps = table["count"], table["gbps"]
    if type(count) is not int:
        raise ConfigError(f"level {number} has count = {count!r}; it must be a whole number.")
    if isinstance(gbps, bool) or not isinstance(gbps, int | float) or math.isnan(gbps):
        raise ConfigError(f"level {number} has gbps = {gbps!r}; it must be a number, in gigabits per second.")
    return Level(count, gbps * 1e9 / BITS)
